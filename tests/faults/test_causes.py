"""The guard does not keep retrying what a restart cannot fix."""

from __future__ import annotations

import sys

import pytest

from tests.faults.guarded import Guarded

FAST = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1}


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
