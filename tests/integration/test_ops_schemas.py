"""ops/ and the workflows, checked with the schemas and linters of the programs that read them;
`make soak` runs this, because it installs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import requires
from tests.support.ops_files import lost, yaml_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
OPS, WORKFLOWS = requires.REPO / "ops", requires.REPO / ".github" / "workflows"
KUBERNETES = ("1.29", "1.33", "1.37")
"""From 1.29 on: before that version, a rule of a Job's podFailurePolicy needed both of its
conditions."""
SKYPILOT = """
import sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.use_spot, resources.job_recovery["max_restarts_on_errors"])
"""
MODELS = ("kubeflow-trainer-api", "cloudcoil-models-prometheus-operator", "pydantic>=2")
KEEP = """
import json, sys
document = json.load(open(sys.argv[1]))
if document["kind"] == "JobSet":
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
    print(JobsetV1alpha2JobSet.from_dict(document).to_json())
else:
    from cloudcoil.models.prometheus_operator import v1
    model = getattr(v1, document["kind"]).model_validate(document)
    print(model.model_dump_json(by_alias=True, exclude_unset=True))
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(folder: Path, *packages: str) -> Path:
    """The programs of these packages, in a separate environment."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
    return folder / "bin"


@pytest.fixture(scope="module")
def linters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = ("kubernetes-validate", "check-jsonschema", "zizmor")
    return installed(tmp_path_factory.mktemp("linters"), *packages)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_the_job_and_its_service(linters: Path, version: str) -> None:
    files = [OPS / "kubernetes" / name for name in ("job.yaml", "service.yaml")]
    run(linters / "kubernetes-validate", "--strict", "-k", version, *files)


def test_kustomize_builds_every_resource_in_its_namespace(tmp_path: Path) -> None:
    folder = shutil.copytree(OPS / "kubernetes", tmp_path / "kubernetes")
    (folder / "secret.env").write_text("token=0123456789abcdef\n")
    built = run(requires.tool("kubectl"), "kustomize", folder)
    assert built.count("\n  namespace: miners\n") == built.count("apiVersion: ") == 5


def test_jobset_gets_the_pods_of_the_job_and_the_published_models_know_every_key(
    tmp_path: Path,
) -> None:
    shutil.copytree(OPS, tmp_path / "ops")
    (tmp_path / "ops/kubernetes/secret.env").write_text("token=0123456789abcdef\n")
    built = run(requires.tool("kubectl"), "kustomize", tmp_path / "ops/jobset")
    documents = {document["kind"]: document for document in yaml.safe_load_all(built)}
    checked = ("JobSet", "PrometheusRule", "ServiceMonitor")
    assert documents.keys() == {*checked, "Secret", "Service"}
    (nodes,) = documents["JobSet"]["spec"]["replicatedJobs"]
    pods = nodes["template"]["spec"]["template"]
    (endpoint,) = (e["value"] for e in env_of(pods) if e["name"] == "RENDEZVOUS")
    assert endpoint == f"miner-{nodes['name']}-0-0.{pods['spec']['subdomain']}:29500"
    job = yaml_of("kubernetes/job.yaml")["spec"]["template"]
    assert env_of(pods)[1:] == env_of(job)[1:]
    programs = installed(tmp_path / "models", *MODELS)
    for kind in checked:
        (tmp_path / "document.json").write_text(json.dumps(documents[kind]))
        kept = run(programs / "python", "-c", KEEP, tmp_path / "document.json")
        assert list(lost(documents[kind], json.loads(kept))) == [], kind


def env_of(pods: dict[str, Any]) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = pods["spec"]["containers"][0]["env"]
    return env


def test_the_workflows_are_whole_and_every_action_is_pinned(linters: Path) -> None:
    files = sorted(WORKFLOWS.glob("*.yml"))
    assert len(files) == 2
    schema = ["--builtin-schema", "vendor.github-workflows"]
    run(linters / "check-jsonschema", *schema, *files)
    run(linters / "zizmor", "--offline", "--no-progress", *files)


def test_the_citation_is_a_citation(linters: Path) -> None:
    schema = ["--builtin-schema", "vendor.citation-file-format"]
    run(linters / "check-jsonschema", *schema, requires.REPO / "CITATION.cff")


def test_skypilot_accepts_its_task(tmp_path: Path) -> None:
    programs = installed(tmp_path / "sky", "skypilot")
    answer = run(programs / "python", "-c", SKYPILOT, OPS / "skypilot.yaml")
    assert answer.split()[-3:] == ["2", "True", "3"]
