"""`miner-guard explain`: root cause and fixes from a log or a trace, the steps in a log, and
what an event or an incident means."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Optional, cast

import typer

from miner_guard.cli import command
from miner_guard.cli.options import (
    DEFAULT_NAME,
    AnyName,
    CommandContext,
    Config,
    Json,
    State,
    open_context,
    open_guard,
    unknown_name,
)
from miner_guard.cli.output import echo, open_text, working
from miner_guard.exits import CONFIG, FAILED, UNAVAILABLE, USAGE, Refused
from miner_guard.record.words import counted

if TYPE_CHECKING:
    from miner_guard.incidents.explain import LogExplanation
    from miner_guard.state_dir import StateDir
    from miner_guard.watch.curves import Anomaly
    from miner_guard.watch.lines import LogCheck
    from miner_guard.watch.progress import TrainingFacts
    from miner_guard.watch.trace_reading import Trace

_GZIP = b"\x1f\x8b"
_MAX_RATIO = 200
"""A gzip file that expands by a larger factor is refused. Logs compress to a tenth of their size,
repetitive logs to a fiftieth, and zeros to a thousandth."""

_UNPACKED_AT_ONCE = 8 * 1024 * 1024
"""Unpacked bytes allowed before the ratio applies."""

_SETTINGS_BYTES = 64 * 1024
"""How much of a log is searched for settings that somebody pasted with an error."""

_MAX_TRACE_BYTES = 4 * 1024 * 1024
"""Looking for numbers reads 2 to 3 MB/s: a larger file needs `--trace` to be read as a trace."""

_EVENT = re.compile("[a-z]+(_[a-z0-9]+)*")
_EVENT_OF_TYPE = {
    "nan": "loss_nan",
    "spike": "loss_spike",
    "divergence": "loss_divergence",
    "plateau_high": "loss_plateau",
    "slow_steps": "slow_step",
    "regime_change": "slow_step",
    "memory_drop": "gpu_drop",
    "memory_leak": "gpu_usage",
}
"""The event that reports live what a finding in numbers reports afterwards, where the names differ:
`explain --json` keeps its types."""

_ALIKE = 3
"""How many findings of each type to print in full. For the rest, only the steps are listed."""

_STEPS_SHOWN = 20
_FIRST, _LAST = 8, 3
"""How many steps to print in full from the beginning and from the end of a log."""


@command(
    "Understand",
    "miner-guard explain miner.log",
    "zcat old.log.gz | miner-guard explain -",
    "miner-guard explain steps.jsonl",
    "miner-guard explain --steps miner.log",
    "miner-guard explain hang_detected",
)
def explain(
    file: Annotated[
        Optional[str],
        typer.Argument(
            metavar="FILE|-|NAME",
            help="The log; - is stdin; or the name of an event or incident. Default: piped input, "
            "or the guard's own log if nothing is piped in or if --state-dir or --name is given.",
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="FILE is a file of per-step numbers; needed only for stdin and above 4 MiB.",
        ),
    ] = False,
    steps: Annotated[
        bool, typer.Option("--steps", help="Show the steps that `--attach log` reads from FILE.")
    ] = False,
    config: Config = None,
    name: AnyName = None,
    state_dir: State = None,
    as_json: Json = False,
) -> None:
    """Find the root cause and fixes in any log, or say what an event or incident means. Exit 1:
    nothing wrong."""
    if file is not None and _EVENT.fullmatch(file) and not Path(file).exists():
        _explain_name(file)
        return
    if file is None and name is None and state_dir is None and _is_piped():
        file = "-"
    if steps:
        _explain_steps(file or "-", open_context(config, DEFAULT_NAME, None), as_json)
        return
    place = (
        open_guard(config, name, state_dir)
        if file is None
        else open_context(config, name or DEFAULT_NAME, state_dir)
    )
    numbers = _read_trace(file or str(place.state.log), requested=trace, to_try=file is not None)
    if numbers is not None:
        from miner_guard.watch.progress import TrainingFacts

        settings = place.settings.config
        facts = TrainingFacts.from_settings(settings.miner, settings.gate)
        explain_trace(numbers, facts, as_json=as_json)
        return
    report = _read(file, place)
    if as_json:
        echo(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    else:
        echo(explanation(report, place.state if file is None else None))
        if file not in (None, "-") and report.root is not None and report.root.label == "cuda_oom":
            from miner_guard.cli.plan import savings

            with _opened(file) as log:
                for line in savings(log.read(_SETTINGS_BYTES).decode("utf-8", "replace")):
                    echo(line)
    if report.root is None:
        raise typer.Exit(FAILED)


def _read_trace(source: str, *, requested: bool, to_try: bool) -> Trace | None:
    """The trace in `source`, or None if it is a log. Unless asked for one, only a small regular
    file `to_try` is looked at: standard input can be read once.

    Raises Refused (64) if a trace was asked for and the file can't be read or has none.
    """
    from miner_guard.watch.trace_reading import read

    if not requested:
        path = Path(source)
        try:
            if not (to_try and path.is_file() and path.stat().st_size <= _MAX_TRACE_BYTES):
                return None
            with path.open(encoding="utf-8", errors="replace") as lines:
                trace = read(lines, only_values=True)
        except OSError:
            return None  # Reading it as a log says why.
        return trace if trace.used and not trace.others else None
    with open_text(source, "a trace file") as lines:
        trace = read(lines)
    if not trace.used:
        raise Refused(
            f"{source}: no trace lines in {counted(trace.lines, 'line')}; pass JSON "
            'lines such as {"step": 10, "loss": 2.45, "step_time": 15.2}, guard.jsonl, CSV with a '
            "header such as `step,loss,lr`, or lines such as `Step 10: loss=2.45, lr=6.67e-05`",
            USAGE,
        )
    return trace


def _explain_name(name: str) -> None:
    """Say what an event, an incident's label or a type of finding in numbers means.

    Raises Refused: 69 without a runbook, 64 for any other name.
    """
    from miner_guard.incidents import knowledge
    from miner_guard.incidents.explain import filled
    from miner_guard.show.runbook import rows

    if not rows():
        raise Refused(
            "this installation has no runbook; install miner-guard from a wheel or from source",
            UNAVAILABLE,
        )
    labels = knowledge.load().labels
    row, label = rows().get(_EVENT_OF_TYPE.get(name, name)), labels.get(name)
    if row is None and label is None:
        raise unknown_name("event or label", name, {*rows(), *labels, *_EVENT_OF_TYPE})
    if row is not None:
        echo(f"event    {row.event}\nmeans    {row.meaning}")
        echo(f"do       {row.action}\ngrep for {row.grep}")
        echo(f"earlier  miner-guard logs --event {row.event}")
    if label is not None:
        told = filter(None, (filled(fix.do, ()) for fix in label.fixes))
        fixes = "\n".join(f"      {n}. {fix}" for n, fix in enumerate(told, 1))
        echo(f"incident {label.name}\ncause    {filled(label.cause, ())}\nfixes\n{fixes}")


def _read(file: str | None, place: CommandContext) -> LogExplanation:
    """Explain a log, or without one the run that the state directory records. Raises Refused (64)
    if it can't be read or holds nothing."""
    from miner_guard.incidents import knowledge
    from miner_guard.incidents.explain import explain as read_log
    from miner_guard.incidents.explain import explain_events
    from miner_guard.incidents.oom import Training
    from miner_guard.record.redaction import Redactor
    from miner_guard.record.store import RunReader

    miner = place.settings.config.miner
    training = Training(miner.batch_size, miner.effective_batch_size)
    redact = Redactor.from_environment(os.environ).text
    if file is None:
        events = RunReader(place.state.db).events()
        if not events:
            raise Refused(
                f"there is no guard log in {place.state.root}; pass a log file, or pipe one in: "
                "miner-guard explain - < miner.log",
                USAGE,
            )
        return explain_events(events, knowledge.load(), training, redact)
    try:
        with _opened(file) as log, working("reading the log"):
            return read_log(log, knowledge.load(), training, redact)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(
            f"{file} can't be read: {reason}; pass a log file, or - for stdin", USAGE
        ) from error


def _is_piped() -> bool:
    """Return True if standard input is a pipe or a file. A terminal or /dev/null contains no
    log."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        # Without a descriptor, read any replacement for stdin.
        return sys.stdin is not None and not sys.stdin.closed


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin.isatty():
            raise Refused("pass a log file, or pipe one in: miner-guard explain < miner.log", USAGE)
        yield sys.stdin.buffer
        return
    with Path(file).open("rb") as log:
        if log.peek(2)[:2] == _GZIP:
            with gzip.open(log) as unpacked:
                yield cast(BinaryIO, _BoundedReader(unpacked, log))
        else:
            yield log


class _BoundedReader:
    """Reads a gzip file, but refuses one that expands too far: 300 KB can hold 300 MB of zeros."""

    def __init__(self, unpacked: gzip.GzipFile, packed: BinaryIO) -> None:
        self._unpacked, self._packed, self._size = unpacked, packed, 0

    def read(self, size: int) -> bytes:
        """Raises Refused (64) if the expansion ratio is too high for a log."""
        data = self._unpacked.read(size)
        self._size += len(data)
        if self._size > _UNPACKED_AT_ONCE + _MAX_RATIO * self._packed.tell():
            raise Refused(
                f"the file unpacks to more than {_MAX_RATIO} times its size, so it is probably not "
                "a log; if it is one, pass only its end: zcat FILE | tail -n 100000 | miner-guard "
                "explain -",
                USAGE,
            )
        return data


_REMARKS, _MOST_TOLD = ("loss_plateau", "overfit"), 10
"""Events that count as warnings at any level, and how many to quote."""


def explanation(report: LogExplanation, of: StateDir | None = None) -> str:
    """Render the report as text: what was observed, a hypothesis, and the one change to make.
    `of`: the state directory if the log is the guard's."""
    from miner_guard.record.store import RunReader

    root = report.root
    if root is None:
        read = counted(report.lines, "line") + ("" if of is None else f" of {of.db}")
        told = [] if of is None else RunReader(of.db).notable(_REMARKS, "warning", newest=True)
        if not told:
            return f"Nothing wrong found in {read}."
        lines = [f"  {each.ts[:19]}Z {each.headline}" for each in told[-_MOST_TOLD:]]
        return "\n".join([f"No failure found in {read}. The guard's last warnings:", *lines])
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
    others = [finding for finding in report.findings if not finding.root]
    rows += ["", "Also seen:"] if others else []
    rows += [f"  line {f.line}: {f.label}: {f.excerpt[:160]}" for f in others]
    if root.severity != "info":
        rows += ["", "Make one change, then check again."]
    return "\n".join(rows)


def explain_trace(trace: Trace, facts: TrainingFacts, *, as_json: bool) -> None:
    """Explain a trace. Exits with 1 if it is healthy: remarks (severity info) are no fault.

    The settings' batch sizes name the examples that caused a NaN.
    """
    from miner_guard.watch.curves import judge

    anomalies = judge(trace, facts)
    if as_json:
        echo(json.dumps({"findings": [document(a) for a in anomalies]}, ensure_ascii=False))
    else:
        for line in anomalies_text(trace, anomalies):
            echo(line)
    if all(a.severity == "info" for a in anomalies):
        raise typer.Exit(FAILED)


def document(anomaly: Anomaly) -> Mapping[str, Any]:
    """One finding as printed by `--json`."""
    names = ("type", "at_step", "severity", "detail", "fixes")
    return {name: getattr(anomaly, name) for name in names}


def anomalies_text(trace: Trace, anomalies: Sequence[Anomaly]) -> Iterator[str]:
    """Yield the findings as lines of text. Each type appears once with its evidence and fixes;
    repeats are listed by step."""
    counts = ", ".join(
        f"{len(series)} {name}" for name, series in trace.series.items() if len(series)
    )
    yield f"{trace.used} of {trace.lines} lines read: {counts or 'no numbers'}"
    if not anomalies:
        yield "Nothing wrong."
    for kind in dict.fromkeys(a.type for a in anomalies):
        alike = [a for a in anomalies if a.type == kind]
        for anomaly in alike[:_ALIKE]:
            yield f"{anomaly.severity.upper():8} {kind} at step {anomaly.at_step}: {anomaly.detail}"
        if len(alike) > _ALIKE:
            steps = [str(a.at_step) for a in alike[_ALIKE:]]
            more = f" and {len(steps) - _STEPS_SHOWN} more" if len(steps) > _STEPS_SHOWN else ""
            yield f"         also at steps {', '.join(steps[:_STEPS_SHOWN])}{more}"
        if alike[0].cause:
            yield f"         likely cause: {alike[0].cause}"
        for place, fix in enumerate(alike[0].fixes, 1):
            yield f"         {place}. {fix}"
    if any(a.severity != "info" for a in anomalies):
        yield "Make one change at a time, and note what helped."


def _explain_steps(file: str, place: CommandContext, as_json: bool) -> None:
    """Show which steps `--attach log` would read from a log. Exits with 1 if it reads none."""
    from miner_guard.watch.lines import check, patterns

    try:
        line_patterns = patterns(place.profile, place.settings.config.miner.log_patterns)
    except re.error as error:
        raise Refused(f"[miner] log_patterns: {error.pattern!r}: {error}", CONFIG) from error
    with open_text(file, "a log", "\n") as lines, working("reading the log"):
        result = check(lines, line_patterns)
    if as_json:
        document = {"lines": result.lines, "steps": result.steps, "nearest_misses": result.misses}
        echo(json.dumps(document, ensure_ascii=False))
    else:
        for line in steps_text(result):
            echo(line)
    if not result.steps:
        raise typer.Exit(FAILED)


def steps_text(result: LogCheck) -> Iterator[str]:
    """Yield the lines that show the result on a terminal: the first and the last steps."""
    rows = result.steps
    for at, row in enumerate(rows):
        if at == _FIRST and len(rows) > _FIRST + _LAST:
            yield f"… {len(rows) - _FIRST - _LAST} more …"
        if at < _FIRST or at >= len(rows) - _LAST:
            values = (f"{k} {v:g}" for k, v in row.items() if v is not None and k != "text")
            yield f"{', '.join(values)}   <- {row['text']}"
    counts = ", ".join(f"{name} on {n}" for name, n in result.counted().items())
    yield f"{counted(len(rows), 'step')} in {counted(result.lines, 'line')}: {counts}"
    if result.misses:
        yield "Not read as steps:"
    for miss in result.misses:
        yield f"  line {miss['line']}: {miss['text']!r}: {miss['why']}"
    if not rows:
        yield (
            "Add a pattern for the step lines to [miner] log_patterns in guard.toml, for example "
            r"'batch (?P<step>\d+) cost (?P<loss>\S+)', then check again with -c guard.toml"
        )
