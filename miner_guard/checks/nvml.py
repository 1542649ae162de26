"""The supervisor's side of GPU sampling: runs a child that reads NVML, and restarts it when it
misses its deadline.

A sample is plain data:

- `state`: `ok` · `absent` (no driver library: a machine without NVIDIA GPUs) · `failed` (NVML
  refuses; `code` and `reason`) · `hangs` · `unreadable` (the probe itself broke; `reason`)
- `driver`, `nvml`, `cuda_driver`: versions; `count`; `seconds`: how long it took; `taken`:
  monotonic
- `gpus`: one row per GPU: `index`, `uuid`, `pci_bus`, `name`, memory in bytes,
  `utilization_ratio` (some kernel ran), `temperature_c`, `power_w`, clocks in MHz,
  `throttle_bits` and `throttle`, ECC, remapped rows, PCIe, NVLink, modes; `xids` since the last
  sample. A value that could not be read is null, with the reason under `unread`.
- a row's `state`: `ok` · `lost` · `reset_required` · `unknown` · `hangs` · `gone` (an earlier
  sample had it) · `unreadable`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miner_guard.system.children import Backoff, own_module
from miner_guard.system.readiness import ready

Sample = Mapping[str, Any]

_BAD_ROWS = frozenset({"lost", "reset_required", "unknown", "hangs", "gone", "unreadable"})

_CHILD_SHARE = 0.8
"""Share of the deadline after which the child answers with its results so far; the rest is time to
deliver the answer."""

_LAST_WORDS_S = 1.0
"""Time to wait for a retired child, which has only its Xid events left to report."""


class NvmlSampler:
    """Takes one sample at a time from one child. `sample` may block until the deadline: call it
    in a job, never in the main thread.

    Safe from any thread; a second `sample` waits for the first one.
    """

    def __init__(
        self, timeout_s: float, env: Mapping[str, str] | None = None, renew_s: float = 30.0
    ) -> None:
        """`renew_s`: minimum time between restarts of the child after bad samples."""
        self._timeout_s, self._renew_s = timeout_s, renew_s
        self._renewed = -renew_s
        self._env = dict(os.environ if env is None else env)
        self._one_at_a_time = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")
        self._backoff = Backoff()
        self._pause_s = 0.0
        self.on_end: Callable[[str], None] = lambda _how: None
        """Called when a child exits unexpectedly, but only once per series of such exits."""

        self._retired: subprocess.Popen[bytes] | None = None
        """The previous child, kept because it alone receives Xid events until its successor
        subscribes."""
        self._known: dict[str, dict[str, Any]] = {}
        self._pending_xids: dict[str, list[int]] = {}

    def sample(self, timeout_s: float | None = None) -> Sample:
        """Take a sample within `timeout_s` (default: the sampler's own timeout). Never raises."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        with self._one_at_a_time:
            document = self._ask(limit)
            rows = [*document["gpus"], *self._gone(document)]
            self._keep_xids(document.pop("xids", {}))
            self._keep_xids(self._last_words(document["taken"] + limit))
            self._hand_out_xids(rows)
            sample = {
                "driver": None,
                "nvml": None,
                "cuda_driver": None,
                "code": None,
                **document,
                "gpus": rows,
            }
            for row in document["gpus"]:
                if row.get("uuid"):
                    self._known[row["uuid"]] = {
                        k: row[k] for k in ("index", "uuid", "name", "pci_bus")
                    }
            self._renew(
                document["state"] not in ("ok", "absent")
                or any(r["state"] in _BAD_ROWS for r in rows)
            )
        return sample

    def _renew(self, bad: bool) -> None:
        """Replace the child after a bad sample: only a new process recovers from a driver reload,
        and a hung thread never returns.

        Do so at most once every `_renew_s` seconds: if a GPU stays lost, each replacement costs a
        process and the other GPUs' Xid events.
        """
        now = time.monotonic()
        if bad and now - self._renewed >= self._renew_s:
            self._renewed = now
            if self._retired is None:
                self._retired, self._child = self._child, None
            else:
                self._end_child()

    def _last_words(self, until: float) -> Mapping[str, list[int]]:
        """Collect the Xid events that only the retired child received, and end that child. Until
        then, both children report the same new events."""
        child = self._retired
        if child is None or time.monotonic() >= until:
            return {}
        self._retired = None
        try:
            line = _ask(child, {"only": "xids"}, min(until, time.monotonic() + _LAST_WORDS_S))
            heard = json.loads(line or b"{}").get("xids", {})
        except (OSError, ValueError):
            # The child has failed, and its events are lost.
            heard = {}
        _end(child)
        return dict(heard)

    def _keep_xids(self, xids: Mapping[str, list[int]]) -> None:
        for uuid, numbers in xids.items():
            self._pending_xids.setdefault(uuid, []).extend(numbers)

    def _hand_out_xids(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add each GPU's Xid events to its row. If a GPU has no row, keep its events until it has
        one."""
        for row in rows:
            # A row without a UUID (its GPU was lost before it could be named) represents the GPU at
            # its index.
            named = [row.get("uuid")] if row.get("uuid") else self._once_at(row["index"])
            row["xids"] = [
                number for uuid in named for number in self._pending_xids.pop(str(uuid), ())
            ]

    def _once_at(self, index: int) -> list[str]:
        return [uuid for uuid, known in self._known.items() if known["index"] == index]

    def memory_levels(self) -> dict[str, int] | None:
        """Current memory use in bytes by UUID; None if NVML reports none. Blocks as `sample`
        does."""
        rows = self.sample()["gpus"]
        with self._one_at_a_time:
            # Each event is reported once: keep those that came with this answer for the next
            # sample.
            self._keep_xids({r["uuid"]: r["xids"] for r in rows if r.get("uuid")})
        levels = {
            r["uuid"]: int(r["memory_used_bytes"])
            for r in rows
            if r.get("memory_used_bytes") is not None
        }
        return levels or None

    def close(self) -> None:
        """Stop the child. A later `sample` starts another."""
        self._end_child()
        retired, self._retired = self._retired, None
        if retired is not None:
            _end(retired)

    def _gone(self, document: Mapping[str, Any]) -> list[dict[str, Any]]:
        if document["state"] != "ok":
            return []
        here = {row.get("uuid") for row in document["gpus"]}
        # A row without a UUID (its GPU was lost before it could be named) stands for the GPU of its
        # index.
        unnamed = {row["index"] for row in document["gpus"] if not row.get("uuid")}
        return [
            {
                **known,
                "state": "gone",
                "error": "the GPU was present in an earlier sample",
                "memory_used_bytes": None,
                "unread": {},
            }
            for uuid, known in self._known.items()
            if uuid not in here and known["index"] not in unnamed
        ]

    def _ask(self, limit: float) -> dict[str, Any]:
        start = time.monotonic()
        try:
            child = self._running()
            line = _ask(child, {}, start + limit)
        except OSError as error:
            self._end_child()
            return _nothing("unreadable", f"cannot reach the NVML probe: {error}", start)
        if line is None:
            self._end_child()
            return _nothing("hangs", f"no answer within {limit:g} s", start)
        try:
            document = json.loads(line)
        except ValueError:
            code = child.poll()
            self._ended_by_itself(child)
            return _nothing("unreadable", f"the NVML probe exited with {code}", start)
        return {**document, "taken": start}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._ended_by_itself(self._child)
        if self._child is None:
            # A child that keeps exiting costs a process each time, so the pauses grow.
            left_s = self._started + self._pause_s - time.monotonic()
            if left_s > 0:
                raise OSError(f"it keeps exiting; restarting it in {left_s:.0f} s")
            self._started = time.monotonic()
            self._child = subprocess.Popen(
                own_module("miner_guard.checks.nvml_probe"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
            )
        return self._child

    def _ended_by_itself(self, child: subprocess.Popen[bytes]) -> None:
        wait_s = self._backoff.ended(time.monotonic() - self._started)
        self._end_child()
        if self._backoff.first:
            self._pause_s = 0.0
            self.on_end(f"code {child.returncode}")
        else:
            self._pause_s = wait_s

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)


def _ask(child: subprocess.Popen[bytes], request: Mapping[str, Any], until: float) -> bytes | None:
    """Send a request and return the child's answer as `_line` does, waiting until `until`
    (monotonic). Raises OSError if the child is no longer listening."""
    assert child.stdin is not None
    assert child.stdout is not None
    now = time.monotonic()
    child.stdin.write(
        json.dumps({**request, "until": now + _CHILD_SHARE * (until - now)}).encode() + b"\n"
    )
    child.stdin.flush()
    return _line(child.stdout.fileno(), until)


def _end(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
        # A child in uninterruptible sleep does not die yet: a thread reaps it later.
        threading.Thread(target=child.wait, name="nvml-reap", daemon=True).start()


def _line(fd: int, until: float) -> bytes | None:
    """Read one line from `fd`; b"" at EOF without a full line, None once `until` (monotonic) has
    passed."""
    data = b""
    while not data.endswith(b"\n"):
        readable, _ = ready([fd], max(until - time.monotonic(), 0))
        if not readable:
            return None
        chunk = os.read(fd, 65536)
        if not chunk:
            return b""
        data += chunk
    return data


def _nothing(state: str, reason: str, start: float) -> dict[str, Any]:
    seconds = time.monotonic() - start
    return {
        "state": state,
        "reason": reason,
        "count": None,
        "gpus": [],
        "seconds": seconds,
        "taken": start,
    }
