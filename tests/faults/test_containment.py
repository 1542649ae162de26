"""Everything that the miner starts ends with the miner and with the guard, however the guard
ends."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from miner_guard.state_dir import StateDir
from tests.faults.guarded import Guarded, kill_at_once, lives, living, stat_of, until
from tests.faults.seccomp import PIDFDS, refuse

FAST = {"miner.stop_timeout_s": 1, "restart.backoff_s": 0.1}


def started(guarded: Guarded, miner: str, words: bytes, **popen: Any) -> None:
    """Start a guard and wait until its miner has all of its children."""
    guarded.start(
        guarded.miner(miner, *(["stay"] if miner == "process_tree" else [])), settings=FAST, **popen
    )
    until(lambda: words in guarded.output.read_bytes(), 60, guarded.tail)


def _kill_guard(guarded: Guarded, number: int = signal.SIGKILL) -> None:
    guarded.processes[-1].send_signal(number)
    guarded.processes[-1].wait(60)


def test_a_killed_guard_takes_every_kind_of_descendant_with_it(guarded: Guarded) -> None:
    """After SIGKILL, which the OOM killer also sends, none of the guard's handlers runs."""
    started(guarded, "process_tree", b"family complete")
    _kill_guard(guarded)
    guarded.assert_nothing_left(15)


@pytest.mark.parametrize("who", ["keeper", "keeper and guard", "front", "front and guard"])
def test_whichever_of_them_is_killed_the_other_ends_the_run(guarded: Guarded, who: str) -> None:
    """Children that cleared their environment and left their session included: the kernel gives
    them to whoever is left."""
    started(guarded, "shedding", b"all hidden")
    pids = {"keeper": guarded.keeper_pid, "front": guarded.processes[0].pid}
    pids["guard"] = guarded.guard_pid
    kill_at_once(*(pids[each] for each in who.split(" and ")))
    guarded.processes[0].wait(60)
    guarded.assert_nothing_left(5.0 if "guard" in who else 3.0)
    assert not any(lives(pid) for pid in pids.values())


def test_suspended_helpers_still_end_with_a_killed_guard(guarded: Guarded) -> None:
    """Suspended helpers once waited for a SIGCONT forever after the guard was killed. A random
    sequence found this."""
    often = {"MINER_GUARD_HEALTH__SNAPSHOT_EVERY_S": "0.5"}
    started(guarded, "shedding", b"all hidden", env=often)
    helpers = until(lambda: _helpers(guarded), 60, guarded.tail)
    for pid in helpers:
        # Under load, a sampler may be abandoned and replaced.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    _kill_guard(guarded)
    guarded.assert_nothing_left(15)
    until(lambda: not any(lives(pid) for pid in helpers), 15, "the helpers' end")


def _helpers(guarded: Guarded) -> list[int]:
    """The children of keeper and guard, once there are at least two, each three seconds old: a
    helper arms its signal when it starts."""
    found: list[int] = []
    try:
        for parent in (guarded.processes[-1].pid, guarded.keeper_pid, guarded.guard_pid):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                for pid in (thread / "children").read_text().split():
                    if guarded.token not in Path(f"/proc/{pid}/cmdline").read_text():
                        found.append(int(pid))
        ages = [time.time() - psutil.Process(pid).create_time() for pid in found]
    except (OSError, psutil.Error):
        return []
    return found if len(found) >= 2 and min(ages) > 3 else []


@pytest.mark.parametrize("pattern", ["miner.guard", "python"])
def test_pkill_by_the_guards_name_leaves_nothing(guarded: Guarded, pattern: str) -> None:
    """`pkill -9 -f PATTERN`, limited to this test's processes: it once killed the guard together
    with the process that should have ended its miner."""
    started(guarded, "shedding", b"all hidden")
    run = [guarded.guard_pid, guarded.processes[-1].pid, guarded.keeper_pid]
    run += [pid for pid, _ in (*living(guarded.token), *living(str(guarded.state.root)))]
    for pid in dict.fromkeys(run):
        # The guard's helpers come and go.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if re.search(pattern, words):
                os.kill(pid, signal.SIGKILL)
    guarded.processes[-1].wait(60)
    guarded.assert_nothing_left(15)


def test_a_state_directory_behind_a_symlink_is_the_same_one(
    guarded: Guarded, tmp_path: Path
) -> None:
    """A cleanup under one name once missed two processes that a guard had started under the
    other."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    guarded.state = StateDir(tmp_path / "link" / "state")
    guarded.start(["sleep", "600"], settings=FAST)
    guarded.wait_for("miner_started")
    guarded.kill_everything_that_watches()
    guarded.state = StateDir(tmp_path / "disk" / "state")
    guarded.start(["true"], settings={**FAST, "miner.finite": "true"})
    assert guarded.processes[-1].wait(60) == 0
    guarded.assert_nothing_left(1)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_without_pidfds_the_miner_is_signalled_anyway(guarded: Guarded, error: int) -> None:
    """Before Linux 5.3, and in old containers, the guard never signalled the miner, and the log
    blamed a D state."""
    started(
        guarded,
        "process_tree",
        b"family complete",
        preexec_fn=functools.partial(refuse, error, *PIDFDS),
    )
    assert guarded.stop(signal.SIGTERM) == 0
    guarded.assert_nothing_left(0.5)
    assert not [e for e in guarded.named("guard_degraded") if "did not exit" in e["what"]]


def cpu_s(pid: int) -> float:
    """CPU seconds of this process alone. Raises OSError once it is gone."""
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("children", [300, pytest.param(3000, marks=pytest.mark.long)])
def test_many_deaf_children_are_stopped_soon_after_the_grace(
    guarded: Guarded, children: int
) -> None:
    """Stopping 3,000 took 24 to 50 s, because the guard read every environment of the host 50 times
    a second."""
    guarded.start(guarded.miner("deaf", children), settings=FAST)
    until(lambda: b"all deaf" in guarded.output.read_bytes(), 60, guarded.tail)
    guard = guarded.processes[-1]
    before = used = cpu_s(guard.pid)
    guard.send_signal(signal.SIGTERM)
    while guard.poll() is None:
        with contextlib.suppress(OSError):
            used = cpu_s(guard.pid)
        time.sleep(0.02)
    assert guard.returncode == 0
    guarded.assert_nothing_left(0.5)
    # CPU rather than wall time, because this machine may be doing other work. One pass over 3,000
    # takes 0.1-0.3 s.
    assert used - before < 1.0 + children / 500, "a few passes over the children"
    assert len(guarded.named("orphan_killed")) == 51
