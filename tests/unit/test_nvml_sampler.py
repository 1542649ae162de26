"""The NVML child with a fake library: a GPU that hangs or is lost does not affect the others, and
no call outlasts its deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from miner_guard.checks.nvml import NvmlSampler
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library

__all__ = ["fake_nvml", "nvml_library"]


@pytest.fixture
def sampler(fake_nvml: FakeNvml) -> Iterator[NvmlSampler]:
    made = NvmlSampler(30, {**os.environ, **fake_nvml.env}, renew_s=0)
    yield made
    made.close()


def states(sample: Any) -> list[str]:
    return [row["state"] for row in sample["gpus"]]


def xids(sample: Any) -> list[list[int]]:
    return [row["xids"] for row in sample["gpus"]]


def test_all_fields_of_a_healthy_gpu_are_read(sampler: NvmlSampler) -> None:
    sample = sampler.sample()
    assert (sample["state"], sample["driver"]) == ("ok", "550.163.01")
    assert sample["cuda_driver"] == "12.4"
    row = sample["gpus"][2]
    assert row["memory_used_bytes"] == 4 << 20
    assert (row["temperature_c"], row["power_w"], row["pcie_width"]) == (55, 310.0, 16)
    # A value that this machine lacks is null with its reason, and affects nothing else.
    assert row["fabric_waits"] is None
    assert set(row["unread"]) == {"fabric_waits"}
    levels = sampler.memory_levels()
    assert levels is not None
    assert set(levels.values()) == {4 << 20}


def test_an_unknown_error_of_a_side_field_condemns_no_gpu(
    sampler: NvmlSampler, fake_nvml: FakeNvml
) -> None:
    """The fabric's state must not be taken for the GPU's own: four healthy GPUs would look
    broken."""
    fake_nvml.set({"fail.nvmlDeviceGetPowerUsage.0": 999})
    sample = sampler.sample()
    assert states(sample) == ["ok"] * 4
    assert "power_w" in sample["gpus"][0]["unread"]
    fake_nvml.set({"fail.nvmlDeviceGetPowerUsage.1": 26})
    deprecated = sampler.sample()["gpus"][1]
    assert deprecated["unread"]["power_w"] == "Not Supported", "of a driver that dropped the call"
    fake_nvml.set({"fail.nvmlDeviceGetPowerUsage.0": None, "fail.*.2": 999})
    assert states(sampler.sample()) == ["ok", "ok", "unknown", "ok"]


@pytest.mark.parametrize(
    ("loss", "state"), [({"count": 3}, "gone"), ({"fail.*.3": 15}, "lost")], ids=["gone", "lost"]
)
def test_a_lost_gpu_keeps_its_name_and_the_event_that_explains_it_and_can_return(
    sampler: NvmlSampler, fake_nvml: FakeNvml, loss: dict[str, object], state: str
) -> None:
    """A GPU that fell off the bus (Xid 79) no longer has a row or a name when its event is read."""
    sampler.sample()
    fake_nvml.set({"xid.3": 79, **loss})
    sample = sampler.sample()
    assert states(sample) == ["ok", "ok", "ok", state]
    assert xids(sample) == [[], [], [], [79]]
    assert sample["gpus"][3]["uuid"].endswith("3")
    assert sample["gpus"][3]["memory_used_bytes"] is None
    assert sample["gpus"][0]["memory_used_bytes"] == 4 << 20
    again = sampler.sample()
    assert again["gpus"][3]["uuid"].endswith("3"), "by a child that never saw the GPU well"
    assert xids(again) == [[], [], [], []]
    fake_nvml.set({"count": 4, "fail.*.3": None})
    assert states(sampler.sample()) == ["ok"] * 4


@pytest.mark.parametrize("gpu", [0, 3])
def test_a_call_that_hangs_is_named_and_hides_no_other_gpu(
    sampler: NvmlSampler, fake_nvml: FakeNvml, gpu: int
) -> None:
    sampler.sample()
    fake_nvml.set({f"hang.nvmlDeviceGetPowerUsage.{gpu}": 600})
    start = time.monotonic()
    sample = sampler.sample(6)
    assert time.monotonic() - start < 60, "6 s are meant; the call hangs for 600"
    assert states(sample) == ["hangs" if i == gpu else "ok" for i in range(4)]
    assert "power_w has not returned" in sample["gpus"][gpu]["error"]
    assert sample["gpus"][gpu]["uuid"].endswith(str(gpu))
    assert states(sampler.sample(6)) == states(sample)
    fake_nvml.set({f"hang.nvmlDeviceGetPowerUsage.{gpu}": None})
    sampler._pause_s = 0.0
    assert states(sampler.sample()) == ["ok"] * 4


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        *(({"fail.init": code}, "failed", "") for code in (9, 18, 999)),
        ({"fail.init": 12}, "absent", ""),
        ({"hang.init": 600}, "hangs", "nvmlInit has not returned for 3 s"),
    ],
)
def test_failed_initialisations_are_distinguished(
    sampler: NvmlSampler, fake_nvml: FakeNvml, fault: dict[str, object], state: str, reason: str
) -> None:
    fake_nvml.set(fault)
    start = time.monotonic()
    sample = sampler.sample(3)
    assert time.monotonic() - start < 60, "3 s are meant; a call that hangs does so for 600"
    assert (sample["state"], sample["gpus"]) == (state, [])
    assert sample["reason"]
    assert not reason or sample["reason"] == reason
    assert sample.get("code") == fault.get("fail.init")
    if state != "hangs":
        assert sampler.memory_levels() is None
        fake_nvml.set({"fail.init": None})
        assert sampler.sample()["state"] == "ok"


def test_an_xid_is_reported_once_to_its_own_gpu_also_beside_a_lost_one(fake_nvml: FakeNvml) -> None:
    fake_nvml.set({"fail.*.1": 15})
    sampler = NvmlSampler(30, {**os.environ, **fake_nvml.env})
    try:
        sampler.sample()
        fake_nvml.set({"xid.2": 79})
        assert sampler.memory_levels(), "which takes no events"
        assert xids(sampler.sample()) == [[], [], [79], []]
        assert xids(sampler.sample()) == [[], [], [], []]
    finally:
        sampler.close()


def test_a_child_that_is_killed_is_started_again_and_reported_once(sampler: NvmlSampler) -> None:
    """A child that dies at every sample must be reported rather than restarted forever in
    silence."""
    ends: list[str] = []
    sampler.on_end = ends.append
    for state in ("ok", "ok", "unreadable"):
        sample = sampler.sample()
        assert sample["state"] == state
        if sampler._child is not None:
            sampler._child.kill()
            sampler._child.wait()
    assert "exited with -9; the next try is in " in str(sample["reason"])
    assert ends == ["code -9"]
