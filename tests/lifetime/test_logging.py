"""What dtorch has to say goes through ``logging``; ``DTORCH_LOG=debug`` shows programs, plans and messages."""

from __future__ import annotations

from .scripts import run, succeeds

CODE = """
import logging
x = dtorch.ones((4, 4), device_mesh=mesh, placements=shard)
y = (x @ x).redistribute(mesh, replicate).to_torch()
say(logging.getLogger("dtorch").handlers, logging.getLogger().handlers)
"""


def test_silent_unless_asked() -> None:
    assert succeeds(CODE) == "[] []\n"


def test_debug_shows_programs_plans_and_messages() -> None:
    status, out, err = run(CODE, env={"DTORCH_LOG": "debug"})
    assert status == 0
    assert "StreamHandler" in out
    for said in ("program", "aten.mm.default", "plan", "Shard(dim=0)", "send", "workers"):
        assert said in err, (said, err)
