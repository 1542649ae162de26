"""`python -m tests.diagnosis`: its intervals, and its message about a file that it can't use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import diagnosis


def test_the_interval_is_wilsons() -> None:
    low, high = diagnosis.wilson(62, 72)
    assert (round(low, 3), round(high, 3)) == (0.763, 0.923)
    assert diagnosis.wilson(0, 0) == (0.0, 1.0)


def test_any_labelled_file_can_be_measured(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"label": "cuda_oom", "text": "torch.OutOfMemoryError: CUDA out of memory."}\n'
    )
    excerpts = diagnosis.load(file)
    for setting in diagnosis.SETTINGS.values():
        assert diagnosis.answers(excerpts, setting) == ["cuda_oom"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "it needs entries"), ('{"label": "of_nobody", "text": ""}', "unknown label of_nobody")],
)
def test_a_file_that_cannot_be_used_is_refused_in_words(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    with pytest.raises(diagnosis.BadFile, match=expected):
        diagnosis.load(file)


def test_it_runs_where_only_the_package_is_installed(tmp_path: Path) -> None:
    """The command once imported a test, which needs pytest, and did not start in a clean clone."""
    file = tmp_path / "mine.jsonl"
    file.write_text('{"label": "BENIGN", "text": "step 1 loss 3.4"}\n')
    absent = "import sys; sys.modules['pytest'] = None; from tests.diagnosis import main; "
    answer = subprocess.run(
        [sys.executable, "-c", f"{absent}sys.exit(main([sys.argv[1]]))", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "benign texts alarmed 0 of 1" in answer.stdout
