"""No launch starts on GPUs whose memory the last launch still occupies."""

from __future__ import annotations

import threading

import pytest

from miner_guard.guard.preflight import GpuMemoryWait, still_held
from miner_guard.system.clock import SystemClock

GIB = 1024**3


def test_only_growth_beyond_the_slack_is_held() -> None:
    before = {"GPU-a": 2 * GIB, "GPU-b": 0}
    assert still_held(before, {"GPU-a": 2 * GIB + 1000, "GPU-b": 9 * GIB, "GPU-new": 30 * GIB}) == {
        "GPU-b": 9 * GIB
    }


@pytest.mark.parametrize("has_gpu", [True, False])
def test_after_the_end_nothing_is_launched_and_without_a_gpu_nothing_is_waited_for(
    has_gpu: bool,
) -> None:
    readings = iter([{"GPU-a": 0}, *[{"GPU-a": 20 * GIB}] * 1000])
    made = GpuMemoryWait(
        lambda: next(readings) if has_gpu else None,
        50.0,
        SystemClock(),
        report=lambda _event: None,
        soon=lambda call: call(),
    )
    made.remember()
    proceeded = threading.Event()
    made.wait(proceeded.set)
    made.close()
    assert proceeded.wait(1.0) is not has_gpu
