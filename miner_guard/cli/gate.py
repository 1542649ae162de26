"""`miner-guard gate`: ask the gate from a shell or another language."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import options
from miner_guard.cli.echo import echo
from miner_guard.cli.working import Working
from miner_guard.config import GateSettings
from miner_guard.exits import CONFIG, FAILED, OK, USAGE, Refused
from miner_guard.record.store import RunReader, RunStore, decision_rows
from miner_guard.uploads import inputs as gate_inputs
from miner_guard.uploads import remembered_settings
from miner_guard.uploads.decision import GateDecision
from miner_guard.uploads.gate import decide, replay
from miner_guard.uploads.inputs import GateInputs
from miner_guard.validators import shapes
from miner_guard.validators.facts import Candidate
from miner_guard.validators.inspection import inspect_file
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import limits_of

_THERE: Any = {"exists": True, "dir_okay": False}


def command(
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
        with Working("reading the gradients"):
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
    known = gate_inputs.read(place.state.gate_inputs)
    if known.reason is None:
        return known
    limits = limits_of(place.settings.config.miner)
    return GateInputs(known.published, known.network, limits=limits, reason=known.reason)


def _settings(place: options.CommandContext) -> GateSettings:
    """Return [gate] from these settings or, if they have no such section, from those of the guard
    that uses the state directory."""
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
