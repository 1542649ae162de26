"""The guard writes none of the secrets that the test plants in the environment, on the command line
and in the miner's output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.faults.guarded import guarding

ENVIRONMENT = {
    "R2_WRITE_SECRET_ACCESS_KEY": "planted-r2-write-secret-0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret/0123456789abcdef",
    "HF_TOKEN": "hf_PlantedPlantedPlantedPlanted",
    "WALLET_PASSWORD": "planted-wallet-password",
    "MINER_GUARD_ALERTS__URLS": "json://user:planted-alert-password@127.0.0.1:9/",
    "MINER_GUARD_HTTP__TOKEN": "planted-http-token",
}
PRINTED = {
    "commitment": "0123456789abcdef" * 8,
    "bearer": "Authorization: Bearer planted.bearer.value",
    "mnemonic": "mnemonic: " + " ".join(["plant"] * 12),
    "url": "https://me:planted-url-password@storage.example/x",
    "flag": "--r2.secret_access_key planted-flag-secret",
    "named": "api_key = 'planted-named-key'",
}
ON_COMMAND_LINE = "--wallet.password=planted-argument-password"
SECRETS = [
    *ENVIRONMENT.values(),
    PRINTED["commitment"],
    "planted.bearer.value",
    "plant plant",
    "planted-url-password",
    "planted-flag-secret",
    "planted-named-key",
    "planted-argument-password",
    "planted-alert-password",
]

MINER = """
import os, sys, traceback
for line in sys.stdin.read().splitlines():
    print(line, flush=True)
for name in ("R2_WRITE_SECRET_ACCESS_KEY", "HF_TOKEN"):
    print(f"using {name}: {os.environ[name]}", flush=True)
try:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB with key "
                   + os.environ["AWS_SECRET_ACCESS_KEY"])
except RuntimeError:
    traceback.print_exc()
sys.exit(1)
"""


CARELESS = """
from miner_guard.__main__ import main
from miner_guard.record.redaction import Redactor
Redactor.text = lambda self, text: text
Redactor.value = lambda self, value, name="": value
main()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(tmp_path_factory.mktemp("redaction"))


def files_of(folder: Path, entry: str | None = None) -> dict[str, bytes]:
    """Every file of the state directory, and the guard's own console lines, after a run that ended
    badly."""
    script = folder / "miner.py"
    script.write_text(
        f"import io, sys\nsys.stdin = io.StringIO({chr(10).join(PRINTED.values())!r})\n{MINER}"
    )
    with guarding(folder) as guard:
        guard.entry = entry
        miner = [sys.executable, str(script), ON_COMMAND_LINE]
        assert guard.start(miner, "--no-restart", env=ENVIRONMENT).wait(120) == 1, guard.tail()
    state, printed = guard.state.root, guard.output.read_bytes()
    own = [line for line in printed.splitlines() if b"| guard |" in line]
    files = {str(p.relative_to(state)): p.read_bytes() for p in state.rglob("*") if p.is_file()}
    assert b"planted-r2-write-secret" in printed, "the miner's output is relayed unchanged"
    return {**files, "console": b"\n".join(own)}


def test_the_guard_writes_no_planted_secret(written: dict[str, bytes]) -> None:
    planted = [(name, secret) for name in written for secret in SECRETS]
    assert [each for each in planted if each[1].encode() in written[each[0]]] == []


def test_without_the_redactor_it_would_write_them(tmp_path: Path) -> None:
    careless = tmp_path / "careless.py"
    careless.write_text(CARELESS)
    files = b"".join(files_of(tmp_path, str(careless)).values())
    leaked = {secret for secret in SECRETS if secret.encode() in files}
    assert leaked >= {ENVIRONMENT["AWS_SECRET_ACCESS_KEY"], "planted-argument-password"}


def test_redacted_files_still_say_what_happened(written: dict[str, bytes]) -> None:
    assert b"MINER STARTED" in written["console"]
    assert b"--wallet.password=[redacted]" in written["console"]
    events = {json.loads(line)["event"] for line in written["guard.jsonl"].splitlines()}
    assert {"guard_started", "miner_started", "miner_exited", "guard_stopped"} <= events
