"""The knowledge files: complete, checked when they are loaded, and with clear error messages."""

from __future__ import annotations

import pytest

from miner_guard.incidents import knowledge
from miner_guard.incidents.patterns import RESTARTS, BadKnowledge
from miner_guard.incidents.scanner import Scanner

GOOD = """
triggers = ["boom"]
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
    assert not [
        word for word in enough if not any(trigger.decode() in word for trigger in known.triggers)
    ]


def test_the_guards_start_reads_the_index_alone() -> None:
    """Otherwise the guard would parse all known errors before it starts the miner."""
    known = knowledge.load()
    lazy = knowledge.Knowledge(knowledge.index_of(knowledge.shipped()["words.toml"]), _unread)
    assert lazy.triggers == known.triggers
    assert lazy.shown_by("miner_started") == ()
    assert known.shown_by("loss_nan") == ["nan_loss"]


def test_a_log_without_errors_leaves_the_knowledge_unread() -> None:
    """Otherwise the guard would parse all known errors at the miner's first line, while its output
    waits, or at the exit of a miner that printed nothing."""
    words = knowledge.index_of(knowledge.shipped()["words.toml"])
    scanner = Scanner(knowledge.Knowledge(words, _unread))
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
        "nan_loss",
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
        ("boom \\d", "boom (", "regex 'boom ('"),
        ("boom \\d", "boom .*at", "contains an unbounded repeat; add a bound"),
        (
            'severity = "error"',
            'severity = "error"\nfollows = ["unheard_of"]',
            "follows unheard_of, which is not a label",
        ),
        ('severity = "error"', 'severity = "error"\ncolour = "red"', "unknown key colour"),
        ('triggers = ["boom"]', 'triggers = ["boom 1"]', "no digits"),
        (
            'severity = "error"',
            'severity = "error"\nevents = ["loss_nan"]',
            "event loss_nan is missing from the list",
        ),
        ("has =", 'answer = "shared", has =', r"answer is 'shared'; \[answers\] has \[\]"),
        (
            "[broken]",
            '[answers.shared]\nfixes = ["Fix it."]\n[broken]',
            "unknown key fixes in answer 'shared'",
        ),
        ("[broken]", "[broken", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(old: str, new: str, message: str) -> None:
    with pytest.raises(BadKnowledge, match=message.replace("(", r"\(")) as refused:
        knowledge.parse({"mine.toml": GOOD.replace(old, new)})
    assert (
        "mine.toml" in str(refused.value)
        or "broken" in str(refused.value)
        or "trigger" in str(refused.value)
        or "event" in str(refused.value)
    )


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


def test_the_packages_expressions_take_linear_time() -> None:
    """Checked here, because the guard skips this check at startup."""
    assert knowledge.parse(knowledge.shipped()).labels == knowledge.load().labels
