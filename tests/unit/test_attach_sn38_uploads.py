"""Under attach, everything that subnet 38's unmodified miner publishes passes the gate first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.attach.adapter import Adapter
from miner_guard.attach.sn38_uploads import Sn38Uploads
from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from miner_guard.uploads import gate
from miner_guard.uploads.gate import GateInputs
from miner_guard.validators import shapes
from miner_guard.validators.facts import Network, Published
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import place

torch = pytest.importorskip("torch", reason="gradients are torch's tensors")

BLOCK = 6_000_000


def gradient(**change: Any) -> dict[str, Any]:
    values = {
        "widxs": torch.zeros(2, 64, 32, dtype=torch.int16),
        "wvals": torch.ones(2, 64, 32),
        "metadata": {"outer_step": 56, "inner_step": 84, "loss": 3.1},
    }
    return {**values, **change}


class Miner:
    """A miner with the names and signatures of v1.2.7."""

    def __init__(self, **has: Any) -> None:
        self.local_progress = SimpleNamespace(epoch=56, inner_step=84, loss=3.1)
        self.model = SimpleNamespace(config=SimpleNamespace(block_list=[BLOCK - 50]))
        self.dht = object()
        self.gradient: Any = None
        self.queued: list[Callable[[], Any]] = []
        self.started: list[int] = []
        self.uploaded: list[Any] = []
        vars(self).update(has)

    def start_background_upload(self, epoch: int, archive: bool = False) -> None:
        self.started.append(epoch)
        self.queued.append(partial(self.upload_model, epoch, {}, {}, self.gradient, archive))

    def upload_model(
        self,
        epoch: int,
        full_state: Any = None,
        optim_sd: Any = None,
        gradient_state: Any = None,
        archive: bool = False,
    ) -> bool:
        self.uploaded.append(gradient_state)
        return True


class Attached:
    """A miner under `--attach sn38`, whose gate knows the chain and the profile."""

    def __init__(self, root: Path, miner: Miner, **network: Any) -> None:
        self.state, self.miner, self.ranks = StateDir(root), miner, Ranks()
        now = time.monotonic()
        chain = {"block": BLOCK, "outer_step": 56, "reason": None, "seen_at": now, **network}
        known = GateInputs(
            published=Published(age_s=600.0, reason=None, seen_at=now),
            network=Network(**chain),
            limits=load_profile("sn38").limits,
            written_monotonic=now,
        )
        gate.write(self.state.gate_inputs, known)
        shapes.write(self.state.shapes, Shapes({"w": (128, 192)}))
        adapter = Adapter("sn38")
        self.guard = adapter.guard = Guard(place(self.state, self.ranks))
        uploads = Sn38Uploads(adapter)
        hooks = {
            "start_background_upload": uploads.gated(Miner.start_background_upload),
            "upload_model": uploads.recorded(Miner.upload_model),
        }
        miner.__class__ = type("Hooked", (Miner,), hooks)

    def start(self, document: Any, *, archive: bool = False) -> None:
        """Start an upload as the miner's training thread does."""
        self.miner.gradient = document
        self.miner.start_background_upload(56, archive=archive)

    def queued(self) -> list[Any]:
        """Run what the miner queued in its upload thread; returns the uploads' results."""
        with ThreadPoolExecutor(max_workers=1) as executor:
            done = [executor.submit(upload) for upload in self.miner.queued]
        self.miner.queued.clear()
        return [upload.result() for upload in done]

    def upload(self, document: Any, *, archive: bool = False) -> Any:
        """Start an upload and wait until it ends; None if it did not start."""
        self.start(document, archive=archive)
        return next(iter(self.queued()), None)

    def decisions(self) -> list[Mapping[str, Any]]:
        self.guard.close()
        return self.ranks.decisions()


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(__run__="5")
    monkeypatch.setitem(__import__("sys").modules, "distributed_training", package)


@pytest.fixture
def attached(tmp_path: Path) -> Attached:
    return Attached(tmp_path, Miner())


def test_a_good_upload_is_published_with_everything_known_about_it(attached: Attached) -> None:
    assert attached.upload(gradient()) is True
    (decision,) = attached.decisions()
    passed = {v["rule"]: v["outcome"] for v in decision["verdicts"]}
    assert passed["block_list"] == passed["metadata"] == "pass"


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([], "block_list is empty"),
        ([BLOCK - 201], "newest block in block_list is 201 blocks old (limit 200)"),
    ],
)
def test_a_block_list_that_validators_reject_is_seen_before_anything_is_gathered(
    attached: Attached, blocks: list[int], words: str
) -> None:
    """Otherwise a miner whose view of the chain is stuck would keep uploading, and each upload
    would score zero."""
    attached.miner.model.config.block_list = blocks
    attached.upload(gradient())
    assert (attached.miner.started, attached.miner.uploaded) == ([], [])
    assert words in attached.decisions()[0]["reason"]
    # The miner's own state is unchanged.
    assert attached.miner.model.config.block_list is blocks


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wvals": torch.ones(2, 64, 32).half()}, "w: values are float16"),
        ({"wvals": torch.ones(2, 64, 8)}, "w: indices of shape [2, 64, 32]"),
        ({"widxs": torch.zeros(9, 3, 32), "wvals": torch.ones(9, 3, 32)}, "decoded as [2, 64"),
        ({"wvals": torch.full((2, 64, 32), torch.nan)}, "w: NaN or Inf in the values"),
        ({"widxs": torch.full((2, 64, 32), 192)}, "w: index 192 is out of bounds (0 to 191)"),
        ({"thing": object}, "does not load with weights_only=True"),
    ],
)
def test_a_gradient_that_validators_reject_is_not_written(
    attached: Attached, change: dict[str, Any], words: str
) -> None:
    """The miner's own log would call the upload a success, and only the audit after the push would
    show its zero score. Covers types, shapes and values."""
    assert attached.upload(gradient(**change)) is False
    assert attached.miner.uploaded == []
    allowed, blocked = attached.decisions()
    assert (allowed["allowed"], blocked["allowed"]) == (True, False)
    assert words in blocked["reason"]
    assert blocked["decision_id"] != allowed["decision_id"]


def test_names_of_torch_compile_and_a_lack_of_metadata_are_reported(attached: Attached) -> None:
    wrapped = {f"_orig_mod.{k}": v for k, v in gradient().items() if k != "metadata"}
    assert attached.upload(wrapped) is False
    assert "lacks the key 'metadata'" in attached.decisions()[-1]["reason"]
    assert attached.upload({**wrapped, "metadata": {}}) is False
    words = "validators skip _orig_mod.w, which they know as w"
    assert words in attached.decisions()[-1]["reason"]


def test_the_archive_after_an_allreduce_goes_out_only_if_it_is_sound(attached: Attached) -> None:
    attached.miner.model.config.block_list = []
    assert attached.upload(gradient(), archive=True) is True
    assert attached.upload(gradient(wvals=torch.ones(2, 64, 32).half()), archive=True) is False


def test_each_upload_keeps_its_own_decision_however_many_are_asked_before_its_thread_starts(
    attached: Attached,
) -> None:
    """A rejected gradient must not be uploaded under the archive's decision, which was made after
    the gradient's own."""
    half = gradient(wvals=torch.ones(2, 64, 32).half())
    whole = gradient()
    attached.start(half)
    attached.start(whole, archive=True)
    attached.start(gradient())
    assert attached.queued() == [False, True, True]
    assert [uploaded is whole for uploaded in attached.miner.uploaded] == [True, False]
    decided = attached.decisions()
    kinds = [(d["kind"], d["allowed"]) for d in decided]
    assert kinds == [("gradient", True), ("archive", True), ("gradient", True), ("gradient", False)]
    attached.guard.close()
    finished = [u for u in attached.ranks.entries("upload") if u["phase"] == "finished"]
    assert [u["decision_id"] for u in finished] == [d["decision_id"] for d in decided[1:3]]


def test_a_miner_older_than_these_files_is_judged_by_what_it_has(tmp_path: Path) -> None:
    miner = Miner(model=SimpleNamespace())
    del miner.dht
    attached = Attached(tmp_path, miner)
    assert attached.upload(None) is True
    rules = {v["rule"] for v in attached.decisions()[0]["verdicts"]}
    assert rules.isdisjoint({"block_list", "metadata", "gradients"})


def test_a_gradient_of_any_kind_raises_nothing_in_the_upload_thread(attached: Attached) -> None:
    class Hostile(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            raise RuntimeError("no")

    # The audit judges what can't be judged here.
    assert attached.upload(Hostile()) is True
