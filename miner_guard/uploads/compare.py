"""`python -m miner_guard.validators.compare CHECKOUT`: what a version of subnet 38's validator
judges differently from the guard's profile.

CHECKOUT is a clone of dstrbtd/DistributedTraining; use the Python environment of its miner. Both
sides judge the same states: random combinations of mutations of a good one, or the lines of a file
(`--table`), whose verdicts `-o` records. Exits with 1 if they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from miner_guard.config import GateSettings, RepoSettings
from miner_guard.uploads.audit import Audit, AuditReport
from miner_guard.uploads.repos import Fetch, Look, child
from miner_guard.uploads.repos.base import RepoError
from miner_guard.uploads.repos.s3 import S3Repo
from miner_guard.validators import checkout, states
from miner_guard.validators.facts import Network, fingerprint
from miner_guard.validators.inspection import examine
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile
from miner_guard.validators.shapes import Shapes


@dataclasses.dataclass(frozen=True)
class StateAudit(Audit):
    """An audit of a state, which stays in this process: its storage is the validator's."""

    state: checkout.BucketState = dataclasses.field(default_factory=checkout.BucketState)

    def look(self, fetch: Fetch, deadline_s: float) -> Look:
        """What the keys of the commitment open, else our own."""
        state, keys = self.state, self.keys
        account, key = state.account, next(iter(state.good_keys), None)
        if keys is not None:
            account, key = keys["R2_ACCOUNT_ID"], keys["R2_READ_ACCESS_KEY_ID"]
        repo = S3Repo(checkout.Storage(state, account, key), state.bucket)
        try:
            return Look.of(child.answer(repo, fetch))
        except RepoError as error:
            return Look.of({}, str(error))

    def inspect(self, file: Path) -> Mapping[str, Any]:
        """The report on the gradients."""
        size = file.stat().st_size
        return examine(torch, str(file), size, limits=self.limits, shapes=self.model)


def audit(state: checkout.BucketState, *, blind: bool = False, **limits: Any) -> AuditReport:
    """The audit's report on a state, with everything known, or `blind`: with neither chain nor
    shapes. `limits` replace the profile's."""
    rule_limits = Limits.of(GateSettings(), {**load_profile("sn38").limits, **limits})
    if state.max_upload_interval is not None and not limits:
        # No public source reports failed AllReduces; an operator can set the limit.
        rule_limits = dataclasses.replace(
            rule_limits, validator_repo_age_s=state.max_upload_interval
        )
    network = Network(
        block=state.block,
        outer_step=state.network_epoch,
        blocks_since_allreduce=state.blocks_since_allreduce,
        blocks_per_allreduce=state.blocks_per_allreduce,
        commitment=fingerprint(state.commitment or ""),
        registered=True,
        uid=state.uid,
        reason=None,
        seen_at=time.monotonic(),
    )
    repo = RepoSettings(kind="s3", bucket=state.bucket)
    if blind:
        network = Network(reason="no [chain] configured")
        return StateAudit(repo, rule_limits, network, state=state).report()
    shapes = Shapes(state.shapes)
    return StateAudit(repo, rule_limits, network, state.commitment, shapes, state=state).report()


def expected(real: Mapping[str, Any]) -> str:
    """`accepted` if the validator scores the state and the score can be more than zero."""
    return "accepted" if real["accepts"] and real["worth"] == "something" else "rejected"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each difference, then the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--states", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the first state")
    parser.add_argument("--table", type=Path, help="judge the states in this file instead")
    parser.add_argument("-o", "--out", type=Path, help="a file for this version's verdicts")
    options = parser.parse_args(arguments)
    try:
        validator = checkout.load(options.checkout.resolve())
    except ValueError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a program
        return 1
    checkout.confine()
    counts: Counter[str] = Counter()
    blind, recorded, letters = 0, list[str](), ""
    for line, state in _states(options):
        real, ours = validator.ask(state), audit(state)
        theirs, why = expected(real), real.pop("why")
        blind += audit(state, blind=True).outcome == "accepted"
        letters += theirs[0]
        if ours.outcome == theirs:
            counts["agree"] += 1
        else:
            counts[f"they say {theirs}, we say {ours.outcome}"] += 1
            _say(f"{line.get('seed', '')} {line['case']}")
            _say(f"  they: {' | '.join(why) or real['worth']}\n  we: {ours.detail}")
        verdicts = {**line.get("real", {}), validator.version: real}
        recorded.append(json.dumps({**line, "real": verdicts}, ensure_ascii=False))
    if options.out is not None:
        if options.table is None:
            recorded = [json.dumps({"version": validator.version, "verdicts": letters})]
        options.out.write_text("\n".join(recorded) + "\n", encoding="utf-8")
    _say(f"{options.checkout}: {validator.version} at {checkout.commit_of(options.checkout)}")
    _say(f"profile: {load_profile('sn38').read_from}")
    for words, count in counts.items():
        _say(f"{count:6} {words}")
    _say(f"{blind:6} accepted without chain and shapes")
    return int(counts["agree"] < len(letters))


def _states(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], checkout.BucketState]]:
    if options.table is not None:
        for line in states.lines(options.table):
            yield line, states.build(line)
        return
    for seed in range(options.seed, options.seed + options.states):
        yield states.fresh(seed)


def _say(words: str) -> None:
    print(words, flush=True)  # noqa: T201 - a program


if __name__ == "__main__":
    sys.exit(main())
