"""Source 002's continuous check: every row of its matrix, its examples, its lines, and the limits
of a relaunch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miner_guard.checks.request import number_of
from miner_guard.config import GpuSettings
from miner_guard.record.events import Event
from miner_guard.watch.gpu import (
    GpuUse,
    MemoryReading,
    Model,
    Printed,
    decide,
    described,
    parse_memory_line,
    rewritten,
    size_of,
)

SETTINGS = GpuSettings()


@pytest.mark.parametrize(
    ("share", "size", "factor", "says"),
    [
        (0.0, "small", 2.0, "Severe underutilization"),
        (34.2, "small", 2.0, "Severe underutilization"),
        (49.99, "large", 2.0, "Severe underutilization"),
        (49.99, "unknown", 2.0, "is LOW for a model of unknown size (set gpu.model_name). Severe"),
        (50.0, "small", 1.0, "acceptable"),
        (51.3, "large", 1.5, "LOW for large model"),
        (55.0, "unknown", 1.0, "the model's size is unknown: set gpu.model_name"),
        (60.0, "small", 1.0, "good"),
        (65.0, "large", 1.0, "suboptimal"),
        (65.0, "unknown", 1.0, "the model's size is unknown: set gpu.model_name"),
        (70.0, "small", 1.0, "optimal"),
        (76.3, "large", 1.0, "optimal"),
        (90.0, "large", 1.0, "optimal"),
        (90.1, "large", 1.0, "near the limit"),
        (99.0, "small", 1.0, "near the limit"),
        (104.0, "unknown", 1.0, "near the limit for a model of unknown size (set gpu.model_name)."),
    ],
)
def test_every_row_of_the_decision_matrix(
    share: float, size: str, factor: float, says: str
) -> None:
    verdict = decide(share, size, SETTINGS)
    assert verdict.factor == factor
    assert says in verdict.words.format(model=described(size, None), goal="70%+")
    assert verdict.warns == (factor > 1)


@pytest.mark.parametrize(
    ("name", "params", "size"),
    [
        ("ResNet-18", None, "small"),
        ("resnet34", None, "small"),
        ("EfficientNet-B2", None, "small"),
        ("MobileNetV3", None, "small"),
        ("Tabular NN", None, "small"),
        ("Small CNN (3 conv layers)", None, "small"),
        ("EfficientNet-B4", 19_000_000, "large"),
        ("tf_efficientnet_b7", None, "large"),
        ("ResNet-101", 44_000_000, "large"),
        ("resnet152", None, "large"),
        ("ViT-Base", 86_000_000, "large"),
        ("vit_large_patch16", None, "large"),
        ("microsoft/deberta-v3", None, "large"),
        ("GPT-2", None, "large"),
        ("DenseNet-161", None, "large"),
        ("EfficientNetV2-L", None, "large"),
        ("ResNet-50", 25_000_000, "small"),
        ("EfficientNet-B3", 12_000_000, "small"),
        ("Llama-4B", 4_000_000_000, "large"),
        ("Llama", None, "unknown"),
        (None, 99_999_999, "small"),
        (None, 100_000_000, "large"),
        (None, None, "unknown"),
    ],
)
def test_small_or_large_by_the_documents_names_first(
    name: str | None, params: int | None, size: str
) -> None:
    assert size_of(name, params) == size


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("GPU Memory Used: 18.3 GB / 24.0 GB (76.3%)", Printed(18.3, 24.0)),
        ("GPU Memory Used: 12.34 GB / 24.0 GB (51.4%)", Printed(12.34, 24.0)),
        (
            "Epoch 3: Loss=0.542, GPU=18.1GB (75.4%)",
            Printed(18.1, pytest.approx(24.0, abs=0.02), step=3),
        ),
        (
            "Epoch 0: Loss=0.891, Acc=0.723, GPU=18.2GB (75.8%)",
            Printed(18.2, pytest.approx(24.0, abs=0.02), step=0),
        ),
        ("Epoch 1: Loss=0.5, GPU=0.00GB (0.0%)", Printed(0.0, None, step=1)),
        (
            "Outer Step: 56 | Inner Step: 84 | LR: 0.00002100 | GPU Mem: 18.45GB",
            Printed(18.45, None, step=84),
        ),
        ("GPU Memory: 24.0 GB", None),
        ("RESOURCES: 32 CPU cores, batch=128, GPU=NVIDIA A10, Mixed Precision=ON", None),
    ],
)
def test_the_miners_own_lines_are_read(line: str, printed: Any) -> None:
    assert parse_memory_line(line) == printed


def checked(use: GpuUse, share: float, step: int, name: str = "EfficientNet-B4") -> list[Event]:
    readings = [MemoryReading("rank 0", share * 0.24, 24.0, "hook")]
    return list(use.check(readings, Model(name), step=step, seconds=60.0))


def test_the_documents_lines() -> None:
    lines = [f.text for f in checked(GpuUse(SETTINGS), 76.3, 1)]
    optimal = "GPU at 76% is optimal for large model (EfficientNet-B4). Proceeding."
    assert lines == [f"GPU Memory Used: 18.3 GB / 24.0 GB (76.3%) - {optimal}"]
    low = checked(GpuUse(SETTINGS), 51.3, 1)[0].text
    assert "GPU at 51% is LOW for large model (EfficientNet-B4). Should be 70%+" in low
    small = checked(GpuUse(SETTINGS), 51.3, 1, "ResNet-18")[0].text
    assert (
        "GPU at 51% is acceptable for small model (ResNet-18). Proceeding without adjustment."
        in small
    )


def test_a_sudden_drop_is_distinguished_from_a_gradual_decline_and_names_its_step() -> None:
    use = GpuUse(SETTINGS)
    for number in range(11):
        last = checked(use, 76.0 - 0.4 * number, number * 10)
        assert [f.name for f in last] == ["gpu_usage"]
    assert "Gradual decline from 76% to 72% over 11 checks" in last[0].text
    use = GpuUse(SETTINGS)
    checked(use, 76.0, 500)
    drop = checked(use, 45.0, 510)
    assert drop[0].text == "GPU DROP: 76% -> 45% at step 510"
    assert [f.name for f in checked(use, 45.0, 520)] == ["gpu_usage"]


def test_a_healthy_large_gpu_gets_no_advice_to_double_its_batch() -> None:
    """Source 004's healthy machine (28123 of 81920 MiB in use, at 95 %) must not get 24 warnings an
    hour."""
    reading = MemoryReading("rank 0", 28123 / 1024, 81920 / 1024, "nvml", busy_pct=95.0)
    large = Model(params=4 * 10**9)
    (event,) = GpuUse(SETTINGS).check([reading], large, step=1, seconds=60.0)
    assert (event.level, event.fields["factor"]) == ("info", 1.0)
    assert "27 GB at full utilization is good" in event.text
    idle = replace(reading, busy_pct=20.0)
    assert next(GpuUse(SETTINGS).check([idle], large, step=1, seconds=60.0)).level == "warning"


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        (95.0, " Utilization 95%."),
        (75.0, " Utilization 75% (target 80-95%)."),
        (60.0, " Utilization 60%, below 70%: monitoring or data loading may be blocking training"),
        (None, ""),
    ],
)
def test_a_utilization_below_70_per_cent_points_at_monitoring(
    busy: float | None, words: str
) -> None:
    """Source 000: above 90 % is normal; below 70 %, monitoring is likely blocking."""
    reading = MemoryReading("rank 0", 19.2, 24.0, "hook", busy_pct=busy)
    (event,) = GpuUse(SETTINGS).check([reading], Model(params=10**9), step=1, seconds=60.0)
    advice = event.text.partition("Proceeding.")[2]
    assert advice.startswith(words)
    assert bool(advice) == bool(words)
    assert event.level == "info"


def test_the_same_advice_is_a_warning_once() -> None:
    use, levels = GpuUse(SETTINGS), []
    for check in range(10):
        readings = [MemoryReading("rank 0", 8.0, 24.0, "hook")]
        found = use.check(readings, Model(), step=check, seconds=60.0 + 150 * check)
        levels += [event.level for event in found]
    assert levels == ["warning"] + ["info"] * 9


def test_a_stable_history_is_called_stable() -> None:
    use = GpuUse(SETTINGS)
    for share in (75.4, 74.6, 75.0):
        last = checked(use, share, 1)
    assert "Stable at 75-75% over 3 checks" in last[0].text


@pytest.mark.parametrize("form", [["--b=128"], ["--b", "128"], ["--b=4", "x", "--b", "128"]])
def test_the_argument_is_rewritten_in_either_form_and_nothing_else(form: list[str]) -> None:
    command = ["python", "m.py", "--big=128", *form, "--other", "128"]
    assert number_of(command, "--b") == 128
    changed = rewritten(command, "--b", 192)
    assert number_of(changed, "--b") == 192
    assert [w for w, o in zip(changed, command, strict=True) if w != o] in (["--b=192"], ["192"])
