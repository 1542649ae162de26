"""Export: TensorBoard and Weights & Biases read back the values that the guard logged; nothing goes
online."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.record.store import RunReader
from miner_guard.show.export import EVENTS, points
from tests.support import requires
from tests.support.guard_log import Log

EXPORT = ("report", "--export")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Five steps, a restart that counts from 3 again, and a snapshot."""
    log = Log(tmp_path / "state")
    for total in (1, 2, 3, 3, 4):
        log.clock.advance(15)
        figures = {"outer_step": 1, "inner_step": total, "lr": 1e-4, "step_time_s": 15.0}
        loss = float("nan") if total == 4 else 5.0 - total
        log.say("inner_step", **figures, loss=loss, total_steps=total)
    snapshot = {
        "uploads": {"repo": {"age_s": 612.0}},
        "gpus": {"gpus": [{"index": 0, "power_w": 300.0}]},
    }
    log.say("health_snapshot", summary="x", snapshot=snapshot)
    return tmp_path / "state"


def test_steps_never_go_back_and_non_finite_values_are_left_out(state: Path) -> None:
    got = list(points(RunReader(state / "run.db").events(EVENTS)))
    assert [point.step for point in got] == [1, 2, 3, 4, 5, 5]
    assert "train/loss" not in got[4].values
    assert got[5].values == {"guard/repo_age_s": 612.0, "gpu0/power_w": 300.0}


def test_tensorboard_reads_it_back(state: Path, tmp_path: Path) -> None:
    requires.module("tensorboard")
    place = ["--state-dir", str(state)]
    assert run([*EXPORT, "tensorboard", "-o", str(tmp_path / "tb"), *place]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tb"))
    accumulator.Reload()
    losses = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
    assert losses == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 2.0)]
    assert accumulator.Scalars("guard/repo_age_s")[0].value == 612.0


def test_wandb_stays_offline(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requires.module("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    # Any connection that leaves this machine would fail here.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert run([*EXPORT, "wandb", "-o", str(tmp_path / "wb"), "--state-dir", str(state)]) == 0
    stored = list((tmp_path / "wb").glob("wandb/offline-run-*/*.wandb"))
    assert len(stored) == 1
    assert b"train/loss" in stored[0].read_bytes()


def test_an_empty_export_and_invalid_arguments_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requires.module("tensorboard")
    nothing = ["--state-dir", str(tmp_path / "none")]
    assert run([*EXPORT, "tensorboard", "-o", str(tmp_path / "tb"), *nothing]) == 1
    assert run([*EXPORT, "excel", "-o", str(tmp_path), "--state-dir", str(tmp_path)]) == 64
    assert "tensorboard or wandb, not 'excel'" in capsys.readouterr().err
