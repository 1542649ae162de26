"""Finds the line of its own program that a rank is executing, from a py-spy or faulthandler
dump."""

from __future__ import annotations

import pytest

from miner_guard.watch.evidence import innermost_user_frame, outside_the_collective, waits_for_ranks

PY_SPY = """Process 4242: python -u loops.py
Python v3.11.9 (/usr/bin/python3.11)

Thread 4250 (idle): "pin_memory"
    wait (threading.py:320)
    _pin_memory_loop (torch/utils/data/_utils/pin_memory.py:51)
Thread 4242 (idle): "MainThread"
    select (selectors.py:415)
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    fetch (loops.py:14)
    <module> (loops.py:30)
"""

FAULTHANDLER = """pid 4242

Thread 0x00007f00 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f11 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/x.py", line 2501 in all_reduce
  File "/home/miner/neurons/miner.py", line 812 in fetch
  File "/home/miner/neurons/miner.py", line 1200 in <module>
"""


@pytest.mark.parametrize(
    ("dump", "frame"),
    [
        (PY_SPY, "loops.py:14"),
        (FAULTHANDLER, "miner.py:812"),
        (
            'Thread 1 (idle): "MainThread"\n    wait (threading.py:320)\n    run (torch/x.py:7)\n',
            "threading.py:320",
        ),
        ("", None),
        ("Error: Permission Denied (os error 13)\n", None),
    ],
)
def test_the_innermost_line_of_the_program_itself(dump: str, frame: str | None) -> None:
    assert innermost_user_frame(dump) == frame


ASLEEP = """Thread 4243 (idle): "MainThread"
    stuck (inject.py:28)
    Optimizer.profile_hook_step.<locals>.wrapper (torch/optim/optimizer.py:538)
    <module> (with_fsdp.py:26)
"""


def test_the_rank_outside_the_collective_is_the_one_that_the_others_wait_for() -> None:
    """Under FSDP2 the guard must not report `no rank stands out` because no phase distinguishes the
    ranks."""
    assert [waits_for_ranks(dump) for dump in (PY_SPY, FAULTHANDLER, ASLEEP)] == [True, True, False]
    assert outside_the_collective({0: True, 1: False, 2: True}) == (1,)
    assert outside_the_collective({0: True, 1: True}) == ()
    assert outside_the_collective({0: False, 1: False}) == ()
