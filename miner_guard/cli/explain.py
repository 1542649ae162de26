"""`miner-guard explain`: root cause and fixes from any log."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Optional, cast

import typer

from miner_guard.cli.echo import echo
from miner_guard.cli.find import flag, open_guard
from miner_guard.cli.options import (
    DEFAULT_NAME,
    AnyName,
    CommandContext,
    Config,
    Json,
    State,
    open_context,
)
from miner_guard.cli.working import Working
from miner_guard.eventlog.rendering import json_line
from miner_guard.exits import FAILED, USAGE, Refused
from miner_guard.incidents import knowledge, notes
from miner_guard.incidents.explain import LogExplanation, explain
from miner_guard.incidents.oom import Training
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import RunReader
from miner_guard.record.words import counted
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import SystemClock

_GZIP = b"\x1f\x8b"
_NOTES_SHOWN = 3
_MAX_RATIO = 200
"""A gzip file that expands by a larger factor is refused. Logs compress to a tenth of their size,
repetitive logs to a fiftieth, and zeros to a thousandth."""

_UNPACKED_AT_ONCE = 8 * 1024 * 1024
"""Unpacked bytes allowed before the ratio applies."""


def command(
    file: Annotated[
        Optional[str],
        typer.Argument(
            metavar="FILE|-",
            help="The log; - is stdin. Default: piped input, or the guard's own log if nothing is "
            "piped in or if --state-dir or --name is given.",
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="FILE contains per-step numbers instead of a log.")
    ] = False,
    note: Annotated[
        str,
        typer.Option(
            "--note", help="Record what helped; explain shows it when it finds this label again."
        ),
    ] = "",
    config: Config = None,
    name: AnyName = None,
    state_dir: State = None,
    as_json: Json = False,
) -> None:
    """Find the root cause and fixes in any log. Exit 1: nothing wrong."""
    if trace and note:
        raise Refused(
            "--note cannot be combined with --trace, because notes belong to incident labels", USAGE
        )
    if file is None and name is None and state_dir is None and _piped():
        file = "-"
    place = (
        open_guard(config, name, state_dir)
        if file is None
        else open_context(config, name or DEFAULT_NAME, state_dir)
    )
    if trace:
        # Imported late: explaining a log does not need it.
        from miner_guard.cli.explain_trace import explain_trace
        from miner_guard.watch.progress import TrainingFacts

        known = place.settings.config
        explain_trace(
            file or str(place.state.log),
            TrainingFacts.from_settings(known.miner, known.gate),
            as_json=as_json,
        )
        return
    report = _read(file, place)
    if as_json:
        echo(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    else:
        again = flag(place.state) if file is None else "FILE" if file == "-" else file
        echo(text(report, notes.read(place.state), again, place.state if file is None else None))
    if note:
        _remember(place, report, note)
    if report.root is None:
        raise typer.Exit(FAILED)


def _read(file: str | None, place: CommandContext) -> LogExplanation:
    redactor = Redactor.from_environment(os.environ)
    try:
        with _opened(file, place.state) as log, Working("reading the log", _size(log)) as at:
            counted_log = cast(BinaryIO, _CountedReader(log, at))
            miner = place.settings.config.miner
            training = Training(miner.batch_size, miner.effective_batch_size)
            return explain(counted_log, knowledge.load(), training, redactor.text)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(
            f"{file or place.state.db} can't be read: {reason}; pass a log file, or - for stdin",
            USAGE,
        ) from error


def _size(log: BinaryIO) -> int | None:
    """Size of a plain file in bytes; None if it can be found only by reading, as for a pipe, a gzip
    file or several files."""
    try:
        status = os.fstat(log.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    plain = stat.S_ISREG(status.st_mode) and not isinstance(log, gzip.GzipFile)
    return status.st_size if plain else None


class _CountedReader:
    """Reads a log and passes the number of bytes read to the progress line."""

    def __init__(self, log: BinaryIO, at: Working) -> None:
        self._log, self._at = log, at

    def read(self, size: int) -> bytes:
        data = self._log.read(size)
        self._at.advance(len(data))
        return data


def _piped() -> bool:
    """Return True if standard input is a pipe or a file. A terminal or /dev/null contains no
    log."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        # Without a descriptor, read any replacement for stdin.
        return sys.stdin is not None and not sys.stdin.closed


@contextlib.contextmanager
def _opened(file: str | None, state: StateDir) -> Iterator[BinaryIO]:
    if file is None:
        events = RunReader(state.db).events()
        if not events:
            raise Refused(
                f"there is no guard log in {state.root}; pass a log file, or pipe one in: "
                "miner-guard explain - < miner.log",
                USAGE,
            )
        lines = "".join(f"{json_line(event.record())}\n" for event in events)
        yield io.BytesIO(lines.encode("utf-8", "replace"))
        return
    if file == "-":
        if sys.stdin.isatty():
            raise Refused("pass a log file, or pipe one in: miner-guard explain < miner.log", USAGE)
        yield sys.stdin.buffer
        return
    with Path(file).open("rb") as log:
        if log.peek(2)[:2] == _GZIP:
            with gzip.open(log) as unpacked:
                yield cast(BinaryIO, _BoundedReader(unpacked, log, file))
        else:
            yield log


class _BoundedReader:
    """Reads a gzip file, but refuses one that expands too far: 300 KB can unpack to 300 MB of zeros
    or more."""

    def __init__(self, unpacked: BinaryIO | gzip.GzipFile, packed: BinaryIO, name: str) -> None:
        self._unpacked, self._packed, self._name = unpacked, packed, name
        self._size = 0

    def read(self, size: int) -> bytes:
        """Raises Refused (64) if the expansion ratio is too high for a log."""
        data = self._unpacked.read(size)
        self._size += len(data)
        if self._size > _UNPACKED_AT_ONCE + _MAX_RATIO * self._packed.tell():
            raise Refused(
                f"{self._name} unpacks to more than {_MAX_RATIO} times its size, so it is probably "
                "not a log; if it is a log, pass only "
                f"its end: zcat {self._name} | tail -n 100000 | miner-guard explain -",
                USAGE,
            )
        return data


def _remember(place: CommandContext, report: LogExplanation, note: str) -> None:
    if report.root is None:
        raise Refused("note not stored: this log shows no error", FAILED)
    try:
        notes.add(place.state, report.root.label, note, SystemClock())
    except OSError as error:
        raise Refused(
            f"cannot store the note in {place.state.root}: {error.strerror or error}", FAILED
        ) from error


def text(
    report: LogExplanation,
    known: Mapping[str, Sequence[notes.Note]],
    again: str,
    of: StateDir | None = None,
) -> str:
    """Render the report as text: what was observed, a hypothesis, and the one change to make.
    `again`: the argument that makes the command read the same log again; `of`: the state directory
    if the log is the guard's."""
    root = report.root
    if root is None:
        read = "" if of is None else f" of {of.db}"
        return f"Nothing wrong found in {counted(report.lines, 'line')}{read}."
    where = f"line {root.line}" + (f", rank {root.ranks[0]}" if len(root.ranks) == 1 else "")
    rows = [
        f"ROOT CAUSE {root.label} ({where})",
        *(["  Severity    info: it did not stop the run"] if root.severity == "info" else []),
        *([] if of is None else [f"  Log         {of.db}"]),
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
    rows += [f"  line {f.line}: {f.label}: {f.excerpt[:160]}" for f in others]
    if root.severity != "info":
        rows += [
            "",
            "Make one change, then check again. Write down what helped:",
            f'  miner-guard explain {again} --note "…"',
        ]
    return "\n".join(rows)
