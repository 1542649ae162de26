"""The bundle contains everything that source 004 asks for, and none of the secrets that the test
plants."""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.record.redaction import Redactor
from miner_guard.show import bundle
from miner_guard.state_dir import StateDir
from tests.support.guard_log import Log
from tests.support.present_state import write_status
from tests.unit.test_public_lines import FORMS, pieces_of_secrets
from tests.unit.test_redact import LEAKS

SECRETS = {
    "R2_WRITE_SECRET_ACCESS_KEY": "planted-environment-secret",
    "MINER_GUARD_HTTP__TOKEN": "planted-http-token",
    "MINER_GUARD_ALERTS__URLS": "tgram://planted-bot-token/planted-chat",
}

BUNDLE = ("report", "--bundle", "-o")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    """A state directory whose files hold secrets, as if the guard had failed to redact them."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    log = Log(tmp_path / "state")
    log.clock.step_wall(time.time() - log.clock.wall())
    state = log.state
    for step in range(100):
        log.step(step)
    log.say("upload_failed", "error", reason="key planted-environment-secret refused")
    log.say("rank_message", text="hf_" + "a" * 34)
    write_status(state.root, {"command": ["train", "--wallet.password=planted-argument"]})
    evidence = state.incidents / "2026-hang" / "log.txt"
    evidence.parent.mkdir(parents=True)
    leaks = "\n".join(leaking for leaking, _ in LEAKS.values())
    raw = "\n".join(FORMS.values())
    evidence.write_text(
        f"Authorization: Bearer planted.bearer\n{leaks}\n{raw}\nthe last words of it"
    )
    return state


def _unpacked(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        members = {
            member.name.partition("/")[2]: archive.extractfile(member)
            for member in archive.getmembers()
        }
        return {name: data.read() for name, data in members.items() if data is not None}


def test_the_bundle_answers_what_a_helper_asks_and_holds_no_secret(
    state: StateDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Importing torch takes long on a machine that is busy.
    monkeypatch.setattr(bundle, "_COMMAND_S", 120.0)
    output = tmp_path / "help.tar.gz"
    assert run(["report", "--bundle", "-o", str(output), "--state-dir", str(state.root)]) == 0
    files = _unpacked(output)
    manifest = json.loads(files["manifest.json"])
    assert {row["name"] for row in manifest["files"]} == files.keys() - {"manifest.json"}
    for row in manifest["files"]:
        assert hashlib.sha256(files[row["name"]]).hexdigest() == row["sha256"]
    assert len(files["2-steps.txt"].splitlines()) == 20
    assert b"UPLOAD FAILED" in files["3-warnings.txt"]
    assert b"UPLOAD FAILED" in files["4-uploads.txt"]
    assert b"CUDA" in files["5-cuda.txt"]
    assert b"none in the log" in files["1-gpu-diagnostics.txt"]
    assert len(files["events.jsonl"].splitlines()) == 102
    assert b"the last words" in files["incidents/2026-hang/log.txt"]
    planted = (
        "planted-environment-secret",
        "planted-http-token",
        "planted-bot-token",
        "planted-argument",
        "planted.bearer",
        "hf_aaaa",
    )
    planted += (*(secret for _, secret in LEAKS.values()), *pieces_of_secrets())
    leaked = [secret for secret in planted if secret.encode() in b"".join(files.values())]
    assert leaked == []
    assert output.stat().st_mode & 0o077 == 0
    assert "review it before you share it" in capsys.readouterr().out
    monkeypatch.setattr(Redactor, "public", lambda _redactor, text: text)
    careless = tmp_path / "careless.tar.gz"
    assert run(["report", "--bundle", "-o", str(careless), "--state-dir", str(state.root)]) == 0
    raw = b"".join(_unpacked(careless).values())
    assert [secret for secret in planted if secret.encode() in raw], "the attack works"


def test_the_bundle_holds_what_nvidia_smi_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source 004 asks for it. If the driver hangs, the bundle loses only this file."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI 570.133.20  |  18867MiB / 81920MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "18867MiB / 81920MiB" in bundle.run(["nvidia-smi"])
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(bundle, "_COMMAND_S", 0.2)
    assert "no answer" in bundle.run(["nvidia-smi"])
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bundle.run(["nvidia-smi"]) == "nvidia-smi is not installed\n"


def test_an_empty_state_directory_still_gives_a_bundle_and_a_bad_path_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir()
    # The test above runs the real command; importing torch three more times proves nothing.
    monkeypatch.setattr(bundle, "_CUDA", "print('CUDA: not asked')")
    for output, state, code in (("b.tar.gz", "state", 0), ("no/b", "state", 1), ("b", "none", 1)):
        given = [str(tmp_path / output), "--state-dir", str(tmp_path / state)]
        assert run([*BUNDLE, *given]) == code
