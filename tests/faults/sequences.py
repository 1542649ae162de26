"""`python -m tests.faults.sequences SEED…`: random sequences of faults around a running guard.

The seed determines everything: which faults, in which order, and how the run ends. After each fault
the miner must still step. Three invariants hold after each sequence: a stop ends the guard within
its grace; none of the run's processes is left; no step is lost, and the guard took at most 5 % of
the training time. `FIRST-LAST` stands for all seeds from FIRST to LAST.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded, living
from tests.faults.injected import FAULTS, RELAUNCHES, World
from tests.faults.own_disk import OwnDisk
from tests.support.waiting import until

STEP_S = 0.02
GRACE_S = 2
MAX_GAP_S = 1.0
"""Maximum gap between two 20 ms steps on a machine that runs other tests too: a step that waited
for the guard's disk, lock or process would have waited longer than this, because every fault here
lasts longer."""

MAX_GUARD_SHARE = 0.05
"""Maximum share of the training time spent inside the hook and in writes to the guard's pipe."""

STOP_S = GRACE_S + 2.0 + 12.0
"""The launcher's grace period, the time from SIGTERM to SIGKILL, and a margin for a loaded
machine."""

SETTINGS = {
    "miner.stop_timeout_s": GRACE_S,
    "restart.backoff_s": 0.1,
    "restart.max_restarts": 1000,
    "health.snapshot_every_s": 1,
    "logs.step_lines_per_s": 1000,
}

_WARM_UP = 20

ENDS = ("SIGTERM", "SIGINT", "SIGINT SIGINT", "SIGQUIT", "SIGKILL", "SIGKILL to all its processes")


class Step(NamedTuple):
    """The miner's line about one step."""

    pid: int
    number: int
    end: float
    """Monotonic."""

    in_guard_s: float


class Sequence:
    """One seed's run."""

    def __init__(self, seed: int, folder: Path, clock_library: Path | None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.done: list[str] = []
        self._library = clock_library
        self._folder = folder

    def run(self) -> str:
        """Run the sequence; returns a description of what happened. Raises AssertionError naming
        the seed."""
        guarded = Guarded(self._folder)
        with mounted(self._folder) as disk:
            if disk is not None:
                guarded.state = StateDir(disk.place / "state")
            clock, steps = self._folder / "clock", self._folder / "steps"
            world = World(guarded, disk, self.random, clock, steps)
            try:
                self._start(world)
                for _ in range(self.random.randint(2, 6)):
                    self._trouble(world)
                self._end(world)
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                raise AssertionError(
                    f"seed {self.seed}: {', '.join(self.done)}: {error!r}\n"
                    f"{waits_of(guarded)}\n{guarded.tail()[-1500:]}"
                ) from error
            finally:
                if disk is not None:
                    disk.thaw()
                guarded.clean()
        return ", ".join(self.done)

    def _start(self, world: World) -> None:
        world.clock.write_text("0")
        env = {"SHIFTED_CLOCK_STATE": str(world.clock)}
        if self._library is not None:
            env["LD_PRELOAD"] = str(self._library)
        world.guarded.start(
            world.guarded.miner("steady", world.steps, STEP_S), settings=SETTINGS, env=env
        )
        until(
            lambda: world.steps.exists() and len(steps_of(world)) > 3 * _WARM_UP,
            60,
            world.guarded.tail,
        )

    def _trouble(self, world: World) -> None:
        before = steps_of(world)[-1]
        relaunch = self.random.random() < 0.1
        fault = self.random.choice(RELAUNCHES if relaunch else FAULTS)
        launches = world.launches
        self.done.append(fault(world))
        time.sleep(self.random.uniform(0.0, 1.0))
        assert world.guarded.processes[-1].poll() is None, "the guard ended"
        if world.launches > launches:
            until(lambda: steps_of(world)[-1].pid != before.pid, 60, "the next launch")
        latest = steps_of(world)[-1]
        until(lambda: steps_of(world)[-1].number > latest.number + 5, 30, "the next steps")
        self._check_steps(world)

    def _check_steps(self, world: World) -> None:
        """Check that each launch's steps follow each other, that none waited for the guard, and
        that the miner started as often as the faults imply."""
        each_launch = itertools.groupby(steps_of(world), lambda step: step.pid)
        launches = [list(steps) for _, steps in each_launch]
        assert len(launches) <= world.launches, "the miner restarted"
        # The first steps include the hook's late imports.
        launches = [own[_WARM_UP:] for own in launches if len(own) > 2 * _WARM_UP]
        for own in launches:
            numbers = [step.number for step in own]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a step is lost"
            gaps = [later.end - earlier.end for earlier, later in itertools.pairwise(own)]
            assert max(gaps, default=0.0) < MAX_GAP_S, f"a step waited {max(gaps):.2f} s"
        trained_s = sum(own[-1].end - own[0].end for own in launches)
        share = sum(step.in_guard_s for own in launches for step in own) / trained_s
        assert share < MAX_GUARD_SHARE, f"{share:.1%} of the time in the guard"

    def _end(self, world: World) -> None:
        end = self.random.choice(ENDS)
        frozen = world.disk is not None and self.random.random() < 0.2
        if world.disk is not None and frozen:
            world.disk.freeze()
            self.done.append("a disk frozen to the end")
        self.done.append(end)
        began = time.monotonic()
        killed = "SIGKILL" in end
        self._signal(world, end)
        code = _ended(world.guarded.processes[-1])
        if not killed:
            assert code == 0, f"exit code {code}"
            # A writer that a frozen disk holds in the kernel ends when the disk thaws.
            left = living(world.guarded.token)
            assert frozen or not left, f"outlived an orderly stop: {left}"
        if world.disk is not None:
            world.disk.thaw()
        if killed and self._needs_successor(world, end):
            world.guarded.start(["true"], settings={**SETTINGS, "miner.finite": "true"})
            assert world.guarded.processes[-1].wait(60) == 0
        world.guarded.assert_nothing_left(max(1.0, STOP_S - (time.monotonic() - began)))
        self._check_output(world)
        if not killed:
            self._check_record(world)

    def _signal(self, world: World, end: str) -> None:
        guard = world.guarded.processes[-1]
        if end == "SIGKILL to all its processes":
            for pid in (*world.helpers(), guard.pid):
                world.send(pid, signal.SIGKILL)
            return
        for name in end.split():
            guard.send_signal(signal.Signals[name])

    def _needs_successor(self, world: World, end: str) -> bool:
        """Whether the deputy may be gone too: after repeated kills the keeper
        restarts it with pauses. The next guard then begins by cleaning up."""
        kills = sum("last-resort" in words or "all helpers" in words for words in self.done)
        return end == "SIGKILL to all its processes" or kills > 1

    def _check_output(self, world: World) -> None:
        """Check that every line of every launch arrived, in order."""
        numbers: dict[str, int] = {}
        output = world.guarded.output.read_bytes()
        for match in re.finditer(rb"launch (\d+) line (\d+)\n", output):
            launch, number = match[1].decode(), int(match[2])
            assert number == numbers.get(launch, 0) + 1, f"after line {number - 1}: {match[0]!r}"
            numbers[launch] = number

    def _check_record(self, world: World) -> None:
        """Check that the guard has seen all steps of the last launch."""
        last = steps_of(world)[-1]
        printed = world.guarded.output.read_bytes().rpartition(b"MINER STARTED")[2]
        seen = {int(number) for number in re.findall(rb"\| Inner Step: (\d+) \|", printed)}
        launched = {step.number for step in steps_of(world) if step.pid == last.pid}
        missing = sorted(launched - seen)
        assert not missing, f"{len(missing)} steps are not in the record, {missing[:3]} …"


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code. Raises AssertionError if the guard takes longer than `STOP_S`, excluding the
    time that it waited for a processor, which on a busy machine is most of it."""
    began, before_s = time.monotonic(), _delayed_s(process.pid)
    while (code := process.poll()) is None:
        delayed_s = _delayed_s(process.pid) - before_s
        late_s = time.monotonic() - began - STOP_S - delayed_s
        assert late_s < 0, f"it has not ended; it waited {delayed_s:.1f} s for a processor"
        time.sleep(0.02)
    return code


def _delayed_s(pid: int) -> float:
    """Seconds during which the main thread was ready but did not run."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def waits_of(guarded: Guarded) -> list[str]:
    """Where in the kernel each thread of the last guard is waiting."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{guarded.processes[-1].pid}/task").iterdir():
            found.append(f"{(task / 'comm').read_text()[:-1]} {(task / 'wchan').read_text()}")
    return found


def steps_of(world: World) -> list[Step]:
    """The steps in the complete lines."""
    found = []
    for line in world.steps.read_text().splitlines():
        words = line.split()
        if len(words) == 4:
            found.append(Step(int(words[0]), int(words[1]), float(words[2]), float(words[3])))
    return found


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[OwnDisk | None]:
    """A separate file system; None if mounting is not permitted."""
    try:
        disk = OwnDisk(folder)
    except OSError:
        yield None
        return
    try:
        yield disk
    finally:
        disk.close()


def clock_library(folder: Path) -> Path | None:
    """The library that shifts the clock; None without a C compiler."""
    source = Path(__file__).resolve().parents[1] / "support" / "fakes" / "shifted_clock.c"
    library = folder / "shifted_clock.so"
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def seeds_of(words: list[str]) -> Iterator[int]:
    """The seeds that the command line names."""
    for word in words:
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main(words: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as base:
        library = clock_library(Path(base))
        for seed in seeds_of(words):
            folder = Path(base) / str(seed)
            folder.mkdir()
            began = time.monotonic()
            try:
                verdict = f"ok: {Sequence(seed, folder, library).run()}"
            except AssertionError as error:
                failed += 1
                verdict = f"FAILED: {error}"
            load = os.getloadavg()[0]
            print(
                f"{seed}: {time.monotonic() - began:.0f} s, load {load:.0f}: {verdict}", flush=True
            )
            shutil.rmtree(folder)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
