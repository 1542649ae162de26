"""The machine that the acceptance tests run on: its GPU, or a fake NVML library with one H200."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults.guarded import REPO
from tests.support.fake_nvml import FakeNvml

FAKE_GPU = {
    "count": 1,
    "name": "NVIDIA H200",
    "mem.total": 150754820096,
    "power.mw": 120000,
    # The fake torch in the doctor's tests has these; on a GPU, the real torch is the machine's own.
    "torch.count": 1,
    "torch.cuda": "12.4",
}
"""The state of the fake library: the answers of an idle H200 on a rented machine."""


@dataclass(frozen=True)
class Machine:
    """Where the tests run."""

    cuda: bool
    """Whether torch can use a GPU here."""

    fake: FakeNvml | None
    """The library that imitates the GPU's driver; None if there is a GPU."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables that let a process import this repository and see this
        machine's GPU, or the fake one."""
        path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**({} if self.fake is None else self.fake.env), "PYTHONPATH": path}


def child_environment(machine: Machine) -> dict[str, str]:
    """The environment for a command that no other guard configures or supervises."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MINER_GUARD_", "CUDA_"))}
    return {**own, **machine.env}
