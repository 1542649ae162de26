"""First step: reports a miner that has not shown a step yet, and quotes the output line that looks
most like one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from miner_guard.attach.check import quoted
from miner_guard.attach.patterns import patterns
from miner_guard.detectors.log_lines import Patterns, read
from miner_guard.detectors.step_grammar import Miss, StepLine
from miner_guard.eventlog.catalog import Finding, make_finding
from miner_guard.monitors.base import Context, Exit, Launch, Monitor
from miner_guard.rank.layout import Now, StepRecord

_WHY_NO_STEP = {
    None: "no rank has called miner_guard.init(). Either the miner has not got that far, or it "
    "never calls the hook; in that case, start it with --attach sn38, auto or log",
    "sn38": "--attach sn38 found nothing to hook in this miner; try --attach auto or log",
    "auto": (
        "--attach auto found no torch training loop in this miner; try --attach log, or "
        "call the hook"
    ),
    "log": (
        "none of the miner's lines was recognized as a step; describe the step lines in [miner] "
        "log_patterns"
    ),
}
"""Why a live miner shows no steps, and what to do, by attach mode."""

_PERSISTS_S = 60.0
"""How long the miner may print step-like lines before a rank must report a step. A working hook
reports within seconds."""

_MAX_LINES = 2_000
"""Maximum number of lines to parse per launch: parsing one with the grammar takes as long as
relaying hundreds."""

_IS_A_STEP = 3
"""Score of a line that the grammar parses as a step; a `Miss` scores lower."""


class FirstStepMonitor(Monitor):
    """Watches each launch until its first step, a hang or a stop."""

    name = "first_step"
    words = frozenset({b"step", b"iter", b"loss", b"epoch", b"batch", b"it/s", b"s/it"})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._begin(None)

    def _begin(self, launch: Launch | None) -> None:
        """Reset the state for a new launch."""
        self._launch = launch
        """None if no launch is running, or after a step, a hang or a stop."""

        self._lines = 0
        self._nearest: tuple[int, str] | None = None
        """The line that looks most like a step: its score, and the text to quote."""

        self._nearest_at = 0.0
        """When the first line that resembles a step arrived."""

        self._noticed = self._warned = False

    @cached_property
    def _patterns(self) -> Patterns:
        # Compiled only when a line could be a step: most miners report steps through the hook.
        return patterns(self.context.config.miner.profile)

    def on_launch(self, launch: Launch) -> Iterable[Finding]:
        self._begin(launch)
        return ()

    def on_exit(self, end: Exit) -> Iterable[Finding]:
        self._begin(None)
        return ()

    def on_steps(self, rank: int, steps: Sequence[StepRecord]) -> Iterable[Finding]:
        self._begin(None)
        return ()

    def on_finding(self, finding: Finding) -> Iterable[Finding]:
        if finding.event in ("hang_detected", "miner_stopping"):
            self._begin(None)
        return ()

    def reads_lines(self) -> bool:
        found = self._nearest is not None and self._nearest[0] >= _IS_A_STEP
        return self._launch is not None and not found and self._lines < _MAX_LINES

    def on_lines(self, lines: Sequence[bytes]) -> Iterable[Finding]:
        for raw in lines:
            if not self.reads_lines():
                break
            self._lines += 1
            text = raw.decode("utf-8", "replace")
            parsed = read(text, self._patterns)
            if isinstance(parsed, StepLine) and parsed.loss is not None:
                self._note(_IS_A_STEP, repr(quoted(text)))
            elif isinstance(parsed, StepLine):
                self._note(1, f"{quoted(text)!r}: it has no loss")
            elif isinstance(parsed, Miss):
                self._note(parsed.nearness, f"{quoted(text)!r}: {parsed.why}")
        return ()

    def _note(self, nearness: int, text: str) -> None:
        if self._nearest is None:
            self._nearest_at = self.context.clock.monotonic()
        if self._nearest is None or nearness > self._nearest[0]:
            self._nearest = (nearness, text)

    def on_tick(self, now: float, ranks: Mapping[int, Now]) -> Iterable[Finding]:
        if self._launch is None:
            return ()
        hang, waited = self.context.config.hang, now - self._launch.started
        hooked = bool(ranks) and self.context.config.miner.attach != "log"
        # Before this, leave it to the hang monitor to report a miner that hangs.
        blind = waited > hang.first_step_s + _PERSISTS_S
        if blind and not self._warned and not hooked:
            self._warned = True
            return [self._degraded(waited)]
        persists = self._nearest is not None and now - self._nearest_at > _PERSISTS_S
        if waited <= hang.first_step_notice_s or self._warned or (self._noticed and not persists):
            return ()
        self._noticed, self._warned = True, persists
        return [
            make_finding(
                "no_step_yet",
                level="warning" if persists else "info",
                waited_s=round(waited, 1),
                detail=self._detail(ranks),
                nearest=None if self._nearest is None else self._nearest[1],
            )
        ]

    def _detail(self, ranks: Mapping[int, Now]) -> str:
        attach = self.context.config.miner.attach
        if self._nearest is None:
            if ranks and attach != "log":
                header = ranks[min(ranks)]
                place = header.operation or header.phase or "no named phase"
                return f"rank {min(ranks)} is in {place}"
            return (
                "none of the miner's lines looks like a step either; the miner may still be loading"
            )
        nearness, text = self._nearest
        if attach == "log":
            return (
                f"the nearest line is {text}; describe the step lines in [miner] log_patterns, and "
                "check with `miner-guard attach-check FILE`"
            )
        if nearness < _IS_A_STEP:
            return f"the line that most resembles a step is {text}"
        return (
            f"the miner prints steps, such as {text}, but no rank reports any: "
            f"{_WHY_NO_STEP[attach]}"
        )

    def _degraded(self, waited: float) -> Finding:
        nearest = "" if self._nearest is None else f"; the nearest line is {self._nearest[1]}"
        return make_finding(
            "guard_degraded",
            what=f"no step seen for {waited / 60:.0f} min, so the guard cannot see slow "
            f"steps or hangs either: {_WHY_NO_STEP[self.context.config.miner.attach]}{nearest}",
        )

    def snapshot(self) -> Mapping[str, Any]:
        return {"waiting": self._launch is not None}
