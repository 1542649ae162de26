"""Checks the storage: its clock against this host's, the credentials, and whether the repo can be
read.

`python -m miner_guard.checks.storage` answers `{"what": "clock" | "repo", "repo": SETTINGS}`
in a child process with a deadline.
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
from miner_guard.uploads.repos.base import TIMEOUT_S, Repo, RepoError
from miner_guard.uploads.repos.credentials import find, first

REFUSED_SKEW_S = 900.0
"""S3 rejects requests whose timestamp is off by more than 15 minutes."""


CLOCK_SKEW_MAX_S = 60.0
"""Largest harmless difference between the local clock and the Date header of the storage."""


def storage_checks(s: Snapshot) -> Iterator[Check]:
    """Yield the storage storage_checks; those of the repo are left out if no repo is configured."""
    if s.config.repo.kind not in ("s3", "hf") and s.keys_file is not None:
        # For s3 and hf, which need keys, the repo probe already reports the unusable file.
        step = "fix the file: the alerts, tokens and keys that it sets are missing"
        yield Check("repo.keys_file", "warn", s.keys_file, "can be read", step)
    if s.config.repo.kind == "none":
        return
    yield from _clock_check(s)
    yield from _repo_checks(s)


def _clock_check(s: Snapshot) -> Iterator[Check]:
    limit = CLOCK_SKEW_MAX_S
    if s.clock is None:
        if "clock" in s.unread:
            seen = f"clock skew: {s.unread['clock']}"
            ask = "check that this host can reach the storage"
            yield Check("host.clock", "unknown", seen, f"{limit:g} s", ask)
        return
    skew = s.clock["skew_s"]
    level = "critical" if abs(skew) > REFUSED_SKEW_S else "warn" if abs(skew) > limit else "ok"
    word = "behind" if skew > 0 else "ahead of"
    step = (
        "set the clock (chronyc makestep, timedatectl set-ntp true); "
        "S3 rejects requests if the clock is 15 min off"
        if level != "ok"
        else None
    )
    seen = f"this host is {abs(skew):.0f} s {word} {s.clock['server']}"
    yield Check("host.clock", level, seen, f"{limit:g} s", step)


def _repo_checks(s: Snapshot) -> Iterator[Check]:
    if s.repo is None:
        why = s.unread.get("repo", "not queried")
        seen = f"the repo did not respond: {why}"
        yield Check(
            "repo.read", "unknown", seen, "it responds", "check the network and the endpoint"
        )
        return
    missing = s.repo.get("credentials")
    if missing is not None:
        present = not missing
        seen = "present (not shown)" if present else f"not set: {', '.join(missing)}"
        step = None if present else "set them in the environment or the .env file"
        yield Check("repo.credentials", "ok" if present else "critical", seen, "all set", step)
    if (error := s.repo.get("read_error")) is not None:
        step = "uploads will fail: check the bucket, the endpoint and the key's permissions"
        seen = f"{s.repo['label']}: {error}"
        yield Check("repo.read", "critical", seen, "can be read", step)
    elif s.repo.get("read"):
        yield Check("repo.read", "ok", f"{s.repo['label']} can be read")


_NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "s3": (
        ("R2_WRITE_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"),
        ("R2_WRITE_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"),
    ),
    "hf": (("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),),
}
"""The keys needed for writing: a miner cannot publish with only a read key."""


def examine(repo: Repo) -> dict[str, Any]:
    """Read the state."""
    try:
        repo.state()
    except RepoError as error:
        return {"label": repo.label, "read": False, "read_error": str(error)}
    return {"label": repo.label, "read": True}


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


def _answer_repo(settings: RepoSettings) -> None:
    answer: dict[str, Any] = {"label": settings.kind, "read": False}
    try:
        answer["credentials"] = missing_credentials(settings)
        answer |= examine(open_repo(settings))
    except RepoError as error:
        answer["read_error"] = str(error)
    probe.reply(answer)


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


def _answer_clock(settings: RepoSettings) -> None:
    try:
        url = url_of(settings)
        server = urlsplit(url).hostname or ""
        # An R2 address begins with the account's id; keep it out of the doctor's output.
        shown = server.partition(".")[2] if server.endswith(".r2.cloudflarestorage.com") else server
        probe.reply({"skew_s": skew_s(url, TIMEOUT_S), "server": shown})
    except (OSError, ValueError, RepoError) as error:
        probe.reply(error=str(error))


def main() -> None:
    """Answer the request on stdin: `what` is `clock` or `repo`."""
    request = probe.request()
    answer = {"clock": _answer_clock, "repo": _answer_repo}[request["what"]]
    answer(RepoSettings(**request["repo"]))


if __name__ == "__main__":
    main()
