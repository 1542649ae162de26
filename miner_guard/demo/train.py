"""`torchrun … -m miner_guard.demo.train --work DIR`: one rank of the demo miner. FSDP2 over gloo or
NCCL, inner steps with AdamW, outer steps as in DiLoCo, gated uploads, injected faults."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import miner_guard
from miner_guard.checkpoints import Checkpointer, Saved, Skipped
from miner_guard.config import RepoSettings
from miner_guard.demo import faults
from miner_guard.demo.model import CONTEXT, ByteGPT, Corpus, OuterOptimizer
from miner_guard.demo.upload import Uploader, log
from miner_guard.record.events import event
from miner_guard.state_dir import STATE_DIR

SEED = 38
LR = 2e-3
WARMUP_STEPS = 10
FAST_LOG_EVERY, EVALUATE_EVERY = 10, 30
"""Inner steps between source 001's fast logs and full evaluations."""

Batch = tuple[torch.Tensor, torch.Tensor]


class Miner:
    """One rank of the miner. All ranks must create it and call its methods identically."""

    def __init__(
        self, options: argparse.Namespace, plan: faults.FaultPlan, guard: Any, device: torch.device
    ) -> None:
        self.options, self.plan, self.guard, self.device = options, plan, guard, device
        self.rank = dist.get_rank()
        self.total_steps, self.outer_step, self.inner_step = 0, 1, 0
        self.loss = self.grad_norm = float("nan")
        self._stop_requested = False
        self._saved: deque[Saved] = deque()
        self._micro_batches = max(
            1, options.effective_batch_size // (options.batch_size * dist.get_world_size())
        )
        with guard.phase("load_state"):
            self._load()
        self.uploader = Uploader(options, guard, self.model, self.outer)

    def _load(self) -> None:
        torch.manual_seed(SEED)
        self.corpus = Corpus(SEED, self.rank)
        self.held_out = Corpus(SEED, self.rank, held_out=True)
        self.model: Any = ByteGPT().to(self.device)
        bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy: dict[str, Any] = {"mp_policy": bfloat16} if self.device.type == "cuda" else {}
        for module in (*self.model.blocks, self.model):
            fully_shard(module, **policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95))
        self.outer = OuterOptimizer(self.model)
        self.checkpoints = Checkpointer(
            self.options.work / "checkpoints",
            every=self.options.checkpoint_every,
            on_saved=self._saved.append,
            memory_every=1,
            on_memory_off=lambda reason: log(f"No snapshots in memory: {reason}"),
        )
        state = self._state()
        path = self.checkpoints.resume(state, on_skipped=self._checkpoint_skipped)
        if path is None:
            return
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        self.outer.load_state_dict(state["outer"])
        counters = state["counters"]
        self.total_steps, self.outer_step, self.inner_step = (
            int(counters[name]) for name in ("total", "outer", "inner")
        )
        if self.rank == 0:
            text = f"CHECKPOINT RESUMED: {path} at step {self.total_steps}"
            fields: dict[str, Any] = {"path": str(path), "step": self.total_steps}
            self.guard.emit(event("checkpoint", "info", text, rank=0, **fields))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        counters = {"total": self.total_steps, "outer": self.outer_step, "inner": self.inner_step}
        outer = self.outer.state_dict()
        return {"model": model, "optimizer": optimizer, "outer": outer, "counters": counters}

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
            tokens_per_step=self.options.effective_batch_size * CONTEXT,
        )
        while self.total_steps < self.options.steps:
            stop, checkpoint = self._step()
            self.checkpoints.snapshot(self.total_steps, self._state, loss=self.loss)
            if checkpoint or stop or self.checkpoints.due(self.total_steps):
                self._checkpoint()
            if stop:
                log(f"Stopped on request at step {self.total_steps}")
                break
        self.checkpoints.close()
        self._report_checkpoints()
        return self.total_steps >= int(self.options.steps)

    def _ask_to_stop(self, _number: int, _frame: Any) -> None:
        self._stop_requested = True

    def _step(self) -> tuple[bool, bool]:
        """Run one inner step and its follow-ups. Returns whether any rank was asked to stop, and
        whether any rank was asked for a checkpoint."""
        total = self.total_steps + 1
        fault = self.plan.at(total)
        start = time.monotonic()
        with self.guard.phase("data"):
            faults.strike(fault)
            batches = [self._batch(total, micro, fault) for micro in range(self._micro_batches)]
        mean = self._forward_backward(batches)
        with self.guard.phase("optimizer"):
            lr = self._optimize(total, poison=fault == "nan")
        if self.plan.slowed_from is not None and total >= self.plan.slowed_from:
            time.sleep((faults.FALLBACK_FACTOR - 1) * (time.monotonic() - start))
        requests = (float(self._stop_requested), float(self.guard.checkpoint_requested()))
        shared = torch.tensor([0.0, *requests], device=self.device)
        shared[0] = mean / dist.get_world_size()
        dist.all_reduce(shared)
        self.loss, stop, checkpoint = shared.tolist()
        self.total_steps, self.inner_step = total, self.inner_step + 1
        log(
            f"Outer Step: {self.outer_step} | Inner Step: {self.inner_step} | "
            f"Learning Rate: {lr:.8f} | Average Loss: {self.loss:.2f}"
        )
        self._report_checkpoints()
        self.guard.step(
            outer_step=self.outer_step,
            inner_step=self.inner_step,
            loss=self.loss,
            lr=lr,
            grad_norm=self.grad_norm,
            tokens=self.options.effective_batch_size * CONTEXT,
            total_steps=total,
            eval_loss=self._evaluate(total, batches[0]),
        )
        self._after_step()
        return stop > 0, checkpoint > 0

    def _batch(self, step: int, micro: int, fault: str | None) -> Batch:
        tokens, targets = self.corpus.batch(step, micro, self.options.batch_size)
        if fault == "spike":
            tokens, targets = (torch.randint_like(part, 256) for part in (tokens, targets))
        return tokens.to(self.device), targets.to(self.device)

    def _forward_backward(self, batches: list[Batch]) -> torch.Tensor:
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
        lr = LR * min(1.0, step / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if poison:
            for parameter in self.model.parameters():
                parameter.grad.mul_(float("nan"))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr

    def _evaluate(self, step: int, batch: Batch) -> float | None:
        """Source 001's monitoring callback: a fast log or a full evaluation, if due at this step.
        Returns the loss on held-out data after an evaluation. Collective: FSDP's forward is."""
        if step % FAST_LOG_EVERY:
            return None
        tokens, targets = (part[:1] for part in batch)
        loss = None
        with torch.no_grad(), self.guard.phase("monitor"):
            if step % EVALUATE_EVERY == 0:
                with self.guard.phase("inference"):
                    following = int(self.model(tokens)[0, -1].argmax())
                with self.guard.phase("val_loss"):
                    # The same batch each time, so that evaluations differ only in the model.
                    held_out = self.held_out.batch(0, 0, 4)
                    loss = float(self.model(*(part.to(self.device) for part in held_out)))
                log(f"Evaluation at step {step}: eval_loss={loss:.3f}, next byte {following}")
            with self.guard.phase("example_loss"):
                self.model(tokens, targets)
        # Without a backward pass, FSDP leaves the root's parameters gathered.
        self.model.reshard()
        return loss

    def _after_step(self) -> None:
        # Ask on every rank at every step: `upload_due` is collective.
        due = self.guard.upload_due() and self.inner_step >= self.uploader.not_before
        if due or self.inner_step % self.options.upload_steps == 0:
            self.uploader.upload(self.outer_step, self.inner_step, "gradient")
        if self.inner_step >= self.options.inner_steps_per_outer:
            log("Received Main All Reduce Call")
            with self.guard.phase("allreduce"):
                self.outer.step()
            self.outer_step, self.inner_step = self.outer_step + 1, 0
            log("AllReduce Operation Finished Succesfully")
            self.uploader.upload(self.outer_step, self.inner_step, "archive")

    def _checkpoint(self) -> None:
        # Copying the state blocks every rank: exclude checkpoint steps from step-time statistics.
        with self.guard.phase("pause"):
            reason = self.checkpoints.save(self.total_steps, self._state(), loss=self.loss)
        if reason is not None:
            log(f"No checkpoint of step {self.total_steps}: {reason}")

    def _report_checkpoints(self) -> None:
        # Report here instead of in the writer thread: the hook belongs to the training thread.
        while self._saved:
            saved = self._saved.popleft()
            log(f"Saved checkpoint {saved.path.name} in {saved.seconds:.2f}s")
            self.guard.checkpoint_saved(
                saved.path, step=saved.step, seconds=saved.seconds, size_bytes=saved.size_bytes
            )

    def _checkpoint_skipped(self, skipped: Skipped) -> None:
        fields = {"path": str(skipped.path), "reason": skipped.reason}
        text = f"CHECKPOINT SKIPPED: {skipped.path}: {skipped.reason}"
        self.guard.emit(event("checkpoint", "warning", text, rank=0, **fields))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line that `miner-guard demo` writes. `--repo` is the [repo] section as JSON."""
    parser = argparse.ArgumentParser(prog="python -m miner_guard.demo.train")
    state = os.environ.get(STATE_DIR)
    work = Path(state) / "demo" if state else Path(".demo") / "work"
    parser.add_argument("--work", type=Path, default=work)
    for name, default in (
        ("steps", 90),
        # DiLoCo's H must exceed the gate's minimum, or the gate would block every upload.
        ("inner-steps-per-outer", 75),
        # In source 004, the gate blocks the upload at 15.
        ("upload-steps", 15),
        ("batch-size", 4),
        ("effective-batch-size", 16),
        ("checkpoint-every", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fault", dest="faults", type=faults.parse, action="append", default=[])
    parser.add_argument("--fault-repeat", action="store_true")
    parser.add_argument("--repo")
    values = parser.parse_args(arguments)
    published = {"kind": "local", "path": str(values.work / "published")}
    values.repo = RepoSettings(**(json.loads(values.repo) if values.repo else published))
    return values


def _join(*, on_cpu: bool) -> torch.device:
    """Join the process group, with NCCL if there are GPUs. Checkpoints and the gate use its CPU
    backend."""
    if on_cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def main() -> None:
    """Train. Exits 0 at the configured end or after a stop signal, 1 on an exception."""
    arguments = options()
    plan = faults.FaultPlan(
        arguments.faults,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        folder=arguments.work / "faults",
        repeat=arguments.fault_repeat,
    )
    device = _join(on_cpu=plan.on_cpu)
    guard = miner_guard.init()
    finished = False
    try:
        finished = Miner(arguments, plan, guard, device).run()
    except Exception as error:
        log(f"Training Loop Failed with error: {error}", "ERROR")
        if plan.swallow:
            # Subnet 38's miner does `except … break`, so the launcher sees success on every rank.
            guard.close()
            sys.exit(0)
        raise
    finally:
        guard.close(finished=finished)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
