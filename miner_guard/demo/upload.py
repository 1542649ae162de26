"""Publishes the demo's uploads: every rank asks the gate; rank 0 writes the files that subnet 38's
validators read, sends them with the store's own client and reads them back."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miner_guard.config import RepoSettings
from miner_guard.demo.model import SHAPE, OuterOptimizer
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import ObjectInfo, RepoError
from miner_guard.validators.facts import GRADIENTS, METADATA, gradients_key
from miner_guard.validators.rules import BLOCK_S

RUN = 1
UPLOADED_RATIO = 0.02
"""Share of each tensor's entries to upload: those with the largest magnitude."""


def log(message: str, level: str = "INFO") -> None:
    """Print a line in the format of subnet 38's miner, where ranks other than 0 print errors
    only."""
    rank = dist.get_rank()
    if rank and level == "INFO":
        return
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    # One call for each line: several ranks share the pipe, and their lines must not interleave.
    sys.stdout.write(f"{stamp} | {level:^14} | Rank {rank} | {message}\n")
    sys.stdout.flush()


class Uploader:
    """Asks the gate, writes the files, publishes them."""

    def __init__(
        self, options: argparse.Namespace, guard: Any, model: nn.Module, outer: OuterOptimizer
    ) -> None:
        self._options, self._guard, self._model, self._outer = options, guard, model, outer
        self._blocks: list[int] = []
        self.not_before: int = options.upload_steps

    def upload(self, outer_step: int, inner_step: int, kind: str) -> None:
        """Upload once if the gate allows it. Collective."""
        # The demo has no chain: it counts blocks since 1970.
        self._blocks = [*self._blocks, int(time.time() / BLOCK_S)][-20:]
        decision = self._guard.may_upload(outer_step=outer_step, inner_step=inner_step, kind=kind)
        # After a block, do not ask again between regular uploads until the gate could allow one.
        self.not_before = 0 if decision else inner_step + (decision.retry_after_steps or 0)
        if not decision:
            return
        tag = f"{RUN}.{outer_step}.{inner_step}"
        with self._guard.upload(decision, tag=tag) as upload:
            log(f"Saving model state locally for epoch {outer_step}")
            gradients = self._gradients()
            if dist.get_rank() != 0:
                return
            steps = {"outer_step": outer_step, "inner_step": inner_step}
            metadata = {"run": RUN, **steps, "peer_id": "demo"}
            folder = self._options.work / "staging" / tag
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            torch.save({**gradients, "metadata": metadata}, folder / "gradients.pt")
            config = {**SHAPE, "block_list": self._blocks}
            (folder / "config.json").write_text(json.dumps(config))
            (folder / METADATA).write_text(json.dumps(metadata))
            self._push(folder, outer_step, tag, upload)
            shutil.rmtree(folder, ignore_errors=True)

    def _gradients(self) -> dict[str, Tensor]:
        """The pseudo-gradient in sparse form: `<param>idxs` (int64, indices into the flattened
        tensor) and `<param>vals` (float32) on rank 0; empty on other ranks.

        Collective: gathers one parameter at a time, so that no rank holds a second model.
        """
        sparse: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            gradient = self._outer.pseudo_gradient(name, parameter)
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if dist.get_rank() == 0:
                flat = whole.flatten().float().cpu()
                count = max(1, int(flat.numel() * UPLOADED_RATIO))
                largest = flat.abs().topk(count).indices.sort().values
                sparse |= {f"{name}idxs": largest, f"{name}vals": flat[largest]}
        return sparse

    def _push(self, folder: Path, outer_step: int, tag: str, upload: Any) -> None:
        log(f"Upload Model Start: tag {tag}")
        try:
            gradients = publish(self._options.repo, folder, outer_step, tag)
        except Exception as error:  # noqa: BLE001 - keep training: the next upload comes in a few steps
            upload.error = str(error)
            log(f"Model state upload failed: {error}", "ERROR")
            return
        upload.size_bytes, upload.checksum = gradients.size_bytes, gradients.checksum
        log(
            f"Successfully pushed new model state with tag {tag} to "
            f"{open_repo(self._options.repo).label} ({gradients.size_bytes / 1e6:.1f} MB, "
            "read back)"
        )


def publish(repo: RepoSettings, folder: Path, outer_step: int, tag: str) -> ObjectInfo:
    """Send `folder` under the keys that subnet 38's validators read, the root metadata last, so
    that it never names files that are not there. Returns the gradients as read back.

    Raises RepoError if they read back differently, and the store's own errors.
    """
    gradients = gradients_key(outer_step)
    epoch = gradients.rpartition("/")[0]
    names = [GRADIENTS, "config.json", METADATA]
    files = [(f"{epoch}/{name}", folder / name) for name in names] + [(METADATA, folder / METADATA)]
    if repo.kind == "local":
        for key, path in files:
            target = Path(str(repo.path)) / key
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = shutil.copyfile(path, target.with_name(f".{target.name}"))
            os.replace(draft, target)
    elif repo.kind == "s3":
        from miner_guard.uploads.repos.s3 import connect

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
    if entry.size_bytes != (folder / GRADIENTS).stat().st_size:
        raise RepoError(f"{gradients} reads back as {entry.size_bytes} bytes; publish again")
    if published.get(METADATA) != (folder / METADATA).read_bytes():
        raise RepoError(f"{METADATA} reads back differently; publish again")
    return entry
