"""`miner-guard plan`: what training settings imply before any GPU time is spent. The usual estimate
is source 004's, to the letter; `actual` is what subnet 38's miner does: it divides the effective
batch by the world size, the ranks work in parallel, and FSDP2 shards what is trained. A GB is 10^9
bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Optional

import typer

from miner_guard.cli import command, options
from miner_guard.cli.output import echo
from miner_guard.exits import USAGE, Refused

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_BITS = {4: 0.5625, 8: 1.0, 16: 2.0, 32: 4.0}
"""Bytes per weight. 4 bits: NF4 keeps a scale for 64 weights, so source 003's 8B take 4.5 GB."""

_CHECKPOINTING = 0.65
"""Activation memory with gradient checkpointing, which saves 30-40 % (source 003)."""

_QUANTISED_TOKENS = 1024
"""Tokens whose activations take 1 GB in an 8B model with quantised weights (source 003: 2-8 GB,
which is batch 1 to 4 of 2,048). peft prepares such a model with gradient checkpointing, which
leaves the layers' inputs (0.26 MB a token) and the logits (0.77 MB)."""

_ADAPTERS = 0.02
"""Share of the parameters that adapters add: LoRA of rank 64 on all layers of an 8B model."""


@dataclass(frozen=True)
class Plan:
    """The settings of one plan, and what follows from them."""

    gpus: int
    batch: int
    effective: int
    params: float
    seq: int
    upload_steps: int
    micro_batch_s: float | None = None
    step_s: float | None = None
    weight_bits: int = 16
    adapters: float | None = None
    """Number of trainable parameters; None: all."""

    checkpointing: bool = False
    min_inner_step: int = 50
    repo_age_target_s: float = 1800.0

    @property
    def quantised(self) -> bool:
        return self.weight_bits < 16

    def memory(self, shards: int) -> dict[str, float]:
        """One rank's GPU memory in GB. Without shards and adapters, source 004's: AdamW with two
        bf16 moments, no gradients, a quarter of the weights for FSDP. Adapters train in fp32.

        Activations scale source 004's 4 GB for batch 2, sequence 1024 and 4B parameters: they grow
        with sequence · batch · hidden · layers (Korthikanti et al. 2022), and hidden · layers with
        params^(2/3)."""
        frozen = self.params * _BITS[self.weight_bits] / 1e9
        scale = self.batch * self.seq / 2048 * (self.params / 4e9) ** (2 / 3)
        rows = {"weights": frozen / shards, "optimizer": 4 * self.params / 1e9 / shards}
        rows["gradients"] = self.params * 2 / 1e9 / shards if shards > 1 else 0.0
        if self.adapters is not None:
            rows = {"weights": (frozen + 4 * self.adapters / 1e9) / shards}
            rows["optimizer"] = 8 * self.adapters / 1e9 / shards
            rows["gradients"] = 4 * self.adapters / 1e9 / shards
        rows["activations"] = 4.0 * scale * (_CHECKPOINTING if self.checkpointing else 1.0)
        if self.quantised and self.checkpointing:
            tokens = self.batch * self.seq / _QUANTISED_TOKENS
            rows["activations"] = tokens * (self.params / 8e9) ** (2 / 3)
        rows["fsdp"] = frozen / 4 if self.gpus > 1 else 0.0
        return {**rows, "total": sum(rows.values())}

    def estimate(self, *, actual: bool) -> dict[str, Any]:
        """Accumulation steps, micro-batches, samples, memory, step time and uploads."""
        accumulation = self.effective // self.batch
        if actual:
            accumulation = max(1, self.effective // self.gpus // self.batch)
        in_turn = accumulation if actual else accumulation * self.gpus
        seconds = self.step_s
        if seconds is None and self.micro_batch_s is not None:
            seconds = in_turn * self.micro_batch_s
        return {
            "accumulation_steps": accumulation,
            "micro_batches": accumulation * self.gpus,
            "samples": accumulation * self.gpus * self.batch,
            "memory_gb": self.memory(self.gpus if actual else 1),
            "inner_step_s": seconds,
            "upload": self._upload(seconds),
        }

    def _upload(self, step_s: float | None) -> dict[str, Any]:
        first = max(-(-self.min_inner_step // self.upload_steps), 1) * self.upload_steps
        cadence = "good" if self.upload_steps <= 5 else "acceptable"
        longest = None if step_s is None else max(first, self.upload_steps) * step_s
        return {
            "first_valid_inner_step": first,
            "first_valid_s": step_s and first * step_s,
            "every_s": step_s and self.upload_steps * step_s,
            "cadence": cadence if self.upload_steps <= 10 else "infrequent: 3-5 steps are good",
            "fresh": None if longest is None else longest < self.repo_age_target_s,
        }

    def changes(self) -> Iterator[dict[str, Any]]:
        """Source 004's suggestions and source 003's checkpointing, by the usual estimate."""
        half_time = self.micro_batch_s and self.micro_batch_s / 2
        slower = self.micro_batch_s and self.micro_batch_s * 1.2
        fewer = replace(self, effective=max(self.batch, self.effective // 2))
        yield _change("halve the effective batch", "half the time", fewer)
        if self.batch > 1:
            smaller = replace(self, batch=self.batch // 2, micro_batch_s=half_time)
            yield _change("halve the batch", "less memory, same samples", smaller)
        if self.seq > 1:
            shorter = replace(self, seq=self.seq // 2, micro_batch_s=half_time)
            yield _change("halve the sequence", "less memory, half the tokens", shorter)
        if not self.checkpointing:
            saving = replace(self, checkpointing=True, micro_batch_s=slower)
            words = "30-40 % less activation memory, about 20 % slower"
            yield _change("gradient checkpointing", words, saving)
        if self.quantised and self.checkpointing:
            faster = self.micro_batch_s and self.micro_batch_s / 1.2
            full = replace(self, checkpointing=False, micro_batch_s=faster)
            yield _change("no gradient checkpointing", "all activations in memory, faster", full)
        if self.adapters is None:
            adapters = _ADAPTERS * self.params
            quantised = replace(self, weight_bits=4, adapters=adapters, checkpointing=True)
            yield _change("4-bit weights with adapters", "trains the adapters only", quantised)


_PASTED = {
    "batch": r"batch[ _]size\W{1,3}(\d{1,5})\b",
    "seq": r"seq(?:uence)?[ _]len(?:gth)?\W{1,3}(\d{1,7})\b",
    "params": r"\bmodel\b.{0,60}?\b(\d{1,4}(?:\.\d+)?[bm])\b",
    "accumulation": r"accumulation(?:[ _]steps)?\W{1,3}(\d{1,5})\b",
    "bits": r"\bmodel\b.{0,80}?\b([48])-?bit\b",
    "without": r"gradient[ _]checkpointing\W{1,3}(disabled|false|off|no)\b",
}
"""The settings that somebody writes below an out-of-memory error, as in source 003's example."""


def savings(text: str) -> Iterator[str]:
    """Lines that say how much memory each change would save the run whose settings are in `text`;
    none if the model's size, the batch or the sequence is missing."""
    found = {name: re.search(each, text, re.IGNORECASE) for name, each in _PASTED.items()}
    known = {name: match[1] for name, match in found.items() if match}
    if not {"batch", "seq", "params"} <= known.keys():
        return
    size, bits = known["params"].lower(), int(known.get("bits", 16))
    params = max(1.0, float(size[:-1]) * _SUFFIXES[size[-1]])
    made = Plan(
        gpus=1,
        batch=int(known["batch"]) or 1,
        effective=max(1, int(known["batch"])) * int(known.get("accumulation", 1)) or 1,
        params=params,
        seq=int(known["seq"]) or 1,
        upload_steps=3,
        weight_bits=bits,
        adapters=_ADAPTERS * params if bits < 16 else None,
        checkpointing=bits < 16 and "without" not in known,
    )
    before = made.memory(1)["total"]
    yield f"Batch {made.batch} of {made.seq} tokens needs about {before:.0f} GB. One change each:"
    for change in made.changes():
        after = change["memory_gb"]
        if round(after) < round(before):
            yield f"  {change['what']}: about {after:.0f} GB, saves {before - after:.0f}"


def _change(what: str, effect: str, plan: Plan) -> dict[str, Any]:
    after = replace(plan, step_s=None).estimate(actual=False)
    after["memory_gb"] = after["memory_gb"]["total"]
    return {"what": what, "effect": effect, **{k: v for k, v in after.items() if k != "upload"}}


def parameter_count(text: str, option: str = "--params") -> float:
    """Parse a parameter count such as `4e9` or `4B`. Raises Refused (64)."""
    factor = _SUFFIXES.get(text[-1:].lower())
    try:
        count = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        count = math.nan
    if not 1 <= count <= options.MAX_COUNT:
        raise Refused(f"{option} {text!r} is not a parameter count such as 4e9 or 4B", USAGE)
    return count


@command(
    "Understand",
    "miner-guard plan --gpus 4 --params 4B --batch 2 --effective 512",
    "miner-guard plan --gpus 1 --params 8B --weight-bits 4 --adapters 16M --gpu-memory-gb 16",
)
def plan(
    gpus: Annotated[int, options.at_least(1, "Number of GPUs (world size).")] = 4,
    batch: Annotated[
        Optional[int],
        options.at_least(1, "Samples per micro-batch; default: miner.batch_size, or 2."),
    ] = None,
    effective: Annotated[
        Optional[int],
        options.at_least(1, "Effective batch size; default: miner.effective_batch_size, or 512."),
    ] = None,
    params: Annotated[
        str, typer.Option(metavar="N", help="Number of parameters, such as 4e9 or 4B.")
    ] = "4e9",
    seq: Annotated[int, options.at_least(1, "Sequence length.")] = 1024,
    upload_steps: Annotated[
        Optional[int],
        options.at_least(1, "Inner steps between uploads; default: miner.upload_steps, or 3."),
    ] = None,
    micro_batch_ms: Annotated[
        Optional[float], options.at_least(0.001, "Time of one micro-batch, measured or assumed.")
    ] = None,
    step_s: Annotated[
        Optional[float],
        options.at_least(0.001, "Measured time of an inner step; overrides --micro-batch-ms."),
    ] = None,
    gpu_memory_gb: Annotated[
        Optional[float], options.at_least(0.1, "Memory per GPU, to check whether the model fits.")
    ] = None,
    weight_bits: Annotated[
        int, typer.Option(help="Bits per weight: 4, 8, 16 or 32. Below 16, adapters are trained.")
    ] = 16,
    adapters: Annotated[
        Optional[str],
        typer.Option(metavar="N", help="Trainable parameters if only adapters are trained (LoRA)."),
    ] = None,
    config: options.Config = None,
    name: options.Name = options.DEFAULT_NAME,
    state_dir: options.State = None,
    as_json: options.Json = False,
) -> None:
    """Show what the settings imply: batch, accumulation, memory, step time, upload cadence."""
    if weight_bits not in _BITS:
        raise Refused(f"--weight-bits {weight_bits} is not 4, 8, 16 or 32", USAGE)
    settings = options.open_context(config, name, state_dir).settings.config
    count = parameter_count(params)
    trained = None if adapters is None else parameter_count(adapters, "--adapters")
    if trained is None and weight_bits < 16:
        trained = _ADAPTERS * count
    made = Plan(
        gpus=gpus,
        batch=batch or settings.miner.batch_size or 2,
        effective=effective or settings.miner.effective_batch_size or 512,
        params=count,
        seq=seq,
        upload_steps=upload_steps or settings.miner.upload_steps or 3,
        micro_batch_s=None if micro_batch_ms is None else micro_batch_ms / 1000,
        step_s=step_s,
        weight_bits=weight_bits,
        adapters=trained,
        checkpointing=weight_bits < 16,
        min_inner_step=settings.gate.min_inner_step,
        repo_age_target_s=settings.gate.repo_age_target_s,
    )
    if made.effective < made.batch:
        raise Refused(
            f"effective batch {made.effective} is smaller than batch {made.batch}; "
            "raise the effective batch or lower the batch",
            USAGE,
        )
    answer = document(made, gpu_memory_gb)
    if as_json:
        echo(json.dumps(answer))
    else:
        _print(made, answer)


def document(made: Plan, gpu_memory_gb: float | None) -> dict[str, Any]:
    """The plan for `--json`: source 004's estimate at the top, the miner's under `actual`."""
    actual = made.estimate(actual=True)
    return {
        **made.estimate(actual=False),
        "actual": actual,
        "fits": None if gpu_memory_gb is None else actual["memory_gb"]["total"] <= gpu_memory_gb,
        "changes": list(made.changes()),
        "settings": {**asdict(made), "gpu_memory_gb": gpu_memory_gb},
    }


def _print(made: Plan, answer: dict[str, Any]) -> None:
    trained = "" if made.adapters is None else f", {made.adapters / 1e6:.4g}M trained"
    echo(
        f"{made.gpus} GPUs, batch {made.batch}, effective batch {made.effective}, "
        f"{made.params / 1e9:.3g}B parameters in {made.weight_bits} bits{trained}, "
        f"sequence {made.seq}\n\n{'':34}{'usual estimate':>18}{'what the miner does':>20}"
    )
    for one, two in zip(_rows(answer), _rows(answer["actual"]), strict=True):
        echo(f"{one[0]:34}{one[1]:>18}{two[1]:>20}")
    echo(f"Uploads: every {made.upload_steps} inner steps, {answer['upload']['cadence']}")
    if answer["fits"] is not None:
        total, limit = answer["actual"]["memory_gb"]["total"], answer["settings"]["gpu_memory_gb"]
        echo(f"{total:.1f} of {limit:g} GB: {'fits' if answer['fits'] else 'does NOT fit'}")
    echo(
        "\nThe usual estimate is source 004's: each GPU gets all micro-batches, one GPU after the "
        "other, and holds all weights without gradients, AdamW's moments in bf16. The miner "
        "divides the micro-batches by the world size, and FSDP2 shards what is trained. Weights "
        "below 16 bits come with gradient checkpointing, as peft prepares them.\n\nThe effect of "
        "each change, by the usual estimate:"
    )
    for change in answer["changes"]:
        seconds = change["inner_step_s"]
        after = "" if seconds is None else f", {_seconds(seconds)}"
        echo(f"  - {change['what']}: ~{change['memory_gb']:.0f} GB{after}: {change['effect']}")


def _rows(way: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The table's rows for one way of counting."""
    yield "Gradient accumulation steps", str(way["accumulation_steps"])
    yield "Micro-batches per inner step", str(way["micro_batches"])
    yield "Samples per inner step", str(way["samples"])
    for part, size in way["memory_gb"].items():
        yield f"GPU memory: {part}", f"~{size:.1f} GB"
    upload = way["upload"]
    yield "Time per inner step", _seconds(way["inner_step_s"])
    yield "First valid upload, inner step", str(upload["first_valid_inner_step"])
    yield "  after", _seconds(upload["first_valid_s"])
    yield "Upload every", _seconds(upload["every_s"])
    yield "Repo stays fresh", {True: "yes", False: "NO", None: "unknown"}[upload["fresh"]]


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.2f}s" if value < 600 else f"{value:.0f}s ({value / 60:.0f} min)"
