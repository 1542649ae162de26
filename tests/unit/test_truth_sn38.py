"""Our audit agrees with subnet 38's real validators about 447 states, and about random ones.

The verdicts were taken by running the validators' own code: `python -m
miner_guard.validators.compare CHECKOUT --table tests/truth/sn38.jsonl -o …`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import requires

requires.module("boto3")
torch = pytest.importorskip("torch", reason="gradients.pt is torch's format")

from miner_guard.config import GateSettings  # noqa: E402 - needs torch
from miner_guard.uploads.compare import audit, expected  # noqa: E402
from miner_guard.uploads.gate import GateInputs, decide  # noqa: E402
from miner_guard.validators import states  # noqa: E402
from miner_guard.validators.decoding import contents  # noqa: E402
from miner_guard.validators.facts import Candidate  # noqa: E402
from miner_guard.validators.limits import Limits  # noqa: E402
from miner_guard.validators.profiles import load_profile  # noqa: E402
from miner_guard.validators.shapes import Shapes  # noqa: E402
from tests.support.gradient_files import inspect_here  # noqa: E402

SHAPES = Shapes(states.SHAPES)
TABLE = Path(__file__).parents[1] / "truth" / "sn38.jsonl"
LINES = states.lines(TABLE)
VERSION = "1.2.7"
"""The version that the profile describes."""

EARLIER: dict[str, dict[str, Any]] = {
    version: {"validator_repo_age_s": 2400.0} for version in ("1.2.3", "1.2.1")
}
"""Limits of earlier versions that differ from the profile: a lower age limit."""

OVERFLOWS = ("1.2.1", "all values 1e+19")
"""1.2.1 does not go back to its model between its two evaluations, so the second one applies the
gradient twice; the profile describes 1.2.7, which goes back."""

pytestmark = pytest.mark.slow

_FRACTIONS = "we refuse fractions: validators draw one block and raise if it is not whole"
DIFFERENT: dict[str, str] = dict.fromkeys(
    (
        "block_list of a whole and a half",
        "block_list of five, two floats",
        "block_list with NaN first",
        "block_list 200 old, as a float and whole",
    ),
    _FRACTIONS,
)
"""States on which we deliberately disagree, and why."""


def groups() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in LINES:
        found.setdefault(line["group"], []).append(line)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", groups())
def test_the_audit_says_what_the_real_validator_says(group: str) -> None:
    wrong = []
    for line in groups()[group]:
        report = audit(states.build(line))
        same = report.outcome == expected(line["real"][VERSION])
        if same == (line["case"] in DIFFERENT):
            wrong.append(f"{line['case']}: {report.outcome}, {report.detail}")
    assert not wrong, "\n".join(wrong)


IN_MEMORY = [
    line for line in LINES if "gradients" in line and not {"bytes", "save", "scored"} & line.keys()
]
"""States that differ in the data that the miner passes to torch.save."""


@pytest.mark.filterwarnings("ignore")
def test_hook_and_command_judge_a_gradient_as_validators_judge_the_file(tmp_path: Path) -> None:
    """A gradient that scores zero must not go out, and one that would score must not be held back:
    the hook judges the dictionary before it is written, `miner-guard gate` the file."""
    limits = Limits.of(GateSettings(), load_profile("sn38").limits)
    path, wrong = tmp_path / "gradients.pt", []
    for line in IN_MEMORY:
        document = states.compressed()
        for pattern, expression in line["gradients"].items():
            document = states.edited(document, pattern, expression)
        torch.save(document, path)
        real = expected(line["real"][VERSION]) == "rejected"
        for report in (
            contents(torch, document, limits, SHAPES),
            inspect_here(path, limits, shapes=SHAPES),
        ):
            inputs = GateInputs(limits=load_profile("sn38").limits)
            candidate = Candidate("gradient", 56, 84, files=report)
            decision = decide(candidate, inputs, GateSettings(), now=0.0, wall=0.0)
            if decision.allowed == real and line["case"] not in DIFFERENT:
                wrong.append(f"{line['case']}: {decision.reason}")
    assert not wrong, "\n".join(wrong)
    assert len(IN_MEMORY) >= 150


def verdicts_changed(version: str) -> list[dict[str, Any]]:
    """The states that an earlier version judges differently from the profile's version, plus the
    good ones."""
    return [
        line
        for line in LINES
        if line["group"] == "good"
        or expected(line["real"][version]) != expected(line["real"][VERSION])
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", EARLIER)
def test_with_an_earlier_versions_limits_the_audit_agrees_with_that_version(version: str) -> None:
    wrong = []
    for line in verdicts_changed(version):
        report = audit(states.build(line), **EARLIER[version])
        same = report.outcome == expected(line["real"][version])
        if not same and (version, line["case"]) != OVERFLOWS:
            wrong.append(f"{line['case']}: {report.outcome}, {report.detail}")
    assert not wrong, "\n".join(wrong)


RANDOM = json.loads((TABLE.parent / "random.json").read_text(encoding="utf-8"))
"""The verdicts on the states of seeds 0, 1, …: `a`ccepted or `r`ejected."""


@pytest.mark.filterwarnings("ignore")
def test_on_random_states_the_audit_never_alarms_and_rarely_misses() -> None:
    """The misses are updates that happen not to change the loss, and logits that happen to
    overflow. Without chain and shapes nothing is accepted, and the missing setting is named."""
    judged: Counter[tuple[str, str]] = Counter()
    for seed, real in enumerate(RANDOM["verdicts"][:400]):
        _, state = states.fresh(seed)
        judged[real, audit(state).outcome] += 1
        blind = audit(state, blind=True)
        assert blind.outcome == "unknown" or (blind.outcome, real) == ("rejected", "r")
        assert blind.outcome == "rejected" or "set [chain] network" in blind.detail
    assert judged["a", "rejected"] + judged["a", "unknown"] == 0, judged
    assert judged["r", "accepted"] <= 2, judged
    assert judged["a", "accepted"] > 80, judged
    assert f"v{RANDOM['version']}" in load_profile("sn38").read_from


def test_the_table_is_of_the_version_that_the_profile_names() -> None:
    assert f"v{VERSION}" in load_profile("sn38").read_from
    assert len(LINES) >= 440
    assert DIFFERENT.keys() <= {line["case"] for line in LINES}
    assert all(DIFFERENT.values())
