"""`explain` finds each anomaly in a trace at its step, and stays silent on healthy curves."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miner_guard import exits
from miner_guard.cli import main
from miner_guard.watch import trace_reading as reading
from miner_guard.watch.curves import Anomaly, judge
from miner_guard.watch.progress import TrainingFacts
from miner_guard.watch.trace_reading import Trace

Found = list[tuple[str, int]]


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


def found(anomalies: Sequence[Anomaly]) -> Found:
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


_ZEROS = changed(healthy(100), lambda n, v: 0.0 if n >= 60 else v)
_LOSSES: dict[str, tuple[list[float], Found]] = {
    "nan": (changed(healthy(), lambda n, v: math.nan if n >= 300 else v), [("nan", 300)]),
    **{
        f"one spike at {at}": (
            changed(healthy(), lambda n, v, at=at: 1.6 * v if n == at else v),
            [("spike", at)],
        )
        for at in (40, 300, 597, 599)
    },
    "explodes to where it began": (
        changed(healthy(), lambda n, v: v if n < 400 else v * healthy()[0] / healthy()[400]),
        [("divergence", 400)],
    ),
    "converged": ([2 + 6 * math.exp(-n / 20) + 0.01 * (n % 3) for n in range(600)], []),
}


@pytest.mark.parametrize(("values", "expected"), _LOSSES.values(), ids=_LOSSES)
def test_a_loss_is_judged_at_its_step(values: list[float], expected: Found) -> None:
    assert found(trace_of(loss=values)) == expected


def test_a_zero_with_a_nan_norm_is_nan_and_the_examples_are_named() -> None:
    facts = TrainingFacts(batch_size=4, accumulation_steps=4)
    seen = trace_of(facts, loss=_ZEROS, grad_norm=[1.0] * 60 + [math.nan] * 40)
    assert found(seen) == [("nan", 60)]
    assert "check examples 960 to 975" in seen[0].fixes[0]


def test_divergence_is_dated_to_its_onset() -> None:
    seen = trace_of(loss=changed(healthy(), lambda n, v: v * (1 + 0.02 * max(0, n - 400))))
    assert [a.type for a in seen] == ["divergence"]
    assert 400 <= seen[0].at_step <= 420


def test_a_run_that_starts_over_is_judged_anew() -> None:
    lines = [json.dumps({"step": n % 400, "loss": v}) for n, v in enumerate(healthy(400) * 2)]
    assert found(judge(reading.read(lines))) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_stays_near_chance_is_a_plateau_and_a_fine_tuned_one_is_not(seed: int) -> None:
    source = random.Random(seed)
    for stuck in (
        [(10.2 + 0.77 * math.exp(-n / 8)) * source.gauss(1, 0.01) for n in range(200)],
        [10.8 * source.gauss(1, 0.003) for _ in range(200)],
    ):
        ((kind, at),) = found(trace_of(loss=stuck))
        assert kind == "plateau_high"
        assert 100 <= at < 200
    begins = [(10.97 - 0.004 * n) * source.gauss(1, 0.01) for n in range(200)]
    assert found(trace_of(loss=begins)) == []


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
    assert remark.detail == ("the loss is decreasing, but slowly: 2.45 to 2.21, 9.8% in 80 steps")
    assert "low learning rate" in remark.cause
    assert remark.fixes[0].startswith("raise the learning rate from 0.0002 to 5e-4 or 1e-3")


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_loss_gets_no_remark(seed: int) -> None:
    for noise in (0.005, 0.02):
        assert trace_of(loss=healthy(100, seed, noise)) == []
    window = [{"step": 5000 + 10 * n, "loss": 2.45 - 0.003 * n} for n in range(80)]
    assert judge(reading.read(map(json.dumps, window))) == []


_EVALUATIONS: dict[str, tuple[list[float], int | None]] = {
    "rises steadily": ([2 + 0.001 * (n - 20) ** 2 for n in range(60)], 20),
    "flat": ([max(2.0, 3 - 0.1 * n) + 0.02 * (n % 3) for n in range(60)], None),
    "five, each worse than the one before": ([1.0, 0.8, 0.9, 1.05, 1.2], 1),
    "four may be chance": ([1.0, 0.8, 0.9, 1.05], None),
}


@pytest.mark.parametrize(("evaluations", "best"), _EVALUATIONS.values(), ids=_EVALUATIONS)
def test_overfitting_is_dated_to_the_best_evaluation(
    evaluations: list[float], best: int | None
) -> None:
    training = [3 * math.exp(-n / 15) + 0.1 for n in range(60)]
    seen = found(trace_of(loss=training, eval_loss=evaluations))
    assert [kind for kind, _ in seen] == ["overfit"] * (best is not None)
    assert all(best is not None and abs(at - best) <= 2 for _, at in seen)


_TIMES = [15 * random.Random(3 + n).gauss(1, 0.03) for n in range(600)]


@pytest.mark.parametrize(
    ("change", "expected", "remarks"),
    [
        (
            lambda n, v: 2 * v if n in (100, 350) else v,
            [("slow_steps", 100), ("slow_steps", 350)],
            "",
        ),
        (lambda n, v: 1.5 * v if n >= 300 else v, [("regime_change", 300)], ""),
        (lambda n, v: v / 2 if n >= 300 else v, [], "and stayed there"),
        (lambda n, v: 2 * v if n % 50 == 0 else v, [], "recurs at an interval"),
    ],
    ids=["single steps", "slower", "faster", "scheduled"],
)
def test_slow_steps_and_changes_of_the_level_are_distinguished(
    change: Callable[[int, float], float], expected: Found, remarks: str
) -> None:
    seen = trace_of(step_time=changed(_TIMES, change))
    assert found(seen) == expected
    assert all(remarks in a.detail for a in seen if a.severity == "info" and a.at_step)
    assert bool(remarks) == any(a.severity == "info" for a in seen)


_NOISY = [16 + 4 * random.Random(n).random() for n in range(600)]
_MEMORY: dict[str, tuple[Sequence[float], str, int]] = {
    "start-up": ([1, 5, 9, 14, *[18.0] * 100], "", 0),
    "one low value": ([18.0] * 60 + [2.0] + [18.0] * 60, "memory_drop", 60),
    "stays low": ([18.0] * 60 + [2.0] * 60, "memory_drop", 60),
    "leak": ([18 + 0.02 * n for n in range(400)], "memory_leak", 0),
    "leak that begins late": (
        [18.4 + 0.02 * max(0, n - 400) for n in range(600)],
        "memory_leak",
        390,
    ),
    "one allocation": ([18.0 + (n > 100) for n in range(400)], "", 0),
    "follows the sequence length": (_NOISY, "", 0),
    "falls in noise": (changed(_NOISY, lambda n, v: v - 9 * (n >= 300)), "memory_drop", 300),
}


@pytest.mark.parametrize(("values", "kind", "at"), _MEMORY.values(), ids=_MEMORY)
def test_memory_is_judged_at_its_step(values: Sequence[float], kind: str, at: int) -> None:
    seen = found(trace_of(gpu_mem_gb=values))
    assert [kind for kind, _ in seen] == [kind] * bool(kind)
    assert all(abs(step - at) <= 20 for _, step in seen)


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


def test_the_steps_of_a_guards_own_log_count_over_all_outer_steps() -> None:
    line = {"event": "inner_step", "msg": "", "loss": 2.0}
    rows = [{**line, "inner_step": n % 30, "total_steps": n} for n in range(60)]
    rows += [{**line, "inner_step": 0, "total_steps": 60, "loss": "NaN"}]
    rows += [{"event": "loss_nan", "msg": "Loss is NaN", "step": 0, "loss": "nan"}]
    assert found(judge(reading.read(map(json.dumps, rows)))) == [("nan", 60)]


@settings(max_examples=60)
@example(
    [*[1.0] * 4, 9007199254740.0, 0.0, 0.0, *[-1.0] * 3, *[0.0] * 4, 2.225073858507e-311], "loss"
)
@example([1e-300, 1e300] * 20 + [1.7e308] * 40, "loss")
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60),
    st.sampled_from(["loss", "eval_loss", "step_time", "gpu_mem_gb"]),
)
def test_no_numbers_make_it_raise(values: list[float], name: str) -> None:
    trace_of(**{name: values})


def run(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    code = main.run(["explain", str(path), "--state-dir", str(path.parent), *options])
    out = capsys.readouterr().out
    return code, json.loads(out) if "--json" in options else out


@pytest.mark.parametrize(
    "content",
    [b"", random.Random(1).randbytes(100_000), b"step,loss,lr\n", b"when,what\n1,2\n"],
    ids=["empty", "noise", "only the columns", "other columns"],
)
def test_a_file_without_trace_lines_is_refused_and_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    assert main.run(["explain", "--trace", str(path), "--state-dir", str(tmp_path)]) == exits.USAGE
    assert 'pass JSON lines such as {"step"' in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("start", "code", "severity"), [(0, 1, "info"), (1, 1, "info"), (5000, 0, "warning")]
)
def test_the_first_step_is_slow_in_every_healthy_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: int, code: int, severity: str
) -> None:
    """A trace that begins later shows a window of a run, so its first step is an ordinary one."""
    path = tmp_path / "trace"
    rows = (
        {"step": start + n, "loss": value, "step_time": 3.46 if n else 30.0}
        for n, value in enumerate(healthy(300))
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ended, document = run(path, capsys, "--json")
    (finding,) = document["findings"]
    assert (ended, finding["type"], finding["severity"]) == (code, "slow_steps", severity)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings say which examples a NaN came from: `-c` must not be accepted and ignored."""
    sick, well, guard_toml = tmp_path / "sick", tmp_path / "well", tmp_path / "guard.toml"
    sick.write_text("".join(f"Step {n}: loss={2.0 if n < 8 else math.nan}\n" for n in range(9)))
    well.write_text("".join(f'{{"step": {n}, "loss": {v}}}\n' for n, v in enumerate(healthy())))
    guard_toml.write_text("[miner]\neffective_batch_size = 16\n")
    code, document = run(sick, capsys, "--json", "--trace", "-c", str(guard_toml))
    (finding,) = document["findings"]
    assert sorted(finding) == ["at_step", "detail", "fixes", "severity", "type"]
    assert (code, finding["type"], finding["at_step"]) == (0, "nan", 8)
    assert run(well, capsys, "--json") == (1, {"findings": []})
    code, text = run(sick, capsys, "-c", str(guard_toml))
    assert "nan at step 8" in text
    assert "check examples 128 to 143" in text


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
    file.write_text(text)
    code, document = run(file, capsys, "--json")
    (finding,) = document["findings"]
    assert (code, finding["type"], finding["at_step"]) == (0, "nan", 8)
    file.write_text(text.replace("nan", "1.9").replace("NaN", "1.9") + "Segmentation fault\n")
    assert "root_cause" in run(file, capsys, "--json")[1]
