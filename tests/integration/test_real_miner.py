"""The command that runs subnet 38's real miner under `--attach sn38`, on an imitation of a
checkout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import requires

for package in ("torch", "moto", "boto3"):
    requires.module(package)

from tests.truth import miner_runs, real_miner  # noqa: E402 - needs torch
from tests.truth.miner.plan import Round  # noqa: E402
from tests.truth.miner.rejects import rounds_and_beyond  # noqa: E402

IMITATION = Path(__file__).parents[1] / "truth" / "imitation"

pytestmark = pytest.mark.slow


EACH_KIND = 3
"""Rejects of each kind that run here: test_truth_sn38 judges all of them, without a miner."""

STOPPED = {
    "dtype: values float16": "values are float16",
    "gradients: one value NaN": "NaN or Inf in the values",
    "gradients: all values 1e30": "the loss after applying them is NaN",
    "gradients: gradients with torch.compile's names": "validators skip _orig_mod.",
    "gradients: gradients lack `metadata`": "lacks the key 'metadata'",
    "block_list: block_list empty": "block_list is empty",
    "inner_step: inner_step 0": "inner_step (0) < minimum (50)",
}


def _some_of_each_kind(rounds: Sequence[Round]) -> list[Round]:
    kinds: dict[str, list[Round]] = {}
    for one in rounds:
        kinds.setdefault(one.name.partition(":")[0], []).append(one)
    some = {one.name for kind in kinds.values() for one in kind[:EACH_KIND]} | STOPPED.keys()
    return [one for one in rounds if one.name in some]


@pytest.mark.timeout(300)
def test_rejects_of_each_kind_stop_before_the_upload_and_nothing_else_changes(
    tmp_path: Path,
) -> None:
    """Otherwise only someone with a checkout of the miner would notice that the command is
    broken."""
    rounds = _some_of_each_kind(rounds_and_beyond()[0])
    harmless = Round("harmless: as the compressor left it", gradients={})
    miner = miner_runs.Miner(IMITATION, 1, tmp_path)
    parts = dict(real_miner.questions(miner, [*rounds, harmless], alone=False))
    wrong = [row for rows in parts.values() for row in rows if not row.agrees]
    # A valid upload goes out, and a row that expects a stop reports that.
    assert [row.name for row in wrong] == [harmless.name], wrong
    assert wrong[0].detail.startswith("NOT BLOCKED, ")
    sentences = {row.name: row.detail for row in parts["Blocked before the upload"]}
    for name, words in STOPPED.items():
        assert words in sentences[name]


def test_every_reject_of_the_truth_table_is_tried_or_has_its_reason() -> None:
    rounds, beyond = rounds_and_beyond()
    assert len(rounds) + len(beyond) > 200
    assert len({one.name for one in [*rounds, *beyond]}) == len(rounds) + len(beyond)
    assert all(one.why for one in beyond)
