"""Checks what the miner is given: packages, exposed secrets, credentials, and the storage with its
clock.

`python -m miner_guard.checks.environment` answers `{"repo": SETTINGS}` or `{"alerts": ADDRESSES}`
in a child process with a deadline.
"""

from __future__ import annotations

import itertools
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from miner_guard.checks.check import Check, Snapshot, judged
from miner_guard.config import RepoSettings
from miner_guard.config.optional_deps import EXTRAS, install, not_installed
from miner_guard.record.redaction import Redactor
from miner_guard.system import probe
from miner_guard.uploads.repos import open_repo
from miner_guard.uploads.repos.base import TIMEOUT_S, RepoError
from miner_guard.uploads.repos.credentials import address, find, first


def environment_checks(s: Snapshot) -> Iterator[Check]:
    """Check packages and the command line."""
    yield from _packages(s)
    yield from _extras(s)
    yield from _alert_targets(s)
    yield from _command(s)
    yield from _upstream(s)


def _packages(s: Snapshot) -> Iterator[Check]:
    p = s.packages
    if p is None:
        sentence = f"the miner's interpreter: {s.unread.get('packages', 'not queried')}"
        step = "check that the command's interpreter starts"
        yield Check("env.packages", "unknown", sentence, None, step)
        return
    yield Check("env.python", "ok", f"the miner runs Python {p['python']} ({p['executable']})")
    # Attached, the miner imports the guard's own copy, or, with --attach log, none.
    if not p["miner_guard"] and s.config.miner.attach is None:
        sentence = "the miner's interpreter can't import miner_guard"
        step = "install miner-guard into the miner's environment, or use --attach auto"
        yield Check("env.miner_guard", "unknown", sentence, "importable", step)


def _extras(s: Snapshot) -> Iterator[Check]:
    """Report extras that the settings require but the guard's interpreter lacks."""
    for extra in EXTRAS:
        if names := s.missing_extras.get(extra.name):
            sentence = f"{extra.setting} is set and {not_installed(names)}: {extra.without}"
            step = f"{install(extra.name)} in the guard's environment"
            yield Check(f"env.extra.{extra.name}", "warn", sentence, "installed", step)


def _alert_targets(s: Snapshot) -> Iterator[Check]:
    """Report addresses that no alert can be sent to, by their numbers: they may hold secrets."""
    for number in s.unusable_alerts:
        sentence = f"target {number} of [alerts] urls is not an address that Apprise supports"
        step = "correct it, then try it with `miner-guard doctor --alerts`"
        yield Check("alerts.target", "warn", sentence, "an Apprise address", step)


def _command(s: Snapshot) -> Iterator[Check]:
    redact = Redactor.from_environment(s.env).text
    exposed = {
        argument.partition("=")[0] if argument.startswith("--") else "an argument"
        for argument in s.command
        if redact(argument) != argument
    }
    # `--secret VALUE`: two arguments that only together look like a secret.
    for name, value in itertools.pairwise(s.command):
        if name.startswith("--") and redact(f"{name} {value}") != f"{name} {value}":
            exposed.add(name)
    if exposed:
        sentence = f"a secret on the command line: {', '.join(sorted(exposed))}"
        step = (
            "pass it through the environment or a file: every user on this host can "
            "read command lines"
        )
        yield Check("env.secret_on_command_line", "warn", sentence, "none", step)


def _upstream(s: Snapshot) -> Iterator[Check]:
    """Report secrets that subnet 38's own code exposes to others (see ops/sn38)."""
    if "sn38" not in (s.config.miner.attach, s.config.miner.profile):
        return
    sentence = "subnet 38's upload worker gets the bucket's write keys on its command line"
    step = (
        "every user on this host can read them while it runs: give the miner a dedicated host or "
        "container, or mount /proc with hidepid=2"
    )
    yield Check("env.worker_keys", "warn", sentence, "none", step)
    if verbose := [a for a in s.command if a in ("--logging.debug", "--logging.trace")]:
        sentence = "subnet 38's miner writes its bucket's read credentials to the log"
        step = "start the miner without it, and delete the log files that contain them"
        yield Check("env.debug_log", "warn", f"with {verbose[0]}, {sentence}", "off", step)


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
        sentence = f"the repo did not respond: {s.unread.get('repo', 'not queried')}"
        step = "check the network and the endpoint"
        yield Check("repo.read", "unknown", sentence, "it responds", step)
        return
    yield from _clock(s.repo)
    if (missing := s.repo.get("credentials")) is not None:
        sentence = f"not set: {', '.join(missing)}" if missing else "present (not shown)"
        level, step = (
            "critical" if missing else "ok",
            "set them in the environment or the .env file",
        )
        yield judged("repo.credentials", level, sentence, "all set", step=step)
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
    sentence = (
        f"this host is {abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} {repo['server']}"
    )
    step = (
        "set the clock (chronyc makestep, timedatectl set-ntp true); "
        "S3 rejects requests if the clock is 15 min off"
    )
    level = "ok" if abs(skew) <= _SKEW_MAX_S else "warn"
    level = "critical" if abs(skew) > _REFUSED_SKEW_S else level
    yield judged("host.clock", level, sentence, limit, step=step)


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
            answer |= clock_skew(settings)
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


def clock_skew(settings: RepoSettings) -> dict[str, Any]:
    """`skew_s` and `server`. Raises OSError, ValueError, and RepoError for an unusable keys
    file."""
    url = address(settings, find(settings)) or "https://s3.amazonaws.com"
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


def unusable(addresses: Sequence[str]) -> list[int]:
    """The numbers, from 1, of the alert targets that Apprise cannot send to. Runs in the child:
    Apprise loads a plugin for each service."""
    import apprise

    service = apprise.Apprise
    return [n for n, address in enumerate(addresses, 1) if service.instantiate(address) is None]


if __name__ == "__main__":
    request = probe.request()
    if "alerts" in request:
        probe.reply({"unusable": unusable(request["alerts"])})
    else:
        probe.reply(examine(RepoSettings(**request["repo"])))
