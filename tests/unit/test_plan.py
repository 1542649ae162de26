"""`plan` gives source 004's figures and the miner's own, and refuses impossible settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner_guard.cli.main import run
from miner_guard.cli.plan import Plan, document, savings

SOURCE_004: dict[str, Any] = {
    "gpus": 4,
    "batch": 2,
    "effective": 512,
    "params": 4e9,
    "seq": 1024,
    "upload_steps": 3,
    "micro_batch_s": 0.01,
}


def planned(**changed: Any) -> dict[str, Any]:
    return document(Plan(**{**SOURCE_004, **changed}), None)


def test_source_004s_figures() -> None:
    seen = planned()
    assert (seen["accumulation_steps"], seen["micro_batches"]) == (256, 1024)
    assert seen["inner_step_s"] == pytest.approx(10.24)
    assert seen["memory_gb"] == pytest.approx(
        {"weights": 8, "optimizer": 16, "gradients": 0, "activations": 4, "fsdp": 2, "total": 30}
    )
    upload = seen["upload"]
    assert (upload["first_valid_inner_step"], upload["fresh"]) == (51, True)
    assert upload["first_valid_s"] == pytest.approx(51 * 10.24)
    slow = planned(micro_batch_s=0.2)
    assert (slow["inner_step_s"], slow["upload"]["fresh"]) == (pytest.approx(204.8), False)
    unknown = planned(micro_batch_s=None)
    assert (unknown["inner_step_s"], unknown["upload"]["fresh"]) == (None, None)


def test_what_the_miner_really_does_is_reported() -> None:
    seen = planned()
    actual = seen["actual"]
    assert (actual["accumulation_steps"], actual["micro_batches"], actual["samples"]) == (
        64,
        256,
        512,
    )
    assert actual["inner_step_s"] == pytest.approx(0.64)
    assert actual["memory_gb"]["total"] < seen["memory_gb"]["total"]


def test_source_004s_changes_have_its_numbers() -> None:
    changes = {change["what"]: change for change in planned()["changes"]}
    halved = changes["halve the effective batch"]
    assert (halved["accumulation_steps"], halved["micro_batches"]) == (128, 512)
    assert halved["inner_step_s"] == pytest.approx(5.12)
    assert changes["halve the batch"]["memory_gb"] < 30
    assert changes["gradient checkpointing"]["inner_step_s"] == pytest.approx(10.24 * 1.2)


@pytest.mark.parametrize(
    ("batch", "seq", "total"), [(1, 2048, 9), (2, 1024, 9), (4, 1024, 11), (4, 2048, 15)]
)
def test_source_003s_quantised_llama_takes_9_to_15_gb_on_a_t4(
    batch: int, seq: int, total: float, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"plan --gpus 1 --params 8B --weight-bits 4 --batch {batch} --seq {seq}"
    assert run([*arguments.split(), "--gpu-memory-gb", "16", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    memory = seen["actual"]["memory_gb"]
    assert 4.5 <= memory["weights"] <= 5.5
    assert 1.0 <= memory["optimizer"] <= 1.5
    assert 2.0 <= memory["activations"] <= 8.0
    assert memory["total"] == pytest.approx(total, rel=0.02)
    assert seen["fits"] is True
    # Source 003's own example ran out of memory without gradient checkpointing.
    (without,) = (c for c in seen["changes"] if c["what"] == "no gradient checkpointing")
    assert without["memory_gb"] > 16 or batch * seq < 8192


SOURCE_003 = """RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB
(GPU 0; 15.90 GiB total; 14.32 GiB allocated; 237.56 MiB free;
14.89 GiB reserved in total by PyTorch)

My current configuration:
- Model: Llama-3-8B-4bit
- Batch size: 4
- Sequence length: 2048
- Gradient accumulation: 4
- Gradient checkpointing: disabled
"""


def test_settings_pasted_with_an_error_say_what_each_change_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source 003's example asks how much memory each change would save."""
    log = tmp_path / "log"
    log.write_text(SOURCE_003)
    assert run(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-4:] == [
        "Batch 4 of 2048 tokens needs about 32 GB. One change each:",
        "  halve the batch: about 20 GB, saves 13",
        "  halve the sequence: about 20 GB, saves 13",
        "  gradient checkpointing: about 15 GB, saves 17",
    ]
    log.write_text(SOURCE_003.partition("My current")[0])
    assert run(["explain", str(log)]) == 0
    assert "saves" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["Model: 0B", "model 9999b", "batch size: 0", "batch size: 99999"])
def test_no_pasted_setting_makes_the_estimate_fail(text: str) -> None:
    list(savings(f"{text}\nModel: x-7B\nBatch size: 1\nSequence length: 0"))


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 4096),
    st.floats(1e6, 1e12),
    st.integers(1, 65536),
    st.integers(1, 100),
)
def test_any_settings_are_planned(
    gpus: int, batch: int, more: int, params: float, seq: int, up: int
) -> None:
    seen = planned(
        gpus=gpus, batch=batch, effective=batch + more, params=params, seq=seq, upload_steps=up
    )
    assert seen["micro_batches"] == seen["accumulation_steps"] * gpus
    assert seen["actual"]["memory_gb"]["weights"] <= seen["memory_gb"]["weights"]
    assert seen["upload"]["first_valid_inner_step"] >= 50


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "plan --gpus 4 --batch 2 --effective 512 --params 4e9 --micro-batch-ms 10"
    assert run(arguments.split()) == 0
    out = capsys.readouterr().out
    for words in ("256", "1024", "~30.0 GB", "10.24s", "divides the micro-batches"):
        assert words in out
    assert run(["plan", "--batch", "8", "--effective", "4"]) == 64
    assert run(["plan", "--weight-bits", "3"]) == 64
    for none in ("many", "nan", "inf", "4e400", "1e308T", "-4B", "0"):
        assert run(["plan", "--params", none]) == 64
    for none in ("nan", "inf", "1e308"):
        assert run(["plan", "--micro-batch-ms", none, "--json"]) == 64
    assert run(["plan", "--gpus", "9" * 400, "--json"]) == 64
