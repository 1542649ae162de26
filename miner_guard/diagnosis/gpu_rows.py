"""Judges one GPU's row of a sample: faults, memory errors, clocks, links, modes. Also used while
the miner runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miner_guard.diagnosis.check import Check, Snapshot
from miner_guard.health import xids

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


def checks(s: Snapshot) -> Iterator[Check]:
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
    """All checks for one GPU."""
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
        yield _check(
            row,
            "gpu.row_remap",
            "critical",
            "row remapping failed",
            limit="none",
            step="have the GPU replaced",
        )
    elif row["remap_pending"]:
        step = "reset the GPU or reboot for it to take effect"
        yield _check(
            row, "gpu.row_remap", "critical", "a row remap is pending", limit="none", step=step
        )
    else:
        seen = f"{row['rows_uncorrected']} rows remapped for uncorrected errors"
        yield _check(row, "gpu.row_remap", "ok", seen, limit="none pending")


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
        yield _check(row, "gpu.xid", level, f"Xid {number}: {words}", limit="none", step=step)


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
        yield _check(
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
                yield _check(
                    row, "gpu.nvlink", "warn", seen, limit=str(row["nvlinks"]), step=_LINK_STEP
                )


def _fabric(row: Row) -> Iterator[Check]:
    """Check the fabric. Only machines with NVSwitch have one; CUDA does not start until it is
    complete."""
    state = row.get("fabric")
    if state in ("not started", "in progress"):
        step = "start the nvidia-fabricmanager that matches the driver's version"
        yield _check(
            row,
            "gpu.fabric",
            "critical",
            f"the NVSwitch fabric is {state}",
            limit="completed",
            step=step,
        )
    elif state == "completed":
        yield _check(row, "gpu.fabric", "ok", "the NVSwitch fabric is complete", limit="completed")


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
        yield _check(
            row, "gpu.mig", "warn", seen, limit="off", step="nvidia-smi -mig 0, if permitted"
        )
    if row.get("persistence") == 0:
        seen = "persistence mode is off: the driver unloads between uses"
        yield _check(
            row, "gpu.persistence", "warn", seen, limit="on", step="nvidia-smi -pm 1, if permitted"
        )


def _judged(
    row: Row, name: str, bad: bool, seen: str, *, limit: str, step: str, level: str = "warn"
) -> Check:
    """Return a check at `level` with the next step if `bad`, otherwise one at level `ok`."""
    return (
        _check(row, name, level, seen, limit=limit, step=step)
        if bad
        else _check(row, name, "ok", seen, limit=limit)
    )


def _check(
    row: Row, name: str, level: str, seen: str, *, limit: str, step: str | None = None
) -> Check:
    return Check(name, level, f"GPU {row['index']}: {seen}", limit, step, row["index"])
