"""Checks the storage: its clock against this host's, the credentials, and whether the repo can be
read.

`python -m miner_guard.checks.storage` answers `{"repo": SETTINGS}` in a child process with a
deadline.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from miner_guard.checks.check import Check, Snapshot
from miner_guard.config import RepoSettings
from miner_guard.system import probe
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import TIMEOUT_S, RepoError
from miner_guard.uploads.repos.credentials import find, first

_REFUSED_SKEW_S = 900.0
"""S3 rejects requests whose timestamp is off by more than 15 minutes."""

_SKEW_MAX_S = 60.0
"""Largest harmless difference between the local clock and the Date header of the storage."""


def storage_checks(s: Snapshot) -> Iterator[Check]:
    """Check the storage; empty if no repo is configured."""
    if s.config.repo.kind not in ("s3", "hf") and s.keys_file is not None:
        # For s3 and hf, which need keys, the probe already reports the unusable file.
        step = "fix the file: the alerts, tokens and keys that it sets are missing"
        yield Check("repo.keys_file", "warn", s.keys_file, "can be read", step)
    if s.config.repo.kind == "none":
        return
    if s.repo is None:
        seen = f"the repo did not respond: {s.unread.get('repo', 'not queried')}"
        step = "check the network and the endpoint"
        yield Check("repo.read", "unknown", seen, "it responds", step)
        return
    yield from _clock(s.repo)
    missing = s.repo.get("credentials")
    if missing:
        step = "set them in the environment or the .env file"
        seen = f"not set: {', '.join(missing)}"
        yield Check("repo.credentials", "critical", seen, "all set", step)
    elif missing is not None:
        yield Check("repo.credentials", "ok", "present (not shown)", "all set")
    if (error := s.repo.get("read_error")) is None:
        yield Check("repo.read", "ok", f"{s.repo['label']} can be read")
    else:
        step = "uploads will fail: check the bucket, the endpoint and the key's permissions"
        yield Check("repo.read", "critical", f"{s.repo['label']}: {error}", "can be read", step)


def _clock(repo: Mapping[str, Any]) -> Iterator[Check]:
    limit, skew = f"{_SKEW_MAX_S:g} s", repo.get("skew_s")
    if (error := repo.get("clock_error")) is not None:
        step = "check that this host can reach the storage"
        yield Check("host.clock", "unknown", f"clock skew: {error}", limit, step)
    if skew is None:
        return
    seen = f"this host is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} {repo['server']}"
    if abs(skew) <= _SKEW_MAX_S:
        yield Check("host.clock", "ok", seen, limit)
        return
    step = (
        "set the clock (chronyc makestep, timedatectl set-ntp true); "
        "S3 rejects requests if the clock is 15 min off"
    )
    level = "critical" if abs(skew) > _REFUSED_SKEW_S else "warn"
    yield Check("host.clock", level, seen, limit, step)


_NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "s3": (
        ("R2_WRITE_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
        ("R2_WRITE_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
    ),
    "hf": (("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),),
}
"""The keys needed for writing: a miner cannot publish with only a read key."""


def missing_credentials(
    settings: RepoSettings, env: Mapping[str, str] | None = None
) -> list[str] | None:
    """Return the credentials that are missing for publishing, under the miner's names for them;
    None if this kind of repo needs no credentials.

    Raises RepoError if the credentials file can't be used.
    """
    needed = _NEEDED.get(settings.kind)
    if needed is None:
        return None
    keys = find(settings, env)
    return [" or ".join(names) for names in needed if first(keys, *names) is None]


def examine(settings: RepoSettings) -> dict[str, Any]:
    """`label`; `credentials`: the missing ones, None if none are needed; `read_error`; for a
    storage on the network `skew_s` and `server`, or `clock_error`. Runs in the child."""
    answer: dict[str, Any] = {"label": settings.kind}
    if settings.kind in ("s3", "hf"):
        try:
            answer |= _skew(settings)
        except (OSError, ValueError, RepoError) as error:
            answer["clock_error"] = str(error)
    try:
        answer["credentials"] = missing_credentials(settings)
        repo = open_repo(settings)
        answer["label"] = repo.label
        repo.state()
    except RepoError as error:
        answer["read_error"] = str(error)
    return answer


def _skew(settings: RepoSettings) -> dict[str, Any]:
    url = _url(settings)
    server = urlsplit(url).hostname or ""
    # An R2 address begins with the account's id; keep it out of the doctor's output.
    shown = server.partition(".")[2] if server.endswith(".r2.cloudflarestorage.com") else server
    return {"skew_s": skew_s(url, TIMEOUT_S / 2), "server": shown}


def skew_s(url: str, timeout_s: float) -> float:
    """Return the server's Date minus this host's time in seconds: positive if this host is behind.
    The resolution is one second.

    Every response has a Date header, even a refusal. Raises OSError or ValueError.
    """
    before = time.time()
    try:
        query = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(query, timeout=timeout_s) as response:
            date = response.headers["Date"]
    except urllib.error.HTTPError as error:
        date = error.headers["Date"]
    middle = (before + time.time()) / 2
    if not date:
        raise ValueError("the response has no Date header")
    # Date is truncated to whole seconds; on average that removes half a second.
    return parsedate_to_datetime(date).timestamp() + 0.5 - middle


def _url(settings: RepoSettings) -> str:
    """The storage address, resolved the way the repo resolves it. Raises RepoError if the keys file
    cannot be read."""
    if settings.endpoint:
        return settings.endpoint
    if settings.kind == "hf":
        return "https://huggingface.co"
    account = first(find(settings), "R2_ACCOUNT_ID")
    return f"https://{account}.r2.cloudflarestorage.com" if account else "https://s3.amazonaws.com"


if __name__ == "__main__":
    probe.reply(examine(RepoSettings(**probe.request()["repo"])))
