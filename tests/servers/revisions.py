"""Revisions to publish; each file names its inner step, so that a mixed view is visible."""

from __future__ import annotations

import json
import os
from pathlib import Path

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos.base import ObjectInfo

OUTER_STEP = 3


def revision(folder: Path, inner: int, size_bytes: int = 1024) -> Path:
    """The files of a revision of run 1 and outer step 3, in a subdirectory of `folder`."""
    files = folder / f"revision-{inner}"
    files.mkdir(parents=True)
    with open(files / "gradients.pt", "wb") as file:
        file.write(f"{inner}\n".encode())
        while (rest := size_bytes - file.tell()) > 0:
            file.write(os.urandom(min(rest, 1024 * 1024)))
    (files / "config.json").write_text(json.dumps({"block_list": [inner]}))
    metadata = {"run": 1, "outer_step": OUTER_STEP, "inner_step": inner, "peer_id": "demo"}
    (files / "metadata.json").write_text(json.dumps(metadata))
    return files


def publish(settings: RepoSettings, folder: Path, inner: int, size_bytes: int = 1024) -> ObjectInfo:
    """Publish a revision as the demo does. Returns its gradients as read back."""
    from miner_guard.demo.upload import publish as send

    return send(settings, revision(folder, inner, size_bytes), OUTER_STEP, f"1.3.{inner}")
