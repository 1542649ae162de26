"""The startup checks of the repo that a miner publishes to: the clock, the repo and its keys."""

from __future__ import annotations

import http.server
import threading
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from miner_guard.checks import environment
from miner_guard.config import Config, RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import credentials
from tests.support import requires
from tests.support.snapshots import by_name, snapshot


@pytest.mark.parametrize(
    ("skew", "level"),
    [(0.4, "ok"), (-61.0, "warn"), (600.0, "warn"), (1000.0, "critical"), (-5000.0, "critical")],
)
def test_clock_skew_against_the_storage(skew: float, level: str) -> None:
    config = Config(repo=RepoSettings(kind="s3"))
    repo = {"label": "b", "skew_s": skew, "server": "s3.example"}
    checks = by_name(environment.storage_checks(snapshot(config=config, repo=repo)))
    assert checks["host.clock"].level == level


def test_the_storages_date_header_is_read_from_a_refusal_too() -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)
            self.send_header("Date", formatdate(4_000_000_000, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        skew = environment.skew_s(f"http://127.0.0.1:{server.server_port}", 20)
    assert skew > 1e9


def test_a_local_repo_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    document = {"repo": {"kind": "local", "path": str(tmp_path / "repo")}}
    (tmp_path / "repo").mkdir()
    answer = probe.ask("miner_guard.checks.environment", document, 30)
    assert answer.value == {"label": f"folder:{tmp_path / 'repo'}", "credentials": None}
    assert list((tmp_path / "repo").iterdir()) == []
    config = Config(repo=RepoSettings(kind="local", path=str(tmp_path / "repo")))
    assert {
        c.level for c in environment.storage_checks(snapshot(config=config, repo=answer.value))
    } == {"ok"}


def test_an_alert_target_that_apprise_does_not_know_is_named_without_its_address() -> None:
    """Such an address passed `doctor` and the start, and nobody was told of the first crash."""
    requires.module("apprise")
    urls = {"alerts": ["json://localhost", "dis.cord://secret", "nonsense"]}
    answer = probe.ask("miner_guard.checks.environment", urls, 60)
    assert answer.value == {"unusable": [2, 3]}
    checks = environment.environment_checks(snapshot(unusable_alerts=answer.value["unusable"]))
    found = [c.seen for c in checks if c.check == "alerts.target"]
    assert [words.split()[1] for words in found] == ["2", "3"]
    assert "secret" not in " ".join(found)


@pytest.mark.parametrize("kind", ["none", "local"])
def test_a_keys_file_that_no_repo_needs_is_missed_too(tmp_path: Path, kind: Any) -> None:
    """Otherwise alerts would be silently dead: their addresses are in a .env that can't be used."""
    file = tmp_path / ".env"
    asks = Config(
        repo=RepoSettings(kind=kind, path="x", credentials="dotenv", credentials_file=str(file))
    )
    file.write_text("MINER_GUARD_ALERTS__URLS=json://127.0.0.1:9/")
    file.chmod(0o600)
    assert credentials.problem(asks.repo) is None
    file.chmod(0o666)
    problem = credentials.problem(asks.repo)
    check = by_name(
        environment.storage_checks(snapshot(config=asks, repo={"label": "x"}, keys_file=problem))
    )["repo.keys_file"]
    assert (check.level, "chmod 600" in check.seen) == ("warn", True)
    assert "alerts" in str(check.next_step)


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"R2_WRITE_ACCESS_KEY_ID": "a", "R2_WRITE_SECRET_ACCESS_KEY": "b"}, []),
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, []),
        ({"R2_READ_ACCESS_KEY_ID": "a", "R2_READ_SECRET_ACCESS_KEY": "b"}, 2),
        ({"R2_WRITE_ACCESS_KEY_ID": "a"}, 1),
    ],
)
def test_credentials_are_named_and_never_shown(env: dict[str, str], missing: Any) -> None:
    settings = RepoSettings(kind="s3", bucket="b")
    answer = environment.missing_credentials(settings, env)
    assert answer is not None
    assert len(answer) == (missing or 0)
    checks = by_name(
        environment.storage_checks(
            snapshot(config=Config(repo=settings), repo={"label": "b", "credentials": answer})
        )
    )
    assert checks["repo.credentials"].level == ("critical" if missing else "ok")
    assert environment.missing_credentials(RepoSettings(kind="local", path="x"), {}) is None


def test_a_repo_that_cannot_be_read_is_critical(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        label = "bucket:b"

        def state(self) -> None:
            raise environment.RepoError("AccessDenied")

    monkeypatch.setattr(environment, "open_repo", lambda _settings: Closed())
    answer = environment.examine(RepoSettings(kind="local"))
    config = Config(repo=RepoSettings(kind="s3"))
    checks = by_name(environment.storage_checks(snapshot(config=config, repo=answer)))
    assert checks["repo.read"].level == "critical"
    assert "AccessDenied" in checks["repo.read"].seen
