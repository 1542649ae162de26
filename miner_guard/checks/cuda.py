"""Checks whether the miner's own interpreter can use CUDA, which a working NVML does not prove.
With `--deep`, also how fast: each GPU's matmul against its siblings and the data sheet,
and all_reduce's bandwidth."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from miner_guard.checks.check import Check, Snapshot
from miner_guard.checks.gpu import sliced
from miner_guard.config.loading import read_toml
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


SIBLING_SHARE = 0.9
"""A GPU that is 10 % slower than its siblings is a straggler (superbench)."""

DATASHEET_SHARE = 0.6
"""A healthy A100 reaches 271 of 312 TFLOP/s, an H100 about 700 of 989; a lower share points to
throttling or a fault."""


@functools.cache
def _datasheet() -> tuple[Mapping[str, Any], ...]:
    return tuple(read_toml(Path(__file__).with_name("datasheet.toml"))["gpu"])


_OTHERS = ("MIG", "Laptop", "Max-Q")
"""Substrings of the names of GPU slices, and of cards that merely share a name with one in the
data sheet."""


def datasheet_of(name: str | None) -> Mapping[str, Any]:
    """The data sheet row for a GPU name; empty for an unknown model."""
    if not name or any(word in name for word in _OTHERS):
        return {}
    return next((row for row in _datasheet() if row["name"] in name), {})


def speed_checks(s: Snapshot) -> Iterator[Check]:
    """The deep speed_checks; empty unless requested."""
    if s.deep is None:
        if "deep" in s.unread:
            yield Check(
                "deep", "unknown", s.unread["deep"], None, "run miner-guard doctor --deep again"
            )
        return
    yield from _matmul(s.deep.get("matmul") or {})
    yield from _all_reduce(s.deep.get("all_reduce"), s)


def _matmul(results: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    rates = {index: r["tflops"] for index, r in results.items() if r.get("tflops")}
    middle = median(rates.values()) if rates else 0.0
    for index, result in sorted(results.items()):
        if index not in rates:
            seen = f"cuda:{index}: {result.get('error')}"
            step = "check the GPU's rows and dmesg"
            yield Check("deep.matmul", "critical", seen, "a matmul runs", step)
            continue
        rate = rates[index]
        sheet = datasheet_of(result.get("name")).get("bf16_tflops")
        slow = len(rates) > 1 and rate < SIBLING_SHARE * middle
        low = sheet is not None and rate < DATASHEET_SHARE * sheet
        of = f", {rate / sheet:.0%} of the data sheet's {sheet:.0f}" if sheet else ""
        yield Check(
            "deep.matmul",
            "warn" if slow or low else "ok",
            f"cuda:{index}: {rate:.0f} TFLOP/s bf16{of}",
            f"at least {SIBLING_SHARE:.0%} of the siblings' {middle:.0f}",
            "it is slowing down all ranks: check its clocks, temperature and power limit"
            if slow or low
            else None,
        )


def _all_reduce(result: Mapping[str, Any] | None, s: Snapshot) -> Iterator[Check]:
    if result is None:
        return
    if error := result.get("error"):
        step = (
            "collectives do not work on this node: check /dev/shm, the driver, and the output "
            "with NCCL_DEBUG=INFO"
        )
        yield Check("deep.all_reduce", "critical", f"all_reduce: {error}", "it completes", step)
        return
    rate = result["bus_gb_s"]
    names = {row.get("name") for row in s.gpu_rows}
    minimum = (
        min((datasheet_of(n).get("bus_gb_s", 0) for n in names), default=0)
        if result["backend"] == "nccl"
        else 0
    )
    low = rate < minimum
    size = f"{result['bytes'] / 1024**2:.0f} MB"
    seen = f"{result['backend']}, {result['ranks']} ranks, {size}: bus bandwidth {rate:.1f} GB/s"
    advice = (
        "check the NVLink and PCIe rows, NCCL_P2P_DISABLE, and the topology (nvidia-smi topo -m)"
    )
    limit = f"at least {minimum} GB/s" if minimum else "it completes"
    yield Check("deep.all_reduce", "warn" if low else "ok", seen, limit, advice if low else None)
