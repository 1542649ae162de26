"""Publishes the demo's uploads: every rank asks the gate, rank 0 writes the files, a child process
pushes them."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from miner_guard.demo.gradients import block_now, sparse_gradients, write_upload
from miner_guard.demo.miner_log import MinerLog
from miner_guard.demo.model import Shape
from miner_guard.demo.options import Options
from miner_guard.demo.outer import OuterOptimizer
from miner_guard.uploads.publisher import PublishError, Revision
from miner_guard.uploads.push import push

RUN = 1
_BLOCKS_KEPT = 20
_DEADLINE_S = 120.0


@dataclass(frozen=True)
class TrainingProgress:
    """The training state that an upload is made from."""

    model: nn.Module
    outer: OuterOptimizer
    shape: Shape
    outer_step: int
    inner_step: int


class Uploader:
    """Asks the gate, writes the files, hands them to the publisher."""

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
                self._push(Revision(folder, RUN, progress.outer_step, progress.inner_step), upload)

    def _push(self, revision: Revision, upload: Any) -> None:
        try:
            result = push(
                self._options.repo,
                revision,
                self._options.work,
                self._lines.info,
                deadline_s=_DEADLINE_S,
            )
            upload.size_bytes, upload.attempts, upload.checksum = (
                result.size_bytes,
                result.attempts,
                result.checksum,
            )
        except PublishError as error:
            # Keep training after a failed upload: the next one comes in a few steps.
            upload.error = str(error)
            self._lines.error(f"Model state upload failed: {error}")
            # Keep the files: the recovery process or the next publisher may still need them.
            return
        shutil.rmtree(revision.folder, ignore_errors=True)
