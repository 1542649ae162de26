"""The lines and tables that the reader accepts as a trace; no text makes it raise."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miner_guard.watch import trace_reading as reading
from miner_guard.watch.curves import judge

LINES = [
    ('{"step": 10, "loss": "NaN", "lr": 6.67e-5}', "loss", 10, math.nan),
    ('{"step": 10, "loss": Infinity}', "loss", 10, math.inf),
    ('{"step": 10, "loss": null, "eval_loss": 2.5, "other": {"a": 1}}', "eval_loss", 10, 2.5),
    ('{"step": 10, "step_time": 15.2, "gpu_mem_gb": 18.4}', "gpu_mem_gb", 10, 18.4),
    (
        '{"ts": "x", "event": "inner_step", "msg": "m", "inner_step": 84, "step_time_s": 15.2}',
        "step_time",
        84,
        15.2,
    ),
    ("Step 10: loss=2.45, lr=6.67e-05", "lr", 10, 6.67e-05),
    ("Step 10: loss=nan, lr=6.67e-05", "loss", 10, math.nan),
    (
        "2026-01-02T03:04:05Z | INFO | Rank 0 | Outer Step: 56 | Inner Step: 84 | LR: "
        "0.00002100 | Loss: 3.40"
        " | Step Time: 15.2s | GPU Mem: 18.45GB",
        "step_time",
        84,
        15.2,
    ),
    ("\x1b[34mINFO\x1b[0m | Outer Step: 5 | Inner Step: 3 | Average Loss: 3.40", "loss", 3, 3.4),
    ("{'loss': 2.3, 'grad_norm': nan, 'learning_rate': 5e-05}", "grad_norm", 1, math.nan),
    ("step:100/5000 val_loss:3.28 train_time:1ms", "eval_loss", 100, 3.28),
    ("iter 500: loss 2.1, time 250.12ms, mfu 3.10%", "loss", 500, 2.1),
    ("step 500: train loss 2.0, val loss 2.2", "eval_loss", 500, 2.2),
    ("step 500: train loss 2.0, val loss 2.2", "loss", 500, 2.0),
    (
        "Speed 2178.40 samples/sec   Loss nan   LearningRate 0.001   Global Step: 20",
        "loss",
        20,
        math.nan,
    ),
]


@pytest.mark.parametrize(("line", "name", "step", "value"), LINES)
def test_every_way_to_write_a_trace(line: str, name: str, step: int, value: float) -> None:
    series = reading.read([line])[name]
    assert series.steps == [step]
    assert series.values == pytest.approx([value], nan_ok=True)


TABLES = [
    # Lightning's CSVLogger: training and evaluation in separate rows.
    "epoch,lr-AdamW,step,train_loss_step,val_loss\n0,1e-4,9,2.5,\n0,,19,,2.75\n",
    # wandb's export, and a table that a trainer prints between other lines.
    (
        '"Step","run-7 - train/loss","run-7 - '
        'eval/loss","test/loss"\n"9","2.5","","7"\n"19","","2.75","7"\n'
    ),
    "starting, with 4 ranks\niter, loss, val loss, ms\n9, 2.5, , 250\nsaved\n19, , 2.75, 251\n",
    (
        '{"train/loss": 2.5, "train/global_step": 9}\n{"eval/loss": 2.75, '
        '"train/global_step": 19, "test/loss": 7.0}\n'
    ),
    # HF Trainer's trainer_state.json
    json.dumps(
        {"log_history": [{"loss": 2.5, "step": 9}, {"eval_loss": 2.75, "step": 19}]}, indent=2
    ),
]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_a_trace_too(table: str) -> None:
    trace = reading.read(table.splitlines())
    assert (trace["loss"].steps, trace["loss"].values) == ([9], [2.5])
    assert (trace["eval_loss"].steps, trace["eval_loss"].values) == ([19], [2.75])
    assert not any(len(trace[name]) for name in ("grad_norm", "step_time", "gpu_mem_gb"))


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=60),
            st.sampled_from([line for line, *_ in LINES]),
            st.sampled_from("\n".join(TABLES).split("\n")),
        ),
        max_size=40,
    )
)
def test_no_text_makes_it_raise(lines: list[str]) -> None:
    judge(reading.read(lines))
