"""Lists the optional packages that each setting needs, and checks, without importing them, whether
they are installed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

from miner_guard.config import Config

_PACKAGE = "miner-guard"


@dataclass(frozen=True)
class Extra:
    """One extra from pyproject.toml and the settings that need it."""

    name: str
    modules: tuple[str, ...]
    needed: Callable[[Config], bool]
    setting: str
    without: str
    """The consequence of a missing package."""


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
        "the chain can't be read",
    ),
    Extra(
        "alerts",
        ("apprise",),
        lambda c: bool(c.alerts.urls),
        "[alerts] urls",
        "no alerts are delivered",
    ),
    Extra(
        "http",
        ("starlette", "uvicorn"),
        lambda c: c.http.port is not None,
        "[http] port",
        "the port stays closed",
    ),
    Extra(
        "otel",
        ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        lambda c: c.otel.endpoint is not None,
        "[otel] endpoint",
        "nothing is exported over OTLP",
    ),
)


def missing(extra: Extra) -> tuple[str, ...]:
    """The extra's modules that this interpreter cannot find."""
    return tuple(name for name in extra.modules if not _is_there(name))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The parent of a dotted name is missing.
        return False


def missing_extras(config: Config) -> Iterator[tuple[Extra, tuple[str, ...]]]:
    """The extras that the settings need but that are not installed, each with its missing
    modules."""
    for extra in EXTRAS:
        if extra.needed(config) and (names := missing(extra)):
            yield extra, names


def problem(name: str) -> str | None:
    """`apprise is not installed; pip install 'apprise>=1.7'`; None if the extra is installed."""
    (extra,) = (e for e in EXTRAS if e.name == name)
    names = missing(extra)
    return f"{not_installed(names)}; {install(name)}" if names else None


def not_installed(names: tuple[str, ...]) -> str:
    """Format the names as `apprise is not installed`."""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def install(name: str) -> str:
    """The command that installs an extra's packages by name.

    It must not name miner-guard itself: no index has miner-guard, so anyone could upload a package
    of that name, and it would run with access to the keys.
    """
    return f"pip install {' '.join(map(shlex.quote, requirements(name)))}"


def _package(module: str) -> str:
    """The PyPI name of a module's package, guessed because no metadata gives it:
    `opentelemetry-sdk` for `opentelemetry.sdk`."""
    return module.replace(".", "-")


def requirements(name: str) -> list[str]:
    """Return an extra's requirements (`["apprise>=1.7"]`), from this installation's metadata if it
    has any."""
    try:
        declared = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        # The guard is running from a source tree that is not installed in this interpreter.
        declared = []
    names: list[str] = []
    for requirement, _, marker in (entry.partition(";") for entry in declared):
        if not re.search(rf"extra == ['\"]{re.escape(name)}['\"]", marker):
            continue
        of_our_own = re.fullmatch(rf"{_PACKAGE}\[(.+)\]", requirement.strip())
        names += (
            [r for e in of_our_own[1].split(",") for r in requirements(e)]
            if of_our_own
            else [requirement.strip()]
        )
    return (
        names
        or [_package(module) for extra in EXTRAS if extra.name == name for module in extra.modules]
        or [name]
    )
