"""The guard does not keep retrying what a restart cannot fix."""

from __future__ import annotations

import sys

import pytest

from tests.faults.guarded import Guarded

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.65 GiB "
    "of which 1.10 GiB is free."
)


DEFECT = 'Traceback (most recent call last):\n  File "/srv/train.py", line 3, in <module>\n'
UNKNOWN, TYPO = (
    f"{DEFECT}ValueError: shard 12 has 31 tokens",
    f"{DEFECT}SyntaxError: invalid syntax",
)


@pytest.mark.parametrize(
    ("line", "starts"), [(OOM, 2), (TYPO, 2), (UNKNOWN, 4), ("nothing that is known", 4)]
)
def test_the_same_cause_again_ends_it_sooner_than_the_budget(
    guarded: Guarded, line: str, starts: int
) -> None:
    code = (
        f"import sys, time; print({line!r}, file=sys.stderr, flush=True); time.sleep(0.2); "
        "sys.exit(1)"
    )
    guarded.start([sys.executable, "-c", code], "--max-restarts", "3", settings=FAST)
    assert guarded.processes[0].wait(60) == 75
    assert len(guarded.named("miner_started")) == starts
    end = guarded.named("crash_loop")[0]["detail"]
    assert ("again after a restart" in end) == (starts == 2), end
    guarded.assert_nothing_left()


GONE = "NVRM: Xid (PCI:0000:17:00): 79, pid=1234, GPU has fallen off the bus."
STRANGER = (
    "bittensor: Hotkey 5F3sa2TJAWMqDhXG6jhV4N8ko9SxwGy8TpaNS1repo5EYjQX is not registered "
    "on netuid 38"
)


@pytest.mark.parametrize(
    ("line", "advice"), [(GONE, "restart the container"), (STRANGER, "egister")]
)
def test_a_fault_that_only_a_person_can_fix_ends_with_what_to_do(
    guarded: Guarded, line: str, advice: str
) -> None:
    code = (
        f"import sys, time; print({line!r}, file=sys.stderr, flush=True); time.sleep(0.2); "
        "sys.exit(1)"
    )
    guarded.start([sys.executable, "-c", code], settings=FAST)
    assert guarded.processes[0].wait(60) == 75
    assert len(guarded.named("miner_started")) == len(guarded.named("incident")) == 2
    assert advice in guarded.named("crash_loop")[0]["detail"]
    guarded.assert_nothing_left()
