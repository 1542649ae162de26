"""`miner-guard export`: the run's numbers for TensorBoard or Weights & Biases."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from miner_guard.cli.echo import echo
from miner_guard.cli.find import find_guard
from miner_guard.cli.options import AnyName, Config, State, check_there
from miner_guard.cli.working import Working
from miner_guard.config import optional_deps
from miner_guard.exits import FAILED, UNAVAILABLE, USAGE, Refused
from miner_guard.record.store import RunReader

_KINDS = ("tensorboard", "wandb")


def command(
    kind: Annotated[str, typer.Argument(metavar="tensorboard|wandb", help="The format to write.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")],
    project: Annotated[
        str, typer.Option("--project", help="wandb: name of the project.")
    ] = "miner-guard",
    online: Annotated[
        bool,
        typer.Option("--online", help="wandb: upload the run instead of writing offline files."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep exporting as the guard writes new lines.")
    ] = False,
    config: Config = None,
    name: AnyName = None,
    state_dir: State = None,
) -> None:
    """Export the run's metrics to TensorBoard or Weights & Biases without slowing down the guard.
    Exit code 1: no metrics found."""
    from miner_guard.reporting import export

    if kind not in _KINDS:
        raise Refused(f"export takes {' or '.join(_KINDS)}, not {kind!r}", USAGE)
    state = find_guard(name, state_dir)
    check_there(state)
    try:
        if kind == "tensorboard":
            write, close = export.tensorboard_writer(output)
        else:
            write, close = export.wandb_writer(output, project, online=online)
    except ImportError as error:
        raise Refused(
            f"{kind} is not installed ({error}); {optional_deps.install(kind)}", UNAVAILABLE
        ) from error
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error.strerror or error}", FAILED) from error
    count = 0
    events = RunReader(state.db).each(export.EVENTS, follow=follow)
    try:
        with contextlib.suppress(KeyboardInterrupt), Working(f"exporting to {output}"):
            for point in export.points(events):
                write(point)
                count += 1
    finally:
        close()
    echo(f"wrote {count} points to {output}")
    if not count:
        raise typer.Exit(FAILED)
