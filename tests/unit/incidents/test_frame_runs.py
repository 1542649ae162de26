"""The compiled path and the Python one find the same stack frames."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miner_guard.incidents import frame_runs as module
from miner_guard.incidents.frame_runs import FrameRun, frame_runs, frame_runs_in_python

compiled = pytest.mark.skipif(not module.COMPILED, reason="built without a compiler")

HEADER = b"Traceback (most recent call last):"
FRAME = b'  File "/srv/a.py", line 12, in step'
PREFIXES = st.sampled_from(
    [
        b"",
        b"",
        b"[rank0]: ",
        b"[rank12]: ",
        b"[default1]:",
        b"[rank123456]: ",
        b"[rank]: ",
        b"[rank1]:",
    ]
)
BODIES = st.sampled_from(
    [
        HEADER,
        HEADER + b"\r",
        HEADER + b" ",
        FRAME,
        FRAME + b"\r",
        b'  File "", line 1, in f',
        b'  File "a b\xff.py", line 7, in <module>',
        b'  File "x", line 7, in ',
        b'  File "x", line , in f',
        b'  File "x", line 7',
        b'  File "%s", line 7, in f' % (b"x" * 1000),
        b'  File "%s", line 7, in f' % (b"x" * 1001),
        b'    raise ValueError("no")',
        b"    raise ",
        b"    return f(x)",
        b"    ~~^~~",
        b"    ^^^^ \r",
        b"    ^\r^",
        b"    ",
        b"     indented",
        b"    \0",
        b"    \x0b",
        b"    \x0c",
        b"    \t",
        b"   three",
        b"ValueError: no",
        b"",
        b"\0",
        b"\r",
    ]
)
LINES = st.one_of(
    st.tuples(PREFIXES, BODIES).map(b"".join), st.binary(max_size=30), BODIES.map(lambda b: b[:-1])
)


@compiled
@given(st.lists(LINES, max_size=30), st.sampled_from([b"\n", b""]))
@example([FRAME], b"")
@example([HEADER, FRAME, b"    raise X", b"    \0", FRAME], b"\n")
def test_both_find_the_same_frames(lines: list[bytes], end: bytes) -> None:
    block = b"\n".join(lines) + end
    assert module._runs(block) == frame_runs_in_python(block)


@compiled
@pytest.mark.parametrize("seed", range(20))
def test_both_find_the_same_frames_in_damaged_tracebacks(seed: int) -> None:
    chance = random.Random(seed)
    line = b'[rank3]: Traceback (most recent call last):\n[rank3]:   File "/a b", line 1, in f\n'
    text = bytearray((line + b"[rank3]:     raise E\n[rank3]:     ~^\r\n") * 200)
    for _ in range(100):
        text[chance.randrange(len(text))] = chance.choice(b'\n\r" [:^Tx\0\xff1')
    assert module._runs(bytes(text)) == frame_runs_in_python(bytes(text))


@pytest.mark.parametrize("find", [frame_runs_in_python, module._runs])
def test_a_run_holds_its_rank_its_paths_and_its_last_raise(find: module.FindRuns) -> None:
    block = (
        b"step 1\n"
        b"[rank1]: Traceback (most recent call last):\n"
        b'[rank1]:   File "/a.py", line 1, in f\n'
        b"[rank1]:     raise ValueError(x)\n"
        b'[rank1]:   File "/b.py", line 2, in g\n'
        b"[rank1]:     raise KeyError(y)\n"
        b"[rank1]: KeyError: 3\n"
    )
    assert [FrameRun(*run) for run in find(block)] == [
        FrameRun(
            1,
            6,
            b"[rank1]: ",
            True,
            b"/a.py /b.py",
            b"    raise KeyError(y)",
            block[len(b"step 1\n") : -len(b"[rank1]: KeyError: 3\n")],
        )
    ]


@pytest.mark.parametrize("find", [frame_runs_in_python, module._runs])
def test_frames_without_their_newline_wait_for_the_next_block(find: module.FindRuns) -> None:
    assert find(FRAME) == []
    assert [run[1] for run in find(FRAME + b"\n    x = 1")] == [1]


def test_a_block_without_frames_has_none() -> None:
    assert frame_runs(b"loss 1.0\n") == []


@compiled
def test_a_block_that_is_not_bytes_is_refused() -> None:
    for wrong in ("text", None, bytearray(b"text"), 5):
        with pytest.raises(TypeError):
            module._runs(wrong)  # type: ignore[arg-type]


LEAKS = """
import sys
from miner_guard.incidents._frames import frame_runs
text = b'Traceback (most recent call last):\\n  File "/a", line 1, in f\\n    raise E\\nE: 1\\n' * 500
def allocated():
    before = sys.getallocatedblocks()
    for _ in range(50):
        frame_runs(text)
    return sys.getallocatedblocks() - before
allocated()
print(allocated())
"""


@compiled
def test_the_compiled_path_keeps_no_memory() -> None:
    """Runs in a separate process, where no other test's caches can grow."""
    done = subprocess.run([sys.executable, "-c", LEAKS], capture_output=True, text=True, check=True)
    assert abs(int(done.stdout)) < 100
