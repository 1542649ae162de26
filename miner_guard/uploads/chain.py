"""The chain and what hangs on it: the hotkey's neuron, its commitment and axon, and the progress
that the subnet's master publishes.

bittensor 9.10 to 11 runs in a child with a deadline, `python -m miner_guard.uploads.chain`: it
parses the command line, prints, takes over its process's logging, uses up to 160 MB, and may hang
for minutes if a node does not respond. The child reads only public data and opens no wallet.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miner_guard.config import ChainSettings, RepoSettings, optional_deps
from miner_guard.record.redaction import without_secrets
from miner_guard.system import probe
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find
from miner_guard.validators.facts import Axon, Network, fingerprint
from miner_guard.validators.files import Layout
from miner_guard.validators.limits import Limits

# the hotkey's neuron


@dataclass(frozen=True)
class ChainReading:
    """The result of one query. If it failed, `reason` says why and all other fields are None."""

    reason: str | None = None
    block: int | None = None
    registered: bool | None = None
    """Whether the hotkey is registered; None if no hotkey is configured or the query failed."""

    uid: int | None = None
    incentive: float | None = None
    emission: float | None = None
    stake: float | None = None
    last_update: int | None = None
    """Block number of the neuron's last update."""

    axon: str | None = None
    """`ip:port` where validators reach the miner; empty if it announces none, None if unknown."""

    commitment: str | None = None
    """The committed text. It is public, but it contains the read keys: never log or store it."""

    master_commitment: str | None = None
    neurons: int | None = None
    bittensor: str | None = None
    errors: Mapping[str, str] | None = None
    """Fields that could not be read, each with its reason."""


_FIELDS = ChainReading.__dataclass_fields__


def query(settings: ChainSettings, *, python: str = sys.executable) -> ChainReading:
    """Query the chain, for at most `settings.timeout_s`. Never raises."""
    if settings.network is None or settings.netuid is None:
        missing = " and ".join(
            key for key in ("network", "netuid") if getattr(settings, key) is None
        )
        return ChainReading(reason=f"no [chain] {missing} configured")
    request = {
        "network": settings.network,
        "netuid": settings.netuid,
        "hotkey": settings.hotkey,
        "master_uid": settings.master_uid,
    }
    # Public data only: secrets do not belong in a process that runs third-party code.
    env = without_secrets(os.environ)
    answer = probe.ask(
        "miner_guard.uploads.chain", request, settings.timeout_s, python=python, env=env
    )
    if answer.reason is not None or not isinstance(answer.value, dict):
        return ChainReading(reason=answer.reason or "the query returned no answer")
    return ChainReading(**{name: value for name, value in answer.value.items() if name in _FIELDS})


def summary(reading: ChainReading, outer_step: int | None = None) -> str:
    """The text after `CHAIN `."""
    if reading.reason is not None:
        return f"unknown: {reading.reason}"
    words = [f"block {reading.block}"]
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
    left_out = {"commitment", "master_commitment", "reason"}
    return {name: getattr(reading, name) for name in _FIELDS if name not in left_out}


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
    answer = probe.ask("miner_guard.uploads.repos.child", request, repo.timeout_s, env=env)
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


# the axon

PATH = "/IsAlive"
"""bittensor's axon serves each synapse under its class name."""

_AXON_S = 10.0
"""The child's deadline: covers starting the interpreter, connecting and waiting for the
response."""


def reach(address: str | None, timeout_s: float) -> Axon:
    """Ask the axon at `ip:port` once, for at most `_AXON_S`, as validators do but unsigned: an axon
    refuses that before its handler runs, and the refusal counts as a response. Never raises."""
    if address is None:
        return Axon(None, reason="the chain's reply did not include it")
    if address == "":
        return Axon("")
    request = {"address": address, "timeout_s": timeout_s}
    answer = probe.ask("miner_guard.uploads.chain", request, _AXON_S)
    if answer.reason is not None or answer.value is None:
        return Axon(address, reason=answer.reason or "the probe returned no answer")
    return Axon(address, float(answer.value))


def response_time(address: str, timeout_s: float) -> float:
    """Seconds until the first line of an HTTP response. Raises OSError or HTTPException."""
    # Import it only in the child: http.client imports ssl, and the supervisor imports this module.
    import http.client

    host, _, port = address.rpartition(":")
    start = time.monotonic()
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request("POST", PATH, body="{}", headers={"Content-Type": "application/json"})
        connection.getresponse()
        return time.monotonic() - start
    finally:
        connection.close()


# in the child


class ChainClient(Protocol):
    """One interface to every generation of bittensor. Each method may raise any exception."""

    def block(self) -> int: ...
    def uid(self, netuid: int, hotkey: str) -> int | None: ...
    def commitment(self, netuid: int, uid: int, hotkey: str) -> str | None: ...
    def neurons(self, netuid: int) -> list[dict[str, Any]]: ...


class BeforeEleven:
    """bittensor 9 and 10: flat methods on Subtensor."""

    def __init__(self, subtensor: Any) -> None:
        self._subtensor = subtensor

    def block(self) -> int:
        return int(self._subtensor.get_current_block())

    def uid(self, netuid: int, hotkey: str) -> int | None:
        uid = self._subtensor.get_uid_for_hotkey_on_subnet(hotkey_ss58=hotkey, netuid=netuid)
        return None if uid is None else int(uid)

    def commitment(self, netuid: int, uid: int, hotkey: str) -> str | None:
        # Not get_commitment: it fetches the whole metagraph for one key, and returns "" for every
        # error.
        stored = self._subtensor.substrate.query("Commitments", "CommitmentOf", [netuid, hotkey])
        return committed_text(getattr(stored, "value", stored))

    def neurons(self, netuid: int) -> list[dict[str, Any]]:
        # Not metagraph: it makes three more runtime calls, one of which was renamed between
        # versions.
        return [_row(n, _float) for n in self._subtensor.neurons_lite(netuid=netuid)]


class Eleven:
    """bittensor 11: namespaces on Subtensor, one object per neuron."""

    def __init__(self, subtensor: Any) -> None:
        self._subtensor = subtensor

    def block(self) -> int:
        return int(self._subtensor.block)

    def uid(self, netuid: int, hotkey: str) -> int | None:
        uid = self._subtensor.neurons.uid(hotkey_ss58=hotkey, netuid=netuid)
        return None if uid is None else int(uid)

    def commitment(self, netuid: int, uid: int, hotkey: str) -> str | None:
        entry = self._subtensor.identity.commitment(netuid=netuid, hotkey_ss58=hotkey)
        return entry.data if entry else None

    def neurons(self, netuid: int) -> list[dict[str, Any]]:
        neurons = self._subtensor.subnets.metagraph(netuid, commitments=False)
        return [_row(n, _amount) for n in neurons]


def connect(network: str) -> tuple[ChainClient, str]:
    """Connect; returns the client and bittensor's version. Raises whatever bittensor raises, and
    ImportError if it is not installed."""
    # 9.x parses the command line on import and again in Subtensor(): `--help` there would exit.
    sys.argv = sys.argv[:1]
    import bittensor

    version = str(bittensor.__version__)
    subtensor = bittensor.Subtensor(network)
    generation = int(version.split(".")[0])
    return (Eleven if generation >= 11 else BeforeEleven)(subtensor), version


def answer_of(
    chain: ChainClient, netuid: int, hotkey: str | None, master_uid: int | None
) -> dict[str, Any]:
    """The chain's data; an unreadable field is null, with its reason under `errors`."""
    errors: dict[str, str] = {}

    def ask(what: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:  # noqa: BLE001 -- bittensor may raise anything; the answer reports the reason
            errors[what] = f"{type(error).__name__}: {error}"[:200]
            return None

    block = ask("block", chain.block)
    neurons = ask("metagraph", lambda: chain.neurons(netuid))
    answer: dict[str, Any] = {
        "block": block,
        "neurons": None if neurons is None else len(neurons),
        "errors": errors,
    }
    rows = {n["uid"]: n for n in neurons or ()}
    if hotkey is not None:
        answer |= _own(chain, netuid, hotkey, rows, ask=ask, errors=errors)
    if master_uid is not None and master_uid in rows:
        master = str(rows[master_uid]["hotkey"])
        answer["master_commitment"] = ask(
            "master", lambda: chain.commitment(netuid, master_uid, master)
        )
    return answer


def _own(
    chain: ChainClient,
    netuid: int,
    hotkey: str,
    rows: Mapping[int, Mapping[str, Any]],
    *,
    ask: Callable[[str, Callable[[], Any]], Any],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    uid = ask("uid", lambda: chain.uid(netuid, hotkey))
    listed = next((u for u, row in rows.items() if row["hotkey"] == hotkey), None)
    if uid is None and listed is not None:
        uid = listed
    if uid is not None:
        row = rows.get(uid, {})
        # The chain gives a deregistered hotkey's uid to the next hotkey.
        same = not row or row.get("hotkey") == hotkey
        names = ("incentive", "emission", "stake", "last_update", "axon")
        fields = {name: row.get(name) for name in names} if same else {}
        commitment = ask("commitment", lambda: chain.commitment(netuid, uid, hotkey))
        return {"uid": uid, "registered": same, **fields, "commitment": commitment}
    return {"uid": None, "registered": None if "uid" in errors else False}


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


def _row(neuron: Any, amount: Callable[[Any], float | None]) -> dict[str, Any]:
    """The values that the guard uses from a neuron's data; `amount` converts emission and stake."""
    return {
        "uid": int(neuron.uid),
        "hotkey": str(neuron.hotkey),
        "incentive": _float(neuron.incentive),
        "emission": amount(neuron.emission),
        "stake": amount(neuron.total_stake),
        "last_update": None if neuron.last_update is None else int(neuron.last_update),
        "axon": _axon(neuron),
    }


def _axon(neuron: Any) -> str | None:
    """`ip:port` at which the neuron serves; empty if it announces no address, None if unknown."""
    if hasattr(neuron, "axon"):
        # bittensor 11 gives the text itself, or None if the neuron serves nothing.
        return str(neuron.axon or "")
    info = getattr(neuron, "axon_info", None)
    ip, port = getattr(info, "ip", None), getattr(info, "port", None)
    if ip is None or port is None:
        return None
    served = str(ip) not in ("", "0", "0.0.0.0", "::") and int(port) > 0
    return f"{f'[{ip}]' if ':' in str(ip) else ip}:{int(port)}" if served else ""


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _amount(balance: Any) -> float | None:
    return None if balance is None else balance.rao / 1e9


def _answer_axon(address: str, timeout_s: float) -> None:
    from http.client import HTTPException

    try:
        # Wait longer than validators do, to distinguish a slow response from none.
        probe.reply(response_time(address, 2 * timeout_s))
    except (OSError, HTTPException, ValueError) as error:
        probe.reply(error=f"{type(error).__name__}: {error}" if str(error) else repr(error))


def main() -> None:
    """Answer the request on stdin: an axon's response time or the chain's data, or the reason for a
    failure."""
    request = probe.request()
    if "address" in request:
        _answer_axon(request["address"], request["timeout_s"])
        return
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
    answer = answer_of(chain, request["netuid"], request["hotkey"], request["master_uid"])
    if answer["block"] is None:
        probe.reply(
            error=f"{request['network']} did not return the current block: "
            f"{answer['errors'].get('block')}"
        )
        return
    probe.reply({**answer, "bittensor": version})


if __name__ == "__main__":
    main()
