"""The timer that notes that Python issues nothing."""

from __future__ import annotations

import os
import queue
import threading

from dtorch.client.idle import IdleTimer, seconds


class _Owner:
    def __init__(self, goes_on: bool) -> None:
        self.calls: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.goes_on = goes_on
        self.timer = IdleTimer(self.fired)

    def fired(self) -> bool:
        self.calls.put(1)
        return self.goes_on


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dtorch-idle"]


def test_it_fires_once_after_each_restart() -> None:
    owner = _Owner(goes_on=True)
    assert owner.calls.empty()
    for _ in range(2):
        owner.timer.restart(seconds(0.001))
        owner.calls.get(timeout=10)
        assert owner.calls.empty()
    owner.goes_on = False
    owner.timer.stop()
    owner.calls.get(timeout=10)


def test_a_restart_puts_it_off() -> None:
    owner = _Owner(goes_on=False)
    owner.timer.restart(seconds(1000))
    owner.timer.restart(seconds(2000))
    assert owner.calls.empty()
    owner.timer.stop()
    owner.calls.get(timeout=10)


def test_it_keeps_nobody_alive_and_leaves_nothing_behind() -> None:
    before, descriptors = set(_threads()), len(os.listdir("/proc/self/fd"))
    owner = _Owner(goes_on=True)
    timer = owner.timer
    (thread,) = set(_threads()) - before
    del owner
    timer.restart(seconds(0.001))
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    timer.restart(seconds(0.001))  # of an ended one: nothing
    timer.stop()
