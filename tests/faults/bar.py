"""`python -m tests.faults.bar FIRST LAST`: generated faults, and what became of the training.

A case is one fault (a signal, a failing system call, a namespace, or trouble around the run) in one
phase (start, run, restart, stop) of one process (the one in front, keeper, guard, launcher, rank,
helper). All that make sense are dealt out by seed, `PER_SEED` to a run, with random moments.

A case must prove that the miner steps and that its fault took effect, else it is invalid and fails.
It then checks that whoever was not hit lives on with the same pid; that training continues, or that
nothing is left in time; and at the end of each run that no step is missing from the record, except
around the death of a guard that none follows, that finished work was not run again, and that no
living miner was said to have exited. The report says who noticed, after how long, and how many
steps are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from miner_guard.exits import FAILED
from miner_guard.guard.control_socket import NotRunning, ask
from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded, kill_at_once, lives, living, stat_of, when
from tests.faults.injected import TROUBLES, Invalid, World, undo
from tests.faults.own_disk import OwnDisk
from tests.support.waiting import until

PHASES = ("start", "run", "restart", "stop")
PER_SEED = 9
GRACE_S = 2.0
STOP_S = GRACE_S + 2.0 + 12.0
"""The launcher's grace period, the time from SIGTERM to SIGKILL, and a margin for a loaded
machine."""

MAX_TRIES = 3
"""Of a signal to a process that is about to end anyway: it may be gone sooner."""

PATIENCE_S = 60.0
"""For what takes a second or two on an idle machine."""

KEEPER_GONE_S, BOTH_GONE_S = 3.0, 5.0
"""After the death of the keeper, or of keeper and guard, nothing may be left by then."""

GAP_S = 2.0
"""Around the death of a guard that none follows, steps may be missing for this long in all."""

SETTLE_S = 0.5
"""A guard that answers has read what the one before it left; this is for its disk."""

SETTINGS = {
    "miner.stop_timeout_s": GRACE_S,
    "restart.backoff_s": 0.1,
    "restart.max_restarts": 1000,
    "health.snapshot_every_s": 1,
    "logs.step_lines_per_s": 1000,
}


class TooLate(Invalid):
    """The process had ended before the signal."""


class Case(NamedTuple):
    """One fault in one phase of one process."""

    kind: str
    """`signal`, `call`, `namespace` or `trouble`."""

    fault: str
    phase: str
    who: str

    def __str__(self) -> str:
        return f"{self.phase}: {self.fault} -> {self.who}"


DEADLY = ("SIGKILL", "SIGSEGV", "SIGABRT")
SIGNALS = {
    "front": (*DEADLY, "SIGSTOP", "SIGUSR2"),
    "keeper": (*DEADLY, "SIGSTOP"),
    "guard": (*DEADLY, "SIGSTOP"),
    "launcher": (*DEADLY, "SIGSTOP", "SIGTERM"),
    "rank": (*DEADLY, "SIGSTOP", "SIGTERM"),
    "helper": (*DEADLY, "SIGSTOP"),
    "keeper and guard": ("SIGKILL",),
    "front and guard": ("SIGKILL",),
    "guard and launcher": ("SIGKILL",),
}

# The calls that each process makes in each phase; `left` out: those that it never makes there.
_AT_A_LAUNCH = ("fork EAGAIN", "pipe2 EMFILE", "open EMFILE", "read EIO")
_OF_A_KEEPER = ("waitpid EINTR", "recv EINTR", "send ENOBUFS", "opendir EMFILE", "epoll_wait EINTR")
_OF_THE_DISK = ("open EMFILE", "open EACCES", "open EROFS", "write ENOSPC", "write EIO")
_OF_RUN_DB = ("pwrite ENOSPC", "pwrite EIO", "fsync EIO")
CALLS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("keeper", "start"): (*_AT_A_LAUNCH, "socketpair EMFILE", "recv EINTR", "send ENOBUFS"),
    ("keeper", "run"): ("recv EINTR", "send ENOBUFS", "epoll_wait EINTR", "read EIO"),
    ("keeper", "restart"): (*_AT_A_LAUNCH, *_OF_A_KEEPER),
    ("keeper", "stop"): _OF_A_KEEPER,
    ("guard", "start"): (*_OF_THE_DISK, *_OF_RUN_DB),
    ("guard", "run"): (*_OF_THE_DISK, *_OF_RUN_DB, "recv EINTR", "recv ENOMEM", "send ENOBUFS"),
    ("guard", "restart"): (*_OF_THE_DISK, *_OF_RUN_DB, "recv EINTR", "accept EMFILE"),
    ("guard", "stop"): (*_OF_THE_DISK, *_OF_RUN_DB, "recv EINTR", "send ENOBUFS"),
    ("launcher", "start"): ("fork EAGAIN",),
    ("rank", "start"): ("memfd_create EPERM", "socket EMFILE", "connect EAGAIN"),
    ("rank", "run"): ("write EIO",),
    ("helper", "start"): ("open EMFILE", "read EIO", "write EPIPE"),
}

_MOUNT = ("unshare", "-m", "sh", "-c")
NAMESPACES: Mapping[str, tuple[str, ...]] = {
    "another network": ("unshare", "-n"),
    "another host name": ("unshare", "-u"),
    "pids, as the first": ("unshare", "-pf", "--mount-proc"),
    "pids": ("unshare", "-pf", "--mount-proc", "sh", "-c", '"$0" "$@"; exit $?'),
    "hidden state directory": (*_MOUNT, 'mount -t tmpfs -o ro none STATE; exec "$0" "$@"'),
    "no /proc": (*_MOUNT, 'mount -t tmpfs -o ro none /proc; exec "$0" "$@"'),
}


def all_cases() -> list[Case]:
    """Every case that makes sense, in a fixed order."""
    found = [
        Case("signal", name, phase, who)
        for who, names in SIGNALS.items()
        for name in names
        for phase in PHASES
        # At a start there is no helper yet, and nobody who would pass a signal on to a miner.
        if (phase, who) != ("start", "helper") and (phase == "run" or name != "SIGUSR2")
    ]
    found += [
        Case("call", call, phase, who) for (who, phase), calls in CALLS.items() for call in calls
    ]
    found += [Case("namespace", name, "start", "launcher") for name in NAMESPACES]
    found += [Case("trouble", each.__name__, "run", "guard") for each in TROUBLES]
    return found


def cases_of(seed: int) -> list[Case]:
    """The seed's share of the deck. Decks are shuffled, one after the other."""
    deck: list[Case] = []
    turn = 0
    while len(deck) < (seed + 1) * PER_SEED:
        new = all_cases()
        random.Random(turn).shuffle(new)
        deck += new
        turn += 1
    return sorted(deck[seed * PER_SEED :][:PER_SEED], key=lambda each: PHASES.index(each.phase))


def expected(case: Case) -> str:
    """What the fault does: `end` the run, replace the `guard`, relaunch the `miner`, or `nothing`;
    `either`: the miner may be relaunched."""
    if case.kind == "call":
        return "either" if case.fault.split()[0] in ("fork", "pipe2") else "nothing"
    if case.kind != "signal" or case.fault in ("SIGSTOP", "SIGUSR2"):
        return "nothing"
    if case.who.split()[0] in ("front", "keeper"):
        return "end"
    if case.who == "guard and launcher":
        return "miner"
    return {"guard": "guard", "launcher": "miner", "rank": "miner"}.get(case.who, "nothing")


class Order(ctypes.Structure):
    """What `failing_calls.c` shall do."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("skip", "left", "error", "pid", "hits")),
        ("role", ctypes.c_char),
        ("call", ctypes.c_char * 31),
    )


class Step(NamedTuple):
    """The rank's line about one step."""

    launch: int
    number: int
    end: float
    """Monotonic."""

    wall: float


@dataclass
class Outcome:
    """What became of one case."""

    case: Case
    began: float = 0.0
    """Wall time of the fault."""

    guard: Sequence[int] = ()
    """The guard's pid, if the fault killed it."""

    noticed: str = "nobody"
    after_s: float = 0.0
    missing: int = 0
    """Steps that are not in the record."""

    took_s: float = 0.0

    def __str__(self) -> str:
        after = f" after {self.after_s:.1f} s" if self.noticed != "nobody" else ""
        lost = f", {self.missing} steps missing" if self.missing else ""
        return f"{self.took_s:4.1f} s {self.case}: noticed by {self.noticed}{after}{lost}"


class Run:
    """One seed's cases, in one folder."""

    def __init__(self, seed: int, folder: Path, libraries: str) -> None:
        self.cases, self.random = cases_of(seed), random.Random(seed)
        self.outcomes: list[Outcome] = []
        self._folder, self._libraries = folder, libraries
        self._file, orders = folder / "steps", folder / "calls"
        orders.write_bytes(bytes(ctypes.sizeof(Order)))
        with orders.open("r+b") as opened:
            self._order = Order.from_buffer(mmap.mmap(opened.fileno(), 0))
        self._replaced: list[float] = []
        """When guards were killed whose steps the one after them may not have stored yet, in
        monotonic seconds."""

        self._deaths: list[tuple[float, float]] = []
        """From when to when nobody stored steps that are lost since then, in monotonic seconds."""

        self._checked = 0
        self._unrecorded: set[int] = set()
        """Launches whose ranks could not record their steps."""

        self._clock_stepped = False
        self._around: Sequence[str] = ()
        """The commands in front of the miner's."""

    def run(self) -> list[Outcome]:
        """Run the cases. Raises AssertionError naming the one that failed."""
        with mounted(self._folder) as disk:
            self._guarded = guarded = Guarded(self._folder)
            if disk is not None:
                guarded.state = StateDir(disk.place / "state")
            clock = self._folder / "clock"
            clock.write_text("0")
            self._world = World(guarded, disk, self.random, clock)
            try:
                for case in self.cases:
                    self._run_case(case)
                self._stop_in_order()
                self._check_run()
                self._note_who_noticed()
            except Exception as error:
                done = "".join(f"\n  {each}" for each in self.outcomes)
                raise AssertionError(
                    f"{case}: {error!r}\nafter{done}\n{waits_of(guarded)}\n{self._said()}"
                ) from error
            finally:
                if disk is not None:
                    disk.thaw()
                guarded.clean()
        return self.outcomes

    def _said(self) -> str:
        """The latest output, without the steps."""
        lines = self._guarded.tail().splitlines()
        return "\n".join(x for x in lines if " Step: " not in x and "launch " not in x)[-3000:]

    # --- one case ---

    def _run_case(self, case: Case) -> None:
        outcome, began = Outcome(case), time.monotonic()
        self.outcomes.append(outcome)
        inflict = {"signal": self._signal, "call": self._call, "trouble": self._trouble}
        for attempt in range(MAX_TRIES):
            before = self._prepare(case)
            try:
                inflict.get(case.kind, self._namespace)(case)
                break
            except TooLate:
                if attempt == MAX_TRIES - 1:
                    raise
                self._stop_in_order()
        if expected(case) == "end":
            self._see_the_end(case)
        elif case.phase == "stop":
            self._see_the_stop()
        else:
            self._see_training_go_on(case, before)
        outcome.began = time.time() - (time.monotonic() - self._began)
        outcome.took_s = time.monotonic() - began

    def _prepare(self, case: Case) -> Step | None:
        """Train, or for a fault at a start, do not; returns the last step."""
        before = None
        if case.phase == "start":
            self._stop_in_order()
        else:
            if self._around and case.who in MINER:
                # `unshare` ignores SIGTERM.
                self._stop_in_order()
            self._ensure_training()
            before = self._steps()[-1]
        self._pids = {who: self._world.pids(who) for who in ("guard", "launcher")} if before else {}
        self._began = time.monotonic()
        return before

    def _trigger(self, case: Case) -> None:
        """Begin the phase."""
        if case.phase == "start":
            self._start()
        elif case.phase == "restart" and (
            case.who.split()[-1] in MINER or self.random.random() < 0.5
        ):
            # A launcher that is asked to stop lives on for a moment.
            until(lambda: self._answers("restart"), PATIENCE_S, "nobody answers")
        elif case.phase == "restart":
            os.kill(self._world.pids("launcher")[0], signal.SIGKILL)
        elif (
            case.phase == "stop" and case.who in ("guard", "helper") and self.random.random() < 0.4
        ):
            self._file.with_suffix(".finish").touch()
        elif case.phase == "stop":
            self._guarded.processes[-1].send_signal(
                self.random.choice((signal.SIGTERM, signal.SIGINT))
            )

    def _answers(self, word: str) -> bool:
        with contextlib.suppress(NotRunning, OSError):
            return "error" not in ask(self._guarded.state, {"do": word}, PATIENCE_S)
        return False

    def _signal(self, case: Case) -> None:
        whom = case.who.split(" and ")
        if case.phase == "start":
            self._trigger(case)
        pids = [
            until(lambda each=each: self._world.pids(each), PATIENCE_S, f"no {each}")[0]
            for each in whom
        ]
        starts = [_start_of(pid) for pid in pids]
        if self._replaced and self._answers("status"):
            time.sleep(SETTLE_S)
            self._replaced.clear()
        if case.phase != "start":
            self._trigger(case)
        time.sleep(self.random.uniform(0.0, 0.1 if case.phase in ("restart", "stop") else 0.3))
        self._began = time.monotonic()
        number = signal.Signals[case.fault]
        heard = self._heard_usr2()
        if not all(starts) or not all(map(lives, pids)):
            raise TooLate(f"the {case.who} was gone before the signal")
        if len(pids) > 1:
            kill_at_once(*pids)
        else:
            os.kill(pids[0], number)
        if case.fault == "SIGSTOP":
            until(lambda: _state_of(pids[0]) in "TZX", 10, "not suspended")
            time.sleep(self.random.uniform(0.1, 1.0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGCONT)
        elif case.fault == "SIGUSR2":
            self._prove(lambda: self._heard_usr2() > heard, "the miner did not get it")
        else:
            for pid, start in zip(pids, starts, strict=True):
                self._prove(lambda pid=pid, start=start: _start_of(pid) != start, f"{pid} lives on")
        if expected(case) == "end" or ("guard" in whom and case.phase == "stop"):
            # While a guard starts, nobody stores steps: they are lost where it is killed by then,
            # together with the keeper.
            self._deaths.append((min([*self._replaced, self._began]), self._began))
            self._replaced.clear()
        elif "guard" in whom and case.fault in DEADLY:
            self._replaced.append(self._began)
        if "guard" in whom:
            self.outcomes[-1].guard = pids

    def _heard_usr2(self) -> int:
        with contextlib.suppress(OSError):
            return self._file.with_suffix(".usr2").stat().st_size
        return 0

    def _call(self, case: Case) -> None:
        if not self._libraries:
            raise Invalid("no C compiler")
        call, error = case.fault.split()
        pids = [] if case.phase == "start" else self._world.pids(case.who)
        self._order.pid = pids[0] if pids else 0
        self._order.role, self._order.call = ROLES[case.who], call.encode()
        self._order.error, self._order.hits = getattr(errno, error), 0
        # A start makes hundreds of some calls, most of them in Python itself.
        many = case.phase == "start" and call in ("open", "read")
        passed = (0, 100, 300, 600) if case.who == "guard" else (0, 5, 20)
        self._order.skip = self.random.choice(passed) if many else 0
        # Before it exits, the guard tries for 2 s, once a second.
        self._order.left = 1 if case.phase == "stop" else self.random.choice((1, 1, 2, 5))
        self._trigger(case)
        if case.phase == "stop":
            self._guarded.processes[-1].wait(STOP_S)
        self._prove(lambda: self._order.hits > 0, f"no {call} failed", 20.0)
        time.sleep(self.random.uniform(0.0, 0.3))
        self._order.left = 0
        if (case.who, case.phase) == ("rank", "start"):
            until(self._steps_since_began, PATIENCE_S, "no step")
            self._unrecorded.add(self._steps()[-1].launch)

    def _namespace(self, case: Case) -> None:
        state = str(self._guarded.state.root)
        self._start(
            [
                state if word == "STATE" else word.replace("STATE", state)
                for word in NAMESPACES[case.fault]
            ]
        )
        rank = until(lambda: self._world.pids("rank"), PATIENCE_S, "no rank")[0]
        kinds = ("net", "uts", "pid", "mnt")
        if all(
            os.readlink(f"/proc/{rank}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
            for kind in kinds
        ):
            raise Invalid("the rank is in no namespace of its own")

    def _trouble(self, case: Case) -> None:
        trouble = next(each for each in TROUBLES if each.__name__ == case.fault)
        self._clock_stepped |= trouble.__name__ == "clock_step"
        trouble(self._world)
        time.sleep(self.random.uniform(0.0, 0.5))
        undo(self._world)
        if "file" in case.fault:
            # The record may have been in it.
            self._checked = len(self._steps())
            self._deaths.append((time.monotonic(), time.monotonic()))

    def _prove(self, took_effect: Callable[[], object], why: str, seconds: float = 10.0) -> None:
        try:
            until(took_effect, seconds)
        except AssertionError as error:
            raise Invalid(why) from error

    # --- what follows ---

    def _see_training_go_on(self, case: Case, before: Step | None) -> None:
        restarts = case.phase == "restart" or (case.phase == "run" and expected(case) == "miner")

        front = self._guarded.processes[-1]

        def refused() -> bool:
            # Whatever started it has to start it again.
            return case.kind == "call" and case.phase == "start" and front.poll() is not None

        def steps_again() -> bool:
            after = self._steps_since_began()
            if before is not None and restarts:
                after = [step for step in after if step.launch != before.launch]
            return len(after) > 4

        until(lambda: refused() or steps_again(), PATIENCE_S, self._said)
        if refused():
            assert front.returncode == FAILED
            self._guarded.assert_nothing_left(KEEPER_GONE_S)
            return
        assert front.poll() is None, "the run ended"
        if case.phase != "run" or before is None:
            return
        if "guard" in case.who and case.fault in DEADLY:
            until(lambda: self._world.pids("guard") not in ([], self._pids["guard"]), PATIENCE_S)
        elif expected(case) != "either":
            assert self._world.pids("guard") == self._pids["guard"], "the guard was replaced"
        if expected(case) in ("guard", "nothing"):
            assert self._steps()[-1].launch == before.launch, "the miner was relaunched"
            assert self._world.pids("launcher") == self._pids["launcher"]

    def _see_the_end(self, case: Case) -> None:
        both = "guard" in case.who
        left_s = (BOTH_GONE_S if both else KEEPER_GONE_S) - (time.monotonic() - self._began)
        self._guarded.processes[-1].wait(PATIENCE_S)
        self._guarded.assert_nothing_left(max(0.5, left_s))
        self._check_run()

    def _see_the_stop(self) -> None:
        code = self._guarded.processes[-1].wait(STOP_S)
        assert code == 0, f"exit code {code}"
        left = living(self._guarded.token)
        assert not left, f"outlived an orderly stop: {left}"
        self._check_run()

    def _note_who_noticed(self) -> None:
        if self._clock_stepped:
            return
        ends = [*(outcome.began for outcome in self.outcomes[1:]), time.time()]
        for event in self._guarded.events:
            at = when(event)
            for outcome, end in zip(self.outcomes, ends, strict=True):
                killed = event["event"] == "guard_killed"
                its = event["pid"] in outcome.guard if killed else outcome.began < at < end
                if event["event"] in NOTICES and its and outcome.noticed == "nobody":
                    outcome.noticed, outcome.after_s = event["event"], at - outcome.began

    # --- the run ---

    @property
    def _running(self) -> bool:
        return bool(self._guarded.processes) and self._guarded.processes[-1].poll() is None

    def _start(self, around: Sequence[str] = ()) -> None:
        for suffix in (".finish", ".finished", ".again"):
            self._file.with_suffix(suffix).unlink(missing_ok=True)
        env = {
            "SHIFTED_CLOCK_STATE": str(self._world.clock),
            "FAILING_CALLS": str(self._folder / "calls"),
            "LD_PRELOAD": self._libraries,
        }
        self._around = around
        miner = [*around, *self._guarded.miner("pair", self._file)]
        self._guarded.start(miner, settings=SETTINGS, env=env)

    def _ensure_training(self) -> None:
        self._began = time.monotonic()
        if not self._running:
            self._start()
        self._prove(
            lambda: len(self._steps_since_began()) > 2, "the miner does not step", PATIENCE_S
        )

    def _stop_in_order(self) -> None:
        if self._running:
            self._guarded.processes[-1].send_signal(signal.SIGTERM)
            self._see_the_stop()

    def _steps(self) -> list[Step]:
        """The steps in the complete lines."""
        if not self._file.exists():
            return []
        text = self._file.read_text()
        rows = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
        return [Step(int(a), int(b), float(c), float(d)) for a, b, c, d in rows]

    def _steps_since_began(self) -> list[Step]:
        return [step for step in self._steps() if step.end > self._began]

    def _check_run(self) -> None:
        """Check what must hold for the run that has just ended."""
        steps = self._steps()
        new, self._checked = steps[self._checked :], len(steps)
        assert not self._file.with_suffix(".again").exists(), "finished work was run again"
        recorded = {event["inner_step"] for event in self._guarded.named("inner_step")}
        missing = [
            step
            for step in new
            if step.number not in recorded and step.launch not in self._unrecorded
        ]
        for step in missing:
            gaps = (max(first - step.end, step.end - last) for first, last in self._deaths)
            gap = min(gaps, default=GAP_S)
            assert gap < GAP_S, f"step {step.number} is missing, {gap:.1f} s from any end"
        longest_s = sum(GAP_S + last - first for first, last in self._deaths)
        assert len(missing) <= longest_s / 0.05, f"{len(missing)} steps are missing"
        self.outcomes[-1].missing += len(missing)
        exits = [] if self._clock_stepped else self._guarded.named("miner_exited")
        for launch in {step.launch for step in new}:
            walls = [step.wall for step in new if step.launch == launch]
            for event in exits:
                assert not walls[0] < when(event) < walls[-1] - 0.1, f"it lives: {event['msg']}"


def _state_of(pid: int) -> str:
    """`R`, `S`, `T` and so on; `X` if the process is gone."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[0]
    return "X"


def _start_of(pid: int) -> str:
    """When the process started; empty if it is gone, or a zombie."""
    with contextlib.suppress(OSError):
        fields = stat_of(pid)
        return "" if fields[0] in "ZX" else fields[19]
    return ""


MINER = ("launcher", "rank")
NOTICES = ("guard_killed", "miner_exited", "guard_degraded", "disk_full", "disk_stuck")
ROLES = {"keeper": b"k", "guard": b"g", "launcher": b"m", "rank": b"m", "helper": b"h"}


def waits_of(guarded: Guarded) -> list[str]:
    """Where in the kernel each process of the run is waiting."""
    found = []
    for pid, words in living(guarded.token):
        with contextlib.suppress(OSError):
            found.append(f"{pid} {words[:60]} {Path(f'/proc/{pid}/wchan').read_text()}")
    return found


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int = 32) -> Iterator[OwnDisk | None]:
    """A separate file system; None if mounting is not permitted."""
    try:
        disk = OwnDisk(folder, megabytes)
    except OSError:
        yield None
        return
    try:
        yield disk
    finally:
        disk.close()


def library(name: str, folder: Path) -> Path | None:
    """The library of this name in tests/support/fakes, compiled; None without a C compiler."""
    source = Path(__file__).resolve().parents[1] / "support" / "fakes" / f"{name}.c"
    built = folder / f"{name}.so"
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-builtin"]
    subprocess.run([compiler, *flags, "-o", str(built), str(source), "-ldl"], check=True)
    return built


def libraries(folder: Path) -> str:
    """The value of LD_PRELOAD for a run."""
    built = (library(name, folder) for name in ("shifted_clock", "failing_calls"))
    return ":".join(str(path) for path in built if path is not None)


def run_seeds(seeds: Sequence[int], folder: Path, at_once: int) -> list[str]:
    """Run the cases of these seeds, so many at once; prints the report. Returns what failed."""
    preload = libraries(folder)
    failed: list[str] = []

    def run(seed: int) -> None:
        own = folder / str(seed)
        own.mkdir()
        began = time.monotonic()
        try:
            cases = "".join(f"\n  {each}" for each in Run(seed, own, preload).run())
        except AssertionError as error:
            failed.append(f"seed {seed}: {error}")
            cases = f" FAILED: {error}"
        print(f"seed {seed}: {time.monotonic() - began:.0f} s{cases}", flush=True)
        shutil.rmtree(own)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, seeds))
    return failed


def main(first: str, last: str, at_once: str = "3") -> int:
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(int(first), int(last) + 1)
        failed = run_seeds(seeds, Path(folder), int(at_once))
    print(f"{len(failed)} of {len(seeds)} seeds with {PER_SEED} cases each failed")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
