"""The numbers in out-of-memory messages of every PyTorch version, and the order of fixes that they
imply."""

from __future__ import annotations

import pytest

from miner_guard.incidents import oom
from miner_guard.incidents.knowledge import Fix
from miner_guard.incidents.oom import Training

GIB = 1 << 30
MIB = 1 << 20

MESSAGES = {
    "torch 0.4": (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 11.17 GiB total "
        "capacity; "
        "10.48 GiB already allocated; 14.69 MiB free; 355.81 MiB cached)",
        {
            "gpu": 1,
            "tried": 20 * MIB,
            "total": 11.17 * GIB,
            "allocated": 10.48 * GIB,
            "free": 14.69 * MIB,
        },
    ),
    "torch 1.13": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; "
        "15.90 GiB total capacity; "
        "9.00 GiB already allocated; 1.00 GiB free; 14.00 GiB reserved in total by PyTorch) If "
        "reserved memory",
        {"tried": 1.5 * GIB, "reserved": 14 * GIB, "unallocated": 5 * GIB, "free": GIB},
    ),
    "torch 2.0": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 2 "
        "has a total capacty of "
        "23.69 GiB of which 50.50 MiB is free. Including non-PyTorch memory, this process has "
        "23.64 GiB memory in use. "
        "Of the allocated memory 22.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved "
        "by PyTorch but "
        "unallocated.",
        {
            "gpu": 2,
            "total": 23.69 * GIB,
            "in_use": 23.64 * GIB,
            "unallocated": 300 * MIB,
            "others": 0,
        },
    ),
    "torch 2.3, others": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 "
        "GiB of which 1.00 GiB is "
        "free. Process 4242 has 12.00 GiB memory in use. Process 99 has 11.00 GiB memory in "
        "use. Of the allocated "
        "memory 10.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated.",
        # 12 + 11 + 10 GiB do not fit into 24: the one with 11 is the process itself, by its number
        # on the host.
        {"others": 12 * GIB, "free": GIB},
    ),
    "torch 2.5, itself in a container": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 2 has a "
        "total capacity of 79.10 "
        "GiB of which 1.19 GiB is free. Process 4414 has 77.90 GiB memory in use. Of the "
        "allocated memory 74.03 GiB is "
        "allocated by PyTorch, and 2.45 GiB is reserved by PyTorch but unallocated.",
        {"others": 0, "allocated": 74.03 * GIB},
    ),
    "torch 2.5, a neighbour": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a "
        "total capacity of 79.10 "
        "GiB of which 1.19 GiB is free. Process 99 has 40.00 GiB memory in use. Process 7 has "
        "37.90 GiB memory in use. "
        "Of the allocated memory 36.03 GiB is allocated by PyTorch, and 1.45 GiB is reserved by "
        "PyTorch but "
        "unallocated.",
        {"others": 40 * GIB},
    ),
    "source 003": (
        "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.90 GiB "
        "total; 14.32 GiB allocated; "
        "237.56 MiB free; 14.89 GiB reserved in total by PyTorch)",
        {"total": 15.9 * GIB, "allocated": 14.32 * GIB, "reserved": 14.89 * GIB},
    ),
    "apple": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.45 GB, other allocations: "
        "584.12 MB, max allowed: "
        "18.13 GB). Tried to allocate 256.00 MB on private pool.",
        {"tried": 256 * MIB, "allocated": 17.45 * GIB, "total": 18.13 * GIB},
    ),
    "rocm, nothing free": (
        "HIP out of memory. Tried to allocate 34.00 MiB. GPU 1 has a total capacity of 63.98 "
        "GiB of which 0 bytes is "
        "free.",
        {"free": 0, "total": 63.98 * GIB},
    ),
}


KINDS = {
    "torch 1.13": "fragmentation",
    "torch 2.3, others": "others",
    "torch 2.5, a neighbour": "others",
    "apple": "full",
    "rocm, nothing free": "full",
}


@pytest.mark.parametrize("era", MESSAGES)
def test_numbers_of_every_era_and_what_they_mean(era: str) -> None:
    message, expected = MESSAGES[era]
    numbers = oom.parse(message)
    for name, value in expected.items():
        assert getattr(numbers, name) == pytest.approx(value, rel=1e-6, abs=1 << 20), name
    assert numbers.kind == KINDS.get(era, "full")


def test_a_message_without_numbers_is_unknown_and_keeps_the_usual_order() -> None:
    numbers = oom.parse("RuntimeError: CUDA error: out of memory")
    assert numbers.kind == "unknown"
    usual = [Fix("a", "one"), Fix("b", "two")]
    assert oom.fixes(numbers, usual, Training()) == usual


def test_fragmentation_is_fixed_before_the_batch_is_made_smaller() -> None:
    numbers = oom.parse(MESSAGES["torch 1.13"][0])
    first, second, *_ = oom.fixes(numbers, [Fix("smaller batch"), Fix("b")], Training())
    assert "expandable_segments:True" in first.do
    assert "5.00 GiB" in first.do
    assert second.do == "smaller batch"


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        # Source 004's run: 64 accumulation steps on each of 4 GPUs become 128.
        (Training(batch_size=2, effective_batch_size=512, world_size=4), "from 2 to 1"),
        (Training(batch_size=2, effective_batch_size=512, world_size=4), "from 64 to 128"),
        (Training(batch_size=1), "already 1"),
    ],
)
def test_the_runs_own_settings_are_in_the_fix(training: Training, expected: str) -> None:
    fix = oom.fixes(oom.parse(MESSAGES["torch 2.0"][0]), [Fix("usual")], training)[0]
    assert expected in fix.do
