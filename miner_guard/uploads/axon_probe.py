"""Child process that checks whether the miner's axon responds:
`python -m miner_guard.uploads.axon_probe`.
Sends the request that validators send, but unsigned: an axon refuses it before its handler runs,
and that refusal counts as a response, as does any other HTTP response that arrives in time.
"""

from __future__ import annotations

import time
from typing import Any

from miner_guard.system import probe
from miner_guard.validators.facts import Axon

PATH = "/IsAlive"
"""bittensor's axon serves each synapse under its class name."""

_DEADLINE_S = 10.0
"""The child's deadline: covers starting the interpreter, connecting and waiting for the
response."""


def reach(address: str | None, timeout_s: float) -> Axon:
    """Ask the axon at `ip:port` once, for at most `_DEADLINE_S`. Never raises."""
    if address is None:
        return Axon(None, reason="the chain's reply did not include it")
    if address == "":
        return Axon("")
    request = {"address": address, "timeout_s": timeout_s}
    answer = probe.ask("miner_guard.uploads.axon_probe", request, _DEADLINE_S)
    if answer.reason is not None or answer.value is None:
        return Axon(address, reason=answer.reason or "the probe returned no answer")
    return Axon(address, float(answer.value))


def ask(address: str, timeout_s: float) -> float:
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


def main() -> None:
    """Reply with the response time in seconds, or with the reason for a failure."""
    from http.client import HTTPException

    request: dict[str, Any] = probe.request()
    try:
        # Wait longer than validators do, to distinguish a slow response from none.
        probe.reply(ask(request["address"], 2 * request["timeout_s"]))
    except (OSError, HTTPException, ValueError) as error:
        probe.reply(error=f"{type(error).__name__}: {error}" if str(error) else repr(error))


if __name__ == "__main__":
    main()
