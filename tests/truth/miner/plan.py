"""What happens to the miner, round by round; a round ends with an upload."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.truth import states
from tests.truth.miner import world

MICRO_BATCHES = 2
"""Per rank and inner step."""

FIRST_STEP = 60
"""The inner step of the first round: above the operator's minimum of 50."""


@dataclass(frozen=True)
class Round:
    """One upload, and what is wrong with it."""

    name: str
    gradients: Mapping[str, str | None] | None = None
    """Changes to the result of the miner's compressor, as in `tests.truth.states`."""

    config: Mapping[str, Any] | None = None
    """Fields of the model's config, spelled as in the truth table."""

    inner_step: int | None = None
    network: Mapping[str, Any] | None = None
    """Fields of gate-inputs.json's `network`, and `bucket`: the inputs that the guard reads from
    outside the miner."""


@dataclass(frozen=True)
class Plan:
    """All rounds in a run."""

    upload_steps: int
    rounds: Sequence[Round]
    gate_inputs: str | None = None
    """The file that the guard's supervisor would write; the plan writes it for a miner that runs
    without one."""

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@functools.cache
def read() -> Plan:
    """The plan of this process's world."""
    given = json.loads(world.current().plan.read_text(encoding="utf-8"))
    return Plan(**{**given, "rounds": [Round(**one) for one in given["rounds"]]})


class Rounds:
    """Steps through the plan while the miner runs: before each round it waits for the last
    upload."""

    def __init__(self, miner: Any) -> None:
        self._miner = miner
        self._left = list(read().rounds)
        self._now: Round | None = None
        self._future: Any = None
        self._began = 0.0

    def next(self) -> Round | None:
        """The next round; None after the last, when the miner stops."""
        self._finish()
        if not self._left:
            # Until November 2025, the inner loop ended through an event.
            self._miner.should_exit = True
            self._miner.stop_event.set()
            return None
        self._now, self._began = self._left.pop(0), time.time()
        self._future = getattr(self._miner, "current_upload_future", None)
        if self._miner.master:
            world.current().call("round", self._now.name)
        return self._now

    def break_(self, now: Round) -> None:
        """Apply the round's fault to the miner, on rank 0, once its block list has grown."""
        miner = self._miner
        if now.inner_step is not None:
            # On all ranks: the optimizer's step then makes it that.
            miner.local_progress.inner_step = now.inner_step - 1
        if not miner.master:
            return
        for name, value in (now.config or {}).items():
            setattr(miner.model.config, name, states.as_json(value))
        if now.gradients is not None:
            miner.prepare_gradient_dict = functools.partial(
                _broken, miner.prepare_gradient_dict, now.gradients
            )
        _inputs(now)

    def _finish(self) -> None:
        miner, now = self._miner, self._now
        if now is None:
            self._start()
            return
        future, result = miner.current_upload_future, "not started"
        if future is not None and future is not self._future:
            error = future.exception()
            result = repr(future.result()) if error is None else repr(error)
        vars(miner).pop("prepare_gradient_dict", None)
        if miner.master:
            self._record(now, result)
            if now.config:
                miner.model.config.block_list = []
        if now.inner_step is not None:
            miner.local_progress.inner_step = FIRST_STEP

    def _start(self) -> None:
        """Wait for the upload at startup, if any, and set the miner's initial step counters."""
        miner = self._miner
        future = getattr(miner, "current_upload_future", None)
        if future is not None:
            future.exception()
        miner.local_progress.epoch = miner.global_progress.epoch = states.State.network_epoch
        miner.local_progress.inner_step = FIRST_STEP

    def _record(self, now: Round, result: str) -> None:
        import torch

        whole = [p.to_local() if hasattr(p, "to_local") else p for p in miner_state(self._miner)]
        line = {
            "name": now.name,
            "result": result,
            "began": self._began,
            "ended": time.time(),
            "state": hashlib.sha256(
                b"".join(t.detach().numpy().tobytes() for t in whole)
                + torch.get_rng_state().numpy().tobytes()
            ).hexdigest(),
        }
        world.current().log("rounds", line)


def miner_state(miner: Any) -> list[Any]:
    """The tensors that would reveal a difference in the miner's own work."""
    feedback = getattr(miner, "error_feedback", {})
    return [*miner.model.parameters(), *(feedback[name] for name in sorted(feedback))]


def _broken(real: Any, changes: Mapping[str, str | None], *args: Any, **kwargs: Any) -> Any:
    gradient, *rest = real(*args, **kwargs)
    for pattern, expression in changes.items():
        gradient = states.edited(gradient, pattern, expression)
    return (gradient, *rest)


def _inputs(now: Round) -> None:
    path = read().gate_inputs
    if path is None:
        return
    from miner_guard.uploads import gate
    from miner_guard.validators.facts import Network, Published, fingerprint
    from miner_guard.validators.profiles import load_profile

    seen = time.monotonic()
    given = dict(now.network or {})
    bucket = given.pop("bucket", states.BUCKET)
    own = fingerprint(states.COMMITMENT)
    network = Network(
        block=states.BLOCK,
        outer_step=states.State.network_epoch,
        blocks_since_allreduce=states.State.blocks_since_allreduce,
        commitment=own,
        registered=True,
        uid=states.UID,
        reason=None,
        seen_at=seen,
    )
    known = gate.GateInputs(
        published=Published(age_s=600.0, reason=None, seen_at=seen),
        network=replace(network, **given),
        bucket=bucket,
        credentials=own,
        limits=load_profile("sn38").limits,
        written_monotonic=seen,
    )
    gate.write(Path(path), known)
