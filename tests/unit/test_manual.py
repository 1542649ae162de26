"""The manual page agrees with the help."""

from __future__ import annotations

import re
import subprocess

from miner_guard.cli import manual
from miner_guard.cli.main import COMMANDS
from tests.support import requires

PAGE = requires.REPO / "docs" / "miner-guard.1"
OPTION = re.compile(r"(?<![\w\\-])\\-\\-(?:[a-z]+(?:\\-)?)+")


def sections(page: str) -> dict[str, set[str]]:
    """The options of each command."""
    chapters = re.split(r"^\.SS miner\\-guard ", page.partition(".SH EXIT")[0], flags=re.MULTILINE)
    return {
        section.split()[0].replace("\\-", "-"): set(OPTION.findall(section))
        for section in chapters[1:]
    }


def test_the_committed_page_has_every_command_and_option_of_the_help() -> None:
    """Compare by name, because the columns depend on typer's version."""
    built = sections(manual.page())
    assert set(built) == set(COMMANDS)
    assert all(built.values())
    assert sections(PAGE.read_text(encoding="ascii")) == built, "run `make man`"


def test_the_page_is_valid_roff() -> None:
    command = [requires.tool("groff"), "-man", "-ww", "-Tutf8", str(PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "EXIT STATUS" in re.sub(".\b", "", done.stdout)
