"""A single-process miner: an outer step with an archive upload, then blocked, allowed, pushed and
lost uploads."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import miner_guard

REPO, STEP_S = Path(sys.argv[1]), 0.1


def push(outer_step: int, inner_step: int) -> None:
    folder = REPO / f"epoch-{outer_step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gradients.pt").write_bytes(f"{outer_step}.{inner_step}".encode() * 100)
    (folder / "config.json").write_text(json.dumps({"block_list": [1]}))
    metadata = {"run": "5", "outer_step": outer_step, "inner_step": inner_step}
    (REPO / "metadata.json").write_text(json.dumps(metadata))


guard = miner_guard.init()
archive = guard.may_upload(outer_step=3, inner_step=0, kind="archive")
if archive:
    with guard.upload(archive) as upload:
        upload.tag = "5.3.0"
        push(3, 0)
for inner_step in range(1, 9):
    time.sleep(STEP_S)
    guard.step(outer_step=3, inner_step=inner_step, loss=3.0 - 0.01 * inner_step)
    decision = guard.may_upload(outer_step=3, inner_step=inner_step)
    if decision and inner_step in (6, 8):
        with guard.upload(decision) as upload:
            upload.tag = f"5.3.{inner_step}"
            if inner_step == 6:
                push(3, 6)
                upload.attempts = 2
                upload.checksum = hashlib.sha256(
                    (REPO / "epoch-3" / "gradients.pt").read_bytes()
                ).hexdigest()
            # At 8 the upload worker dies unseen: nothing is published, and the miner believes it
            # was.
# Long enough for two checks of a refused upload.
time.sleep(6)
guard.close(finished=True)
