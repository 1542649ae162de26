"""`miner-guard --help`, the first text that a newcomer reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miner_guard.cli import GROUPS
from miner_guard.cli.main import COMMANDS, MOVED, build, run
from miner_guard.incidents import knowledge
from miner_guard.state_dir import StateDir
from tests.support.event_names import events as logged_events
from tests.support.present_state import write_status


def test_the_commands_stand_in_four_groups_and_no_sentence_is_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(COMMANDS) <= 15, "make it an option or a subcommand of an existing command"
    assert all(f" {group} " in shown for group in GROUPS)
    assert all(re.search(rf"(?m)^\W*{name} ", shown) for name in COMMANDS)
    assert "…" not in shown
    assert "source 0" not in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_that_name_options_it_has(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run([name, "--help"]) == 0
    shown, _, examples = capsys.readouterr().out.partition("Examples:")
    assert "00000000" not in shown, "no limit of fifteen zeros"
    flat = " ".join(shown.replace("│", " ").split())
    for option in build().commands[name].params:
        # With some versions of typer, Rich takes the `[http]` of a sentence for a style.
        assert option.help in flat
    assert COMMANDS[name].examples
    for example in COMMANDS[name].examples:
        lines = [line.strip() for line in examples.splitlines()]
        assert example in lines, "on a separate line, not joined"
        ours = example.partition(f"miner-guard {name}")[2].partition(" -- ")[0].partition("|")[0]
        for option in re.findall(r"(?<= )--?[a-z][\w-]*", ours):
            assert re.search(rf"{option}\b", shown), option


FINDINGS = (
    *("nan", "spike", "divergence", "plateau_high", "overfit"),
    *("slow_steps", "regime_change", "memory_drop", "memory_leak"),
)
"""The types of `explain --json` for numbers."""


@pytest.mark.parametrize("name", MOVED)
def test_a_former_command_says_in_one_line_what_took_over(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "x"]) == 64
    (line,) = capsys.readouterr().err.splitlines()
    (command,) = re.findall(r"`miner-guard (\w+) ", line)
    assert command in COMMANDS


def test_an_unknown_event_gets_the_nearest_names_and_not_a_hundred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "--event", "nope", "--state-dir", str(tmp_path)]) == 64
    message = capsys.readouterr().err
    assert "unknown event 'nope'; nearest: " in message
    assert len(message) < 200


def test_an_event_an_incident_and_a_finding_in_numbers_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["explain", "hang_detected"]) == 0
    shown = capsys.readouterr().out
    assert "event    hang_detected" in shown
    assert "grep for `HANG DETECTED" in shown
    assert run(["explain", "cuda_oom"]) == 0
    shown = capsys.readouterr().out
    assert "incident cuda_oom" in shown
    assert "fixes\n      1. " in shown
    assert run(["explain", "plateau_high"]) == 0
    assert "event    loss_plateau" in capsys.readouterr().out
    assert run(["explain", "hang_detectd"]) == 64
    assert "did you mean hang_detected" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted({*logged_events(), *FINDINGS, *knowledge.load().labels}))
def test_every_name_that_a_person_meets_is_explained(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events, incidents and the findings in numbers are one vocabulary."""
    assert run(["explain", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(("event    ", "incident "))
    assert "None" not in shown


def test_without_arguments_the_running_guards_are_listed_else_the_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[StateDir] = []
    monkeypatch.setattr("miner_guard.record.status_document.running_guards", lambda: found)
    run([])
    assert "Usage: miner-guard" in capsys.readouterr().out
    for name, colour in (("well", "green"), ("broken", "red")):
        verdict = {"life": "training", "colour": colour, "cause": f"{name} trains"}
        write_status(tmp_path / name, {"state": "running", "verdict": verdict})
        found.append(StateDir(tmp_path / name))
    assert run([]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "broken trains" in first, "worst first"
    assert "well trains" in second
