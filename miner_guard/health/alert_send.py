"""A probe: sends one message through Apprise, or pings a heartbeat URL; `python -m miner_guard.health.alert_send`.

Runs in a child with a deadline: a webhook that never answers costs nobody anything. Addresses come over
stdin and are named by their kind alone in what is answered: they hold secrets.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from typing import Any

from miner_guard import probe

_TIMEOUT_S = 10.0
_TYPES = {"critical": "failure", "error": "failure", "warning": "warning"}


def main() -> None:
    """Answer how many targets were reached, or why not all."""
    request: Mapping[str, Any] = probe.request()
    try:
        reached = _ping(request["heartbeat_url"]) if "heartbeat_url" in request else _send(request)
    except (OSError, ValueError, ImportError) as error:
        probe.reply(error=f"{type(error).__name__}: {getattr(error, 'reason', None) or error}")
        return
    probe.reply(reached)


def _ping(url: str) -> int:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the heartbeat URL must begin with http:// or https://")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
        return 1


def _send(request: Mapping[str, Any]) -> int:
    import apprise

    failed, urls = [], list(request["urls"])
    for number, url in enumerate(urls, 1):
        target = apprise.Apprise.instantiate(url)
        kind = url.partition(":")[0]
        if target is None:
            failed.append(f"target {number} ({kind}) is not an address that Apprise knows")
            continue
        # One at a time: which one failed is worth knowing.
        service = apprise.Apprise()
        service.add(target)
        level = _TYPES.get(str(request.get("level")), "info")
        if not service.notify(title=request["title"], body=request["body"], notify_type=level):
            failed.append(f"target {number} ({kind}) did not take it")
    if failed:
        raise ValueError("; ".join(failed))
    return len(urls)


if __name__ == "__main__":
    main()
