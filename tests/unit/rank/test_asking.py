"""The questions that a rank asks the guard (whether it may upload, whether an upload is due,
whether a checkpoint was requested), and its reports of uploads."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from miner_guard.rank import environment
from miner_guard.rank.agree import Group
from miner_guard.rank.environment import find
from miner_guard.rank.guard import Guard
from miner_guard.state_dir import StateDir
from tests.support.ranks import Ranks
from tests.unit.rank.helpers import Clock, place
from tests.unit.rank.test_agree import CountingStore


def test_a_loss_shown_as_zero_beside_a_nan_gradient_norm_blocks_the_upload(guard: Guard) -> None:
    guard.step(outer_step=1, inner_step=49, loss=2.5, grad_norm=1.0)
    guard.step(outer_step=1, inner_step=50, loss=0.0, grad_norm=math.nan)
    decision = guard.may_upload(outer_step=1, inner_step=50)
    assert not decision
    assert "gradient invalid" in decision.reason


def test_an_early_upload_is_blocked_in_the_documents_words(guard: Guard, ranks: Ranks) -> None:
    decision = guard.may_upload(outer_step=1, inner_step=15)
    assert not decision
    assert decision.reason == (
        "inner_step (15) < minimum (50). Validators will reject this! Waiting for more "
        "training steps..."
    )
    (entry,) = ranks.decisions()
    assert entry == json.loads(json.dumps(decision.as_dict()))
    assert guard.may_upload(outer_step=1, inner_step=0, kind="archive")


def test_an_error_in_the_rules_blocks_with_its_reason(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("limit")

    monkeypatch.setattr("miner_guard.uploads.gate.decide", broken)
    decision = guard.may_upload(outer_step=1, inner_step=99)
    assert not decision
    assert "the gate failed: KeyError: 'limit'" in decision.reason


def test_a_loss_that_must_not_be_read_here_is_unknown_and_not_nan(
    guard: Guard, ranks: Ranks
) -> None:
    """When the loss was a tensor on the GPU, every upload was blocked as poisoned."""
    on_gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    for loss in (on_gpu, "n/a"):
        decision = guard.may_upload(outer_step=1, inner_step=50, loss=loss, base_outer_step=on_gpu)
        assert decision, decision.reason
        (base,) = [v for v in decision.verdicts if v.rule == "base_age"]
        assert base.seen is None
    guard.step(loss=2.5)
    assert "loss 2.5 is finite" in guard.may_upload(outer_step=1, inner_step=50, loss="n/a").reason
    assert any("pass a float" in what for what in ranks.messages())
    assert not guard.may_upload(outer_step=1, inner_step=50, loss=math.nan)


def test_an_agreed_decision_holds_even_if_it_cannot_be_recorded(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rank 0 alone would skip an upload while the other ranks wait for it in a
    collective."""

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    assert guard._recorder.wire is not None
    guard._recorder.wire.close()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert guard.may_upload(outer_step=1, inner_step=50)
    monkeypatch.setattr(guard._recorder, "journal", no_thread)
    assert guard.may_upload(outer_step=1, inner_step=50)
    assert not guard.may_upload(outer_step=1, inner_step=49)


def test_an_upload_leaves_its_start_its_end_and_its_error(
    guard: Guard, ranks: Ranks, clock: Clock
) -> None:
    decision = guard.may_upload(outer_step=1, inner_step=50)
    with guard.upload(decision) as upload:
        clock.now += 3
        upload.tag, upload.size_bytes = "5.1.50", 1000
    with pytest.raises(ConnectionError), guard.upload(decision):
        raise ConnectionError("storage is gone")
    first, second, _, failed = ranks.entries("upload")
    with guard.upload(decision, tag="5.1.51"):
        pass
    # One upload must not have two tags, as in `UPLOAD STARTED: tag 1.51` and then `UPLOAD VERIFIED:
    # tag 5.1.51`.
    assert [entry["tag"] for entry in ranks.entries("upload")[4:]] == ["5.1.51", "5.1.51"]
    assert (first["phase"], first.get("seconds")) == ("started", None)
    assert (second["phase"], second["seconds"], second["tag"], second["bytes"]) == (
        "finished",
        3.0,
        "5.1.50",
        1000,
    )
    assert (failed["phase"], failed["error"]) == ("failed", "ConnectionError: storage is gone")
    assert {e["decision_id"] for e in ranks.entries("upload")} == {decision.decision_id}


def test_an_upload_that_has_just_succeeded_is_not_due_again_before_the_next_probe_of_the_repo(
    guard: Guard, state: StateDir, clock: Clock, ranks: Ranks
) -> None:
    def published(age_s: float) -> None:
        document = {
            "published": {"age_s": age_s, "reason": None, "seen_at": clock.now},
            "written_monotonic": clock.now,
        }
        state.gate_inputs.write_text(json.dumps(document))

    def due() -> bool:
        guard.step()
        return guard.upload_due()

    published(100.0)
    assert not due()
    published(1801.0)
    assert due()
    decision = guard.may_upload(outer_step=1, inner_step=50)
    with guard.upload(decision) as upload:
        upload.error = "403 Forbidden"
    assert due(), "one that failed changes nothing"
    with guard.upload(decision):
        clock.now += 20
    assert not due()
    clock.now += 15
    published(1836.0)
    assert due(), "the repo does not show it: what the probe read counts"


class _OneProcess:
    """Imitates torch.distributed with two ranks, as far as one process can."""

    def get_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 2


def test_a_guard_created_before_the_process_group_reports_its_wrong_rank(
    state: StateDir, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and MPI set no RANK in the environment, so every rank once wrote into the record of
    rank 0."""
    guard = Guard(find(ranks.env, state.root))
    monkeypatch.setattr(environment, "initialised_distributed", _OneProcess)
    for _ in range(2):
        guard.step()
        guard.upload_due()
    assert ranks.messages()[0] == (
        "this is rank 0 of 2, but it is recorded as rank 0 of 1: call miner_guard.init() "
        "after init_process_group"
    )


def test_a_requested_checkpoint_is_seen_once(guard: Guard, ranks: Ranks) -> None:
    assert ranks.reader().has_saved() is None, "its loop never looks for requests"
    assert guard.checkpoint_requested() is False
    ranks.reader().request_checkpoint()
    guard.step()
    assert ranks.reader().has_saved() is False
    assert guard.checkpoint_requested() is True
    guard.step()
    assert ranks.reader().has_saved() is False, "it saves now, before or after its step"
    assert guard.checkpoint_requested() is False
    assert ranks.reader().has_saved() is True
    guard.step()
    assert guard.checkpoint_requested() is False


def test_a_checkpoint_that_any_nodes_guard_requests_is_saved_by_all(
    state: StateDir, ranks: Ranks
) -> None:
    """A node that is taken back once asked in vain if rank 0 was on another node."""
    store = CountingStore()
    guards = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        guards.append(Guard(find({**ranks.env, **place}, state.root)))
        guards[-1]._questions._agreement = Group(store, rank, 2, 10.0)

    def asked() -> list[bool]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(Guard.checkpoint_requested, guards))

    def saved() -> list[bool | None]:
        return [ranks.reader(rank).has_saved() for rank in range(2)]

    assert asked() == [False, False]
    ranks.reader(0).request_checkpoint()
    assert asked() == [True, True]
    assert (asked(), saved()) == ([False, False], [True, True])
    ranks.reader(1).request_checkpoint()
    assert saved() == [True, False]
    # Rank 0 may read the count just before rank 1 adds to it.
    assert [True, True] in (asked(), asked())
    asked()
    assert (asked(), saved()) == ([False, False], [True, True])


def test_an_error_in_rank_0s_reading_does_not_keep_it_from_the_others(
    guard: Guard, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("age")

    monkeypatch.setattr("miner_guard.uploads.gate.due", broken)
    assert guard.upload_due() is False
    assert any("guard.upload_due: TypeError: age" in words for words in ranks.messages())


def test_ranks_without_a_process_group_block_under_a_new_id_in_every_launch(
    state: StateDir, ranks: Ranks
) -> None:
    """With one id for all launches, the ledger would keep the first such block only."""
    ids = set()
    for launch in range(3):
        settings = {
            "_MINER_GUARD_RANK_SETTINGS": json.dumps({"launch": launch}),
            "_MINER_GUARD_RUN": "run-1",
        }
        guard = Guard(place(state, ranks, world_size=4, **settings))
        for _ in range(2):
            decision = guard.may_upload(outer_step=1, inner_step=99)
            assert not decision
            assert "torch.distributed is not initialised" in decision.reason
            ids.add(decision.decision_id)
        assert guard.upload_due() is False
    assert len(ids) == 6
