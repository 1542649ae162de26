"""ops/: the runbook quotes every event's real line, alert rules fire when they should, and panels
query metrics that exist."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docs.site import dashboard
from miner_guard import exits
from miner_guard.config import MinerSettings
from miner_guard.record.events import RESERVED
from miner_guard.record.status_document import ChainStatus, StatusDocument
from miner_guard.show import metrics
from miner_guard.state_dir import choose
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


HOPELESS = {exits.USAGE, exits.UNAVAILABLE, exits.CRASH_LOOP, exits.CONFIG}
SLURMS_KILL_WAIT_S = 30


@pytest.fixture
def pod() -> dict[str, Any]:
    template: dict[str, Any] = yaml_of("kubernetes/job.yaml")["spec"]["template"]["spec"]
    return template


def test_kubernetes_waits_longer_than_the_guard_may_take(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    stops_within_s = int(values["MINER_GUARD_MINER__STOP_TIMEOUT_S"])
    assert pod["terminationGracePeriodSeconds"] > stops_within_s > MinerSettings().stop_timeout_s


def test_no_engine_starts_again_what_a_restart_does_not_fix() -> None:
    rules = yaml_of("kubernetes/job.yaml")["spec"]["podFailurePolicy"]["rules"]
    (failing,) = [rule for rule in rules if rule["action"] == "FailJob"]
    assert set(failing["onExitCodes"]["values"]) == HOPELESS
    (cases,) = re.findall(r"^ +(64.+)\) \[", (OPS / "slurm/miner.sbatch").read_text(), re.M)
    assert {int(code) for code in cases.split("|")} == HOPELESS


def test_the_pod_runs_unprivileged_and_its_probes_are_commands_that_exist(
    pod: dict[str, Any],
) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["startupProbe"]["exec"]["command"] == ["miner-guard", "status", "--check"]
    kinds = {
        yaml_of(f"kubernetes/{name}")["kind"]
        for name in yaml_of("kubernetes/kustomization.yaml")["resources"]
    }
    assert kinds == {"Job", "Service", "ServiceMonitor", "PrometheusRule"}


def test_the_operator_gets_the_rules_that_prometheus_gets() -> None:
    assert yaml_of("kubernetes/prometheusrule.yaml")["spec"] == yaml_of("prometheus/rules.yml")


def test_the_rules_meet_the_job_label_that_the_service_monitor_makes() -> None:
    """Otherwise `up` of a dead target has another job, and MinerGuardDown can't fire."""
    monitor, service = yaml_of("kubernetes/servicemonitor.yaml"), yaml_of("kubernetes/service.yaml")
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    rules = yaml_of("prometheus/rules.yml")["groups"][0]["rules"]
    (down,) = (rule["expr"] for rule in rules if rule["alert"] == "MinerGuardDown")
    assert f'up{{job="{job}"}}' in down
    (scraped,) = yaml_of("prometheus/prometheus.yml")["scrape_configs"]
    assert scraped["job_name"] == job


def test_the_rules_are_tested_with_the_labels_that_the_guard_gives_each_sample() -> None:
    status = StatusDocument(name="m", host="n", chain=ChainStatus(netuid=38, hotkey="5F3sa2TJ"))
    case = yaml_of("prometheus/rules_test.yml")["tests"][-1]
    alerts = [alert for test in case["alert_rule_test"] for alert in test["exp_alerts"]]
    assert {"job", "instance", "pod", *metrics.identity(status)} <= alerts[-1]["exp_labels"].keys()


def test_every_secret_that_kubernetes_needs_is_generated() -> None:
    (secret,) = yaml_of("kubernetes/kustomization.yaml")["secretGenerator"]
    (token,) = (
        e["valueFrom"]["secretKeyRef"]
        for e in yaml_of("kubernetes/job.yaml")["spec"]["template"]["spec"]["containers"][0]["env"]
        if "secretKeyRef" in e.get("valueFrom", {})
    )
    assert token == {"name": secret["name"], "key": "token"}
    (endpoint,) = yaml_of("kubernetes/servicemonitor.yaml")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == token


def test_under_slurm_and_skypilot_the_guard_is_done_before_the_kill() -> None:
    script = (OPS / "slurm/miner.sbatch").read_text()
    (given,) = re.findall(r"STOP_TIMEOUT_S:-(\d+)", script)
    sky = yaml_of("skypilot.yaml")["envs"]["MINER_GUARD_MINER__STOP_TIMEOUT_S"]
    assert max(int(given), int(sky)) < SLURMS_KILL_WAIT_S
    checked = subprocess.run(["bash", "-n", str(OPS / "slurm/miner.sbatch")], capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_compose_mounts_existing_files_where_its_programs_look() -> None:
    services = yaml_of("compose.yaml")["services"]
    foreign = {"prometheus", "alertmanager", "loki", "alloy", "grafana"}
    assert set(services) == {*foreign, "miner"}
    for name, service in services.items():
        assert ":" in service["image"] or name not in foreign, f"{name}: a pinned version"
        targets = [
            mount.split(":")[-2 if mount.endswith(":ro") else -1] for mount in service["volumes"]
        ]
        for mount in service["volumes"]:
            if mount.startswith("./"):
                assert (OPS / mount.partition(":")[0]).exists(), mount
        for word in service.get("command", []) if name in foreign else ():
            path = word.rpartition("=")[2]
            if path.startswith("/"):
                assert any(path.startswith(target) for target in targets), word
    sources = {
        source["type"]: source["url"]
        for source in yaml_of("grafana/datasources.yml")["datasources"]
    }
    assert set(sources) == {"prometheus", "loki"}
    assert services["alloy"]["environment"]["LOKI_URL"].startswith(sources["loki"])
    assert str(yaml_of("loki/loki.yml")["server"]["http_listen_port"]) in sources["loki"]
    provider = yaml_of("grafana/dashboards.yml")["providers"][0]["options"]["path"]
    assert any(f":{provider}/" in mount for mount in services["grafana"]["volumes"])


def test_docker_compose_accepts_the_file_and_asks_for_a_password() -> None:
    """Compose's own parser and schema; neither needs a daemon."""
    environment = {**os.environ, "GRAFANA_PASSWORD": "x"}
    compose = [requires.tool("docker-compose"), "-f", OPS / "compose.yaml", "--profile", "miner"]
    answer = subprocess.run(
        [*compose, "config"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "image: grafana/loki" in answer.stdout
    del environment["GRAFANA_PASSWORD"]
    refused = subprocess.run([*compose, "config"], env=environment, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "set GRAFANA_PASSWORD" in refused.stderr


def test_the_optional_miner_of_compose_is_seen_by_its_monitoring() -> None:
    compose = yaml_of("compose.yaml")
    miner, alloy = compose["services"]["miner"], compose["services"]["alloy"]
    assert miner["profiles"] == ["miner"], "monitoring a fleet starts no miner"
    assert (OPS / miner["build"]["context"] / miner["build"]["dockerfile"]).samefile(
        OPS / "Dockerfile"
    )
    assert int(miner["stop_grace_period"].rstrip("s")) > MinerSettings().stop_timeout_s
    (state,) = [mount for mount in miner["volumes"] if mount.endswith(":/state")]
    volume = state.partition(":")[0]
    assert volume in compose["volumes"]
    (seen,) = [mount for mount in alloy["volumes"] if mount.startswith(f"{volume}:")]
    log = Path(seen.split(":")[1]) / "guard.jsonl"
    assert any(fnmatch.fnmatch(str(log), path) for path in _alloys_paths())


def _alloy() -> str:
    return (OPS / "loki" / "config.alloy").read_text(encoding="utf-8")


def _alloys_paths() -> list[str]:
    return re.findall(r'"__path__" = "([^"]+)"', _alloy())


def _alloys_names(table: str) -> set[str]:
    """The keys of a table in one line."""
    (row,) = re.findall(rf"{table} = \{{ (.+) \}}", _alloy())
    return set(re.findall(r"(\w+) =", row))


def test_alloy_takes_guard_jsonl_to_loki_and_its_labels_are_fields_of_every_line() -> None:
    components = {".".join(each) for each in re.findall(r'^([\w.]+) "(\w+)" \{', _alloy(), re.M)}
    fed = re.findall(r"= \[?([\w.]+)\.(?:targets|receiver)\b", _alloy())
    assert {*fed, "loki.source.file.guard"} == components, "each is fed, none dangles"
    log = str(choose("miner", None, {"HOME": "/root"}).log)
    assert any(fnmatch.fnmatch(log, path) for path in _alloys_paths())
    assert _alloys_names("expressions") <= RESERVED
    labels = _alloys_names("values")
    assert labels <= _alloys_names("expressions") - {"ts"}, "a label per line would break Loki"


def test_queries_of_logs_name_only_events_and_labels_that_exist() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in OPS.rglob("*.*")
        if path.suffix in (".md", ".yml")
    )
    text += (OPS / "grafana" / "miner-guard.json").read_text(encoding="utf-8").replace('\\"', '"')
    asked = re.findall(r'event(?:=|!=|=~|!~)"([^"]+)"', text)
    assert len(asked) > 3
    assert {name for names in asked for name in names.split("|")} <= logged_events().keys()
    asked_labels = {label for label, _ in re.findall(r'`\{(\w+)="(\w+)"\}`', text)}
    assert asked_labels <= _alloys_names("values")
