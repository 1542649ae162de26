"""`miner-guard`: the commands in their groups, and the mapping of errors to exit codes.

A command is a function in one of the modules below; its docstring is its help. To add one, list it
in `GROUPS` and give it examples. Import what is slow inside the function: `logs` and `status` start
in 0.15 s because only the command that runs pays for its imports.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from miner_guard import __version__, exits
from miner_guard.cli import config, costs, demo, doctor, explain, init, options, plan, publish, see
from miner_guard.cli import run as launch
from miner_guard.cli.output import echo
from miner_guard.keeper.link import KEEPER_FD, MINER_COMMANDS
from miner_guard.system import children

GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run": (launch.run, demo.demo, init.init, launch.ctl),
    "See": (see.status, see.top, see.logs, see.report),
    "Understand": (explain.explain, doctor.doctor, plan.plan, costs.costs, config.config),
    "Publish": (publish.gate, publish.audit),
}
COMMANDS = {command.__name__: command for group in GROUPS.values() for command in group}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "miner-guard run -- torchrun --nproc_per_node=4 neurons/miner.py --netuid 38",
        "miner-guard run --attach auto --finite -- python train.py",
    ),
    "demo": ("miner-guard demo", "miner-guard demo --fault slow@40 --fault hang@60:1"),
    "init": (
        "miner-guard init --name miner -- torchrun --nproc_per_node=4 neurons/miner.py",
        "miner-guard init --ops ./ops",
    ),
    "ctl": ("miner-guard ctl checkpoint", "miner-guard ctl restart --name miner"),
    "status": (
        "miner-guard status",
        "miner-guard status --json | jq .verdict",
        "miner-guard status --host miner-1:9838,miner-2:9838",
    ),
    "top": ("miner-guard top", "miner-guard top --once | head -n 2"),
    "logs": (
        "miner-guard logs --level warning -n 20",
        "miner-guard logs --event verdict_changed --since 1d",
        "miner-guard logs --event inner_step --rank 0 --follow",
    ),
    "report": (
        "miner-guard report -o day.html --since 1d",
        "miner-guard report -o help.tar.gz --bundle --since 6h",
        "miner-guard report -o runs/miner --export tensorboard",
    ),
    "explain": (
        "miner-guard explain miner.log",
        "zcat old.log.gz | miner-guard explain -",
        "miner-guard explain steps.jsonl",
        "miner-guard explain --steps miner.log",
        "miner-guard explain hang_detected",
    ),
    "doctor": (
        "miner-guard doctor",
        "miner-guard doctor --expect-gpus 4",
        "miner-guard doctor --alerts",
    ),
    "plan": (
        "miner-guard plan --gpus 4 --params 4B --batch 2 --effective 512",
        "miner-guard plan --gpus 1 --params 8B --weight-bits 4 --adapters 16M --gpu-memory-gb 16",
    ),
    "costs": (
        "miner-guard costs",
        "miner-guard costs estimate validation --every 200 --seconds 3 --step-time 3.5",
    ),
    "config": ("miner-guard config --changed", "miner-guard config --validate guard.toml"),
    "gate": (
        "miner-guard gate --outer-step 56 --inner-step 84 --loss 3.4",
        "miner-guard gate --outer-step 56 --inner-step 84 --gradients gradients.pt --json",
    ),
    "audit": ("miner-guard audit", "miner-guard audit --json | jq .outcome"),
}

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


def build() -> typer.Typer:
    """The application with all commands."""
    app = typer.Typer(
        name="miner-guard",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for group, commands in GROUPS.items():
        for command in commands:
            name, words = command.__name__, " ".join((command.__doc__ or "").split())
            app.command(
                help=words,
                short_help=words.split(". ")[0].rstrip("."),
                rich_help_panel=group,
                epilog="\n\n".join(["Examples:", *EXAMPLES[name]]),
                # The miner's own flags follow its command.
                context_settings={"allow_interspersed_args": name not in ("run", "init", "doctor")},
            )(command)
    return app


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
    if not arguments and options.running_guards():
        arguments = ["status"]
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
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        return _refused(f"internal error, please report it: {what}", exits.FAILED)
    return code if isinstance(code, int) else exits.OK


def _refused(why: str, code: int) -> int:
    echo(f"miner-guard: {why}", err=True)
    return code
