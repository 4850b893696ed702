"""``DTORCH_LOG=debug`` shows what the ``dtorch`` logger has to say, on stderr; without it, logging is set up as usual."""

from __future__ import annotations

import logging
import os

LEVELS = ("debug", "info", "warning", "error", "critical")


def set_up() -> None:
    """Attach a handler of the level that ``DTORCH_LOG`` names; ValueError for one that is none."""
    level = os.environ.get("DTORCH_LOG", "")
    if not level:
        return
    if level.lower() not in LEVELS:
        raise ValueError(f"DTORCH_LOG must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("dtorch")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
