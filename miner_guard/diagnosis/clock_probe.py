"""How far this host's clock is from a server's: `python -m miner_guard.diagnosis.clock_probe`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from miner_guard import probe


def skew_s(url: str, timeout_s: float) -> float:
    """Server's Date minus this host's time in seconds: positive where this host is behind. One second coarse.

    Any answer has the header, a refusal too. Raises OSError or ValueError.
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
        raise ValueError("the answer has no Date header")
    # Date is cut to whole seconds: half of one is the best guess of what was cut.
    return parsedate_to_datetime(date).timestamp() + 0.5 - middle


def main() -> None:
    request = probe.request()
    try:
        skew = skew_s(request["url"], request["timeout_s"])
        probe.reply({"skew_s": skew, "server": urlsplit(request["url"]).hostname})
    except (OSError, ValueError) as error:
        probe.reply(error=str(error))


if __name__ == "__main__":
    main()
