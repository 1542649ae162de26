"""The guard warns once about a secret that the miner prints, and never repeats the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.config import Config, RepoSettings
from miner_guard.watch.output import SecretLeaksMonitor
from tests.support.contexts import context
from tests.support.output import show

SECRET = "s3cr3t-of-the-bucket"


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SecretLeaksMonitor:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", SECRET)
    return SecretLeaksMonitor(context(tmp_path))


def test_a_printed_secret_is_named_once_even_where_two_chunks_share_it(
    monitor: SecretLeaksMonitor,
) -> None:
    text = f"debug: {SECRET}\n".encode()
    events = show(monitor, *(bytes([byte]) for byte in text + text))
    assert [f.fields["kind"] for f in events] == ["the value of R2_WRITE_SECRET_ACCESS_KEY"]
    assert SECRET not in events[0].text


def test_a_secret_of_the_miners_env_file_is_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pm2, only that file contains the keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("export WANDB_API_KEY='key-of-the-file' # mine\n")
    config = Config(repo=RepoSettings(credentials="dotenv"))
    monitor = SecretLeaksMonitor(context(tmp_path, config=config))
    (event,) = show(monitor, b"login: key-of-the-file\n")
    assert event.fields["kind"] == "the value of WANDB_API_KEY"


def test_a_commitment_in_the_debug_log_is_warned_of(monitor: SecretLeaksMonitor) -> None:
    (event,) = show(monitor, b"Commitment - [" + b"0a" * 64 + b"]\n")
    assert "commitment" in event.text
    assert "0a0a" not in event.text


def test_of_several_lines_the_longest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value whose lines are all short would match ordinary words."""
    monkeypatch.setenv("DEPLOY_KEY", "-- BEGIN --\nline-of-the-key\n-- END --")
    monkeypatch.setenv("SPARE_KEY", "Step\nStep\nStep\n")
    monitor = SecretLeaksMonitor(context(tmp_path))
    events = show(monitor, b"Outer Step: 1\nline-of-the-key\n")
    assert [e.fields["kind"] for e in events] == ["the value of DEPLOY_KEY"]


def test_ordinary_output_says_nothing(monitor: SecretLeaksMonitor) -> None:
    assert show(monitor, b"Outer Step: 1 | Inner Step: 2\n" * 1000) == []
