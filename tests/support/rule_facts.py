"""Facts about a candidate upload, the published files and the network, for tests of the rules."""

from __future__ import annotations

from dataclasses import replace

from miner_guard.config import GateSettings
from miner_guard.validators.facts import Candidate, Facts, Network, Published, fingerprint
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile

NOW = 10_000.0
SN38_NUMBERS = load_profile("sn38").limits
SN38 = Limits.of(GateSettings(), SN38_NUMBERS)
SPACED = replace(SN38, min_upload_interval_s=300.0)
OURS = fingerprint("a" * 128)
META = {"run": "5", "outer_step": 56, "inner_step": 84, "peer_id": "12D3"}
RISING = tuple(2.0 + 0.1 * n for n in range(10))


def facts(
    *,
    published: Published | None = None,
    network: Network | None = None,
    credentials: str | None = None,
    name: str | None = None,
    **candidate: object,
) -> Facts:
    given = {"kind": "gradient", "outer_step": 56, "inner_step": 84, **candidate}
    return Facts(
        Candidate(**given),  # type: ignore[arg-type]
        published or Published(),
        network or Network(),
        NOW,
        credentials,
        name,
    )


def chain(**known: object) -> Network:
    return Network(**{"reason": None, "seen_at": NOW, **known})  # type: ignore[arg-type]


def aged(age_s: float, **known: object) -> Published:
    return Published(age_s=age_s, reason=None, seen_at=NOW, **known)  # type: ignore[arg-type]


def step(inner: int) -> Facts:
    return facts(published=aged(1, inner_step=inner))
