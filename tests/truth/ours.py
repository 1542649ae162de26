"""Our own verdict on a state, from the audit; this process does the work of the audit's child
processes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import boto3
import pytest

from miner_guard.config import GateSettings, RepoSettings
from miner_guard.system import probe
from miner_guard.uploads import audit
from miner_guard.uploads.repos import child
from miner_guard.uploads.repos.base import RepoError
from miner_guard.validators.facts import Network, fingerprint
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes
from tests.support.gradient_files import inspect_here
from tests.truth import states
from tests.truth.server import Server

SHAPES = Shapes({name: list(shape) for name, shape in states.SHAPES.items()})

_KEYS = {
    "R2_ACCOUNT_ID": states.ACCOUNT,
    "R2_READ_ACCESS_KEY_ID": states.READ_KEY,
    "R2_READ_SECRET_ACCESS_KEY": states.READ_SECRET,
}


def _ask(module: str, request: Mapping[str, Any], deadline_s: float, **how: Any) -> probe.Answer:
    assert module == "miner_guard.uploads.repos.child"
    try:
        value = child.answer(dict(request), how.get("env"))
    except RepoError as error:
        return probe.Answer(None, str(error), 0.0)
    return probe.Answer(json.loads(json.dumps(value)), None, 0.0)


def _kept_clients(make: Callable[..., Any]) -> Callable[..., Any]:
    made: dict[tuple[Any, ...], Any] = {}

    def client(service: str, *, config: Any, **how: Any) -> Any:
        key = (service, repr(vars(config)), *sorted(how.items()))
        if key not in made:
            made[key] = make(service, config=config, **how)
        return made[key]

    return client


class Ours:
    """Asks the audit about states, each served as validators would find it."""

    def __init__(self, server: Server, patch: pytest.MonkeyPatch) -> None:
        self._server = server
        patch.setattr(probe, "ask", _ask)
        patch.setattr(audit, "inspect_file", inspect_here)
        # Creating a client takes a fifth of an audit's time.
        patch.setattr(boto3, "client", _kept_clients(boto3.client))
        for name, value in _KEYS.items():
            patch.setenv(name, value)
        numbers = {**load_profile("sn38").limits, "endpoint": server.endpoint}
        self._limits = Limits.of(GateSettings(), numbers)

    def audit(
        self, state: states.State, earlier: Mapping[str, Any] | None = None
    ) -> audit.AuditReport:
        """Our verdict, given the network that validators of that state would see. `earlier`: the
        limits that differ in an earlier version."""
        self._server.set(state)
        limits = dataclasses.replace(self._limits, **(earlier or {}))
        if state.max_upload_interval is not None and earlier is None:
            # No public source reports failed AllReduces; an operator can set the limit.
            limits = dataclasses.replace(limits, validator_repo_age_s=state.max_upload_interval)
        network = Network(
            block=state.block,
            outer_step=state.network_epoch,
            blocks_since_allreduce=state.blocks_since_allreduce,
            blocks_per_allreduce=state.blocks_per_allreduce,
            commitment=fingerprint(state.commitment or ""),
            registered=True,
            uid=states.UID,
            reason=None,
            seen_at=time.monotonic(),
        )
        repo = RepoSettings(
            kind="s3",
            bucket=state.bucket,
            endpoint=self._server.endpoint.format(account=states.ACCOUNT),
        )
        return audit.run(repo, limits, network, state.commitment, model=SHAPES)


def expected(real: Mapping[str, Any]) -> str:
    """`accepted` if the real validator scores the state and the score can be more than zero."""
    return "accepted" if real["accepts"] and real["worth"] == "something" else "rejected"
