"""Collects the data that support asks for (source 004, "Getting Help"), redacts it, and packs it
with a manifest.

Redaction is the last step and has no exceptions: every file goes through it as text.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard import __version__, state_dir
from miner_guard.config.loading import Settings
from miner_guard.record.lines import console_line, inner_step, json_line
from miner_guard.record.redaction import GONE, MASK, Redactor
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.state_dir import json_text
from miner_guard.system.clock import iso_utc

_COMMAND_S = 20.0
_MAX_EVENTS = 20_000
_MAX_SIZE = 5_000_000
_INCIDENTS = 10

_UPLOADS = {"upload_blocked", "upload_allowed", "upload_succeeded", "upload_failed"}
_QUESTIONS = (
    ("1-gpu-diagnostics.txt", "GPU diagnostics at the last start", {"gpu_diagnostics"}, "debug", 9),
    ("2-steps.txt", "the last 20 training steps", {"inner_step"}, "debug", 20),
    ("3-warnings.txt", "the last 30 warnings and errors", set[str](), "warning", 30),
    ("4-uploads.txt", "the last 20 upload events", _UPLOADS, "debug", 20),
)
"""What source 004 asks for: file, description, events, lowest level, how many."""

_CUDA = """
try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"CUDA: unknown: {error}")
there, count = torch.cuda.is_available(), torch.cuda.device_count()
device = torch.cuda.get_device_name(0) if there else None
print(f"torch {torch.__version__}, CUDA: {there}, Count: {count}, Device: {device}")
"""
_PACKAGES = ("torch", "bittensor", "transformers", "boto3", "nvidia-ml-py", "psutil")


@dataclass(frozen=True)
class Item:
    """One file in the bundle."""

    name: str
    what: str
    text: str


def collect(state: state_dir.StateDir, since: str, settings: Settings) -> Iterator[Item]:
    """All items. An item whose data is unavailable contains the reason instead."""
    for name, what, events, level, count in _QUESTIONS:
        hits = RunReader(state.db).events(events, min_level=level, limit=count, newest=True)
        yield Item(name, what, _lines(hits) or "none in the log\n")
    yield Item("5-cuda.txt", "torch's CUDA report", run([sys.executable, "-c", _CUDA]))
    yield Item("6-nvidia-smi.txt", "nvidia-smi", run(["nvidia-smi"]))
    yield Item("events.jsonl", f"events since {since}", _events(state, since))
    for path, what in (
        (state.costs, "the cost ledger"),
        (state.gate_inputs, "the gate's inputs"),
        (state.host_facts, "facts about this host from the last run"),
    ):
        yield Item(path.name, what, _file(path))
    yield Item("status.json", "the guard's last state", json_text(RunReader(state.db).now()))
    yield Item("settings.json", "effective settings and where each came from", _settings(settings))
    yield Item("system.json", "system, versions, limits", json.dumps(_system(), indent=1))
    yield from _incidents(state)


def _lines(hits: Iterable[StoredEvent]) -> str:
    return "".join(console_line(_whole(hit), emoji=True) + "\n" for hit in hits)


def _whole(hit: StoredEvent) -> Mapping[str, Any]:
    """A step line with outer step, loss and LR, which the console's lacks if the miner prints
    them."""
    record = hit.record()
    return {**record, "msg": inner_step(record)} if hit.name == "inner_step" else record


def _events(state: state_dir.StateDir, since: str) -> str:
    hits = RunReader(state.db).events(since=since, limit=_MAX_EVENTS, newest=True)
    return "".join(json_line(hit.record()) + "\n" for hit in hits)


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-_MAX_SIZE:]
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"


def run(command: list[str]) -> str:
    """Run a command and return its output, or the reason why there is none."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed\n"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer from {' '.join(command[:1])} within {_COMMAND_S:.0f} s\n"
    except OSError as error:
        return f"could not be started: {error.strerror}\n"
    ending = f"exit code {done.returncode}\n" if done.returncode else ""
    return done.stdout.decode("utf-8", "replace") + ending


def _settings(settings: Settings) -> str:
    table = {dotted: {"value": v, "origin": origin} for dotted, v, origin in settings.rows()}
    return json.dumps(table, indent=1, default=str)


def _system() -> Mapping[str, Any]:
    from importlib import metadata

    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "miner_guard": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "packages": versions,
        "limits": run(["bash", "-c", "ulimit -a"]),
        "disk": run(["df", "-h"]),
        "environment_names": sorted(os.environ),
    }


def _incidents(state: state_dir.StateDir) -> Iterator[Item]:
    folders = sorted(state.incidents.iterdir()) if state.incidents.is_dir() else []
    for folder in folders[-_INCIDENTS:]:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix != ".bin":
                name = f"incidents/{path.relative_to(state.incidents)}"
                yield Item(name, "stored evidence", _file(path))


def pack(output: Path, items: Iterable[Item], redactor: Redactor) -> dict[str, Any]:
    """Write the archive, redacted, with manifest.json first, and return the manifest. Replaces
    `output` only once the archive is complete. Raises OSError."""
    contents = [(item.name, item.what, redactor.public(item.text).encode()) for item in items]
    files = [
        {"name": n, "what": w, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for n, w, data in contents
    ]
    manifest = {
        "made": iso_utc(time.time()),
        "by": f"miner-guard {__version__}",
        "redacted": f"secrets, recognised by format or by variable name, are replaced by {MASK}; "
        f"of everything else only words, numbers and paths are in here, the rest is {GONE}",
        "files": files,
    }
    draft = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(draft, "w:gz") as archive:
            _add(archive, "manifest.json", json.dumps(manifest, indent=1).encode())
            for name, _, data in contents:
                _add(archive, name, data)
        draft.chmod(0o600)
        os.replace(draft, output)
    finally:
        draft.unlink(missing_ok=True)
    return manifest


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(f"miner-guard-bundle/{name}")
    member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
    archive.addfile(member, io.BytesIO(data))
