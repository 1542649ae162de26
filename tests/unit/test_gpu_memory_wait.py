"""No launch starts on GPUs whose memory the last launch still occupies."""

from __future__ import annotations

import threading

from miner_guard.guard.gpu_memory_wait import GpuMemoryWait, held
from miner_guard.record.events import Event
from miner_guard.system.clock import SystemClock

GIB = 1024**3


class Gpus:
    """Successive readings; the last one repeats."""

    def __init__(self, *readings: dict[str, int] | None) -> None:
        self.readings = list(readings)

    def read(self) -> dict[str, int] | None:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def settle(gpus: Gpus, seconds: float) -> tuple[GpuMemoryWait, list[Event]]:
    events: list[Event] = []
    made = GpuMemoryWait(
        gpus.read, seconds, SystemClock(), report=events.append, soon=lambda call: call()
    )
    made.remember()
    return made, events


def test_only_growth_beyond_the_slack_is_held() -> None:
    before = {"GPU-a": 2 * GIB, "GPU-b": 0}
    assert held(before, {"GPU-a": 2 * GIB + 1000, "GPU-b": 9 * GIB, "GPU-new": 30 * GIB}) == {
        "GPU-b": 9 * GIB
    }


def test_without_a_gpu_nothing_is_waited_for() -> None:
    made, _ = settle(Gpus(None), 50.0)
    proceeded: list[bool] = []
    made.wait(lambda: proceeded.append(True))
    assert proceeded == [True]


def test_the_launch_waits_until_the_memory_is_back() -> None:
    made, events = settle(Gpus({"GPU-a": 0}, {"GPU-a": 20 * GIB}, {"GPU-a": GIB // 4}), 50.0)
    proceeded = threading.Event()
    made.wait(proceeded.set)
    assert proceeded.wait(10)
    assert not events


def test_memory_that_stays_held_is_reported_and_not_waited_for_forever() -> None:
    made, events = settle(Gpus({"GPU-a": 0}, {"GPU-a": 20 * GIB}), 0.1)
    proceeded = threading.Event()
    made.wait(proceeded.set)
    assert proceeded.wait(10)
    assert "GPU-a 20.0 GB" in events[0].fields["what"]


def test_after_the_end_nothing_is_launched() -> None:
    made, _ = settle(Gpus({"GPU-a": 0}, {"GPU-a": 20 * GIB}), 50.0)
    proceeded = threading.Event()
    made.wait(proceeded.set)
    made.close()
    assert not proceeded.wait(1.0)
