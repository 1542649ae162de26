"""The handmade metadata of a small runtime: the types, storage and runtime calls that the guard's
queries use.

bittensor decodes every response with the node's metadata, so a stub node must describe itself as a
real one does: version 14 for bittensor 9, version 15 for 10 and 11.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from scale import compact, option, text, vector

_PRIMITIVES = {"bool": 0, "char": 1, "str": 2, "u8": 3, "u16": 4, "u32": 5, "u64": 6, "u128": 7}
Field = tuple["str | None", int]


class Registry:
    """Types by number, as metadata holds them. Each method returns the number of the type that it
    adds or finds."""

    def __init__(self) -> None:
        self._types: list[bytes] = []
        self._numbers: dict[object, int] = {}

    def _add(
        self,
        key: object,
        path: Sequence[str],
        definition: bytes,
        parameters: Sequence[tuple[str, int]] = (),
    ) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._types)
            names = vector(text(name) + option(compact(number)) for name, number in parameters)
            self._types.append(vector(map(text, path)) + names + definition + vector([]))
        return self._numbers[key]

    def primitive(self, name: str) -> int:
        return self._add(name, [], b"\5" + bytes([_PRIMITIVES[name]]))

    def sequence(self, of: int) -> int:
        return self._add(("sequence", of), [], b"\2" + compact(of))

    def array(self, length: int, of: int) -> int:
        return self._add(("array", length, of), [], b"\3" + struct.pack("<I", length) + compact(of))

    def tuple_of(self, *of: int) -> int:
        return self._add(("tuple", of), [], b"\4" + vector(map(compact, of)))

    def compact_of(self, of: int) -> int:
        return self._add(("compact", of), [], b"\6" + compact(of))

    def composite(
        self,
        path: Sequence[str],
        fields: Iterable[Field],
        parameters: Sequence[tuple[str, int]] = (),
    ) -> int:
        return self._add(
            path[-1], path, b"\0" + vector(_field(name, of) for name, of in fields), parameters
        )

    def variants(
        self,
        path: Sequence[str],
        variants: Iterable[tuple[str, int, Sequence[Field]]],
        key: object = None,
        parameters: Sequence[tuple[str, int]] = (),
    ) -> int:
        rows = (
            text(name) + vector(_field(*field) for field in fields) + bytes([index]) + vector([])
            for name, index, fields in variants
        )
        return self._add(key or path[-1], path, b"\1" + vector(rows), parameters)

    def option_of(self, of: int) -> int:
        return self.variants(
            ["Option"], [("None", 0, []), ("Some", 1, [(None, of)])], ("option", of), [("T", of)]
        )

    def encoded(self) -> bytes:
        return vector(compact(number) + definition for number, definition in enumerate(self._types))


def _field(name: str | None, of: int) -> bytes:
    return option(None if name is None else text(name)) + compact(of) + option(None) + vector([])


R = Registry()
U8, U16, U32, U64, U128, BOOL = (
    R.primitive(name) for name in ("u8", "u16", "u32", "u64", "u128", "bool")
)
UNIT = R.tuple_of()
BYTES = R.sequence(U8)
ACCOUNT = R.composite(["sp_core", "crypto", "AccountId32"], [(None, R.array(32, U8))])
C16, C64 = R.compact_of(U16), R.compact_of(U64)

_RAW = [(f"Raw{n}", n + 1, [(None, R.array(n, U8))]) for n in range(129)]
_DATA = R.variants(["pallet_commitments", "types", "Data"], [("None", 0, []), *_RAW])
_FIELDS = R.composite(
    ["bounded_collections", "bounded_vec", "BoundedVec"], [(None, R.sequence(_DATA))]
)
_INFO = R.composite(["pallet_commitments", "types", "CommitmentInfo"], [("fields", _FIELDS)])
REGISTRATION = R.composite(
    ["pallet_commitments", "types", "Registration"],
    [("deposit", U64), ("block", U32), ("info", _INFO)],
)

_SCALARS = {
    "netuid": C16,
    "network_registered_at": C64,
    "owner_hotkey": ACCOUNT,
    "owner_coldkey": ACCOUNT,
    "block": C64,
    "tempo": C16,
    "last_step": C64,
    "blocks_since_last_step": C64,
    "num_uids": C16,
    "max_uids": C16,
}
_LISTS = {
    "hotkeys": ACCOUNT,
    "coldkeys": ACCOUNT,
    "active": BOOL,
    "validator_permit": BOOL,
    "pruning_score": C16,
    "last_update": C64,
    "emission": C64,
    "dividends": C16,
    "incentives": C16,
    "consensus": C16,
    "trust": C16,
    "rank": C16,
    "block_at_registration": C64,
    "alpha_stake": C64,
    "tao_stake": C64,
    "total_stake": C64,
}
METAGRAPH: list[tuple[str, int]] = [
    *_SCALARS.items(),
    *((name, R.sequence(of)) for name, of in _LISTS.items()),
]
"""Fields of bittensor 11's metagraph, in order."""

_AXON = R.composite(
    ["pallet_subtensor", "pallet", "AxonInfo"],
    [
        ("block", U64),
        ("version", U32),
        ("ip", U128),
        ("port", U16),
        ("ip_type", U8),
        ("protocol", U8),
        ("placeholder1", U8),
        ("placeholder2", U8),
    ],
)
_PROMETHEUS = R.composite(
    ["pallet_subtensor", "pallet", "PrometheusInfo"],
    [("block", U64), ("version", U32), ("ip", U128), ("port", U16), ("ip_type", U8)],
)
NEURON: list[tuple[str, int]] = [
    ("hotkey", ACCOUNT),
    ("coldkey", ACCOUNT),
    ("uid", C16),
    ("netuid", C16),
    ("active", BOOL),
    ("axon_info", _AXON),
    ("prometheus_info", _PROMETHEUS),
    ("stake", R.sequence(R.tuple_of(ACCOUNT, C64))),
    ("rank", C16),
    ("emission", C64),
    ("incentive", C16),
    ("consensus", C16),
    ("trust", C16),
    ("validator_trust", C16),
    ("dividends", C16),
    ("last_update", C64),
    ("validator_permit", BOOL),
    ("pruning_score", C16),
]
"""Light neuron fields in bittensor 9 and 10, in order."""

_METAGRAPH = R.composite(["pallet_subtensor", "rpc_info", "metagraph", "Metagraph"], METAGRAPH)
_NEURON = R.composite(["pallet_subtensor", "rpc_info", "neuron_info", "NeuronInfoLite"], NEURON)

_BLAKE2_CONCAT, _TWOX_CONCAT, _IDENTITY = 2, 5, 6
_OPTIONAL, _DEFAULT = 0, 1
_STORAGE: dict[str, list[tuple[str, Sequence[int], int | None, int, int, bytes]]] = {
    "System": [("Number", (), None, U32, _DEFAULT, b"\0" * 4)],
    "SubtensorModule": [
        ("Uids", (_IDENTITY, _BLAKE2_CONCAT), R.tuple_of(U16, ACCOUNT), U16, _OPTIONAL, b"\0"),
        ("Keys", (_IDENTITY, _IDENTITY), R.tuple_of(U16, U16), ACCOUNT, _DEFAULT, b"\0" * 32),
        ("LastUpdate", (_IDENTITY,), U16, R.sequence(U64), _DEFAULT, b"\0"),
        ("TokenSymbol", (_IDENTITY,), U16, BYTES, _DEFAULT, b"\0"),
        ("NetworksAdded", (_IDENTITY,), U16, BOOL, _DEFAULT, b"\0"),
    ],
    "Commitments": [
        (
            "CommitmentOf",
            (_IDENTITY, _TWOX_CONCAT),
            R.tuple_of(U16, ACCOUNT),
            REGISTRATION,
            _OPTIONAL,
            b"\0",
        )
    ],
}
_CALLS = {
    "SubnetInfoRuntimeApi": [("get_metagraph", [("netuid", U16)], R.option_of(_METAGRAPH))],
    "NeuronInfoRuntimeApi": [("get_neurons_lite", [("netuid", U16)], R.sequence(_NEURON))],
}
_CONSTANTS = {
    "System": [
        ("BlockHashCount", U32, struct.pack("<I", 4096)),
        ("SS58Prefix", U16, struct.pack("<H", 42)),
    ]
}

_CALL, _EVENT, _ERROR = (
    R.variants(["stub", name], []) for name in ("RuntimeCall", "RuntimeEvent", "RuntimeError")
)
_RUNTIME = R.composite(["stub", "Runtime"], [])
_EXTRINSIC = R.composite(
    ["sp_runtime", "generic", "unchecked_extrinsic", "UncheckedExtrinsic"],
    [(None, BYTES)],
    [("Address", UNIT), ("Call", _CALL), ("Signature", UNIT), ("Extra", UNIT)],
)


def _entry(
    name: str, hashers: Sequence[int], key: int | None, value: int, modifier: int, default: bytes
) -> bytes:
    if key is None:
        kind = b"\0" + compact(value)
    else:
        kind = b"\1" + vector(bytes([hasher]) for hasher in hashers) + compact(key) + compact(value)
    return text(name) + bytes([modifier]) + kind + compact(len(default)) + default + vector([])


def _pallets(version: int) -> bytes:
    rows = []
    for index, (pallet, entries) in enumerate(_STORAGE.items()):
        storage = text(pallet) + vector(_entry(*entry) for entry in entries)
        constants = vector(
            text(name) + compact(of) + compact(len(value)) + value + vector([])
            for name, of, value in _CONSTANTS.get(pallet, [])
        )
        row = (
            text(pallet)
            + option(storage)
            + option(None)
            + option(None)
            + constants
            + option(None)
            + bytes([index])
        )
        rows.append(row + (vector([]) if version == 15 else b""))
    return vector(rows)


def v14() -> bytes:
    """For bittensor 9."""
    return (
        b"meta\x0e"
        + R.encoded()
        + _pallets(14)
        + compact(_EXTRINSIC)
        + b"\4"
        + vector([])
        + compact(_RUNTIME)
    )


def v15() -> bytes:
    """For bittensor 10 and 11, with the runtime calls of all versions."""
    calls = vector(
        text(api)
        + vector(
            text(name)
            + vector(text(n) + compact(of) for n, of in inputs)
            + compact(output)
            + vector([])
            for name, inputs, output in methods
        )
        + vector([])
        for api, methods in _CALLS.items()
    )
    extrinsic = b"\4" + compact(UNIT) + compact(_CALL) + compact(UNIT) + compact(UNIT) + vector([])
    outer = compact(_CALL) + compact(_EVENT) + compact(_ERROR)
    return (
        b"meta\x0f"
        + R.encoded()
        + _pallets(15)
        + extrinsic
        + compact(_RUNTIME)
        + calls
        + outer
        + vector([])
    )
