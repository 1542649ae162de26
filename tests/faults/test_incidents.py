"""The miner's last output leads to one incident, its evidence, and possibly a restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.faults.guarded import Guarded

SETTINGS = {"miner.stop_timeout_s": 3, "restart.backoff_s": 0.1, "health.snapshot_every_s": 600}
CRASH_LOOP = 75


def miner(*lines: str) -> list[str]:
    """A program that prints and fails."""
    return [
        sys.executable,
        "-c",
        f"import sys; sys.stderr.write({chr(10).join(lines) + chr(10)!r}); sys.exit(1)",
    ]


def test_a_wrong_key_is_named_and_tried_once_more(guarded: Guarded) -> None:
    """A restart cannot fix it, so the guard tells the operator what to do instead of retrying
    endlessly. It restarts once, because it may have misread the line."""
    guard = guarded.start(
        miner(
            "step 1 loss 3.2",
            "botocore.exceptions.ClientError: An error occurred (InvalidAccessKeyId) when "
            "calling the PutObject "
            "operation: The AWS Access Key Id you provided does not exist in our records.",
        ),
        settings=SETTINGS,
    )
    assert guard.wait(60) == CRASH_LOOP
    incident = guarded.wait_for("incident")
    assert incident["label"] == "storage_access_denied"
    assert incident["restart"] == "config"
    assert incident["msg"].startswith("INCIDENT storage_access_denied: ")
    assert incident["fix"] in guarded.named("crash_loop")[0]["detail"]
    assert "again after a restart" in guarded.named("crash_loop")[0]["detail"]
    assert len(guarded.named("miner_restarting")) == 1
    story = json.loads((Path(incident["evidence"]) / "incident.json").read_text())
    assert story["label"] == "storage_access_denied"
    assert "InvalidAccessKeyId" in (Path(incident["evidence"]) / "output.log").read_text()


def test_out_of_memory_is_retried_and_named_each_time(guarded: Guarded) -> None:
    guard = guarded.start(
        miner(
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
            "GPU 1 has a total "
            "capacity of 23.68 GiB of which 1.00 GiB is free.",
            (
                "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed "
                "by peer [127.0.0.1]:218"
            ),
        ),
        settings={**SETTINGS, "miner.batch_size": 4},
    )
    assert guard.wait(60) == CRASH_LOOP
    assert [(e["label"], e["rank"]) for e in guarded.named("incident")] == [("cuda_oom", 1)] * 2
    assert "from 4 to 2" in guarded.named("incident")[0]["fix"]
    assert len(guarded.named("miner_restarting")) == 1
