"""Settings for every test, and fixtures that several folders share."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.servers.webhook import Webhook
from tests.support import requires

# A loaded machine is not a defect: only the benchmarks judge how long an example takes.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Without cached bytecode, each of the thousand processes that the tests start would compile the
# guard, and each worker would rewrite the asserts in every test file: a third of the CPU.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Collecting five thousand tests creates a million objects that live to the end: garbage collection
# would traverse all of them again and again, which takes half of the CPU.
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores SIGINT, and so would every program that the tests start and
    # interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A rank keeps its flight record's descriptors until it ends; a worker that runs the tests of a
# thousand ranks keeps theirs.
_DESCRIPTORS = 8192
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if _soft < _DESCRIPTORS:
    _allowed = _DESCRIPTORS if _hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, _hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, _allowed), _hard))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped-to", help="write which tests were skipped, one a line")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--skipped-to")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Skipped(path))


class _Skipped:
    """Writes the skipped tests, and files that skipped as a whole, as arguments for a later run
    where more programs are installed (`.ci/run`)."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._names[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._names[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._path.write_text("".join(f"{name}\n" for name in self._names), encoding="utf-8")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    requires.module("apprise")
    made = Webhook()
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    requires.module("playwright")
    chromium = requires.tool("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
