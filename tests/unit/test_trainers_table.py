"""docs/trainers.md has a row for each trainer that the tool can start."""

from __future__ import annotations

from tests.support.requires import REPO
from tests.trainers.recipes import IMITATIONS, PUBLISHED, Recipe

PAGE = (REPO / "docs" / "trainers.md").read_text(encoding="utf-8")


def test_each_published_trainer_has_a_row_with_its_script() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    for repository, recipes in PUBLISHED.items():
        for recipe in recipes:
            script = f"`{repository}`, `{recipe.script}`"
            found = [row for row in rows if row.startswith(f"| {recipe.name} | {script}")]
            assert len(found) == 1 or f"{recipe.name} has a recipe" in PAGE, recipe.name


def test_each_imitation_is_committed_and_has_a_row() -> None:
    for recipe in IMITATIONS:
        assert (REPO / "tests" / "integration" / "scripts" / recipe.script).is_file()
        assert f"| `{recipe.script}" in PAGE, recipe.script


def test_losses_are_found_added_up_and_scaled() -> None:
    gan = Recipe("x", "x.py", loss=r"D: ([\d.]+) G: ([\d.]+)", scale=2.0)
    assert gan.losses("D: 1.5 G: 0.5\nD: 1 G: 1") == [4.0, 4.0]
    assert Recipe("x", "x.py").without_times("loss 2.5 in 3.14ms") == "loss 2.5 in TIME"
