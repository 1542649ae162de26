"""Compares the GPUs passed to a container with the expected ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miner_guard.checks.gpu import sliced
from miner_guard.checks.preflight import judge
from tests.support.snapshots import healthy


def test_slices_that_the_container_runtime_gave_are_slices() -> None:
    s = healthy(1, env={"NVIDIA_VISIBLE_DEVICES": "0:0,0:1"})
    assert sliced(s)


def test_a_revoked_gpu_is_not_taken_for_a_container_without_one() -> None:
    """With CDI the variable is `void`, and the container has GPUs."""
    nvml = {"state": "failed", "code": 999, "reason": "Unknown Error", "gpus": []}
    s = replace(healthy(4), nvml=nvml, env={"NVIDIA_VISIBLE_DEVICES": "void"})
    (check,) = (c for c in judge(s) if c.check == "driver.nvml")
    assert "daemon-reload" in (check.next_step or "")


@pytest.mark.parametrize("shown", ["", "void", "none"])
def test_a_container_that_was_given_no_gpu_is_reported(shown: str) -> None:
    nvml = {"state": "absent", "code": 12, "reason": "NVML Shared Library Not Found", "gpus": []}
    s = replace(healthy(4), nvml=nvml, env={"NVIDIA_VISIBLE_DEVICES": shown})
    (check,) = (c for c in judge(s) if c.check == "driver.nvml")
    assert (check.level, "--gpus all" in (check.next_step or "")) == ("critical", True)
    assert "NVIDIA_VISIBLE_DEVICES" in check.seen
