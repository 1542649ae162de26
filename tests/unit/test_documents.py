"""What the documents and bounds say is what the tests and the code have."""

from __future__ import annotations

import re
from collections import Counter

from tests.promises import promises
from tests.support import requires
from tests.support.requires import REPO
from tests.support.version_bounds import constraints, promised
from tests.trainers.recipes import PUBLISHED, Recipe

PROMISED = {"000": 11, "001": 9, "002": 12, "003": 19, "004": 28, "trainers": 34}


def test_every_promise_is_listed_once() -> None:
    rows = list(promises())
    assert Counter(row.source for row in rows) == PROMISED
    assert len({(row.source, row.text) for row in rows}) == sum(PROMISED.values())


def test_each_promise_names_tests_that_exist() -> None:
    """Otherwise a promise would keep pointing to a test that was renamed or deleted."""
    for row in promises():
        assert row.tests, row.text
        for file, name in row.tests:
            source = (REPO / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{row.text}: {name}"


def test_the_page_explains_exactly_the_promises_that_differ() -> None:
    page = (REPO / "docs" / "promises.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (\d{3}|trainers) \| ((?:\\\||[^|])+?) \| \S", page, re.MULTILINE)
    differing = [(row.source, row.text.replace("|", "\\|")) for row in promises() if row.differs]
    assert explained == differing


PAGE = (requires.REPO / "SECURITY.md").read_text(encoding="utf-8")


def test_every_sentence_names_a_test() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "attacked by" not in row]
    assert len(rows) > 30
    for row in rows:
        sentence, named = (cell.strip() for cell in row.strip("|").split("|"))
        assert sentence
        assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", named), row


def test_every_named_test_exists() -> None:
    for path, test in re.findall(r"`(tests/[^:`]+)::(\w+)`", PAGE):
        source = (requires.REPO / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{path}::{test}"


def test_every_attack_runs_with_the_others() -> None:
    """A sentence's test must not wait for a target that people seldom run."""
    for path, test in re.findall(r"`(tests/[^:`]+)::(\w+)`", PAGE):
        source = (requires.REPO / path).read_text(encoding="utf-8")
        head = source.partition(f"\ndef {test}(")[0].rpartition("\n\n\n")[2]
        assert "mark.long" not in head, f"{path}::{test}"
        assert not re.search(r"^pytestmark = .*mark\.long", source, re.MULTILINE), path


TRAINERS = (REPO / "docs" / "trainers.md").read_text(encoding="utf-8")


def test_each_published_trainer_has_a_row_with_its_script() -> None:
    rows = [line for line in TRAINERS.splitlines() if line.startswith("| ")]
    for repository, recipes in PUBLISHED.items():
        for recipe in recipes:
            script = f"`{repository}`, `{recipe.script}`"
            found = [row for row in rows if row.startswith(f"| {recipe.name} | {script}")]
            assert len(found) == 1, recipe.name


def test_each_imitation_of_the_table_is_committed() -> None:
    scripts = re.findall(r"^\| `(\w+\.py)` \|", TRAINERS, re.MULTILINE)
    assert len(scripts) > 10
    for script in scripts:
        assert (REPO / "tests" / "integration" / "scripts" / script).is_file()


def test_losses_are_found_added_up_and_scaled() -> None:
    gan = Recipe("x", "x.py", loss=r"D: ([\d.]+) G: ([\d.]+)", scale=2.0)
    assert gan.losses("D: 1.5 G: 0.5\nD: 1 G: 1") == [4.0, 4.0]
    assert Recipe("x", "x.py").without_times("loss 2.5 in 3.14ms") == "loss 2.5 in TIME"


def test_the_lowest_end_pins_what_the_guard_and_each_extra_need() -> None:
    """Otherwise users could be promised a lower bound that no test has run with."""
    pinned = {line.partition("==")[0] for line in constraints("lowest")}
    assert pinned == {need.name for need in promised()}
    assert {"structlog", "starlette", "torch", "opentelemetry-sdk"} <= pinned
    assert "pytest" not in pinned


def test_every_bound_is_a_version_that_the_requirement_allows() -> None:
    lowest = dict(line.split("==") for line in constraints("lowest"))
    for need in promised():
        assert need.specifier.contains(lowest[need.name]), need


def test_the_newest_end_keeps_the_pins_and_lets_the_rest_float() -> None:
    pins = [line.partition("==")[0] for line in constraints("newest")]
    assert pins == ["torch"]
