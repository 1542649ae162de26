"""`miner-guard`: imports only the requested command's module, runs it, and maps errors to exit
codes.

Each command is one file with a function `command`, whose annotations typer reads and whose
docstring is the help, and optionally `CONTEXT`, click's context settings. To add a command, list it
in `COMMANDS`."""

from __future__ import annotations

import gc
import importlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from miner_guard import __version__, exits
from miner_guard.cli.examples import EXAMPLES
from miner_guard.system import children

COMMANDS = (
    "run",
    "doctor",
    "status",
    "top",
    "logs",
    "runbook",
    "gate",
    "audit",
    "explain",
    "attach-check",
    "plan",
    "costs",
    "report",
    "bundle",
    "export",
    "alerts",
    "ctl",
    "config",
    "init",
    "ops",
    "demo",
)
"""Modules of `miner_guard.cli` (with dashes for underscores), in the order of `--help`."""

_UsageError: Any = typer.BadParameter.__mro__[1]
"""The base class of typer's usage errors. typer does not export it, and its module differs between
versions."""

_GC_EVERY = 20_000


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application with only the command named in `arguments`, or with all commands for the help
    text."""
    app = typer.Typer(
        name="miner-guard",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    requested = next((a for a in arguments if not a.startswith("-")), "")
    for name in [requested] if requested in COMMANDS else COMMANDS:
        module = importlib.import_module(f"miner_guard.cli.{name.replace('-', '_')}")
        short = _first_sentence(module.command.__doc__ or "")
        app.command(
            name,
            short_help=short,
            epilog=_examples(name),
            context_settings=getattr(module, "CONTEXT", None),
        )(module.command)
    return app


def _examples(name: str) -> str:
    """The command's examples, shown at the end of its help; \\b keeps typer from joining the
    lines."""
    rows = (f"  {line}" for line in EXAMPLES.get(name, ()))
    return "\b\n" + "\n".join(["Examples:", *rows])


def _first_sentence(help_text: str) -> str:
    """The first sentence of the help in full: typer's list of commands would cut it after 45
    characters."""
    return re.split(r"(?<=[.?])\s", help_text.strip(), maxsplit=1)[0]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"miner-guard {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Runs a distributed-training miner, detects its silent failures and gates its uploads."""


def main() -> None:
    """Entry point. Exits with the codes defined in `miner_guard.exits`."""
    # Imported modules live until exit, so collecting garbage every 700 objects would waste a tenth
    # of the start-up time.
    gc.set_threshold(_GC_EVERY)
    children.open_standard_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Reports any failure as one line on stderr,
    never as a traceback."""
    try:
        code = build(arguments)(
            args=list(arguments), prog_name="miner-guard", standalone_mode=False
        )
    except exits.Refused as refusal:
        return _refused(str(refusal), refusal.code)
    except _UsageError as error:
        error.show()
        return exits.USAGE
    except typer.Abort:
        return _refused("interrupted from the keyboard", exits.FAILED)
    except (BrokenPipeError, SystemExit):
        # `miner-guard logs | head`: a closed pipe is not an error here; typer turns it into
        # SystemExit.
        sys.stdout = None
        return exits.OK
    except OSError as error:
        sys.stdout = None
        return _refused(
            f"{error.filename or 'the output'}: {error.strerror or error}", exits.FAILED
        )
    except Exception as error:  # noqa: BLE001 - a bug in the guard; reported with its location
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        return _refused(f"internal error, please report it: {what}", exits.FAILED)
    return code if isinstance(code, int) else exits.OK


def _refused(why: str, code: int) -> int:
    # Imported late: a command that succeeds may not need it.
    from miner_guard.cli.echo import echo

    echo(f"miner-guard: {why}", err=True)
    return code
