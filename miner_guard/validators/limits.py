"""The numbers that the rules compare against: the gate's settings and the profile's limits.

Standard library only: rules also run inside rank 0. A limit that is None is disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from miner_guard.config import GateSettings
from miner_guard.validators.facts import Network


@dataclass(frozen=True)
class Limits:
    """Limits for all rules. The first four are the miner's own margins; validators enforce the
    others."""

    min_inner_step: int = 50
    min_upload_interval_s: float = 0.0
    repo_age_target_s: float = 1800.0
    repo_age_limit_s: float = 2000.0

    validator_min_inner_step: int | None = None
    """The lowest inner step that validators accept."""

    validator_repo_age_s: float | None = None
    """Published files of this age or older score zero."""

    not_checked: tuple[str, ...] = ()
    """Descriptions of the checks that validators make but an audit cannot."""

    blocks_per_allreduce: int | None = None
    """Blocks between AllReduces. During the first half, validators score the previous epoch; they
    reject a `block_list` whose newest block is older than half."""

    bucket: str | None = None
    """Name of a miner's bucket, with `{uid}`; without the uid it is the master's."""

    metadata_fields: tuple[str, ...] = ()
    """Fields that metadata.json must have."""

    commitment_form: tuple[int, ...] = ()
    """Lengths of the commitment's fields: account id, read key id, read secret."""

    master_hotkey: str | None = None
    """ss58 address of the master, unless `[chain] master_uid` names another one."""

    endpoint: str | None = None
    """The storage's URL with `{account}`, as validators build it from a commitment."""

    gradients_metadata_key: str | None = None
    """A key that gradients.pt must contain besides the tensors."""

    gradients_chunk: int | None = None
    """Edge length of the (DCT) chunks that indices are relative to; None if they address the whole
    tensor."""

    gradients_value_dtype: str | None = None
    """torch's name for the dtype that values must have: validators scatter them into a tensor of
    that dtype."""

    gradients_scale: float | None = None
    """What validators multiply a value by before they add it to a weight and compute the loss; None
    if they compute none."""

    gradients_max_bytes: int | None = None
    """A larger gradients file is implausible."""

    read_from: str | None = None
    """The validator version that these numbers come from."""

    @classmethod
    def of(cls, settings: GateSettings, numbers: Mapping[str, Any]) -> Limits:
        """Limits from `[gate]` and a profile's `[limits]`. Raises TypeError for an unknown name."""
        if foreign := sorted(numbers.keys() - NAMES):
            raise TypeError(f"no rule reads the limits {', '.join(foreign)}")
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in numbers.items()
        }
        for name in FROM_GATE:
            values[name] = getattr(settings, name)
        return cls(**values)


def in_force(limits: Limits, network: Network) -> Limits:
    """The limits currently in force, adjusted for what `network` reports."""
    if network.blocks_per_allreduce is None:
        return limits
    return replace(limits, blocks_per_allreduce=network.blocks_per_allreduce)


FROM_GATE = ("min_inner_step", "min_upload_interval_s", "repo_age_target_s", "repo_age_limit_s")
"""Limits that are `[gate]` settings; a profile sets their defaults in `[settings.gate]`."""

NAMES = frozenset(f.name for f in fields(Limits)) - {*FROM_GATE}
"""Limits that a profile's `[limits]` may set."""
