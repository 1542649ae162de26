"""The promises of docs/promises.md, and whether their tests pass now.

python -m tests.promises [SOURCE…]      # 000 to 004, trainers; default: all

Runs each row's tests and prints each row with what passed; exits with 1 unless every row is kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.requires import REPO

PAGE = REPO / "docs" / "promises.md"
_TEST = re.compile(r"`((?:unit|integration|faults)/\S+\.py)::(test_\w+)`")


@dataclass(frozen=True)
class Promise:
    """One row of the page."""

    source: str
    promise: str
    tests: tuple[tuple[str, str], ...]
    """File below `tests/` and name of each test for the promise."""

    differs: str
    """How and why the guard deliberately differs; empty if there is no difference."""


def promises() -> Iterator[Promise]:
    """The rows of docs/promises.md, in order."""
    source = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## Source (\w+):", line):
            source = heading[1]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("promise", "---"):
            yield Promise(source, cells[0], tuple(_TEST.findall(cells[1])), cells[2])


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
        seen = [outcomes.by_test.get(test, "not run") for test in row.tests]
        good = bool(seen) and set(seen) == {"passed"}
        kept += good
        word = "kept" if good else ", ".join(sorted(set(seen) - {"passed"}))
        print(f"{row.source}  {word:8}  {row.promise}" + ("  (differs)" if row.differs else ""))
    print(f"{kept} of {len(chosen)} kept; {len(tests)} tests")
    return 0 if kept == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
