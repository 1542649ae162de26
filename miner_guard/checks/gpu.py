"""The one judge of GPUs: the driver, their number, their faults, the memory held before a launch,
and whether the miner's torch can use them. `doctor` and the preflight ask it once, and `Faults`
asks it about every sample while the miner runs.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miner_guard.checks.check import Check, Snapshot, gib, judged
from miner_guard.checks.request import number_of
from miner_guard.incidents import xids
from miner_guard.record.events import Event, event
from miner_guard.record.words import counted

Row = Mapping[str, Any]
"""One GPU in a sample; `checks.nvml` describes it."""

_NOT_LOADED, _NO_LIBRARY = 9, 12
_ERRORS = {
    _NOT_LOADED: (
        "the NVIDIA driver is not loaded",
        "load it (modprobe nvidia) or reboot; in a container, start it with --gpus",
    ),
    _NO_LIBRARY: (
        "libnvidia-ml.so.1 is missing",
        "install the NVIDIA driver; in a container, start it with --gpus all",
    ),
    18: (
        "driver and library versions differ: the driver was updated while loaded",
        "reboot the node, or reload the driver",
    ),
    999: (
        "NVML reports Unknown Error",
        "`systemctl daemon-reload` on the host cuts running containers off from their GPUs: "
        "restart the container; otherwise check dmesg for NVRM",
    ),
    4: ("no permission to talk to the driver", "check the permissions of /dev/nvidiactl"),
}
"""nvmlReturn_t of a failed initialisation: its meaning and the fix (nvml.h)."""

_NO_GPUS = ("", "void", "none")
"""Values for which NVIDIA's container runtime adds no GPU (NVIDIA Container Toolkit, "Specialized
configurations with Docker"). A container that got its GPUs through CDI also has `void`, so the
value counts only if NVML found no driver."""

_SET_EXPECT = "set [gpu] expect: the number of GPUs, or 0 for a machine that trains on its CPU"


def driver_problem(sample: Mapping[str, Any]) -> tuple[str, str]:
    """What a sample without GPUs means, and what to do."""
    reason = sample.get("reason")
    if sample["state"] == "hangs":
        step = "check dmesg for NVRM and Xid; if nvidia-smi hangs as well, reboot the node"
        return f"NVML hangs: {reason}", step
    words, step = _ERRORS.get(
        sample.get("code") or 0, (str(reason), "run nvidia-smi and read its message")
    )
    return f"{words} (NVML: {reason})", step


def driver_checks(s: Snapshot) -> Iterator[Check]:
    """Check NVML's state and the driver's version against torch's build."""
    if s.nvml is None:
        step = "run miner-guard doctor again"
        yield Check("driver.nvml", "unknown", s.unread.get("nvml", "not read"), None, step)
        return
    if hip := _hip(s):
        reading = f"torch was built for ROCm {hip}; only torch tells the guard of AMD's GPUs"
        step = "amd-smi shows their temperature, power and errors, which the guard does not read"
        yield Check("driver.nvml", "unknown", reading, None, step)
        return
    yield _nvml_state(s, s.nvml)
    build, driver = (s.torch or {}).get("cuda_version"), s.nvml.get("cuda_driver")
    if build and driver:
        # CUDA's minor version compatibility: a driver runs newer minor builds of the same major
        # version.
        older = int(driver.partition(".")[0]) < int(build.partition(".")[0])
        reading = f"torch was built for CUDA {build}; the driver supports CUDA up to {driver}"
        limit = "a driver that supports torch's CUDA major version or a newer one"
        step = f"update the driver, or install a torch build for CUDA {driver}"
        yield judged(
            "driver.cuda_version", "critical" if older else "ok", reading, limit, step=step
        )


def _hip(s: Snapshot) -> str | None:
    """The version of ROCm that the miner's torch was built for."""
    hip: str | None = (s.torch or {}).get("hip_version")
    return hip


def _nvml_state(s: Snapshot, nvml: Mapping[str, Any]) -> Check:
    name, state = "driver.nvml", nvml["state"]
    if state == "ok":
        gpus = counted(nvml["count"], "GPU")
        return Check(name, "ok", f"driver {nvml['driver']}, CUDA {nvml['cuda_driver']}, {gpus}")
    if state == "absent" and s.expectation.count == 0:
        return Check(name, "ok", "no NVIDIA driver; the settings ask for the CPU")
    if state == "absent" and s.expectation.count is None:
        reading = "no NVIDIA driver: whether this machine should have GPUs is not known"
        return Check(name, "unknown", reading, None, _SET_EXPECT)
    reading, step = driver_problem(nvml)
    if state in ("hangs", "unreadable"):
        # A probe without an answer proves nothing about the GPUs; if the miner cannot use them, it
        # reports that itself.
        return Check(name, "unknown", reading, "a response within the deadline", step)
    shown = s.env.get("NVIDIA_VISIBLE_DEVICES")
    if shown in _NO_GPUS and nvml.get("code") in (_NOT_LOADED, _NO_LIBRARY):
        reading = f"this container has no GPU: NVIDIA_VISIBLE_DEVICES={shown!r}"
        step = "start it with --gpus all, or with NVIDIA_VISIBLE_DEVICES=all and the nvidia runtime"
    return Check(name, "critical", reading, "NVML initialises", step, may_clear=True)


def count_checks(s: Snapshot) -> Iterator[Check]:
    """Check the count against the expected number, CUDA_VISIBLE_DEVICES and the ranks."""
    if not _hip(s):
        yield from _count(s)
    yield from _ranks(s)
    yield from _visible(s)


def _count(s: Snapshot) -> Iterator[Check]:
    expected, state = s.expectation.count, (s.nvml or {}).get("state")
    if not s.gpu_rows and state in (None, "hangs", "unreadable"):
        step = "check driver.nvml: the state of the GPUs is unknown"
        yield Check("gpu.count", "unknown", "NVML did not respond", None, step)
        return
    present, working = sum(row["state"] != "gone" for row in s.gpu_rows), _working(s)
    gpus = counted(present, "GPU")
    reading = gpus if working == present else f"{gpus}, {working} of them working"
    if not expected:
        if present:
            yield Check("gpu.count", "ok", reading + "; none expected")
        return
    step = (
        f"see {'the rows below, ' if present else ''}nvidia-smi and dmesg; a rented machine may "
        "have lost its GPUs: restart the container"
    )
    level = "ok" if working >= expected else "critical"
    limit = f"{expected}, according to {s.expectation.origin}"
    yield judged("gpu.count", level, reading, limit, step=step, may_clear=level != "ok")


def _working(s: Snapshot) -> int:
    return sum(row["state"] in ("ok", "unreadable") for row in s.gpu_rows)


def _ranks(s: Snapshot) -> Iterator[Check]:
    """Compare the ranks that the command starts here with the working GPUs. Empty if the settings
    ask for the CPU or the host has no GPU."""
    ranks, working = number_of(s.command, "--nproc-per-node"), usable(s)
    if ranks is None or not working or s.expectation.count == 0:
        return
    level, step = "warn", "raise --nproc_per_node: some GPUs are idle"
    if ranks == working:
        level = "ok"
    elif sliced(s):
        step = "set CUDA_VISIBLE_DEVICES for each rank: a process sees only one MIG slice"
    elif ranks > working:
        level, step = "critical", "lower --nproc_per_node: two ranks would share a GPU"
    reading = f"{counted(ranks, 'rank')} on {counted(working, 'GPU')}"
    yield judged("gpu.ranks", level, reading, "one per GPU", step=step, may_clear=True)


_DEVICE = re.compile(r"\d+$|(?:GPU|MIG)-")
"""An entry of CUDA_VISIBLE_DEVICES: an index, or a UUID or the beginning of one."""


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


def hidden(row: Row, env: Mapping[str, str]) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides this GPU from the miner. Its indices are taken for
    NVML's: CUDA may order GPUs of different models in another way."""
    parts = [part.strip() for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(part.isdigit() for part in parts):
        return str(row["index"]) not in parts
    uuid = str(row.get("uuid"))
    return all(p.startswith("GPU-") for p in parts) and not uuid.startswith(tuple(parts))


def sliced(s: Snapshot) -> bool:
    """Return whether CUDA runs on MIG slices: the mask names one (`MIG-…`, or for the container
    runtime `0:1`), or all GPUs are divided."""
    masks = [s.env.get(f"{runtime}_VISIBLE_DEVICES", "") for runtime in ("CUDA", "NVIDIA")]
    named = any("MIG-" in mask or ":" in mask for mask in masks)
    return named or (bool(s.gpu_rows) and all(row.get("mig") for row in s.gpu_rows))


def usable(s: Snapshot) -> int:
    """Number of working GPUs visible to the miner. NVML itself ignores CUDA_VISIBLE_DEVICES.

    A process sees only one MIG slice, however many it names (NVIDIA, MIG User Guide, "CUDA Device
    Enumeration").
    """
    working, shown = _working(s), visible(s.env)
    if sliced(s):
        working = min(1, working)
    return working if shown is None else min(working, shown)


def _visible(s: Snapshot) -> Iterator[Check]:
    shown = visible(s.env)
    if shown is None:
        return
    short = shown < (s.expectation.count or 0) and not sliced(s)
    mask = s.env["CUDA_VISIBLE_DEVICES"]
    reading = f"CUDA_VISIBLE_DEVICES={mask!r} exposes {counted(shown, 'GPU')}"
    limit = str(s.expectation.count) if s.expectation.expects_gpus else None
    step = "unset CUDA_VISIBLE_DEVICES or list all GPUs in it"
    yield judged("gpu.visible", "critical" if short else "ok", reading, limit, step=step)


_NOT_INITIALISED = "system not yet initialized"
"""CUDA's error 802: on a machine with NVSwitch, the fabric manager is missing."""

_FABRIC_STEP = "start the nvidia-fabricmanager that matches the driver's version"


def cuda_checks(s: Snapshot) -> Iterator[Check]:
    """Check torch in the miner's interpreter, then each GPU that a child process tried to use. A
    working NVML does not prove that torch can use CUDA."""
    if s.torch is None:
        # Without a driver or expected GPUs, torch was not probed.
        if "torch" in s.unread:
            answered = "torch" not in s.unanswered
            level = "critical" if s.expectation.expects_gpus and answered else "unknown"
            reading = f"torch in the miner's interpreter: {s.unread['torch']}"
            step = "run `python -c 'import torch'` with the miner's Python to see the error"
            yield Check("cuda.torch", level, reading, "torch can be imported", step)
        return
    if not s.torch["cuda_available"]:
        yield _unavailable(s, s.torch)
        return
    count = s.torch["gpu_count"]
    reading = f"CUDA is available: torch {s.torch['torch_version']}, {counted(count, 'device')}"
    yield Check("cuda.available", "ok", reading)
    expected = s.expectation.count or 0
    if count < expected:
        step = "NVML sees more than CUDA: check CUDA_VISIBLE_DEVICES and MIG"
        if _hip(s):
            step = "compare amd-smi with HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES"
        # A process sees only one MIG slice, so the others are not lost GPUs.
        level = "warn" if count and sliced(s) else "critical"
        reading = f"torch sees {counted(count, 'GPU')}"
        yield Check("cuda.count", level, reading, str(expected), step, may_clear=True)
    yield from (_use(index, result) for index, result in sorted(s.cuda.items()))


def _unavailable(s: Snapshot, torch: Mapping[str, Any]) -> Check:
    build, reading = torch["cuda_version"], f"CUDA is not available: torch {torch['torch_version']}"
    if hip := _hip(s):
        build = hip
        reading += f" for ROCm {hip}: {torch.get('reason') or 'torch sees no device'}"
        step = "compare the driver's version with torch's: amd-smi, and access to /dev/kfd"
    elif build:
        reason = torch.get("reason") or "torch sees no device"
        reading += f" for CUDA {build}: {reason}"
        step = "fix the driver rows above, or compare the driver's CUDA version with torch's"
        if _NOT_INITIALISED in reason:
            step = _FABRIC_STEP
    else:
        reading += " was built without CUDA"
        step = (
            "install a torch build with CUDA into the miner's environment "
            "(https://pytorch.org/get-started)"
        )
    if s.expectation.expects_gpus:
        limit = f"CUDA, for {counted(s.expectation.count, 'GPU')}"
        return Check("cuda.available", "critical", reading, limit, step, may_clear=bool(build))
    if s.expectation.count == 0:
        return Check("cuda.available", "ok", f"{reading}; the settings ask for the CPU")
    return Check("cuda.available", "unknown", reading, None, f"if it should be: {step}")


def _use(index: int, result: Mapping[str, Any]) -> Check:
    error, limit = result.get("error"), "allocation and matmul work"
    if error is None:
        reading = f"cuda:{index}: {limit}, {result['seconds']:.1f} s"
        return Check("cuda.use", "ok", reading)
    if not result.get("answered", True):
        step = "watch this GPU's first steps; check dmesg if they hang"
        return Check("cuda.use", "unknown", f"cuda:{index}: {error}", limit, step)
    step = "this GPU can't be used: check the GPU's rows and dmesg"
    return Check("cuda.use", "critical", f"cuda:{index}: {error}", limit, step, may_clear=True)


HELD_BYTES = 1024**3
"""An idle GPU uses a few megabytes; a bare CUDA context 0.3 to 0.6 GB."""

_HELD_SHARE = 0.5
"""Once this share of the GPU is in use, the miner is unlikely to fit."""


def held_memory_checks(s: Snapshot) -> Iterator[Check]:
    """Judge each GPU by its lowest reading: an exiting process frees its memory between
    readings."""
    for row in s.gpu_rows:
        levels = [reading[row["uuid"]] for reading in s.held if row.get("uuid") in reading]
        if not levels or hidden(row, s.env):
            continue
        held, total = min(levels), row.get("memory_total_bytes") or 0
        much = bool(total) and held > _HELD_SHARE * total
        bad = held >= HELD_BYTES or much
        words = f"of {gib(total)} held before the launch" if bad else "in use"
        level = "ok" if not bad else "critical" if much and s.expectation.count != 0 else "warn"
        sentence = f"GPU {row['index']}: {gib(held)} {words}"
        step = "an orphan of an earlier run, or another tenant: find it with nvidia-smi and kill it"
        more = {"gpu": row["index"], "may_clear": bad}
        yield judged("gpu.held_memory", level, sentence, gib(HELD_BYTES), step=step, **more)


_BAD_THROTTLE = frozenset({"HW slowdown", "HW thermal", "HW power brake"})
"""Idle and the software power cap are routine."""

_ABSENT = frozenset({"Not Supported", "Function Not Found"})
"""Reasons indicating that this GPU model or driver lacks a field."""

_UNDER_LOAD = 0.5
"""Idle PCIe links may narrow (nvidia-smi, "PCIe Link Width"), so the width is judged only at or
above this utilisation."""

_STATES = {
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
    "unreadable": ("is not readable", "check permissions, then nvidia-smi"),
}


NODE_FAULTS = frozenset({"gpu.state", "gpu.ecc", "gpu.row_remap", "gpu.xid"})
"""Critical, they mean that another machine may run the miner and this one may not."""


def gpu_checks(s: Snapshot) -> Iterator[Check]:
    """Check all GPUs. A fault of a GPU that the miner does not use is only a warning."""
    for row in s.gpu_rows:
        unused = s.expectation.count == 0 or hidden(row, s.env)
        yield from (_softened(check, unused) for check in of_row(row, s.gpu_rows))


def _softened(check: Check, unused: bool) -> Check:
    if unused and check.level == "critical":
        return replace(check, level="warn", may_clear=False)
    return check


def of_row(row: Row, rows: Sequence[Row] = ()) -> Iterator[Check]:
    """All checks of one GPU among the GPUs of its machine."""
    if row["state"] == "ok":
        yield _readable(row)
        for judge in (_ecc, _remap, _throttle, _fabric, _mig):
            yield from judge(row)
        yield from _pcie(row, [r for r in rows if r.get("name") == row.get("name")])
    else:
        words, step = _STATES[row["state"]]
        level = "unknown" if row["state"] == "unreadable" else "critical"
        reading = f"GPU {row['index']} {words} ({row['error']})"
        yield Check("gpu.state", level, reading, "responds", step, row["index"], may_clear=True)
    # Xid 79 accompanies the loss of the GPU that it explains.
    yield from xid_checks(row)


def _readable(row: Row) -> Check:
    # A feature that the model lacks needs no report; a withheld value does.
    withheld = {n: why for n, why in (row.get("unread") or {}).items() if why not in _ABSENT}
    name = f"GPU {row['index']} {row.get('name') or ''}".strip()
    if not withheld:
        return Check("gpu.state", "ok", f"{name} responds", None, None, row["index"])
    reason = next(iter(withheld.values()))
    reading = f"{name}: not readable: {', '.join(sorted(withheld))} ({reason})"
    step = (
        "if this is a container, give it access on the host; the checks that need these values "
        "are skipped"
    )
    return Check("gpu.state", "unknown", reading, None, step, row["index"])


def _ecc(row: Row) -> Iterator[Check]:
    count = row.get("ecc_uncorrected")
    if count is not None:
        step = "results may be wrong: drain the GPU, reset it, and watch for a recurrence"
        reading = f"{count} uncorrected ECC errors since the last reset"
        yield _check(row, "gpu.ecc", "critical" if count else "ok", reading, limit="0", step=step)


def _remap(row: Row) -> Iterator[Check]:
    if row.get("remap_pending") is None:
        return
    level, step = "ok", ""
    reading = f"{row['rows_uncorrected']} rows remapped for uncorrected errors"
    if row["remap_failed"]:
        level, reading, step = "critical", "row remapping failed", "have the GPU replaced"
    elif row["remap_pending"]:
        # After corrected errors only, work may continue until a convenient reset (NVIDIA, Xid 63).
        level = "critical" if row["rows_uncorrected"] else "warn"
        reading = "a row remap is pending"
        step = "reset the GPU or reboot for it to take effect"
    yield _check(row, "gpu.row_remap", level, reading, limit="none pending", step=step)


def _throttle(row: Row) -> Iterator[Check]:
    reasons = row.get("throttle")
    if reasons is not None:
        reading = f"throttled by {', '.join(reasons)}" if reasons else "not throttled"
        step = "check cooling, power supply and power cables; the slowest GPU slows down all ranks"
        level = "warn" if _BAD_THROTTLE & {*reasons} else "ok"
        yield _check(row, "gpu.throttle", level, reading, limit="no hardware slowdown", step=step)


def _pcie(row: Row, alike: Sequence[Row]) -> Iterator[Check]:
    """Compare the width with that of the machine's other GPUs of this model. For a single one, half
    of the card's maximum is enough: cloud machines give a T4 or an A10G eight of its sixteen
    lanes."""
    width, full = row.get("pcie_width"), row.get("pcie_width_max")
    if width is None or full is None:
        return
    usual = max((other.get("pcie_width") or 0 for other in alike), default=0)
    limit = max(usual, full // 2)
    if width >= limit:
        yield _check(row, "gpu.pcie", "ok", f"PCIe x{width}", limit=f"x{limit}")
    elif (row.get("utilization_ratio") or 0) >= _UNDER_LOAD:
        step = "reseat the card or riser, and check the BIOS; in a VM, ask the host"
        yield _check(
            row, "gpu.pcie", "warn", f"PCIe x{width} under load", limit=f"x{limit}", step=step
        )


def _fabric(row: Row) -> Iterator[Check]:
    """Only machines with NVSwitch have a fabric; CUDA does not start until it is complete."""
    if row.get("fabric_waits"):
        reading = "the NVSwitch fabric is not complete: the fabric manager is missing"
        yield _check(row, "gpu.fabric", "critical", reading, limit="completed", step=_FABRIC_STEP)


def _mig(row: Row) -> Iterator[Check]:
    if row.get("mig"):
        reading = "MIG is on: each rank sees only a slice of the GPU"
        yield _check(
            row, "gpu.mig", "warn", reading, limit="off", step="nvidia-smi -mig 0, if permitted"
        )


def xid_checks(row: Row) -> Iterator[Check]:
    """The Xid events in one GPU's row that ask for something. Each event appears in one sample
    only."""
    for number in dict.fromkeys(row.get("xids") or ()):
        entry = xids.of_number(number)
        level, words, step = "warn", "not in NVIDIA's Xid catalogue", "check dmesg"
        if entry is not None:
            level, step = entry.level, entry.action
            words = f"{entry.meaning}; caused by {entry.fault}"
        if level != "ok":
            reading = f"GPU {row['index']}: Xid {number}: {words}"
            yield Check("gpu.xid", level, reading, "none", step, row["index"])


def _check(row: Row, name: str, level: str, reading: str, *, limit: str, step: str = "") -> Check:
    return judged(name, level, f"GPU {row['index']}: {reading}", limit, step=step, gpu=row["index"])


_THROTTLED_SAMPLES, _THROTTLE_WINDOW_S = 6, 600.0
"""Six throttled samples in ten minutes count as degraded (gpud)."""

_WATCHED = ("gpu.state", "gpu.ecc", "gpu.row_remap", "gpu.pcie")
"""The checks whose faults appear and clear while the miner runs."""


class Faults:
    """Reports each fault of successive samples once when it appears and once when it clears. A
    fault of a GPU that `env` hides from the miner is only a warning: somebody else uses it."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = env or {}
        self._standing: dict[tuple[str, str], str] = {}
        self._narrow: set[str] = set()
        """The GPUs whose PCIe link was narrow in the last sample."""
        self._throttled: dict[str, deque[float]] = {}

    def observe(self, rows: Sequence[Row], now: float) -> Iterator[Event]:
        """Yield the events from one sample's rows; `now` is monotonic."""
        for row in rows:
            gpu, unused = str(row["index"]), hidden(row, self._env)
            row_checks = [_softened(check, unused) for check in of_row(row, rows)]
            checks = {c.check: c for c in row_checks if c.check != "gpu.xid"}
            # The load of two samples may differ within a moment: a narrow link counts the second
            # time.
            narrow = "gpu.pcie" in checks and checks["gpu.pcie"].level != "ok"
            if narrow and gpu not in self._narrow:
                self._narrow.add(gpu)
                del checks["gpu.pcie"]
            elif not narrow:
                self._narrow.discard(gpu)
            for check in (checks[name] for name in _WATCHED if name in checks):
                # A check that cannot be read keeps its last state.
                if check.level != "unknown" or row["state"] == "ok":
                    yield from self._change(row, check)
            if (throttle := checks.get("gpu.throttle")) is not None:
                yield from self._throttle(row, throttle, now)
            yield from (_fault(row, check) for check in row_checks if check.check == "gpu.xid")

    def _change(self, row: Row, check: Check) -> Iterator[Event]:
        key = (str(row["index"]), check.check)
        if check.level in ("warn", "critical"):
            if self._standing.get(key) != check.level:
                self._standing[key] = check.level
                yield _fault(row, check)
        elif self._standing.pop(key, None) is not None:
            what = f"{check.check.partition('.')[2]} is back to normal"
            text = f"GPU RECOVERED: GPU {row['index']} {what}"
            yield event("gpu_fault", "info", text, **_fields(row, what))

    def _throttle(self, row: Row, check: Check, now: float) -> Iterator[Event]:
        times = self._throttled.setdefault(str(row["index"]), deque(maxlen=_THROTTLED_SAMPLES))
        if check.level != "ok":
            times.append(now)
        while times and now - times[0] > _THROTTLE_WINDOW_S:
            times.popleft()
        if len(times) == _THROTTLED_SAMPLES:
            span = f"throttled ({', '.join(row['throttle'])}) in {len(times)} samples"
            reading = f"GPU {row['index']}: {span} over the last {now - times[0]:.0f} s"
            yield from self._change(row, replace(check, level="warn", seen=reading))
        elif not times:
            yield from self._change(row, check)


def _fault(row: Row, check: Check) -> Event:
    what = check.seen.removeprefix(f"GPU {row['index']}").lstrip(": ")
    step = check.next_step or "check dmesg"
    fields = {"next_step": step, "check": check.check, **_fields(row, what)}
    text = f"GPU FAULT: GPU {row['index']} {what}; {step}"
    return event("gpu_fault", "warning" if check.level == "warn" else "critical", text, **fields)


def _fields(row: Row, what: str) -> dict[str, Any]:
    return {"gpu": row["index"], "uuid": row.get("uuid"), "what": what}
