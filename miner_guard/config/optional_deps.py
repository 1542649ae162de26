"""Lists the optional packages that each setting needs, and checks, without importing them, whether
they are installed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from miner_guard.config import Config


@dataclass(frozen=True)
class Extra:
    """One extra from pyproject.toml and the setting that needs it."""

    name: str
    modules: tuple[str, ...]
    section: str
    key: str
    without: str
    """The consequence of a missing package."""

    value: str | None = None
    """The value of the setting that needs the extra; None: any."""

    @property
    def setting(self) -> str:
        """`[repo] kind = "s3"`, or without a certain value `[http] port`."""
        return f"[{self.section}] {self.key}" + (f' = "{self.value}"' if self.value else "")

    def needed(self, config: Config) -> bool:
        """Return whether the settings need the extra."""
        value = getattr(getattr(config, self.section), self.key)
        return value not in (None, ()) if self.value is None else value == self.value


_OTLP = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
EXTRAS = (
    Extra("s3", ("boto3",), "repo", "kind", "the repo can't be read", "s3"),
    Extra("hf", ("huggingface_hub",), "repo", "kind", "the repo can't be read", "hf"),
    Extra("chain", ("bittensor",), "chain", "network", "the chain can't be read"),
    Extra("alerts", ("apprise",), "alerts", "urls", "no alerts are delivered"),
    Extra("http", ("starlette", "uvicorn"), "http", "port", "the port stays closed"),
    Extra("otel", _OTLP, "otel", "endpoint", "nothing is exported over OTLP"),
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
    names = missing(next(extra for extra in EXTRAS if extra.name == name))
    return f"{not_installed(names)}; {install(name)}" if names else None


def not_installed(names: tuple[str, ...]) -> str:
    """Format the names as `apprise is not installed`."""
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def install(name: str) -> str:
    """The command that installs an extra's packages by name, with the bounds that this
    installation's metadata gives.

    It must not name miner-guard itself: no index has miner-guard, so anyone could upload a package
    of that name, and it would run with access to the keys.
    """
    try:
        declared = metadata.requires("miner-guard") or []
    except metadata.PackageNotFoundError:
        # The guard is running from a source tree that is not installed in this interpreter.
        declared = []
    parts = [entry.partition(";") for entry in declared]
    needs = [
        need.strip()
        for need, _, marker in parts
        if re.search(rf"extra == ['\"]{re.escape(name)}['\"]", marker)
    ]
    modules = [module for extra in EXTRAS if extra.name == name for module in extra.modules]
    # PyPI's name of a module's package is guessed: `opentelemetry-sdk` for `opentelemetry.sdk`.
    guessed = [module.replace(".", "-") for module in modules] or [name]
    return f"pip install {' '.join(map(shlex.quote, needs or guessed))}"
