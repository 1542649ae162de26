"""`plan` gives source 004's figures, says where they simplify, and refuses impossible settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.cli import main, plan_model
from miner_guard.cli.plan_model import PlanSettings, plan

SOURCE_004 = PlanSettings(
    gpus=4, batch=2, effective=512, params=4e9, seq=1024, upload_steps=3, micro_batch_s=0.01
)


def test_source_004s_figures() -> None:
    seen = plan(SOURCE_004).document
    assert (seen.accumulation_steps, seen.micro_batches) == (256, 1024)
    assert seen.inner_step_s == pytest.approx(10.24)
    assert seen.memory.as_dict() == pytest.approx(
        {"weights": 8, "optimizer": 16, "gradients": 0, "activations": 4, "fsdp": 2, "total": 30}
    )
    slow = plan(PlanSettings(**{**vars(SOURCE_004), "micro_batch_s": 0.2}))
    assert slow.document.inner_step_s == pytest.approx(204.8)
    assert slow.document.upload.fresh is False


def test_what_the_miner_really_does_is_reported() -> None:
    seen = plan(SOURCE_004)
    assert (seen.actual.accumulation_steps, seen.actual.micro_batches, seen.actual.samples) == (
        64,
        256,
        512,
    )
    assert seen.actual.inner_step_s == pytest.approx(0.64)
    assert seen.actual.memory.total < seen.document.memory.total
    words = " ".join(seen.simplifications)
    for phrase in ("world size", "in parallel", "shards", "gradients"):
        assert phrase in words


def test_first_valid_upload_is_the_next_multiple_after_the_minimum() -> None:
    upload = plan(SOURCE_004).document.upload
    assert upload.first_valid_inner_step == 51
    assert upload.first_valid_s == pytest.approx(51 * 10.24)
    assert upload.fresh is True


def test_source_004s_changes_have_its_numbers() -> None:
    changes = {c.what: c for c in plan(SOURCE_004).changes}
    halved = changes["halve the effective batch"]
    assert (halved.accumulation_steps, halved.micro_batches) == (128, 512)
    assert halved.inner_step_s == pytest.approx(5.12)
    assert changes["halve the batch"].memory_gb < 30
    assert changes["gradient checkpointing"].inner_step_s == pytest.approx(10.24 * 1.2)


def test_unknown_times_stay_unknown() -> None:
    seen = plan(PlanSettings(**{**vars(SOURCE_004), "micro_batch_s": None}))
    assert seen.document.inner_step_s is None
    assert seen.document.upload.fresh is None


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 4096),
    st.floats(1e6, 1e12),
    st.integers(1, 65536),
    st.integers(1, 100),
)
def test_any_settings_are_planned_or_refused(
    gpus: int, batch: int, effective: int, params: float, seq: int, up: int
) -> None:
    settings = PlanSettings(gpus, batch, effective, params, seq, up, micro_batch_s=0.01)
    if effective < batch:
        with pytest.raises(plan_model.BadPlan, match=str(effective)):
            plan(settings)
        return
    seen = plan(settings)
    assert seen.document.micro_batches == seen.document.accumulation_steps * gpus
    assert seen.actual.memory.weights <= seen.document.memory.weights
    assert seen.document.upload.first_valid_inner_step >= 50


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = (
        "plan --gpus 4 --batch 2 --effective 512 --params 4e9 --seq 1024 --upload-steps 3 "
        "--micro-batch-ms 10"
    )
    assert main.run([*arguments.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["accumulation_steps"], document["micro_batches"]) == (256, 1024)
    assert document["memory_gb"]["total"] == pytest.approx(30)
    assert main.run(arguments.split()) == 0
    out = capsys.readouterr().out
    for words in ("256", "1024", "~30.0 GB", "10.24s", "Simplifications in the usual estimate"):
        assert words in out
    assert main.run(["plan"]) == 0
    changes = capsys.readouterr().out.partition("The effect of each change")[2]
    assert "half the time" in changes
    assert "unknown" not in changes
    assert main.run(["plan", "--batch", "8", "--effective", "4"]) == 64
    for none in ("many", "nan", "inf", "4e400", "1e308T", "-4B", "0"):
        assert main.run(["plan", "--params", none]) == 64
    for none in ("nan", "inf", "1e308"):
        assert main.run(["plan", "--micro-batch-ms", none, "--json"]) == 64
    assert main.run(["plan", "--gpus", "9" * 400, "--json"]) == 64
