"""The incidents monitor with a clock that the test advances, and lines that miners print."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Union

from miner_guard.config import Config
from miner_guard.rank.layout import StepRecord
from miner_guard.record.events import Event
from miner_guard.state_dir import StateDir
from miner_guard.system.clock import FakeClock
from miner_guard.watch.base import Exit, Launch
from miner_guard.watch.output import IncidentsMonitor
from tests.support.contexts import JobsAtOnce, context

OOM = (
    b"[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has "
    b"a total capacity of "
    b"24.00 GiB of which 1.00 GiB is free.\n"
)
WATCHDOG = (
    b"[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    b"OpType=ALLREDUCE)\n"
)
BUG = (
    b'Traceback (most recent call last):\n  File "/srv/miner/train.py", line 3, in '
    b"<module>\nKeyError: 'loss'\n"
)


KILLED = (
    b"torch/distributed/elastic/multiprocessing/api.py: failed (exitcode: -9) local_rank: 1 "
    b"(pid: 7416)\n"
)


Act = Union[bytes, float, Event, StepRecord, dict[str, Any]]


class Live:
    """The monitor under a clock that the test moves."""

    def __init__(self, tmp_path: Path, config: Config | None = None) -> None:
        self.oom_kills: Iterator[int] = count()
        """A kernel counter that reports one more kill each time it is read."""

        self.clock = FakeClock()
        self.events: list[Event] = []
        self.state = StateDir(tmp_path)
        self.monitor = IncidentsMonitor(
            context(
                tmp_path,
                config=config or Config(),
                clock=self.clock,
                emit=self.events.append,
                jobs=JobsAtOnce(),
                status=lambda: {"steps": 1},
            ),
            lambda: next(self.oom_kills),
        )
        self.launch()

    def launch(self, attempt: int = 0) -> None:
        self.events += self.monitor.on_launch(Launch(["miner"], 1, attempt, self.clock.monotonic()))

    def prints(self, text: bytes) -> None:
        self.events += self.monitor.on_output(text)

    def after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.events += self.monitor.on_tick(self.clock.monotonic(), {})

    def ends(self, *, code: int = 1, signal: int | None = None, asked: bool = False) -> None:
        self.events += self.monitor.on_exit(Exit(code, signal, asked, False, 10.0))

    def plays(self, *acts: Act) -> list[str]:
        """Output, seconds, the guard's events, one step and an exit, in their order; the labels of
        the incidents."""
        for act in acts:
            if isinstance(act, bytes):
                self.prints(act)
            elif isinstance(act, Event):
                self.events += self.monitor.on_event(act)
            elif isinstance(act, dict):
                self.ends(**act)
            elif isinstance(act, StepRecord):
                self.events += self.monitor.on_steps(1, [act])
            else:
                self.after(act)
        return self.labels

    @property
    def labels(self) -> list[str]:
        found = (f for f in self.events if f.name == "incident" and f.level != "info")
        return [str(f.fields["label"]) for f in found]
