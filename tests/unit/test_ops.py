"""ops/: the runbook quotes every event's real line, alert rules fire when they should, and panels
query metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docs.site import dashboard
from miner_guard.record.status_document import StatusDocument
from miner_guard.show import metrics
from tests.support import requires
from tests.support.event_names import events as logged_events
from tests.support.metric_sample import full_status
from tests.support.ops_files import OPS, lost, yaml_of

ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
BLOCKS = {
    "inner_step": "Step Time",
    "gpu_diagnostics": "GPU DIAGNOSTICS",
    "timing_breakdown": "TIMING BREAKDOWN",
    "rank_message": "Rank ",
    "loss_nan": "Loss is NaN",
}
"""Words of the lines that a function or another program writes."""


def _rows() -> dict[str, tuple[str, str, str]]:
    return {
        event: (grep, meaning, action) for event, grep, meaning, action in ROW.findall(_runbook())
    }


def _runbook() -> str:
    return (OPS / "runbook.md").read_text(encoding="utf-8")


def test_the_runbook_has_one_row_for_every_event_and_none_for_what_is_not_an_event() -> None:
    counts = Counter(event for event, *_ in ROW.findall(_runbook()))
    assert {event for event, count in counts.items() if count > 1} == set()
    assert counts.keys() == logged_events().keys()


def test_every_fault_of_the_runbook_is_made_by_the_test_it_names() -> None:
    """The named test is there, and its file looks for the event whose line the row quotes."""
    table = _runbook().partition("## Faults")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for row in rows:
        cell, test = row.split("|")[2], re.search(r"`(\w+)::(\w+)` \|$", row)
        assert test is not None, row
        code = (requires.REPO / "tests" / "faults" / f"{test[1]}.py").read_text(encoding="utf-8")
        assert f"def {test[2]}(" in code, row
        words = re.search("`([A-Z ]+[A-Z])", cell)
        if words is None:
            assert cell.strip().startswith("none"), row
            continue
        events = [
            name
            for name, places in logged_events().items()
            if any(words[1] in str(place.line) for place in places)
        ]
        assert any(f'"{event}"' in code for event in events) or words[1] in code, row


def test_every_row_of_the_runbook_is_produced_by_a_test() -> None:
    """A test must name the event or quote its line: a runbook row without one would be an empty
    promise."""
    tests = requires.REPO / "tests"
    own = Path(__file__)
    code = "".join(
        path.read_text(encoding="utf-8") for path in sorted(tests.rglob("test_*.py")) if path != own
    )
    unseen = [
        event
        for event, (grep, *_) in _rows().items()
        if not re.search(rf"""["']{event}["']""", code) and grep.strip() not in code
    ]
    assert unseen == []


@pytest.mark.parametrize("name", logged_events())
def test_the_runbooks_grep_finds_the_real_line(name: str) -> None:
    grep, meaning, action = _rows()[name]
    lines = [place.line for place in logged_events()[name] if place.line is not None]
    if name in BLOCKS:
        assert BLOCKS[name] == grep
    elif lines:
        # `HTTP http` and `PREFLIGHT x` contain an example of a value.
        fixed = [re.split(r"\{.*?\}", line)[0] for line in lines]
        assert any(
            grep in line or grep.startswith(start) for line, start in zip(lines, fixed, strict=True)
        )
    assert len(meaning) > 10
    assert action


def test_the_rules_are_valid_and_fire_when_they_should(tmp_path: Path) -> None:
    promtool = requires.tool("promtool")
    for name in ("rules.yml", "rules_test.yml", "prometheus.yml"):
        shutil.copy(OPS / "prometheus" / name, tmp_path)
    (tmp_path / "miner-guard.token").write_text("x")
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "rules_test.yml"]):
        answer = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr


def test_alertmanager_accepts_its_configuration() -> None:
    command = [requires.tool("amtool"), "check-config", OPS / "prometheus" / "alertmanager.yml"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_rules_ask_only_for_metrics_that_exist() -> None:
    text = metrics.exposition(full_status(), version="1")[0].decode()
    names = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    assert 'uid="5"' in text
    asked = set(re.findall(r"minerguard_\w+", (OPS / "prometheus" / "rules.yml").read_text()))
    assert asked
    assert asked - names == set()


def test_the_dashboard_is_what_its_generator_makes_of_the_metrics() -> None:
    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.text()
    shown = set(re.findall(r"minerguard_(\w+?)(?:_total|_bucket|_info)?[^\w]", dashboard.text()))
    assert dashboard.FAMILIES.keys() - shown == set(), "each metric is on a panel"


def _exposed(status: dict[str, Any]) -> str:
    return metrics.exposition(StatusDocument.from_json(status), version="1")[0].decode()


def test_counters_begin_at_zero_and_ages_before_the_first_step_and_push() -> None:
    """increase() must not miss the first event, and an alert on an age must not depend on a first
    step or push."""
    status = {
        "updated": "2026-01-02T04:04:05.000000Z",
        "metrics": {"events": {}, "since": "2026-01-02T03:04:05.000000Z"},
        "uploads": {"repo": {"age_s": None, "empty": True}},
    }
    lines = _exposed(status).splitlines()
    assert {f'minerguard_events_total{{event="{name}"}} 0.0' for name in logged_events()} <= set(
        lines
    )
    assert {"minerguard_no_step_seconds 3600.0", "minerguard_no_upload_seconds 3600.0"} <= {*lines}
    unread = {**status, "uploads": {"repo": {"age_s": None, "empty": False}}}
    assert "no_upload_seconds" not in _exposed(unread), "an age that could not be read is unknown"


def test_every_alert_names_the_command_that_prints_the_runbooks_row_for_it() -> None:
    for rule in yaml_of("prometheus/rules.yml")["groups"][0]["rules"]:
        command, _, event = rule["annotations"]["runbook"].rpartition(" ")
        assert command == "miner-guard explain", rule["alert"]
        assert event in logged_events(), rule["alert"]


def test_grafanas_own_types_know_every_key_of_the_dashboard() -> None:
    """Grafana silently drops keys that are misspelt or in the wrong place."""
    requires.module("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = json.loads(dashboard.text())
    assert list(lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board))))) == []


def test_every_action_of_an_alert_names_words_of_the_runbook() -> None:
    rules = (OPS / "prometheus" / "rules.yml").read_text()
    for words in re.findall(r'action: "([A-Z ]+) in ops/runbook.md"', rules):
        assert f"`{words}`" in _runbook()
