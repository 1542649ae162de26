"""The network's progress: the outer step that the master validator publishes.

The guard reads it as miners do: with the read keys that the master committed on chain, from the
bucket with our bucket's name minus the uid. It uses the same child process as every other repo
probe.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miner_guard.config import RepoSettings
from miner_guard.record.redaction import without_secrets
from miner_guard.system import probe
from miner_guard.uploads.chain import ChainReading
from miner_guard.uploads.commitments import keys_of, placeholder
from miner_guard.validators.facts import Network, fingerprint
from miner_guard.validators.layout import Layout
from miner_guard.validators.limits import Limits


@dataclass(frozen=True)
class NetworkProgress:
    """The progress that the subnet master's repo reports; `reason` says why it is unknown."""

    outer_step: int | None = None
    last_allreduce_block: int | None = None
    reason: str | None = None


def progress(repo: RepoSettings, limits: Limits, master_commitment: str | None) -> NetworkProgress:
    """Probe the master's repo once, for at most `repo.timeout_s`. Never raises."""
    if master_commitment is None:
        return NetworkProgress(
            reason="the master has committed nothing, or [chain] master_uid is not set"
        )
    keys = keys_of(master_commitment, limits.commitment_form)
    bucket = master_bucket(repo.bucket, limits.bucket_pattern)
    if None in (keys, bucket, limits.endpoint, limits.gradients_key):
        return NetworkProgress(
            reason=(
                "the profile does not say where the master's repo is, or [repo] bucket is not set"
            )
        )
    assert keys is not None
    assert limits.endpoint is not None
    settings = dataclasses.replace(
        repo,
        kind="s3",
        bucket=bucket,
        endpoint=limits.endpoint.format(account=keys["R2_ACCOUNT_ID"]),
        credentials="env",
        credentials_file=None,
    )
    env = without_secrets(os.environ) | keys
    request = {
        "repo": dataclasses.asdict(settings),
        "outer_step": None,
        "names": {},
        "folder": "",
        "max_bytes": -1,
        "layout": dataclasses.asdict(Layout.of(limits)),
    }
    answer = probe.ask("miner_guard.uploads.audit_probe", request, repo.timeout_s, env=env)
    if answer.reason is not None or not isinstance(answer.value, Mapping):
        return NetworkProgress(reason=f"the master's repo: {answer.reason or 'no answer'}")
    outer = answer.value.get("outer_step")
    if not isinstance(outer, int):
        why = (
            answer.value.get("damaged")
            or answer.value.get("refused")
            or "metadata.json is missing or contains no outer step"
        )
        return NetworkProgress(reason=f"the master's repo: {why}")
    block = (answer.value.get("config") or {}).get("last_allreduce_block")
    return NetworkProgress(outer, block if isinstance(block, int) else None)


def _committed(commitment: str | None, form: Sequence[int]) -> str:
    return "" if commitment is None or placeholder(commitment, form) else commitment


def network_of(
    reading: ChainReading,
    ahead: NetworkProgress,
    seen_at: float,
    *,
    form: Sequence[int] = (),
    per_allreduce: int | None = None,
) -> Network:
    """Combine a reading of the chain, whose block was first seen at `seen_at`, with one of the
    master's repo into the facts that the rules need.

    `form`: the lengths of the commitment's fields. `per_allreduce`: the operator's setting for
    blocks per AllReduce, if any.
    """
    since = None
    if reading.block is not None and ahead.last_allreduce_block is not None:
        since = reading.block - ahead.last_allreduce_block
    answered = bool(reading.registered) and "commitment" not in (reading.errors or {})
    return Network(
        block=reading.block,
        outer_step=ahead.outer_step,
        blocks_since_allreduce=since,
        commitment=fingerprint(_committed(reading.commitment, form)) if answered else None,
        registered=reading.registered,
        uid=reading.uid,
        reason=reading.reason,
        seen_at=seen_at,
        blocks_per_allreduce=per_allreduce,
    )


def master_bucket(own: str | None, pattern: str | None) -> str | None:
    """The global model's bucket: our bucket's name without `-{uid}`."""
    match = re.fullmatch(pattern, own) if own is not None and pattern is not None else None
    if own is None or match is None or "uid" not in match.groupdict():
        return None
    return own[: match.start("uid")].rstrip("-") or None
