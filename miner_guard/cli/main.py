"""`miner-guard`: reads the command line, and maps errors to exit codes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from miner_guard import __version__, exits
from miner_guard.cli import load
from miner_guard.cli.output import echo
from miner_guard.keeper.link import KEEPER_FD, MINER_COMMANDS
from miner_guard.record.words import defect
from miner_guard.system import children

COMMANDS = load()

MOVED = {
    "runbook": "`miner-guard explain EVENT` says what an event means and what to do",
    "attach-check": "`miner-guard explain --steps FILE` shows the steps that it reads from a log",
    "bundle": "`miner-guard report --bundle -o FILE` packs what support asks for",
    "export": "`miner-guard report --export tensorboard|wandb -o DIR` exports the metrics",
    "alerts": "`miner-guard doctor --alerts` sends a test message to every target",
    "ops": "`miner-guard init --ops DIR` writes the on-call files",
}
"""Names of former commands, and what took over."""

_UsageError: Any = typer.BadParameter.__mro__[1]
"""The base class of typer's usage errors. typer does not export it, and its module differs between
versions."""

_GC_EVERY = 20_000


def build() -> Any:
    """The command line with all commands."""
    app = typer.Typer(
        name="miner-guard",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, each in COMMANDS.items():
        words = " ".join((each.function.__doc__ or "").split())
        app.command(
            help=words,
            short_help=words.split(". ")[0].rstrip("."),
            rich_help_panel=each.group,
            epilog="\n\n".join(["Examples:", *each.examples]),
            # The miner's own flags follow its command.
            context_settings={"allow_interspersed_args": name not in ("run", "init", "doctor")},
        )(each.function)
    return typer.main.get_command(app)


def _version(requested: bool) -> None:
    if requested:
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
    """Run the command line of this process; exits with the codes defined in `miner_guard.exits`."""
    if sys.argv[1:2] and sys.argv[1] in MINER_COMMANDS and KEEPER_FD not in os.environ:
        # An entry point from before the keeper; `miner_guard.__main__` starts one.
        os.execv(sys.executable, [*children.module_command("miner_guard"), *sys.argv[1:]])
    # Imported modules live until exit, so collecting garbage every 700 objects would waste a tenth
    # of the start-up time.
    gc.set_threshold(_GC_EVERY)
    children.open_standard_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Reports any failure as one line on stderr,
    never as a traceback. Without arguments: the guards that run here, else the help."""
    if not arguments:
        from miner_guard.record import status_document

        arguments = ["status"] if status_document.running_guards() else []
    if arguments and arguments[0] in MOVED:
        return _refused(f"no command {arguments[0]!r} any more: {MOVED[arguments[0]]}", exits.USAGE)
    try:
        code = build()(args=list(arguments), prog_name="miner-guard", standalone_mode=False)
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
        return _refused(f"internal error, please report it: {defect(error)}", exits.FAILED)
    return code if isinstance(code, int) else exits.OK


def _refused(why: str, code: int) -> int:
    echo(f"miner-guard: {why}", err=True)
    return code
