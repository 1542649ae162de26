"""Fault injection: reproduces failures of real miners at a chosen step and rank."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "hang": "the rank sleeps forever in the `data` phase; the others wait in a collective",
    "exit0": (
        "the training loop swallows an exception and every rank exits 0, as subnet 38's miner does"
    ),
    "crash": "the rank raises",
    "sigkill": "the rank is killed, as if by the host's out-of-memory killer",
    "oom": "the rank requests more memory than exists and fails with the allocator's own error",
    "nan": "a gradient becomes NaN, and so do the weights",
    "slow": "one step takes much longer than usual",
    "cpu-fallback": (
        "the model trains on the CPU from the start, and from this step on each step takes eight "
        "times as long; a GPU host reports the model's device"
    ),
    "spike": "one step trains on random bytes",
}
_FORM = re.compile(r"(?P<kind>[a-z0-9-]+)@(?P<step>\d+)(?::(?P<rank>\d+))?")

SLOW_S = 8.0
FALLBACK_FACTOR = 8


@dataclass(frozen=True)
class Fault:
    """One fault to inject."""

    kind: str
    step: int
    """Step number across the whole run, counted from 1."""

    rank: int | None = None
    """None means the last rank."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.rank is None else f":{self.rank}")


def parse(text: str) -> Fault:
    """Parse `slow@20:1` as a Fault. Raises ValueError with the expected form and the known
    kinds."""
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in KINDS or int(match["step"]) < 1:
        raise ValueError(
            f"fault {text!r} is not of the form KIND@STEP or KIND@STEP:RANK; STEP is 1 or "
            f"more, KIND is one of: {', '.join(KINDS)}"
        )
    return Fault(
        match["kind"], int(match["step"]), None if match["rank"] is None else int(match["rank"])
    )


class FaultPlan:
    """Fires this rank's faults. Each fires once, even across restarts, unless `repeat` is set."""

    def __init__(
        self, faults: list[Fault], *, rank: int, world_size: int, folder: Path, repeat: bool
    ) -> None:
        assigned = [f for f in faults if (world_size - 1 if f.rank is None else f.rank) == rank]
        self._by_step = {f.step: f for f in assigned}
        self._rank = rank
        self._folder = folder
        self._repeat = repeat
        self.swallow = any(f.kind == "exit0" for f in faults)
        """True if the training loop swallows exceptions. It does so on all ranks, because a failing
        rank makes its peers' collectives fail too."""

        self.on_cpu = any(f.kind == "cpu-fallback" for f in faults)
        self.slowed_from = min((f.step for f in assigned if f.kind == "cpu-fallback"), default=None)

    def at(self, step: int) -> str | None:
        """Return the kind of fault due at `step`, and mark it as fired; None if no fault is due."""
        fault = self._by_step.get(step)
        if fault is None:
            return None
        fired = self._folder / f"fired-{fault}-rank{self._rank}".replace(":", "-")
        if fired.exists() and not self._repeat:
            return None
        fired.parent.mkdir(parents=True, exist_ok=True)
        fired.touch()
        return fault.kind


def strike(kind: str | None) -> None:
    """Inject a fault that ends or hangs the process; the training step injects the others."""
    if kind == "hang":
        while True:
            time.sleep(3600)
    if kind == "slow":
        time.sleep(SLOW_S)
    if kind in ("crash", "exit0"):
        raise RuntimeError(f"injected fault: {kind}")
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "oom":
        # Import here, so that the command line can validate a fault's form without torch.
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        # Request 2^50 bytes, more than any host or GPU has, to get the allocator's own error text.
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
