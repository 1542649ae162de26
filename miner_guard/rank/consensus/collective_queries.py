"""Questions that get the same answer on all ranks: rank 0 provides it, and every rank waits for
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miner_guard.rank import environment
from miner_guard.rank.consensus import agree, gating
from miner_guard.rank.recorder import Recorder, describe
from miner_guard.rank.steps import Report, Stepper
from miner_guard.uploads.decision import GateDecision
from miner_guard.validators.facts import Candidate


class CollectiveQueries:
    """Asks collective questions on behalf of one rank. All methods but `agreement` wait for the
    other ranks, in the `collective` phase."""

    def __init__(
        self,
        place: environment.RankContext,
        gate: gating.Gate,
        recorder: Recorder,
        stepper: Stepper,
        *,
        report: Report,
    ) -> None:
        """`report` receives the error if rank 0 fails to find its answer."""
        self._place = place
        self._gate = gate
        self._recorder = recorder
        self._stepper = stepper
        self._report = report
        self._agreement: gating.Agreement | None = None
        self._no_group: str | None = None
        self._checkpoints = 0
        self._notices: tuple[int, bool, int] = (-1, False, 0)

    def agreement(self) -> gating.Agreement:
        """The agreement between the ranks. The first call creates it, at a point that all ranks
        reach. Raises NoConsensus if the ranks can't agree."""
        if self._agreement is None:
            dist = environment.initialised_distributed()
            if dist is not None and dist.get_world_size() > 1:
                self._check_place(dist.get_rank(), dist.get_world_size())
                self._agreement = self._group(dist)
            elif self._place.world_size > 1:
                raise agree.NoConsensus(
                    "torch.distributed is not initialised, so the "
                    f"{self._place.world_size} ranks can't agree"
                )
            else:
                self._agreement = agree.SingleRank()
        return self._agreement

    def _group(self, dist: Any) -> agree.Group:
        if self._no_group is None:
            try:
                return agree.group_of(dist, self._place)
            except Exception as error:  # noqa: BLE001 - torch's versions raise different types; reported
                self._no_group = f"the ranks can't reach each other: {describe(error)}"
        # Do not try again in this launch: all ranks must number their questions identically.
        raise agree.NoConsensus(self._no_group)

    def _check_place(self, rank: int, world_size: int) -> None:
        # Slurm and MPI pass the rank in variables that the guard does not know, so before
        # init_process_group every rank assumes that it is rank 0.
        if (rank, world_size) != (self._place.rank, self._place.world_size):
            self._recorder.report_error(
                "place",
                f"this is rank {rank} of {world_size}, but it is recorded as rank "
                f"{self._place.rank} of {self._place.world_size}: call miner_guard.init() after "
                "init_process_group",
            )

    def may_upload(
        self, candidate: Candidate, question: str | None
    ) -> tuple[GateDecision, str | None]:
        """Return the decision and, if the ranks did not agree on one, what went wrong
        (`gating.Gate.ask`)."""
        with self._waiting():
            return self._gate.ask(self.agreement, candidate, question)

    def upload_due(self) -> bool:
        """Return whether the published upload is older than its target age. Raises NoConsensus."""
        return self._notice()[1]

    def checkpoint_requested(self) -> bool:
        """Return whether a checkpoint has been requested since this method last returned True.
        Raises NoConsensus."""
        asked = self._notice()[2]
        if asked <= self._checkpoints:
            return False
        self._checkpoints = asked
        return True

    def _notice(self) -> tuple[int, bool, int]:
        """Return (step, upload due, checkpoint requests) as rank 0 knows them. The ranks share them
        once per step."""
        step = self._stepper.count
        if self._notices[0] != step:
            due, requests = self._shared(f"notice {step}", self._notice_here).split()
            self._notices = (step, due == b"1", int(requests))
        return self._notices

    def _notice_here(self) -> bytes:
        flight = self._recorder.flight
        asked = 0 if flight is None else flight.checkpoint_requests()
        try:
            return b"%d %d" % (self._gate.due(), asked)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; reported as guard_degraded
            self._report("upload_due", error)
            return b"0 %d" % asked

    def due(
        self, operation: str, every_s: float | None, every_steps: int | None, step: int | None
    ) -> bool:
        """Return whether an operation is due. `MonitoringCostTracker.due` decides that on rank 0.
        `step` defaults to this process's step. Raises NoConsensus."""
        count = self._stepper.count

        def here() -> bytes:
            return b"%d" % self._due_here(
                operation, every_s, every_steps, count if step is None else step
            )

        return self._shared(f"due {operation} {count}", here) == b"1"

    def _due_here(
        self, operation: str, every_s: float | None, every_steps: int | None, step: int
    ) -> bool:
        from miner_guard.costs.global_tracker import get_global_tracker

        try:
            return get_global_tracker().due(
                operation, every_s=every_s, every_steps=every_steps, step=step
            )
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; reported as guard_degraded
            self._report("due", error)
            return False

    def _shared(self, question: str, here: Callable[[], bytes]) -> bytes:
        """Call `here` on rank 0 and return its result on every rank."""
        own = here() if self._place.rank == 0 else None
        with self._waiting():
            return self.agreement().share(question, own)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            with self._stepper.names.named("collective"):
                yield
        finally:
            if isinstance(self._agreement, agree.Group) and self._agreement.late:
                on = f" on {absent}" if (absent := self._agreement.absent) else ""
                self._recorder.report_error(
                    agree.LATE, f"a rank{on} did not ask in time, and the ranks can no longer agree"
                )
