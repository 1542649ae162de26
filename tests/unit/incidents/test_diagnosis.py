"""`python -m tests.diagnosis`: its intervals, and its message about a file that it can't use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import diagnosis


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
