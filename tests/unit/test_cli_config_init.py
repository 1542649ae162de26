"""`config` shows values and origins without secrets; `init` writes files that work, and overwrites
nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard import state_dir
from miner_guard.cli.init import guard_toml
from miner_guard.cli.main import run
from miner_guard.config import ChainSettings, Config, loading
from miner_guard.record import status_document
from miner_guard.uploads.audit import AuditReport, audit_repo
from tests.support import requires
from tests.support.present_state import write_status

SN38 = [
    "torchrun",
    "--nproc_per_node=4",
    "neurons/miner.py",
    "--netuid",
    "38",
    "--subtensor.network",
    "finney",
    "--neuron.local_batch_size_train=2",
    "--neuron.local_batch_size_train_effective=512",
]


def test_config_names_the_origin_of_each_value_and_masks_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "guard.toml"
    file.write_text('[gate]\nmin_inner_step = 20\n[alerts]\nurls = ["tgram://12345:abcdef/1"]\n')
    monkeypatch.setenv("MINER_GUARD_HTTP__TOKEN", "a-token-nobody-may-see")
    monkeypatch.setenv("MINER_GUARD_STATE_DIR", str(tmp_path / "state"))
    assert run(["config", "-c", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    values = document["settings"]
    assert values["gate"]["min_inner_step"] == {"value": 20, "origin": str(file)}
    assert values["gate"]["mode"] == {"value": "enforce", "origin": "default"}
    assert values["http"]["token"]["origin"] == "environment MINER_GUARD_HTTP__TOKEN"
    assert document["state_dir"] == str(tmp_path / "state")
    assert run(["config", "-c", str(file), "--changed"]) == 0
    text = capsys.readouterr().out
    assert "min_inner_step = 20" in text
    assert "mode" not in text
    for secret in ("a-token-nobody-may-see", "abcdef"):
        assert secret not in text + json.dumps(document)


def test_settings_that_hold_secrets_are_read_from_the_miners_env_file_below_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise alerts would be lost under pm2, whose filter_env removes secrets from the
    environment."""
    monkeypatch.chdir(tmp_path)
    Path(".env").write_text(
        "MINER_GUARD_ALERTS__URLS=tgram://1:a/2,json://x\nMINER_GUARD_HTTP__TOKEN=t\nOTHER=1\n"
    )
    monkeypatch.setenv("MINER_GUARD_HTTP__TOKEN", "of-the-shell")
    for credentials, origin in (("dotenv", ".env MINER_GUARD_ALERTS__URLS"), ("env", "default")):
        Path("guard.toml").write_text(f'[repo]\ncredentials = "{credentials}"\n')
        assert run(["config", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)["settings"]
        assert values["alerts"]["urls"]["origin"] == origin
        assert values["http"]["token"]["origin"] == "environment MINER_GUARD_HTTP__TOKEN"
    Path("guard.toml").write_text('[repo]\ncredentials = "dotenv"\n')
    Path(".env").write_text("MINER_GUARD_ALERTS__URL=json://x\n")
    assert run(["config"]) == 78
    assert ".env MINER_GUARD_ALERTS__URL: unknown key" in capsys.readouterr().err
    Path(".env").unlink()
    assert run(["config", "--changed"]) == 0
    unread = "# could not read the credentials: the key file .env cannot be read"
    assert unread in capsys.readouterr().out


def test_init_reads_the_command_and_writes_settings_that_load(tmp_path: Path) -> None:
    assert run(["init", "--dir", str(tmp_path), "--name", "m1", "--", *SN38]) == 0
    loaded = loading.load(tmp_path / "guard.toml", env={}).config
    miner = loaded.miner
    assert (miner.profile, miner.batch_size, miner.effective_batch_size) == ("sn38", 2, 512)
    assert (loaded.chain.network, loaded.chain.netuid) == ("finney", 38)


def test_init_fills_bucket_keys_and_hotkey_and_ends_with_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the wallet's file it reads the public address only. The audit names what is missing."""
    address = "5" + "F" * 47
    wallet = tmp_path / "wallets" / "cold" / "hotkeys"
    wallet.mkdir(parents=True)
    (wallet / "hot").write_text(json.dumps({"secretSeed": "0xsecret", "ss58Address": address}))
    (tmp_path / ".env").write_text("export R2_BUCKET_NAME=llama-4b-ws-4-007\nR2_ACCOUNT_ID=a\n")
    asked: list[Any] = []

    def audit(config: Config) -> AuditReport:
        asked.append((config.repo, config.chain, config.miner.profile, Path.cwd()))
        return AuditReport("unknown", "not proven without the model's shapes; call …")

    monkeypatch.setattr("miner_guard.uploads.audit.audit_repo", audit)
    words = ["--wallet.path", str(tmp_path / "wallets"), "--wallet.name", "cold"]
    command = [*SN38[:3], *words, "--wallet.hotkey", "hot"]
    assert run(["init", "--dir", str(tmp_path), "--", *command]) == 0
    assert "AUDIT UNKNOWN: not proven without the model's shapes" in capsys.readouterr().out
    ((repo, chain, profile, where),) = asked
    assert (repo.kind, repo.bucket, repo.credentials) == ("s3", "llama-4b-ws-4-007", "dotenv")
    assert (chain.network, chain.netuid, chain.hotkey) == ("finney", 38, address)
    assert profile == "sn38"
    assert where == tmp_path != Path.cwd()
    assert "0xsecret" not in (tmp_path / "guard.toml").read_text()


@pytest.mark.parametrize(
    ("command", "profile", "netuid"),
    [
        ("uv run --project src/miner python main_pool.py --no-dashboard", "iota", 9),
        ("./main_pool --auto-start", "iota", 9),
        ("./run-manager --env-file .env", "psyche", None),
        ("python train.py", None, None),
    ],
)
def test_init_knows_the_clients_of_the_networks_that_live(
    command: str, profile: str | None, netuid: int | None, tmp_path: Path
) -> None:
    """They publish nothing that could be audited, and print their steps and states."""
    file = tmp_path / "guard.toml"
    file.write_text(guard_toml(command.split(), tmp_path))
    config = loading.load(file, env={}).config
    assert (config.miner.profile, config.chain.netuid) == (profile, netuid)
    assert config.miner.attach == (None if profile is None else "log")
    if profile is not None:
        report = audit_repo(replace(config, chain=ChainSettings()))
        assert "nothing is published that validators judge" in report.detail
        assert "judge nothing that is published" in file.read_text()


def test_every_setting_that_init_suggests_is_one(tmp_path: Path) -> None:
    file = tmp_path / "guard.toml"
    file.write_text(re.sub(r"(?m)^# (\w+ = )", r"\1", guard_toml(["python", "train.py"])))
    assert loading.load(file, env={}).config.repo.kind == "s3"


def test_init_overwrites_nothing_and_then_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ecosystem.config.js").write_text("mine")
    assert run(["init", "--dir", str(tmp_path), "--", "python", "train.py"]) == 1
    assert "already exists; nothing was written" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["ecosystem.config.js"]
    assert (tmp_path / "ecosystem.config.js").read_text() == "mine"


def test_init_passes_settings_file_and_state_directory_on_to_run(tmp_path: Path) -> None:
    flags = ["-c", "mine.toml", "--state-dir", str(tmp_path / "state"), "--name", 'a "b"']
    assert (
        run(["init", "--dir", str(tmp_path), *flags, "--", "python", "train.py", "--lr", "3"]) == 0
    )
    app = _app(tmp_path / "ecosystem.config.js")
    assert app["name"] == 'a "b"'
    assert app["args"][3:6] == ["run", "--name", 'a "b"']
    assert app["args"][8:] == [*flags[:4], "--", "python", "train.py", "--lr", "3"]
    assert (tmp_path / "mine.toml").is_file()


@pytest.mark.parametrize("number", ["007", "²", "١", "4x", ""])
def test_init_takes_only_what_toml_takes_for_a_number(tmp_path: Path, number: str) -> None:
    file = tmp_path / "guard.toml"
    file.write_text(
        guard_toml(
            ["x", "--netuid", number, "--neuron.upload_steps", number, "--nproc_per_node", number]
        )
    )
    assert loading.load(file, env={}).config.chain.netuid != 7


def _app(file: Path) -> dict[str, Any]:
    script = f"console.log(JSON.stringify(require({json.dumps(str(file))}).apps[0]))"
    answer = subprocess.run(
        [requires.tool("node"), "-e", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    app: dict[str, Any] = json.loads(answer.stdout)
    return app


def test_the_written_pm2_file_has_the_settings_of_ours_and_the_command_word_for_word(
    tmp_path: Path,
) -> None:
    awkward = [*SN38, "--wallet.name", 'a "b" $c']
    assert run(["init", "--dir", str(tmp_path), "--name", "miner", "--", *awkward]) == 0
    written, ours = (
        _app(tmp_path / "ecosystem.config.js"),
        _app(requires.REPO / "ecosystem.config.js"),
    )
    assert written["args"][-len(awkward) :] == awkward
    assert 0 not in written["stop_exit_codes"]
    varying = {"args", "cwd"}
    assert {k: v for k, v in written.items() if k not in varying} == {
        k: v for k, v in ours.items() if k not in varying
    }


def test_pm2_starts_an_environment_in_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pm2 runs a script with a space in its path as a line of bash, and drops its arguments."""
    monkeypatch.setattr(sys, "executable", "/home/me/my miner/.venv/bin/python")
    assert run(["init", "--dir", str(tmp_path), "--", "python", "train.py"]) == 0
    app = _app(tmp_path / "ecosystem.config.js")
    assert " " not in app["script"]
    assert app["args"][:3] == [sys.executable, "-u", "/home/me/my miner/.venv/bin/miner-guard"]


def test_init_says_how_the_other_commands_find_a_guard_of_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Next to the guard.toml from `init --name s9`, `status` must not just report that no guard is
    running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINER_GUARD_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run(["init", "--name", "s9", "--", "python", "train.py"]) == 0
    assert "`miner-guard status --name s9`" in capsys.readouterr().out
    write_status(state_dir.choose("s9", None, {"XDG_STATE_HOME": str(tmp_path)}).root, {})
    monkeypatch.setattr(status_document, "running_guards", list)
    for command in (["status"], ["ctl", "pause"]):
        assert run(command) == 3
        assert "no guard is running; using the last one: --name s9" in capsys.readouterr().err
    assert run(["status", "--state-dir", str(tmp_path / "elsewhere")]) == 3
    assert "using the last one" not in capsys.readouterr().err
