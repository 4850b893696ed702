"""Machines that are short of something: a fallback that works, or an error that says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .scripts import SOON, running, succeeds, until

CODE = """
x = dtorch.distribute_tensor(torch.ones(1 << 20), mesh, shard)
say((x + x).redistribute(mesh, replicate).to_torch().sum().item())
"""


def limited(name: str, value: int) -> str:
    return f"import resource; resource.setrlimit(resource.{name}, ({value}, {value}))\n"


@pytest.mark.parametrize("place", ["/nowhere/at/all", "/proc", "long"])
def test_a_temporary_directory_that_cannot_be_used(place: str, tmp_path: Path) -> None:
    if place == "long":
        place = str(tmp_path / ("long" * 30))
        os.mkdir(place)
    assert succeeds(CODE, env={"TMPDIR": place}) == "2097152.0\n"


def test_few_descriptors_are_enough() -> None:
    assert succeeds(limited("RLIMIT_NOFILE", 64) + CODE) == "2097152.0\n"


@pytest.mark.parametrize(("limit", "value"), [("RLIMIT_NOFILE", 12), ("RLIMIT_AS", 1 << 30)])
def test_what_the_system_refuses_is_said(limit: str, value: int) -> None:
    """No hang, no crash: the right answer, or an exception of Python's, the system's or ours; and nothing left behind."""
    with running(limited(limit, value) + CODE) as script:
        status, out, err = script.finish()
        assert (status, out, err) == (0, "2097152.0\n", "") or (status == 1 and "Error" in err), (status, out, err)
        assert until(lambda: not script.left(), SOON), script.left()


def test_a_full_dev_shm_does_not_matter() -> None:
    """Shared memory is anonymous. Needs a mount namespace, which only root may make."""
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$0" "$@"']
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("cannot mount another /dev/shm here")
    assert succeeds("open('/dev/shm/full', 'w').write('x' * 4096)\n" + CODE, under=mount) == "2097152.0\n"


def test_the_shared_memory_goes_with_the_cluster_and_needs_no_collection() -> None:
    code = """
import gc
gc.disable()
def held():
    opened = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd" in os.readlink(fd) for fd in opened if os.path.lexists(fd))
for _ in range(3):
    dtorch.ones(1 << 20, device_mesh=mesh, placements=shard).to_torch()
    dtorch.shutdown()
    say(held())
    dtorch.init()
"""
    assert succeeds(code) == "0\n0\n0\n"
