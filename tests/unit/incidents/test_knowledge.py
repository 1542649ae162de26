"""The knowledge files: complete, checked when they are loaded, and with clear error messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miner_guard.config import read_toml
from miner_guard.incidents import knowledge
from miner_guard.incidents.knowledge import RESTARTS, ROLES
from miner_guard.incidents.scan import Scanner

FOLDER = Path(knowledge.__file__).parent

GOOD = """
[broken]
severity = "error"
restart = "once"
cause = "It broke."
fixes = ["Fix it."]
patterns = [{ has = ["boom"], regex = 'boom \\d' }]
"""


def test_the_values_of_every_file_are_known() -> None:
    known = knowledge.load()
    for label in known.labels.values():
        assert label.cause.endswith("."), label.name
        assert label.fixes, label.name
        assert label.restart in RESTARTS, label.name
        assert label.severity in ("info", "warning", "error", "critical"), label.name
        assert label.follows <= known.labels.keys(), label.name
    for entry in known.entries:
        assert entry.role in (*ROLES, "benign"), entry
        assert entry.restart in ("", *RESTARTS), entry
        assert entry.has, entry
        assert {*entry.cancels, *entry.instead, entry.notice} - {""} <= known.labels.keys(), entry
        words = (*entry.has, *entry.excludes, *entry.servers, *entry.at)
        assert all(len(word) > 1 and word == word.lower() for word in words), entry


def test_a_word_that_is_enough_by_itself_holds_a_trigger() -> None:
    """Otherwise the scanner would never examine the line."""
    known = knowledge.load()
    enough = [
        word for pattern in known.patterns if pattern.expression is None for word in pattern.has
    ]
    assert not [word for word in enough if not known.triggers.found_in(word.encode())]


def test_a_log_without_errors_leaves_the_knowledge_unread() -> None:
    """Otherwise the guard would parse all known errors at its start, at the miner's first line, or
    at the exit of a miner that printed nothing."""
    known = knowledge.load()
    lazy = knowledge.Knowledge(map(bytes.decode, known.triggers.words), ["loss_nan"], _unread)
    assert lazy.shown_by("miner_started") == ()
    assert known.shown_by("loss_nan") == ["loss_nan"]
    scanner = Scanner(lazy)
    assert scanner.feed(b"Inner Step: 12 | Loss: 2.31\n") == []
    assert scanner.finish() == []


def _unread() -> knowledge.Document:
    raise AssertionError("the knowledge was read")


def test_a_key_that_nothing_reads_is_refused() -> None:
    for old, new in (("restart =", "restrat ="), ("regex =", "regexp =")):
        with pytest.raises(TypeError, match=new.split()[0]):
            knowledge.parse({"mine.toml": GOOD.replace(old, new)})


def test_patterns_share_an_answer_and_may_override_it() -> None:
    shared = '[answers.shared]\ncause = "It burst."\nfix = "Mop up."\nsource = "https://a"\n'
    patterns = (
        'patterns = [{ has = ["boom"], answer = "shared" },'
        ' { has = ["boom 1"], answer = "shared", cause = "It blew up." }]'
    )
    good = GOOD[: GOOD.index("patterns")].replace("[broken]", f"{shared}[broken]")
    known = knowledge.parse({"mine.toml": good + patterns})
    assert [(p.cause, p.fix, p.source) for p in known.patterns] == [
        ("It burst.", "Mop up.", "https://a"),
        ("It blew up.", "Mop up.", "https://a"),
    ]


def test_every_fix_says_where_it_comes_from() -> None:
    """Except advice to use the guard itself."""
    known = knowledge.load()
    fixes = [(fix.do, fix.source) for label in known.labels.values() for fix in label.fixes]
    fixes += [(p.fix, p.source) for p in known.patterns if p.fix]
    assert not [
        do for do, source in fixes if not source.startswith("https://") and "miner-guard" not in do
    ]


def test_every_expression_compiles() -> None:
    """The guard compiles an expression only when a line needs it."""
    for entry in knowledge.load().entries:
        re.compile(entry.expression or "")


def test_the_events_of_the_labels_are_those_of_the_index() -> None:
    """The guard's start reads the index alone."""
    index = read_toml(FOLDER / "words.toml")
    named = {event for label in knowledge.load().labels.values() for event in label.events}
    assert named == set(index["events"])
