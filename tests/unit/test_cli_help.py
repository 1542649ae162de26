"""`miner-guard --help`: what a newcomer reads first."""

from __future__ import annotations

import pytest

from miner_guard.cli.main import COMMANDS, run


def test_the_list_of_commands_cuts_no_sentence_and_names_no_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in shown
    assert "source 0" not in shown
    assert all(f"\n  {name} " in shown for name in COMMANDS)
