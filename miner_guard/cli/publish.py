"""`miner-guard gate` asks whether an upload may go out; `miner-guard audit` judges the repo
as a validator does."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import options
from miner_guard.cli.output import echo, working
from miner_guard.exits import CONFIG, FAILED, OK, UNAVAILABLE, USAGE, Refused

if TYPE_CHECKING:
    from miner_guard.config import GateSettings
    from miner_guard.uploads.decision import GateDecision
    from miner_guard.uploads.inputs import GateInputs
    from miner_guard.uploads.remembered_settings import Watched

_THERE: Any = {"exists": True, "dir_okay": False}
_AUDIT_EXITS = {"accepted": OK, "rejected": FAILED, "unknown": UNAVAILABLE}


def gate(
    outer_step: Annotated[
        Optional[int], typer.Option(min=0, help="Outer step of the upload.")
    ] = None,
    inner_step: Annotated[
        Optional[int], typer.Option(min=0, help="Inner step of the upload.")
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="gradient, or archive (after an AllReduce; exempt from the minimum inner step)."
        ),
    ] = "gradient",
    loss: Annotated[Optional[float], typer.Option(help="The latest loss.")] = None,
    base_outer_step: Annotated[
        Optional[int], typer.Option(min=0, help="Outer step that the upload is based on.")
    ] = None,
    gradients: Annotated[
        Optional[Path], typer.Option(**_THERE, help="The gradients.pt to inspect.")
    ] = None,
    config_json: Annotated[
        Optional[Path], typer.Option(**_THERE, help="The upload's config.json.")
    ] = None,
    metadata_json: Annotated[
        Optional[Path], typer.Option(**_THERE, help="The upload's metadata.json.")
    ] = None,
    revision: Annotated[
        Optional[str], typer.Option(help="The upload's tag, such as 5.56.84.")
    ] = None,
    replay_id: Annotated[
        Optional[str], typer.Option("--replay", metavar="ID", help="Replay a recorded decision.")
    ] = None,
    as_json: options.Json = False,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
) -> None:
    """May this upload go out? Exit 0: allowed, 1: blocked."""
    from miner_guard.uploads.gate import decide
    from miner_guard.validators import shapes
    from miner_guard.validators.facts import Candidate
    from miner_guard.validators.inspection import inspect_file
    from miner_guard.validators.limits import Limits

    place = options.open_context(config, name, state_dir)
    if replay_id is not None:
        raise typer.Exit(_replayed(place.state, replay_id, as_json))
    if outer_step is None or inner_step is None:
        raise Refused("pass --outer-step and --inner-step, or --replay ID", USAGE)
    if kind not in ("gradient", "archive"):
        raise Refused(f"--kind {kind!r} is unknown; allowed: gradient, archive", USAGE)
    known, settings = _inputs(place), _settings(place)
    try:
        limits = Limits.of(settings, known.limits)
    except TypeError as error:
        raise Refused(f"{place.state.gate_inputs}: {error}", CONFIG) from error
    files = None
    if gradients is not None:
        with working("reading the gradients"):
            files = inspect_file(gradients, limits, shapes=shapes.read(place.state.shapes))
    candidate = Candidate(
        kind,
        outer_step,
        inner_step,
        loss=loss,
        base_outer_step=base_outer_step,
        files=files,
        config=_document(config_json),
        metadata=_document(metadata_json),
        revision=revision,
    )
    decision = decide(candidate, known, settings, now=time.monotonic(), wall=time.time())
    _keep(place.state, decision, known)
    _show(decision, as_json)
    raise typer.Exit(OK if decision.allowed else FAILED)


def _inputs(place: options.CommandContext) -> GateInputs:
    """The guard's published inputs; without a guard, the profile's limits still apply."""
    from miner_guard.uploads import inputs as gate_inputs
    from miner_guard.validators.profiles import limits_of

    known = gate_inputs.read(place.state.gate_inputs)
    if known.reason is None:
        return known
    limits = limits_of(place.settings.config.miner)
    return gate_inputs.GateInputs(
        known.published, known.network, limits=limits, reason=known.reason
    )


def _settings(place: options.CommandContext) -> GateSettings:
    """Return [gate] from these settings or, if they have no such section, from those of the guard
    that uses the state directory."""
    from miner_guard.uploads import remembered_settings

    own = place.settings
    if any(
        name.startswith("gate.") and origin != "default" for name, origin in own.origins.items()
    ):
        return own.config.gate
    there = remembered_settings.read(place.state)
    if there is None or there.gate == own.config.gate:
        return own.config.gate
    echo(
        f"the settings have no [gate] section; using the one from the guard in {place.state.root}",
        err=True,
    )
    return there.gate


def _keep(state: statedir.StateDir, decision: GateDecision, known: GateInputs) -> None:
    """Record the decision in the ledger, as a rank does, if a guard has created the ledger."""
    from miner_guard.record.store import RunStore, decision_rows
    from miner_guard.uploads import inputs as gate_inputs

    if not state.gate_inputs.is_file():
        return
    store = RunStore(state.db, lambda event: echo(event.text, err=True))
    store.write(*decision_rows(decision.as_dict(), gate_inputs.as_document(known)))
    store.close()


def _document(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        document = json.loads(statedir.read_regular(path))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Refused(f"{path} does not contain a JSON object", USAGE)
    return document


def _show(decision: GateDecision, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(statedir.finite(decision.as_dict()), ensure_ascii=False))
        return
    echo(f"UPLOAD {'ALLOWED' if decision.allowed else 'BLOCKED'}: {decision.reason}")
    for verdict in decision.verdicts:
        echo(f"  {verdict.outcome:<8} {verdict.rule:<15} {verdict.sentence}")
        if verdict.note is not None:
            echo(f"  {'':<24} {verdict.note}")


def _replayed(state: statedir.StateDir, decision_id: str, as_json: bool) -> int:
    """Replay a recorded decision using only the ledger. Returns the exit code: 0 if the replay
    allows the upload and equals the recorded decision, otherwise 1."""
    from miner_guard.record.store import RunReader
    from miner_guard.uploads import inputs as gate_inputs
    from miner_guard.uploads.gate import replay

    ledger = RunReader(state.db)
    stored = ledger.find_decision(decision_id)
    if stored is None and ledger.unread is not None:
        raise Refused(f"{state.db} cannot be read: {ledger.unread}", FAILED)
    if stored is None:
        raise Refused(
            f"{state.db} has no decision {decision_id!r}; to list the decisions, run "
            "`miner-guard logs --ledger decisions`",
            FAILED,
        )
    document, inputs_document = stored
    record = document.get("record") or {}
    if inputs_document is not None:
        known = gate_inputs.from_document(inputs_document)
    elif record.get("inputs_unknown") is not None:
        known = gate_inputs.unknown(record["inputs_unknown"])
    else:
        raise Refused(
            (
                f"decision {document.get('decision_id')} cannot be replayed: the ledger does not "
                "have the inputs that the gate used"
            ),
            FAILED,
        )
    try:
        again = replay(record, known, document["decided_at"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"decision {decision_id}: its record cannot be replayed: {error!r}", FAILED
        ) from error
    equal = _plain(again.as_dict()) == _plain(document)
    if as_json:
        echo(
            json.dumps(
                {"equal": equal, "decision": _plain(again.as_dict()), "stored": _plain(document)}
            )
        )
    else:
        _show(again, as_json=False)
        echo(
            "replay: the same decision" if equal else "replay: DIFFERENT from the recorded decision"
        )
    return OK if equal and again.allowed else FAILED


def _plain(document: Any) -> Any:
    if isinstance(document, float) and not math.isfinite(document):
        return str(document)
    return json.loads(json.dumps(statedir.finite(document), sort_keys=True))


def audit(
    as_json: options.Json = False,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
) -> None:
    """Would validators accept the published files? Exit 0: accepted, 1: rejected, 69: could not
    check."""
    from miner_guard.uploads import audit as auditing
    from miner_guard.validators import shapes
    from miner_guard.validators.limits import Limits

    place = options.open_context(config, name, state_dir)
    what = _what(place)
    known = auditing.Known(shapes.read(place.state.shapes), allreduce=_last_allreduce(place.state))
    with working("reading the published files"):
        report = auditing.audit_repo(
            what.repo, what.chain, Limits.of(what.gate, what.limits), known
        )
    if as_json:
        echo(json.dumps(statedir.finite(report.as_dict()), ensure_ascii=False))
    else:
        echo(report.finding().text)
        for verdict in report.verdicts:
            echo(f"  {verdict.outcome:<8} {verdict.rule:<15} {verdict.sentence}")
        for words in report.not_checked:
            echo(f"  {'-':<8} {'not checked':<15} {words}")
        echo(f"  {_speaks_for(report.read_from)}")
    raise typer.Exit(_AUDIT_EXITS[report.outcome])


def _speaks_for(read_from: str | None) -> str:
    if read_from is None:
        return "judged by general rules only: no [miner] profile is set"
    return f"judged by the rules of {read_from}"


def _last_allreduce(state: statedir.StateDir) -> Any:
    """Return the last AllReduce that this state directory's guard read from the miner's log; None
    if it saw none."""
    from miner_guard.record.store import RunReader
    from miner_guard.watch.uploads import allreduce_of

    status = RunReader(state.db).now()
    swarm = status.get("swarm")
    last = swarm.get("last") if isinstance(swarm, Mapping) else None
    return allreduce_of(last) if isinstance(last, Mapping) else None


def _what(place: options.CommandContext) -> Watched:
    """Return the repo from the settings or, if they name none, the repo that this state directory's
    guard watches."""
    from miner_guard.uploads import remembered_settings
    from miner_guard.validators.profiles import limits_of

    own = place.settings.config
    known = remembered_settings.read(place.state) if own.repo.kind == "none" else None
    if known is None or known.repo.kind == "none":
        return remembered_settings.Watched(own.repo, own.chain, own.gate, limits_of(own.miner))
    where = known.repo.path or known.repo.bucket or known.repo.repo_id
    echo(
        f"the settings have no [repo] section; auditing {where}, which the guard in "
        f"{place.state.root} watches",
        err=True,
    )
    return known
