"""A log that contains the guard's own lines: its events are evidence, and its own signals are not
faults."""

from __future__ import annotations

import json

import pytest

from miner_guard.watch.ranks import Straggler
from tests.unit.incidents.helpers import incidents, root

HANG = (
    "2026-01-02 03:04:05 CRITICAL ERROR ❌ HANG DETECTED: rank 1 in data for 912s, ranks 0,2,3 "
    "waiting in allreduce\n"
    "2026-01-02 03:04:05 INFO MINER STOPPING: hang: rank 1, 30s to stop\n"
    "W1121 torch.distributed.elastic.agent.server.api: Received Signals.SIGTERM death signal, "
    "shutting down workers\n"
    "[rank0]: torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got "
    "signal: 15\n"
    "2026-01-02 03:04:09 ERROR ❌ MINER EXITED: signal SIGTERM after 912s\n"
)
OOM = (
    "2026-01-02 03:04:05 ERROR ❌ INCIDENT cuda_oom: The GPU had no room. Seen: CUDA out of "
    "memory Fix: a smaller batch\n"
)
STARTED = "2026-01-02 03:05:05 INFO 🚀 MINER STARTED: pid 71: python neurons/miner.py\n"
STEPS = "".join(f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in range(5))


def test_a_hang_that_the_guard_found_is_the_cause_and_its_own_sigterm_is_not() -> None:
    """`explain` once answered `user_interrupt: not a fault of the run`."""
    assert root(HANG) == "hang"
    assert root("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n" + HANG) == "cuda_oom", (
        "the rank that stood still"
    )


def test_a_straggler_is_the_cause_if_nothing_worse_is_in_the_log() -> None:
    """`explain` once answered `Nothing wrong found` for a run at a third of its speed."""
    for evidence, phase in (
        ("over 20 steps: it waits 0.05s in collectives, the others wait 0.60s", None),
        ("over 20 steps", "data"),
        ("it enters 19 of 20 collectives 0.60s after the others", None),
    ):
        line = f"STRAGGLER: rank 1 {Straggler(1, 0.6, 0.92, evidence, phase).detail()}"
        log = f"2026-01-02 03:04:05 WARNING {line}\n"
        assert root(log + STEPS) == "straggler"
        assert root(log + HANG) == "hang"
        assert root(log + OOM) == "cuda_oom"
    for earlier in (
        "longer than the others by 60% of a 0.92s step",
        "60% of a 0.92s step longer than the others",
    ):
        assert root(f"STRAGGLER: rank 1 works {earlier}\n") == "straggler", (
            "an earlier version's line"
        )
    assert root("straggler: rank 3 is 12% below the mean\n") is None, "another program's judgement"


def test_an_incident_that_the_guard_named_counts_and_the_words_of_its_fix_do_not() -> None:
    assert root(OOM) == "cuda_oom"
    assert root(OOM.replace("cuda_oom", "of_nobody")) is None
    assert (
        root("failed (exitcode: -9) local_rank: 0\n" + OOM.replace("cuda_oom", "nccl_timeout"))
        == "host_oom_kill"
    )


def test_the_latest_launch_that_showed_something_counts() -> None:
    assert root(OOM + STARTED + HANG) == "hang"
    assert root(OOM + STARTED + STEPS) == "cuda_oom", "why it was started again"


def test_a_record_of_the_guard_is_judged_by_its_line_alone() -> None:
    record = {
        "ts": "2026-01-02T03:04:05Z",
        "level": "error",
        "event": "incident",
        "run_id": "r",
        "host": "h",
        "rank": 1,
        "msg": "INCIDENT hf_auth: The Hub refused. Seen: 401 Fix: Log in.",
        "fixes": ["CUDA out of memory", "No space left"],
    }
    assert root(json.dumps(record) + "\n") == "hf_auth"


def test_what_the_guard_does_and_measures_is_no_evidence() -> None:
    """ORPHAN KILLED of a daemon of the swarm became `dht_unreachable`, a HEALTH line a full disk."""
    for level in ("", "2026-01-02 03:04:05 WARNING ", "2026-01-02 03:04:05 INFO 🩺 "):
        for line in (
            "ORPHAN KILLED: pid 12 (p2pd: failed to find any peer in table) of an earlier run",
            "HEALTH miner running, no space left on device: /data",
            "UPLOAD FAILED: CUDA out of memory",
        ):
            assert root(f"{level}{line}\n") is None
    assert root("no space left on device: /data\n") == "disk_full"


LOAD = 'Traceback (most recent call last):\n  File "/m/train.py", line 3, in step\n    f()\n'
FULL = "OSError: [Errno 28] No space left on device: '/d'\n"


@pytest.mark.parametrize(
    "launch",
    [STARTED, "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"],
)
def test_the_last_attempt_is_the_answer_and_earlier_ones_are_listed(launch: str) -> None:
    """The IndentationError of the first run once beat the second one's full disk."""
    listed = incidents(f"IndentationError: unexpected indent\n{launch}{STEPS}{FULL}".encode())
    assert [(i.label, i.root) for i in listed] == [("code_bug", False), ("disk_full", True)]


@pytest.mark.parametrize("error", ["torch.OutOfMemoryError: CUDA out of memory.\n", "Odd: x\n"])
def test_progress_after_a_handled_error_closes_it(error: str) -> None:
    """A handled out-of-memory error once stayed the root after 500 healthy steps."""
    steps = "".join(f"Outer Step: 3 | Inner Step: {n} | Loss: 3.40\n" for n in range(500))
    assert root(LOAD + error + steps) is None
    assert root(LOAD + error) is not None
