"""How the workers are."""

from __future__ import annotations

import dataclasses

import torch

from . import runtime


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as the client sees it.

    Attributes:
        pid: its process id.
        behind: commands sent that it has yet to run.
        state: ``"running"``, ``"stopped"`` (by SIGSTOP or a debugger: it answers when it goes on) or ``"lost"``.
    """

    pid: int
    behind: int
    state: str


def worker_status() -> dict[torch.device, WorkerStatus]:
    """How the worker of each device in use is. Asks nobody and waits for nothing, so it answers when a worker does not.

    >>> dtorch.worker_status()  # doctest: +SKIP
    {device(type='cpu', index=0): WorkerStatus(pid=4242, behind=0, state='running')}
    """
    controller = runtime.current()
    if controller is None:
        return {}
    found = controller.engine.workers()
    return {device: WorkerStatus(*found[device.index]) for device in runtime.devices() if device.index in found}
