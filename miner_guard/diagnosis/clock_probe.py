"""Measures this host's clock against a server's.

Run as `python -m miner_guard.diagnosis.clock_probe`.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.credentials import find, first


def skew_s(url: str, timeout_s: float) -> float:
    """Return the server's Date minus this host's time in seconds: positive if this host is behind.
    The resolution is one second.

    Every response has a Date header, even a refusal. Raises OSError or ValueError.
    """
    before = time.time()
    asked = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:
        date = error.headers["Date"]
    middle = (before + time.time()) / 2
    if not date:
        raise ValueError("the response has no Date header")
    # Date is truncated to whole seconds; on average that removes half a second.
    return parsedate_to_datetime(date).timestamp() + 0.5 - middle


def url_of(settings: RepoSettings) -> str:
    """The storage address, resolved the way the repo resolves it. Raises RepoError if the keys file
    cannot be read."""
    if settings.endpoint:
        return settings.endpoint
    if settings.kind == "hf":
        return "https://huggingface.co"
    account = first(find(settings), "R2_ACCOUNT_ID")
    return f"https://{account}.r2.cloudflarestorage.com" if account else "https://s3.amazonaws.com"


def main() -> None:
    settings = RepoSettings(**probe.request()["repo"])
    try:
        url = url_of(settings)
        server = urlsplit(url).hostname or ""
        # An R2 address begins with the account's id; keep it out of the doctor's output.
        shown = server.partition(".")[2] if server.endswith(".r2.cloudflarestorage.com") else server
        probe.reply({"skew_s": skew_s(url, settings.timeout_s), "server": shown})
    except (OSError, ValueError, RepoError) as error:
        probe.reply(error=str(error))


if __name__ == "__main__":
    main()
