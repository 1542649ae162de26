"""A long-lived child that samples all GPUs on request: `python -m miner_guard.health.nvml_probe`.

A driver call can block forever, in a state that no signal interrupts. So each GPU and the
initialisation have their own threads, and the main thread never calls NVML: it answers by the
deadline with the results so far, and names the hung GPU and the NVML call. Requests and answers are
lines of JSON: `{"until": MONOTONIC}` on stdin; on stdout a sample, in the format described in
`miner_guard.health.nvml`, whose `xids` holds the Xid events since the last answer, by UUID. A
request with `"only": "xids"` gets only those events. The probe exits at EOF.
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
from typing import Any, TextIO

import pynvml as nvml

from miner_guard.health.nvml_fields import FIELDS, NAMES, Field
from miner_guard.system import inherited

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
            **dict.fromkeys(NAMES),
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
            **dict.fromkeys(NAMES),
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


class System:
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
        self._system = System()
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
    inherited.continue_when_the_parent_dies()
    with os.fdopen(os.dup(1), "w") as own:
        # The driver library's output must not mix with ours.
        os.dup2(2, 1)
        main(sys.stdin, own)
        own.flush()
        # A thread that hangs in the driver would block an orderly exit forever.
        os._exit(0)
