"""`audit --with CHECKOUT`: a clone's own functions decide, in a child without a network, and only
what was seen counts as proved. The clone here is an imitation with the functions' names."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from miner_guard.checks.host import minimum_checks
from miner_guard.cli.main import run
from miner_guard.config import RepoSettings
from miner_guard.uploads import audit
from miner_guard.validators import checkout
from miner_guard.validators.facts import Network
from miner_guard.validators.shapes import Shapes
from miner_guard.validators.shapes import write as write_shapes
from tests.support import requires
from tests.support.gradient_files import saved
from tests.support.published import publish
from tests.support.rule_facts import SN38
from tests.support.snapshots import snapshot

torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")
pytest.importorskip("numpy", reason="validators draw their data with it")

FILES = {
    "distributed_training/__init__.py": "__version__ = '9.9.9'",
    "distributed_training/utils/__init__.py": "raise RuntimeError('imports everything')",
    "distributed_training/validator/__init__.py": "raise RuntimeError('imports everything')",
    "neurons/__init__.py": "",
    "neurons/validator.py": """
import bittensor
class Validator:
    def update_model_with_pseudo_gradient(self, model, state_dict):
        for name, p in model.named_parameters():
            p.data.sub_(state_dict[name + "vals"].mean())
""",
    "distributed_training/utils/compression.py": """
import torch
class TransformDCT:
    def __init__(self, model, target_chunk): pass
    def encode(self, x, use_dct): return x
class CompressDCT:
    def __init__(self, **_): pass
    def compress(self, x, k): return None, None, x.shape, k
""",
    "distributed_training/utils/progress_tracker.py": """
import json
from types import SimpleNamespace as S
def UidTracker(uid):
    zero = lambda: S(absolute=0.0)
    return S(train=S(is_valid=True, random=zero(), assigned=zero(), account_id="", key=""))
def get_progress(self, which, uid, donwload_on_all_ranks):
    train = self.uid_tracker[uid].train
    r2 = self.session.client(
        "s3", endpoint_url=f"https://{train.account_id}.r2.cloudflarestorage.com",
        aws_access_key_id=train.key, aws_secret_access_key="")
    body = r2.get_object(Bucket=f"{self.config.neuron.global_model_name}-{uid:03d}",
                         Key="metadata.json")["Body"]
    self.r2 = r2
    return 56, json.loads(body.read())["inner_step"], "peer"
""",
    "distributed_training/utils/uids.py": """
import bittensor as bt
def map_uid_to_peerid(self):
    for key, value in bt.subtensor().substrate.query_map():
        _, text = decode_metadata(key, value.value)
        train = self.uid_tracker[7].train
        train.account_id, train.key = text[:32], text[32:64]
def get_next_uids_manual(self, epoch):
    self.inner = get_progress(self, "local", uid=7, donwload_on_all_ranks=False)[1]
    return [7]
""",
    "distributed_training/validator/reward.py": """
import socket
import torch
from datetime import datetime
def benchmark_uids(self):
    head = self.r2.head_object(Bucket="llama-4b-ws-4-007", Key="epoch-56/gradients.pt")
    age = datetime.now(head["LastModified"].tzinfo) - head["LastModified"]
    self.uid_tracker[7].train.is_valid = age.total_seconds() < self.max_upload_interval
async def score_uids(self, epoch, uids):
    try:
        socket.create_connection(("127.0.0.1", 9))
    except PermissionError:
        self.logger.info("Error: offline, as it should be")
    self.r2.download_file("llama-4b-ws-4-007", f"epoch-{epoch}/gradients.pt", "g.pt")
    gradient = torch.load("g.pt", weights_only=True)
    async def loss():
        total = torch.tensor([0.0], device="cuda")
        for block in [self.current_block]:
            for inputs, labels in await fetch_training_data(self, block, uids[0], 2):
                with torch.no_grad():
                    total += self.model(input_ids=inputs, labels=inputs).loss
        return total.item()
    if self.inner == 0:
        self.logger.info("UID 007: Error calculating loss score: 0 inner steps " + "k" * 32)
        return
    before = await loss()
    self.update_model_with_pseudo_gradient(model=self.model, state_dict=gradient)
    self.uid_tracker[7].train.random.absolute = before - await loss()
    self.logger.info("UID 007: Score status 1")
""",
}
SHAPES = Shapes({"embed.weight": (16, 8), "layers.0.gate.weight": (12, 8), "head.weight": (16, 8)})
CHAIN = Network(1100, 56, 300, None, True, 7, None)
REPO = RepoSettings(kind="local", bucket="llama-4b-ws-4-007")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clone")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def published(root: Path, inner: int = 84, scale: float = 1.0, **publish_how: float) -> Path:
    publish(root, inner=inner, **publish_how)
    values = {f"{name}vals": torch.full((2,), scale) for name in SHAPES.of}
    saved(root / "epoch-56", {**values, "metadata": {}})
    return root


def report(root: Path, clone: Path, network: Network = CHAIN) -> audit.AuditReport:
    repo = RepoSettings(**{**vars(REPO), "path": str(root)})
    known = Network(**{**vars(network), "seen_at": time.monotonic()})
    return audit.Audit(repo, SN38, known, model=SHAPES, checkout=clone).report()


def test_the_clone_decides_and_is_named(clone: Path, tmp_path: Path) -> None:
    """The rules of the profile would block: the gradients hold no indices."""
    said = report(published(tmp_path), clone)
    assert said.outcome == "accepted", said.detail
    assert "decided by validator 9.9.9 at unknown commit" in said.detail
    assert said.verdicts[0].rule == "validator"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": 0}, "Error calculating loss score: 0 inner steps …"),
        ({"scale": 0.0}, "the score is zero"),
    ],
)
def test_what_the_clone_rejects_is_rejected_in_its_own_words(
    clone: Path, tmp_path: Path, change: dict[str, float], words: str
) -> None:
    """The committed keys (here 128 k's) are never quoted."""
    said = report(published(tmp_path, **change), clone)  # type: ignore[arg-type]
    assert said.outcome == "rejected"
    assert words in said.detail or "offline" in said.detail, said.detail
    assert "k" * 32 not in json.dumps(said.as_dict())


def test_without_a_chain_the_clone_proves_nothing(clone: Path, tmp_path: Path) -> None:
    said = report(published(tmp_path), clone, Network(reason="no [chain] configured"))
    assert said.outcome == "unknown"
    assert "set [chain] network" in said.detail
    assert said.verdicts[0].outcome == "pass"


def test_the_clones_version_is_compared_with_the_profiles(tmp_path: Path) -> None:
    """A release is pulled by the network's own script, and the rules may have changed with it."""
    requires.tool("git")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(tmp_path)]
    commit = [*git, "commit", "-q", "--allow-empty", "-m", "x"]
    for command in ([*git, "init", "-q"], commit):
        subprocess.run(command, check=True)
    described = checkout.commit_of(tmp_path)
    profile = f"someone/miner at {described} (v1)"
    same = checkout.version_of(tmp_path, profile)
    assert same is not None
    assert same[0].startswith(f"{described} of 20")
    assert same[1] == 0
    subprocess.run(commit, check=True)
    later = checkout.version_of(tmp_path, profile)
    assert later is not None
    assert later[0].endswith(f", 1 commit after the profile's {described}")
    (warned,) = minimum_checks(snapshot(clone=later))
    assert (warned.check, warned.level) == ("network.clone", "warn")
    assert checkout.version_of(tmp_path, "someone/miner at 0123456") is None
    assert checkout.version_of(tmp_path.parent, profile) is None


def test_a_folder_that_is_no_clone_is_unknown(tmp_path: Path) -> None:
    said = report(published(tmp_path / "repo"), tmp_path)
    assert said.outcome == "unknown"
    assert "use the miner's Python environment" in said.detail


def test_the_command(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "repo")
    (tmp_path / "guard.toml").write_text(
        f'[miner]\nprofile = "sn38"\n[repo]\nkind = "local"\npath = "{tmp_path}/repo"\n'
        'bucket = "llama-4b-ws-4-007"\n'
    )
    assert run(["audit", "--with", str(clone), "--state-dir", str(tmp_path / "state")]) == 69
    assert "call `guard.diagnose(model)`" in capsys.readouterr().out
    write_shapes(tmp_path / "state" / "model-shapes.json", SHAPES)
    assert run(["audit", "--with", str(clone), "--state-dir", str(tmp_path / "state")]) == 69
    out = capsys.readouterr().out
    assert "pass     validator       its own functions score the published files" in out
    assert "set [chain] network" in out
    assert "assumed         400 blocks per AllReduce" in out


def test_the_storage_answers_as_boto3_does(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    state = checkout.BucketState(account="acc", good_keys=("key",), objects={"a": tmp_path / "a"})
    state.objects["b"], state.refuse = b"345", ("b",)

    def code(bucket: str, key: str, account: str = "acc", key_id: str = "key") -> str:
        storage = checkout.Storage(state, f"https://{account}.r2.cloudflarestorage.com", key_id)
        try:
            return str(storage.head_object(bucket, key)["ContentLength"])
        except checkout.Refusal as refusal:
            return str(refusal)

    assert code(state.bucket, "a") == "2"
    assert code(state.bucket, "c") == "NoSuchKey"
    assert code(state.bucket, "b") == "InvalidRequest"
    assert code("other", "a") == code(state.bucket, "a", account="x") == "NoSuchBucket"
    assert code(state.bucket, "a", key_id="x") == "AccessDenied"
