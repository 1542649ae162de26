"""`miner-guard gate` asks whether an upload may go out; `miner-guard audit` judges the repo
as a validator does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from miner_guard import state_dir as statedir
from miner_guard.cli import command, options
from miner_guard.cli.output import echo, working
from miner_guard.exits import CONFIG, FAILED, OK, UNAVAILABLE, USAGE, Refused

if TYPE_CHECKING:
    from miner_guard.uploads.gate import GateInputs
    from miner_guard.validators.facts import Decision

_THERE: Any = {"exists": True, "dir_okay": False}
_AUDIT_EXITS = {"accepted": OK, "rejected": FAILED, "unknown": UNAVAILABLE}


@command(
    "Publish",
    "miner-guard gate --outer-step 56 --inner-step 84 --loss 3.4",
    "miner-guard gate --outer-step 56 --inner-step 84 --gradients gradients.pt --json",
)
def gate(
    outer_step: Annotated[int, typer.Option(min=0, help="Outer step of the upload.")],
    inner_step: Annotated[int, typer.Option(min=0, help="Inner step of the upload.")],
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
    as_json: options.Json = False,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
) -> None:
    """May this upload go out? Exit 0: allowed, 1: blocked."""
    from miner_guard.record.status_document import read_status
    from miner_guard.uploads.gate import decide
    from miner_guard.uploads.pushes import note_of
    from miner_guard.validators import shapes
    from miner_guard.validators.facts import Candidate
    from miner_guard.validators.inspection import inspect_file
    from miner_guard.validators.limits import Limits
    from miner_guard.validators.profiles import profile_of

    place = options.open_context(config, name, state_dir)
    if kind not in ("gradient", "archive"):
        raise Refused(f"--kind {kind!r} is unknown; allowed: gradient, archive", USAGE)
    inputs = _inputs(place)
    settings = place.settings.config.gate
    try:
        limits = Limits.of(settings, inputs.limits)
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
        config=_document(config_json, "config.json"),
        metadata=_document(metadata_json, "metadata.json"),
    )
    decision = decide(candidate, inputs, settings, now=time.monotonic(), wall=time.time())
    _keep(place.state, decision)
    profile = profile_of(place.settings.config.miner)
    if not as_json and profile is not None and profile.unpaid is not None:
        echo(profile.unpaid)
    status = read_status(place.state)
    note = note_of(decision.as_dict(), None if status is None else status.steps.p50_s)
    _show(decision, note, as_json)
    raise typer.Exit(OK if decision.allowed else FAILED)


def _inputs(place: options.CommandContext) -> GateInputs:
    """What the hook reads; without a guard, the profile's limits still apply."""
    from miner_guard.uploads import gate as gating
    from miner_guard.validators.profiles import profile_of

    inputs = gating.read(place.state.gate_inputs)
    profile = profile_of(place.settings.config.miner)
    if inputs.reason is None or profile is None:
        return inputs
    return replace(inputs, limits=profile.limits)


def _keep(state: statedir.StateDir, decision: Decision) -> None:
    """Record the decision in run.db, as a rank does, if a guard has run there."""
    from miner_guard.record.events import write_failed
    from miner_guard.record.store import RunStore, decision_row

    if not state.gate_inputs.is_file():
        return
    store = RunStore(state.db, lambda event: echo(event.text, err=True))
    try:
        store.write(decision_row(decision.as_dict()))
    except OSError as error:
        echo(write_failed(state.db.name, error).text, err=True)
    store.close()


def _document(path: Path | None, key: str) -> dict[str, Any] | None:
    """Read a document as validators read the one published under `key`."""
    from miner_guard.uploads.repos.base import Damaged, parsed

    if path is None:
        return None
    try:
        return parsed(key, statedir.read_regular(path))
    except (OSError, Damaged) as error:
        raise Refused(f"{path} does not contain a JSON object", USAGE) from error


def _show(decision: Decision, note: str | None, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(statedir.finite(decision.as_dict()), ensure_ascii=False))
        return
    echo(f"UPLOAD {'ALLOWED' if decision.allowed else 'BLOCKED'}: {decision.reason}")
    if note is not None:
        echo(f"  {note}")
    for verdict in decision.verdicts:
        echo(f"  {verdict.outcome:<8} {verdict.rule:<15} {verdict.sentence}")


@command("Publish", "miner-guard audit", "miner-guard audit --json | jq .outcome")
def audit(
    checkout: Annotated[
        Optional[Path],
        typer.Option(
            "--with",
            metavar="CHECKOUT",
            exists=True,
            file_okay=False,
            help="A clone of the validators' code (subnet 38), whose own functions decide.",
        ),
    ] = None,
    as_json: options.Json = False,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
) -> None:
    """Would validators accept the published files? Exit 0: accepted, 1: rejected, 69: could not
    check."""
    from miner_guard.uploads import audit as auditing
    from miner_guard.validators import shapes

    place = options.open_context(config, name, state_dir)
    model = shapes.read(place.state.shapes)
    with working("reading the published files"):
        report = auditing.audit_repo(place.settings.config, model, checkout=checkout)
    if as_json:
        echo(json.dumps(statedir.finite(report.as_dict()), ensure_ascii=False))
    else:
        for words in (*report.network, report.event().text):
            echo(words)
        for verdict in report.verdicts:
            echo(f"  {verdict.outcome:<8} {verdict.rule:<15} {verdict.sentence}")
        for label, rows in (("assumed", report.assumed), ("not checked", report.not_checked)):
            for words in rows:
                echo(f"  {'-':<8} {label:<15} {words}")
        if checkout is None and report.verdicts:
            rules = f"the rules of {report.read_from}" if report.read_from else ""
            echo(f"  judged by {rules or 'general rules only: no [miner] profile is set'}")
    raise typer.Exit(_AUDIT_EXITS[report.outcome])
