"""ops/ for Slurm, Kubernetes and SkyPilot: checks that these files match the guard."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from miner_guard import exits
from miner_guard.config import MinerSettings
from miner_guard.record.status_document import ChainStatus, StatusDocument
from miner_guard.show.metrics import identity
from tests.support.ops_files import OPS, yaml_of

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
    assert {"job", "instance", "pod", *identity(status)} <= alerts[-1]["exp_labels"].keys()


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
