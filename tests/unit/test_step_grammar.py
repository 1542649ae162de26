"""One grammar reads the step lines of all trainers, each of which prints a different form."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.watch.lines import LogSteps, StepLine, check, grammar, lacking, patterns

ROWS = Path(__file__).with_name("step_lines.tsv").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", ROWS)
def test_step_loss_and_time_of_usual_trainers(row: str) -> None:
    _, *expected, line = row.split("\t")
    seen = grammar().read(line.replace("\\t", "\t"))
    assert isinstance(seen, StepLine)
    number, loss, seconds = (None if value == "-" else float(value) for value in expected)
    assert (seen.inner, seen.loss) == (number, loss)
    assert seen.seconds == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("line", "memory_gb"),
    [
        ("Epoch 3: Loss=0.542, GPU=18.1GB (75.4%)", 18.1),
        ("step 5 loss 3.2 gpu=512MB", 0.5),
        ("step 5 loss 3.2 gpu 93%", None),
        ("step 5 loss 3.2 GPU: 3", None),
    ],
)
def test_source_002s_gpu_is_memory_only_with_its_unit(line: str, memory_gb: float | None) -> None:
    seen = grammar().read(line)
    assert isinstance(seen, StepLine)
    assert seen.gpu_gb == memory_gb


@pytest.mark.parametrize(
    "line",
    [
        "step 500: train loss 2.1000, val loss 3.2000",
        "step:125/1750 val_loss:4.1234 train_time:12345ms step_avg:98.76ms",
        "Test set: Average loss: 0.0501, Accuracy: 9837/10000 (98%)",
        "Validation | Step 10 | Loss 3.2000",
        "Test:  [  0/196]  eta: 0:05:10  loss: 0.4914 (0.4914)  acc1: 90.6  time: 1.5831",
        "{'eval_loss': 2.3, 'eval_runtime': 1.2, 'epoch': 0.1}",
        "{'train_runtime': 12.3, 'train_samples_per_second': 3.2, 'train_loss': 2.2, 'epoch': 1.0}",
        "Validation DataLoader 0:  37%|███▋      | 37/100 [00:12<00:21,  2.93it/s]",
        "Map: 100%|██████████| 1000/1000 [00:01<00:00, 800.00 examples/s]",
        "Loading checkpoint shards:  33%|███▎      | 1/3 [00:02<00:04,  2.10s/it]",
        "model.safetensors: 100%|██████████| 1.2G/1.2G [00:10<00:00, 120MB/s]",
        "Saving checkpoint at step 100",
        "Resuming from step 100, lr 0.1",
        "Micro Step 3/8 | Loss 0.0123 | Entropy 0.4",
    ],
)
def test_other_lines_are_not_steps(line: str) -> None:
    """Evaluation losses and download steps must stay out of the run's curve."""
    assert grammar().read(line) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("step 10 done", "no loss, step time or learning rate"),
        ("loss is 3.4 at 12", "not as a known name with a number"),
    ],
)
def test_a_near_miss_says_what_the_line_lacks(line: str, why: str) -> None:
    assert grammar().read(line) is None
    assert why in lacking(line)


@pytest.mark.parametrize("part", ["loss ", "1", "[ ", "━", "step (", "1/1 ", "epoch 1:"])
def test_a_long_line_of_one_word_is_not_a_step(part: str) -> None:
    """The guard must not stall on one line: these are the words that its regular expressions
    repeat."""
    assert not isinstance(grammar().read(part * (2000 // len(part))), StepLine)


def steps_of(*lines: str, every_s: float = 1.0) -> list[tuple[int | None, float | None, float]]:
    """Number, loss and duration of the steps in lines that arrive one by one."""
    steps, found = LogSteps(0.0), []
    for at, text in enumerate(lines, 1):
        line = grammar().read(text)
        assert isinstance(line, StepLine)
        found += steps.observe(line, at * every_s)
    found += steps.finish(len(lines) * every_s)
    return [(s.line.inner, s.line.loss, round(s.end - s.start, 6)) for s in found]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            """[2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step=1/739328]
    train/CrossEntropyLoss=11.25
    train/Perplexity=76,631
[2024-04-17 09:42:38] INFO     [olmo.train:816, rank=0] [step=2/739328]
    train/CrossEntropyLoss=10.73""",
            [(1, 11.25, None), (2, 10.73, None)],
        ),
        (
            """[epoch=1][batch=4/5]:
         Train time/batch: 3
         Train loss/train/total: 8.5213
         Train metrics/train/LanguageCrossEntropy: 8.5620""",
            [(4, 8.5213, None)],
        ),
        (
            """  --> EVAL PERFORMANCE
     | > avg_loss: 4.70 (+0)
   --> TIME: 2025-08-19 14:37:04 -- STEP: 50/3984 -- GLOBAL_STEP: 50
     | > loss_mel_ce: 2.74  (nan)
     | > loss: 0.06  (nan)
     | > loader_time: 0.0095  (0.01)
  --> EVAL PERFORMANCE
     | > avg_loss: 4.29 (+0)""",
            [(50, 0.06, None)],
        ),
        (
            """[0/25][0/1583]\tLoss_D: 2.0937\tLoss_G: 5.2060\tD(x): 0.5704
[0/25][50/1583]\tLoss_D: 0.3567\tLoss_G: 12.2064\tD(x): 0.9364""",
            [(0, None, None), (50, None, None)],
        ),
        (
            """v3 (iou loss, Normalizer: (iou: 0.07) Avg, iou_loss = 0.0, total_loss = 0.029
 402: 27.874079, 27.5 avg loss, 0.000068 rate, 9.233807 seconds, 25728 images, 12.0 hours left""",
            [(402, 27.5, 9.233807)],
        ),
        (
            "Ep. 1 : Up. 1000 : Sen. 70,000 : Cost 8.31 * 1,500 : Time 120.31s : 12345.67 words/s",
            [(1000, 8.31, None)],
        ),
        (
            "1epoch:train:1-100batch: iter_time=0.005, loss_ctc=111.2, loss=89.4, "
            "optim_step_time=0.031, train_time=1.601",
            [(100, 89.4, 1.601)],
        ),
        (
            """ iteration 1/55000 | elapsed time per iteration (ms): 18806.7 | lm_loss: 2.27
[INFO] [logging.py:96:log_dist] [Rank 0] step=2, skipped=0, lr=[2.42e-09]
 iteration 2/55000 | elapsed time per iteration (ms): 11761.2 | lm_loss: 11.0""",
            [(1, 2.27, 18.8067), (2, 11.0, 11.7612)],
        ),
    ],
    ids=["OLMo", "Composer", "Coqui", "DCGAN", "darknet", "Marian", "ESPnet", "Megatron"],
)
def test_steps_of_several_lines_or_of_numbers_without_names(
    log: str, expected: list[tuple[int, float | None, float | None]]
) -> None:
    """An evaluation's loss, a loader's time or a region's loss must never stand for the step's."""
    found = check(log.splitlines(), patterns(None)).steps
    assert [(row["step"], row["loss"]) for row in found] == [row[:2] for row in expected]
    for step, (_, _, seconds) in zip(found, expected, strict=True):
        assert step["seconds"] == (None if seconds is None else pytest.approx(seconds))


def test_an_interval_of_many_steps_is_not_one_slow_step() -> None:
    batches = [f"[0/25][{n}/1583]\tLoss_D: 2.0\tLoss_G: 5.2" for n in range(0, 400, 100)]
    assert [seconds for _, _, seconds in steps_of(*batches, every_s=160.0)][1:] == [1.6] * 3
    whole = [f"Step {n}: loss 2.0, time: 160.0s" for n in range(0, 400, 100)]
    assert [seconds for _, _, seconds in steps_of(*whole, every_s=160.0)][1:] == [1.6] * 3


def _bar(done: int, of: int = 1000) -> str:
    return f"  1%|          | {done}/{of} [00:12<20:00,  1.21s/it]"


def test_one_number_with_a_rate_is_no_step_and_hides_no_losses() -> None:
    """DeepSpeed's `step=0` once hid all of the Trainer's losses."""
    once = "step=0, skipped=0, lr=[0.0], mom=[(0.9, 0.95)]"
    assert [step for step, _, _ in steps_of(once, "{'loss': 6.3, 'epoch': 0.1}")] == [1]
    grows = [f"step={n}, skipped=0, lr=[0.0{n}]" for n in (10, 20, 30)]
    assert [(step, seconds) for step, _, seconds in steps_of(*grows)][1:] == [(20, 0.1), (30, 0.1)]


def test_a_bar_that_says_training_counts_steps_without_a_loss() -> None:
    bars = [f"Training Progress:   0%|  | {n}/9 [00:1{n}<9:59, 1.0s/it]" for n in (1, 2, 3)]
    assert [step for step, _, _ in steps_of(*bars)] == [1, 2, 3]
    assert grammar().read(bars[0].replace("Training Progress", "Tokenizing")) is None


def test_the_bar_beside_hf_trainers_losses_numbers_them() -> None:
    seen = steps_of(
        _bar(9),
        _bar(10),
        "{'loss': 2.5, 'epoch': 0.1}",
        _bar(10),
        _bar(11),
        _bar(3, of=13),
        _bar(12),
    )
    assert [(step, loss) for step, loss, _ in seen] == [(10, 2.5), (11, None), (12, None)], (
        "the evaluation's bar counts no steps"
    )


def test_a_progress_bar_without_losses_counts_no_steps() -> None:
    """A loop over files before training starts must not count as steps."""
    assert steps_of(*(_bar(done) for done in range(1, 50))) == []


def test_losses_without_a_number_are_counted_until_numbers_come() -> None:
    record = "{'loss': 2.5, 'learning_rate': 5e-05}"
    assert [step for step, _, _ in steps_of(record, record, record)] == [1, 2, 3]
    assert [step for step, _, _ in steps_of("step 7: loss 2.0", record)] == [7]


def test_each_epoch_counts_from_the_start() -> None:
    epoch = [f"batch {n}: loss 2.0" for n in range(1, 7)]
    assert [step for step, _, _ in steps_of(*epoch, *epoch)] == [1, 2, 3, 4, 5, 6] * 2
    named = [f"Epoch: [{e}][{n}/2]\tLoss 2.0" for e in (0, 1) for n in (1, 2)]
    assert [step for step, _, _ in steps_of(*named)] == [1, 2, 1, 2]


def test_only_the_lowest_rank_counts() -> None:
    lines = [f"[rank {r}] step: {n}, loss: {n}.{r}" for n in (1, 2) for r in (1, 0, 2)]
    assert [(step, loss) for step, loss, _ in steps_of(*lines)] == [(1, 1.1), (2, 2.0)]


def test_the_time_since_the_start_is_not_a_step_time() -> None:
    """A loop that prints how long it has been running must not cause a SLOW STEP of an hour."""
    lines = [f"step {n}: loss 2.0, time: {10 * n}s" for n in range(1, 12)]
    assert steps_of(*lines, every_s=10.0)[-1][2] == 10.0
    steady = [f"step {n}: loss 2.0, time: {3 + n % 3}s" for n in range(1, 12)]
    assert steps_of(*steady, every_s=10.0)[-1][2] == 5.0


@pytest.mark.parametrize(
    "when",
    [
        "2024-05-01 12:00:{n:02}",
        "2024-05-01T12:00:{n:02}",
        "2024/05/01 12:00:{n:02}",
        "01.05.2024 12:00:{n:02}",
        "05-01-2024 12:00:{n:02}",
        "20240501120{n:02}",
        "1714564{n:03}.25",
        "12:00:{n:02}",
        "3 min",
    ],
)
def test_a_date_is_not_a_duration(when: str) -> None:
    """`time: 2024-05-01 12:00:00` gave steps of 2024 s, each a SLOW STEP, and hid a hang."""
    lines = [f"time: {when.format(n=n)} step: {n} loss: 2.5" for n in range(1, 30)]
    steps = steps_of(*lines)
    assert [(number, loss) for number, loss, _ in steps] == [(n, 2.5) for n in range(1, 30)]
    assert {seconds for _, _, seconds in steps} == {1.0}


def test_no_step_lasts_longer_than_its_process() -> None:
    lines = [f"step {n}: loss 2.0, step time: {seconds}s" for n, seconds in enumerate((1, 40, 2))]
    assert [seconds for _, _, seconds in steps_of(*lines)] == [1.0, 1.0, 2.0]


def test_a_counter_of_samples_does_not_divide_the_time() -> None:
    lines = [f"Train Epoch: 1 [{n}/60000 (1%)]\tLoss: 1.0" for n in (0, 640, 1280)]
    assert [seconds for _, _, seconds in steps_of(*lines)] == [1.0, 1.0, 1.0]
