"""Checks the driver, the number of GPUs, each GPU's state and the memory held before the launch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miner_guard.checks.check import Check, Snapshot, gib
from miner_guard.incidents import xids
from miner_guard.record.words import counted
from miner_guard.system.launcher_args import number_of

_REVOKED = (
    "`systemctl daemon-reload` on the host cuts running containers off from their GPUs: restart "
    "the container"
)

_NO_GPUS = ("", "void", "none")
"""Values for which NVIDIA's container runtime adds no GPU (NVIDIA Container Toolkit, "Specialized
configurations with Docker"). A container that got its GPUs through CDI also has `void`, so the
value counts only if NVML found no driver."""

_NO_DRIVER_HERE = (9, 12)

ERRORS = {
    9: (
        "the NVIDIA driver is not loaded",
        "load it (modprobe nvidia) or reboot; in a container, start it with --gpus",
    ),
    12: (
        "libnvidia-ml.so.1 is missing",
        "install the NVIDIA driver; in a container, start it with --gpus all",
    ),
    18: (
        "driver and library versions differ: the driver was updated while loaded",
        "reboot the node, or reload the driver",
    ),
    999: ("NVML reports Unknown Error", f"{_REVOKED}; otherwise check dmesg for NVRM"),
    4: ("no permission to talk to the driver", "check the permissions of /dev/nvidiactl"),
}
"""nvmlReturn_t of a failed initialisation: its meaning and the fix (nvml.h)."""


def driver_checks(s: Snapshot) -> Iterator[Check]:
    """Check NVML's state and the driver's version."""
    if s.nvml is None:
        step = "run miner-guard doctor again"
        yield Check("driver.nvml", "unknown", s.unread.get("nvml", "not read"), None, step)
        return
    yield _nvml_state(s)
    yield from _cuda_version(s)


def _nvml_state(s: Snapshot) -> Check:
    assert s.nvml is not None
    state, reason = s.nvml["state"], s.nvml.get("reason")
    if state == "ok":
        gpus = counted(s.nvml["count"], "GPU")
        seen = f"driver {s.nvml['driver']}, CUDA {s.nvml['cuda_driver']}, {gpus}"
        return Check("driver.nvml", "ok", seen)
    if state == "absent" and not s.expectation.expects_gpus:
        return Check("driver.nvml", "ok", "no NVIDIA driver: this is a CPU machine")
    if state == "hangs":
        # A probe without an answer proves nothing about the GPUs; if the miner cannot use them, it
        # reports that itself.
        step = "check dmesg for NVRM and Xid; if nvidia-smi hangs as well, reboot the node"
        limit = "a response within the deadline"
        return Check("driver.nvml", "unknown", f"NVML hangs: {reason}", limit, step)
    words, step = ERRORS.get(
        s.nvml.get("code") or 0, (str(reason), "run nvidia-smi and read its message")
    )
    shown = s.env.get("NVIDIA_VISIBLE_DEVICES")
    if shown in _NO_GPUS and s.nvml.get("code") in _NO_DRIVER_HERE:
        words = f"this container has no GPU: NVIDIA_VISIBLE_DEVICES={shown!r}"
        step = "start it with --gpus all, or with NVIDIA_VISIBLE_DEVICES=all and the nvidia runtime"
    level = "critical" if state != "unreadable" else "unknown"
    return Check(
        "driver.nvml", level, f"{words} (NVML: {reason})", "NVML initialises", step, may_clear=True
    )


def _cuda_version(s: Snapshot) -> Iterator[Check]:
    build = (s.torch or {}).get("cuda_version")
    driver = (s.nvml or {}).get("cuda_driver")
    if not build or not driver:
        return
    # CUDA's minor version compatibility: a driver runs newer minor builds of the same major
    # version.
    older = _major(driver) < _major(build)
    seen = f"torch was built for CUDA {build}; the driver supports CUDA up to {driver}"
    limit = "a driver that supports torch's CUDA major version or a newer one"
    step = "update the driver, or install a torch build for CUDA " + driver if older else None
    yield Check("driver.cuda_version", "critical" if older else "ok", seen, limit, step)


def _major(version: str) -> int:
    return int(version.split(".", 1)[0])


_DEVICE = re.compile(r"\d+$|(?:GPU|MIG)-")
"""An entry of CUDA_VISIBLE_DEVICES: an index, or a UUID or the beginning of one."""

_SLICE = re.compile(r"(?:^|,)\s*\d+:\d+")
"""A MIG slice, given as GPU index and slice index: the form that NVIDIA's container runtime
accepts."""


def count_checks(s: Snapshot) -> Iterator[Check]:
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


HELD_BYTES = 1024**3
"""An idle GPU uses a few megabytes; a bare CUDA context 0.3 to 0.6 GB."""

HELD_SHARE = 0.5
"""Once this share of the GPU is in use, the miner is unlikely to fit."""


def held_memory_checks(s: Snapshot) -> Iterator[Check]:
    """Judge each GPU by its lowest reading: an exiting process frees its memory between
    readings."""
    for row in s.gpu_rows:
        levels = [reading[row["uuid"]] for reading in s.held if row.get("uuid") in reading]
        if not levels:
            continue
        held = min(levels)
        total = row.get("memory_total_bytes") or 0
        if held < HELD_BYTES:
            seen = f"GPU {row['index']}: {gib(held)} in use"
            yield Check("gpu.held_memory", "ok", seen, gib(HELD_BYTES), None, row["index"])
            continue
        much = bool(total) and held > HELD_SHARE * total and s.expectation.count != 0
        level = "critical" if much else "warn"
        seen = (
            f"GPU {row['index']}: {gib(held)} of {gib(total)} held before the launch, "
            f"in {len(levels)} readings"
        )
        step = (
            "an orphan from an earlier run, or another tenant: find it with nvidia-smi and kill it"
        )
        yield Check(
            "gpu.held_memory", level, seen, gib(HELD_BYTES), step, row["index"], may_clear=True
        )


Row = Mapping[str, Any]

BAD_THROTTLE = 0x8 | 0x40 | 0x80
"""HW slowdown, HW thermal slowdown, HW power brake; idle and the software power cap are routine."""

_ABSENT = frozenset({"Not Supported", "Function Not Found"})
"""Reasons indicating that this GPU model or driver lacks a field."""

COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

UNDER_LOAD = 0.5
"""Idle PCIe links slow down, so width and generation are judged only at or above this
utilisation."""

_LINK_STEP = "check the fabric manager and nvidia-smi nvlink -s"

STATES = {
    "lost": (
        "is lost: it has fallen off the bus",
        "drain the node and reboot it; if the GPU is lost again, have it replaced",
    ),
    "reset_required": (
        "must be reset",
        "stop the processes that use it, then run nvidia-smi --gpu-reset, or reboot",
    ),
    "unknown": (
        "reports Unknown Error",
        "access to it was revoked, or it failed: restart the container, then the node",
    ),
    "hangs": ("hangs the driver", "check dmesg for Xid errors; a reboot is likely needed"),
    "gone": ("is no longer there", "check dmesg; a reboot or a new machine is needed"),
}


def gpu_checks(s: Snapshot) -> Iterator[Check]:
    """Check all GPUs. If the settings ask for the CPU, a GPU fault is only a warning."""
    yield from _peers(s.gpu_rows)
    yield from links_down(s.gpu_rows)
    softened = s.expectation.count == 0
    for row in s.gpu_rows:
        for check in of_row(row):
            if softened and check.level == "critical":
                check = Check(
                    check.check, "warn", check.seen, check.limit, check.next_step, check.gpu
                )
            yield check


def _peers(rows: list[Row]) -> Iterator[Check]:
    """Check peer-to-peer access. If no pair has it, the machine does not support it; if only some
    pairs lack it, that is a fault."""
    counts = {row["index"]: row["peers"] for row in rows if row.get("peers") is not None}
    if len(counts) < 2:
        return
    commonest = max(counts.values())
    short = sorted(i for i, n in counts.items() if n < commonest)
    if short:
        seen = (
            f"GPU {', '.join(map(str, short))}: fewer peers than the others, which "
            f"reach {commonest}"
        )
        step = "check nvidia-smi topo -p2p r, the PCIe slots and the IOMMU"
        yield Check("gpu.peers", "warn", seen, "the same for all", step)
    else:
        seen = (
            f"each GPU reaches {commonest} of the other {len(counts) - 1} directly"
            if commonest
            else "no peer-to-peer access"
        )
        yield Check(
            "gpu.peers",
            "ok",
            seen + ("" if commonest else ": ranks communicate through host memory"),
        )


def of_row(row: Row) -> Iterator[Check]:
    """All checks of one GPU."""
    index = row["index"]
    if row["state"] != "ok":
        words, step = STATES.get(
            row["state"], ("is not readable", "check permissions, then nvidia-smi")
        )
        level = "unknown" if row["state"] == "unreadable" else "critical"
        seen = f"GPU {index} {words} ({row['error']})"
        yield Check("gpu.state", level, seen, "responds", step, index, may_clear=True)
        # Xid 79 accompanies the loss of the GPU that it explains.
        yield from _xid(row)
        return
    yield _readable(row)
    for judge in (
        _ecc,
        _remap,
        _recovery,
        _xid,
        _throttle,
        _temperature,
        _power,
        _pcie,
        _nvlink,
        _fabric,
    ):
        yield from judge(row)
    yield from _modes(row)


def _readable(row: Row) -> Check:
    unread = row.get("unread") or {}
    # A feature that the model lacks needs no report; a withheld value does.
    withheld = {name: why for name, why in unread.items() if why not in _ABSENT}
    name = f"GPU {row['index']} {row.get('name') or ''}".strip()
    if withheld:
        sample = next(iter(withheld.values()))
        seen = f"{name}: not readable: {', '.join(sorted(withheld))} ({sample})"
        step = (
            "if this is a container, give it access on the host; the checks that need these values "
            "are skipped"
        )
        return Check("gpu.state", "unknown", seen, None, step, row["index"])
    return Check("gpu.state", "ok", f"{name} responds", None, None, row["index"])


def _ecc(row: Row) -> Iterator[Check]:
    count = row.get("ecc_uncorrected")
    if count is not None:
        step = "results may be wrong: drain the GPU, reset it, and watch for a recurrence"
        seen = f"{count} uncorrected ECC errors since the last reset"
        yield _judged(row, "gpu.ecc", count > 0, seen, limit="0", step=step, level="critical")


def _remap(row: Row) -> Iterator[Check]:
    if row.get("remap_pending") is None:
        return
    if row["remap_failed"]:
        yield _row_check(
            row,
            "gpu.row_remap",
            "critical",
            "row remapping failed",
            limit="none",
            step="have the GPU replaced",
        )
    elif row["remap_pending"]:
        step = "reset the GPU or reboot for it to take effect"
        yield _row_check(
            row, "gpu.row_remap", "critical", "a row remap is pending", limit="none", step=step
        )
    else:
        seen = f"{row['rows_uncorrected']} rows remapped for uncorrected errors"
        yield _row_check(row, "gpu.row_remap", "ok", seen, limit="none pending")


def _recovery(row: Row) -> Iterator[Check]:
    action = row.get("recovery_action")
    if action is not None:
        seen = f"the driver recommends: {action}"
        yield _judged(
            row,
            "gpu.recovery_action",
            action != "none",
            seen,
            limit="none",
            step=action,
            level="critical",
        )


def _xid(row: Row) -> Iterator[Check]:
    for number in dict.fromkeys(row.get("xids") or ()):
        known = xids.of_number(number)
        if known is None:
            words, step = "not in NVIDIA's Xid catalogue", "check dmesg"
        else:
            words, step = f"{known.meaning}; caused by {known.fault}", known.action
        level = "warn" if known is None else known.level
        yield _row_check(row, "gpu.xid", level, f"Xid {number}: {words}", limit="none", step=step)


def _throttle(row: Row) -> Iterator[Check]:
    bits = row.get("throttle_bits")
    if bits is not None:
        seen = f"throttled by {', '.join(row['throttle'])}" if bits else "not throttled"
        step = "check cooling, power supply and power cables; the slowest GPU slows down all ranks"
        yield _judged(
            row,
            "gpu.throttle",
            bool(bits & BAD_THROTTLE),
            seen,
            limit="no hardware slowdown",
            step=step,
        )


def _temperature(row: Row) -> Iterator[Check]:
    now, limit = row.get("temperature_c"), row.get("slowdown_c")
    if now is not None and limit:
        hot = now >= limit - 5
        yield _judged(
            row,
            "gpu.temperature",
            hot,
            f"{now} °C",
            limit=f"slows down at {limit} °C",
            step="check cooling",
        )


def _power(row: Row) -> Iterator[Check]:
    limit, default = row.get("power_limit_w"), row.get("power_default_w")
    if limit is not None and default:
        seen, usual = f"limited to {limit:.0f} W", f"default {default:.0f} W"
        step = (
            "raise the limit with nvidia-smi -pl, or ask the host to: it is slowing this GPU down"
        )
        yield _judged(row, "gpu.power_limit", limit < 0.95 * default, seen, limit=usual, step=step)


def _pcie(row: Row) -> Iterator[Check]:
    width, max_width = row.get("pcie_width"), row.get("pcie_width_max")
    generation, newest = row.get("pcie_generation"), row.get("pcie_generation_max")
    if width is None or max_width is None or generation is None or newest is None:
        return
    below = width < max_width or generation < newest
    busy = (row.get("utilization_ratio") or 0) >= UNDER_LOAD
    seen = f"PCIe gen {generation} x{width}" + (" under load" if busy else ", idle")
    limit = f"gen {newest} x{max_width}" + (" under load" if not busy and below else "")
    step = "reseat the card or riser, and check the BIOS; in a VM, ask the host"
    yield _judged(row, "gpu.pcie", below and busy, seen, limit=limit, step=step)


def _nvlink(row: Row) -> Iterator[Check]:
    up, there = row.get("nvlinks_up"), row.get("nvlinks")
    if there and up == 0:
        # A card without a bridge (RTX 3090, A6000, A100 PCIe) still lists its links, all of them
        # down.
        yield _row_check(
            row, "gpu.nvlink", "ok", f"none of the {there} NVLinks is connected", limit=str(there)
        )
    elif there and up is not None:
        yield _judged(
            row,
            "gpu.nvlink",
            up != there,
            f"{up} of {there} NVLinks are up",
            limit=str(there),
            step=_LINK_STEP,
        )


def links_down(rows: Sequence[Row]) -> Iterator[Check]:
    """Report GPUs without an active NVLink on a host where other GPUs have theirs."""
    known = [row for row in rows if row.get("nvlinks") and row.get("nvlinks_up") is not None]
    if any(row["nvlinks_up"] for row in known):
        for row in known:
            if row["nvlinks_up"] == 0:
                seen = f"0 of {row['nvlinks']} NVLinks are up, while other GPUs' links work"
                yield _row_check(
                    row, "gpu.nvlink", "warn", seen, limit=str(row["nvlinks"]), step=_LINK_STEP
                )


def _fabric(row: Row) -> Iterator[Check]:
    """Check the fabric. Only machines with NVSwitch have one; CUDA does not start until it is
    complete."""
    state = row.get("fabric")
    if state in ("not started", "in progress"):
        step = "start the nvidia-fabricmanager that matches the driver's version"
        yield _row_check(
            row,
            "gpu.fabric",
            "critical",
            f"the NVSwitch fabric is {state}",
            limit="completed",
            step=step,
        )
    elif state == "completed":
        yield _row_check(
            row, "gpu.fabric", "ok", "the NVSwitch fabric is complete", limit="completed"
        )


def _modes(row: Row) -> Iterator[Check]:
    if (mode := row.get("compute_mode")) is not None:
        name = COMPUTE_MODES.get(mode, "unknown")
        level = "critical" if name == "prohibited" else "warn"
        bad = name in ("prohibited", "exclusive thread", "exclusive process")
        yield _judged(
            row,
            "gpu.compute_mode",
            bad,
            name,
            limit="default",
            step="nvidia-smi -c DEFAULT",
            level=level,
        )
    if row.get("mig"):
        seen = "MIG is on: each rank sees only a slice of the GPU"
        yield _row_check(
            row, "gpu.mig", "warn", seen, limit="off", step="nvidia-smi -mig 0, if permitted"
        )
    if row.get("persistence") == 0:
        seen = "persistence mode is off: the driver unloads between uses"
        yield _row_check(
            row, "gpu.persistence", "warn", seen, limit="on", step="nvidia-smi -pm 1, if permitted"
        )


def _judged(
    row: Row, name: str, bad: bool, seen: str, *, limit: str, step: str, level: str = "warn"
) -> Check:
    """Return a check at `level` with the next step if `bad`, otherwise one at level `ok`."""
    return (
        _row_check(row, name, level, seen, limit=limit, step=step)
        if bad
        else _row_check(row, name, "ok", seen, limit=limit)
    )


def _row_check(
    row: Row, name: str, level: str, seen: str, *, limit: str, step: str | None = None
) -> Check:
    return Check(name, level, f"GPU {row['index']}: {seen}", limit, step, row["index"])
