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


def test_a_fix_of_a_line_says_where_it_comes_from() -> None:
    known = knowledge.load()
    assert not [p.fix for p in known.patterns if p.source and not p.source.startswith("https://")]
    assert not [p.source for p in known.patterns if p.source and not p.fix]


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


def test_corpus_and_subnet_labels_are_all_there() -> None:
    assert {
        "cuda_oom",
        "host_oom_kill",
        "user_interrupt",
        "hub_or_storage_unavailable",
        "gpu_hardware",
        "cuda_device_assert",
        "cuda_unavailable",
        "version_mismatch",
        "nccl_timeout",
        "port_in_use",
        "nccl_network_error",
        "hf_auth",
        "cuda_illegal_memory_access",
        "storage_access_denied",
        "loss_nan",
        "code_bug",
        "hf_rate_limit",
        "clock_skew",
        "disk_full",
        "state_dict_mismatch",
        "rendezvous_timeout",
        "dataset_fetch_failed",
        "too_many_open_files",
        "shm_exhausted",
        "chain_unreachable",
        "wallet_permission",
        "dht_unreachable",
        "hotkey_not_registered",
        "training_loop_failed",
        "upload_failed",
        "upload_worker_died",
        "upload_cancelled",
        "allreduce_failed",
        "state_load_failed",
        "chain_frozen",
        "collective_desync",
        "checkpoint_corrupt",
        "compile_failed",
        "tracker_unavailable",
        "crash_loop",
        "ended_early",
        "fabric_manager",
    } <= knowledge.load().labels.keys()


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


def test_a_label_defined_in_two_files_is_refused() -> None:
    with pytest.raises(BadKnowledge, match="defined twice"):
        knowledge.parse({"a.toml": GOOD, "b.toml": GOOD})


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


def test_digits_decide_where_a_pattern_reads_them() -> None:
    """Each status, exit code and Xid gets its own answer, whichever came first."""
    known = knowledge.load()
    for first, second in (
        ("xid (pci:0000:01:00): 79, gpu has fallen off the bus.", "xid (pci:0000:01:00): 13, pid"),
        (
            "requests.exceptions.httperror: 401 client error",
            "requests.exceptions.httperror: 404 client error",
        ),
        ("error: process exited with exit code 137", "error: process exited with exit code 0"),
    ):
        assert known.match(first) != known.match(second)
        assert known.match(first) == knowledge.Knowledge((), (), lambda: known._document).match(
            first
        )
