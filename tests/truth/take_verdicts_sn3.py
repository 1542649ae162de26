"""Takes the verdicts of Templar's real validator on gradients, from a checkout of its code.

    python -m tests.truth.take_verdicts_sn3 CHECKOUT STATES.jsonl [-o OUT.jsonl]

CHECKOUT is a clone of one-covenant/templar at the version to ask; none of its code is part of this
project. Its own `Comms.gather` decides whether to accept a gradient; imports that play no part in a
verdict are replaced by empty stand-ins. `--make` makes the genuine gradient that all states start
from again, with Templar's own compressor. Needs torch, pydantic, boto3 and einops.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import json
import re
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.truth import states
from tests.truth.stand_ins import StandIns

SHAPES = {"w": (64, 128), "b": (64,)}
_ABSENT = ("aiofiles", "aiobotocore", "bittensor", "tqdm", "dotenv", "tplr.chain", "tplr.config")
_UID = 7


class Validator:
    """The real compressor and the real gather."""

    def __init__(self, checkout: Path) -> None:
        sys.meta_path.insert(0, StandIns(_ABSENT))
        source = checkout / "src" / "tplr"
        version = re.search(r'__version__ = "([^"]+)"', (source / "__init__.py").read_text())
        assert version is not None
        self.version = version[1]
        quiet = types.SimpleNamespace(
            **dict.fromkeys(("info", "debug", "warning", "error"), _quiet)
        )
        package: Any = types.ModuleType("tplr")
        package.__path__, package.__version__ = [str(source)], self.version
        package.logger, package.log_with_context = quiet, _quiet
        package.T, package.P = (lambda: 0.0), (lambda *_: "")
        sys.modules["tplr"] = package
        self.compress = importlib.import_module("tplr.compress")
        self.comms = importlib.import_module("tplr.comms")
        numbers = json.loads((checkout / "hparams" / "hparams.json").read_text())
        self.hparams = types.SimpleNamespace(**numbers)
        full = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        holder = types.SimpleNamespace(named_parameters=lambda: full.items())
        self.transformer = self.compress.ChunkingTransformer(
            holder, target_chunk=self.hparams.target_chunk
        )
        self.compressor = self.compress.TopKCompressor(
            use_quantization=True,
            quantization_bins=self.hparams.quantization_bins,
            quantization_range=self.hparams.quantization_range,
        )

    def genuine(self) -> dict[str, Any]:
        """A gradient produced by the real compressor."""
        g = torch.Generator().manual_seed(5)
        document: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            encoded = self.transformer.encode(torch.randn(shape, generator=g) * 1e-3)
            found = self.compressor.compress(encoded, self.hparams.topk_compression)
            document[name + "idxs"], document[name + "vals"] = found[0], found[1]
            document[name + "quant_params"] = found[4]
        document["metadata"] = {"window": 8}
        return document

    def accepts(self, document: Any) -> bool:
        """Whether gather accepts it."""
        shapes, totals = {}, {}
        for name, shape in SHAPES.items():
            encoded = self.transformer.encode(torch.zeros(shape))
            _, _, shapes[name], totals[name], _ = self.compressor.compress(
                encoded, self.hparams.topk_compression
            )
        response = types.SimpleNamespace(data=document, global_step=1)

        async def get(**_: Any) -> Any:
            return response

        me = types.SimpleNamespace(
            hparams=self.hparams, gather_semaphore=asyncio.Semaphore(1), get_with_retry=get
        )
        me.check_compressed_indices = types.MethodType(
            self.comms.Comms.check_compressed_indices, me
        )
        expected = {f"{name}{end}" for name in SHAPES for end in ("idxs", "vals", "quant_params")}
        gathered = asyncio.run(
            self.comms.Comms.gather(
                me,
                my_uid=1,
                uids=[_UID],
                window=8,
                key="gradient",
                timeout=1,
                device="cpu",
                totalks=totals,
                compressor=self.compressor,
                expected_compressed_params=expected,
                local=False,
                xshapes=shapes,
            )
        )
        return gathered is not None and _UID in gathered.uids


def _quiet(*_: Any, **__: Any) -> None:
    pass


def document_of(base: str, line: dict[str, Any]) -> Any:
    """The gradients for a state: the genuine ones, edited as its line specifies."""
    import io

    document = torch.load(io.BytesIO(base64.b64decode(base)), weights_only=True)
    for pattern, expression in line.get("gradients", {}).items():
        document = states.edited(document, pattern, expression)
    return document


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the real validator about every state of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("states", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--make", action="store_true", help="make the genuine gradient again")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    validator = Validator(given.checkout.resolve())
    head, *lines = states.lines(given.states)
    if given.make:
        head = {"base": base64.b64encode(states.saved(validator.genuine())).decode()}
    taken = [head]
    for line in lines:
        accepts = validator.accepts(document_of(head["base"], line))
        taken.append({**line, "real": {**line.get("real", {}), validator.version: accepts}})
        print("accepts" if accepts else "rejects", line["case"], flush=True)
    if given.out is not None:
        given.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in taken))


if __name__ == "__main__":
    main()
