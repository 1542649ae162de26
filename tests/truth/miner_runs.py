"""Starts the real miner of a checkout, with and without the guard, and records what it did."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.validators import states

HERE = Path(__file__).resolve().parent
GUARD = "import sys; from miner_guard.cli.main import main; sys.exit(main())"
LIMIT_S = 900.0
_END = "Model state upload completed"
"""Logged by a future's callback, which runs in the upload thread, or in the training thread if the
upload has already ended."""


class Storage:
    """Replaces R2 with moto: the buckets of the miner and of the global model. Logs all
    requests."""

    def __init__(self, folder: Path) -> None:
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends
        from moto.server import create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").disabled = True
        self._calls = folder / "calls.jsonl"
        self._writing = threading.Lock()
        self._app = create_backend_app("s3")
        self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        metadata = {"run": 5, "outer_step": 56, "inner_step": 0, "peer_id": "12D3KooWtest"}
        for bucket in (states.BUCKET, states.MODEL):
            # moto keeps its buckets in this process.
            self._backend.buckets.pop(bucket, None)
            s3_backends.bucket_accounts.clear()
            self._backend.create_bucket(bucket, "us-east-1")
            self._backend.put_object(bucket, "metadata.json", json.dumps(metadata).encode())
        self._server = make_server("127.0.0.1", 0, self._door, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/acct/{{account}}"
        """Contains a placeholder for the account id, which is part of R2's host name."""

        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _door(self, environ: Any, start: Any) -> Any:
        by = re.search(r" by/(\w+)", environ.get("HTTP_USER_AGENT", ""))
        who = by[1] if by else "unknown"
        line = json.dumps(["s3", environ["REQUEST_METHOD"], environ["PATH_INFO"], who])
        with self._writing, self._calls.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        path = re.sub(r"^/acct/[^/]*", "", environ["PATH_INFO"])
        moved = {"PATH_INFO": path, "RAW_URI": path, "REQUEST_URI": path}
        return self._app({**environ, **moved}, start)

    def objects(self) -> dict[str, str]:
        """The digest of each object in the miner's bucket."""
        keys = self._backend.buckets[states.BUCKET].keys
        return {name: hashlib.sha256(keys[name].value).hexdigest() for name in sorted(keys)}


@dataclass(frozen=True)
class Ran:
    """The results of one run of the miner."""

    code: int
    objects: Mapping[str, str]
    lines: Mapping[str, Sequence[str]]
    """The miner's log lines by rank and thread."""

    calls: Sequence[Sequence[str]]
    uploads: Sequence[Mapping[str, Any]]
    """The result of each upload, and a digest of the miner's state after it."""

    printed: str


@dataclass(frozen=True)
class Miner:
    """How to start a checkout's miner."""

    checkout: Path
    ranks: int
    folder: Path

    def run(self, name: str, uploads: int, *, guarded: bool) -> Ran:
        """Run it until it has uploaded so often, alone or under `miner-guard run`."""
        folder = self.folder / name
        (folder / "work").mkdir(parents=True)
        (folder / "calls.jsonl").touch()
        storage, state = Storage(folder), str(folder / "state")
        world = {"folder": str(folder), "endpoint": storage.endpoint, "uploads": uploads}
        env = self._env(world)
        command = self._command()
        if guarded:
            options = ["--no-preflight", "--no-restart", "--attach", "sn38"]
            guard = [sys.executable, "-c", GUARD, "run", *options, "--state-dir", state]
            command = [*guard, "--", *command]
            env |= {"MINER_GUARD_MINER__FINITE": "true", "MINER_GUARD_MINER__PROFILE": "sn38"}
        done = subprocess.run(
            command,
            cwd=folder / "work",
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        storage.close()
        printed = done.stdout + done.stderr
        (folder / "printed.txt").write_text(printed, encoding="utf-8")
        return Ran(
            done.returncode,
            storage.objects(),
            _by_thread(_read(folder / "lines.jsonl")),
            _read(folder / "calls.jsonl"),
            _read(folder / "uploads.jsonl"),
            printed,
        )

    def _env(self, world: Mapping[str, object]) -> dict[str, str]:
        paths = [str(HERE / "miner" / "site"), str(self.checkout), str(HERE.parents[1])]
        path = os.environ.get("PYTHONPATH", "")
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        return {
            **os.environ,
            **(own | {"MASTER_PORT": str(_free_port())} if self.ranks == 1 else {}),
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [path])]),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "MINER_WORLD": json.dumps(world),
        }

    def _command(self) -> list[str]:
        script = str(self.checkout / "neurons" / "miner.py")
        if self.ranks == 1:
            return [sys.executable, script]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return [sys.executable, *torchrun, script]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _read(path: Path) -> list[Any]:
    return states.lines(path) if path.exists() else []


def _by_thread(lines: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """The lines of the training and upload threads. Timing decides how many lines a periodic thread
    prints, and which thread reports the end of an upload."""
    found: dict[str, list[str]] = {}
    for rank, thread, text in lines:
        if text.startswith(_END):
            found.setdefault(f"rank {rank}, ends", []).append(text)
        elif thread == "MainThread" or thread.startswith("model_upload"):
            found.setdefault(f"rank {rank}, {thread}", []).append(text)
    return found
