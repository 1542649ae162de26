"""Every rule passes, warns, blocks and is unknown when it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miner_guard import validators
from miner_guard.config import GateSettings
from miner_guard.uploads.gate import decide
from miner_guard.uploads.inputs import GateInputs
from miner_guard.validators import (
    base_age,
    block_list,
    bucket,
    commitment,
    gradients,
    loss,
    metadata,
    min_inner_step,
    repo_age,
    revision,
    window,
)
from miner_guard.validators.facts import Candidate, Facts, Published
from miner_guard.validators.limits import Limits
from miner_guard.validators.verdict import OUTCOMES, Verdict
from tests.support.rule_facts import (
    META,
    NOW,
    OURS,
    RISING,
    SN3,
    SN38,
    SN38_NUMBERS,
    SPACED,
    aged,
    chain,
    facts,
    named,
    step,
)

Judge = Callable[[Facts, Limits], Verdict]
CASES: list[tuple[str, Judge, Facts, Limits, str]] = [
    ("enough inner steps", min_inner_step.judge, facts(inner_step=50), SN38, "pass"),
    ("too few inner steps", min_inner_step.judge, facts(inner_step=49), SN38, "block"),
    ("published inner step 60", min_inner_step.judge_published, step(60), SN38, "pass"),
    ("published inner step 20", min_inner_step.judge_published, step(20), SN38, "warn"),
    ("published inner step 0", min_inner_step.judge_published, step(0), SN38, "block"),
    ("published inner step unread", min_inner_step.judge_published, facts(), SN38, "unknown"),
    ("fresh repo", repo_age.judge, facts(published=aged(400)), SPACED, "pass"),
    (
        "stale repo is cured by an upload",
        repo_age.judge,
        facts(published=aged(2100)),
        SPACED,
        "warn",
    ),
    ("too soon", repo_age.judge, facts(published=aged(299)), SPACED, "block"),
    ("unread repo", repo_age.judge, facts(), SPACED, "unknown"),
    ("published 600 s ago", repo_age.judge_published, facts(published=aged(600)), SN38, "pass"),
    ("published 2100 s ago", repo_age.judge_published, facts(published=aged(2100)), SN38, "warn"),
    ("published 4799 s ago", repo_age.judge_published, facts(published=aged(4799)), SN38, "warn"),
    ("published 4800 s ago", repo_age.judge_published, facts(published=aged(4800)), SN38, "block"),
    ("published 4801 s ago", repo_age.judge_published, facts(published=aged(4801)), SN38, "block"),
    (
        "nothing published",
        repo_age.judge_published,
        facts(published=Published(empty=True)),
        SN38,
        "block",
    ),
    ("publication unread", repo_age.judge_published, facts(), SN38, "unknown"),
    (
        "current base",
        base_age.judge,
        facts(base_outer_step=56, network=chain(outer_step=56)),
        SN38,
        "pass",
    ),
    (
        "old base",
        base_age.judge,
        facts(base_outer_step=55, network=chain(outer_step=56)),
        SN38,
        "block",
    ),
    (
        "base beyond the network",
        base_age.judge,
        facts(base_outer_step=58, network=chain(outer_step=56)),
        SN38,
        "warn",
    ),
    (
        "just after an AllReduce",
        base_age.judge,
        facts(base_outer_step=57, network=chain(outer_step=56)),
        SN38,
        "pass",
    ),
    ("network unread", base_age.judge, facts(base_outer_step=55), SN38, "unknown"),
    ("base not handed in", base_age.judge, facts(network=chain(outer_step=56)), SN38, "unknown"),
    (
        "recent block",
        block_list.judge,
        facts(config={"block_list": [900]}, network=chain(block=1000)),
        SN38,
        "pass",
    ),
    (
        "ageing block",
        block_list.judge,
        facts(config={"block_list": [840]}, network=chain(block=1000)),
        SN38,
        "warn",
    ),
    (
        "old block",
        block_list.judge,
        facts(config={"block_list": [799]}, network=chain(block=1000)),
        SN38,
        "block",
    ),
    (
        "empty block list",
        block_list.judge,
        facts(config={"block_list": []}, network=chain(block=9)),
        SN38,
        "block",
    ),
    ("no block list", block_list.judge, facts(config={}, network=chain(block=9)), SN38, "block"),
    (
        "words as blocks",
        block_list.judge,
        facts(config={"block_list": ["7"]}, network=chain(block=9)),
        SN38,
        "block",
    ),
    ("block unread", block_list.judge, facts(config={"block_list": [1]}), SN38, "unknown"),
    ("config not handed in", block_list.judge, facts(network=chain(block=9)), SN38, "unknown"),
    ("revision", revision.judge, facts(revision="5.56.84"), SN38, "pass"),
    ("revision of a later inner step", revision.judge, facts(revision="5.56.86"), SN38, "warn"),
    ("revision of another epoch", revision.judge, facts(revision="5.55.84"), SN38, "block"),
    ("malformed revision", revision.judge, facts(revision="56-84"), SN38, "block"),
    ("revision not handed in", revision.judge, facts(), SN38, "unknown"),
    ("revision without a profile", revision.judge, facts(revision="5.56.84"), Limits(), "unknown"),
    ("metadata", metadata.judge, facts(metadata=META), SN38, "pass"),
    (
        "metadata lacks peer_id",
        metadata.judge,
        facts(metadata={"outer_step": 56, "inner_step": 84}),
        SN38,
        "block",
    ),
    (
        "metadata with an empty peer_id",
        metadata.judge,
        facts(metadata={**META, "peer_id": None}),
        SN38,
        "pass",
    ),
    (
        "metadata with a number in quotes",
        metadata.judge,
        facts(metadata={**META, "inner_step": "84"}),
        SN38,
        "pass",
    ),
    (
        "metadata with a word as step",
        metadata.judge,
        facts(metadata={**META, "inner_step": "x"}),
        SN38,
        "block",
    ),
    (
        "metadata of a later inner step",
        metadata.judge,
        facts(metadata={**META, "inner_step": 86}),
        SN38,
        "warn",
    ),
    (
        "metadata of another epoch",
        metadata.judge,
        facts(metadata={**META, "outer_step": 55}),
        SN38,
        "warn",
    ),
    ("metadata not handed in", metadata.judge, facts(), SN38, "unknown"),
    ("published metadata", metadata.judge_published, named(56, "a" * 32), SN38, "pass"),
    ("gradients of another revision", metadata.judge_published, named(56, "b" * 32), SN38, "warn"),
    ("gradients of another size", metadata.judge_published, named(56, "a" * 32, 8), SN38, "warn"),
    (
        "gradients with another digest",
        metadata.judge_published,
        named(56, "a" * 32 + "-1"),
        SN38,
        "pass",
    ),
    ("gradients of the epoch before", metadata.judge_published, named(55, "b" * 32), SN38, "pass"),
    (
        "published metadata lacks peer_id",
        metadata.judge_published,
        facts(metadata={"run": "5"}),
        SN38,
        "block",
    ),
    (
        "good file",
        gradients.judge,
        facts(files={"size_bytes": 9, "params": 3, "problems": []}),
        SN38,
        "pass",
    ),
    (
        "missing parameters",
        gradients.judge,
        facts(files={"params": 3, "warnings": ["1 missing"]}),
        SN38,
        "warn",
    ),
    (
        "poisoned file",
        gradients.judge,
        facts(files={"params": 3, "problems": ["NaN"]}),
        SN38,
        "block",
    ),
    (
        "file of no parameters",
        gradients.judge,
        facts(files={"params": 0, "problems": []}),
        SN38,
        "block",
    ),
    (
        "implausibly large",
        gradients.judge,
        facts(files={"size_bytes": 9e9, "params": 3}),
        SN38,
        "block",
    ),
    ("file not inspected", gradients.judge, facts(), SN38, "unknown"),
    (
        "inspection late",
        gradients.judge,
        facts(files={"reason": "no answer within 9 s"}),
        SN38,
        "unknown",
    ),
    (
        "same keys",
        commitment.judge,
        facts(network=chain(commitment=OURS), credentials=OURS),
        SN38,
        "pass",
    ),
    (
        "other keys",
        commitment.judge,
        facts(network=chain(commitment=OURS), credentials="128:ff"),
        SN38,
        "warn",
    ),
    (
        "short commitment",
        commitment.judge,
        facts(network=chain(commitment="127:ff"), credentials=OURS),
        SN38,
        "block",
    ),
    (
        "nothing committed",
        commitment.judge,
        facts(network=chain(commitment="0:e3b0"), credentials=OURS),
        SN38,
        "block",
    ),
    (
        "commitment not told",
        commitment.judge,
        facts(network=chain(), credentials=OURS),
        SN38,
        "unknown",
    ),
    ("read keys unknown", commitment.judge, facts(network=chain(commitment=OURS)), SN38, "unknown"),
    ("commitment unread", commitment.judge, facts(credentials=OURS), SN38, "unknown"),
    ("bucket", bucket.judge, facts(name="llama-4b-ws-4-007", network=chain(uid=7)), SN38, "pass"),
    (
        "bucket of another uid",
        bucket.judge,
        facts(name="llama-4b-ws-4-007", network=chain(uid=8)),
        SN38,
        "block",
    ),
    (
        "bucket with a fourth digit",
        bucket.judge,
        facts(name="llama-4b-ws-4-0007", network=chain(uid=7)),
        SN38,
        "block",
    ),
    (
        "bucket of another model",
        bucket.judge,
        facts(name="llama-1b-007", network=chain(uid=7)),
        SN38,
        "block",
    ),
    (
        "bucket of another form",
        bucket.judge,
        facts(name="my-bucket", network=chain(uid=8)),
        SN38,
        "block",
    ),
    ("bucket, uid unread", bucket.judge, facts(name="llama-4b-ws-4-007"), SN38, "unknown"),
    ("bucket not known", bucket.judge, facts(network=chain(uid=8)), SN38, "unknown"),
    ("finite loss", loss.judge, facts(loss=3.4), SN38, "pass"),
    ("rising loss", loss.judge, facts(loss=2.9, recent_losses=RISING), SN38, "warn"),
    ("NaN", loss.judge, facts(loss=float("nan")), SN38, "block"),
    ("loss not handed in", loss.judge, facts(), SN38, "unknown"),
    ("in the window", window.judge, facts(network=chain(block=115 * 9)), SN3, "pass"),
    ("late in the window", window.judge, facts(network=chain(block=115 * 9 + 5)), SN3, "warn"),
    ("past the window", window.judge, facts(network=chain(block=115 * 9 + 6)), SN3, "block"),
    ("block unread", window.judge, facts(), SN3, "unknown"),
    ("no windows", window.judge, facts(network=chain(block=9)), SN38, "unknown"),
]


@pytest.mark.parametrize(
    ("judge", "given", "limits", "outcome"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_rule_answers_as_its_table_says(
    judge: Judge, given: Facts, limits: Limits, outcome: str
) -> None:
    verdict = judge(given, limits)
    assert verdict.outcome == outcome, verdict.sentence
    assert verdict.sentence
    assert (
        verdict.outcome != "block"
        or verdict.limit is not None
        or verdict.rule in ("gradients", "block_list")
    )


def rules() -> dict[str, str]:
    """The source of each rule, by the name of its file."""
    files = Path(validators.__file__).parent.glob("*.py")
    sources = {path.stem: path.read_text(encoding="utf-8") for path in files}
    return {name: source for name, source in sources.items() if "\nRULE = " in source}


def test_every_rule_passes_blocks_is_unknown_and_warns_if_it_can_in_some_test() -> None:
    seen: dict[str, set[str]] = {}
    for _, judge, facts_, limits, outcome in CASES:
        seen.setdefault(judge(facts_, limits).rule, set()).add(outcome)
    for name, source in rules().items():
        missing = (
            set(OUTCOMES) - seen.get(name, set()) - (set() if '"warn"' in source else {"warn"})
        )
        assert not missing, f"CASES has no row in which {name} answers {', '.join(sorted(missing))}"


def test_only_the_minimum_inner_step_does_not_apply_to_an_archive() -> None:
    known = GateInputs(
        network=chain(uid=8, commitment=OURS),
        bucket="x-007",
        credentials="128:ff",
        limits=SN38_NUMBERS,
    )
    archive = decide(Candidate("archive", 56, 0), known, GateSettings(), now=NOW, wall=0.0)
    outcomes = {verdict.rule: verdict.outcome for verdict in archive.verdicts}
    assert outcomes["bucket"] == "block"
    assert outcomes["min_inner_step"] == "pass"
    assert not archive.allowed


def test_every_rule_is_in_force_somewhere() -> None:
    """A rule that neither the gate nor the audit applies passes its own tests and judges
    nothing."""
    asked = Path(validators.__file__).with_name("rules.py").read_text(encoding="utf-8")
    idle = {rule for rule in rules() if f"yield {rule}.RULE, " not in asked}
    assert not idle, f"validators/rules.py yields no {', '.join(sorted(idle))}.RULE"
