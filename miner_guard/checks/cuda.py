"""Checks whether the miner's own interpreter can use CUDA, which a working NVML does not prove."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.checks.check import Check, Snapshot
from miner_guard.checks.gpu import sliced
from miner_guard.record.words import counted

_INSTALL = (
    "install a torch build with CUDA into the miner's environment (https://pytorch.org/get-started)"
)


def cuda_checks(s: Snapshot) -> Iterator[Check]:
    """Check torch in the miner's interpreter, then each GPU that a child process tried to use."""
    if s.torch is None:
        if "torch" not in s.unread:
            # torch was not probed: without a driver or expected GPUs, the result would not matter.
            return
        answered = "torch" not in s.unanswered
        level = "critical" if s.expectation.expects_gpus and answered else "unknown"
        seen = f"torch in the miner's interpreter: {s.unread['torch']}"
        step = "run `python -c 'import torch'` with the miner's Python to see the error"
        yield Check("cuda.torch", level, seen, "torch can be imported", step)
        return
    yield _available(s)
    if s.torch["cuda_available"]:
        yield from _devices(s)


def _available(s: Snapshot) -> Check:
    assert s.torch is not None
    version, build = s.torch["torch_version"], s.torch["cuda_version"]
    if s.torch["cuda_available"]:
        seen = f"CUDA is available: torch {version}, {s.torch['gpu_count']} devices"
        return Check("cuda.available", "ok", seen)
    if not build:
        seen, step = f"CUDA is not available: torch {version} was built without CUDA", _INSTALL
    else:
        why = s.torch.get("reason") or "torch sees no device"
        seen = f"CUDA is not available: torch {version} for CUDA {build}: {why}"
        step = "fix the driver rows above, or compare the driver's CUDA version with torch's"
    if s.expectation.expects_gpus:
        limit = f"CUDA, for {counted(s.expectation.count, 'GPU')}"
        return Check("cuda.available", "critical", seen, limit, step, may_clear=bool(build))
    return Check(
        "cuda.available",
        "ok",
        f"{seen}; the settings ask for the CPU" if s.expectation.count == 0 else seen,
    )


def _devices(s: Snapshot) -> Iterator[Check]:
    assert s.torch is not None
    expected, count = s.expectation.count or 0, s.torch["gpu_count"]
    if count < expected:
        step = "NVML sees more than CUDA: check CUDA_VISIBLE_DEVICES, MIG and compute mode"
        # A process sees only one MIG slice, so the others are not lost GPUs.
        level = "warn" if count and sliced(s) else "critical"
        yield Check(
            "cuda.count",
            level,
            f"torch sees {counted(count, 'GPU')}",
            str(expected),
            step,
            may_clear=True,
        )
    for index, result in sorted(s.cuda.items()):
        error = result.get("error")
        if error and not result.get("answered", True):
            step = "watch this GPU's first steps; check dmesg if they hang"
            seen = f"cuda:{index}: {error}"
            yield Check("cuda.use", "unknown", seen, "allocation and matmul work", step)
        elif error:
            step = "this GPU can't be used: check the GPU's rows and dmesg"
            seen = f"cuda:{index}: {error}"
            limit = "allocation and matmul work"
            yield Check("cuda.use", "critical", seen, limit, step, may_clear=True)
        else:
            seen = f"cuda:{index}: allocation and matmul work, {result['seconds']:.1f} s"
            yield Check("cuda.use", "ok", seen)
