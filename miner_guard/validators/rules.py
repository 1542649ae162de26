"""The rules: what validators and the operator demand of an upload, and of what is published.

Pure functions `(facts, limits) -> Verdict`, standard library only: they also run inside rank 0. The
gate asks them before an upload (`GATE`), the audit about the published files (`AUDIT`). A rule
applies if the caller supplied its subject or the profile has its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from miner_guard.validators.facts import Facts, Network, Published, Verdict, read_inner_step
from miner_guard.validators.limits import Limits

Judge = Callable[[Facts, Limits], Verdict]


def _answer(outcome: str) -> Callable[..., Verdict]:
    """A verdict's constructor: value seen, limit, sentence. `evaluate` adds the rule's name."""
    return partial(Verdict, "", outcome)


_pass, _warn, _block, _unknown = map(_answer, ("pass", "warn", "block", "unknown"))

# min inner step


def min_inner_step(facts: Facts, limits: Limits) -> Verdict:
    """Block below `min_inner_step` (source 004: 50). The sentence is a contract; the note says who
    asks for what.

    Archives are exempt: the upload after an AllReduce starts at inner step 0, and the miner's own
    reload needs it.
    """
    value, required = facts.candidate.inner_step, limits.min_inner_step
    if value >= required:
        return _pass(value, required, f"inner_step {value} >= minimum {required}")
    if facts.candidate.kind == "archive":
        sentence = f"archive at inner_step {value}: exempt from the minimum of {required}"
        return _pass(value, required, sentence)
    accepted, note = limits.validator_min_inner_step, None
    if accepted is not None and accepted < required:
        note = f"validators accept from inner step {accepted}; your minimum is {required}"
    return _block(
        value,
        required,
        f"inner_step ({value}) < minimum ({required}). Validators will reject this! "
        "Waiting for more training steps...",
        retry_after_steps=required - value,
        note=note,
    )


def published_inner_step(facts: Facts, limits: Limits) -> Verdict:
    """The validators' verdict on the published inner step (subnet 38 rejects 0)."""
    value, required = facts.published.inner_step, limits.validator_min_inner_step
    if value is None:
        words = "the published inner step is unknown: metadata.json does not contain one"
        return _unknown(None, required, words)
    if required is not None and 0 <= value < required:
        words = (
            f"published inner_step {value} < {required}: validators reject it; publish "
            "again after more inner steps"
        )
        return _block(value, required, words)
    if facts.candidate.kind == "archive":
        words = (
            f"this is the archive after an outer step (inner_step {value}), not yet a gradient; "
            "the next upload will be one"
        )
        return _warn(value, limits.min_inner_step, words)
    if value < limits.min_inner_step:
        words = f"published inner_step {value} < minimum {limits.min_inner_step}"
        return _warn(value, limits.min_inner_step, words)
    return _pass(value, required, f"published inner_step {value}")


# repo age


def age_now(published: Published, now: float) -> float | None:
    """Age in seconds at `now` (monotonic): the age when read, plus the time since then; 0 if the
    storage's clock is ahead. None if unknown."""
    if published.age_s is None:
        return None
    since = 0.0 if published.seen_at is None else max(now - published.seen_at, 0.0)
    return max(published.age_s + since, 0.0)


def repo_age(facts: Facts, limits: Limits) -> Verdict:
    """Block within `min_upload_interval_s` of the last upload; never block because of age, since an
    upload fixes that."""
    published, minimum = facts.published, limits.min_upload_interval_s
    age = age_now(published, facts.now)
    if published.empty:
        words = "the repo is empty: the first upload is due"
        return _pass(None, limits.repo_age_limit_s, words)
    if age is None:
        return _unknown(None, limits.repo_age_limit_s, f"repo age unknown: {published.reason}")
    value = round(age, 1)
    if age < minimum:
        words = (
            f"repo age {age:.0f}s < minimum interval {minimum:.0f}s: too soon. Wait "
            f"{minimum - age:.0f}s"
        )
        return _block(value, minimum, words, retry_after_s=round(minimum - age, 1))
    if age > limits.repo_age_limit_s:
        words = f"repo age {age:.0f}s > limit {limits.repo_age_limit_s:.0f}s: stale, upload now"
        return _warn(value, limits.repo_age_limit_s, words)
    if age > limits.repo_age_target_s:
        words = f"repo age {age:.0f}s > target {limits.repo_age_target_s:.0f}s: an upload is due"
        return _pass(value, limits.repo_age_target_s, words)
    words = f"repo age {age:.0f}s (keep < {limits.repo_age_target_s:.0f}s)"
    return _pass(value, limits.repo_age_target_s, words)


def published_age(facts: Facts, limits: Limits) -> Verdict:
    """The validators' verdict on the age of the published gradients (subnet 38: zero score from
    4800 s)."""
    published = facts.published
    age = age_now(published, facts.now)
    limit = limits.validator_repo_age_s or limits.repo_age_limit_s
    if published.empty:
        words = "nothing is published: there is no gradients file; upload one"
        return _block(None, limit, words)
    if age is None:
        return _unknown(None, limit, f"repo age unknown: {published.reason}")
    value = round(age, 1)
    if age >= limit:
        enforced = limits.validator_repo_age_s is not None
        why = (
            "they score zero"
            if enforced
            else "over the guard's limit (no profile says at what age validators score zero)"
        )
        words = f"gradients are {age:.0f}s old >= {limit:.0f}s: {why}; upload now"
        return _block(value, limit, words)
    if age > limits.repo_age_limit_s:
        margin = limits.repo_age_limit_s
        return _warn(value, margin, f"gradients are {age:.0f}s old (keep < {margin:.0f}s)")
    return _pass(value, limit, f"gradients are {age:.0f}s old")


# base age


def base_age(facts: Facts, limits: Limits) -> Verdict:
    """Block if the network is past the outer step that the miner loaded; warn if the miner is
    ahead.

    One step ahead is normal after an AllReduce, until the master publishes the new state and the
    guard probes again.
    """
    ours, network = facts.candidate.base_outer_step, facts.network.outer_step
    if network is None:
        why = facts.network.reason or "the master's repo was not read"
        return _unknown(ours, None, f"the network's outer step is unknown: {why}")
    if ours is None:
        words = "the caller did not pass the outer step of the loaded state"
        return _unknown(None, network, words)
    if ours < network:
        words = (
            f"base outer_step ({ours}) < network ({network}): the gradient was computed "
            "against an old base. Reload the global state"
        )
        return _block(ours, network, words)
    if ours > network + 1:
        words = f"base outer_step ({ours}) > network ({network}): is the right network configured?"
        return _warn(ours, network, words)
    return _pass(ours, network, f"base outer_step {ours}, network {network}")


# loss

LOSS_POINTS = 10
"""Inner steps in the trend (source 004: check the last 10 steps)."""


RISING_P = 0.99


def loss(facts: Facts, limits: Limits) -> Verdict:
    """Block a non-finite loss; warn if it rises over the last 10 inner steps with P > 0.99."""
    latest, recent = facts.candidate.loss, facts.candidate.recent_losses
    if latest is None and not recent:
        return _unknown(None, None, "the caller did not pass the loss")
    value = recent[-1] if latest is None else latest
    if not math.isfinite(value):
        words = f"loss is {value}: gradient invalid. Restore the last good checkpoint"
        return _block(str(value), "finite", words)
    if len(recent) >= LOSS_POINTS and all(math.isfinite(v) for v in recent[-LOSS_POINTS:]):
        p = rising_probability(recent[-LOSS_POINTS:])
        if p > RISING_P:
            first = recent[-LOSS_POINTS]
            words = (
                f"loss rose over the last {LOSS_POINTS} inner steps ({first:.3g} to "
                f"{value:.3g}, P = {p:.3f})"
            )
            return _warn(round(p, 4), RISING_P, words)
    return _pass(round(value, 4), "finite", f"loss {value:.4g} is finite")


def rising_probability(values: Sequence[float]) -> float:
    """P(slope > 0) of a least-squares line through `values` (an even count of at least 4).

    Student's t with n - 2 degrees of freedom, as a function of the correlation r; the closed form
    for even degrees is Abramowitz & Stegun 26.7.4.
    """
    n = len(values)
    mean_x, mean_y = (n - 1) / 2, math.fsum(values) / n
    spread_x = math.fsum((x - mean_x) ** 2 for x in range(n))
    spread_y = math.fsum((y - mean_y) ** 2 for y in values)
    if spread_y <= 1e-18 * max(mean_y * mean_y, 1e-300):
        return 0.5
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in enumerate(values))
    r = max(-1.0, min(slope / math.sqrt(spread_x * spread_y), 1.0))
    term = total = 1.0
    for k in range(1, (n - 2) // 2):
        term *= (2 * k - 1) / (2 * k) * (1 - r * r)
        total += term
    return 0.5 + r * total / 2


# gradients

ALL_ZERO = "all values are zero"
"""An error for a gradient, normal for an archive: after an outer step the local weights equal the
global ones."""


_MAX_PROBLEMS = 3


_SHAPES: Mapping[Any, str] = {
    True: ", with the model's shapes",
    False: "; shapes not checked: `guard.diagnose` has not recorded the model's",
}


def gradients(facts: Facts, limits: Limits) -> Verdict:
    """Block a file with problems or of an implausible size; unknown without an inspection.

    An archive's values may all be zero.
    """
    report = facts.candidate.files
    if report is None:
        return _unknown(None, None, "gradients.pt was not inspected")
    size = report.get("size_bytes")
    if report.get("reason") is not None:
        return _unknown(size, None, f"gradients.pt could not be inspected: {report['reason']}")
    maximum = limits.gradients_max_bytes
    problems = list(report.get("problems") or ())
    if problems == [ALL_ZERO] and facts.candidate.kind == "archive":
        words = f"gradients.pt: {ALL_ZERO}, as in every archive after an outer step"
        return _pass(size, maximum, words)
    if problems:
        words = f"gradients.pt: {'; '.join(map(str, problems[:_MAX_PROBLEMS]))}"
        return _block(size, None, words)
    if maximum is not None and size is not None and size > maximum:
        words = f"gradients.pt is {size} bytes, above the plausible maximum of {maximum}"
        return _block(size, maximum, words)
    if not report.get("params"):
        return _block(0, 1, "gradients.pt contains no gradients")
    if warnings := list(report.get("warnings") or ()):
        words = f"gradients.pt: {'; '.join(map(str, warnings[:_MAX_PROBLEMS]))}"
        return _warn(size, maximum, words)
    words = f"gradients.pt: {report['params']} parameters, all finite"
    return _pass(size, maximum, words + _SHAPES.get(report.get("shapes_known"), ""))


# block list

BLOCK_S = 12.0
"""Seconds per block, the chain's target."""


def current_block(network: Network, now: float) -> int | None:
    """The block at `now` (monotonic): the last one read plus those due since. None if unknown."""
    if network.block is None:
        return None
    since = 0.0 if network.seen_at is None else max(now - network.seen_at, 0.0)
    return network.block + int(since / BLOCK_S)


def block_list(facts: Facts, limits: Limits) -> Verdict:
    """Block an empty or missing list, and one whose newest block is older than half the blocks
    between AllReduces (subnet 38, R:304). An archive's list may be empty."""
    limit = (limits.blocks_per_allreduce or 0) / 2
    if facts.candidate.config is None:
        return _unknown(None, limit, "the caller did not pass config.json")
    blocks = facts.candidate.config.get("block_list")
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(b, int) for b in blocks):
        words = (
            "config.json has no block_list of integers, from which validators draw a block; add one"
        )
        return _block(None, limit, words)
    if not blocks and facts.candidate.kind == "archive":
        # The miner clears its list at an AllReduce, and reloads from this upload.
        words = "block_list is empty, as in every archive after an AllReduce"
        return _pass(0, limit, words)
    if not blocks:
        words = (
            "block_list is empty, so validators raise an error and reset scores; wait "
            "until the miner has read the chain"
        )
        return _block(0, limit, words)
    block, newest = current_block(facts.network, facts.now), int(max(blocks))
    if block is None:
        why = facts.network.reason or "the block was not read"
        return _unknown(newest, limit, f"the current block is unknown: {why}")
    age = block - newest
    old = f"newest block in block_list is {age} blocks old"
    if age > limit:
        words = f"{old} (limit {limit:.0f}); validators reject it. Has this node stalled?"
        return _block(age, limit, words)
    if age > 0.75 * limit:
        return _warn(age, limit, f"{old} (limit {limit:.0f})")
    return _pass(age, limit, old)


# metadata


def metadata(facts: Facts, limits: Limits) -> Verdict:
    """Block if a field that validators read is missing, or the inner step is unreadable.

    Warn if the steps differ from the candidate's: validators take the outer step from the network,
    and upstream writes the inner step at which the upload ended.
    """
    value, needed = facts.candidate.metadata, list(limits.metadata_fields)
    if value is None:
        return _unknown(None, needed, "the caller did not pass metadata.json")
    if missing := [name for name in needed if name not in value]:
        words = (
            f"metadata.json lacks {', '.join(missing)}, so validators read inner step 0 "
            "and reset scores"
        )
        return _block(missing, needed, f"{words}; add the missing fields")
    inner = read_inner_step(value)
    if inner is None and "inner_step" in needed:
        shown = _short(value["inner_step"])
        words = f"metadata.json: inner_step is {shown}, not a step number; write an integer"
        return _block(shown, "a step", words)
    for name, ours in (
        ("outer_step", facts.candidate.outer_step),
        ("inner_step", facts.candidate.inner_step),
    ):
        theirs: Any = inner if name == "inner_step" else value.get(name)
        if name in value and theirs != ours:
            named = _short(theirs)
            what = name.replace("_", " ")
            words = f"metadata.json names {what} {named}, but the gradient is from {ours}"
            return _warn(named, ours, words)
    words = f"metadata.json has {', '.join(needed) or 'none of the required fields'}"
    return _pass(needed, needed, words)


def _short(value: Any) -> str:
    return repr(value)[:40]


# bucket


def bucket(facts: Facts, limits: Limits) -> Verdict:
    """Block a name other than the one that validators look for: that of the model that they score,
    with the chain's uid. Subnet 38: `{global_model_name}-{uid:03d}`."""
    value, form, uid = facts.bucket, limits.bucket, facts.network.uid
    if value is None:
        return _unknown(None, form, "the bucket name is unknown; set [repo] bucket")
    if form is None:
        return _unknown(value, None, "the profile defines no format for the bucket name")
    if uid is None and value.startswith(form.partition("{")[0]):
        why = facts.network.reason or "the chain was not read"
        return _unknown(value, form, f"validators look for {form}; our uid is unknown: {why}")
    expected = form if uid is None else form.format(uid=uid)
    if value != expected:
        words = f"bucket {value!r}: validators look for {expected!r}; rename the bucket"
        return _block(value, expected, words)
    return _pass(value, expected, f"bucket {value} belongs to uid {uid}")


# commitment


def commitment(facts: Facts, limits: Limits) -> Verdict:
    """Block if the hotkey has committed nothing or the wrong length (subnet 38: exactly 128
    characters).

    Warn if the committed keys differ from those in use; an audit has tried whether they open the
    bucket.
    """
    value, chars = facts.network.commitment, sum(limits.commitment_form)
    if value is None:
        why = facts.network.reason or "the chain's reply did not include it"
        return _unknown(None, chars, f"the commitment is unknown: {why}")
    length = int(value.partition(":")[0])
    if length == 0:
        words = (
            "nothing is committed for this hotkey, so no validator can read the bucket; the "
            "miner commits when it starts"
        )
        return _block(0, chars, words)
    if length != chars:
        words = (
            f"the commitment has {length} characters, but validators expect exactly {chars}; "
            "commit again"
        )
        return _block(length, chars, words)
    if facts.credentials is None:
        if facts.tried:
            return _pass(length, chars, "the committed keys open the bucket")
        words = f"the commitment has {length} characters; the read keys in use are unknown"
        return _unknown(length, chars, words)
    if facts.credentials != value:
        others = "the read keys committed on chain are not the ones in use"
        tried = (
            ", but they do open the bucket" if facts.tried else "; `miner-guard audit` tests them"
        )
        return _warn("other keys", "the keys in use", others + tried)
    return _pass(length, chars, f"the commitment ({length} characters) contains the keys in use")


# which rules apply

Applies = Callable[[Facts, Limits], bool]


def _always(_facts: Facts, _limits: Limits) -> bool:
    return True


def _named_bucket(facts: Facts, limits: Limits) -> bool:
    return limits.bucket is not None and facts.bucket is not None


def _read_chain(facts: Facts, limits: Limits) -> bool:
    return bool(limits.commitment_form) and facts.network.reason is None


GATE: Sequence[tuple[Judge, Applies]] = (
    (min_inner_step, _always),
    (repo_age, _always),
    (base_age, _always),
    (loss, lambda f, _: f.candidate.loss is not None or bool(f.candidate.recent_losses)),
    (gradients, lambda f, _: f.candidate.files is not None),
    (block_list, lambda f, n: bool(n.blocks_per_allreduce) and f.candidate.config is not None),
    (metadata, lambda f, n: bool(n.metadata_fields) and f.candidate.metadata is not None),
    (bucket, _named_bucket),
    (commitment, _read_chain),
)
"""Rules for a candidate, in reporting order, and when each applies."""

AUDIT: Sequence[tuple[Judge, Applies]] = (
    (published_inner_step, _always),
    (published_age, _always),
    (gradients, _always),
    (block_list, lambda _, n: bool(n.blocks_per_allreduce)),
    (metadata, lambda _, n: bool(n.metadata_fields)),
    (bucket, _named_bucket),
    (commitment, _read_chain),
)
"""Rules for the published files; `facts.candidate` holds what the audit fetched."""

_NAMES = {"published_inner_step": "min_inner_step", "published_age": "repo_age"}
"""A rule has its function's name; the two sides of one demand share a name."""


def evaluate_all(
    rules: Sequence[tuple[Judge, Applies]], facts: Facts, limits: Limits
) -> tuple[Verdict, ...]:
    """The verdict of each rule that applies. An error inside a rule becomes a block that reports
    it."""
    return tuple(
        evaluate(_NAMES.get(judge.__name__, judge.__name__), judge, facts, limits)
        for judge, applies in rules
        if applies(facts, limits)
    )


def evaluate(name: str, judge: Judge, facts: Facts, limits: Limits) -> Verdict:
    """One rule's verdict. Never raises."""
    try:
        return replace(judge(facts, limits), rule=name)
    except Exception as error:  # noqa: BLE001 -- a defect in one rule must not let an upload pass unjudged
        return rule_error(name, error)


def rule_error(name: str, error: Exception) -> Verdict:
    """The verdict for a rule that raised: a block."""
    words = f"the rule {name} failed: {type(error).__name__}: {error}"
    return Verdict(name, "block", None, None, f"{words[:180]}; the upload is blocked")


# the audit


class Epoch(NamedTuple):
    """The epoch that validators score, and the evidence for it."""

    outer_step: int
    why: str


def epoch_scored(
    published: int | None, network: int | None, blocks_since_allreduce: int | None, limits: Limits
) -> Epoch | None:
    """The epoch that validators score: the one before the network's during the first half of the
    blocks after an AllReduce (subnet 38, F:91), otherwise the network's. If the network's is
    unknown, the published one.

    None if both the network's and the published outer step are unknown.
    """
    if network is None:
        why = "as published; the network's outer step is unknown"
        return None if published is None else Epoch(published, why)
    per_allreduce = limits.blocks_per_allreduce
    if per_allreduce is None or blocks_since_allreduce is None:
        return Epoch(
            network, "the network's epoch; the number of blocks since the AllReduce is unknown"
        )
    if blocks_since_allreduce < per_allreduce / 2 and network != 0:
        return Epoch(
            network - 1, f"the previous one: {blocks_since_allreduce} blocks since the AllReduce"
        )
    return Epoch(network, f"the network's: {blocks_since_allreduce} blocks since the AllReduce")


def audit_detail(
    outcome: str, verdicts: Sequence[Verdict], *, epoch: Epoch, cost: str, unseen: Unseen
) -> str:
    """The text after `AUDIT PASSED: `, `AUDIT FAILED: ` or `AUDIT UNKNOWN: `."""
    blocks = [f"{v.rule}: {v.sentence}" for v in verdicts if v.outcome == "block"]
    scored = f"epoch {epoch.outer_step} ({epoch.why})"
    if outcome == "rejected":
        # This state is normal between an AllReduce and the next gradient upload.
        if any(
            v.rule == "min_inner_step" and v.outcome == "block" and v.seen == 0 for v in verdicts
        ):
            blocks.append(
                "this is the upload after an AllReduce; the next gradient upload fixes it"
            )
        return f"{scored}: {'; '.join(blocks)}"
    passed = sum(v.outcome == "pass" for v in verdicts)
    return "; ".join(
        [
            f"{scored}, {passed} rules passed, {cost}",
            *(f"rejected if this is what validators score: {words}" for words in blocks),
            *(f"not proven without {words}" for words in unseen),
            *(f"warning: {v.sentence}" for v in verdicts if v.outcome == "warn"),
            *(f"{v.rule} unknown ({v.sentence})" for v in verdicts if v.outcome == "unknown"),
        ]
    )


def audit_outcome(verdicts: Sequence[Verdict], unseen: Unseen) -> str:
    """`rejected` if any rule blocks whatever is `unseen`; `unknown` if something that a validator
    needs is unseen or its rule could not judge; else `accepted`."""
    doubtful = frozenset().union(*unseen.values())
    if any(v.outcome == "block" and v.rule not in doubtful for v in verdicts):
        return "rejected"
    return "unknown" if unseen or any(v.outcome == "unknown" for v in verdicts) else "accepted"


Unseen = Mapping[str, frozenset[str]]
"""What a validator knows and the audit has not seen, each with the one setting to make, and the
rules whose verdicts depend on it."""

OF_EPOCH = frozenset({"repo_age", "gradients", "block_list"})
"""The rules that judge the files of the epoch that validators score."""


def unseen_facts(network: Network, files: Mapping[str, Any], limits: Limits) -> Unseen:
    """What the audit has not seen; the first setting is the next to make. `files`: the report on
    the gradients."""
    missing = dict[str, frozenset[str]]()
    if limits.blocks_per_allreduce or limits.commitment_form or limits.bucket:
        if network.reason is not None:
            do = "set" if network.reason.startswith("no [chain]") else "check"
            missing[f"the chain ({network.reason}); {do} [chain] network"] = OF_EPOCH
        elif network.uid is None and limits.bucket is not None:
            missing["the hotkey's uid; set [chain] hotkey"] = frozenset()
        elif limits.blocks_per_allreduce is not None and (
            network.outer_step is None or network.blocks_since_allreduce is None
        ):
            missing["the epoch that validators score; set [chain] master_uid"] = OF_EPOCH
    if limits.gradients_chunk is not None and files.get("shapes_known") is False:
        words = "the model's shapes; call `guard.diagnose(model)` in the miner"
        missing[words] = frozenset({"gradients"})
    return missing


def assumed_facts(facts: Facts, limits: Limits) -> tuple[str, ...]:
    """What the audit takes for granted, each with what would prove it."""
    assumed, network = [], facts.network
    if limits.blocks_per_allreduce is not None and network.blocks_per_allreduce is None:
        assumed.append(
            f"{limits.blocks_per_allreduce} blocks per AllReduce, as in the profile; "
            "[chain] blocks_per_allreduce overrides it"
        )
    if limits.commitment_form and not facts.tried:
        assumed.append("the committed keys open the bucket: it was read with the configured ones")
    return tuple(assumed)
