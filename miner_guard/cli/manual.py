"""`man miner-guard`: the manual page, built from the help of all commands: `python -m
miner_guard.cli.manual` prints it, `make man` writes docs/miner-guard.1."""

from __future__ import annotations

import contextlib
import io
import re

from miner_guard import __version__, exits
from miner_guard.cli import main
from miner_guard.cli.echo import echo

_CODES = {
    exits.OK: "Success: stopped on request, finished, allowed, accepted or found.",
    exits.FAILED: "No match, upload blocked, repo rejected, over budget, or any other failure.",
    exits.NOT_RUNNING: "No guard is running.",
    exits.USAGE: "The command line is invalid.",
    exits.UNAVAILABLE: "The preflight found a critical problem, or a check could not run.",
    exits.CRASH_LOOP: "The guard gave up after a crash loop.",
    exits.CONFIG: "The configuration is invalid.",
}
_FILES = {
    "./guard.toml": "The settings, unless --config names another file; see miner-guard config.",
    "$XDG_STATE_HOME/miner-guard/NAME/": "The state directory: run.db, guard.jsonl.",
}


def page() -> str:
    """Return the page as man(7) macros."""
    intro = _help([])
    about = " ".join(_after(intro, "").split("\n\n")[1].split())
    return "\n".join(
        [
            f'.TH MINER-GUARD 1 "" "miner-guard {__version__}" "User Commands"',
            ".SH NAME",
            r"miner\-guard \- supervisor of a distributed-training miner",
            ".SH SYNOPSIS",
            r".B miner\-guard",
            r".I COMMAND",
            r"[\fIOPTIONS\fR] [\fIARGUMENTS\fR]",
            ".SH DESCRIPTION",
            _escaped(about),
            ".SH OPTIONS",
            *_verbatim(_after(intro, "Options:").partition("\nCommands:")[0]),
            ".SH COMMANDS",
            *(line for name in main.COMMANDS for line in _command(name)),
            ".SH EXIT STATUS",
            *(line for code, words in _CODES.items() for line in (".TP", f".B {code}", words)),
            ".SH FILES",
            *(line for path, words in _FILES.items() for line in (".TP", f".I {path}", words)),
            "",
        ]
    )


def _command(name: str) -> list[str]:
    shown = _help([name])
    usage, _, rest = shown.partition("\n\n")
    synopsis = " ".join(usage.removeprefix("Usage: ").split())
    return [f".SS {_escaped(synopsis)}", *_verbatim(rest)]


def _help(command: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main.run([*command, "--help"])
    return shown.getvalue().strip("\n")


def _after(text: str, heading: str) -> str:
    return text.partition(heading)[2].strip("\n") if heading else text


def _verbatim(text: str) -> list[str]:
    """Keep the help's lines unchanged, so that its columns stay aligned."""
    return [".nf", *(_escaped(line) for line in text.strip("\n").split("\n")), ".fi"]


def _escaped(line: str) -> str:
    line = line.replace("\\", r"\e").replace("-", r"\-")
    line = "".join(c if ord(c) < 128 else rf"\[u{ord(c):04X}]" for c in line)
    # roff would read a line that begins with a dot or an apostrophe as a request.
    return re.sub(r"^([.'])", r"\\&\1", line)


if __name__ == "__main__":
    echo(page().rstrip("\n"))
