"""`miner-guard plan`: the consequences of the training settings; `miner_guard.cli.plan_model`
computes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Optional

import typer

from miner_guard.cli import plan_model
from miner_guard.cli.echo import echo
from miner_guard.cli.options import (
    DEFAULT_NAME,
    MAX_COUNT,
    Config,
    Json,
    Name,
    State,
    a_number,
    open_context,
)
from miner_guard.exits import USAGE, Refused
from miner_guard.watch.steps import grade

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def _params(text: str) -> float:
    """Parse a parameter count such as `4e9` or `4B`."""
    factor = _SUFFIXES.get(text[-1:].lower())
    try:
        count = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        count = math.nan
    if not 1 <= count <= MAX_COUNT:
        raise Refused(f"--params {text!r} is not a parameter count such as 4e9 or 4B", USAGE)
    return count


def command(
    gpus: Annotated[
        int, typer.Option(min=1, callback=a_number, help="Number of GPUs (world size).")
    ] = 4,
    batch: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            callback=a_number,
            help="Samples per micro-batch; default: [miner] batch_size, then 2.",
        ),
    ] = None,
    effective: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            callback=a_number,
            help="Effective batch size; default: [miner] effective_batch_size, then 512.",
        ),
    ] = None,
    params: Annotated[
        str, typer.Option(metavar="N", help="Number of parameters, such as 4e9 or 4B.")
    ] = "4e9",
    seq: Annotated[int, typer.Option(min=1, callback=a_number, help="Sequence length.")] = 1024,
    upload_steps: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            callback=a_number,
            help="Inner steps between uploads; default: [miner] upload_steps, then 3.",
        ),
    ] = None,
    micro_batch_ms: Annotated[
        Optional[float],
        typer.Option(
            min=0.001, callback=a_number, help="Time of one micro-batch, measured or assumed."
        ),
    ] = None,
    step_s: Annotated[
        Optional[float],
        typer.Option(
            min=0.001,
            callback=a_number,
            help="Measured time of an inner step; overrides --micro-batch-ms.",
        ),
    ] = None,
    gpu_memory_gb: Annotated[
        Optional[float],
        typer.Option(
            min=0.1, callback=a_number, help="Memory per GPU, to check whether the model fits."
        ),
    ] = None,
    config: Config = None,
    name: Name = DEFAULT_NAME,
    state_dir: State = None,
    as_json: Json = False,
) -> None:
    """Show what the settings imply: batch, accumulation, memory, step time, upload cadence."""
    known = open_context(config, name, state_dir).settings.config
    try:
        plan = plan_model.plan(
            plan_model.PlanSettings(
                gpus=gpus,
                batch=batch or known.miner.batch_size or 2,
                effective=effective or known.miner.effective_batch_size or 512,
                params=_params(params),
                seq=seq,
                upload_steps=upload_steps or known.miner.upload_steps or 3,
                micro_batch_s=None if micro_batch_ms is None else micro_batch_ms / 1000,
                step_s=step_s,
                min_inner_step=known.gate.min_inner_step,
                repo_age_target_s=known.gate.repo_age_target_s,
                repo_age_limit_s=known.gate.repo_age_limit_s,
                gpu_memory_gb=gpu_memory_gb,
            )
        )
    except plan_model.BadPlan as error:
        raise Refused(str(error), USAGE) from error
    if as_json:
        echo(json.dumps(document(plan)))
        return
    for line in text(plan, known.steps):
        echo(line)


def document(plan: plan_model.Plan) -> dict[str, Any]:
    """The plan for `--json`: source 004's estimate at the top, the miner's real behaviour under
    `actual`."""
    return {
        **_way(plan.document),
        "actual": _way(plan.actual),
        "fits": fits(plan),
        "simplifications": list(plan.simplifications),
        "changes": [asdict(change) for change in plan.changes],
        "settings": asdict(plan.settings),
    }


def _way(way: plan_model.PlanEstimate) -> dict[str, Any]:
    return {
        "accumulation_steps": way.accumulation_steps,
        "micro_batches": way.micro_batches,
        "samples": way.samples,
        "memory_gb": way.memory.as_dict(),
        "inner_step_s": way.inner_step_s,
        "upload": asdict(way.upload),
    }


def fits(plan: plan_model.Plan) -> bool | None:
    """Return True if the miner fits in the GPU's memory; None if the memory size was not given."""
    memory = plan.settings.gpu_memory_gb
    return None if memory is None else plan.actual.memory.total <= memory


def text(plan: plan_model.Plan, steps: Any) -> Iterator[str]:
    """Yield the plan as lines of text."""
    s, doc, actual = plan.settings, plan.document, plan.actual
    batches = f"batch {s.batch}, effective batch {s.effective}"
    yield f"{s.gpus} GPUs, {batches}, {s.params / 1e9:.3g}B parameters, sequence {s.seq}"
    yield ""
    yield f"{'':34}{'usual estimate':>18}{'what the miner does':>20}"
    for title, one, two in (
        (
            "Gradient accumulation steps",
            str(doc.accumulation_steps),
            str(actual.accumulation_steps),
        ),
        ("Micro-batches per inner step", str(doc.micro_batches), str(actual.micro_batches)),
        ("Samples per inner step", str(doc.samples), str(actual.samples)),
        *_memory_rows(doc.memory, actual.memory),
        ("Time per inner step", _seconds(doc.inner_step_s), _seconds(actual.inner_step_s)),
        (
            "  grade",
            *(
                ("unknown" if w.inner_step_s is None else grade(w.inner_step_s, steps))
                for w in (doc, actual)
            ),
        ),
        (
            "First valid upload, inner step",
            str(doc.upload.first_valid_inner_step),
            str(actual.upload.first_valid_inner_step),
        ),
        ("  after", _seconds(doc.upload.first_valid_s), _seconds(actual.upload.first_valid_s)),
        ("Upload every", _seconds(doc.upload.every_s), _seconds(actual.upload.every_s)),
        ("Repo stays fresh", _yes(doc.upload.fresh), _yes(actual.upload.fresh)),
    ):
        yield f"{title:34}{one:>18}{two:>20}"
    yield (
        f"Uploads: every {s.upload_steps} inner steps, {doc.upload.cadence}; repo: {doc.upload.why}"
    )
    if s.gpu_memory_gb is not None:
        verdict = "fits" if fits(plan) else "does NOT fit"
        yield f"GPU memory: {actual.memory.total:.1f} of {s.gpu_memory_gb:g} GB, {verdict}"
    yield ""
    yield "Simplifications in the usual estimate:"
    for line in plan.simplifications:
        yield f"  - {line}"
    yield ""
    yield "The effect of each change (by the usual estimate):"
    for change in plan.changes:
        time = "" if change.inner_step_s is None else f", {_seconds(change.inner_step_s)}"
        yield (
            f"  - {change.what} ({change.arguments}): {change.accumulation_steps} accumulation "
            f"steps, {change.micro_batches} micro-batches, ~{change.memory_gb:.0f} GB{time}: "
            f"{change.effect}"
        )


def _memory_rows(
    one: plan_model.MemoryPlan, two: plan_model.MemoryPlan
) -> Iterator[tuple[str, str, str]]:
    for title, name in (
        ("Memory: weights (bf16)", "weights"),
        ("  optimizer (AdamW)", "optimizer"),
        ("  gradients", "gradients"),
        ("  activations", "activations"),
        ("  FSDP overhead", "fsdp"),
        ("  total per GPU", "total"),
    ):
        yield title, f"~{getattr(one, name):.1f} GB", f"~{getattr(two, name):.1f} GB"


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f}s" if value < 600 else f"{value:.0f}s ({value / 60:.0f} min)"


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "NO"
