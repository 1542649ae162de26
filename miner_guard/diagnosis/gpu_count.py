"""Compares the GPUs present with the GPUs expected, and checks whether this user has permission to
open them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from miner_guard.diagnosis.check import Check, Snapshot
from miner_guard.record.words import counted
from miner_guard.system.launcher_args import number_of

_DEVICE = re.compile(r"\d+$|(?:GPU|MIG)-")
"""An entry of CUDA_VISIBLE_DEVICES: an index, or a UUID or the beginning of one."""

_SLICE = re.compile(r"(?:^|,)\s*\d+:\d+")
"""A MIG slice, given as GPU index and slice index: the form that NVIDIA's container runtime
accepts."""


def checks(s: Snapshot) -> Iterator[Check]:
    """Check the count against the expected number, the device files, CUDA_VISIBLE_DEVICES and the
    ranks."""
    yield _count(s)
    yield from _ranks(s)
    yield from _device_files(s)
    yield from _visible(s)


def _count(s: Snapshot) -> Check:
    expected = s.expectation.count
    if not s.gpu_rows and (s.nvml is None or s.nvml["state"] in ("hangs", "unreadable")):
        step = "check driver.nvml: the state of the GPUs is unknown"
        return Check("gpu.count", "unknown", "NVML did not respond", None, step)
    there = sum(1 for row in s.gpu_rows if row["state"] != "gone")
    working = sum(1 for row in s.gpu_rows if row["state"] in ("ok", "unreadable"))
    gpus = counted(there, "GPU")
    seen = gpus if working == there else f"{gpus}, {working} of them working"
    if expected is None or expected == 0:
        return Check(
            "gpu.count",
            "ok",
            seen + ("; the settings ask for none" if expected == 0 else ", none expected"),
        )
    limit = f"{expected} (according to {s.expectation.origin})"
    if working >= expected:
        return Check("gpu.count", "ok", seen, limit)
    given = container_gpus(s.env)
    if given is not None and given < expected and working >= given:
        mask = s.env["NVIDIA_VISIBLE_DEVICES"]
        seen += f"; this container was started with NVIDIA_VISIBLE_DEVICES={mask!r}"
        return Check("gpu.count", "critical", seen, limit, "start the container with --gpus all")
    step = (
        "see the rows below, nvidia-smi and dmesg; a rented machine may have lost its "
        "GPUs: restart the container"
    )
    return Check("gpu.count", "critical", seen, limit, step, may_clear=True)


def container_gpus(env: Mapping[str, str]) -> int | None:
    """Number of GPUs that NVIDIA's container runtime was told to pass to this container; None if
    the variable does not limit them.

    `none` passes none and `all` passes all. If the variable is `void`, empty or unset, the runtime
    does nothing, and CDI may have provided GPUs. MIG slices (`0:1`, `MIG-…`) are not counted.
    https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html
    """
    mask = env.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if mask == "none":
        return 0
    if mask in ("", "all", "void") or _names_slices(mask):
        return None
    return len({part.strip() for part in mask.split(",") if part.strip()})


def _names_slices(mask: str) -> bool:
    """Return whether a list of devices names MIG slices: `MIG-…`, or for the container runtime
    `0:1`."""
    return "MIG-" in mask or _SLICE.search(mask) is not None


def ranks_of(command: Sequence[str]) -> int | None:
    """N in a torchrun command's `--nproc_per_node=N`; None if it is missing or not a number."""
    return number_of(command, "--nproc-per-node")


def _ranks(s: Snapshot) -> Iterator[Check]:
    """Compare the ranks that the command starts here with the working GPUs. Empty if the settings
    ask for the CPU or the host has no GPU."""
    ranks = ranks_of(s.command)
    working = usable(s)
    if ranks is None or not working or s.expectation.count == 0:
        return
    if sliced(s):
        level = "ok" if ranks == working else "warn"
        step = {"warn": "set CUDA_VISIBLE_DEVICES for each rank: a process sees only one MIG slice"}
    else:
        level = "critical" if ranks > working else "warn" if ranks < working else "ok"
        step = {
            "critical": "lower --nproc_per_node: two ranks would share a GPU",
            "warn": "raise --nproc_per_node: some GPUs are idle",
        }
    seen = f"{counted(ranks, 'rank')} on {counted(working, 'GPU')}"
    yield Check("gpu.ranks", level, seen, "one per GPU", step.get(level), may_clear=True)


def _device_files(s: Snapshot) -> Iterator[Check]:
    files = (s.host or {}).get("nvidia_devices") or {}
    closed = sorted(path for path, usable in files.items() if not usable)
    if closed:
        level = "critical" if s.expectation.expects_gpus else "warn"
        seen = f"not readable: {', '.join(closed)}"
        limit = "readable and writable"
        step = "add this user to the group that owns them (video or render)"
        yield Check("gpu.device_files", level, seen, limit, step)


def visible(env: Mapping[str, str]) -> int | None:
    """Number of GPUs that CUDA_VISIBLE_DEVICES exposes to a process; None if it is unset.

    CUDA stops at the first entry that is neither an index nor a UUID (CUDA C++ Programming Guide,
    "CUDA Environment Variables"): `-1`, `none`, Slurm's `NoDevFiles`.
    """
    mask = env.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return None
    parts = (part.strip() for part in mask.split(","))
    return sum(1 for _ in itertools.takewhile(_DEVICE.match, parts))


def sliced(s: Snapshot) -> bool:
    """Return whether CUDA runs on MIG slices: the mask names one, or all GPUs are divided."""
    masks = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    named = any(_names_slices(s.env.get(mask, "")) for mask in masks)
    return named or (bool(s.gpu_rows) and all(row.get("mig") for row in s.gpu_rows))


def usable(s: Snapshot) -> int:
    """Number of working GPUs visible to the miner. NVML itself ignores CUDA_VISIBLE_DEVICES.

    A process sees only one MIG slice, however many it names (NVIDIA, MIG User Guide, "CUDA Device
    Enumeration").
    """
    working = sum(1 for row in s.gpu_rows if row["state"] in ("ok", "unreadable"))
    shown = visible(s.env)
    if working and sliced(s):
        return 1 if shown is None else min(1, shown)
    return working if shown is None else min(working, shown)


def _visible(s: Snapshot) -> Iterator[Check]:
    shown = visible(s.env)
    if shown is None:
        return
    short = s.expectation.expects_gpus and shown < (s.expectation.count or 0) and not sliced(s)
    mask = s.env["CUDA_VISIBLE_DEVICES"]
    seen = f"CUDA_VISIBLE_DEVICES={mask!r} exposes {counted(shown, 'GPU')}"
    limit = str(s.expectation.count) if s.expectation.expects_gpus else None
    step = "unset CUDA_VISIBLE_DEVICES or list all GPUs in it" if short else None
    yield Check("gpu.visible", "critical" if short else "ok", seen, limit, step)
