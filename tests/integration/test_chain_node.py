"""Reads the chain through the real bittensor, in the three generations that miners use, from a stub
node.

bittensor 9.12.2 and torch want different setuptools, so each version has a separate environment,
made once under the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from miner_guard.config import ChainSettings
from miner_guard.uploads import chain

pytest.importorskip("websockets", reason="the stub node speaks websocket: pip install websockets")
pytest.importorskip("xxhash", reason="the stub node hashes storage keys: pip install xxhash")

HERE = Path(__file__).parent
REPO = HERE.parents[1]
VERSIONS = {
    "newest": ["bittensor>=11,<12"],
    "10": ["bittensor>=10,<11"],
    # A fresh install of 9.12.2 is broken without this bound.
    "9.12.2": ["bittensor==9.12.2", "async-substrate-interface<2"],
}
KEYS = [hashlib.sha256(f"hotkey {n}".encode()).digest() for n in range(3)]
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def ss58(key: bytes) -> str:
    """An address in the generic format (42), which bittensor uses for hotkeys."""
    data = bytes([42]) + key
    data += hashlib.blake2b(b"SS58PRE" + data).digest()[:2]
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return text


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has this version of bittensor."""
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "miner-guard-tests"
    home = base / f"bittensor-{request.param}-py{sys.version_info[0]}{sys.version_info[1]}"
    interpreter = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        done = subprocess.run(
            [interpreter, "-m", "pip", "install", "-q", "psutil", *VERSIONS[request.param]],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(
                f"bittensor {request.param} could not be installed: {done.stderr.strip()[-300:]}"
            )
        (home / "ready").touch()
    return str(interpreter)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[str]:
    """A stub node's URL."""
    state = {
        "block": 5_000_000,
        "netuid": 38,
        "hotkeys": [key.hex() for key in KEYS],
        "commitments": {"0": "m" * 128, "1": "a" * 128},
        "salt": str(tmp_path),
    }
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    process = subprocess.Popen(
        [sys.executable, HERE / "stub_chain" / "node.py", file],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield f"ws://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def ask(
    url: str, python: str, hotkey: bytes, monkeypatch: pytest.MonkeyPatch, home: Path
) -> chain.ChainReading:
    # The environments for old bittensor versions have no guard installed, so they import the
    # checkout itself.
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("HOME", str(home))
    settings = ChainSettings(network=url, netuid=38, hotkey=ss58(hotkey), master_uid=0)
    return chain.query(settings, python=python)


def test_old_and_new_give_the_same_answers(
    node: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = ask(node, python, KEYS[1], monkeypatch, tmp_path)
    assert look.reason is None
    assert look.errors == {}
    assert (look.block, look.neurons, look.registered, look.uid) == (5_000_000, 3, True, 1)
    assert look.last_update == 4_999_990
    assert look.incentive == pytest.approx(1000 / 65535)
    assert (look.emission, look.stake) == (1.0, 6.0)
    assert (look.commitment, look.master_commitment) == ("a" * 128, "m" * 128)
    assert not (tmp_path / ".bittensor" / "wallets").exists()


def test_a_hotkey_that_is_not_registered(
    node: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = ask(node, python, hashlib.sha256(b"stranger").digest(), monkeypatch, tmp_path)
    assert (look.registered, look.uid, look.block) == (False, None, 5_000_000)


def test_a_node_that_accepts_and_never_answers(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        look = chain.query(ChainSettings(network=url, netuid=38), python=python, timeout_s=8.0)
        assert time.monotonic() - start < 60, "8 s are meant, of a node that never answers"
    assert look.reason is not None
    assert look.block is None
