"""The knowledge files: complete, checked when they are loaded, and with clear error messages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.knowledge import RESTARTS, BadKnowledge
from miner_guard.incidents.scan import Scanner

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(knowledge.__file__).parent

GOOD = """
[broken]
severity = "error"
restart = "once"
applies = "rank"
cause = "It broke."
fixes = ["Fix it."]
patterns = [{ has = ["boom"], regex = 'boom \\d' }]
"""


def test_every_label_has_a_cause_fixes_and_a_class_for_the_restart_policy() -> None:
    for label in knowledge.load().labels.values():
        assert label.cause.endswith("."), label.name
        assert label.fixes, label.name
        assert label.restart in RESTARTS


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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('restart = "once"', 'restart = "maybe"', "restart is 'maybe'; allowed: transient"),
        ('cause = "It broke."', "", "cause is missing"),
        ('has = ["boom"]', 'has = ["Boom"]', "'Boom' contains capital letters"),
        (
            'severity = "error"',
            'severity = "error"\nfollows = ["unheard_of"]',
            "broken names unheard_of, which is not a label",
        ),
        ('severity = "error"', 'severity = "error"\ncolour = "red"', "unknown key colour"),
        ("has =", 'answer = "shared", has =', "the file has no 'shared'"),
        ("[broken]", "[broken", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(old: str, new: str, message: str) -> None:
    with pytest.raises(BadKnowledge, match=message.replace("(", r"\(")) as refused:
        knowledge.parse({"mine.toml": GOOD.replace(old, new)})
    assert "mine.toml" in str(refused.value) or "broken" in str(refused.value)


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
    index = tomllib.loads((FOLDER / "words.toml").read_text(encoding="utf-8"))
    named = {event for label in knowledge.load().labels.values() for event in label.events}
    assert named == set(index["events"])
