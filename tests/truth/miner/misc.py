"""Replaces utils/misc.py and utils/logger.py: no DHT, no wandb, no speed test."""

from __future__ import annotations

from typing import Any


class PeerId:
    """The libp2p identity of the miner."""

    def to_bytes(self) -> bytes:
        return b"peer"

    def to_base58(self) -> str:
        return "12D3KooWtest"

    def __str__(self) -> str:
        return self.to_base58()


def init_dht(miner: Any) -> None:
    if miner.master:
        miner.dht = type("Dht", (), {"peer_id": PeerId()})()


def setup_logging(*_: Any, **__: Any) -> None:
    pass


def load_wandb(*_: Any, **__: Any) -> None:
    pass


def get_bandwidth() -> dict[str, float]:
    return {}


def ttl_get_block(miner: Any) -> int:
    block: int = miner.subtensor.get_current_block()
    return block
