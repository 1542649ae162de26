"""The unmodified miner under `--attach sn38`: the guard sees everything, and the miner behaves as
before."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miner_guard import attach
from miner_guard.rank.layout import StepRecord
from miner_guard.record.store import RunReader
from miner_guard.state_dir import StateDir
from tests.faults.guarded import guarding
from tests.support import requires
from tests.support.launcher import TRAINING, launch, preloaded
from tests.support.ranks import Ranks

IMITATION = Path(__file__).with_name("imitation")


@dataclass(frozen=True)
class Run:
    """One run of the imitated miner."""

    folder: Path
    state: StateDir
    ranks: Ranks
    printed: str
    code: int

    def steps(self, rank: int = 0) -> list[StepRecord]:
        return self.ranks.steps(rank)

    def entries(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return self.ranks.entries(kind, rank)

    def events(self, rank: int = 0) -> list[tuple[str, str]]:
        return [(e["event"], json.dumps(e["fields"])) for e in self.entries("event", rank)]

    def published(self) -> dict[str, str]:
        files = sorted((self.folder / "bucket").glob("*/*"))
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


Runs = Callable[..., Run]


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    """Runs the imitation in forks of a process that has imported torch."""
    requires.module("torch")

    def forked(
        folder: Path, *, ranks: int = 2, mode: str | None = "sn38", minimum: int = 0, **env: str
    ) -> Run:
        """The imitation in `folder`, under a launcher if there is more than one rank."""
        folder.mkdir(parents=True)
        if env.pop("FAIL_UPLOADS", None):
            (folder / "fail-uploads").touch()
        state = StateDir(folder / "state")
        settings = {"gate": {"min_inner_step": minimum, "broadcast_timeout_s": 20.0}}
        secret = {"R2_WRITE_SECRET_ACCESS_KEY": "secret-that-leaks"}
        plain = {**os.environ, **secret, "PYTHONPATH": str(IMITATION), **env}
        state.root.mkdir()
        listener = Ranks()
        done = python.run(
            str(IMITATION / "neurons" / "miner.py"),
            ranks=ranks if ranks > 1 else 0,
            cwd=folder,
            env={
                **attach.environment(mode, plain),
                **listener.env,
                "OMP_NUM_THREADS": "1",
                "_MINER_GUARD_STATE_DIR": str(state.root),
                "_MINER_GUARD_RANK_SETTINGS": json.dumps(settings),
            },
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Run(folder, state, listener, done.stdout, done.returncode)

    with preloaded() as python:
        yield forked


@pytest.fixture(scope="module")
def today(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Today's version on two ranks, with a gate that allows everything."""
    return run(tmp_path_factory.mktemp("today") / "run")


def test_prints_and_publishes_the_same_with_and_without_the_guard(
    today: Run, run: Runs, tmp_path: Path
) -> None:
    alone = run(tmp_path / "alone", mode=None)
    assert alone.ranks.connected == []
    assert (today.code, alone.code) == (0, 0)
    # The upload thread prints when it is done, so the order of its lines depends on the machine,
    # not on the miner.
    assert sorted(today.printed.splitlines()) == sorted(alone.printed.splitlines())
    assert today.published() == alone.published()
    assert len(today.published()) >= 4


def test_every_rank_reports_inner_steps_except_the_one_inside_the_allreduce(today: Run) -> None:
    for rank in (0, 1):
        steps = today.steps(rank)
        assert [(s.outer_step, s.inner_step) for s in steps] == [(1, n) for n in range(7)]
        assert all(s.lr == 0.01 for s in steps)
    printed = [
        line.rpartition(" ")[2]
        for line in today.printed.splitlines()
        if line.startswith("Outer Step")
    ]
    assert [f"{s.loss:.6f}" for s in today.steps(0)] == printed


def test_phases_and_the_sharded_model_are_known(today: Run) -> None:
    phases = {name for step in today.steps(0) for name in step.phases}
    assert {"data", "collective", "optimizer", "upload", "load_state"} <= phases
    rows = today.entries("diagnosis")[0]["reports"]
    assert [(row["rank"], row["world_size"], row["batch_size"]) for row in rows] == [
        (0, 2, 2),
        (1, 2, 2),
    ]
    assert sum(row["shard_params"] for row in rows) == rows[0]["params"]
    assert {e["kind"] for _, e in today.ranks.reader(1).entries(0)} <= {"cost"}


def test_each_upload_is_gated_and_its_end_recorded(today: Run) -> None:
    decisions = today.ranks.decisions()
    assert [(d["outer_step"], d["inner_step"], d["kind"]) for d in decisions] == [
        (1, 0, "gradient"),
        (1, 2, "gradient"),
        (1, 4, "gradient"),
        (1, 6, "gradient"),
        (2, 0, "archive"),
    ]
    bases = [v["seen"] for d in decisions for v in d["verdicts"] if v["rule"] == "base_age"]
    assert bases == [1, 1, 1, 1, 2]
    finished = [u for u in today.entries("upload") if u["phase"] == "finished"]
    assert [u["tag"] for u in finished] == ["5.1.0", "5.1.2", "5.1.4", "5.1.6", "5.2.0"]
    assert [u["decision_id"] for u in finished] == [d["decision_id"] for d in decisions]


def test_no_key_of_a_worker_command_line_is_kept(today: Run) -> None:
    kept = b"".join(f.read_bytes() for f in today.state.root.rglob("*") if f.is_file())
    assert b"that-leaks" not in kept
    exposed = [fields for event, fields in today.events() if event == "secret_exposed"]
    assert len(exposed) == 1
    assert "command line" in exposed[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same version under the whole guard, with a gate that blocks before inner step 4.
    test_sn38_way also runs it under torchrun."""
    requires.module("torch")
    folder = tmp_path_factory.mktemp("whole")
    miner = launch(2, str(IMITATION / "neurons" / "miner.py"), imports=TRAINING)
    env = {"PYTHONPATH": f"{IMITATION}:{requires.REPO}", "OMP_NUM_THREADS": "1"}
    # The guard has read the line of a step before the step ends, as with real steps.
    env["STEP_S"] = "1"
    # A busy machine delivers all steps at once: more than the usual five lines a second.
    settings = {"miner.finite": True, "gate.min_inner_step": 4, "logs.step_lines_per_s": 1000}
    with guarding(folder) as guard:
        flags = ("--no-restart", "--attach", "sn38")
        code = guard.start(miner, *flags, settings=settings, env=env, cwd=folder).wait(150)
        printed = guard.output.read_text()
    assert code == 0, printed
    return Run(folder, guard.state, Ranks(), printed, code)


def test_the_whole_guard_around_it_prints_the_lines_that_people_grep(whole: Run) -> None:
    for line in (
        "GPU DIAGNOSTICS",
        "✓ World size (GPUs): 2",
        "rank 1: device cpu",
        "UPLOAD BLOCKED: inner_step (0) < minimum (4)",
        # The miner prints the rest of the line itself; a second copy would be counted twice.
        "Outer Step: 1 | Inner Step: 0 | Learning Rate: 0.01000000 | Average Loss: 10.185451",
        "| Inner Step: 0 | Step Time: ",
        "UPLOAD ALLOWED: inner_step 4",
        "tag 5.2.0",
        "Successfully pushed",
    ):
        assert line in whole.printed


def test_early_uploads_are_skipped_on_all_ranks_and_the_archive_goes_out(whole: Run) -> None:
    rows = RunReader(whole.state.db).rows("decision")
    allowed = {(row["inner_step"], row["kind"]): bool(row["allowed"]) for row in rows}
    assert allowed == {
        (0, "gradient"): False,
        (2, "gradient"): False,
        (4, "gradient"): True,
        (6, "gradient"): True,
        (0, "archive"): True,
    }
    assert sorted(whole.published()) == [
        "gradients-5.1.4-False.pt",
        "gradients-5.1.6-False.pt",
        "gradients-5.2.0-True.pt",
    ]


def test_an_older_version_of_the_miner_is_followed_too(run: Runs, tmp_path: Path) -> None:
    old = run(tmp_path / "run", ranks=1, minimum=4, SHAPE="2025-05")
    assert old.code == 0
    assert len(old.steps()) == 7
    decisions = old.ranks.decisions()
    assert [(d["inner_step"], d["kind"], d["allowed"]) for d in decisions] == [
        (0, "gradient", False),
        (2, "gradient", False),
        (4, "gradient", True),
        (6, "gradient", True),
        (0, "archive", True),
    ]
    assert {event for event, _ in old.events()} == {"secret_exposed"}


def test_an_unknown_signature_is_named_and_the_miner_runs_unchanged(
    run: Runs, tmp_path: Path
) -> None:
    unknown = run(tmp_path / "run", ranks=1, minimum=4, SHAPE="unknown")
    assert unknown.code == 0
    assert len(unknown.published()) == 5
    assert unknown.entries("decision") == []
    (fields,) = [fields for event, fields in unknown.events() if event == "guard_degraded"]
    assert (
        "start_background_upload has an unknown signature "
        "(self, epoch: 'int', *, shard: 'int') -> 'None'; uploads are not gated"
    ) in fields


@pytest.fixture(scope="module")
def failing(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A miner whose upload workers fail and whose training loop then fails too."""
    folder = tmp_path_factory.mktemp("failing") / "run"
    return run(folder, ranks=1, FAIL_UPLOADS="1", FAIL_AT="3")


def test_a_worker_that_fails_is_a_failed_upload_whatever_the_miner_logs(failing: Run) -> None:
    assert "Successfully pushed" in failing.printed
    ends = [u for u in failing.entries("upload") if u["phase"] != "started"]
    assert {u["phase"] for u in ends} == {"failed"}
    assert "the upload worker exited with code 3" in ends[0]["error"]


def test_a_swallowed_exception_of_the_training_loop_is_reported_by_the_rank_itself(
    failing: Run,
) -> None:
    assert failing.code == 0, "this is how the miner fails: all ranks exit with 0"
    (fields,) = [fields for event, fields in failing.events() if event == "rank_message"]
    assert "an illegal memory access was encountered" in fields
    now = failing.ranks.now()
    assert now.state == "closed"
