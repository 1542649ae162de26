"""The real bittensor, in the three generations that miners use, has what the guard asks of it, and
a node that never answers costs only its deadline.

bittensor 9.12.2 and torch want different setuptools, so each version has a separate environment,
made once under the user's cache. tests/unit/test_chain.py has the answers, from stand-ins.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from miner_guard.config import ChainSettings
from miner_guard.uploads import chain
from tests.support import requires

VERSIONS = {
    "newest": ["bittensor>=11,<12"],
    "10": ["bittensor>=10,<11"],
    # A fresh install of 9.12.2 is broken without this bound.
    "9.12.2": ["bittensor==9.12.2", "async-substrate-interface<2"],
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


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


CALLS = """
import inspect
import bittensor

def takes(function, *arguments, **named):
    inspect.signature(function).bind(*arguments, **named)

takes(bittensor.Subtensor, "ws://127.0.0.1:1")
if int(bittensor.__version__.split(".")[0]) >= 11:
    from bittensor.metagraph import Metagraph, MetagraphNeuron as Neuron
    told = Metagraph.__annotations__
    subnet = {"name", "neurons"}
    from bittensor.namespaces import Subnets
    from bittensor.reads.identity import Commitment, commitment
    assert isinstance(bittensor.Subtensor.block, property)
    takes(Subnets.metagraph, None, 38, commitments=False)
    takes(commitment, None, netuid=38, hotkey_ss58="5own")
    assert "data" in Commitment.__annotations__, Commitment.__annotations__
    assert bittensor.Balance.from_rao(1).rao == 1
else:
    from bittensor import NeuronInfoLite as Neuron
    from bittensor.core.chain_data import DynamicInfo
    told = DynamicInfo.__annotations__
    subnet = {"subnet_name"}
    takes(bittensor.Subtensor.subnet, None, netuid=38)
    takes(bittensor.Subtensor.get_current_block, None)
    takes(bittensor.Subtensor.neurons_lite, None, netuid=38)
subnet |= {"owner_coldkey", "owner_hotkey", "network_registered_at"}
assert subnet <= set(told), subnet - set(told)
fields = {"uid", "hotkey", "incentive", "emission", "total_stake", "last_update", "coldkey"}
fields |= {"validator_permit"}
missing = [name for name in fields - set(Neuron.__annotations__) if not hasattr(Neuron, name)]
assert not missing, missing
"""


def test_each_generation_has_the_calls_and_fields_that_the_guard_uses(
    python: str, tmp_path: Path
) -> None:
    env = {**os.environ, "READ_ONLY": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", CALLS], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_node_that_accepts_and_never_answers(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These environments have no guard installed, so they import the checkout itself.
    monkeypatch.setenv("PYTHONPATH", str(requires.REPO))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        look = chain.query(ChainSettings(network=url, netuid=38), python=python, timeout_s=8.0)
        assert time.monotonic() - start < 60, "8 s are meant, of a node that never answers"
    assert look.reason is not None
    assert look.block is None
