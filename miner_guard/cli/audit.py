"""`miner-guard audit`: judge the published repo as a validator does."""

from __future__ import annotations

import json
from collections.abc import Mapping

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.cli.working import Working
from miner_guard.eventlog import catalog
from miner_guard.exits import FAILED, OK, UNAVAILABLE
from miner_guard.record.store import RunReader
from miner_guard.uploads import audit, remembered_settings
from miner_guard.uploads.remembered_settings import Watched
from miner_guard.validators import shapes
from miner_guard.validators.facts import AllReduce
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import limits_of
from miner_guard.watch.uploads import allreduce_of

_EXITS = {"accepted": OK, "rejected": FAILED, "unknown": UNAVAILABLE}


def command(
    as_json: options.Json = False,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
) -> None:
    """Would validators accept the published files? Exit 0: accepted, 1: rejected, 69: could not
    check."""
    place = options.open_context(config, name, state_dir)
    what = _what(place)
    known = audit.Known(shapes.read(place.state.shapes), allreduce=_last_allreduce(place.state))
    with Working("reading the published files"):
        report = audit.audit_repo(what.repo, what.chain, Limits.of(what.gate, what.limits), known)
    if as_json:
        echo(json.dumps(statedir.finite(report.as_dict()), ensure_ascii=False))
    else:
        echo(catalog.message(report.finding()))
        for verdict in report.verdicts:
            echo(f"  {verdict.outcome:<8} {verdict.rule:<15} {verdict.sentence}")
        for words in report.not_checked:
            echo(f"  {'-':<8} {'not checked':<15} {words}")
        echo(f"  {_speaks_for(report.read_from)}")
    raise typer.Exit(_EXITS[report.outcome])


def _speaks_for(read_from: str | None) -> str:
    if read_from is None:
        return "judged by general rules only: no [miner] profile is set"
    return f"judged by the rules of {read_from}"


def _last_allreduce(state: statedir.StateDir) -> AllReduce | None:
    """Return the last AllReduce that this state directory's guard read from the miner's log; None
    if it saw none."""
    swarm = RunReader(state.db).now().get("swarm")
    last = swarm.get("last") if isinstance(swarm, Mapping) else None
    return allreduce_of(last) if isinstance(last, Mapping) else None


def _what(place: options.CommandContext) -> Watched:
    """Return the repo from the settings or, if they name none, the repo that this state directory's
    guard watches."""
    own = place.settings.config
    known = remembered_settings.read(place.state) if own.repo.kind == "none" else None
    if known is None or known.repo.kind == "none":
        return Watched(own.repo, own.chain, own.gate, limits_of(own.miner))
    where = known.repo.path or known.repo.bucket or known.repo.repo_id
    echo(
        f"the settings have no [repo] section; auditing {where}, which the guard in "
        f"{place.state.root} watches",
        err=True,
    )
    return known
