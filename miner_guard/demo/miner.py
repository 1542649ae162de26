"""The demo miner: FSDP2 over gloo or NCCL, inner steps with AdamW, outer steps as in DiLoCo, gated
uploads."""

from __future__ import annotations

import signal
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from miner_guard.checkpoints import Checkpointer, Saved, Skipped
from miner_guard.demo import faults
from miner_guard.demo.corpus import Corpus, standard_library
from miner_guard.demo.evaluation import Evaluation
from miner_guard.demo.faults import FaultPlan
from miner_guard.demo.miner_log import MinerLog
from miner_guard.demo.model import ByteGPT, Shape
from miner_guard.demo.options import Options
from miner_guard.demo.outer import OuterOptimizer
from miner_guard.demo.upload import TrainingProgress, Uploader
from miner_guard.record.events import event

_SEED = 38
_LR = 2e-3
_WARMUP_STEPS = 10
_LOG_STEPS = 10
"""Inner steps between fast logs (source 001). A fast log computes one training example's loss."""

_EVAL_STEPS = 30
"""Inner steps between full evaluations."""


class Miner:
    """One rank of the miner. All ranks must create it and call its methods identically."""

    def __init__(self, options: Options, plan: FaultPlan, guard: Any, device: torch.device) -> None:
        self.options = options
        self.plan = plan
        self.guard = guard
        self.device = device
        self.rank = dist.get_rank()
        self.lines = MinerLog(self.rank)
        self.shape = Shape()
        self.total_steps = 0
        self.outer_step = 1
        self.inner_step = 0
        self.first_loss: float | None = None
        self.loss = self.grad_norm = float("nan")
        self._stop_asked = False
        self._saved: deque[Saved] = deque()
        self._micro_batches = max(
            1, options.effective_batch_size // (options.batch_size * dist.get_world_size())
        )
        with guard.phase("load_state"):
            self._load()
        self.uploader = Uploader(options, guard, self.lines)

    def _load(self) -> None:
        torch.manual_seed(_SEED)
        training, held_out = _split(standard_library())
        self.corpus = Corpus(training, _SEED, self.rank)
        self.model = _sharded(ByteGPT(self.shape), self.device)
        self.evaluation = Evaluation(
            self.model,
            Corpus(held_out, _SEED, self.rank),
            self.guard,
            lines=self.lines,
            device=self.device,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LR, betas=(0.9, 0.95))
        self.outer = OuterOptimizer(self.model)
        self.checkpoints = Checkpointer(
            self.options.work / "checkpoints",
            every=self.options.checkpoint_every,
            on_saved=self._saved.append,
            memory_every=1,
            on_memory_off=lambda reason: self.lines.info(f"No snapshots in memory: {reason}"),
        )
        self._resume()

    def _resume(self) -> None:
        state = self._state()
        path = self.checkpoints.resume(state, on_skipped=self._checkpoint_skipped)
        if path is None:
            return
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.outer.load_state_dict(state["outer"])
        counters = state["counters"]
        self.total_steps, self.outer_step, self.inner_step = (
            int(counters[k]) for k in ("total", "outer", "inner")
        )
        self.first_loss = float(counters["first_loss"])
        if self.rank == 0:
            self.guard.emit(
                event(
                    "checkpoint_resumed",
                    "info",
                    f"CHECKPOINT RESUMED: {path} at step {self.total_steps}",
                    rank=0,
                    path=str(path),
                    step=self.total_steps,
                )
            )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        first = float("nan") if self.first_loss is None else self.first_loss
        counters = {
            "total": self.total_steps,
            "outer": self.outer_step,
            "inner": self.inner_step,
            "first_loss": first,
        }
        return {
            "model": model,
            "optimizer": optimizer,
            "outer": self.outer.state_dict(),
            "counters": counters,
        }

    def run(self) -> bool:
        """Train for the configured number of steps. Returns False if a signal stopped it early."""
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        signal.signal(signal.SIGINT, self._ask_to_stop)
        self.guard.diagnose(
            self.model,
            batch_size=self.options.batch_size,
            effective_batch_size=self.options.effective_batch_size,
            accumulation_steps=self._micro_batches,
            model_name="byte-gpt",
            upload_steps=self.options.upload_steps,
            inner_steps_per_outer=self.options.inner_steps_per_outer,
            tokens_per_step=self.options.effective_batch_size * self.shape.context,
        )
        while self.total_steps < self.options.steps:
            stop, checkpoint = self._step()
            self.checkpoints.snapshot(self.total_steps, self._state, loss=self.loss)
            if checkpoint or stop or self.checkpoints.due(self.total_steps):
                self._checkpoint()
            if stop:
                self.lines.info(f"Stopped on request at step {self.total_steps}")
                break
        self.checkpoints.close()
        self._report_checkpoints()
        return self.total_steps >= self.options.steps

    def _ask_to_stop(self, _number: int, _frame: Any) -> None:
        self._stop_asked = True

    def _step(self) -> tuple[bool, bool]:
        """Run one inner step and its follow-ups. Returns whether any rank was asked to stop, and
        whether any rank was asked for a checkpoint."""
        total = self.total_steps + 1
        fault = self.plan.at(total)
        start = time.monotonic()
        with self.guard.phase("data"):
            faults.strike(fault)
            batches = [self._batch(total, micro, fault) for micro in range(self._micro_batches)]
        own = self._forward_backward(batches)
        with self.guard.phase("optimizer"):
            lr = self._optimize(total, poison=fault == "nan")
        if self.plan.slowed_from is not None and total >= self.plan.slowed_from:
            time.sleep((faults.FALLBACK_FACTOR - 1) * (time.monotonic() - start))
        loss, stop, checkpoint = self._agree(own)
        self.total_steps, self.inner_step, self.loss = total, self.inner_step + 1, loss
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.lines.info(
            f"Outer Step: {self.outer_step} | Inner Step: {self.inner_step} | "
            f"Learning Rate: {lr:.8f} | Average Loss: {loss:.2f}"
        )
        self._report_checkpoints()
        eval_loss = self._look(total, batches[0])
        self.guard.step(
            outer_step=self.outer_step,
            inner_step=self.inner_step,
            loss=loss,
            lr=lr,
            grad_norm=self.grad_norm,
            tokens=self.options.effective_batch_size * self.shape.context,
            total_steps=total,
            eval_loss=eval_loss,
        )
        self._after_step()
        return stop, checkpoint

    def _look(self, step: int, batch: tuple[torch.Tensor, torch.Tensor]) -> float | None:
        """Log or evaluate if due at this step. Returns the loss on held-out data after an
        evaluation."""
        tokens, targets = (part[:1] for part in batch)
        if step % _EVAL_STEPS == 0:
            return self.evaluation.full(step, tokens, targets)
        if step % _LOG_STEPS == 0:
            self.evaluation.fast_log(tokens, targets)
        return None

    def _after_step(self) -> None:
        # Ask on every rank at every step: `upload_due` is collective.
        due = self.guard.upload_due() and self.inner_step >= self.uploader.not_before
        if due or self.inner_step % self.options.upload_steps == 0:
            self.uploader.upload(self._progress(), "gradient")
        if self.inner_step >= self.options.inner_steps_per_outer:
            self._outer_step()

    def _outer_step(self) -> None:
        self.lines.info("Received Main All Reduce Call")
        with self.guard.phase("allreduce"):
            self.outer.step()
        self.outer_step, self.inner_step = self.outer_step + 1, 0
        self.lines.info("AllReduce Operation Finished Succesfully")
        self.uploader.upload(self._progress(), "archive")

    def _batch(self, step: int, micro: int, fault: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        size, context = self.options.batch_size, self.shape.context
        if fault == "spike":
            tokens, targets = self.corpus.noise(size, context)
        else:
            tokens, targets = self.corpus.batch(step, micro, size, context)
        return tokens.to(self.device), targets.to(self.device)

    def _forward_backward(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Run forward and backward passes. Returns the mean loss of this rank's micro-batches, a
        detached scalar on the device."""
        total = torch.zeros((), device=self.device)
        for number, (tokens, targets) in enumerate(batches, 1):
            # Reduce gradients once per inner step, with the last micro-batch.
            self.model.set_requires_gradient_sync(number == len(batches))
            with self.guard.phase("forward"):
                loss = self.model(tokens, targets) / len(batches)
            with self.guard.phase("backward"):
                loss.backward()
            total += loss.detach()
        return total

    def _optimize(self, step: int, *, poison: bool) -> float:
        lr = _LR * min(1.0, step / _WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if poison:
            _poison(self.model)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _agree(self, own: torch.Tensor) -> tuple[float, bool, bool]:
        """Share the results with all ranks. Returns the mean loss over the ranks, whether any rank
        was asked to stop, and whether any rank was asked for a checkpoint."""
        asked = (float(self._stop_asked), float(self.guard.checkpoint_requested()))
        shared = torch.tensor([0.0, *asked], device=self.device)
        shared[0] = own / dist.get_world_size()
        dist.all_reduce(shared)
        loss, stop, checkpoint = shared.tolist()
        return loss, stop > 0, checkpoint > 0

    def _checkpoint(self) -> None:
        # Copying the state blocks every rank: exclude checkpoint steps from step-time statistics.
        with self.guard.phase("pause"):
            reason = self.checkpoints.save(self.total_steps, self._state(), loss=self.loss)
        if reason is not None:
            self.lines.info(f"No checkpoint of step {self.total_steps}: {reason}")

    def _report_checkpoints(self) -> None:
        # Report here instead of in the writer thread: the hook belongs to the training thread.
        while self._saved:
            saved = self._saved.popleft()
            self.lines.info(f"Saved checkpoint {saved.path.name} in {saved.seconds:.2f}s")
            self.guard.checkpoint_saved(
                saved.path, step=saved.step, seconds=saved.seconds, size_bytes=saved.size_bytes
            )

    def _checkpoint_skipped(self, skipped: Skipped) -> None:
        self.guard.emit(
            event(
                "checkpoint_skipped",
                "warning",
                f"CHECKPOINT SKIPPED: {skipped.path}: {skipped.reason}",
                rank=0,
                path=str(skipped.path),
                reason=skipped.reason,
            )
        )

    def _progress(self) -> TrainingProgress:
        return TrainingProgress(
            self.model, self.outer, self.shape, self.outer_step, self.inner_step
        )


def _sharded(model: ByteGPT, device: torch.device) -> Any:
    model = model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if device.type == "cuda" else {}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "logits")
    assert isinstance(model, FSDPModule)
    return model


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Split the data into training data and held-out data (the last 5 %)."""
    cut = len(data) - len(data) // 20
    return data[:cut], data[cut:]


def _poison(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.fill_(float("nan"))
