"""The numbers that the rules compare with: the gate's own settings and the profile's limits.

Standard library only: rules also run inside rank 0. A limit that is None is not in force.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from validators.facts import Network


class OwnLimits(Protocol):
    """What the rules need of `miner_guard.config.GateSettings`."""

    @property
    def min_inner_step(self) -> int: ...
    @property
    def min_inner_step_after_allreduce(self) -> int | None: ...
    @property
    def min_upload_interval_s(self) -> float: ...
    @property
    def repo_age_target_s(self) -> float: ...
    @property
    def repo_age_limit_s(self) -> float: ...


@dataclass(frozen=True)
class Limits:
    """Limits of all rules. The first four are the miner's own caution, the others what validators
    enforce."""

    min_inner_step: int = 50
    min_upload_interval_s: float = 0.0
    repo_age_target_s: float = 1800.0
    repo_age_limit_s: float = 2000.0

    validator_min_inner_step: int | None = None
    """The least inner step that validators accept."""

    validator_repo_age_s: float | None = None
    """Published files of this age or older score zero."""

    block_list_max_age: int | None = None
    """Blocks between the newest of `block_list` and the current block."""

    blocks_per_allreduce: int | None = None
    """Blocks between two AllReduces; in the first half of it the epoch before is scored."""

    block_s: float = 12.0
    """Seconds per block."""

    window_blocks: int | None = None
    """Blocks per window, where a subnet counts in windows."""

    window_put_s: tuple[float, float] | None = None
    """Seconds after a window's start between which an upload must appear."""

    window_inner_steps: int | None = None
    """Inner steps per window."""

    revision_pattern: str | None = None
    """Regular expression of a revision, with the groups `outer` and `inner` where it has them."""

    bucket_pattern: str | None = None
    """Regular expression of the bucket's name; a group `uid` must be the miner's, one `model` the
    `global_model`."""

    global_model: str | None = None
    """The model that validators score; buckets are named after it."""

    gradients_key: str | None = None
    """Where the gradients file lies, with `{outer_step}` in it."""

    config_key: str | None = None
    """Where the config file lies."""

    metadata_key: str | None = None
    """Where the metadata file lies."""

    metadata_fields: tuple[str, ...] = ()
    """Fields that metadata.json must have."""

    commitment_chars: int | None = None
    """Exact length of the commitment on chain."""

    commitment_form: tuple[int, ...] = ()
    """Lengths of its parts: account id, read key id, read secret."""

    endpoint: str | None = None
    """The storage's URL with `{account}`, as validators make it from a commitment."""

    gradients_metadata_key: str | None = None
    """A key that gradients.pt must have beside the tensors."""

    gradients_index_suffix: str = "idxs"
    gradients_value_suffix: str = "vals"
    """`<param>idxs` and `<param>vals` hold the indices and values of a parameter's compressed
    gradient."""

    gradients_chunk: int | None = None
    """Indices count within chunks of this edge (the DCT's), and are whole-tensor indices where it
    is None."""

    gradients_layout: str = "rows"
    """How the chunks of a matrix lie: `rows` of its whole width, or square `blocks`."""

    gradients_inside: str | None = None
    """The key of the file's document that holds the gradients, where they do not fill it."""

    gradients_packed_bits: int | None = None
    """12: indices are packed, two in three bytes of uint8. None: one number each."""

    gradients_topk: int | None = None
    """Values that each chunk must have, or as many as it is long; None: any number."""

    gradients_complete: bool = False
    """A parameter that is missing, or that the model does not have, rejects the whole file."""

    gradients_quant_scale: tuple[float, float] | None = None
    """Least and greatest scale of quantised values that is taken."""

    gradients_value_dtype: str | None = None
    """torch's name of the type that values must have: validators scatter them into a tensor of
    it."""

    gradients_min_bytes: int | None = None
    gradients_max_bytes: int | None = None
    """Sizes outside are not plausible."""

    min_inner_step_after_allreduce: int | None = None
    """The operator's minimum while the archive of an AllReduce is published; None: as always."""

    version: str | None = None
    """The validators' version, where a key names it (`{version}`)."""

    bucket_is_account: bool = False
    """The bucket bears the name of the committed account."""

    read_from: str | None = None
    """The version of the validators that the numbers were read from."""

    @classmethod
    def of(cls, settings: OwnLimits, numbers: Mapping[str, Any]) -> Limits:
        """Limits from `[gate]` and a profile's `[limits]`. Raises TypeError for a name that no rule
        has."""
        if foreign := sorted(numbers.keys() - _NAMES):
            raise TypeError(f"limits that no rule has: {', '.join(foreign)}")
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in numbers.items()
        }
        for name in _OWN:
            values[name] = getattr(settings, name)
        return cls(**values)


def in_force(limits: Limits, network: Network) -> Limits:
    """The limits as the validators that `network` tells of have them now."""
    if network.blocks_per_allreduce is None:
        return limits
    return replace(limits, blocks_per_allreduce=network.blocks_per_allreduce)


_NAMES = frozenset(f.name for f in fields(Limits))
_OWN = (
    "min_inner_step",
    "min_upload_interval_s",
    "repo_age_target_s",
    "repo_age_limit_s",
    "min_inner_step_after_allreduce",
)
