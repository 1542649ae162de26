"""How fast the guard searches a miner's output for incidents, compared with `cat` and `grep`, and
how much memory a whole log takes."""

from __future__ import annotations

import base64
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from miner_guard.incidents import knowledge
from miner_guard.incidents.scan import Scanner
from tests.benchmarks.frame import Row

TITLE = "Incidents: searching the miner's output"
_CHUNK = 65536
_LINES = 300_000
_EXPLAIN = (
    "import sys; from miner_guard.cli import main; sys.exit(main.run(['explain', '--json', "
    "sys.argv[1]]))"
)


def run() -> list[Row]:
    """Measures ordinary output, output that never repeats, and tracebacks, then a large log with
    `explain`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "miner.log"
        log.write_bytes(ordinary(_LINES))
        megabytes = log.stat().st_size / 1e6
        scan = megabytes / _seconds(lambda: _scan(log))
        rows = [
            Row("scanner, ordinary output", scan, "MB/s"),
            Row("scanner, every line of a new shape", _rate(ever_new(40_000)), "MB/s"),
            Row("scanner, tracebacks only", _rate(tracebacks(2_000)), "MB/s"),
            *(
                Row(f"scanner, {name}", _rate(text), "MB/s", ">= 2 MB/s")
                for name, text in hostile().items()
            ),
        ]
        cat = megabytes / _seconds(lambda: _run("cat", str(log)))
        rows.append(Row("`cat` of the same file", cat, "MB/s"))
        rows += _grep(log, Path(folder), megabytes, scan)
        rows.append(_memory(Path(folder)))
        return rows


def ordinary(lines: int) -> bytes:
    """The output of subnet 38's miner while nothing is wrong."""
    chance = random.Random(1)
    return b"".join(
        b"\x1b[32m2026-01-02 03:04:%02d.%03d\x1b[0m | INFO     | Rank %d | Outer Step: 56 | "
        b"Inner Step: %d | "
        b"Learning Rate: 0.00002100 | Average Loss: %.4f\n"
        % (n % 60, n % 1000, n % 4, n, chance.uniform(2, 4))
        for n in range(lines)
    )


def ever_new(lines: int) -> bytes:
    """Lines that never repeat: the worst case for the cache of templates."""
    chance = random.Random(2)
    word = "abcdghjklpqsuvwyz"
    return b"".join(
        " ".join("".join(chance.choices(word, k=7)) for _ in range(14)).encode() + b"\n"
        for _ in range(lines)
    )


def tracebacks(count: int) -> bytes:
    """Only errors: the slowest kind of text."""
    frame = (
        '  File "/srv/miner/part_{0}.py", line {0}, in step_{0}\n    raise '
        'ValueError("case {0} failed")\n'
    )
    return "".join(
        "Traceback (most recent call last):\n"
        + frame.format(n) * 6
        + f"ValueError: case {n} failed with error {n}\n"
        for n in range(count)
    ).encode()


def worded_tracebacks(count: int) -> bytes:
    """Tracebacks that differ in words and paths, not just in numbers."""
    chance = random.Random(7)

    def word() -> str:
        return "".join(chance.choices("abcdefghijklmnop", k=7))

    return "".join(
        "Traceback (most recent call last):\n"
        + "".join(
            f'  File "/srv/miner/{word()}.py", line {n}, in {word()}\n'
            f'    raise ValueError("case {word()} failed")\n'
            for _ in range(6)
        )
        + f"ValueError: case {word()} failed with error {word()}\n"
        for n in range(count)
    ).encode()


def long_tracebacks(count: int) -> bytes:
    """Tracebacks of 25 frames, drawn from a program's 200."""
    chance = random.Random(4)
    frames = [
        '  File "/srv/lib/python3.11/site-packages/{0}/{1}.py", line {n}, in {2}\n'
        "    return self.{2}({3})\n".format(
            *("".join(chance.choices("abcdefgh", k=7)) for _ in range(4)), n=n
        )
        for n in range(200)
    ]
    return "".join(
        "Traceback (most recent call last):\n"
        + "".join(chance.choices(frames, k=25))
        + f"RuntimeError: shard {n} failed\n"
        for n in range(count)
    ).encode()


def hostile() -> dict[str, bytes]:
    """Text without an error that once held up the guard."""
    chance = random.Random(5)
    raw = chance.randbytes(3_000_000)

    def metagraph(extra: str) -> bytes:
        neuron = (
            '{"uid":%d,"hotkey":"5F%030x","coldkey":"5G%030x","stake":%f,"axon":"10.0.0.1:8091"'
        )
        return ",".join(
            neuron % (uid, chance.getrandbits(120), chance.getrandbits(120), chance.random())
            + f"{extra}}}"
            for uid in range(256)
        ).encode()

    plain = metagraph("")
    return {
        "base64 on one line": base64.b64encode(raw) + b"\n",
        "base64 in lines": base64.encodebytes(raw),
        "random bytes": raw,
        "NULs": bytes(4_000_000),
        "a metagraph of 256 neurons a line": (b'{"neurons":[' + plain + b"]}\n") * 100,
        "metagraphs on one line": plain * 100 + b"\n",
        "a metagraph whose keys are trigger words": (
            b'{"neurons":[' + metagraph(',"error":null,"timeout":12,"failed":0') + b"]}\n"
        )
        * 100,
        "a metagraph full of trigger words": (
            b'{"neurons":['
            + metagraph(',"permission":"denied? no wallet","status":"error 429, retrying"')
            + b"]}\n"
        )
        * 100,
        "one word of a pattern over and over": b"hotkey " * 500_000 + b"\n",
        "trigger words on lines of a megabyte": (
            b"wallet permission denied password hotkey " * 25_000 + b"\n"
        )
        * 3,
    }


def _scan(log: Path) -> None:
    scanner = Scanner(knowledge.load())
    with log.open("rb") as file:
        while chunk := file.read(_CHUNK):
            scanner.feed(chunk)
    scanner.finish()


def _rate(content: bytes) -> float:
    scanner = Scanner(knowledge.load())

    def feed() -> None:
        for start in range(0, len(content), _CHUNK):
            scanner.feed(content[start : start + _CHUNK])

    return len(content) / 1e6 / _seconds(feed)


def _grep(log: Path, folder: Path, megabytes: float, scan: float) -> list[Row]:
    """`grep` for the same words: the literals of all patterns, ignoring case as the scanner
    does."""
    if shutil.which("grep") is None:
        return [Row("`grep` with the same words", None, "MB/s", note="no grep here")]
    words = sorted({word for pattern in knowledge.load().patterns for word in pattern.has})
    # Leave out words of two or three letters, which the scanner tries only on lines with a trigger
    # word.
    (folder / "words").write_text("\n".join(word for word in words if len(word) > 3))
    (folder / "triggers").write_bytes(
        b"|".join(knowledge.load().triggers.words).replace(b"^", rb"\^")
    )
    pattern = (folder / "triggers").read_text()
    fixed = megabytes / _seconds(
        lambda: _run("grep", "-i", "-F", "-c", "-f", str(folder / "words"), str(log))
    )
    extended = megabytes / _seconds(lambda: _run("grep", "-i", "-E", "-c", pattern, str(log)))
    return [
        Row(f"`grep -i -F` with {len(words)} literals of the patterns", fixed, "MB/s"),
        Row(
            f"`grep -i -E` with the {len(knowledge.load().triggers.words)} trigger words",
            extended,
            "MB/s",
        ),
        Row(
            "scanner / `grep -i -E`",
            scan / extended,
            "x",
            note="the scanner counts lines and classifies, too",
        ),
    ]


def _memory(folder: Path) -> Row:
    """Growth of `explain`'s peak memory from a small log to one 50 times as large."""
    block = ordinary(20_000)
    peaks = []
    for name, times in (("small", 2), ("large", 100)):
        path = folder / name
        with path.open("wb") as file:
            for _ in range(times):
                file.write(block)
        peaks.append(_peak(path))
        path.unlink()
    note = (
        f"{peaks[0]:.0f} MB for {2 * len(block) / 1e6:.0f} MB, {peaks[1]:.0f} MB for "
        f"{100 * len(block) / 1e6:.0f} MB"
    )
    return Row(
        "`explain`: growth of peak memory, log 50 times as large",
        peaks[1] - peaks[0],
        "MB",
        "<= 5 MB",
        note,
    )


def _peak(path: Path) -> float:
    code = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], "
        "sys.argv[2]], "
        "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, _EXPLAIN, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(answer.stdout) / 1024


def _run(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


def _seconds(work: Callable[[], None]) -> float:
    """The fastest of three runs, because the machine may be busy."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
