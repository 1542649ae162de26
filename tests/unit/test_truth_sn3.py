"""Our inspection agrees with Templar's real validator about 55 gradients.

Templar's own code gave the verdicts (`python -m tests.truth.take_verdicts_sn3`), and its own
compressor made the gradient that all states start from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import GateSettings
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile

torch = pytest.importorskip("torch", reason="gradients are torch's tensors")

from miner_guard.validators.inspect_gradients import examine  # noqa: E402
from miner_guard.validators.shapes import Shapes  # noqa: E402
from tests.truth import states  # noqa: E402 - needs torch
from tests.truth.take_verdicts_sn3 import SHAPES, document_of  # noqa: E402

HEAD, *LINES = states.lines(Path(__file__).parents[1] / "truth" / "sn3.jsonl")
VERSION = "2.1.28"
LIMITS = Limits.of(GateSettings(), load_profile("sn3").limits)

DIFFERENT = {"quantisation: table of lists": "gathered, but the update after it can't index a list"}
"""States on which we deliberately disagree, and why."""


def report(document: Any, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "gradient.pt"
    path.write_bytes(states.saved({"state_dict": document, "global_step": 1}))
    known = Shapes({name: list(shape) for name, shape in SHAPES.items()})
    numbers = dataclasses.asdict(LIMITS)
    return examine(
        torch,
        str(path),
        path.stat().st_size,
        limits=numbers,
        shapes=known,
        memory_bytes=None,
        cpu_s=60.0,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", LINES, ids=[line["case"] for line in LINES])
def test_the_inspection_says_what_the_real_validator_says(
    line: dict[str, Any], tmp_path: Path
) -> None:
    found = report(document_of(HEAD["base"], line), tmp_path)
    same = (not found["problems"]) == line["real"][VERSION]
    assert same == (line["case"] not in DIFFERENT), found


def test_a_file_without_the_dictionary_that_holds_the_gradients_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gradient.pt"
    path.write_bytes(states.saved({"widxs": torch.zeros(3)}))
    numbers = dataclasses.asdict(LIMITS)
    found = examine(
        torch,
        str(path),
        path.stat().st_size,
        limits=numbers,
        shapes=None,
        memory_bytes=None,
        cpu_s=60.0,
    )
    assert "has no 'state_dict' dictionary" in found["problems"][0]
