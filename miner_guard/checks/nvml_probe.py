"""A long-lived child that samples all GPUs on request: `python -m miner_guard.checks.nvml_probe`.

A driver call can block forever, in a state that no signal interrupts. So each GPU and the
initialisation have their own threads, and the main thread never calls NVML: it answers by the
deadline with the results so far, and names the hung GPU and the NVML call. Requests and answers are
lines of JSON: `{"until": MONOTONIC}` on stdin; on stdout a sample, in the format described in
`miner_guard.checks.nvml`, whose `xids` holds the Xid events since the last answer, by UUID. A
request with `"only": "xids"` gets only those events. The probe exits at EOF.

Each field is read by itself, so that an unreadable one does not affect the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import pynvml as nvml

from miner_guard.system import children

Handle = Any

THROTTLE = {
    0x1: "idle",
    0x2: "applications clocks",
    0x4: "SW power cap",
    0x8: "HW slowdown",
    0x10: "sync boost",
    0x20: "SW thermal",
    0x40: "HW thermal",
    0x80: "HW power brake",
    0x100: "display clocks",
}
"""Names of the clocks event reasons (nvml.h), by bit. Drivers before R535 call them throttle
reasons."""

_P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ; the bindings define that constant as a tuple by mistake."""

_RECOVERY = ("none", "reset the GPU", "reboot the node", "drain peer-to-peer", "drain and reset")

_RECOVERY_FIELD = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION from nvml.h. nvidia-ml-py defines it from 12.570 on; a driver
that lacks it returns an error."""


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t from nvml.h. nvidia-ml-py up to 13.595 declares the cluster UUID with 80
    bytes instead of 16, and with that layout every fabric reads as "not supported"."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


_FABRIC_STATES = ("not supported", "not started", "in progress", "completed")


@dataclass(frozen=True)
class Field:
    """One or more values from one NVML call."""

    names: tuple[str, ...]
    read: Callable[[Handle], tuple[Any, ...]]
    constant: bool = False
    """Read only until it is known: it does not change while the driver is loaded."""

    vital: bool = False
    """Readable from a working GPU in every container, so an unknown error here is the GPU's
    fault."""


def _one(
    name: str, function: str, *arguments: Any, scale: float | None = None, constant: bool = False
) -> Field:
    def read(handle: Handle) -> tuple[Any, ...]:
        value = getattr(nvml, function)(handle, *arguments)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        return (value if scale is None else value * scale,)

    return Field((name,), read, constant)


def _uuid(handle: Handle) -> tuple[Any, ...]:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return (uuid.decode("utf-8", "replace") if isinstance(uuid, bytes) else uuid,)


def _memory(handle: Handle) -> tuple[Any, ...]:
    # Use version 2: version 1 includes the driver's reserved memory (idle A100: 912 MB, not 8).
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return memory.used, memory.reserved, memory.total
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_SUPPORTED):
            raise
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.used, None, memory.total


def _pci(handle: Handle) -> tuple[Any, ...]:
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    bus_id = pci.busId
    return (bus_id.decode() if isinstance(bus_id, bytes) else bus_id,)


def _utilization(handle: Handle) -> tuple[Any, ...]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def _throttle(handle: Handle) -> tuple[Any, ...]:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return int(bits), [name for bit, name in THROTTLE.items() if bits & bit]


def _capability(handle: Handle) -> tuple[Any, ...]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return (f"{major}.{minor}",)


def _remapped(handle: Handle) -> tuple[Any, ...]:
    corrected, uncorrected, pending, failure = nvml.nvmlDeviceGetRemappedRows(handle)
    return corrected, uncorrected, bool(pending), bool(failure)


def _recovery(handle: Handle) -> tuple[Any, ...]:
    (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])
    if answer.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(answer.nvmlReturn)
    action = answer.value.uiVal
    return (_RECOVERY[action] if action < len(_RECOVERY) else f"action {action}",)


def _nvlinks(handle: Handle) -> tuple[Any, ...]:
    up = there = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            up += int(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED):
                break
            raise
        there += 1
    return up, there


def _peers(handle: Handle) -> tuple[Any, ...]:
    reachable = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            other = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(other) != nvml.nvmlDeviceGetUUID(handle):
                reachable += nvml.nvmlDeviceGetP2PStatus(handle, other, _P2P_READ) == 0
        except nvml.NVMLError as error:
            # Another GPU's error does not count against this one.
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise
    return (reachable,)


def _fabric(handle: Handle) -> tuple[Any, ...]:
    info = _FabricInfo()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    state = int(info.state)
    return (_FABRIC_STATES[state] if state < len(_FABRIC_STATES) else f"state {state}",)


def _processes(handle: Handle) -> tuple[Any, ...]:
    # Count only: in a container the pids are the host's and may match unrelated local processes.
    return (len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),)


FIELDS = (
    Field(("uuid",), _uuid, constant=True, vital=True),
    _one("name", "nvmlDeviceGetName", constant=True),
    Field(("pci_bus",), _pci, constant=True),
    Field(("capability",), _capability, constant=True),
    Field(
        ("memory_used_bytes", "memory_reserved_bytes", "memory_total_bytes"), _memory, vital=True
    ),
    Field(("utilization_ratio", "memory_busy_ratio"), _utilization),
    _one("temperature_c", "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    _one(
        "slowdown_c",
        "nvmlDeviceGetTemperatureThreshold",
        nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
        constant=True,
    ),
    _one("power_w", "nvmlDeviceGetPowerUsage", scale=1e-3),
    _one("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
    _one("power_default_w", "nvmlDeviceGetPowerManagementDefaultLimit", scale=1e-3, constant=True),
    _one("sm_clock_mhz", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
    _one("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM, constant=True),
    _one("memory_clock_mhz", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
    Field(("throttle_bits", "throttle"), _throttle),
    _one(
        "ecc_uncorrected",
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    ),
    _one(
        "ecc_corrected",
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        nvml.NVML_VOLATILE_ECC,
    ),
    Field(("rows_corrected", "rows_uncorrected", "remap_pending", "remap_failed"), _remapped),
    Field(("recovery_action",), _recovery),
    _one("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _one("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration", constant=True),
    _one("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    _one("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", constant=True),
    _one("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
    Field(("nvlinks_up", "nvlinks"), _nvlinks),
    Field(("peers",), _peers, constant=True),
    Field(("fabric",), _fabric),
    _one("persistence", "nvmlDeviceGetPersistenceMode"),
    _one("compute_mode", "nvmlDeviceGetComputeMode"),
    Field(("mig",), lambda handle: (nvml.nvmlDeviceGetMigMode(handle)[0],)),
    Field(("processes",), _processes),
)
"""In the order in which they are read: the identity first, because it is cheap, so that a GPU that
fails halfway is still named."""

FIELD_NAMES = tuple(name for field in FIELDS for name in field.names)


STATES = {
    nvml.NVML_ERROR_GPU_IS_LOST: "lost",
    nvml.NVML_ERROR_RESET_REQUIRED: "reset_required",
    nvml.NVML_ERROR_UNKNOWN: "unknown",
}
"""Errors that concern the GPU itself; any other error only means that a field is unreadable. An
unknown error concerns the GPU only if the field is vital: drivers also return it for a healthy GPU,
for example when asked about the fabric."""


class Worker:
    """A thread that does one job at a time and exposes the NVML call in progress."""

    def __init__(self, name: str) -> None:
        self.at: str | None = None
        """The NVML call in progress."""
        self.since = 0.0
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], None]) -> bool:
        """Start `work`; does nothing and returns False if the previous job has not returned."""
        if not self._idle.is_set():
            return False
        self._idle.clear()
        self.since = time.monotonic()
        self._work.put(work)
        return True

    def done_by(self, until: float) -> bool:
        return self._idle.wait(max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            finally:
                self.at = None
                self._idle.set()


class GpuHandle:
    """One GPU: its handle, constants and last row."""

    def __init__(self, index: int) -> None:
        self.worker = Worker(f"gpu{index}")
        self.row: dict[str, Any] = {}
        self._index = index
        self._handle: Any = None
        self._constants: dict[str, Any] = {}
        self._permanent: dict[str, str] = {}

    def sample(self) -> None:
        """Read all fields into `row`. An unreadable one is null, with its reason under `unread`."""
        row: dict[str, Any] = {
            "index": self._index,
            "state": "ok",
            "error": None,
            **dict.fromkeys(FIELD_NAMES),
        }
        unread: dict[str, str] = {}
        try:
            if self._handle is None:
                self.worker.at = "nvmlDeviceGetHandleByIndex"
                self._handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
            for field in FIELDS:
                self._read(field, row, unread)
        except nvml.NVMLError as error:
            # The handle failed, or the error concerns the GPU itself: stop reading this GPU. The
            # others are not affected.
            row["state"] = STATES.get(error.value, "unreadable")
            row["error"] = f"{error} in {self.worker.at}"
            row.update(self._constants)
            self._handle = None
        row["unread"] = unread
        self.row = row

    def _read(self, field: Field, row: dict[str, Any], unread: dict[str, str]) -> None:
        first = field.names[0]
        if field.constant and first in self._constants:
            row.update((name, self._constants[name]) for name in field.names)
            return
        if first in self._permanent:
            unread[first] = self._permanent[first]
            return
        self.worker.at = first
        try:
            values = dict(zip(field.names, field.read(self._handle), strict=True))
        except nvml.NVMLError as error:
            if error.value in STATES and (field.vital or error.value != nvml.NVML_ERROR_UNKNOWN):
                raise
            unread[first] = str(error)
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                self._permanent[first] = str(error)
            return
        except Exception as error:  # noqa: BLE001  the bindings may lack the field, or a struct may have changed; only this field is affected
            unread[first] = self._permanent[first] = f"{type(error).__name__}: {error}"
            return
        row.update(values)
        if field.constant:
            self._constants.update(values)

    def hanging(self) -> dict[str, Any]:
        """The row for this GPU if it does not respond in time."""
        seconds = time.monotonic() - self.worker.since
        error = f"{self.worker.at} has not returned for {seconds:.1f} s"
        return {
            "index": self._index,
            "state": "hangs",
            **dict.fromkeys(FIELD_NAMES),
            **self._constants,
            "error": error,
            "unread": {},
        }

    def watch(self, events: Any) -> tuple[int | None, str]:
        """Subscribe `events` to the GPU's Xid events. Returns the address of its handle and its
        UUID."""
        handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return _address(handle), uuid


class Driver:
    """The driver: initialised once per process, since pynvml never unloads the library."""

    def __init__(self) -> None:
        self.worker = Worker("system")
        self.facts: dict[str, Any] = {
            "state": "hangs",
            "reason": "NVML is still initializing",
            "count": None,
        }
        self._initialized = False
        self._events: Any = None
        self._watched: set[int] = set()
        self._uuids: dict[int | None, str] = {}
        """UUIDs by handle address: a GPU that fell off the bus can no longer report its UUID."""
        self.xids: dict[str, list[int]] = {}
        self.xid_reason: str | None = None
        """Why some Xid events are unavailable."""

    def refresh(self) -> None:
        """Initialise if needed; read the versions and the number of GPUs."""
        facts: dict[str, Any] = {"state": "ok", "code": None, "reason": None}
        try:
            if not self._initialized:
                self.worker.at = "nvmlInit"
                nvml.nvmlInit()
                self._initialized = True
            self.worker.at = "nvmlSystemGetDriverVersion"
            facts |= {
                "driver": _text(nvml.nvmlSystemGetDriverVersion()),
                "nvml": _text(nvml.nvmlSystemGetNVMLVersion()),
            }
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            facts["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
            self.worker.at = "nvmlDeviceGetCount"
            facts["count"] = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            facts |= {
                "state": "absent" if missing else "failed",
                "code": error.value,
                "reason": str(error),
                "count": None,
            }
        self.facts = facts

    def watch(self, gpus: Mapping[int, GpuHandle]) -> None:
        """Subscribe to the Xid events of new GPUs. The next call retries any GPU that refuses."""
        if not gpus:
            return
        self.worker.at = "nvmlEventSetCreate"
        try:
            self._events = self._events or nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self.xid_reason = f"Xid events can't be read: {error}"
            return
        for index, gpu in gpus.items():
            try:
                if index not in self._watched:
                    self.worker.at = "nvmlDeviceRegisterEvents"
                    address, uuid = gpu.watch(self._events)
                    self._uuids[address] = uuid
                    self._watched.add(index)
            except nvml.NVMLError as error:
                self.xid_reason = f"Xid events for GPU {index} can't be read: {error}"

    def poll_events(self) -> None:
        """Drain the Xid events into `xids`, by UUID, without waiting."""
        self.worker.at = "nvmlEventSetWait"
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = self._uuids.get(_address(event.device)) or _text(
                    nvml.nvmlDeviceGetUUID(event.device)
                )
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    self.xid_reason = f"Xid events can't be read: {error}"
                return
            self.xids.setdefault(uuid, []).append(int(event.eventData))


def _address(handle: Any) -> int | None:
    """The value that two handles to the same GPU share."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class Probe:
    """Takes the samples and collects the Xid events."""

    def __init__(self) -> None:
        self._system = Driver()
        self._gpus: dict[int, GpuHandle] = {}

    def sample(self, until: float) -> dict[str, Any]:
        """The rows of all GPUs that respond by `until` (monotonic); the rest are marked as
        hanging."""
        started = time.monotonic()
        system = self._system
        if not (system.worker.do(system.refresh) and system.worker.done_by(until)):
            seconds = time.monotonic() - system.worker.since
            reason = f"{system.worker.at} has not returned for {seconds:.1f} s"
            system.facts = {**system.facts, "state": "hangs", "code": None, "reason": reason}
            if system.facts["count"] is None:
                return {**system.facts, "gpus": [], "seconds": time.monotonic() - started}
        count = int(system.facts["count"] or 0)
        rows = self._rows(count, until)
        xids = self._xids(
            {i: self._gpus[i] for i in range(count) if rows[i]["state"] == "ok"}, until
        )
        seconds = time.monotonic() - started
        return {
            **system.facts,
            "xid_reason": system.xid_reason,
            "gpus": rows,
            "xids": xids,
            "seconds": seconds,
        }

    def last_words(self, until: float) -> dict[str, Any]:
        """Only the Xid events since the last sample."""
        return {"xids": self._xids({}, until)}

    def _rows(self, count: int, until: float) -> list[dict[str, Any]]:
        for index in range(count):
            gpu = self._gpus.setdefault(index, GpuHandle(index))
            gpu.worker.do(gpu.sample)
        gpus = [self._gpus[i] for i in range(count)]
        return [dict(gpu.row) if gpu.worker.done_by(until) else gpu.hanging() for gpu in gpus]

    def _xids(self, watch: Mapping[int, GpuHandle], until: float) -> dict[str, list[int]]:
        """Subscribe to the Xid events of the GPUs in `watch`, then take those received so far, by
        UUID."""
        system = self._system

        def work() -> None:
            system.xid_reason = None
            system.watch(watch)
            system.poll_events()

        if not (system.worker.do(work) and system.worker.done_by(until)):
            return {}
        taken, system.xids = system.xids, {}
        return taken


def main(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until EOF."""
    probe = Probe()
    for line in requests:
        request = json.loads(line)
        answer = probe.last_words if request.get("only") == "xids" else probe.sample
        document = answer(float(request["until"]))
        answers.write(json.dumps(document) + "\n")
        answers.flush()


if __name__ == "__main__":
    children.continue_when_the_parent_dies()
    with os.fdopen(os.dup(1), "w") as own:
        # The driver library's output must not mix with ours.
        os.dup2(2, 1)
        main(sys.stdin, own)
        own.flush()
        # A thread that hangs in the driver would block an orderly exit forever.
        os._exit(0)
