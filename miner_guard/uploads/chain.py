"""What the guard learns through the chain: the subnet's state, the hotkey's neuron, its commitment,
and the progress that the subnet's master publishes.

bittensor 9.10 to 11 runs in a child with a deadline, `python -m miner_guard.uploads.chain`: it
parses the command line, prints, takes over its process's logging, uses up to 160 MB, and may hang
for minutes if a node does not respond. The child reads only public data and opens no wallet.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miner_guard.config import ChainSettings, RepoSettings, optional_deps
from miner_guard.record.redaction import without_secrets
from miner_guard.system import probe
from miner_guard.uploads.repos import look_at
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find
from miner_guard.validators.facts import Network, Published, fingerprint, whole
from miner_guard.validators.limits import Limits
from miner_guard.validators.rules import BLOCK_S

# the subnet and the hotkey's neuron


@dataclass(frozen=True)
class ChainReading:
    """The result of one query. If it failed, `reason` says why and all other fields are None."""

    reason: str | None = None
    source: str | None = None
    """The `[chain] network` that answered."""

    block: int | None = None
    netuid: int | None = None
    exists: bool | None = None
    """Whether there is such a subnet; the next six fields describe it."""

    subnet: str | None = None
    """The subnet's name."""

    owner: str | None = None
    """ss58 address of the owner's coldkey."""

    registered_at: int | None = None
    """Block number of the subnet's registration."""

    burn_share: float | None = None
    """Share of the incentive that goes to the owner's own neurons, which the chain burns. None if
    no neuron has any."""

    validators: int | None = None
    """Neurons with a validator's permit."""

    validators_active: int | None = None
    """Those that have set weights in the last `ACTIVITY_CUTOFF` blocks."""

    registered: bool | None = None
    """Whether the hotkey is registered; None if no hotkey is configured or the query failed."""

    uid: int | None = None
    incentive: float | None = None
    emission: float | None = None
    last_update: int | None = None
    """Block number of the neuron's last update."""

    commitment: str | None = None
    """The committed text. It is public, but it contains the read keys: never log or store it."""

    master_commitment: str | None = None
    bittensor: str | None = None
    errors: Mapping[str, str] | None = None
    """Fields that could not be read, each with its reason."""


_FIELDS = ChainReading.__dataclass_fields__

ACTIVITY_CUTOFF = 5000
"""After so many blocks without new weights (16 h 40 min), a validator counts as inactive: the
chain's own default."""


def query(
    settings: ChainSettings,
    master_hotkey: str | None = None,
    *,
    python: str = sys.executable,
    timeout_s: float = 30.0,
) -> ChainReading:
    """Query the chain, for at most `timeout_s` seconds. `master_hotkey`: the master, unless the
    settings name its uid. Never raises."""
    for key in ("network", "netuid"):
        if getattr(settings, key) is None:
            return ChainReading(reason=f"no [chain] {key} configured")
    request = {
        "network": settings.network,
        "netuid": settings.netuid,
        "hotkey": settings.hotkey,
        "master_uid": settings.master_uid,
        "master_hotkey": None if settings.master_uid is not None else master_hotkey,
    }
    # Public data only: secrets do not belong in a process that runs third-party code.
    env = without_secrets(os.environ)
    answer = probe.ask("miner_guard.uploads.chain", request, timeout_s, python=python, env=env)
    if answer.reason is not None or not isinstance(answer.value, dict):
        return ChainReading(reason=answer.reason or "the query returned no answer")
    values = {name: value for name, value in answer.value.items() if name in _FIELDS}
    return ChainReading(**values, source=settings.network, netuid=settings.netuid)


def unpaid(
    reading: ChainReading, described: datetime.date | None, today: datetime.date
) -> str | None:
    """What on the chain shows that the network pays no miner at the moment; None if nothing does.

    A subnet that was registered after the profile `described` its network is another one, which has
    taken its netuid.
    """
    if reading.exists is None or reading.block is None:
        return None
    place = f"subnet {reading.netuid}"
    by = f"(block {reading.block}, {reading.source})"
    if not reading.exists:
        return f"{place} does not exist {by}"
    if described is not None and reading.registered_at is not None:
        age_s = (reading.block - reading.registered_at) * BLOCK_S
        since = today - datetime.timedelta(seconds=age_s)
        if since > described:
            return (
                f"{place} is another network than the profile's of {described}: "
                f"{reading.subnet!r}, registered on {since} {by}"
            )
    if reading.validators_active == 0:
        return f"no validator of {place} has set weights in {ACTIVITY_CUTOFF} blocks {by}"
    if reading.burn_share is not None and reading.burn_share > 0.9995:
        return f"the validators of {place} burn 100% of the incentive {by}"
    return None


def summary(reading: ChainReading, outer_step: int | None = None) -> str:
    """The text after `CHAIN `: the block and its source, the subnet's state, the hotkey's."""
    if reading.reason is not None:
        return f"unknown: {reading.reason}"
    words = [f"block {reading.block} of {reading.source}"]
    if reading.exists:
        burned = "" if reading.burn_share is None else f", {reading.burn_share:.0%} burned"
        words += [
            f"subnet {reading.netuid} {reading.subnet} of {str(reading.owner)[:8]}… since block "
            f"{reading.registered_at}",
            f"{reading.validators_active} of {reading.validators} validators set weights{burned}",
        ]
    if reading.registered is not None:
        words.append(f"registered as uid {reading.uid}" if reading.registered else "NOT registered")
    if reading.incentive is not None:
        words.append(f"incentive {reading.incentive:.4f}")
    if reading.emission is not None:
        words.append(f"emission {reading.emission:.4g}")
    if reading.last_update is not None and reading.block is not None:
        words.append(f"updated {reading.block - reading.last_update} blocks ago")
    if reading.registered:
        words.append(
            "nothing committed"
            if reading.commitment is None
            else f"commitment {len(reading.commitment)} characters"
        )
    if outer_step is not None:
        words.append(f"network outer step {outer_step}")
    words += [f"{what} unknown ({why})" for what, why in (reading.errors or {}).items()]
    return ", ".join(words)


def as_fields(reading: ChainReading) -> dict[str, Any]:
    """The result for an event: everything but the commitments."""
    excluded = {"commitment", "master_commitment", "reason"}
    return {name: getattr(reading, name) for name in _FIELDS if name not in excluded}


# the commitment: the read keys of a bucket, as subnet 38's miner writes them (its utils/chain.py)

NAMES = ("R2_ACCOUNT_ID", "R2_READ_ACCESS_KEY_ID", "R2_READ_SECRET_ACCESS_KEY")
"""Names in the miner's `.env.example`; the commitment is their values, concatenated."""


def commitment_of(keys: Mapping[str, str] | None) -> str | None:
    """The commitment formed from these keys."""
    return None if keys is None else "".join(keys[name] for name in NAMES)


def configured(repo: RepoSettings) -> dict[str, str] | None:
    """The configured read keys by name; None if a key is missing or the file is unreadable."""
    try:
        keys = find(repo)
    except RepoError:
        # Opening the repo with these settings reports what is wrong with the file.
        return None
    values = {name: keys.get(name, "").strip() for name in NAMES}
    return values if all(values.values()) else None


def keys_of(commitment: str, form: Sequence[int]) -> dict[str, str] | None:
    """Split a commitment into keys of the lengths in `form`; None if it does not match."""
    if len(commitment) != sum(form) or len(form) != len(NAMES):
        return None
    return dict(zip(NAMES, _fields(commitment, form), strict=True))


def placeholder(commitment: str, form: Sequence[int]) -> bool:
    """Return whether a field of the commitment is all x, its initial value, which validators treat
    as unset."""
    return any(set(field) == {"x"} for field in _fields(commitment, form))


def _fields(commitment: str, form: Sequence[int]) -> list[str]:
    ends = itertools.accumulate(form)
    return [commitment[end - length : end] for length, end in zip(form, ends, strict=True)]


# the network's progress


def master_state(repo: RepoSettings, limits: Limits, master_commitment: str | None) -> Published:
    """Probe the master's repo once, within the time that `look_at` takes. Without an `outer_step`,
    `reason` says why. Never raises."""
    if master_commitment is None:
        words = "the master has committed nothing, or [chain] master_uid is not its uid"
        return Published(reason=words)
    keys = keys_of(master_commitment, limits.commitment_form)
    if keys is None or limits.bucket is None or limits.endpoint is None:
        return Published(reason="the profile does not say where the master's repo is")
    # The global model's bucket is a miner's without the uid.
    bucket = limits.bucket.partition("-{")[0]
    settings = dataclasses.replace(
        repo,
        kind="s3",
        bucket=bucket,
        endpoint=limits.endpoint.format(account=keys["R2_ACCOUNT_ID"]),
        credentials="env",
        credentials_file=None,
    )
    published = look_at(settings, env=without_secrets(os.environ) | keys).published
    why = published.reason or "metadata.json is missing"
    return dataclasses.replace(published, reason=f"the master's repo: {why}")


def network_of(
    reading: ChainReading,
    master: Published,
    seen_at: float,
    *,
    form: Sequence[int] = (),
    per_allreduce: int | None = None,
) -> Network:
    """Combine a reading of the chain, whose block was first seen at `seen_at`, with the master's
    repo into the facts that the rules need.

    `form`: the lengths of the commitment's fields. `per_allreduce`: the operator's setting for
    blocks per AllReduce, if any.
    """
    last = whole(master.config, "last_allreduce_block")
    since = None if reading.block is None or last is None else reading.block - last
    answered = bool(reading.registered) and "commitment" not in (reading.errors or {})
    text = reading.commitment or ""
    if placeholder(text, form):
        text = ""
    return Network(
        block=reading.block,
        outer_step=master.outer_step,
        blocks_since_allreduce=since,
        commitment=fingerprint(text) if answered else None,
        registered=reading.registered,
        uid=reading.uid,
        reason=reading.reason,
        seen_at=seen_at,
        blocks_per_allreduce=per_allreduce,
    )


# in the child


class BeforeEleven:
    """bittensor 9 and 10: flat methods on Subtensor. Each method may raise any exception."""

    def __init__(self, subtensor: Any) -> None:
        self._subtensor = subtensor

    def block(self) -> int:
        return int(self._subtensor.get_current_block())

    def commitment(self, netuid: int, hotkey: str) -> str | None:
        # Not get_commitment: it fetches the whole metagraph for one key, and returns "" for every
        # error.
        stored = self._subtensor.substrate.query("Commitments", "CommitmentOf", [netuid, hotkey])
        return committed_text(getattr(stored, "value", stored))

    def subnet(self, netuid: int) -> dict[str, Any] | None:
        info = self._subtensor.subnet(netuid=netuid)
        return None if info is None else _subnet(info, info.subnet_name)

    def neurons(self, netuid: int) -> list[dict[str, Any]]:
        # Not metagraph: it makes three more runtime calls, one of which was renamed between
        # versions.
        return [_row(n, float) for n in self._subtensor.neurons_lite(netuid=netuid)]


class Eleven:
    """bittensor 11: namespaces on Subtensor, one object per neuron."""

    def __init__(self, subtensor: Any) -> None:
        self._subtensor = subtensor

    def block(self) -> int:
        return int(self._subtensor.block)

    def commitment(self, netuid: int, hotkey: str) -> str | None:
        entry = self._subtensor.identity.commitment(netuid=netuid, hotkey_ss58=hotkey)
        return entry.data if entry else None

    def subnet(self, netuid: int) -> dict[str, Any] | None:
        graph = self._graph(netuid)
        return None if graph is None else _subnet(graph, graph.name)

    def neurons(self, netuid: int) -> list[dict[str, Any]]:
        graph = self._graph(netuid)
        neurons = [] if graph is None else graph.neurons
        return [_row(n, lambda balance: balance.rao / 1e9) for n in neurons]

    @functools.cache  # noqa: B019 - the child asks once and ends
    def _graph(self, netuid: int) -> Any:
        return self._subtensor.subnets.metagraph(netuid, commitments=False)


def connect(network: str) -> tuple[BeforeEleven | Eleven, str]:
    """Connect; returns the client and bittensor's version. Raises whatever bittensor raises, and
    ImportError if it is not installed."""
    # 9.x parses the command line on import and again in Subtensor(): `--help` there would exit.
    sys.argv = sys.argv[:1]
    import bittensor

    version = str(bittensor.__version__)
    subtensor = bittensor.Subtensor(network)
    generation = int(version.split(".")[0])
    return (Eleven if generation >= 11 else BeforeEleven)(subtensor), version


def answer_of(chain: BeforeEleven | Eleven, request: Mapping[str, Any]) -> dict[str, Any]:
    """The chain's data; an unreadable field is null, with its reason under `errors`."""
    netuid, hotkey = request["netuid"], request["hotkey"]
    masters = {request["master_uid"], request["master_hotkey"]} - {None}
    errors: dict[str, str] = {}

    def ask(what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:  # noqa: BLE001 -- bittensor may raise anything; the answer reports the reason
            errors[what] = f"{type(error).__name__}: {error}"[:200]
            return None

    answer: dict[str, Any] = {"block": ask("block", chain.block), "errors": errors}
    subnet = ask("subnet", lambda: chain.subnet(netuid))
    if "subnet" not in errors:
        answer |= {"exists": subnet is not None, **(subnet or {})}
    neurons = ask("metagraph", lambda: chain.neurons(netuid))
    if neurons is None:
        return answer
    answer |= _weights(neurons, subnet, answer["block"])
    neuron = next((n for n in neurons if n["hotkey"] == hotkey), None)
    master = next((n for n in neurons if masters & {n["uid"], n["hotkey"]}), None)
    if hotkey is not None:
        answer["registered"] = neuron is not None
    if neuron is not None:
        answer |= {name: value for name, value in neuron.items() if name in _FIELDS}
        answer["commitment"] = ask("commitment", lambda: chain.commitment(netuid, neuron["hotkey"]))
    if master is not None:
        answer["master_commitment"] = ask(
            "master", lambda: chain.commitment(netuid, master["hotkey"])
        )
    return answer


def _subnet(info: Any, name: str) -> dict[str, Any]:
    values = {"owner": info.owner_coldkey, "owner_hotkey": info.owner_hotkey}
    return {**values, "subnet": name, "registered_at": int(info.network_registered_at)}


def _weights(
    neurons: Sequence[Mapping[str, Any]], subnet: Mapping[str, Any] | None, block: int | None
) -> dict[str, Any]:
    """Who sets weights, and how much of the incentive they give to the subnet's owner."""
    updated = [n["last_update"] for n in neurons if n["validator_permit"]]
    answer: dict[str, Any] = {"validators": len(updated)}
    if block is not None:
        answer["validators_active"] = sum(block - at <= ACTIVITY_CUTOFF for at in updated)
    total = sum(n["incentive"] for n in neurons)
    if subnet is not None and total > 0:
        owners = {subnet["owner"], subnet["owner_hotkey"]}
        burned = [n["incentive"] for n in neurons if owners & {n["hotkey"], n["coldkey"]}]
        answer["burn_share"] = sum(burned) / total
    return answer


def committed_text(stored: Any) -> str | None:
    """The text of a `CommitmentOf` entry: `{"info": {"fields": [[{"Raw5": …}]]}}`; None if nothing
    is committed.

    Raises TypeError for a commitment of any other shape.
    """
    return None if stored is None else _data_of(stored["info"]["fields"]).decode("utf-8", "replace")


def _data_of(value: Any) -> bytes:
    """Find the bytes: a string (hexadecimal after `0x`) or numbers, nested in lists in a way that
    depends on the decoder's version."""
    if isinstance(value, Mapping) and value:
        return _data_of(next(iter(value.values())))
    if isinstance(value, str):
        return bytes.fromhex(value[2:]) if value.startswith("0x") else value.encode()
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return _data_of(value[0])
    raise TypeError(f"the commitment has the unexpected type {type(value).__name__}")


def _row(neuron: Any, amount: Callable[[Any], float]) -> dict[str, Any]:
    """The values that the guard uses from a neuron's data; `amount` converts emission and stake."""
    return {
        "uid": int(neuron.uid),
        "hotkey": str(neuron.hotkey),
        "coldkey": str(neuron.coldkey),
        "validator_permit": bool(neuron.validator_permit),
        "incentive": float(neuron.incentive),
        "emission": amount(neuron.emission),
        "last_update": int(neuron.last_update),
    }


def main() -> None:
    """Answer the request on stdin: the chain's data, or the reason for a failure."""
    request = probe.request()
    # Without this, bittensor 9 creates ~/.bittensor.
    os.environ["READ_ONLY"] = "1"
    try:
        chain, version = connect(request["network"])
    except ImportError as error:
        probe.reply(
            error=f"bittensor cannot be imported ({error}); {optional_deps.install('chain')}"
        )
        return
    except Exception as error:  # noqa: BLE001 -- bittensor may raise anything on import or connection; the answer reports it
        probe.reply(
            error=f"can't connect to {request['network']}: {type(error).__name__}: {error}"[:400]
        )
        return
    answer = answer_of(chain, request)
    if answer["block"] is None:
        probe.reply(
            error=f"{request['network']} did not return the current block: "
            f"{answer['errors'].get('block')}"
        )
        return
    probe.reply({**answer, "bittensor": version})


if __name__ == "__main__":
    main()
