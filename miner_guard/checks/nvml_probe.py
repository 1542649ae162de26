"""A long-lived child that reads all GPUs on request: `python -m miner_guard.checks.nvml_probe`.

A driver call can block forever, in a state that no signal interrupts. So the child writes what it
knows as it goes, and the guard (`miner_guard.checks.nvml`) gives up on it at a deadline: the last
line then names the call that hangs, and the rows before it count.

A request is a line of JSON on stdin: `skip`, the indices of GPUs to leave out; `events`, whether to
take Xid events. The answers are lines on stdout, in this order: `call` before each driver call,
`driver` with the state, the versions and the number of GPUs, `row` for each GPU, and `xids`, the
Xid events since the last request, by UUID. The probe exits at EOF.

Each field is read by itself, so that an unreadable one does not affect the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TextIO

import pynvml as nvml

from miner_guard.system import children

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


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t from nvml.h. nvidia-ml-py up to 13.595 declares the cluster UUID with 80
    bytes instead of 16, and with that layout every fabric reads as "not supported"."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


_FABRIC_WAITS = (1, 2)
"""NVML_GPU_FABRIC_STATE_NOT_STARTED and _IN_PROGRESS."""


class Field(NamedTuple):
    """One or more values from one NVML call."""

    names: tuple[str, ...]
    read: Callable[[Any], tuple[Any, ...]]
    constant: bool = False
    """Read only until it is known: it does not change while the driver is loaded."""

    vital: bool = False
    """Readable from a working GPU in every container, so an unknown error here is the GPU's
    fault."""


def _one(
    name: str, function: str, *arguments: Any, scale: float | None = None, constant: bool = False
) -> Field:
    def read(handle: Any) -> tuple[Any, ...]:
        value = getattr(nvml, function)(handle, *arguments)
        return (value if scale is None else value * scale,)

    return Field((name,), read, constant)


def _memory(handle: Any) -> tuple[Any, ...]:
    # Use version 2: version 1 includes the driver's reserved memory (idle A100: 912 MB, not 8).
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_SUPPORTED):
            raise
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.used, memory.total


def _throttle(handle: Any) -> tuple[Any, ...]:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return ([name for bit, name in THROTTLE.items() if bits & bit],)


def _remapped(handle: Any) -> tuple[Any, ...]:
    _, uncorrected, pending, failure = nvml.nvmlDeviceGetRemappedRows(handle)
    return uncorrected, bool(pending), bool(failure)


def _fabric(handle: Any) -> tuple[Any, ...]:
    info = _FabricInfo()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return (info.state in _FABRIC_WAITS,)


FIELDS = (
    _one("uuid", "nvmlDeviceGetUUID", constant=True)._replace(vital=True),
    _one("name", "nvmlDeviceGetName", constant=True),
    Field(("memory_used_bytes", "memory_total_bytes"), _memory, vital=True),
    Field(("utilization_ratio",), lambda gpu: (nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,)),
    _one("temperature_c", "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    _one("power_w", "nvmlDeviceGetPowerUsage", scale=1e-3),
    Field(("throttle",), _throttle),
    _one(
        "ecc_uncorrected",
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
    ),
    Field(("rows_uncorrected", "remap_pending", "remap_failed"), _remapped),
    _one("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    _one("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", constant=True),
    Field(("fabric_waits",), _fabric),
    Field(("mig",), lambda gpu: (nvml.nvmlDeviceGetMigMode(gpu)[0],)),
)
"""In the order in which they are read: the identity first, so that a GPU that fails halfway is
still named."""

FIELD_NAMES = tuple(name for field in FIELDS for name in field.names)


STATES = {
    nvml.NVML_ERROR_GPU_IS_LOST: "lost",
    nvml.NVML_ERROR_RESET_REQUIRED: "reset_required",
    nvml.NVML_ERROR_UNKNOWN: "unknown",
}
"""Errors that concern the GPU itself; any other error only means that a field is unreadable. An
unknown error concerns the GPU only if the field is vital: drivers also return it for a healthy GPU,
for example when asked about the fabric."""


_DEPRECATED, _NOT_SUPPORTED = 26, "Not Supported"
"""NVML_ERROR_DEPRECATED: a newer driver no longer answers, which is no fault of the GPU."""


class Gpu:
    """One GPU: its handle, and the constants that were read from it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.constants: dict[str, Any] = {}
        self._handle: Any = None
        self._unsupported: dict[str, str] = {}

    def row(self, calling: Callable[[str], None]) -> dict[str, Any]:
        """Read all fields. An unreadable one is null, with its reason under `unread`. `calling` is
        called with the name of each field before it is read."""
        unread = dict(self._unsupported)
        row: dict[str, Any] = {
            "index": self.index,
            "state": "ok",
            "error": None,
            "unread": unread,
            **dict.fromkeys(FIELD_NAMES),
            **self.constants,
        }
        at = "handle"
        try:
            calling(at)
            self._handle = self._handle or nvml.nvmlDeviceGetHandleByIndex(self.index)
            for field in FIELDS:
                at = field.names[0]
                if at in self.constants or at in self._unsupported:
                    continue
                calling(at)
                self._read(field, row, unread)
        except nvml.NVMLError as error:
            # The handle failed, or the error concerns the GPU itself: stop reading this GPU.
            state = STATES.get(error.value, "unreadable")
            row |= {"state": state, "error": f"{error} in {at}"}
            self._handle = None
        return row

    def _read(self, field: Field, row: dict[str, Any], unread: dict[str, str]) -> None:
        first = field.names[0]
        try:
            values = dict(zip(field.names, field.read(self._handle), strict=True))
        except nvml.NVMLError as error:
            if error.value in STATES and (field.vital or error.value != nvml.NVML_ERROR_UNKNOWN):
                raise
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, _DEPRECATED):
                self._unsupported[first] = _NOT_SUPPORTED
            unread[first] = self._unsupported.get(first, str(error))
            return
        except Exception as error:  # noqa: BLE001  the bindings may lack the field, or a struct may have changed; only this field is affected
            unread[first] = f"{type(error).__name__}: {error}"
            return
        row.update(values)
        if field.constant:
            self.constants.update(values)


class Probe:
    """Reads the driver and all GPUs. The driver is initialised once per process, since pynvml never
    unloads the library."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._initialised = False
        self._gpus: dict[int, Gpu] = {}
        self._events: Any = None
        self._uuids: dict[int | None, str] = {}
        """UUIDs of the GPUs whose Xid events are subscribed to, by the address of the handle: a GPU
        that fell off the bus can no longer report its UUID."""

    def answer(self, skip: Sequence[int], events: bool) -> None:
        """Answer one request."""
        driver = self._driver()
        self._say(driver=driver)
        rows = [self._row(index) for index in range(driver["count"] or 0) if index not in skip]
        self._say(xids=self._xids(rows) if events else {})

    def _say(self, **message: Any) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def _calling(self, call: str, gpu: int | None = None) -> None:
        self._say(call=call, gpu=gpu)

    def _driver(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"state": "ok", "code": None, "reason": None}
        try:
            if not self._initialised:
                self._calling("nvmlInit")
                nvml.nvmlInit()
                self._initialised = True
            self._calling("nvmlSystemGetDriverVersion")
            facts["driver"] = nvml.nvmlSystemGetDriverVersion()
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            facts["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
            return {**facts, "count": nvml.nvmlDeviceGetCount()}
        except nvml.NVMLError as error:
            missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            state = "absent" if missing else "failed"
            return {"state": state, "code": error.value, "reason": str(error), "count": None}

    def _row(self, index: int) -> dict[str, Any]:
        gpu = self._gpus.setdefault(index, Gpu(index))
        row = gpu.row(lambda call: self._calling(call, index))
        self._say(row=row)
        return row

    def _xids(self, rows: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
        """Subscribe to the Xid events of new GPUs, then take those received so far without
        waiting."""
        xids_by_gpu: dict[str, list[int]] = {}
        self._calling("nvmlEventSetWait")
        try:
            self._events = self._events or nvml.nvmlEventSetCreate()
            for row in rows:
                if row["uuid"] not in self._uuids.values() and row["state"] == "ok":
                    handle = nvml.nvmlDeviceGetHandleByIndex(row["index"])
                    nvml.nvmlDeviceRegisterEvents(
                        handle, nvml.nvmlEventTypeXidCriticalError, self._events
                    )
                    self._uuids[_address(handle)] = row["uuid"]
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = self._uuids.get(_address(event.device), "unknown")
                xids_by_gpu.setdefault(uuid, []).append(int(event.eventData))
        except nvml.NVMLError:
            # A timeout: there are no more events. Or a refusal: a container may not subscribe.
            return xids_by_gpu


def _address(handle: Any) -> int | None:
    """The value that two handles to the same GPU share."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def main(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until EOF."""
    probe = Probe(answers)
    for line in requests:
        probe.answer(**json.loads(line))


if __name__ == "__main__":
    children.continue_when_the_parent_dies()
    with os.fdopen(os.dup(1), "w") as answers:
        # The driver library's output must not mix with ours.
        os.dup2(2, 1)
        main(sys.stdin, answers)
