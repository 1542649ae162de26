"""What the guard says of real machines: recordings of nvidia-smi, replayed through the fake driver,
before a launch (doctor, preflight) and while a miner runs."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

from miner_guard.checks.check import Expectation, Snapshot
from miner_guard.checks.gpu import Faults
from miner_guard.checks.nvml import NvmlSampler, levels
from miner_guard.config import Config
from miner_guard.guard.preflight import judge
from tests.support.fake_nvml import FakeNvml, fake_nvml, nvml_library
from tests.support.gpu_recordings import Recording, content, gpus_of, recordings, replay

__all__ = ["fake_nvml", "nvml_library"]

pytestmark = pytest.mark.long

_HELD = "gpu.held_memory"


@pytest.mark.parametrize("recording", recordings(), ids=str)
def test_a_real_machine_is_judged_as_labelled(recording: Recording, fake_nvml: FakeNvml) -> None:
    gpus = gpus_of(content(recording), recording.part)
    assert gpus
    replay(fake_nvml, gpus)
    sampler = NvmlSampler(30, {**os.environ, **fake_nvml.env}, renew_s=0)
    try:
        sample = sampler.sample()
    finally:
        sampler.close()
    # What the file says has arrived, or an empty machine would pass for a healthy one.
    assert [row["name"] for row in sample["gpus"]] == [gpu.get("/productname", "") for gpu in gpus]

    expectation = Expectation(len(gpus), "the recording")
    snapshot = Snapshot(Config(), expectation, nvml=sample, held=(levels(sample),))
    said: defaultdict[str, list[str]] = defaultdict(list)
    for check in judge(snapshot):
        if check.check.startswith(("gpu.", "driver.")) and check.level != "ok":
            said[f"{check.check} {check.level}"].append(str(check.gpu))
    found = {f"{what} {','.join(where)}" for what, where in said.items()}
    assert found == set(recording.label), recording.why

    faults = Faults()
    events = [e for n in range(70) for e in faults.observe(sample["gpus"], 10.0 * n)]
    alarmed = {(e.fields["check"], e.fields["gpu"]) for e in events}
    running = [row.split() for row in recording.label if not row.startswith((_HELD, "gpu.mig"))]
    assert alarmed == {(name, int(gpu)) for name, _, where in running for gpu in where.split(",")}
    assert len(events) == len(alarmed), "a fault is reported once"
