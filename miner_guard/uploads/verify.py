"""Checks whether a reported push really arrived. Pure: compares two states of the repo with the
report.

Upstream never checks the exit code of its upload worker: a crashed one still logs `Successfully
pushed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from miner_guard.record.redaction import MASK
from miner_guard.validators.facts import Published
from miner_guard.validators.metadata import mixed

_SLACK_S = 5.0
"""Tolerance in seconds: server timestamps are in whole seconds, and the probe itself takes a
moment."""


@dataclass(frozen=True)
class Reported:
    """A push, as reported."""

    outer_step: int | None
    inner_step: int | None
    since_start_s: float | None
    """Seconds from the start of the push to the probe after it; None if a log reported only the
    end."""

    tag: str | None = None
    size_bytes: int | None = None
    """Total size of all files, if the reporter knew it."""

    checksum: str | None = None
    """Checksum that the repo reported to the miner for the gradients, if any."""


@dataclass(frozen=True)
class Verification:
    """The conclusion from the probe after the push."""

    verified: bool | None
    """None if undecidable: the repo is unreadable, or already shows a later push."""

    detail: str
    superseded: bool = False
    """A later outer step was published before the probe."""


def verify(before: Published | None, after: Published, reported: Reported) -> Verification:
    """Compare the repo after a push with the report, and with the repo before it if known."""
    if after.empty:
        return Verification(False, "the repo is empty")
    if after.age_s is None:
        return Verification(None, f"the repo could not be read: {after.reason}")
    if (still := _not_moved(before, after, reported)) is not None:
        return Verification(False, still)
    # A higher step counts only if published since the push began: an earlier run may have left it.
    if None not in (after.outer_step, reported.outer_step) and (after.outer_step or 0) > (
        reported.outer_step or 0
    ):
        later = after.revision or f"outer step {after.outer_step}"
        return Verification(None, f"followed by {later} before it was checked", superseded=True)
    torn = mixed(after.metadata, after.size_bytes, after.checksum)
    doubts = (
        _other_steps(after, reported),
        _same_content(before, after),
        _other_content(after, reported),
        torn,
    )
    for doubt in doubts:
        if doubt is not None:
            return Verification(False, doubt)
    if (
        reported.since_start_s is None
        and moved_by(before, after) is None
        and reported.inner_step is None
    ):
        return Verification(
            None, "neither the repo's state before the push nor the push's start time is known"
        )
    size = "size unknown" if after.size_bytes is None else f"{after.size_bytes} bytes"
    sum_ = "no checksum" if after.checksum is None else f"checksum {after.checksum[:12]}"
    return Verification(True, f"gradients {after.age_s:.0f}s old, {size}, {sum_}")


def moved_by(before: Published | None, after: Published) -> float | None:
    """Seconds by which LastModified moved between two probes; None if either lacks an age."""
    if before is None or None in (before.age_s, before.seen_at, after.age_s, after.seen_at):
        return None
    assert before.age_s is not None
    assert before.seen_at is not None
    assert after.age_s is not None
    assert after.seen_at is not None
    return (after.seen_at - after.age_s) - (before.seen_at - before.age_s)


def _not_moved(before: Published | None, after: Published, reported: Reported) -> str | None:
    assert after.age_s is not None
    if after.size_bytes == 0:
        return "the gradients file is empty"
    if reported.since_start_s is not None:
        if after.age_s <= reported.since_start_s + _SLACK_S:
            return None
        ages = (
            f"the gradients are {after.age_s:.0f}s old, but the push began "
            f"{reported.since_start_s:.0f}s ago"
        )
        return f"LastModified did not change: {ages}"
    moved = moved_by(before, after)
    if moved is not None and moved <= _SLACK_S and not _is_that(after, reported):
        return f"LastModified did not change: the gradients are {after.age_s:.0f}s old, as before"
    return None


def _is_that(after: Published, reported: Reported) -> bool:
    """Return whether the earlier probe already saw the reported push, because it ran after the
    files arrived but before the log line. Compares the steps."""
    return (
        (after.outer_step, after.inner_step)
        == (reported.outer_step, reported.inner_step)
        != (None, None)
    )


def _other_steps(after: Published, reported: Reported) -> str | None:
    if (
        None not in (reported.outer_step, after.outer_step)
        and after.outer_step != reported.outer_step
    ):
        return (
            f"metadata.json says outer step {after.outer_step}, not {reported.outer_step} as the "
            "miner reported"
        )
    # Upstream writes the root metadata last, with the inner step at that moment: a later step is
    # fine, an earlier one is not.
    if (
        reported.inner_step is not None
        and after.inner_step is not None
        and after.inner_step < reported.inner_step
    ):
        return (
            f"metadata.json says inner step {after.inner_step}, not {reported.inner_step} as the "
            "miner reported"
        )
    return None


def _same_content(before: Published | None, after: Published) -> str | None:
    if before is None or before.checksum is None or after.checksum != before.checksum:
        return None
    if (before.outer_step, before.inner_step) == (after.outer_step, after.inner_step):
        return None
    return (
        f"the gradients did not change: same checksum {after.checksum[:12]} as before, although "
        "the step differs"
    )


def _other_content(after: Published, reported: Reported) -> str | None:
    same_push = (after.outer_step, after.inner_step) == (reported.outer_step, reported.inner_step)
    if (
        not same_push
        or after.checksum is None
        or reported.checksum is None
        or MASK in reported.checksum
    ):
        return None
    # A report may hold only a prefix of the checksum.
    if after.checksum.startswith(reported.checksum) or reported.checksum.startswith(after.checksum):
        return None
    return (
        f"the gradients have checksum {after.checksum[:12]}, but the miner read "
        f"{reported.checksum[:12]}"
    )
