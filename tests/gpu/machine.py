"""The machine of the acceptance: its GPU, or a fake NVML library with one H200."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.support.fake_nvml import FakeNvml

FAKE_GPU = {
    "count": 1,
    "name": "NVIDIA H200",
    "mem.total": 150754820096,
    "power.mw": 120000,
    "power.limit.mw": 700000,
    "power.default.mw": 700000,
    "nvlinks": 0,
    # What the fake torch of the doctor's tests has; the real one on a GPU is the machine's own.
    "torch.count": 1,
    "torch.cuda": "12.4",
}
"""The state of the fake library: what an idle H200 of a rented machine answers."""


@dataclass(frozen=True)
class Machine:
    """Where the tests run."""

    cuda: bool
    """torch can use a GPU here."""

    fake: FakeNvml | None
    """The library that plays the GPU's driver; None where a GPU is there."""

    @property
    def env(self) -> Mapping[str, str]:
        """The variables with which a process sees this machine's GPU, or the fake one."""
        return {} if self.fake is None else self.fake.env

    def needs_hardware(self, what: str) -> None:
        """Skip the test if there is no GPU; `what` names the property that a CPU can't have."""
        if not self.cuda:
            pytest.skip(f"needs a GPU: {what}")


def child_environment(machine: Machine) -> dict[str, str]:
    """The environment of a command that is neither configured nor supervised by another guard."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MINER_GUARD_", "CUDA_"))}
    return {**own, **machine.env}
