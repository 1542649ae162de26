"""`miner-guard --help`, the first text that a newcomer reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miner_guard.cli.examples import EXAMPLES
from miner_guard.cli.main import COMMANDS, run


def test_the_list_of_commands_cuts_no_sentence_and_names_no_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in shown
    assert "source 0" not in shown
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_that_name_options_it_has(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--help"]) == 0
    shown, _, examples = capsys.readouterr().out.partition("Examples:\n")
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        lines = [line.strip() for line in examples.splitlines()]
        assert example in lines, "on a separate line, not joined"
        ours = example.partition(f"miner-guard {name}")[2].partition(" -- ")[0].partition("|")[0]
        for option in re.findall(r"(?<= )--?[a-z][\w-]*", ours):
            assert re.search(rf"{option}\b", shown), option


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_prints_a_limit_of_fifteen_zeros(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--help"]) == 0
    assert "00000000" not in capsys.readouterr().out


def test_an_unknown_event_gets_the_nearest_names_and_not_a_hundred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "--event", "nope", "--state-dir", str(tmp_path)]) == 64
    message = capsys.readouterr().err
    assert "unknown event 'nope'; nearest: " in message
    assert len(message) < 200
