"""Reads GPU memory that is not mapped; the next launch finishes. On the CPU it raises the error
that torch would raise on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.miners.rank import Rank

CLAIMED = 1 << 40
"""Bytes that the foreign array claims: far more than a GPU has."""


class Overstated:
    """An array from another library that claims to be larger than its memory.

    torch.as_tensor reads it without a copy, through
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.
    """

    def __init__(self, owner: torch.Tensor) -> None:
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (CLAIMED,),
            "typestr": "|u1",
            "data": (self.owner.data_ptr(), False),
            "version": 3,
        }


def main() -> None:
    rank = Rank()
    rank.step()
    if rank.first_time("read"):
        if not rank.on_gpu:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        few = torch.zeros(1024, dtype=torch.uint8, device=rank.device)
        claimed = torch.as_tensor(Overstated(few), device=rank.device)
        claimed[CLAIMED // 2 : CLAIMED // 2 + (1 << 20)].clone()
        torch.cuda.synchronize()
    rank.finish()


if __name__ == "__main__":
    main()
