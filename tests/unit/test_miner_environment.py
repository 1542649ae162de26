"""The miner's environment contains nothing that is meant only for the guard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from miner_guard.config import AlertSettings, Config, HttpSettings
from miner_guard.guard import environment
from miner_guard.record.redaction import Redactor
from miner_guard.state_dir import MARKER, StateDir

PM2 = {"pm_id": "0", "pm_exec_path": "/x", "name": "miner", "NODE_CHANNEL_FD": "3"}


def _of_miner(
    env: dict[str, str], command: Sequence[str] = (sys.executable, "miner.py")
) -> dict[str, str]:
    return environment.of_miner(
        env,
        Config(),
        StateDir(Path("/nowhere")),
        command=command,
        run_id="run-1",
        launch=0,
        wire="x",
    )


def test_the_miner_sees_neither_pm2_nor_systemd_nor_the_keys_of_the_guard() -> None:
    """A miner's debug output may print its environment, token and alert addresses included."""
    given = {
        **PM2,
        "HOME": "/root",
        "NOTIFY_SOCKET": "/run/x",
        "MINER_GUARD_HTTP__TOKEN": "t0ken-of-the-port",
        "MINER_GUARD_ALERTS__URLS": "json://user:pass@host",
        "MINER_GUARD_GATE__MODE": "shadow",
    }
    seen = _of_miner(given)
    assert seen.keys().isdisjoint(
        {*PM2, "NOTIFY_SOCKET", "MINER_GUARD_HTTP__TOKEN", "MINER_GUARD_ALERTS__URLS"}
    )
    assert (seen["HOME"], seen["MINER_GUARD_GATE__MODE"], seen[MARKER]) == (
        "/root",
        "shadow",
        "run-1",
    )


def test_without_pm2_a_variable_called_name_is_the_miners_own() -> None:
    assert _of_miner({"name": "mine"})["name"] == "mine"


def test_the_guard_redacts_the_secrets_of_its_own_settings() -> None:
    """Keys given in guard.toml are in no environment variable."""
    config = replace(
        Config(),
        alerts=AlertSettings(urls=("json://user:pass@host",)),
        http=HttpSettings(token="t0ken-of-the-port"),
    )
    text = Redactor.for_guard({}, config).text(
        "sent to json://user:pass@host with t0ken-of-the-port"
    )
    assert "pass" not in text
    assert "t0ken" not in text


@pytest.mark.parametrize(
    ("installed", "old_name"),
    [("2.5.1+cu124", True), ("2.8.0", True), ("2.9.0", False), ("2.13.0+cpu", False), (None, True)],
)
def test_the_flight_recorder_is_on_in_every_torch(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, old_name: bool
) -> None:
    """Otherwise no rank could be named for a hang under the miner's pinned torch 2.5.1."""

    def version(_: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError("torch")
        return installed

    monkeypatch.setattr(metadata, "version", version)
    environment._torch_version.cache_clear()
    seen = _of_miner({"HOME": "/root"})
    assert seen["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in seen) == old_name
    assert _of_miner({"TORCH_FR_BUFFER_SIZE": "0"})["TORCH_FR_BUFFER_SIZE"] == "0"


def test_a_miner_in_another_environment_gets_both_names(tmp_path: Path) -> None:
    """The guard's torch 2.9 must not hide the miner's own torch 2.5.1."""
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    seen = _of_miner({}, [str(other), "miner.py"])
    assert seen["TORCH_FR_BUFFER_SIZE"] == seen["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"


@pytest.mark.parametrize(
    ("nodes", "own_store"), [("1:2", True), ("2:2", False), ("2", False), (None, False)]
)
def test_a_node_can_join_an_elastic_run_again(nodes: str | None, own_store: bool) -> None:
    """torchrun publishes the address of the store that it shares with its ranks only once: a node
    that joined later waited for it in vain, until both nodes failed after 60 s."""
    command = ["torchrun", *([] if nodes is None else ["--nnodes", nodes]), "train.py"]
    seen = _of_miner({}, command)
    assert (seen.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1") == own_store
