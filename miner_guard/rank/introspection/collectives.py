"""Dumps torch's Flight Recorder to a file at the supervisor's request. The last collectives in it
identify the late rank.

Only code inside the rank's process can make the dump: a thread that sleeps until a datagram
arrives. The thread costs training nothing, and it can respond whenever the GIL is free, as it is
while a rank waits.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path

from miner_guard.rank.notify import Notifier
from miner_guard.state_dir import write_atomic

_LAST = 64
"""How many of the latest collectives to keep from each dump."""

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The first dumps NCCL's collectives and exists only in torch's CUDA builds; the second dumps
gloo's."""


def serve(notifier: Notifier, path: Path) -> None:
    """On each datagram to `PATH.ask`, replace `path`. Raises OSError."""
    notifier.answer(asking(path), lambda: _answer(path))


def asking(path: Path) -> Path:
    """Return the path of the socket that takes requests for a dump to `path`."""
    return path.with_name(path.name + ".ask")


def _answer(path: Path) -> None:
    try:
        document = _last_collectives()
    except Exception as error:  # noqa: BLE001 - a torch build without the recorder must not end this thread; the file gives the reason
        document = {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        write_atomic(path, json.dumps(document, default=str))


def _last_collectives() -> dict[str, object]:
    recorders = importlib.import_module("torch._C._distributed_c10d")
    keys = ("collective_seq_id", "process_group", "profiling_name", "state", "is_p2p")
    entries: list[dict[str, object]] = []
    dumps = [dump for name in _RECORDERS if (dump := getattr(recorders, name, None)) is not None]
    if not dumps:
        raise LookupError(f"this torch has none of {', '.join(_RECORDERS)}")
    for dump in dumps:
        kept = json.loads(dump()).get("entries", [])[-_LAST:]
        entries += [{key: entry.get(key) for key in keys} for entry in kept]
    return {"entries": entries}
