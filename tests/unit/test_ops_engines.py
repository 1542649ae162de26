"""ops/ for Slurm, Kubernetes and SkyPilot: checks that these files match the guard."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from miner_guard import exits
from miner_guard.config import MinerSettings
from tests.support import requires

OPS = requires.REPO / "ops"
HOPELESS = {exits.USAGE, exits.UNAVAILABLE, exits.CRASH_LOOP, exits.CONFIG}
SLURMS_KILL_WAIT_S = 30


def read(name: str) -> dict[str, Any]:
    requires.module("yaml")
    import yaml

    document: dict[str, Any] = yaml.safe_load((OPS / name).read_text(encoding="utf-8"))
    return document


@pytest.fixture
def pod() -> dict[str, Any]:
    template: dict[str, Any] = read("kubernetes/job.yaml")["spec"]["template"]["spec"]
    return template


def test_kubernetes_waits_longer_than_the_guard_may_take(pod: dict[str, Any]) -> None:
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    (waits,) = re.findall(r"^miner-guard ctl checkpoint && sleep (\d+)$", hook)
    assert pod["terminationGracePeriodSeconds"] > int(waits) + MinerSettings().stop_timeout_s


def test_no_engine_starts_again_what_a_restart_does_not_fix() -> None:
    rules = read("kubernetes/job.yaml")["spec"]["podFailurePolicy"]["rules"]
    (failing,) = [rule for rule in rules if rule["action"] == "FailJob"]
    assert set(failing["onExitCodes"]["values"]) == HOPELESS
    (cases,) = re.findall(r"^ +0 \| (.+)\) exit", (OPS / "slurm/miner.sbatch").read_text(), re.M)
    assert {int(code) for code in cases.split("|")} == HOPELESS


def test_the_pod_runs_unprivileged_and_its_probes_are_commands_that_exist(
    pod: dict[str, Any],
) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["startupProbe"]["exec"]["command"] == ["miner-guard", "status", "--check"]
    kinds = {
        read(f"kubernetes/{name}")["kind"]
        for name in read("kubernetes/kustomization.yaml")["resources"]
    }
    assert kinds == {"Job", "Service", "ServiceMonitor"}


def test_under_slurm_the_guard_is_done_before_slurm_kills() -> None:
    script = (OPS / "slurm/miner.sbatch").read_text()
    (given,) = re.findall(r"STOP_TIMEOUT_S:-(\d+)", script)
    assert int(given) < SLURMS_KILL_WAIT_S
    checked = subprocess.run(["bash", "-n", str(OPS / "slurm/miner.sbatch")], capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, b"")


def test_under_skypilot_the_guard_is_done_before_the_kill() -> None:
    task = read("skypilot.yaml")
    assert int(task["envs"]["MINER_GUARD_MINER__STOP_TIMEOUT_S"]) < SLURMS_KILL_WAIT_S
