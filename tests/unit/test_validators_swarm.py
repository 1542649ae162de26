"""Rules about facts that no file contains: the axon, AllReduces, and the limit that a failed
AllReduce raises."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from miner_guard.config import GateSettings
from miner_guard.uploads import chain
from miner_guard.validators import rules
from miner_guard.validators.facts import AllReduce, Axon, Candidate, Facts, Network, Published
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import load_profile

SN38 = Limits.of(GateSettings(), load_profile("sn38").limits)


def facts(**known: object) -> Facts:
    return replace(Facts(Candidate("gradient", 56, 84)), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axon", "outcome", "words"),
    [
        (Axon("1.2.3.4:8091", 0.04), "pass", "the axon 1.2.3.4:8091 responds in 0.04s"),
        (Axon("1.2.3.4:8091", 2.3), "pass", "responds in 2.30s"),
        (Axon("1.2.3.4:8091", 2.4), "warn", "responds in 2.40s, but validators wait only 2.3s"),
        (Axon("1.2.3.4:8091", None, "refused"), "warn", "does not respond to this host (refused)"),
        (Axon(""), "warn", "the chain lists no axon for this uid"),
        (Axon(None, reason="not read"), "unknown", "the miner's axon is unknown: not read"),
        (None, "unknown", "the miner's axon is unknown: the chain was not read"),
    ],
)
def test_whether_the_axon_answers(axon: Axon | None, outcome: str, words: str) -> None:
    verdict = rules.is_alive(facts(axon=axon), SN38)
    assert (verdict.outcome, words in verdict.sentence) == (outcome, True), verdict.sentence


@pytest.mark.parametrize(
    ("end", "outcome", "words"),
    [
        (AllReduce(None), "pass", "the last AllReduce finished here"),
        (
            AllReduce("At Checkpoint 2"),
            "warn",
            "failed here: At Checkpoint 2 (AllReduces make up 25% of the score)",
        ),
        (None, "unknown", "no AllReduce in the miner's log since the guard started"),
    ],
)
def test_how_the_last_allreduce_ended(end: AllReduce | None, outcome: str, words: str) -> None:
    verdict = rules.allreduce(facts(allreduce=end), SN38)
    assert (verdict.outcome, words in verdict.sentence) == (outcome, True), verdict.sentence


def test_neither_decides_whether_validators_accept_the_files() -> None:
    judged = facts(axon=Axon(""), allreduce=AllReduce("x"))
    outcomes = {verdict.rule: verdict.outcome for verdict in rules.audit_verdicts(judged, SN38)}
    assert (outcomes["is_alive"], outcomes["allreduce"]) == ("warn", "warn")
    assert "is_alive" not in {v.rule for v in rules.audit_verdicts(judged, Limits())}


@pytest.mark.parametrize(
    ("age_s", "blocks", "outcome", "limit"),
    [
        (4799.0, 300, "warn", 2000.0),
        (4800.0, 399, "block", 4800.0),
        (4800.0, 400, "unknown", 9600.0),
        (9599.0, 439, "unknown", 9600.0),
        (9600.0, 439, "block", 4800.0),
        (9600.0, 440, "unknown", 14400.0),
        (14400.0, 440, "block", 4800.0),
        (4800.0, None, "block", 4800.0),
    ],
)
def test_an_overdue_allreduce_may_have_raised_the_age_limit(
    age_s: float, blocks: int | None, outcome: str, limit: float
) -> None:
    # Before, the audit reported a zero score that the master may not give.
    published = Published(age_s=age_s, reason=None, outer_step=56)
    network = Network(block=1, blocks_since_allreduce=blocks, reason=None)
    verdict = rules.published_age(facts(published=published, network=network), SN38)
    assert (verdict.outcome, verdict.limit) == (outcome, limit), verdict.sentence


class Refusing(http.server.BaseHTTPRequestHandler):
    """An axon's response to an unsigned request."""

    def do_POST(self) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def axon() -> Iterator[http.server.HTTPServer]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    server.paths = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_probe_counts_a_refusal_as_an_answer(axon: http.server.HTTPServer) -> None:
    address = f"127.0.0.1:{axon.server_port}"
    seen = chain.reach(address, 5.0)
    assert (seen.address, seen.reason) == (address, None)
    assert seen.seconds is not None
    assert axon.paths == ["/IsAlive"]  # type: ignore[attr-defined]


def test_the_probe_reports_why_there_is_no_answer() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        seen = chain.reach(address, 5.0)
    assert seen.seconds is None
    assert "refused" in str(seen.reason)
    assert chain.reach("", 1.0) == Axon("")
    assert chain.reach(None, 1.0).address is None


def test_a_process_that_takes_connections_and_never_answers_is_not_alive() -> None:
    """The kernel accepts connections for a hung process, so an open port proves nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TimeoutError):
            chain.response_time(f"127.0.0.1:{silent.getsockname()[1]}", 0.2)
