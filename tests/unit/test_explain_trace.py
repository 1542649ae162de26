"""`explain --trace` finds each kind of anomaly at its step, stays silent on healthy curves, and
reads every trace format."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miner_guard import exits
from miner_guard.cli import main
from miner_guard.cli.explain import explain_trace
from miner_guard.watch import trace_reading as reading
from miner_guard.watch.curves import Anomaly
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.trace import judge
from miner_guard.watch.trace_reading import Trace


def trace_of(facts: TrainingFacts | None = None, **series: Sequence[float]) -> list[Anomaly]:
    """Judge series given by name, at steps 0, 1, 2, …"""
    trace = Trace()
    for name, values in series.items():
        for step, value in enumerate(values):
            trace[name].add(step, value)
    return judge(trace, facts)


def healthy(count: int = 600, seed: int = 1, noise: float = 0.02) -> list[float]:
    """A power-law descent with noise proportional to the loss."""
    source = random.Random(seed)
    return [(2 + 6 * (n + 1) ** -0.4) * source.gauss(1, noise) for n in range(count)]


def changed(values: Sequence[float], change: Callable[[int, float], float]) -> list[float]:
    return [change(n, v) for n, v in enumerate(values)]


def found(anomalies: Sequence[Anomaly]) -> list[tuple[str, int]]:
    return [(a.type, a.at_step) for a in anomalies if a.severity != "info"]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.005, 0.02, 0.08])
def test_healthy_curves_are_healthy(seed: int, noise: float) -> None:
    source = random.Random(seed)
    evaluation = [(2.2 + 4 * (n + 1) ** -0.5) * source.gauss(1, 0.01) for n in range(60)]
    seen = trace_of(
        loss=healthy(800, seed, noise),
        eval_loss=evaluation,
        step_time=[15 * source.gauss(1, 0.04) for _ in range(800)],
        gpu_mem_gb=[*range(3, 18, 3), *[18.4 + 0.05 * source.random() for _ in range(700)]],
    )
    assert found(seen) == []


def test_noise_beyond_all_numbers_is_neither_a_climb_nor_an_error() -> None:
    values = [1e-300, 1e300] * 20 + [1e300] * 20
    trace_of(loss=values)
    trace_of(loss=[*values, *reversed(values), *[1.7e308] * 40])


def test_nan_at_its_step_with_the_examples() -> None:
    facts = TrainingFacts(batch_size=4, accumulation_steps=4)
    seen = trace_of(facts, loss=changed(healthy(), lambda n, v: math.nan if n >= 300 else v))
    assert found(seen) == [("nan", 300)]
    assert "check examples 4800 to 4815" in seen[0].fixes[2]


def test_hf_trainers_zero_after_nan() -> None:
    loss = changed(healthy(100), lambda n, v: 0.0 if n >= 60 else v)
    norm = [1.0] * 60 + [math.nan] * 40
    assert ("nan", 60) in found(trace_of(loss=loss, grad_norm=norm))
    assert ("nan", 60) in found(trace_of(loss=loss))


@pytest.mark.parametrize("at", [40, 300, 597])
def test_one_spike_is_a_warning(at: int) -> None:
    seen = trace_of(loss=changed(healthy(), lambda n, v: 1.6 * v if n == at else v))
    assert found(seen) == [("spike", at)]


def test_divergence_at_its_onset() -> None:
    seen = trace_of(loss=changed(healthy(), lambda n, v: v * (1 + 0.02 * max(0, n - 400))))
    assert [a.type for a in seen] == ["divergence"]
    assert 400 <= seen[0].at_step <= 420


def test_a_loss_that_never_falls_is_a_plateau_and_a_converged_one_is_not() -> None:
    source = random.Random(3)
    stuck = [10.8 * source.gauss(1, 0.003) for _ in range(200)]
    converged = [(2 + 6 * math.exp(-n / 20)) * source.gauss(1, 0.01) for n in range(600)]
    assert [t for t, _ in found(trace_of(loss=stuck))] == ["plateau_high"]
    assert found(trace_of(loss=converged)) == []


def test_a_flat_window_of_a_run_under_way_is_only_a_remark() -> None:
    lines = [json.dumps({"step": 5000 + 10 * n, "loss": 2.1 + 0.001 * (n % 3)}) for n in range(100)]
    assert [(a.type, a.severity) for a in judge(reading.read(lines))] == [("plateau_high", "info")]


DOCUMENTS_LOG = """\
Step 10: loss=2.45, lr=6.67e-05
Step 20: loss=2.38, lr=0.000133
Step 30: loss=2.31, lr=0.0002
Step 40: loss=2.28, lr=0.0002
Step 50: loss=2.26, lr=0.000175
Step 60: loss=2.24, lr=0.00015
Step 70: loss=2.23, lr=0.000125
Step 80: loss=2.22, lr=0.0001
Step 90: loss=2.21, lr=7.5e-05
"""


def test_the_documents_log_gets_a_remark_on_its_slow_decrease() -> None:
    """Source 003, prompt 1: is it converging, what does the slow decrease suggest, what next?"""
    (remark,) = judge(reading.read(DOCUMENTS_LOG.splitlines()))
    assert (remark.type, remark.severity) == ("slow_decrease", "info")
    assert remark.detail == (
        "the loss is decreasing, but slowly: 2.45 to 2.21, 9.8% in 80 steps, 13% of that in the "
        "last third"
    )
    assert "low learning rate" in remark.cause
    assert remark.fixes[0].startswith("raise the learning rate from 0.0002 to 5e-4 or 1e-3")


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_loss_gets_no_remark(seed: int) -> None:
    for noise in (0.005, 0.02):
        assert trace_of(loss=healthy(100, seed, noise)) == []
    window = [{"step": 5000 + 10 * n, "loss": 2.45 - 0.003 * n} for n in range(80)]
    assert judge(reading.read(map(json.dumps, window))) == []


def test_overfit_at_the_best_evaluation() -> None:
    training = [3 * math.exp(-n / 15) + 0.1 for n in range(60)]
    evaluation = [2 + 0.001 * (n - 20) ** 2 for n in range(60)]
    seen = trace_of(loss=training, eval_loss=evaluation)
    assert [t for t, _ in found(seen)] == ["overfit"]
    assert abs(seen[0].at_step - 20) <= 2


def test_flat_evaluation_while_training_falls_is_not_overfitting() -> None:
    source = random.Random(3)
    training = [3 * math.exp(-n / 15) + 0.1 for n in range(60)]
    evaluation = [max(2.0, 3 - 0.1 * n) * source.gauss(1, 0.01) for n in range(60)]
    assert found(trace_of(loss=training, eval_loss=evaluation)) == []


def test_slow_steps_and_a_regime_change_are_distinguished() -> None:
    source = random.Random(3)
    times = [15 * source.gauss(1, 0.03) for _ in range(600)]
    single = changed(times, lambda n, v: 2 * v if n in (100, 350) else v)
    assert found(trace_of(step_time=single)) == [("slow_steps", 100), ("slow_steps", 350)]
    lasting = found(trace_of(step_time=changed(times, lambda n, v: 1.5 * v if n >= 300 else v)))
    assert lasting == [("regime_change", 300)]
    faster = trace_of(step_time=changed(times, lambda n, v: v / 2 if n >= 300 else v))
    assert [(a.type, a.at_step, a.severity) for a in faster] == [("regime_change", 300, "info")]


def test_scheduled_slow_steps_are_reported_to_come_regularly() -> None:
    seen = trace_of(step_time=[30.0 if n % 50 == 0 and n else 15.0 for n in range(600)])
    assert {a.type for a in seen} == {"slow_steps"}
    assert "every 50 values" in seen[0].detail


@pytest.mark.parametrize("seed", range(3))
def test_a_language_model_that_is_stuck_near_chance_is_a_plateau(seed: int) -> None:
    source = random.Random(seed)
    stuck = [(10.2 + 0.77 * math.exp(-n / 8)) * source.gauss(1, 0.01) for n in range(200)]
    assert found(trace_of(loss=stuck)) == [("plateau_high", 100)]
    begins = [(10.97 - 0.004 * n) * source.gauss(1, 0.01) for n in range(200)]
    tuned = [(1.2 + 0.09 * math.exp(-n / 8)) * source.gauss(1, 0.01) for n in range(200)]
    assert found(trace_of(loss=begins)) == []
    assert found(trace_of(loss=tuned)) == []


def test_a_loss_that_explodes_to_where_it_began_and_stays_is_not_a_restart() -> None:
    values = healthy(600)
    exploded = changed(values, lambda n, v: v if n < 400 else v * values[0] / values[400])
    assert found(trace_of(loss=exploded)) == [("divergence", 400)]
    assert found(trace_of(loss=values[:400] + values[:200])) == [], "it starts over"


def test_a_leak_that_begins_late_is_found_where_it_begins() -> None:
    leak = [18.4 + 0.02 * max(0, n - 400) for n in range(600)]
    ((kind, at),) = found(trace_of(gpu_mem_gb=leak))
    assert kind == "memory_leak"
    assert abs(at - 400) <= 20
    grown = [18.4 if n < 400 else 19.9 for n in range(600)]
    assert found(trace_of(gpu_mem_gb=grown)) == [], "one allocation is no leak"


def test_memory_drop_leak_and_start_up() -> None:
    assert found(trace_of(gpu_mem_gb=[1, 5, 9, 14, *[18.0] * 100])) == []
    assert found(trace_of(gpu_mem_gb=[18.0] * 60 + [2.0] + [18.0] * 60)) == [("memory_drop", 60)]
    assert [t for t, _ in found(trace_of(gpu_mem_gb=[18.0] * 60 + [2.0] * 60))] == ["memory_drop"]
    assert [t for t, _ in found(trace_of(gpu_mem_gb=[18 + 0.02 * n for n in range(400)]))][:1] == [
        "memory_leak"
    ]
    assert found(trace_of(gpu_mem_gb=[18.0 + (n > 100) for n in range(400)])) == []


@pytest.mark.parametrize(
    "summary",
    [
        "{'train_runtime': 812.1, 'train_loss': 4.61, 'epoch': 3.0}",
        "  train_loss               =     4.6123",
    ],
)
def test_the_mean_that_a_trainer_prints_at_the_end_is_not_a_spike(summary: str) -> None:
    """Every finished run of HF Trainer once ended in a spike."""
    lines = [f"{{'loss': {value:.4f}, 'learning_rate': 5e-05}}" for value in healthy(200)]
    assert found(judge(reading.read([*lines, summary]))) == []


def test_memory_that_follows_the_sequence_length_is_not_a_change() -> None:
    for seed in range(20):
        source = random.Random(seed)
        memory = [16 + 4 * source.random() for _ in range(600)]
        assert found(trace_of(None, gpu_mem_gb=memory)) == []
    memory[300:] = [value - 9 for value in memory[300:]]
    assert found(trace_of(None, gpu_mem_gb=memory)) == [("memory_drop", 300)]


def test_a_guards_own_log_says_nan_by_its_event() -> None:
    lines = [
        json.dumps(
            {"event": "inner_step", "msg": "", "inner_step": n, "loss": 2.0 if n < 50 else None}
        )
        for n in range(60)
    ]
    lines.append(
        json.dumps(
            {"event": "loss_nan", "msg": "Loss is NaN or Inf at step 50", "step": 50, "loss": "nan"}
        )
    )
    assert found(judge(reading.read(lines)))[0] == ("nan", 50)


@settings(max_examples=60)
@example(
    [*[1.0] * 4, 9007199254740.0, 0.0, 0.0, *[-1.0] * 3, *[0.0] * 4, 2.225073858507e-311], "loss"
)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60),
    st.sampled_from(["loss", "eval_loss", "step_time", "gpu_mem_gb"]),
)
def test_no_numbers_make_it_raise(values: list[float], name: str) -> None:
    trace_of(**{name: values})


def run(path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool = True) -> tuple[int, Any]:
    code = 0
    try:
        explain_trace(str(path), TrainingFacts(), as_json=as_json)
    except typer.Exit as end:
        code = end.exit_code
    out = capsys.readouterr().out
    return code, json.loads(out) if as_json else out


@pytest.mark.parametrize(
    "content",
    [b"", random.Random(1).randbytes(100_000), b"step,loss,lr\n", b"when,what\n1,2\n"],
    ids=["empty", "noise", "only the columns", "other columns"],
)
def test_a_file_without_trace_lines_is_refused_and_not_called_healthy(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(
        exits.Refused, match=r'no trace lines in \d+ lines?; pass JSON lines such as \{"step"'
    ) as refused:
        explain_trace(str(path), TrainingFacts(), as_json=True)
    assert refused.value.code == exits.USAGE


@pytest.mark.parametrize(
    ("start", "code", "severity"), [(0, 1, "info"), (1, 1, "info"), (5000, 0, "warning")]
)
def test_the_first_step_is_slow_in_every_healthy_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: int, code: int, severity: str
) -> None:
    """A trace that begins later shows a window of a run, so its first step is an ordinary one."""
    times = [30.0 if n == 0 else 3.46 for n in range(300)]
    path = tmp_path / "trace"
    lines = (
        f'{{"step": {start + n}, "loss": {v}, "step_time": {t}}}\n'
        for n, (v, t) in enumerate(zip(healthy(300), times, strict=True))
    )
    path.write_text("".join(lines))
    ended, document = run(path, capsys)
    assert (ended, [(f["type"], f["severity"]) for f in document["findings"]]) == (
        code,
        [("slow_steps", severity)],
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick, well = tmp_path / "sick", tmp_path / "well"
    sick.write_text(
        "".join(
            f"Step {n}: loss={v if n != 50 else 9.0}, lr=2e-4\n" for n, v in enumerate(healthy())
        )
    )
    well.write_text("".join(f'{{"step": {n}, "loss": {v}}}\n' for n, v in enumerate(healthy())))
    code, document = run(sick, capsys)
    assert code == 0
    assert [sorted(f) for f in document["findings"]] == [
        ["at_step", "detail", "fixes", "severity", "type"]
    ]
    assert (document["findings"][0]["type"], document["findings"][0]["at_step"]) == ("spike", 50)
    assert run(well, capsys) == (1, {"findings": []})
    code, text = run(sick, capsys, as_json=False)
    assert "spike at step 50" in text
    assert "halve the learning rate" in text
    with pytest.raises(exits.Refused, match="cannot be read") as refused:
        explain_trace(str(tmp_path / "absent"), TrainingFacts(), as_json=True)
    assert refused.value.code == exits.USAGE


def test_the_settings_say_which_examples_a_nan_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-c` must not be accepted and ignored."""
    guard_toml, trace = tmp_path / "guard.toml", tmp_path / "trace"
    guard_toml.write_text("[miner]\neffective_batch_size = 16\n")
    trace.write_text('{"step": 7, "loss": 2.0}\n{"step": 8, "loss": NaN}\n')
    assert (
        main.run(
            ["explain", "--trace", str(trace), "-c", str(guard_toml), "--state-dir", str(tmp_path)]
        )
        == 0
    )
    assert "check examples 128 to 143" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps.jsonl", '{"step": 7, "loss": 2.0}\n{"step": 8, "loss": NaN}\n'),
        ("steps.csv", "step,loss,lr\n7,2.0,1e-4\n8,nan,1e-4\n"),
        ("steps.txt", "Step 7: loss=2.0, lr=1e-4\n\nStep 8: loss=nan, lr=1e-4\n"),
    ],
)
def test_the_command_tells_numbers_from_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    """An error among the numbers makes the file a log: its cause must not be hidden."""
    file = tmp_path / name
    at = ["--json", "--state-dir", str(tmp_path)]
    file.write_text(text)
    assert main.run(["explain", str(file), *at]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["type"], finding["at_step"]) == ("nan", 8)
    file.write_text(text.replace("nan", "1.9").replace("NaN", "1.9") + "Segmentation fault\n")
    main.run(["explain", str(file), *at])
    assert "root_cause" in json.loads(capsys.readouterr().out)


def test_five_evaluations_that_rise_one_by_one_show_overfitting() -> None:
    evaluations = [1.0, 0.8, 0.9, 1.05, 1.2]
    rows = [{"step": step, "loss": 2.0 / (1 + step / 40)} for step in range(1, 101)]
    for number, value in enumerate(evaluations, 1):
        rows[20 * number - 1]["eval_loss"] = value
    kinds = {a.type for a in judge(reading.read(json.dumps(row) for row in rows))}
    assert kinds == {"overfit"}
    for row in rows[79:]:
        row.pop("eval_loss", None)
    assert not judge(reading.read(json.dumps(row) for row in rows)), "two of them are chance"
