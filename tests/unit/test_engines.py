"""What runs the guard: who takes the machine back, and what becomes of a machine whose GPUs have
failed."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from pathlib import Path

import pytest

from miner_guard.guard import engines
from miner_guard.guard.engines import Engine, PreemptionNotices
from miner_guard.record.events import Event
from miner_guard.system.clock import iso_utc
from tests.servers.metadata import Metadata
from tests.support import requires
from tests.support.ops_files import yaml_of

FOR_HOW_LONG_S = 120.0


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    yield server
    server.shutdown()
    server.server_close()


def _answers(cloud: str, at: float) -> dict[str, str]:
    """What the cloud's server says once it has decided."""
    if cloud == "aws":
        action = json.dumps({"action": "terminate", "time": iso_utc(at)})
        return {
            "PUT /latest/api/token": "secret",
            "GET /latest/meta-data/spot/instance-action": (
                f"{action} if X-aws-ec2-metadata-token=secret"
            ),
        }
    if cloud == "google":
        return {"GET /computeMetadata/v1/instance/preempted": "TRUE if Metadata-Flavor=Google"}
    other = {"EventType": "Reboot", "Resources": ["vm"]}
    ours = {"EventType": "Preempt", "Resources": ["vm"], "NotBefore": formatdate(at, usegmt=True)}
    return {
        "GET /metadata/scheduledevents": json.dumps({"Events": [other, ours]}) + " if Metadata=true"
    }


@pytest.mark.parametrize(
    ("cloud", "variable", "words"),
    [
        ("aws", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS spot terminate"),
        ("google", "GCE_METADATA_HOST", "Google preempts it"),
        ("azure", "", "Azure preempt"),
    ],
)
def test_a_notice_of_the_cloud_asks_once_for_a_checkpoint(
    cloud: str, variable: str, words: str, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"127.0.0.1:{metadata.server_port}"
    known = [row for row in engines._CLOUDS if row[1] == variable]
    vendor, _, _, read = known[0]
    monkeypatch.setattr(engines, "_CLOUDS", [(vendor, variable or "AZURE", base, read)])
    events: list[Event] = []
    saved: list[None] = []
    notices = PreemptionNotices(
        {variable or "AZURE": base}, events.append, lambda: saved.append(None)
    )
    assert notices.active
    metadata.answers = {k: v.replace("TRUE", "FALSE") for k, v in _answers("google", 0).items()}
    if cloud == "azure":
        metadata.answers = {"GET /metadata/scheduledevents": '{"Events": []} if Metadata=true'}
    notices.look()
    assert (events, saved) == ([], []), "nothing is planned"
    assert metadata.requests
    metadata.answers = _answers(cloud, time.time() + FOR_HOW_LONG_S)
    for _ in range(2):
        notices.look()
    (told,) = events
    assert saved == [None]
    assert told.name == "host_warning"
    assert f" ({words}); asked the ranks for a checkpoint" in told.text
    limit = 30.0 if cloud == "google" else FOR_HOW_LONG_S
    assert limit - 10 < told.fields["deadline_s"] <= limit


def test_a_machine_without_a_metadata_server_is_soon_left_alone() -> None:
    notices = PreemptionNotices({"GCE_METADATA_HOST": "127.0.0.1:1"}, pytest.fail, pytest.fail)
    for _ in range(5):
        notices.look()
    assert not notices.active


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, "Slurm job 7 on n1"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "n2", "POD_NAME": "miner-0"},
            "Kubernetes job miner-0 on n2",
        ),
        (
            {
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "SKYPILOT_TASK_ID": "t",
                "SKYPILOT_NODE_RANK": "1",
            },
            "SkyPilot job t on 1",
        ),
        ({"pm_id": "0", "pm_exec_path": "/x", "name": "sn38"}, "pm2 job sn38"),
        ({"NOTIFY_SOCKET": "/run/x"}, "systemd"),
        ({}, "none"),
    ],
)
def test_the_engine_is_found_by_its_own_variables(env: Mapping[str, str], words: str) -> None:
    engine = Engine.of(env)
    assert str(engine) == words
    if engine.name in ("pm2", "systemd", "none"):
        assert engine.leave_node("a GPU is lost") is None, "it has no other machine"


@pytest.mark.parametrize(("operator", "done"), [(True, "drains"), (False, "is to exclude")])
def test_slurm_drains_the_node_or_is_told_in_the_jobs_comment(
    operator: bool, done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user may not drain a node, but may write a comment on the own job."""
    refuse = "" if operator else 'case "$2" in NodeName=*) exit 1 ;; esac\n'
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\n{refuse}printf "%s\\n" "$@" >> {tmp_path}/said\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engine = Engine("Slurm", "n1", "7")
    assert engine.leave_node("gpu_hardware:\n Xid 79") == f"Slurm {done} n1"
    said = (tmp_path / "said").read_text().splitlines()
    drain = ["update", "NodeName=n1", "State=DRAIN", "Reason=miner-guard: gpu_hardware: Xid 79"]
    assert said == [
        *(drain if operator else []),
        *("update", "JobId=7", "Comment=miner-guard exclude n1"),
    ]
    script.unlink()
    assert "could not exclude n1" in str(engine.leave_node("Xid 79"))


@pytest.mark.parametrize("granted", [True, False])
def test_kubernetes_cordons_the_node_and_replaces_the_pod_if_the_guard_may_ask_for_it(
    granted: bool, metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = [requires.tool("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    where = ["-keyout", "key.pem", "-out", "ca.crt", "-subj", "/CN=127.0.0.1"]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *where, *name], cwd=tmp_path, check=True, capture_output=True)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
    metadata.socket = served.wrap_socket(metadata.socket, server_side=True)
    (tmp_path / "token").write_text("pods-token")
    (tmp_path / "namespace").write_text("miners")
    monkeypatch.setattr(engines, "_POD", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(metadata.server_port))
    node, pod = "/api/v1/nodes/n2", "/api/v1/namespaces/miners/pods/miner-0/status"
    for path in (node, pod) if granted else ():
        metadata.answers[f"PATCH {path}"] = "{} if Authorization=Bearer pods-token"
    done = str(Engine("Kubernetes", "n2", "miner-0").leave_node("gpu_hardware: Xid 79"))
    patches = {path: json.loads(body) for _, path, _, body in metadata.requests}
    assert patches[node] == {"spec": {"unschedulable": True}}
    if not granted:
        assert "could not exclude n2 (nodes/n2: 404" in done
        return
    assert done == "Kubernetes cordons n2 and replaces the pod"
    (condition,) = patches[pod]["status"]["conditions"]
    assert condition["message"] == "miner-guard: gpu_hardware: Xid 79"
    ((counts, _), *_) = [
        (rule["action"], patterns)
        for rule in yaml_of("kubernetes/job.yaml")["spec"]["podFailurePolicy"]["rules"]
        for patterns in rule.get("onPodConditions", ())
        if patterns.items() <= condition.items()
    ]
    assert counts == "Count", "before the exit codes that end the Job"
