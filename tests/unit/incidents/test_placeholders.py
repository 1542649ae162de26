"""No answer contains a placeholder: an answer fills in what the line names, and does without what it
does not."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.explain import explain, filled
from miner_guard.incidents.oom import Training
from tests import diagnosis

STAND_IN = re.compile(
    r"its-name|<[a-z][\w -]*>|…|\.\.\.|(?<!%)\{|\[\[|\]\]|named in the line|the line (?:names|says)"
    r"|(?<![%\w$])(?:N|NAME|HOST|PORT|PACKAGE|MODULE|APP|UNIT|PROGRAM|FILE|KEYFILE|FOLDER|DIR|REPO"
    r"|PID|USER|JOBID|JOB|VALUE|ADDRESS|IFACE)(?!\w)|`[^`]*(?<!\w)(?:PATH|URL)(?!\w)[^`]*`"
)
"""What stands for something that the reader must replace. PATH in prose is the variable."""

PLACE, OPTIONAL = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}"), r"\[\[.*?\]\]"
SETS = Path(__file__).parent


def stand_ins(texts: Iterator[str]) -> list[str]:
    return sorted({text for text in texts if STAND_IN.search(text)})


def written() -> Iterator[str]:
    """Every cause and fix, with nothing that a line could fill in."""
    known = knowledge.load()
    for label in known.labels.values():
        yield from (label.cause, *(fix.do for fix in label.fixes))
    for pattern in known.entries:
        yield from (pattern.cause, pattern.fix)


def test_no_cause_or_fix_contains_a_placeholder() -> None:
    assert not stand_ins(filled(text, ()) for text in written())
    bare = [place for text in written() for place in PLACE.findall(re.sub(OPTIONAL, "", text))]
    assert not [name for name, default in bare if not default]


def answers(log: str) -> Iterator[str]:
    for finding in explain(io.BytesIO(log.encode()), knowledge.load(), Training()).findings:
        # What a line says is not ours: only the words around it must not be a placeholder.
        yield from (finding.cause, *finding.fixes)


@pytest.mark.parametrize("path", sorted(SETS.glob("*.toml")), ids=lambda path: path.stem)
def test_no_answer_to_a_labelled_log_contains_a_placeholder(path: Path) -> None:
    excerpts = diagnosis.load(path)
    assert excerpts
    for excerpt in excerpts:
        assert not stand_ins(answers(excerpt.text)), excerpt.text


@pytest.mark.parametrize(
    ("line", "expected", "unwanted"),
    [
        ("RuntimeError: Numpy is not available", "pip install numpy", "einstall"),
        ("ModuleNotFoundError: No module named 'validators'", "root of its own", "pip install v"),
        ("ModuleNotFoundError: No module named 'xformers'", "pip install xformers", "root"),
        ("ImportError: No module named '_C'", "Reinstall the package", "pip"),
    ],
)
def test_a_module_that_cannot_be_imported(line: str, expected: str, unwanted: str) -> None:
    """Ours was once answered with PyPI's unrelated `validators`."""
    (finding,) = explain(io.BytesIO(line.encode()), knowledge.load(), Training()).findings
    assert finding.label == "version_mismatch"
    assert expected in finding.fixes[0]
    assert unwanted not in finding.fixes[0]
