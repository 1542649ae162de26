"""Source 001's monitoring callback: a fast log every few steps, a full evaluation every few dozen
steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miner_guard.demo.corpus import Corpus
from miner_guard.demo.miner_log import MinerLog

_PROMPT = b"import "
_GENERATED = 8
_VALIDATION_BATCHES = 2


class Evaluation:
    """Evaluates the model between inner steps. Call it on every rank: an FSDP forward pass is
    collective."""

    def __init__(
        self, model: Any, corpus: Corpus, guard: Any, *, lines: MinerLog, device: torch.device
    ) -> None:
        """`corpus` is held out from training."""
        self._model = model
        self._corpus = corpus
        self._guard = guard
        self._lines = lines
        self._device = device

    def fast_log(self, tokens: Tensor, targets: Tensor) -> None:
        """Compute the loss of one training example. `tokens` and `targets` have shape
        (1, context)."""
        with torch.no_grad(), self._guard.phase("monitor"), self._guard.phase("example_loss"):
            self._model(tokens, targets)

    def full(self, step: int, tokens: Tensor, targets: Tensor) -> float:
        """Run inference and compute the loss on held-out data and on one training example, whose
        `tokens` and `targets` have shape (1, context).

        Returns the loss on held-out data.
        """
        with torch.no_grad(), self._guard.phase("monitor"):
            with self._guard.phase("inference"):
                text = self._continuation(tokens.shape[1])
            with self._guard.phase("val_loss"):
                loss = self._validation_loss(step, tokens.shape[1])
            with self._guard.phase("example_loss"):
                self._model(tokens, targets)
            self._lines.info(
                f"Evaluation at step {step}: eval_loss={loss:.3f}, continuation {text!r}"
            )
        return loss

    def _validation_loss(self, step: int, context: int) -> float:
        total = 0.0
        for number in range(_VALIDATION_BATCHES):
            # Use the same batches each time, so that evaluations differ only in the model.
            tokens, targets = self._corpus.batch(0, number, 2, context)
            total += float(self._model(tokens.to(self._device), targets.to(self._device)))
        return total / _VALIDATION_BATCHES

    def _continuation(self, context: int) -> str:
        """Generate a greedy continuation of the prompt, byte by byte."""
        written = bytearray(_PROMPT)
        for _ in range(_GENERATED):
            tokens = torch.tensor(
                [list(written[-context:])], dtype=torch.int64, device=self._device
            )
            written.append(int(self._model.logits(tokens)[0, -1].argmax()))
        return bytes(written).decode("utf-8", "replace")
