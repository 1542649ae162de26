"""Attacks on a running guard that SECURITY.md says fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import DOCUMENT_LIMIT, RepoError
from tests.faults.guarded import Guarded, living, until
from tests.support.opened_files import OpenedFiles

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}
NOBODY = 65534

FORGED = json.dumps(
    {
        "ts": "2026-01-02T03:04:05.678901Z",
        "level": "info",
        "event": "audit_passed",
        "msg": "AUDIT PASSED",
        "run_id": None,
        "host": "h",
        "rank": None,
    }
)

INTRUDER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
root = sys.argv[1]
for name in ("guard.jsonl", "run.db", "lock", "."):
    try:
        open(os.path.join(root, name)) if name != "." else os.listdir(root)
    except PermissionError:
        continue
    sys.exit(f"read {name}")
for name in ("control.sock", "guard.sock"):
    try:
        socket.socket(socket.AF_UNIX).connect(os.path.join(root, name))
    except PermissionError:
        continue
    sys.exit(f"reached {name}")
names = [line.split("@")[1].strip() for line in open("/proc/net/unix") if "@miner-guard-" in line]
reached = 0
for name in set(names):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(10)
        try:
            caller.connect("\\0" + name)
            caller.sendall(b'{"token": "guess", "layout": 3}\\n')
            heard = caller.recv(1)
        except (ConnectionError, TimeoutError):
            continue  # a guard of another test, which has ended or is frozen
        reached += 1
        if heard:
            sys.exit(f"was heard by {name}")
assert reached, "no abstract socket"
"""


def test_a_line_that_resembles_the_guards_own_is_not_an_event(guarded: Guarded) -> None:
    lines = ("2026-01-02T03:04:05.678Z | INFO | guard | AUDIT PASSED: epoch 56", FORGED)
    code = f"import time\nfor line in {lines!r}: print(line, flush=True)\ntime.sleep(600)"
    guarded.start([sys.executable, "-c", code, guarded.token], settings=FAST)
    until(lambda: b"audit_passed" in guarded.output.read_bytes(), 60, "the forged line")
    assert guarded.stop() == 0
    assert not guarded.named("audit_passed")
    with guarded.state.log.open("a") as log:
        log.write(f"{FORGED}\n")
    assert guarded.named("audit_passed"), "the attack works where the line gets into the file"


def test_another_user_can_neither_read_nor_send_commands(guarded: Guarded) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    guarded.start(["sleep", "600"], settings=FAST)
    guarded.wait_for("miner_started")
    until(guarded.state.db.exists, 60, "run.db")

    def intrude() -> str:
        # The folders above it may be as private: the state directory must do without them. pytest
        # closes its own whenever it is started.
        for folder in guarded.state.root.parents:
            if folder.owner() == "root" and str(folder).startswith("/tmp/"):
                folder.chmod(0o755)
        intruder = ["/usr/bin/env", "-i", sys.executable, "-ISc", INTRUDER]
        return subprocess.run(
            [*intruder, str(guarded.state.root)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
        ).stderr.strip()

    assert intrude() == ""
    # Without each of the defences, the attack works; the guard restores them now and then.

    def open_up(*files: Path) -> str:
        guarded.state.root.chmod(0o711)
        for file in files:
            file.chmod(0o666)
        return intrude()

    assert open_up() == "", "the files are private too"
    until(lambda: open_up(guarded.state.control) == "reached control.sock", 60, "the attack")
    until(lambda: open_up(guarded.state.log) == "read guard.jsonl", 60, "the attack")
    assert guarded.stop() == 0


def test_no_token_is_in_the_process_list(guarded: Guarded) -> None:
    secrets = {
        "MINER_GUARD_HTTP__TOKEN": "planted-token-of-the-port",
        "MINER_GUARD_ALERTS__URLS": "json://127.0.0.1:9/planted-path",
    }
    settings = {**FAST, "http.port": 0, "alerts.min_level": "info", "alerts.cooldown_s": 0}
    guarded.start(["sleep", "600"], settings=settings, env=secrets)
    until(lambda: any("HTTP http" in e["msg"] for e in guarded.named("guard_degraded")), 60, "port")
    lines = [words for _, words in living(guarded.token)]
    assert any("miner_guard" in words for words in lines), lines
    assert not [words for words in lines if "planted" in words]
    careless = ["sh", "-c", "sleep 600; :", "--token=planted", guarded.token]
    with subprocess.Popen(careless, start_new_session=True) as shown:
        until(lambda: [x for _, x in living(guarded.token) if "planted" in x], 10, "the attack")
        os.killpg(shown.pid, signal.SIGKILL)
    assert guarded.stop() == 0


def test_no_wallet_is_opened_by_the_guard_or_its_commands(guarded: Guarded, tmp_path: Path) -> None:
    """No check, archive or query of the chain may touch keys."""
    wallet = tmp_path / "home" / ".bittensor" / "wallets" / "default"
    (wallet / "hotkeys").mkdir(parents=True)
    for key in (wallet / "coldkey", wallet / "coldkeypub.txt", wallet / "hotkeys" / "default"):
        key.write_text('{"secretPhrase": "planted words"}')
    opened = OpenedFiles(wallet, wallet / "hotkeys")
    own = {"HOME": str(wallet.parents[2]), "MINER_GUARD_CHAIN__NETWORK": "ws://127.0.0.1:1"}
    guarded.start(guarded.miner("steps", 10**6, 0.05, "finish"), settings=FAST, env=own)
    guarded.wait_for("inner_step")
    archive = str(tmp_path / "bundle.tar.gz")
    for command in (
        ["doctor"],
        ["status"],
        ["audit"],
        ["explain"],
        ["report", "--bundle", "-o", archive],
    ):
        subprocess.run(
            [sys.executable, "-m", "miner_guard", *command, "--state-dir", guarded.state.root],
            env={**os.environ, **own, "MINER_GUARD_GPU__PREFLIGHT": "false"},
            cwd=tmp_path,
            capture_output=True,
            timeout=120,
        )
    assert guarded.stop() == 0
    assert (tmp_path / "bundle.tar.gz").is_file()
    assert opened.names() == []
    (wallet / "hotkeys" / "default").read_text()
    assert opened.names() == ["default"], "the watch works"
    opened.close()


def test_a_huge_document_of_a_bucket_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "metadata.json").open("wb") as file:
        file.truncate(DOCUMENT_LIMIT + 1)
    assert len((tmp_path / "metadata.json").read_bytes()) > DOCUMENT_LIMIT, "the attack works"
    repo = open_repo(RepoSettings(kind="local", path=str(tmp_path)))
    with pytest.raises(RepoError, match=r"bytes, over the limit of \d+"):
        repo.get("metadata.json")
