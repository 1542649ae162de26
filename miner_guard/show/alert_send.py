"""Sends messages through Apprise, or pings a heartbeat URL.

Run as `python -m miner_guard.show.alert_send`, in a child process with a deadline, so that an
unresponsive webhook blocks only this child. Addresses arrive on stdin, and replies name them only
by kind, because they contain secrets.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from miner_guard.config import optional_deps
from miner_guard.system import probe

_TIMEOUT_S = 10.0
_TYPES = {"critical": "failure", "error": "failure", "warning": "warning"}


def main() -> None:
    """Reply with the messages that were not delivered and the reason for each, or with 1 for a
    heartbeat that was delivered."""
    request: Mapping[str, Any] = probe.request()
    try:
        done = _ping(request["heartbeat_url"]) if "heartbeat_url" in request else _send(request)
    except ImportError as error:
        # Apprise is missing, or is installed without one of its dependencies.
        probe.reply(error=optional_deps.problem("alerts") or f"apprise can't be imported: {error}")
        return
    except (OSError, ValueError) as error:
        probe.reply(error=f"{type(error).__name__}: {getattr(error, 'reason', None) or error}")
        return
    probe.reply(done)


def _ping(url: str) -> int:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the heartbeat URL must begin with http:// or https://")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
        return 1


def _send(request: Mapping[str, Any]) -> dict[str, str]:
    """Send to all targets in parallel, but one message at a time to each, so that a dead target
    does not delay the others. Returns the reason for each message that was not delivered."""
    import apprise

    within_s = float(request["within_s"])
    by_target: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for message in request["messages"]:
        by_target[int(message["target"])].append(message)
    failed = {
        str(message["id"]): f"{_name(message)} did not respond within {within_s:g} s"
        for message in request["messages"]
    }
    # Create the services here, not in the threads: the first address makes Apprise import its
    # plugins, and a thread that looks one up during the import finds an incomplete list.
    services = {
        target: _service(apprise, messages[0]["url"]) for target, messages in by_target.items()
    }
    threads = [
        threading.Thread(target=_deliver, args=(services[target], messages, failed), daemon=True)
        for target, messages in by_target.items()
    ]
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(failed)


def _name(message: Mapping[str, Any]) -> str:
    return f"target {message['target']} ({str(message['url']).partition(':')[0]})"


def _service(apprise: Any, url: str) -> Any:
    """The service that delivers to `url`; None for an address that Apprise does not know."""
    target = apprise.Apprise.instantiate(url)
    if target is None:
        return None
    service = apprise.Apprise()
    service.add(target)
    return service


def _deliver(service: Any, messages: Sequence[Mapping[str, Any]], failed: dict[str, str]) -> None:
    for message in messages:
        number = str(message["id"])
        if service is None:
            failed[number] = f"{_name(message)} is not an address that Apprise supports"
            continue
        level = _TYPES.get(str(message["level"]), "info")
        if service.notify(title=message["title"], body=message["body"], notify_type=level):
            failed.pop(number, None)
        else:
            failed[number] = f"{_name(message)} did not accept the message"


if __name__ == "__main__":
    main()
