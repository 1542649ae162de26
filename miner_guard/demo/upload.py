"""Publishes the demo's uploads: every rank asks the gate; rank 0 writes the files, sends them with
the store's own client and reads them back."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from miner_guard.config import RepoSettings
from miner_guard.demo.gradients import block_now, sparse_gradients, write_upload
from miner_guard.demo.miner_log import MinerLog
from miner_guard.demo.model import Shape
from miner_guard.demo.options import Options
from miner_guard.demo.outer import OuterOptimizer
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import METADATA, ObjectInfo, RepoError
from miner_guard.validators.layout import USUAL

RUN = 1
_BLOCKS_KEPT = 20


@dataclass(frozen=True)
class TrainingProgress:
    """The training state that an upload is made from."""

    model: nn.Module
    outer: OuterOptimizer
    shape: Shape
    outer_step: int
    inner_step: int


class Uploader:
    """Asks the gate, writes the files, publishes them."""

    def __init__(self, options: Options, guard: Any, lines: MinerLog) -> None:
        self._options = options
        self._guard = guard
        self._lines = lines
        self._rank = dist.get_rank()
        self._blocks: list[int] = []
        self.not_before = options.upload_steps

    def upload(self, progress: TrainingProgress, kind: str) -> None:
        """Upload once if the gate allows it. Collective."""
        self._blocks = [*self._blocks, block_now()][-_BLOCKS_KEPT:]
        decision = self._guard.may_upload(
            outer_step=progress.outer_step, inner_step=progress.inner_step, kind=kind
        )
        # After a block, do not ask again between regular uploads until the gate could allow one.
        self.not_before = 0 if decision else progress.inner_step + (decision.retry_after_steps or 0)
        if not decision:
            return
        tag = f"{RUN}.{progress.outer_step}.{progress.inner_step}"
        with self._guard.upload(decision, tag=tag) as upload:
            self._lines.info(f"Saving model state locally for epoch {progress.outer_step}")
            gradients = sparse_gradients(progress.model, progress.outer, self._rank)
            if self._rank == 0:
                folder = self._options.work / "staging" / tag
                shutil.rmtree(folder, ignore_errors=True)
                metadata = {
                    "run": RUN,
                    "outer_step": progress.outer_step,
                    "inner_step": progress.inner_step,
                    "peer_id": "demo",
                }
                write_upload(
                    folder,
                    gradients,
                    dataclasses.asdict(progress.shape),
                    blocks=self._blocks,
                    metadata=metadata,
                )
                self._push(folder, progress.outer_step, tag, upload)
                shutil.rmtree(folder, ignore_errors=True)

    def _push(self, folder: Path, outer_step: int, tag: str, upload: Any) -> None:
        self._lines.info(f"Upload Model Start: tag {tag}")
        try:
            gradients = publish(self._options.repo, folder, outer_step, tag)
        except Exception as error:  # noqa: BLE001 - keep training: the next upload comes in a few steps
            upload.error = str(error)
            self._lines.error(f"Model state upload failed: {error}")
            return
        upload.size_bytes, upload.checksum = gradients.size_bytes, gradients.checksum
        self._lines.info(
            f"Successfully pushed new model state with tag {tag} to "
            f"{open_repo(self._options.repo).label} ({gradients.size_bytes / 1e6:.1f} MB, "
            "read back)"
        )


def publish(repo: RepoSettings, folder: Path, outer_step: int, tag: str) -> ObjectInfo:
    """Send `folder` under the keys that subnet 38's validators read, the root metadata last, so
    that it never names files that are not there. Returns the gradients as read back.

    Raises RepoError if they read back differently, and the store's own errors.
    """
    gradients = USUAL.gradients.format(outer_step=outer_step)
    epoch = gradients.rpartition("/")[0]
    names = [USUAL.file, "config.json", METADATA]
    files = [(f"{epoch}/{name}", folder / name) for name in names] + [(METADATA, folder / METADATA)]
    if repo.kind == "local":
        for key, path in files:
            target = Path(str(repo.path)) / key
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = shutil.copyfile(path, target.with_name(f".{target.name}"))
            os.replace(draft, target)
    elif repo.kind == "s3":
        from miner_guard.uploads.repos.s3_client import connect

        client = connect(repo)
        for key, path in files:
            client.upload_file(str(path), repo.bucket, key)
    else:
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi(endpoint=repo.endpoint)
        repo_id = str(repo.repo_id)
        api.create_repo(repo_id, exist_ok=True)
        additions = [CommitOperationAdd(key, str(path)) for key, path in files]
        commit = api.create_commit(repo_id, additions, commit_message=f"Revision {tag}")
        api.create_tag(repo_id, tag=tag, revision=commit.oid, exist_ok=True)
    published = open_repo(repo)
    entry = published.head(gradients)
    if entry.size_bytes != (folder / USUAL.file).stat().st_size:
        raise RepoError(f"{gradients} reads back as {entry.size_bytes} bytes; publish again")
    if published.get(METADATA) != (folder / METADATA).read_bytes():
        raise RepoError(f"{METADATA} reads back differently; publish again")
    return entry
