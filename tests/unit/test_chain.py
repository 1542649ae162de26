"""The chain: the same answers from every generation of bittensor, and a node that hangs costs only
its deadline."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import ChainSettings, Config, optional_deps
from miner_guard.record.events import Event
from miner_guard.record.status_document import StatusDocument
from miner_guard.uploads import chain
from miner_guard.uploads.chain import ChainReading, committed_text
from miner_guard.validators.facts import Network, Published
from miner_guard.validators.rules import current_block
from miner_guard.watch.chain import ChainMonitor
from miner_guard.watch.state import NO, judge_earning
from tests.support.contexts import JobsNever, context

SETTINGS = ChainSettings(network="ws://127.0.0.1:1", netuid=38, hotkey="5own", master_uid=0)

NINE = """
__version__ = "9.12.2"
import sys
assert len(sys.argv) == 1, "it parses the command line"
print("bittensor prints to stdout")
class Neuron:
    def __init__(self, uid, hotkey):
        self.uid, self.hotkey, self.incentive = uid, hotkey, 0.25
        self.coldkey, self.validator_permit = "5cold" + hotkey, hotkey == "5master"
        self.emission, self.stake, self.total_stake, self.last_update = 1.5, 9.0, 6.0, 990
class Substrate:
    def query(self, pallet, entry, params):
        class Scale: value = {"info": {"fields": [[{"Raw5": [tuple(b"hello")]}]]}}
        return Scale()
class Subtensor:
    substrate = Substrate()
    def __init__(self, network): pass
    def get_current_block(self): return 1000
    def neurons_lite(self, netuid): return [Neuron(0, "5master"), Neuron(1, "5own")]
    def subnet(self, netuid):
        class Info:
            subnet_name, network_registered_at = "dstrbtd", 100
            owner_coldkey, owner_hotkey = "5cold5master", "5founder"
        return Info()
"""
TEN = NINE.replace("9.12.2", "10.5.0")
ELEVEN = """
__version__ = "11.3.0"
from types import SimpleNamespace as S
class Subtensor:
    block = 1000
    def __init__(self, network):
        amount = lambda rao: S(rao=rao)
        row = lambda uid, hotkey: S(uid=uid, hotkey=hotkey, incentive=0.25,
            coldkey="5cold" + hotkey, validator_permit=hotkey == "5master",
            emission=amount(1_500_000_000), total_stake=amount(6_000_000_000), last_update=990)
        graph = S(name="dstrbtd", network_registered_at=100, owner_coldkey="5cold5master",
            owner_hotkey="5founder", neurons=[row(0, "5master"), row(1, "5own")])
        self.subnets = S(metagraph=lambda netuid, commitments: graph)
        self.identity = S(commitment=lambda netuid, hotkey_ss58: S(data="hello"))
"""


def with_bittensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> ChainReading:
    (tmp_path / "bittensor.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return chain.query(SETTINGS)


@pytest.mark.parametrize("source", [NINE, TEN, ELEVEN], ids=["9.12.2", "10.5.0", "11.3.0"])
def test_every_generation_gives_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    look = with_bittensor(tmp_path, monkeypatch, source)
    assert look.errors == {}
    assert (look.block, look.registered, look.uid, look.incentive) == (1000, True, 1, 0.25)
    assert (look.emission, look.last_update) == (1.5, 990)
    assert (look.commitment, look.master_commitment) == ("hello", "hello")
    assert chain.summary(look, 57) == (
        "block 1000 of ws://127.0.0.1:1, subnet 38 dstrbtd of 5cold5ma… since block 100, 1 of 1 "
        "validators set weights, 50% burned, registered as uid 1, incentive 0.2500, emission 1.5, "
        "updated 10 blocks ago, commitment 5 characters, network outer step 57"
    )
    assert "hello" not in str(chain.as_fields(look))


def test_a_uid_that_went_to_another_hotkey_is_a_lost_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = with_bittensor(tmp_path, monkeypatch, NINE.replace("5own", "5other"))
    assert look.registered is False
    assert "50% burned, NOT registered" in chain.summary(look)


def test_a_netuid_without_a_subnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = NINE.replace("return Info()", "return None").replace(
        '[Neuron(0, "5m', '[][Neuron(0, "5m'
    )
    look = with_bittensor(tmp_path, monkeypatch, gone)
    assert look.exists is False
    assert str(chain.unpaid(look, None, TODAY)).startswith("subnet 38 does not exist (block 1000,")


TODAY = datetime.date(2026, 11, 27)
PAYS = ChainReading(
    None, "finney", 7_000_000, 9, True, "iota", "5owner", 2_000_000, 0.4, 14, 12, True, 1
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"burn_share": 0.999}, None),
        ({"burn_share": None}, None),
        ({"burn_share": 1.0}, "the validators of subnet 9 burn 100% of the incentive"),
        ({"validators_active": 0}, "no validator of subnet 9 has set weights in 5000 blocks"),
        ({"registered_at": 6_000_000}, "registered on 2026-07-12 (block 7000000, finney)"),
        ({"exists": False}, "subnet 9 does not exist"),
        ({"exists": None, "burn_share": 1.0}, None),
    ],
)
def test_the_chain_shows_that_the_network_pays_nobody(
    change: dict[str, Any], words: str | None
) -> None:
    """The evidence has its block and its source. A subnet that was registered after the profile
    was written has taken the netuid of the one that the profile describes."""
    said = chain.unpaid(replace(PAYS, **change), datetime.date(2026, 6, 1), TODAY)
    assert words in said if words and said else said is words


def test_a_network_that_pays_nobody_is_said_once_and_is_a_state_of_earning(
    monitor: ChainMonitor,
) -> None:
    burns = replace(GOOD, **{**vars(PAYS), "burn_share": 1.0})
    (first,) = shown(monitor.observe(burns, Published(), 0.0))
    assert first.level == "warning"
    assert first.text.startswith("CHAIN pays no miner: the validators of subnet 9 burn 100%")
    assert shown(monitor.observe(burns, Published(), 60.0)) == []
    status = StatusDocument.from_json({"chain": monitor.snapshot()})
    assert judge_earning(status, endangered=False)[0] == NO
    (pays,) = shown(monitor.observe(replace(PAYS, block=7_000_009), Published(), 120.0))
    assert pays.level == "info"
    assert monitor.snapshot()["unpaid"] is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys; sys.exit('usage: bittensor')", "exited with 1: usage: bittensor"),
        (
            "raise ImportError('scalecodec')",
            f"bittensor cannot be imported (scalecodec); {optional_deps.install('chain')}",
        ),
        (
            "raise RuntimeError('wallets')",
            "can't connect to ws://127.0.0.1:1: RuntimeError: wallets",
        ),
        (
            NINE.replace("return 1000", "raise TimeoutError('ws')"),
            "the current block: TimeoutError",
        ),
    ],
)
def test_any_failure_of_bittensor_becomes_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    look = with_bittensor(tmp_path, monkeypatch, source)
    assert words in str(look.reason)
    assert look.registered is None


def test_a_node_that_accepts_and_never_answers_costs_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bittensor.py").write_text(
        "import time\n__version__ = '11.3.0'\ndef Subtensor(network): time.sleep(300)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    look = chain.query(ChainSettings(network="ws://127.0.0.1:1", netuid=38), timeout_s=1.0)
    assert look.reason == "no answer within 1 s"
    assert time.monotonic() - start < 60, "1 s is meant; the node would take 300"


def test_no_secret_reaches_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", "planted")
    code = "import os\nraise RuntimeError(f\"seen {os.environ.get('R2_WRITE_SECRET_ACCESS_KEY')}\")"
    assert "seen None" in str(with_bittensor(tmp_path, monkeypatch, code).reason)
    monkeypatch.setattr("miner_guard.uploads.chain.without_secrets", dict)
    look = with_bittensor(tmp_path, monkeypatch, code)
    assert "seen planted" in str(look.reason), "the attack works"


@pytest.mark.parametrize(
    "fields",
    [
        [[{"Raw5": "0x" + b"hello".hex()}]],
        [[{"Raw5": [list(b"hello")]}]],
        [({"Raw5": tuple(b"hello")},)],
    ],
)
def test_a_commitment_in_every_decoders_shape(fields: Any) -> None:
    assert committed_text({"info": {"fields": fields}}) == "hello"
    assert committed_text(None) is None


@pytest.fixture
def monitor(tmp_path: Path) -> ChainMonitor:
    return ChainMonitor(context(tmp_path, config=Config(chain=SETTINGS), jobs=JobsNever()))


def shown(events: Any) -> list[Event]:
    return [f for f in events if f.level != "debug"]


GOOD = ChainReading(block=1000, registered=True, uid=1, commitment="a" * 128, errors={})


def test_a_lost_registration_is_critical_and_repeated(monitor: ChainMonitor) -> None:
    ahead = Published(outer_step=57, config={"last_allreduce_block": 900})
    (first,) = shown(monitor.observe(GOOD, ahead, 0.0))
    assert first.fields["network"]["outer_step"] == 57
    assert first.fields["network"]["blocks_since_allreduce"] == 100
    assert first.fields["network"]["commitment"].startswith("128:")
    lost = ChainReading(block=1010, registered=False, errors={})
    (critical,) = shown(monitor.observe(lost, ahead, 120.0))
    assert critical.level == "critical"
    assert critical.text.startswith(
        "CHAIN UNREGISTERED: the hotkey is not registered on subnet 38 at block 1010"
    )
    assert [
        f.name
        for f in shown(
            monitor.observe(ChainReading(block=1020, registered=False, errors={}), ahead, 240.0)
        )
    ] == []
    again = shown(
        monitor.observe(ChainReading(block=1100, registered=False, errors={}), ahead, 1100.0)
    )
    assert [event.level for event in again] == ["critical"]


def test_an_unknown_registration_is_never_called_lost(monitor: ChainMonitor) -> None:
    silent = ChainReading(reason="no answer within 30 s")
    (unknown,) = shown(monitor.observe(silent, Published(), 0.0))
    assert unknown.text == "CHAIN unknown: no answer within 30 s"
    assert unknown.fields["network"]["reason"] == "no answer within 30 s"
    assert shown(monitor.observe(silent, Published(), 120.0)) == []


def test_a_frozen_node_is_reported_and_the_chain_advances_behind_it(monitor: ChainMonitor) -> None:
    list(monitor.observe(GOOD, Published(), 0.0))
    assert shown(monitor.observe(GOOD, Published(), 60.0)) == []
    (frozen,) = shown(monitor.observe(GOOD, Published(), 121.0))
    assert "no new block for 121s" in frozen.text
    assert frozen.level == "warning"
    # If the guard's node is as stuck as the miner's, an old block_list must not look recent.
    looks = [next(iter(monitor.observe(GOOD, Published(), 60.0 * n))) for n in range(3, 61)]
    network = Network(**looks[-1].fields["network"])
    assert current_block(network, 3600.0) == 1000 + 300
    moved = next(iter(monitor.observe(replace(GOOD, block=1290), Published(), 3660.0)))
    assert current_block(Network(**moved.fields["network"]), 3672.0) == 1291
