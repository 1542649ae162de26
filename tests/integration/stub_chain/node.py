"""A fake chain node: a websocket that answers the queries of bittensor 9 to 11 with synthetic
values.

`python node.py STATE.json` prints its port. STATE: `{"block", "netuid", "hotkeys": [public key in
hex], "commitments": {uid: text}, "salt"}`; the salt changes the genesis hash, which bittensor 11
uses as the key of its metadata cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import metadata
import websockets
from scale import blake2_concat, compact, option, storage_key, twox, u16, u64, vector

RAO = 10**9


class Node:
    """One frozen state of one subnet."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._block: int = state["block"]
        self._netuid: int = state["netuid"]
        self._hotkeys = [bytes.fromhex(key) for key in state["hotkeys"]]
        self._commitments = {int(uid): text for uid, text in state["commitments"].items()}
        self._salt: str = state["salt"]
        self._storage = dict(self._stored())
        self._numbers = {
            self._hash(number): number for number in range(self._block - 9, self._block + 2)
        }

    def _stored(self) -> Any:
        netuid = u16(self._netuid)
        for uid, key in enumerate(self._hotkeys):
            yield storage_key("SubtensorModule", "Uids", netuid, blake2_concat(key)), u16(uid)
            yield storage_key("SubtensorModule", "Keys", netuid, u16(uid)), key
            if uid in self._commitments:
                data = self._commitments[uid].encode()
                value = struct.pack("<QI", 0, self._block - 100) + vector(
                    [bytes([len(data) + 1]) + data]
                )
                yield storage_key("Commitments", "CommitmentOf", netuid, twox(key, 1) + key), value
        updates = vector(u64(self._updated(uid)) for uid in range(len(self._hotkeys)))
        yield storage_key("SubtensorModule", "LastUpdate", netuid), updates
        yield storage_key("SubtensorModule", "TokenSymbol", netuid), vector([b"X"])
        yield storage_key("SubtensorModule", "NetworksAdded", netuid), b"\1"

    def _updated(self, uid: int) -> int:
        return self._block - 10 * uid

    def _hash(self, number: int) -> str:
        return "0x" + hashlib.sha256(f"{self._salt} {number}".encode()).hexdigest()

    def _metagraph(self) -> bytes:
        keys, uids = self._hotkeys, range(len(self._hotkeys))
        numbers = {
            "netuid": self._netuid,
            "block": self._block,
            "tempo": 360,
            "num_uids": len(keys),
            "max_uids": 256,
        }
        lists: dict[str, list[bytes]] = {
            "hotkeys": keys,
            "coldkeys": keys,
            "active": [b"\1"] * len(keys),
            "validator_permit": [b"\0"] * len(keys),
            "last_update": [compact(self._updated(uid)) for uid in uids],
            "emission": [compact(RAO * uid) for uid in uids],
            "incentives": [compact(1000 * uid) for uid in uids],
            "trust": [compact(3000 * uid) for uid in uids],
            "rank": [compact(4000 * uid) for uid in uids],
            "total_stake": [compact(6 * RAO) for _ in uids],
        }
        out = b""
        for name, _ in metadata.METAGRAPH:
            if name in ("owner_hotkey", "owner_coldkey"):
                out += keys[0]
            elif name in numbers or name in (
                "network_registered_at",
                "last_step",
                "blocks_since_last_step",
            ):
                out += compact(numbers.get(name, 0))
            else:
                out += vector(lists.get(name, [compact(0) for _ in uids]))
        return option(out)

    def _neurons(self) -> bytes:
        rows = []
        for uid, key in enumerate(self._hotkeys):
            numbers = {
                "uid": uid,
                "netuid": self._netuid,
                "rank": 4000 * uid,
                "emission": RAO * uid,
                "incentive": 1000 * uid,
                "trust": 3000 * uid,
                "last_update": self._updated(uid),
            }
            special = {
                "hotkey": key,
                "coldkey": key,
                "active": b"\1",
                "validator_permit": b"\0",
                "axon_info": bytes(8 + 4 + 16 + 2 + 4),
                "prometheus_info": bytes(8 + 4 + 16 + 2 + 1),
                "stake": vector([key + compact(6 * RAO)]),
            }
            rows.append(
                b"".join(
                    special.get(name) or compact(numbers.get(name, 0))
                    for name, _ in metadata.NEURON
                )
            )
        return vector(rows)

    def answer(self, method: str, params: list[Any]) -> Any:
        if method == "state_call":
            return self._call(str(params[0]))
        handler = getattr(self, f"_{method}", None)
        if handler is None:
            raise KeyError(method)
        return handler(params)

    def _call(self, name: str) -> str:
        if name == "Metadata_metadata_at_version":
            data = metadata.v15()
            return "0x" + option(compact(len(data)) + data).hex()
        calls = {
            "SubnetInfoRuntimeApi_get_metagraph": self._metagraph,
            "NeuronInfoRuntimeApi_get_neurons_lite": self._neurons,
        }
        return "0x" + calls[name]().hex()

    def _chain_getHead(self, _params: list[Any]) -> str:
        return self._hash(self._block)

    def _chain_getFinalizedHead(self, _params: list[Any]) -> str:
        return self._hash(self._block - 3)

    def _chain_getBlockHash(self, params: list[Any]) -> str:
        return self._hash(self._block if not params or params[0] is None else params[0])

    def _chain_getHeader(self, params: list[Any]) -> dict[str, Any]:
        number = self._numbers.get(params[0], self._block) if params and params[0] else self._block
        empty = "0x" + "11" * 32
        return {
            "parentHash": self._hash(number - 1),
            "number": hex(number),
            "stateRoot": empty,
            "extrinsicsRoot": empty,
            "digest": {"logs": []},
        }

    def _state_getRuntimeVersion(self, _params: list[Any]) -> dict[str, Any]:
        return {
            "specName": "node-subtensor",
            "implName": "stub",
            "authoringVersion": 1,
            "specVersion": 1,
            "implVersion": 1,
            "apis": [],
            "transactionVersion": 1,
            "stateVersion": 1,
        }

    def _state_getMetadata(self, _params: list[Any]) -> str:
        return "0x" + metadata.v14().hex()

    def _state_getStorage(self, params: list[Any]) -> str | None:
        value = self._storage.get(params[0])
        return None if value is None else "0x" + value.hex()

    _state_getStorageAt = _state_getStorage

    def _state_queryStorageAt(self, params: list[Any]) -> list[dict[str, Any]]:
        changes = [[key, self._state_getStorage([key])] for key in params[0]]
        return [{"block": self._hash(self._block), "changes": changes}]

    def _system_properties(self, _params: list[Any]) -> dict[str, Any]:
        return {"ss58Format": 42, "tokenDecimals": 9, "tokenSymbol": "TAO"}

    def _system_chain(self, _params: list[Any]) -> str:
        return "Stub"


async def main() -> None:
    node = Node(json.loads(Path(sys.argv[1]).read_text()))

    async def serve(socket: Any) -> None:
        async for raw in socket:
            request = json.loads(raw)
            reply: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
            try:
                reply["result"] = node.answer(request["method"], request.get("params") or [])
            except Exception as error:  # noqa: BLE001 - whatever is asked, a node answers
                reply["error"] = {"code": -32601, "message": repr(error)}
            await socket.send(json.dumps(reply))

    async with websockets.serve(serve, "127.0.0.1", 0, max_size=None) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await asyncio.Future()


if __name__ == "__main__":
    asyncio.run(main())
