"""`python -m tests.faults.sequences SEED…`: random sequences of faults around a running guard.

A seed decides everything: which faults, in which order, and how the run ends. After each fault the
miner must still step; at the end nothing of the run may be left. See `Sequence.check`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from miner_guard.flight_recorder.reader import FlightReader
from miner_guard.state_dir import StateDir
from miner_guard.system.sockets import address
from tests.faults.guarded import Guarded
from tests.support.waiting import until

STEP_S = 0.02
GRACE_S = 2
MAX_GAP_S = 1.0
"""Between two steps of 20 ms, on a machine that runs other tests too: a step that waited for the
guard's disk, lock or process waited longer than any fault here lasts at least."""

MAX_HOOK_SHARE = 0.05
"""Of the training's time inside the hook."""

STOP_S = GRACE_S + 2.0 + 12.0
"""The launcher's grace, SIGTERM to SIGKILL, and what a loaded machine needs for the rest."""

SETTINGS = {
    "miner.stop_timeout_s": GRACE_S,
    "restart.backoff_s": 0.1,
    "health.snapshot_every_s": 1,
    "health.sample_every_s": 1,
}
_DISK_MB = 24


@dataclass
class World:
    """What the faults act on."""

    guarded: Guarded
    disk: Path | None
    """Mount point of the state directory's own file system, where one could be made."""

    random: random.Random
    clock: Path
    steps: Path
    frozen: bool = field(default=False)

    @property
    def guard(self) -> int:
        return self.guarded.processes[-1].pid

    def own_processes(self) -> list[int]:
        """The guard's children but the miner."""
        children = Path(f"/proc/{self.guard}/task/{self.guard}/children").read_text().split()
        token = self.guarded.token.encode()
        found = []
        for pid in map(int, children):
            with contextlib.suppress(OSError):
                if token not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found


Fault = Callable[[World], str]


def harmless_signal(world: World) -> str:
    names = ("SIGUSR2", "SIGCHLD", "SIGWINCH", "SIGCONT", "SIGTTOU", "SIGPIPE")
    number = signal.Signals[world.random.choice(names)]
    os.kill(world.guard, number)
    return number.name


def stopped_for_a_while(world: World) -> str:
    os.kill(world.guard, signal.SIGSTOP)
    time.sleep(world.random.uniform(0.1, 1.5))
    os.kill(world.guard, signal.SIGCONT)
    return "SIGSTOP, SIGCONT"


def killed_helper(world: World) -> str:
    helpers = world.own_processes()
    if not helpers:
        return "no helper to kill"
    pid = world.random.choice(helpers)
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:80]
        os.kill(pid, signal.SIGKILL)
        return f"SIGKILL to {name}"
    return "a helper that was gone"


def all_helpers_killed(world: World) -> str:
    for pid in world.own_processes():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return "SIGKILL to all helpers"


FILES = (
    "control.sock",
    "flight/rank-0000.bin",
    "flight/rank-0000.live",
    "flight/rank-0000.stacks",
    "gate-inputs.json",
    "guard.jsonl",
    "guard.sock",
    "host.json",
    "lock",
    "run.json",
    "status.json",
    "status/monitoring_costs.json",
    "watched.json",
)
"""By name, not by what is there: a seed must always choose the same. Not the ledger: SQLite
maps one of its files."""


def lost_file(world: World) -> str:
    path = world.guarded.state.root / world.random.choice(FILES)
    path.unlink(missing_ok=True)
    return f"removed {path.name}"


def cut_file(world: World) -> str:
    path = world.guarded.state.root / world.random.choice(FILES)
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
    return f"cut {path.name}"


def full_disk(world: World) -> str:
    if world.disk is None:
        return "no disk of its own"
    ballast = world.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    time.sleep(world.random.uniform(0.5, 2.0))
    ballast.unlink()
    return "full disk"


def frozen_disk(world: World) -> str:
    if world.disk is None:
        return "no disk of its own"
    subprocess.run(["fsfreeze", "-f", str(world.disk)], check=True)
    world.frozen = True
    time.sleep(world.random.uniform(1.0, 3.0))
    thaw(world)
    return "frozen disk"


def thaw(world: World) -> None:
    if world.frozen:
        subprocess.run(["fsfreeze", "-u", str(world.disk)], check=True)
        world.frozen = False


def clock_step(world: World) -> str:
    seconds = world.random.choice([-10, -3600, 3600, 86400, -86400, 800_000_000, -800_000_000])
    world.clock.write_text(str(seconds))
    return f"clock {seconds:+d} s"


def output_flood(world: World) -> str:
    """The guard passes SIGUSR1 on; the miner prints a megabyte."""
    os.kill(world.guard, signal.SIGUSR1)
    return "a megabyte of output"


def datagram_flood(world: World) -> str:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        contextlib.suppress(OSError),
        address(world.guarded.state.socket) as name,
    ):
        sender.setblocking(False)
        for _ in range(5000):
            data = world.random.choice([b'{"bell": 7}', b"\xff{", b"[]", b"x" * 60000])
            with contextlib.suppress(BlockingIOError):
                sender.sendto(data, name)
    return "datagrams"


def connection_flood(world: World) -> str:
    with contextlib.ExitStack() as held, contextlib.suppress(OSError):
        for _ in range(150):
            client = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            with address(world.guarded.state.control) as name:
                client.connect(name)
    return "connections"


FAULTS: tuple[Fault, ...] = (
    harmless_signal,
    stopped_for_a_while,
    killed_helper,
    all_helpers_killed,
    lost_file,
    cut_file,
    full_disk,
    frozen_disk,
    clock_step,
    output_flood,
    datagram_flood,
    connection_flood,
)

ENDS = ("SIGTERM", "SIGINT", "SIGINT SIGINT", "SIGQUIT", "SIGKILL", "SIGKILL to all its processes")


class Sequence:
    """One seed's run."""

    def __init__(self, seed: int, folder: Path, clock_library: Path | None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.done: list[str] = []
        self._library = clock_library
        self._folder = folder

    def run(self) -> str:
        """Make it all happen; what happened, in words. Raises AssertionError naming the seed."""
        guarded = Guarded(self._folder)
        with mounted(self._folder) as disk:
            if disk is not None:
                guarded.state = StateDir(disk / "state")
            clock, steps = self._folder / "clock", self._folder / "steps"
            world = World(guarded, disk, self.random, clock, steps)
            try:
                self._start(world)
                for _ in range(self.random.randint(2, 6)):
                    fault = self.random.choice(FAULTS)
                    self.done.append(fault(world))
                    time.sleep(self.random.uniform(0.0, 1.0))
                    self._check(world)
                self._end(world)
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                raise AssertionError(
                    f"seed {self.seed}: {', '.join(self.done)}: {error!r}\n{guarded.tail()[-1500:]}"
                ) from error
            finally:
                thaw(world)
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
        until(lambda: world.steps.exists() and len(steps_of(world)) > 20, 60, world.guarded.tail)
        self._ready_at = steps_of(world)[-1][1]

    def _check(self, world: World) -> None:
        """The guard and its miner live, and the miner stepped all the time."""
        assert world.guarded.processes[-1].poll() is None, "the guard ended"
        before = steps_of(world)[-1][0]
        until(lambda: steps_of(world)[-1][0] > before + 5, 10, "the next steps")
        self._check_steps(world)

    def _check_steps(self, world: World) -> None:
        steps = [step for step in steps_of(world) if step[1] >= self._ready_at]
        numbers = [number for number, _, _ in steps]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "the miner restarted"
        gaps = [later[1] - earlier[1] for earlier, later in itertools.pairwise(steps)]
        assert max(gaps) < MAX_GAP_S, f"a step waited {max(gaps):.2f} s"
        share = sum(inside for _, _, inside in steps) / (steps[-1][1] - steps[0][1])
        assert share < MAX_HOOK_SHARE, f"{share:.1%} of the time in the hook"

    def _end(self, world: World) -> None:
        end = self.random.choice(ENDS)
        self.done.append(end)
        guard = world.guarded.processes[-1]
        began = time.monotonic()
        if end == "SIGKILL to all its processes":
            for pid in (*world.own_processes(), guard.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            for name in end.split():
                guard.send_signal(signal.Signals[name])
        code = guard.wait(STOP_S)
        if "SIGKILL" not in end:
            assert code == 0, f"exit code {code}"
            assert not alive(world), "something outlived an orderly stop"
        killed = sum("last-resort" in words or "all helpers" in words for words in self.done)
        if end == "SIGKILL to all its processes" or ("SIGKILL" in end and killed > 1):
            # Nobody is left to end the rest, or may be: one that is killed again and again is
            # started with pauses. Then this is the next guard's first duty.
            settings = {**SETTINGS, "miner.finite": "true"}
            world.guarded.start(["true"], settings=settings)
            assert world.guarded.processes[-1].wait(60) == 0
        world.guarded.assert_nothing_left(max(1.0, STOP_S - (time.monotonic() - began)))
        self._check_record(world, exact="SIGKILL" not in end)

    def _check_record(self, world: World, *, exact: bool) -> None:
        """No step is lost: the record has them all, but for the last second of a killed guard."""
        steps = steps_of(world)
        reader = FlightReader(world.guarded.state.flight_of(0))
        recorded = {step.inner_step for step in reader.steps()}
        first = max(1, steps[-1][0] - 4000)
        allowed = 0 if exact else int(3.0 / STEP_S)
        wanted = range(first, steps[-1][0] + 1 - allowed)
        missing = [number for number in wanted if number not in recorded]
        assert not missing, f"{len(missing)} steps are not in the record, {missing[:3]} …"


def alive(world: World) -> bool:
    """Whether a process of the run lives."""
    try:
        world.guarded.assert_nothing_left(0.0)
    except AssertionError:
        return True
    return False


def steps_of(world: World) -> list[tuple[int, float, float]]:
    """(number, monotonic end, seconds in the hook) of each whole line."""
    found = []
    for line in world.steps.read_text().splitlines():
        words = line.split()
        if len(words) == 3:
            found.append((int(words[0]), float(words[1]), float(words[2])))
    return found


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path | None]:
    """An ext4 file system of its own, which can be filled and frozen; None where that is not
    permitted."""
    image, place = folder / "image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(_DISK_MB * 1024 * 1024)
    mount = ["mount", "-o", "loop", str(image), str(place)]
    for command in (["mkfs.ext4", "-q", str(image)], mount):
        found = shutil.which(command[0])
        if found is None or subprocess.run(command, capture_output=True).returncode != 0:
            yield None
            return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        image.unlink()


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


def main(seeds: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as base:
        library = clock_library(Path(base))
        for seed in seeds:
            folder = Path(base) / seed
            folder.mkdir()
            began = time.monotonic()
            try:
                words = Sequence(int(seed), folder, library).run()
                print(f"{seed}: ok, {time.monotonic() - began:.0f} s: {words}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{seed}: FAILED: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
