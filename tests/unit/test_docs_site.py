"""The documentation site builds without warnings, and its reference agrees with the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.cli.main import COMMANDS
from miner_guard.config import Config
from tests.support import requires
from tests.support.event_names import events as logged_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. --strict makes a dead link or anchor fail the build."""
    requires.module("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=requires.REPO,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _text(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def test_the_reference_names_every_setting_event_and_command(site: Path) -> None:
    settings, events, commands = (
        _text(site, f"reference/{name}") for name in ("settings", "events", "commands")
    )
    sections = list(Config.__dataclass_fields__)
    assert [name for name in sections if f"[{name}]" not in settings] == []
    assert [name for name in logged_events() if f"<code>{name}</code>" not in events] == []
    assert [name for name in COMMANDS if f'id="{name}"' not in commands] == []
    assert "minerguard_verdict_level" in _text(site, "reference/metrics")
    assert "guard.jsonl" in _text(site, "reference/state-files")
    assert "<td>75</td>" in _text(site, "reference/exit-codes")
    assert "may_upload" in _text(site, "reference/api")


def test_an_alerts_link_leads_to_the_events_row(site: Path) -> None:
    runbook = _text(site, "runbook")
    assert [name for name in logged_events() if f'id="{name}"' not in runbook] == []


def test_the_site_asks_no_other_host(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in page
    assert "cdn" not in page
