"""The promises of tests/promises.toml, and whether their tests pass now.

python -m tests.promises [SOURCE…]      # 000 to 004, trainers; default: all

Runs each row's tests and prints each row with what passed; exits with 1 unless every row is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest

from tests.support.requires import REPO

LIST = REPO / "tests" / "promises.toml"


@dataclass(frozen=True)
class Promise:
    """One entry of the list."""

    source: str
    """000 to 004, or `trainers`: code that does not call the hook."""

    text: str
    tests: tuple[tuple[str, str], ...]
    """File below `tests/` and name of each test for the promise."""

    differs: bool
    """docs/promises.md says how and why the guard deliberately differs."""


def promises() -> Iterator[Promise]:
    """The entries of promises.toml, in order."""
    for row in tomllib.loads(LIST.read_text(encoding="utf-8"))["promise"]:
        tests = tuple((file, name) for file, name in (test.split("::") for test in row["tests"]))
        yield Promise(row["source"], row["text"], tests, row.get("differs", False))


class _Outcomes:
    """Records each test's outcome by file and name; of a parametrized test, the worst outcome
    counts."""

    def __init__(self) -> None:
        self.by_test: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        file, _, name = report.nodeid.partition("::")
        key = (file.removeprefix("tests/"), name.partition("[")[0])
        if self.by_test.get(key, "passed") == "passed":
            self.by_test[key] = report.outcome


def main(sources: Sequence[str]) -> int:
    chosen = [row for row in promises() if not sources or row.source in sources]
    tests = sorted({f"tests/{file}::{name}" for row in chosen for file, name in row.tests})
    outcomes = _Outcomes()
    pytest.main(["-q", "--no-header", f"--rootdir={REPO}", *tests], plugins=[outcomes])
    kept = 0
    for row in chosen:
        results = [outcomes.by_test.get(test, "not run") for test in row.tests]
        good = bool(results) and set(results) == {"passed"}
        kept += good
        word = "kept" if good else ", ".join(sorted(set(results) - {"passed"}))
        print(f"{row.source}  {word:8}  {row.text}" + ("  (differs)" if row.differs else ""))
    print(f"{kept} of {len(chosen)} kept; {len(tests)} tests")
    return 0 if kept == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
