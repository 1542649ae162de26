"""Profiles are data: unknown keys are refused, and every shipped profile is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from miner_guard.config import GateSettings, HangSettings, loading
from miner_guard.rank.layout import StepRecord
from miner_guard.uploads.gate import decide, unknown
from miner_guard.validators.facts import Candidate
from miner_guard.validators.limits import Limits
from miner_guard.validators.profiles import checks, load_profile, names
from miner_guard.watch.lines import KINDS
from tests.support.output import LoggedMiner

UNDATED = 'name = "x"\ntitle = "x"\nread_from = "x"\n'
HEAD = UNDATED + "dated = 2026-01-01\n"


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_shipped_profile_has_its_source(name: str) -> None:
    profile = load_profile(name, checked=True)
    assert profile.name == name
    settings = {f"settings.{t}.{k}" for t, table in profile.settings.items() for k in table}
    compute = {f"compute.{key}" for key in profile.compute}
    limits = {
        f"limits.{key}"
        for key, value in profile.limits.items()
        if isinstance(value, (int, float, list)) and key != "metadata_fields"
    }
    assert settings | compute | limits <= profile.sources.keys()
    assert profile.status_source
    loading.load(profile=profile.settings, env={})
    Limits.of(GateSettings(), profile.limits)


def test_the_readers_know_every_list_that_a_profile_may_have() -> None:
    assert tuple(checks.GROUPS) == KINDS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = [", "not valid TOML"),
        (UNDATED, "lacks dated"),
        (UNDATED + 'dated = "soon"\n', "dated is 'soon': input should be a valid date"),
        ("[xyz]\nfoo = 1\n", "xyz: unknown; allowed: advice, compute, dated, limits"),
        (
            "[limits]\nvalidator_min_inner_steps = 1\n",
            "[limits] validator_min_inner_steps: unknown; allowed: blocks_per_allreduce, ",
        ),
        (
            '[limits]\nvalidator_min_inner_step = "1"\n',
            "[limits] validator_min_inner_step is '1': input should be a valid integer",
        ),
        ("[limits]\nblocks_per_allreduce = true\n", "is True: input should be a valid integer"),
        ("[limits]\nmin_inner_step = 30\n", "put it in [settings.gate]"),
        ("[compute]\nmin_gpuz = 1\n", "[compute] min_gpuz: unknown; allowed: gpus_per_rank, min_"),
        (
            "[patterns]\nallreduce = ['x']\n",
            "[patterns] allreduce: unknown; allowed: dropped, phase",
        ),
        ("[patterns]\nstep = 'x'\n", "[patterns] step is 'x': input should be a valid"),
        ("[patterns]\nstep = ['(']\n", "'(' is not a valid regular expression"),
        (
            "[patterns]\nphase = ['(?P<a_phase_that_is_much_too_long>x)']\n",
            "names a phase of more than 24 bytes",
        ),
        (
            '[limits]\nbucket = "model-{ui}"\n',
            "[limits] bucket: 'model-{ui}' is not valid (KeyError: 'ui'); allowed: {uid}",
        ),
        ('[limits]\nendpoint = "{account/c"\n', "is not valid (ValueError: "),
        ('status = "closed"\n', "status is 'closed': input should be 'alive', 'dormant' or"),
    ],
)
def test_a_profile_that_nothing_understands_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    # A limit with a typo used to become a rule that never applied.
    path = tmp_path / "own.toml"
    path.write_text(text if text.startswith("name") else HEAD + text)
    with pytest.raises(ValueError, match=r"own\.toml: ") as refusal:
        load_profile(str(path))
    assert words in str(refusal.value)


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError) as refusal:
        load_profile("no-such-subnet")
    for name in ("iota", "psyche", "sn38"):
        assert name in str(refusal.value)


@pytest.mark.parametrize("name", ["iota", "psyche"])
def test_nothing_is_gated_where_no_validator_judges_uploads(name: str) -> None:
    profile = load_profile(name)
    assert profile.limits.keys() == {"read_from"}
    settings = GateSettings(**profile.settings["gate"])
    decision = decide(Candidate("gradient", 0, 0), unknown("-"), settings, now=1.0, wall=1.0)
    assert decision.allowed
    assert {v.outcome for v in decision.verdicts} <= {"pass", "unknown"}


def seen(steps: list[StepRecord]) -> list[tuple[int | None, int | None, float | None]]:
    return [(step.outer_step, step.inner_step, step.loss) for step in steps]


IOTA_LINES = (
    ("queued", "Attempting to register miner 5Fx on run 4.12.16.3-tah with orchestrator..."),
    ("queued", "Run is full for miner 5Fx: no room"),
    ("", "Miner 5Fx registered successfully in layer 0 on training epoch 32"),
    ("initializing", "Miner 5Fx in Layer 0 is in state: LayerPhase.TRAINING"),
    ("initializing", "Not all layers are in TRAINING yet; deferring push consumption"),
    (
        "initializing",
        "Miner 5Fx has been temporarily blocked (initializing) and cannot perform work: x",
    ),
    ("", "FORWARD complete | layer=0 activation=a hotkey=5Fx"),
    ("upload", "Miner 5Fx in Layer 0 is in state: LayerPhase.WEIGHTS_UPLOADING"),
    ("allreduce", "Miner 5Fx in Layer 0 is in state: merging_partitions"),
    ("blocked", "Miner 5Fx has been temporarily blocked and cannot perform work: x"),
    ("initializing", "Miner 5Fx in Layer 0 is in state: training"),
    ("queued", "queue state: {'queue_id': '56', 'position': 1557, 'status': 'queued'}"),
)
PSYCHE = "INFO psyche_client::client: applying state epoch 3 step 40 ({} -> {}) client_id=a epoch=3"
PSYCHE_LINES = (
    (
        "waiting",
        "INFO psyche_solana_client::app: Waiting for the current epoch to end before joining",
    ),
    ("waiting", PSYCHE.format("Cooldown", "Waiting for members")),
    ("warmup", PSYCHE.format("Waiting for members", "Warmup")),
    ("", PSYCHE.format("Warmup", "Training")),
    ("", PSYCHE.format("Training", "Witness")),
    ("cooldown", PSYCHE.format("Witness", "Cooldown")),
    ("paused", PSYCHE.format("Cooldown", "Paused")),
)


@pytest.mark.parametrize(
    ("profile", "lines"), [("iota", IOTA_LINES), ("psyche", PSYCHE_LINES)], ids=["iota", "psyche"]
)
def test_the_state_of_a_client_is_its_phase_and_has_an_allowance(
    tmp_path: Path, profile: str, lines: tuple[tuple[str, str], ...]
) -> None:
    """A client that waits for hours while its heartbeats succeed is told from one that trains, and
    is not restarted: that would cost its place."""
    log = LoggedMiner(tmp_path, profile=profile)
    assert [(log.lines(line), log.phase)[1] for _, line in lines] == [state for state, _ in lines]
    hang = loading.load(profile=load_profile(profile).settings, env={}).config.hang
    assert {state for state, _ in lines if state} <= hang.allowances.keys()
    assert hang.action == "warn"


def test_a_queue_that_moves_the_client_back_is_reported(tmp_path: Path) -> None:
    """Users lost days to it (macrocosm-os/iota, issues 193 and 194); others joining ahead move a
    client by a few places only."""
    log = LoggedMiner(tmp_path, profile="iota")
    for position in (1557, 948, 215, 290, 64, 2038, 2119, 1902, 30, 1700):
        log.lines(f"queue state: {{'position': {position}, 'status': 'queued'}}")
    assert [event.name for event in log.events] == ["no_step_yet"]
    assert "moved this client back from 64 to 2038 (1 so far); wait" in log.events[0].text


def test_peers_that_acknowledge_nothing_are_reported(tmp_path: Path) -> None:
    """The client stays in training, its heartbeats and submissions succeed, and it earns less. One
    peer that does not answer is no news."""
    log = LoggedMiner(tmp_path, profile="iota")
    for _ in range(100):
        log.lines("push to 5GC6BVrB failed: connect timeout after 5s; dropping (tries exhausted)")
        log.lines("Activation push SEND | ACK OK | id=a dir=forward peer=ab… elapsed_s=0.31")
    assert log.events == []
    for _ in range(100):
        log.lines("push to 5GC6BVrB failed: connect timeout after 5s; dropping (tries exhausted)")
    (event,) = log.events
    assert event.text.startswith("UPLOAD FAILED: no peer answered the last 30 times")


def test_a_state_that_has_ended_well_after_longer_than_allowed_is_given_more_time(
    tmp_path: Path,
) -> None:
    hang = HangSettings(phases=load_profile("iota").settings["hang"]["phases"])
    log = LoggedMiner(tmp_path, hang, profile="iota")
    waits, trains = "Not all layers are in TRAINING yet", "Optimization step #{}"
    log.lines(waits)
    log.line(trains.format(1), after_s=3000.0)
    log.lines(waits)
    allowances = [now.allowance_s for now in [log.reader.now()] if now is not None]
    assert allowances == [None], "the profile's two hours hold"
    log.line(trains.format(2), after_s=9000.0)
    log.lines(waits)
    allowances = [now.allowance_s for now in [log.reader.now()] if now is not None]
    assert allowances == [18000.0]


def test_the_age_of_a_state_survives_the_clients_own_attempts(tmp_path: Path) -> None:
    """A client that is kept out asks again every minute, with the layer's state in between: its
    state was a minute old for hours."""
    log = LoggedMiner(tmp_path, profile="iota")
    tick = "Miner 5Fx in Layer 0 is in state: LayerPhase.TRAINING"
    for _ in range(60):
        log.line(tick, after_s=60.0)
        log.line("Miner 5Fx has been temporarily blocked and cannot perform work: x", after_s=1.0)
    assert log.monitor.snapshot()["phase"] == "blocked"
    assert log.monitor.snapshot()["phase_s"] == 59 * 61
    log.lines("FORWARD complete | layer=0 activation=a hotkey=5Fx", tick)
    assert log.monitor.snapshot()["phase_s"] == 0


def test_an_epoch_that_does_not_end_while_the_client_trains_is_reported(tmp_path: Path) -> None:
    log = LoggedMiner(tmp_path, HangSettings(phases={"epoch": 7200.0}), profile="iota")
    log.lines("Miner 5Fx registered successfully in layer 0 on training epoch 32")

    def train(hours: float) -> int:
        for step in range(int(hours * 6)):
            log.line(f"Optimization step #{step} | hotkey=5Fx", after_s=600.0)
        return len(log.events)

    assert train(1.9) == 0
    log.lines("in Layer 0 is in state: merging_partitions", "in Layer 0 is in state: training")
    assert train(3.5) == 0, "twice as long as the longest so far"
    assert train(1.0) == 1
    assert log.events[0].text == (
        "NO STEP YET: the epoch has not ended for 3.8 h (limit 3.7 h), although this client "
        "trains; only the network ends it"
    )


def test_steps_of_iota_and_psyche(tmp_path: Path) -> None:
    iota, psyche = (LoggedMiner(tmp_path / name, profile=name) for name in ("iota", "psyche"))
    iota.lines(
        "Miner 5Fx registered successfully in layer 1 on training epoch 8",
        "BACKWARD complete | layer=1 activation=a hotkey=5Fx",
        "Optimization step #1 | hotkey=5Fx",
        "Optimization step #2 | hotkey=5Fx",
    )
    assert seen(iota.steps) == [(8, 1, None), (8, 2, None)]
    head = (
        "INFO psyche_client::state::steps: client_loss integration_test_log_marker=loss client_id=a"
    )
    psyche.lines(f"{head} epoch=3 step=41 loss=2.5", f"{head} epoch=3 step=42 loss=NaN")
    assert [step[:2] for step in seen(psyche.steps)] == [(3, 41), (3, 42)]
    assert seen(psyche.steps)[0][2] == 2.5
