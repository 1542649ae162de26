"""Answers one question from `miner_guard.system.probe` in the miner's own interpreter. Run as a
script, because that interpreter may lack miner_guard: nothing here imports it. The request's `what`
names the question. The script creates at most one CUDA context, which ends with the process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

_MATMUL_SIDE = 8192
_MATMUL_S = 3.0
_MAX_ALL_REDUCE = 256 * 1024**2


def packages(request: Mapping[str, Any]) -> dict[str, Any]:
    """This interpreter's identity, and the packages that an `import` would find."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "miner_guard": importlib.util.find_spec("miner_guard") is not None,
        "pynvml_shim": _version("pynvml"),
        "nvidia_ml_py": _version("nvidia-ml-py"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """torch's build and whether it can use CUDA; if it cannot, `reason` quotes torch."""
    import torch

    available, reason = torch.cuda.is_available(), None
    if not available and torch.version.cuda:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
    return {
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "cuda_available": available,
        "gpu_count": torch.cuda.device_count() if available else 0,
        "nccl": _nccl(torch) if available else None,
        "reason": reason,
    }


def _nccl(torch: Any) -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


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


def matmul(request: Mapping[str, Any]) -> dict[str, Any]:
    """Best rate of a bf16 matmul on one GPU over a few seconds, in TFLOP/s (10^12 floating-point
    operations per second)."""
    import torch

    device = torch.device("cuda", int(request["device"]))
    side = int(request.get("side", _MATMUL_SIDE))
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    best, end = 0.0, time.monotonic() + float(request.get("seconds", _MATMUL_S))
    torch.cuda.synchronize(device)
    while time.monotonic() < end or best == 0.0:
        start = time.perf_counter()
        for _ in range(5):
            a @ a
        torch.cuda.synchronize(device)
        best = max(best, 5 * 2 * side**3 / (time.perf_counter() - start) / 1e12)
    return {"tflops": best, "name": torch.cuda.get_device_name(device)}


def all_reduce(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure an all_reduce over one process per GPU, or two on the CPU: bus bandwidth in 10^9
    bytes/s.

    Bus bandwidth is size / time * 2 (n - 1) / n, as nccl-tests computes it.
    """
    ranks = int(request["ranks"])
    with tempfile.TemporaryDirectory(prefix="miner-guard-") as folder:
        environment = {**os.environ, "_ALL_REDUCE": json.dumps({**request, "folder": folder})}
        children = [
            subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), str(rank)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        last_words = [
            (child.communicate()[1].strip().splitlines() or ["it printed nothing"])[-1]
            for child in children
        ]
        codes = [child.returncode for child in children]
        if any(codes):
            raise RuntimeError(
                f"its ranks exited with {codes}: {'; '.join(dict.fromkeys(last_words))}"
            )
        with open(os.path.join(folder, "result.json"), encoding="utf-8") as file:
            result: dict[str, Any] = json.load(file)
    return result


def _one_rank(rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    request = json.loads(os.environ["_ALL_REDUCE"])
    ranks, on_gpu = int(request["ranks"]), bool(request["cuda"])
    if on_gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(request["folder"], "store"), ranks)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=float(request["timeout_s"]))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout
    )
    size = _MAX_ALL_REDUCE if on_gpu else 16 * 1024**2
    data = torch.ones(size // 4, device="cuda" if on_gpu else "cpu")
    best = float("inf")
    for _ in range(6):
        data.fill_(1)
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    if float(data[0].item()) != ranks:
        raise RuntimeError(f"all_reduce of ones over {ranks} ranks gave {float(data[0].item())}")
    if rank == 0:
        rate = size / best * 2 * (ranks - 1) / ranks / 1e9
        answer = {"backend": dist.get_backend(), "ranks": ranks, "bytes": size, "bus_gb_s": rate}
        with open(os.path.join(request["folder"], "result.json"), "w", encoding="utf-8") as file:
            json.dump(answer, file)
    dist.barrier()
    dist.destroy_process_group()


_QUESTIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "packages": packages,
    "torch": torch_facts,
    "use": use,
    "matmul": matmul,
    "all_reduce": all_reduce,
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
    if len(sys.argv) == 2:
        _one_rank(int(sys.argv[1]))
    else:
        main()
