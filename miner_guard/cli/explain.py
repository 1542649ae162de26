"""`miner-guard explain`: root cause and fixes from any log."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import typer

from miner_guard.cli.echo import echo
from miner_guard.cli.options import (
    DEFAULT_NAME,
    CommandContext,
    Config,
    Json,
    Name,
    State,
    open_context,
)
from miner_guard.config import MinerSettings
from miner_guard.eventlog.catalog import counted
from miner_guard.eventlog.redact import Redactor
from miner_guard.exits import FAILED, USAGE, Refused
from miner_guard.incidents import knowledge, notes
from miner_guard.incidents.oom import Training
from miner_guard.incidents.report import Explained, LogExplanation, explain
from miner_guard.system.clock import SystemClock

_GZIP = b"\x1f\x8b"
_NOTES_SHOWN = 3
_MAX_RATIO = 200
"""Logs shrink to a tenth, repetitive ones to a fiftieth; zeros to a thousandth."""

_UNPACKED_AT_ONCE = 8 * 1024 * 1024
"""Bytes that may come out of the first few."""


def command(
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="The log; - or nothing reads stdin.")
    ] = "-",
    trace: Annotated[
        bool, typer.Option("--trace", help="FILE holds numbers by step instead of a log.")
    ] = False,
    note: Annotated[
        str, typer.Option("--note", help="What helped; shown the next time this label appears.")
    ] = "",
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
    as_json: Json = False,
) -> None:
    """Root cause and fixes from any log. Exit 1: nothing wrong."""
    if trace and note:
        raise Refused(
            "--note goes with a log, not with --trace: notes are kept by the label of an incident",
            USAGE,
        )
    place = open_context(config, name, state_dir)
    if trace:
        # Late: a log needs none of it.
        from miner_guard.cli.explain_trace import explain_trace
        from miner_guard.detectors.eta import TrainingFacts

        known = place.settings.config
        explain_trace(file, TrainingFacts.from_settings(known.miner, known.gate), as_json=as_json)
        return
    report = _read(file, place)
    if as_json:
        echo(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    else:
        echo(text(report, notes.read(place.state), file))
    if note:
        _remember(place, report, note)
    if report.root is None:
        raise typer.Exit(FAILED)


def _read(file: str, place: CommandContext) -> LogExplanation:
    redactor = Redactor.from_environment(os.environ)
    try:
        with _opened(file) as log:
            return explain(
                log, knowledge.load(), _training(place.settings.config.miner), redactor.text
            )
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(
            f"{file} can't be read: {reason}; give a log file, or - for stdin", USAGE
        ) from error


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin.isatty():
            raise Refused("give a log file, or pipe one in: miner-guard explain < miner.log", USAGE)
        yield sys.stdin.buffer
        return
    with Path(file).open("rb") as log:
        if log.peek(2)[:2] == _GZIP:
            with gzip.open(log) as unpacked:
                yield cast(BinaryIO, _Bounded(unpacked, log, file))
        else:
            yield log


class _Bounded:
    """A gzip that is read no further than a log can reach: 300 KB of it may unpack to 300 MB of
    zeros, or to more."""

    def __init__(self, unpacked: BinaryIO | gzip.GzipFile, packed: BinaryIO, name: str) -> None:
        self._unpacked, self._packed, self._name = unpacked, packed, name
        self._size = 0

    def read(self, size: int) -> bytes:
        """Raises Refused (64) where so much comes out of so little that it is no log."""
        data = self._unpacked.read(size)
        self._size += len(data)
        if self._size > _UNPACKED_AT_ONCE + _MAX_RATIO * self._packed.tell():
            raise Refused(
                f"{self._name} unpacks to more than {_MAX_RATIO} times its size, which no log "
                "does; if it is one, give "
                f"its end: zcat {self._name} | tail -n 100000 | miner-guard explain -",
                USAGE,
            )
        return data


def _training(miner: MinerSettings) -> Training:
    return Training(batch_size=miner.batch_size, effective_batch_size=miner.effective_batch_size)


def _remember(place: CommandContext, report: LogExplanation, note: str) -> None:
    if report.root is None:
        raise Refused("there is nothing to note: this log shows no error", FAILED)
    try:
        notes.add(place.state, report.root.label, note, SystemClock())
    except OSError as error:
        raise Refused(
            f"the note can't be stored in {place.state.root}: {error.strerror or error}", FAILED
        ) from error


def text(report: LogExplanation, known: Mapping[str, Sequence[notes.Note]], file: str) -> str:
    """The report for people: observed, hypothesis, the one change to make."""
    root = report.root
    if root is None:
        return f"Nothing wrong found in {counted(report.lines, 'line')}."
    where = f"line {root.line}" + (f", rank {root.ranks[0]}" if len(root.ranks) == 1 else "")
    rows = [
        f"ROOT CAUSE {root.label} ({where})",
        f"  Observed    {root.excerpt}",
        f"  Hypothesis  {root.cause}",
        f"  Change      {root.fixes[0]}",
    ]
    rows += [f"  Source      {root.sources[0]}"] if root.sources[0] else []
    rows += [f"  If not      {fix}" for fix in root.fixes[1:]]
    rows += [
        f"  Helped      {n.text} ({n.when[:10]})"
        for n in list(known.get(root.label, ()))[:_NOTES_SHOWN]
    ]
    others = [finding for finding in report.findings if not finding.root]
    rows += ["", "Also seen:"] if others else []
    rows += [_other(finding) for finding in others]
    again = "FILE" if file == "-" else file
    rows += [
        "",
        "Make one change, then look again. Write down what helped:",
        f'  miner-guard explain {again} --note "…"',
    ]
    return "\n".join(rows)


def _other(finding: Explained) -> str:
    return f"  line {finding.line}: {finding.label}: {finding.excerpt[:160]}"
