"""Training scripts without the hook, under `--attach auto`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miner_guard import attach
from miner_guard.rank.layout import Now, StepRecord
from miner_guard.state_dir import StateDir
from tests.support import requires
from tests.support.launcher import preloaded
from tests.support.ranks import Ranks

SEVERAL_OPTIMIZERS = {"gan.py", "diloco.py"}
SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Run:
    """One run of a script."""

    ranks: Ranks
    printed: str

    def steps(self, rank: int = 0) -> list[StepRecord]:
        return self.ranks.steps(rank)

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return self.ranks.entries(kind)

    def now(self) -> Now:
        return self.ranks.now()

    def losses(self) -> list[str]:
        return re.findall(r"loss ([\d.]+)", self.printed)


Runs = Callable[..., Run]


@contextlib.contextmanager
def supervised(folder: Path, mode: str | None) -> Iterator[tuple[Ranks, dict[str, str]]]:
    """The guard's end of the wire, and the environment of a program under `--attach mode`."""
    state = StateDir(folder / "state")
    state.root.mkdir(parents=True)
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    ranks = Ranks()
    yield (
        ranks,
        {
            **attach.environment(mode, {**env, "OMP_NUM_THREADS": "1"}),
            **ranks.env,
            "_MINER_GUARD_STATE_DIR": str(state.root),
        },
    )


def finished(ranks: Ranks, done: subprocess.CompletedProcess[str]) -> Run:
    # pytest shows these with a failure.
    print(f"{done.stdout}\n{done.stderr}")
    for rank in ranks.connected:
        print(rank, ranks.now(rank), *ranks.entries("event", rank), sep="\n")
    assert done.returncode == 0, done.stderr
    assert "GUARD DEGRADED" not in done.stderr
    assert "please file an issue" not in done.stderr, "torch blames itself for the hook"
    return Run(ranks, done.stdout)


def start(folder: Path, script: str, *arguments: str) -> Run:
    """A separate Python that runs the script in `folder`."""
    requires.module("torch")
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    with supervised(folder, "auto") as (ranks, env):
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=150, check=False
        )
    return finished(ranks, done)


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    """Runs a script in a fork of a process that has imported torch."""
    requires.module("torch")

    def forked(
        folder: Path, script: str, *arguments: str, ranks: int = 0, mode: str | None = "auto"
    ) -> Run:
        """Run the script in `folder`, under a launcher if `ranks` is given."""
        with supervised(folder, mode) as (listener, env):
            command = (str(SCRIPTS / script), *arguments)
            done = python.run(*command, ranks=ranks, cwd=folder, env=env)
        return finished(listener, done)

    with preloaded() as python:
        yield forked


def test_a_plain_script_is_followed_and_prints_the_same(run: Runs, tmp_path: Path) -> None:
    attached = start(tmp_path / "attached", "plain.py")
    alone = run(tmp_path / "alone", "plain.py", mode=None)
    assert attached.printed == alone.printed
    assert alone.ranks.connected == []
    steps = attached.steps()
    assert [s.inner_step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert [f"{s.loss:.4f}" for s in steps] == attached.losses(), (
        "the mean of the micro-batches, not of loss / 4"
    )
    assert all(s.lr == 0.01 and s.seconds > 0 for s in steps)
    assert all({"backward", "optimizer"} <= set(s.phases) for s in steps)
    (training,) = attached.entries("training")
    assert (training["accumulation_steps"], training["model_name"]) == (4, "plain.py")
    assert attached.now().state == "ended", "the loop ended without an exception"


def test_every_rank_of_a_launch_is_followed(run: Runs, tmp_path: Path) -> None:
    attached = run(tmp_path / "run", "plain.py", ranks=2)
    for rank in (0, 1):
        assert len(attached.steps(rank)) == 6
    rows = attached.entries("diagnosis")[0]["reports"]
    assert [(row["rank"], row["world_size"], row["shard_params"]) for row in rows] == [
        (0, 2, 321),
        (1, 2, 321),
    ]
    assert attached.entries("event") == [], "nothing is degraded"


@pytest.mark.long
def test_ranks_without_an_environment_are_distinguished(run: Runs, tmp_path: Path) -> None:
    """Two processes of torch.multiprocessing.spawn must not both pass for rank 0."""
    attached = start(tmp_path / "run", "spawned.py")
    for rank in (0, 1):
        assert [s.inner_step for s in attached.steps(rank)] == [1, 2, 3, 4, 5, 6]
    assert [f"{s.loss:.4f}" for s in attached.steps()] == attached.losses()
    assert run(tmp_path / "alone", "spawned.py", mode=None).printed == attached.printed


def test_a_sharded_model_is_followed_on_every_rank(run: Runs, tmp_path: Path) -> None:
    attached = run(tmp_path / "run", "with_fsdp.py", ranks=2)
    for rank in (0, 1):
        assert [s.inner_step for s in attached.steps(rank)] == [1, 2, 3, 4]
    assert [f"{s.loss:.4f}" for s in attached.steps()] == attached.losses()
    rows = attached.entries("diagnosis")[0]["reports"]
    assert [(row["rank"], row["shard_params"]) for row in rows] == [(0, 177), (1, 177)], (
        "half of 354 each"
    )
    (training,) = attached.entries("training")
    assert training["accumulation_steps"] == 3


def test_a_compiled_step_is_followed_and_nothing_of_the_guard_is_compiled(
    run: Runs, tmp_path: Path
) -> None:
    """With clocks and counters in the graph, torch would recompile it at each step until it gives
    up on the whole function."""
    attached = run(tmp_path / "attached", "compiled.py")
    assert [s.inner_step for s in attached.steps()] == [1, 2, 3, 4, 5, 6]
    assert [f"{s.loss:.4f}" for s in attached.steps()[1:]] == attached.losses()


@pytest.mark.parametrize(
    ("script", "summed", "modules"),
    [
        ("grad_scaler.py", False, ()),
        ("gan.py", True, ()),
        ("diloco.py", False, ()),
        ("with_accelerate.py", False, ("accelerate",)),
        pytest.param("with_fabric.py", False, ("lightning",), marks=pytest.mark.long),
    ],
)
def test_the_loss_is_the_one_that_the_trainer_logs(
    run: Runs, tmp_path: Path, script: str, summed: bool, modules: Sequence[str]
) -> None:
    """The guard must not show the loss times 65536 (GradScaler), only the discriminator's (GAN), or
    a quarter of it."""
    for module in modules:
        requires.module(module)
    attached = run(tmp_path / "attached", script)
    steps = attached.steps()
    logged = [float(loss) for loss in attached.losses()]
    assert [s.inner_step for s in steps] == list(range(1, len(logged) + 1))
    # With several optimizers the first loss is unknown: nothing shows yet which one ends a step.
    first = 1 if script in SEVERAL_OPTIMIZERS else 0
    assert [s.loss for s in steps[:first]] == [None] * first
    assert [s.loss for s in steps[first:]] == pytest.approx(logged[first:], rel=0.001, abs=1e-4)
    assert {s.loss_summed for s in steps[first:]} == {summed}, (
        "a sum says so, as a trainer may show its parts"
    )


def test_hugging_faces_trainer_is_followed_by_its_callbacks(run: Runs, tmp_path: Path) -> None:
    requires.module("transformers")
    requires.module("accelerate")
    attached = run(tmp_path / "attached", "with_transformers.py", "out")
    steps = attached.steps()
    assert [s.inner_step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert [f"{s.loss:.4f}" for s in steps] == attached.losses()
    evaluated = [s.inner_step for s in steps if s.eval_loss is not None]
    assert evaluated == [3, 5], "an evaluation follows a step and goes with the next one"
    assert [s.inner_step for s in steps if "val_loss" in s.phases] == [3, 5], (
        "the time it takes is its own"
    )
    assert [s.inner_step for s in steps if "pause" in s.phases] == [5], "so is a checkpoint's"
    assert [e["step"] for e in attached.entries("checkpoint")][:1] == [4]
    assert (tmp_path / "attached" / "out" / "checkpoint-4").is_dir()
    assert attached.entries("checkpoint")[0]["path"].endswith("/attached/out/checkpoint-4")
    assert attached.now().state == "finished"


def test_a_training_with_a_loss_per_item_that_a_callback_stops_early_has_finished(
    run: Runs, tmp_path: Path
) -> None:
    """The guard must not restart a miner that has converged, nor report 1.18 instead of 4.636: the
    Trainer sums losses that the model has already divided by the item count of all
    micro-batches."""
    requires.module("transformers")
    requires.module("accelerate")
    attached = run(tmp_path / "attached", "with_transformers.py", "out", "per-item", "stops")
    steps = attached.steps()
    assert [s.inner_step for s in steps] == [1, 2, 3]
    assert [s.loss for s in steps] == pytest.approx(
        [float(x) for x in attached.losses()], rel=0.001
    )
    (training,) = attached.entries("training")
    assert training["accumulation_steps"] == 4
    assert attached.now().state == "finished"


def test_lightning_is_followed_by_its_callbacks(run: Runs, tmp_path: Path) -> None:
    requires.module("lightning")
    attached = run(tmp_path / "attached", "with_lightning.py")
    steps = attached.steps()
    assert [s.inner_step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert [f"{s.loss:.4f}" for s in steps] == attached.losses()
    assert attached.now().state == "finished"


@pytest.mark.long
def test_a_checkpoint_of_lightning_is_reported_once_it_is_written(
    run: Runs, tmp_path: Path
) -> None:
    """`LAST CHECKPOINT` must not be missing or name a file that does not exist yet: Lightning's own
    callbacks run before the write."""
    requires.module("lightning")
    attached = run(tmp_path / "run", "with_lightning.py", "checkpoints")
    assert [s.inner_step for s in attached.steps()] == [1, 2, 3, 4, 5, 6]
    saved = attached.entries("checkpoint")
    assert [e["step"] for e in saved] == [3, 6]
    assert all(Path(e["path"]).is_file() for e in saved), saved
    assert all(s.phases.keys() & {"pause"} for s in attached.steps() if s.inner_step == 4), (
        "the time of saving is in a phase"
    )


@pytest.mark.parametrize("mode", [None, "auto"])
@pytest.mark.parametrize("framework", ["transformers", "lightning", "accelerate"])
def test_a_callback_reports_each_step_once_attached_or_not(
    run: Runs, tmp_path: Path, framework: str, mode: str | None
) -> None:
    """`miner_guard.integrations`, as their docstrings say to use them."""
    requires.module(framework)
    done = run(tmp_path / "run", f"with_{framework}.py", "out", "callback", mode=mode)
    steps = done.steps()
    assert [s.inner_step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert [f"{s.loss:.4f}" for s in steps] == done.losses()
    assert all(s.lr is not None for s in steps)
    assert done.now().state == ("ended" if framework == "accelerate" and mode else "finished")
    if framework == "transformers":
        assert [s.inner_step for s in steps if "val_loss" in s.phases] == [3, 5]
        assert [s.inner_step for s in steps if "pause" in s.phases] == [5]
        assert [s.inner_step for s in steps if s.eval_loss is not None] == [3, 5]
        assert done.entries("checkpoint")[0]["path"].endswith("/out/checkpoint-4")


def test_a_python_that_does_not_train_leaves_no_record(run: Runs, tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("import torch, sys; sys.exit('sitecustomize' not in sys.modules)")
    assert run(tmp_path / "run", str(script)).ranks.connected == []


def test_an_existing_sitecustomize_still_runs_and_children_of_a_rank_are_left_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.chained = True\n")
    env = attach.environment("sn38", {**os.environ, "PYTHONPATH": str(tmp_path)})
    watching = (
        "import json, sys; print(json.dumps([sys.chained, [type(f).__name__ for f in "
        "sys.meta_path], sys.path]))"
    )

    def seen(env: dict[str, str]) -> tuple[bool, list[str], list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", watching], env=env, check=True, capture_output=True, timeout=60
        )
        chained, finders, path = json.loads(done.stdout)
        return chained, finders, path

    chained, finders, path = seen(env)
    assert chained
    assert finders[0] == "Watch"
    assert not any("attach/site" in entry for entry in path), (
        "the program's own sys.path is as it was"
    )
    chained, finders, _ = seen({**env, attach.ATTACHED: "1"})
    assert chained
    assert "Watch" not in finders


def test_a_rank_that_replaces_itself_is_followed_again_and_its_children_are_not(
    tmp_path: Path,
) -> None:
    """A miner that updates itself by `os.execv` keeps its pid."""
    script = (
        "import os, subprocess, sys\n"
        "shown = 'import sys; print([type(f).__name__ for f in sys.meta_path].count(chr(87) + "
        '"atch"), flush=True)\'\n'
        f"os.environ['{attach.ATTACHED}'] = str(os.getpid())\n"
        "subprocess.run([sys.executable, '-c', shown])\n"
        "os.execv(sys.executable, [sys.executable, '-c', shown])\n"
    )
    env = attach.environment("auto", os.environ)
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, check=True, capture_output=True, timeout=60
    )
    assert done.stdout.split() == [b"0", b"1"]
