"""As much of torch as the doctor queries, with as many CUDA devices as FAKE_NVML_STATE has GPUs.
For subprocesses only."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

__version__ = "2.5.1+cu124"
bfloat16 = float32 = None


def _state(key: str, otherwise: str) -> str:
    with open(os.environ["FAKE_NVML_STATE"], encoding="utf-8") as file:
        values = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    return values.get(key, otherwise)


def device(kind: str, index: int) -> int:
    return index


class _Ones:
    def __init__(self, side: int, gpu: int) -> None:
        self.side, self.gpu = side, gpu

    def __matmul__(self, other: _Ones) -> SimpleNamespace:
        if _state(f"torch.broken.{self.gpu}", ""):
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return SimpleNamespace(sum=lambda: SimpleNamespace(item=lambda: float(self.side) ** 3))


def ones(rows: int, columns: int, device: int) -> _Ones:
    return _Ones(rows, device)


def randn(rows: int, columns: int, device: int, dtype: object) -> _Ones:
    return _Ones(rows, device)


def _count() -> int:
    return int(_state("torch.count", _state("count", "4")))


def _init() -> None:
    if not _count():
        raise RuntimeError("No CUDA GPUs are available")


version = SimpleNamespace(cuda=_state("torch.cuda", "12.4"))
cuda = SimpleNamespace(
    is_available=lambda: _count() > 0,
    device_count=_count,
    init=_init,
    synchronize=lambda gpu=None: None,
    get_device_name=lambda gpu: "NVIDIA A100-SXM4-80GB",
)
distributed = SimpleNamespace(is_nccl_available=lambda: False)
inf = math.inf
