"""Which of the truth table's rejects a miner can cause before its upload, and why it cannot cause
the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miner_guard.uploads.chain import placeholder
from miner_guard.validators.facts import fingerprint
from miner_guard.validators.profiles import load_profile
from tests.truth import states
from tests.truth.miner.plan import Round

TABLE = Path(__file__).parents[1] / "sn38.jsonl"
VERSION = "1.2.7"
"""The validator version that the profile describes; its verdicts count."""

_GRADIENTS = "written by torch.save, after the gate's last look; the audit finds it"
_METADATA = "the miner writes all fields, as int() of its counters, after the upload"
_CONFIG = "the miner writes config.json as JSON, from its list of whole numbers"
_LATER = "comes about in storage or with time; the audit finds it"
_OTHER_EPOCH = "about which epoch validators score; the files are in order"
_RAISES = "the miner raises before it uploads, with and without the guard"
_KEYS = "whether keys open the bucket only storage tells: the gate warns of others, the audit tries"


@dataclass(frozen=True)
class Beyond:
    """A reject that the miner cannot show before its upload."""

    name: str
    why: str


def all_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[Round | Beyond]:
    """Every state that gets no score from the real validator."""
    for line in lines:
        real = line["real"][VERSION]
        if not (real["accepts"] and real["worth"] == "something"):
            yield _of(line)


def rounds_and_beyond() -> tuple[list[Round], list[Beyond]]:
    """The table's rejects: those that the miner itself can cause, plus an early step, which no
    bucket shows; then the others."""
    found = list(all_of(states.lines(TABLE)))
    early = Round("inner_step: 7, of at least 50 by the operator's setting", inner_step=7)
    return (
        [*(one for one in found if isinstance(one, Round)), early],
        [one for one in found if isinstance(one, Beyond)],
    )


def _of(line: Mapping[str, Any]) -> Round | Beyond:
    name = f"{line['group'].removesuffix(', new')}: {line['case']}"
    network, objects = line.get("network", {}), line.get("objects", {})
    if {"epoch", "also", "inner"} & line.keys() or "refuse" in network or "age" in network:
        return Beyond(name, _LATER if {"refuse", "age"} & network.keys() else _OTHER_EPOCH)
    if "bytes" in line or "save" in line or any("gradients.pt" in key for key in objects):
        return Beyond(name, _GRADIENTS)
    if "gradients" in line:
        return Round(name, gradients=line["gradients"])
    if "blocks_per_allreduce" in network or "config.json" in "".join(objects):
        return _block_list(name, objects, network)
    if "metadata.json" in objects:
        changed = (objects["metadata.json"] or {}).get("json", {})
        if changed == {"inner_step": 0} and type(changed["inner_step"]) is int:
            return Round(name, inner_step=0)
        return Beyond(name, _METADATA)
    return _credentials(name, network)


def _block_list(
    name: str, objects: Mapping[str, Any], network: Mapping[str, Any]
) -> Round | Beyond:
    changed = (objects.get("epoch-56/config.json") or {}).get("json", {})
    if "block_list" not in changed:
        return Beyond(name, _CONFIG)
    if changed["block_list"] == "<absent>":
        return Beyond(name, _RAISES)
    known = {k: v for k, v in network.items() if k.startswith("blocks_")}
    return Round(name, config=changed, network=known)


def _credentials(name: str, network: Mapping[str, Any]) -> Round | Beyond:
    if "bucket" in network:
        return Round(name, network={"bucket": network["bucket"]})
    if "good_keys" in network:
        return Beyond(name, _KEYS)
    committed = states.build({"network": {"commitment": network["commitment"]}}).commitment or ""
    form = load_profile("sn38").limits["commitment_form"]
    if len(committed) == sum(form) and not placeholder(committed, form):
        return Beyond(name, _KEYS)
    # The guard treats a placeholder as if nothing were committed.
    known = "" if placeholder(committed, form) else committed
    return Round(name, network={"commitment": fingerprint(known)})
