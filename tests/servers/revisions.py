"""Revisions to publish; each file names its inner step, so that a mixed view is visible."""

from __future__ import annotations

import json
import os
from pathlib import Path

from miner_guard.uploads.publisher import Revision

OUTER_STEP = 3


def revision(folder: Path, inner: int, size_bytes: int = 1024) -> Revision:
    """A revision of run 1 and outer step 3, in a subdirectory of `folder`."""
    own = folder / f"revision-{inner}"
    own.mkdir()
    with open(own / "gradients.pt", "wb") as file:
        file.write(f"{inner}\n".encode())
        while (left := size_bytes - file.tell()) > 0:
            file.write(os.urandom(min(left, 1024 * 1024)))
    (own / "config.json").write_text(json.dumps({"block_list": [inner]}))
    metadata = {"run": 1, "outer_step": OUTER_STEP, "inner_step": inner, "peer_id": "demo"}
    (own / "metadata.json").write_text(json.dumps(metadata))
    return Revision(own, 1, OUTER_STEP, inner)


def inner_step_of(gradients: bytes) -> int:
    """The inner step recorded in the gradients of a `revision`."""
    return int(gradients.split(b"\n", 1)[0])
