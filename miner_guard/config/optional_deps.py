"""Optional packages: which setting needs which, and whether they are installed here. Imports none
of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from miner_guard.config import Config


@dataclass(frozen=True)
class Extra:
    """One extra of pyproject.toml and the settings that need it."""

    name: str
    modules: tuple[str, ...]
    needed: Callable[[Config], bool]
    setting: str
    without: str
    """What does not happen where it is missing."""


EXTRAS = (
    Extra(
        "s3",
        ("boto3",),
        lambda c: c.repo.kind == "s3",
        '[repo] kind = "s3"',
        "the repo can't be read",
    ),
    Extra(
        "hf",
        ("huggingface_hub",),
        lambda c: c.repo.kind == "hf",
        '[repo] kind = "hf"',
        "the repo can't be read",
    ),
    Extra(
        "chain",
        ("bittensor",),
        lambda c: c.chain.network is not None,
        "[chain] network",
        "the chain is not read",
    ),
    Extra(
        "alerts",
        ("apprise",),
        lambda c: bool(c.alerts.urls),
        "[alerts] urls",
        "no alert reaches anybody",
    ),
    Extra(
        "http",
        ("starlette", "uvicorn"),
        lambda c: c.http.port is not None,
        "[http] port",
        "the port is not opened",
    ),
)


def missing(extra: Extra) -> tuple[str, ...]:
    """The extra's packages that this interpreter does not find."""
    return tuple(name for name in extra.modules if importlib.util.find_spec(name) is None)


def missing_extras(config: Config) -> Iterator[tuple[Extra, tuple[str, ...]]]:
    """What the settings ask for and is not there, with its missing packages."""
    for extra in EXTRAS:
        if extra.needed(config) and (names := missing(extra)):
            yield extra, names


def problem(name: str) -> str | None:
    """`apprise is not installed; pip install 'miner-guard[alerts]'`; None where the extra is
    there."""
    (extra,) = (e for e in EXTRAS if e.name == name)
    names = missing(extra)
    return f"{not_installed(names)}; {install(name)}" if names else None


def not_installed(names: tuple[str, ...]) -> str:
    """`apprise is not installed`."""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def install(name: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'miner-guard[{name}]'"
