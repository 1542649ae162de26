"""The one reader of GPUs: a child process reads NVML, and is replaced when it misses its deadline.

A sample is plain data:

- `state`: `ok` · `absent` (no driver library: a machine without NVIDIA GPUs) · `failed` (NVML
  refuses; `code` and `reason`) · `hangs` · `unreadable` (the probe itself broke; `reason`)
- `driver`, `cuda_driver`: versions; `count`; `taken`: monotonic; `seconds`: how long it took
- `gpus`: one row per GPU with the fields of `nvml_probe.FIELDS`, `index`, `state`, `error`, and
  `xids` since the last sample. A value that could not be read is null, with the reason under
  `unread`.
- a row's `state`: `ok` · `lost` · `reset_required` · `unknown` · `hangs` · `gone` (an earlier
  sample had it) · `unreadable`
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from miner_guard.system.children import Backoff, module_command
from miner_guard.system.descriptors import ready

Sample = Mapping[str, Any]

_HANG_FACTOR = 10
"""A GPU that hung is read again after this many times `renew_s`: each try may leave a process that
cannot die."""


@dataclass
class _Reading:
    """What one child has answered so far."""

    driver: dict[str, Any] | None = None
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    xids: dict[str, list[int]] | None = None
    """None until the child has answered everything."""

    call: str = "the start of the probe"
    gpu: int | None = None
    """The driver call in progress, and the GPU that it reads."""

    def add(self, message: Mapping[str, Any]) -> None:
        if "call" in message:
            self.call, self.gpu = message["call"], message["gpu"]
        elif "row" in message:
            self.rows[message["row"]["index"]] = message["row"]
            self.gpu = None
        else:
            self.driver = message.get("driver", self.driver)
            self.xids = message.get("xids")


class NvmlSampler:
    """Takes one sample at a time from one child. `sample` may block until the deadline: call it
    in a job, never in the main thread.

    Safe from any thread; a second `sample` waits for the first one.
    """

    def __init__(
        self, timeout_s: float, env: Mapping[str, str] | None = None, renew_s: float = 30.0
    ) -> None:
        """`renew_s`: age at which a child is replaced after a bad sample."""
        self._timeout_s, self._renew_s = timeout_s, renew_s
        self._env = dict(os.environ if env is None else env)
        self._one_at_a_time = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")
        self._backoff = Backoff()
        self._pause_s = 0.0
        self._last_end = ""
        self._hung: dict[int, tuple[float, str]] = {}
        """When each GPU that hung is read again (monotonic), and where it hung."""
        self._identities: dict[str, dict[str, Any]] = {}
        """The GPUs of earlier samples, by UUID."""
        self.on_end: Callable[[str], None] = lambda _how: None
        """Called when a child exits unexpectedly, but only once per series of such exits."""

    def sample(self, timeout_s: float | None = None, *, events: bool = True) -> Sample:
        """Take a sample within `timeout_s` (default: the sampler's own timeout). Never raises.
        Without `events`, Xid events stay with the driver for the next sample."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        with self._one_at_a_time:
            taken = time.monotonic()
            sample = self._sample(taken, limit, events)
            bad = sample["state"] not in ("ok", "absent") or any(
                row["state"] in ("lost", "reset_required", "unknown", "gone")
                for row in sample["gpus"]
            )
            # Only a new process recovers from a driver reload.
            if bad and time.monotonic() - self._started >= self._renew_s:
                self._end_child()
        return {**sample, "taken": taken, "seconds": time.monotonic() - taken}

    def _sample(self, taken: float, limit: float, events: bool) -> dict[str, Any]:
        reading, end = _Reading(), taken + limit
        skip = {gpu for gpu, (again, _) in self._hung.items() if taken < again}
        # A GPU that begins to hang takes at most half of the time; the others are read in the rest.
        for until in (taken + limit / 2, end):
            reading = _Reading()
            try:
                self._ask(reading, {"skip": [*skip], "events": events}, until, end)
                break
            except TimeoutError:
                where = f"{reading.call} has not returned"
                self._ended_early(where)
                if reading.gpu is None:
                    break
                skip.add(reading.gpu)
                again = time.monotonic() + _HANG_FACTOR * self._renew_s
                self._hung[reading.gpu] = again, where
            except (OSError, ValueError) as error:
                return self._nothing("unreadable", f"the NVML probe: {error}")
        if reading.driver is None:
            return self._nothing("hangs", f"{reading.call} has not returned for {limit:g} s")
        driver = {"driver": None, "cuda_driver": None, **reading.driver}
        return {**driver, "gpus": self._rows(reading, reading.driver)}

    def _ask(self, reading: _Reading, request: Mapping[str, Any], until: float, end: float) -> None:
        """Send a request and read the answers into `reading`. Raises TimeoutError if a GPU has not
        answered at `until` or the driver at `end`, OSError if the child ended."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        fd = child.stdout.fileno()
        for line in _lines(fd, lambda: end if reading.gpu is None else until):
            reading.add(json.loads(line))
            if reading.xids is not None:
                return
        self._exited(child)
        raise ChildProcessError(self._last_end)

    def _rows(self, reading: _Reading, driver: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A row for each GPU, including those that did not answer and those that are gone."""
        rows, blank = [], dict.fromkeys(name for row in reading.rows.values() for name in row)
        for index in range(driver["count"] or 0):
            row = reading.rows.get(index)
            if row is None:
                state = "hangs" if index in self._hung else "unreadable"
                error = self._hung[index][1] if state == "hangs" else "behind a GPU that hangs"
                row = {**blank, "index": index, "state": state, "error": error, "unread": {}}
            else:
                self._hung.pop(index, None)
            if not row.get("uuid"):
                # Lost before it could be named: the GPU that had this index.
                row |= next((i for i in self._identities.values() if i["index"] == index), {})
            rows.append(row)
        here = {row.get("uuid") for row in rows}
        gone = {"state": "gone", "error": "the GPU was present in an earlier sample", "unread": {}}
        if driver["state"] == "ok":
            missing = (i for uuid, i in self._identities.items() if uuid not in here)
            rows += ({**blank, **identity, **gone} for identity in missing)
        for row in rows:
            if uuid := row.get("uuid"):
                self._identities[uuid] = {name: row.get(name) for name in ("index", "uuid", "name")}
            row["xids"] = (reading.xids or {}).get(str(uuid), [])
        return rows

    def memory_levels(self) -> dict[str, int] | None:
        """Current memory use in bytes by UUID; None if NVML reports none. Blocks as `sample`
        does."""
        return levels(self.sample(events=False)) or None

    def close(self) -> None:
        """Stop the child. A later `sample` starts another."""
        self._end_child()

    def _nothing(self, state: str, reason: str) -> dict[str, Any]:
        unread = dict.fromkeys(("driver", "cuda_driver", "code", "count"))
        return {**unread, "state": state, "reason": reason, "gpus": []}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._exited(self._child)
        if self._child is None:
            # A child that keeps ending early costs a process each time, so the pauses grow.
            remaining_s = self._started + self._pause_s - time.monotonic()
            if remaining_s > 0:
                raise ChildProcessError(f"{self._last_end}; the next try is in {remaining_s:.0f} s")
            self._started = time.monotonic()
            self._child = subprocess.Popen(
                module_command("miner_guard.checks.nvml_probe"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
            )
        return self._child

    def _exited(self, child: subprocess.Popen[bytes]) -> None:
        self._ended_early(f"exited with {child.wait()}")
        if self._backoff.first:
            self.on_end(f"code {child.returncode}")

    def _ended_early(self, how: str) -> None:
        self._last_end = how
        wait_s = self._backoff.ended(time.monotonic() - self._started)
        self._end_child()
        self._pause_s = 0.0 if self._backoff.first else wait_s

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            # A child in uninterruptible sleep does not die yet: a thread reaps it later.
            threading.Thread(target=child.wait, name="nvml-reap", daemon=True).start()


def levels(sample: Sample) -> dict[str, int]:
    """The bytes in use by UUID."""
    return {
        row["uuid"]: int(row["memory_used_bytes"])
        for row in sample["gpus"]
        if row.get("memory_used_bytes") is not None
    }


def _lines(fd: int, until: Callable[[], float]) -> Iterator[bytes]:
    """Lines from `fd` until EOF. Raises TimeoutError once `until()` (monotonic) has passed."""
    data = b""
    while True:
        if not ready([fd], max(until() - time.monotonic(), 0)):
            raise TimeoutError
        chunk = os.read(fd, 65536)
        if not chunk:
            return
        *lines, data = (data + chunk).split(b"\n")
        yield from lines
