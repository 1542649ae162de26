"""The miner's output passes through unchanged and never blocks the miner, whether anyone reads it
or not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from tests.faults.guarded import Guarded, until

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1, "logs.level": "critical"}
WRITE = "import os, sys\ndef put(fd, data):\n    while data: data = data[os.write(fd, data):]\n"


def start(guarded: Guarded, code: str, **popen: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITE + code]
    return guarded.start(command, "--no-restart", settings=FAST, stdout=subprocess.PIPE, **popen)


def run(guarded: Guarded, code: str, **popen: object) -> tuple[bytes, bytes, int]:
    """Both output streams of a guard that runs a Python program, read to the end."""
    guard = start(guarded, code, stderr=subprocess.PIPE, **popen)
    out, err = guard.communicate(timeout=120)
    return out, err, guard.returncode


def piped(guarded: Guarded, code: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """A guard whose output is a pipe."""
    guard = start(guarded, code, stderr=subprocess.DEVNULL)
    assert guard.stdout is not None
    return guard, guard.stdout


def test_both_streams_arrive_unchanged_and_apart(guarded: Guarded) -> None:
    code = "put(1, bytes(range(256)) * 1000 + b'\\xff\\xfe no newline'); put(2, b'to stderr')"
    out, err, status = run(guarded, code)
    assert status == 0
    assert out == bytes(range(256)) * 1000 + b"\xff\xfe no newline"
    assert err == b"to stderr"


def test_an_endless_line_arrives_whole_and_costs_no_memory(guarded: Guarded) -> None:
    size, limit = 65536 * 2048, 100e6
    assert size > limit, "a process that held the line would exceed the limit"
    # The guard samples itself after a second; a fast machine passes the line on in less.
    code = "import time\nfor _ in range(2048): put(1, b'x' * 65536)\ntime.sleep(3)"
    out, _, _ = run(guarded, code)
    assert hashlib.sha256(out).digest() == hashlib.sha256(b"x" * size).digest()
    assert guarded.named("health_snapshot")[-1]["snapshot"]["guard"]["memory_bytes"] < limit


def test_two_streams_to_one_place_keep_their_order(guarded: Guarded) -> None:
    code = "for n in range(2000): put(1 + n % 2, b'%d\\n' % n)"
    guard = guarded.start([sys.executable, "-c", WRITE + code], "--no-restart", settings=FAST)
    assert guard.wait(60) == 0
    numbers = [line for line in guarded.output.read_bytes().splitlines() if line.isdigit()]
    assert numbers == [b"%d" % n for n in range(2000)]


def test_a_slow_reader_slows_the_miner_and_loses_nothing(guarded: Guarded) -> None:
    guard, stdout = piped(
        guarded, "for n in range(400): put(1, b'%06d' % n + b'.' * 32761 + b'\\n')"
    )
    taken = 0
    first = time.monotonic()
    while time.monotonic() - first < 7.0:
        taken += len(os.read(stdout.fileno(), 16384))
        time.sleep(0.05)
    rest = stdout.read()
    assert guard.wait(60) == 0
    assert taken + len(rest) == 400 * 32768
    assert not guarded.named("guard_degraded", "GUARD DEGRADED: OUTPUT DROPPED")


def test_a_reader_that_stopped_reading_does_not_stop_the_miner(
    guarded: Guarded, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    code = (
        f"for _ in range(3000): put(1, b'y' * 32767 + b'\\n')\nopen({str(done)!r}, 'w').close()\n"
    )
    guard, _ = piped(guarded, code)
    until(done.exists, 150, "the miner to write 98 MB into a pipe without a reader")
    assert guard.wait(60) == 0
    dropped = sum(
        e["dropped_bytes"]
        for e in guarded.named("guard_degraded", "GUARD DEGRADED: OUTPUT DROPPED")
    )
    # Everything except what fits into the kernel's pipe.
    assert 98_304_000 - 4 * 1024 * 1024 <= dropped < 98_304_000


def test_a_reader_that_went_away_does_not_stop_the_miner(guarded: Guarded, tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = "import time\nfor _ in range(20): put(1, b'z' * 100000 + b'\\n'); time.sleep(0.02)\n"
    code += f"open({str(done)!r}, 'w').close()\n"
    guard, stdout = piped(guarded, code)
    stdout.close()
    assert guard.wait(60) == 0
    assert done.exists()


def test_an_orphan_that_holds_the_pipe_does_not_delay_the_end(guarded: Guarded) -> None:
    code = (
        "import subprocess; subprocess.Popen(['sleep', '600'], env={}, "
        "start_new_session=True); put(1, b'bye')"
    )
    started = time.monotonic()
    out, _, _ = run(guarded, code)
    assert out == b"bye"
    assert time.monotonic() - started < 60
