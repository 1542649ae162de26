"""Answers one question from `miner_guard.system.probe` in the miner's own interpreter. Run as a
script, because that interpreter may lack miner_guard: nothing here imports it. The request's `what`
names the question. The script creates at most one CUDA context, which ends with the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def packages(request: Mapping[str, Any]) -> dict[str, Any]:
    """This interpreter's identity, and the packages that an `import` would find."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "miner_guard": importlib.util.find_spec("miner_guard") is not None,
    }


def torch_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """torch's build and whether it can use CUDA; if it cannot, `reason` quotes torch."""
    import torch

    # A build for ROCm has its GPUs under torch.cuda.
    available, hip, reason = torch.cuda.is_available(), getattr(torch.version, "hip", None), None
    if not available and (torch.version.cuda or hip):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
    return {
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "hip_version": hip,
        "cuda_available": available,
        "gpu_count": torch.cuda.device_count() if available else 0,
        "reason": reason,
    }


def use(request: Mapping[str, Any]) -> dict[str, Any]:
    """Allocate on one GPU, multiply, and read the result back. The time excludes importing
    torch."""
    import torch

    start = time.monotonic()
    device = torch.device("cuda", int(request["device"]))
    ones = torch.ones(256, 256, device=device)
    total = float((ones @ ones).sum().item())
    if total != 256.0**3:
        raise RuntimeError(
            f"the product of two 256 x 256 matrices of ones sums to {total}, not {256.0**3}: "
            "this GPU computes wrong results"
        )
    return {"seconds": time.monotonic() - start}


_QUESTIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "packages": packages,
    "torch": torch_facts,
    "use": use,
}


def main() -> None:
    """Read the question from stdin; answer on the descriptor named in the request."""
    # Drop the script's own folder from the path: the question is what the miner would import.
    sys.path.pop(0)
    sys.path.insert(0, os.getcwd())
    request = json.load(sys.stdin)
    try:
        document: dict[str, Any] = {"value": _QUESTIONS[request["what"]](request)}
    except Exception as error:  # noqa: BLE001  the answer reports whatever the driver or torch raises
        document = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
    with os.fdopen(int(os.environ["_MINER_GUARD_PROBE_FD"]), "w") as file:
        json.dump(document, file, default=str)


if __name__ == "__main__":
    main()
