"""Checks the storage: its clock against this host's, the credentials, and whether the repo can be
read and written."""

from __future__ import annotations

from collections.abc import Iterator

from miner_guard.diagnosis.check import Check, Snapshot

REFUSED_SKEW_S = 900.0
"""S3 rejects requests whose timestamp is off by more than 15 minutes."""


def checks(s: Snapshot) -> Iterator[Check]:
    """Yield the storage checks; those of the repo are left out if no repo is configured."""
    if s.config.repo.kind not in ("s3", "hf") and s.keys_file is not None:
        # For s3 and hf, which need keys, the repo probe already reports the unusable file.
        step = "fix the file: the alerts, tokens and keys that it sets are missing"
        yield Check("repo.keys_file", "warn", s.keys_file, "can be read", step)
    if s.config.repo.kind == "none":
        return
    yield from _clock(s)
    yield from _repo(s)


def _clock(s: Snapshot) -> Iterator[Check]:
    limit = s.config.health.clock_skew_max_s
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


def _repo(s: Snapshot) -> Iterator[Check]:
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
    for act in ("read", "write"):
        error = s.repo.get(f"{act}_error")
        if error:
            step = "uploads will fail: check the bucket, the endpoint and the key's permissions"
            seen = f"{s.repo['label']}: {error}"
            limit = f"can be {'read' if act == 'read' else 'written'}"
            yield Check(f"repo.{act}", "critical", seen, limit, step)
        elif s.repo.get(act):
            done = (
                "can be read"
                if act == "read"
                else "can be written (probe object written, read back, removed)"
            )
            yield Check(f"repo.{act}", "ok", f"{s.repo['label']} {done}")
