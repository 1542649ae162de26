"""Every rule passes, warns, blocks and is unknown when it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from miner_guard.config import GateSettings
from miner_guard.uploads.gate import GateInputs, decide
from miner_guard.validators import rules
from miner_guard.validators.facts import Candidate, Facts, Published, Verdict
from miner_guard.validators.limits import Limits
from tests.support.rule_facts import (
    META,
    NOW,
    OURS,
    RISING,
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
    ("enough inner steps", rules.min_inner_step, facts(inner_step=50), SN38, "pass"),
    ("too few inner steps", rules.min_inner_step, facts(inner_step=49), SN38, "block"),
    ("published inner step 60", rules.published_inner_step, step(60), SN38, "pass"),
    ("published inner step 20", rules.published_inner_step, step(20), SN38, "warn"),
    ("published inner step 0", rules.published_inner_step, step(0), SN38, "block"),
    ("published inner step unread", rules.published_inner_step, facts(), SN38, "unknown"),
    ("fresh repo", rules.repo_age, facts(published=aged(400)), SPACED, "pass"),
    (
        "stale repo is cured by an upload",
        rules.repo_age,
        facts(published=aged(2100)),
        SPACED,
        "warn",
    ),
    ("too soon", rules.repo_age, facts(published=aged(299)), SPACED, "block"),
    ("unread repo", rules.repo_age, facts(), SPACED, "unknown"),
    ("published 600 s ago", rules.published_age, facts(published=aged(600)), SN38, "pass"),
    ("published 2100 s ago", rules.published_age, facts(published=aged(2100)), SN38, "warn"),
    ("published 4799 s ago", rules.published_age, facts(published=aged(4799)), SN38, "warn"),
    ("published 4800 s ago", rules.published_age, facts(published=aged(4800)), SN38, "block"),
    ("published 4801 s ago", rules.published_age, facts(published=aged(4801)), SN38, "block"),
    (
        "nothing published",
        rules.published_age,
        facts(published=Published(empty=True)),
        SN38,
        "block",
    ),
    ("publication unread", rules.published_age, facts(), SN38, "unknown"),
    (
        "current base",
        rules.base_age,
        facts(base_outer_step=56, network=chain(outer_step=56)),
        SN38,
        "pass",
    ),
    (
        "old base",
        rules.base_age,
        facts(base_outer_step=55, network=chain(outer_step=56)),
        SN38,
        "block",
    ),
    (
        "base beyond the network",
        rules.base_age,
        facts(base_outer_step=58, network=chain(outer_step=56)),
        SN38,
        "warn",
    ),
    (
        "just after an AllReduce",
        rules.base_age,
        facts(base_outer_step=57, network=chain(outer_step=56)),
        SN38,
        "pass",
    ),
    ("network unread", rules.base_age, facts(base_outer_step=55), SN38, "unknown"),
    ("base not handed in", rules.base_age, facts(network=chain(outer_step=56)), SN38, "unknown"),
    (
        "recent block",
        rules.block_list,
        facts(config={"block_list": [900]}, network=chain(block=1000)),
        SN38,
        "pass",
    ),
    (
        "ageing block",
        rules.block_list,
        facts(config={"block_list": [840]}, network=chain(block=1000)),
        SN38,
        "warn",
    ),
    (
        "old block",
        rules.block_list,
        facts(config={"block_list": [799]}, network=chain(block=1000)),
        SN38,
        "block",
    ),
    (
        "empty block list",
        rules.block_list,
        facts(config={"block_list": []}, network=chain(block=9)),
        SN38,
        "block",
    ),
    ("no block list", rules.block_list, facts(config={}, network=chain(block=9)), SN38, "block"),
    (
        "words as blocks",
        rules.block_list,
        facts(config={"block_list": ["7"]}, network=chain(block=9)),
        SN38,
        "block",
    ),
    ("block unread", rules.block_list, facts(config={"block_list": [1]}), SN38, "unknown"),
    ("config not handed in", rules.block_list, facts(network=chain(block=9)), SN38, "unknown"),
    ("revision", rules.revision, facts(revision="5.56.84"), SN38, "pass"),
    ("revision of a later inner step", rules.revision, facts(revision="5.56.86"), SN38, "warn"),
    ("revision of another epoch", rules.revision, facts(revision="5.55.84"), SN38, "block"),
    ("malformed revision", rules.revision, facts(revision="56-84"), SN38, "block"),
    ("revision not handed in", rules.revision, facts(), SN38, "unknown"),
    ("revision without a profile", rules.revision, facts(revision="5.56.84"), Limits(), "unknown"),
    ("metadata", rules.metadata, facts(metadata=META), SN38, "pass"),
    (
        "metadata lacks peer_id",
        rules.metadata,
        facts(metadata={"outer_step": 56, "inner_step": 84}),
        SN38,
        "block",
    ),
    (
        "metadata with an empty peer_id",
        rules.metadata,
        facts(metadata={**META, "peer_id": None}),
        SN38,
        "pass",
    ),
    (
        "metadata with a number in quotes",
        rules.metadata,
        facts(metadata={**META, "inner_step": "84"}),
        SN38,
        "pass",
    ),
    (
        "metadata with a word as step",
        rules.metadata,
        facts(metadata={**META, "inner_step": "x"}),
        SN38,
        "block",
    ),
    (
        "metadata of a later inner step",
        rules.metadata,
        facts(metadata={**META, "inner_step": 86}),
        SN38,
        "warn",
    ),
    (
        "metadata of another epoch",
        rules.metadata,
        facts(metadata={**META, "outer_step": 55}),
        SN38,
        "warn",
    ),
    ("metadata not handed in", rules.metadata, facts(), SN38, "unknown"),
    ("published metadata", rules.published_metadata, named(56, "a" * 32), SN38, "pass"),
    ("gradients of another revision", rules.published_metadata, named(56, "b" * 32), SN38, "warn"),
    ("gradients of another size", rules.published_metadata, named(56, "a" * 32, 8), SN38, "warn"),
    (
        "gradients with another digest",
        rules.published_metadata,
        named(56, "a" * 32 + "-1"),
        SN38,
        "pass",
    ),
    ("gradients of the epoch before", rules.published_metadata, named(55, "b" * 32), SN38, "pass"),
    (
        "published metadata lacks peer_id",
        rules.published_metadata,
        facts(metadata={"run": "5"}),
        SN38,
        "block",
    ),
    (
        "good file",
        rules.gradients,
        facts(files={"size_bytes": 9, "params": 3, "problems": []}),
        SN38,
        "pass",
    ),
    (
        "missing parameters",
        rules.gradients,
        facts(files={"params": 3, "warnings": ["1 missing"]}),
        SN38,
        "warn",
    ),
    (
        "poisoned file",
        rules.gradients,
        facts(files={"params": 3, "problems": ["NaN"]}),
        SN38,
        "block",
    ),
    (
        "file of no parameters",
        rules.gradients,
        facts(files={"params": 0, "problems": []}),
        SN38,
        "block",
    ),
    (
        "implausibly large",
        rules.gradients,
        facts(files={"size_bytes": 9e9, "params": 3}),
        SN38,
        "block",
    ),
    ("file not inspected", rules.gradients, facts(), SN38, "unknown"),
    (
        "inspection late",
        rules.gradients,
        facts(files={"reason": "no answer within 9 s"}),
        SN38,
        "unknown",
    ),
    (
        "same keys",
        rules.commitment,
        facts(network=chain(commitment=OURS), credentials=OURS),
        SN38,
        "pass",
    ),
    (
        "other keys",
        rules.commitment,
        facts(network=chain(commitment=OURS), credentials="128:ff"),
        SN38,
        "warn",
    ),
    (
        "short commitment",
        rules.commitment,
        facts(network=chain(commitment="127:ff"), credentials=OURS),
        SN38,
        "block",
    ),
    (
        "nothing committed",
        rules.commitment,
        facts(network=chain(commitment="0:e3b0"), credentials=OURS),
        SN38,
        "block",
    ),
    (
        "commitment not told",
        rules.commitment,
        facts(network=chain(), credentials=OURS),
        SN38,
        "unknown",
    ),
    ("read keys unknown", rules.commitment, facts(network=chain(commitment=OURS)), SN38, "unknown"),
    ("commitment unread", rules.commitment, facts(credentials=OURS), SN38, "unknown"),
    ("bucket", rules.bucket, facts(name="llama-4b-ws-4-007", network=chain(uid=7)), SN38, "pass"),
    (
        "bucket of another uid",
        rules.bucket,
        facts(name="llama-4b-ws-4-007", network=chain(uid=8)),
        SN38,
        "block",
    ),
    (
        "bucket with a fourth digit",
        rules.bucket,
        facts(name="llama-4b-ws-4-0007", network=chain(uid=7)),
        SN38,
        "block",
    ),
    (
        "bucket of another model",
        rules.bucket,
        facts(name="llama-1b-007", network=chain(uid=7)),
        SN38,
        "block",
    ),
    (
        "bucket of another form",
        rules.bucket,
        facts(name="my-bucket", network=chain(uid=8)),
        SN38,
        "block",
    ),
    ("bucket, uid unread", rules.bucket, facts(name="llama-4b-ws-4-007"), SN38, "unknown"),
    ("bucket not known", rules.bucket, facts(network=chain(uid=8)), SN38, "unknown"),
    ("finite loss", rules.loss, facts(loss=3.4), SN38, "pass"),
    ("rising loss", rules.loss, facts(loss=2.9, recent_losses=RISING), SN38, "warn"),
    ("NaN", rules.loss, facts(loss=float("nan")), SN38, "block"),
    ("loss not handed in", rules.loss, facts(), SN38, "unknown"),
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


def test_every_rule_has_a_row_for_each_answer_that_it_can_give() -> None:
    answers: dict[str, set[str]] = {}
    for _, judge, given, limits, outcome in CASES:
        answers.setdefault(judge(given, limits).rule, set()).add(outcome)
    everything = facts(
        loss=1.0, files={}, config={}, metadata={}, revision="", name="", network=chain()
    )
    judged = {name for name, _ in rules.gate_rules(everything, SN38)}
    assert answers.keys() == judged
    missing = {name: {"pass", "block", "unknown"} - seen for name, seen in answers.items()}
    assert not any(missing.values()), missing
