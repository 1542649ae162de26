"""`miner-guard audit`: judge the published repo as a validator does."""

from __future__ import annotations

import json

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.eventlog import catalog
from miner_guard.exits import FAILED, OK, UNAVAILABLE
from uploads import audit, remembered_settings
from uploads.remembered_settings import Watched
from validators import shapes
from validators.limits import Limits
from validators.profiles import limits_of

_EXITS = {"accepted": OK, "rejected": FAILED, "unknown": UNAVAILABLE}


def command(
    as_json: options.Json = False,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
) -> None:
    """Would validators accept what is published? Exit 0: accepted, 1: rejected, 69: could not
    look."""
    place = options.open_context(config, name, state_dir)
    what = _what(place)
    report = audit.look(
        what.repo, what.chain, Limits.of(what.gate, what.limits), shapes.read(place.state.shapes)
    )
    if as_json:
        echo(json.dumps(statedir.finite(report.as_dict()), ensure_ascii=False))
    else:
        echo(catalog.message(report.finding()))
        for verdict in report.verdicts:
            echo(f"  {verdict.outcome:<8} {verdict.rule:<15} {verdict.sentence}")
    raise typer.Exit(_EXITS[report.outcome])


def _what(place: options.CommandContext) -> Watched:
    """The repo in the settings; where they name none, the repo that the state directory's guard
    watches."""
    own = place.settings.config
    known = remembered_settings.read(place.state) if own.repo.kind == "none" else None
    if known is None or known.repo.kind == "none":
        return Watched(own.repo, own.chain, own.gate, limits_of(own.miner))
    where = known.repo.path or known.repo.bucket or known.repo.repo_id
    echo(
        (
            f"no [repo] in the settings here: auditing {where}, as the guard of "
            f"{place.state.root} does"
        ),
        err=True,
    )
    return known
