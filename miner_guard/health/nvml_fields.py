"""The NVML fields of a GPU in one table, read one by one so that an unreadable field does not
affect the others.

Only the child `nvml_probe` uses this; the supervisor does not import pynvml.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml as nvml

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

NAMES = tuple(name for field in FIELDS for name in field.names)
