"""No secret stays in what the guard writes, hands over or sends, whatever its form."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pkgutil
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from miner_guard.config import AlertSettings, Config, RepoSettings
from miner_guard.record.events import Event
from miner_guard.record.redaction import Redactor
from miner_guard.record.store import RunReader, StoredEvent
from miner_guard.show.alerts import AlertsMonitor
from miner_guard.show.bundle import Item, pack
from miner_guard.show.page import render
from miner_guard.watch.output import SecretLeaksMonitor
from tests.support import requires
from tests.support.contexts import context
from tests.support.guard_log import Log
from tests.support.output import show
from tests.unit.test_public_lines import FORMS, pieces_of_secrets

WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"
HEX40 = "6c035c0a09cfce14db0699202bd90872129b6f23"
BODY = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW"
BEGIN, END = "-----BEGIN OPENSSH PRIVATE KEY-----", "-----END OPENSSH PRIVATE KEY-----"

LEAKS = {
    "keyfile private key": ('{"privateKey": "0x' + "d9" * 64 + '", "ss58Address": "5F3s"}', "d9d9"),
    "keyfile phrase": (f'{{"secretPhrase": "{WORDS}", "ss58Address": "5F3s"}}', "winner"),
    "keyfile seed": ('{"secretSeed": "0x' + "f9" * 32 + '"}', "f9f9"),
    "mnemonic is": (f"Your mnemonic is: {WORDS}", "legal"),
    "btcli": (
        f"The mnemonic to the new coldkey is:\n\n\x1b[32m{WORDS}\x1b[0m\n\nYou can use",
        "winner",
    ),
    "24 words": (f"seed phrase = {WORDS} {WORDS}", "winner"),
    "words alone": (f"\x1b[32m{WORDS}\x1b[0m", "winner"),
    "words in prose": (f"using wallet words {WORDS} for hotkey", "winner"),
    "words one a line": (WORDS.replace(" ", "\n"), "winner"),
    "words in a list": (json.dumps(WORDS.split()), "winner"),
    "words before a URL": (f"{WORDS}\nhttps://me:hunter2x@host.example/x", "hunter2x"),
    "words before a password": (f"{WORDS}\npassword: correcthorse", "correcthorse"),
    "words before a key": (f"{WORDS}\npassword {HEX40}", HEX40),
    "pem": (f"{BEGIN}\n{BODY}\n{BODY}\n{END}\nstep 5", "b3Bl"),
    "pem with prefixes": (f"[rank0]: {BEGIN}\n[rank0]: {BODY}\n[rank0]: {END}", "b3Bl"),
    "pem without an end": (f"{BEGIN}\n{BODY}\n{BODY}", "b3Bl"),
    "pem without a beginning": (f"{BODY}\n{BODY}\n{END}", "b3Bl"),
    "discord": ("https://discord.com/api/webhooks/112233445566778899/vHF6qf0NIsnYW1PSV7", "vHF6"),
    "slack": ("https://hooks.slack.com/services/T0XU8DSBRD/B0E28JHYQU/SdrPuKCMtBkOqFnZ", "SdrP"),
    "telegram": (
        "https://api.telegram.org/bot123456789:AAUddGMJpKEX3Y34eJjQHR0KwSrPCe5CW7w/sendMessage",
        "AAUdd",
    ),
    "apprise": ("tgram://123456789/chat-of-mine", "chat-of-mine"),
    "github": ("github_pat_0spy9BuDsbRGzzYjIUETKI_QfrUSCEiwvjBBHDI0Wb3Q", "0spy9"),
    "azure": ("https://a.blob.core.windows.net/c/x?sv=2022&sig=XWzP0q162DnfZ%3D&se=2026", "XWzP0"),
    "wandb key": (f"wandb: key {HEX40}", HEX40),
    "wandb login": (f"wandb login --relogin {HEX40}", HEX40),
    "netrc": (f"machine api.wandb.ai\n  login user\n  password {HEX40}", HEX40),
    "presigned id": (
        "https://r2/b?X-Amz-Credential=92e57561d80e1ed5%2F20261121&X-Amz-Date=1",
        "92e5",
    ),
    "presigned signature": ("https://r2/b?X-Amz-Expires=3600&X-Amz-Signature=8de91165", "8de9"),
    "web token": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4", "Sflk"),
}

HARMLESS = (
    f"commit {HEX40}",
    f"wandb: Run data of commit {HEX40}",
    "MAX_TOKENS=100000",
    "accountId: 0x" + "8b" * 32,
    "sha256:" + "ab" * 32,
    "/home/me/.ssh/private/key.pem",
    "-----BEGIN CERTIFICATE-----\n" + BODY,
    "step 12 took 0.5s, keys of the batch: input_ids labels",
    "the mnemonic of the wallet was not found anywhere",
    "https://discord.com/channels/1/2",
    "https://storage.example/b?X-Amz-Expires=3600",
)


@pytest.mark.parametrize("name", LEAKS)
def test_a_secret_is_gone_from_text_and_from_json_that_holds_it(name: str) -> None:
    leaking, secret = LEAKS[name]
    redactor = Redactor()
    assert secret not in redactor.text(leaking)
    document = redactor.value({"text": leaking})
    assert secret not in document["text"]
    if name not in ("words alone", "pem without a beginning"):
        # The bundle redacts the text of a file of JSON lines: these must parse afterwards.
        assert secret not in json.loads(redactor.text(json.dumps({"text": leaking})))["text"]
    assert redactor.text(redactor.text(leaking)) == redactor.text(leaking)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_not_a_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


def test_the_text_around_a_block_stays() -> None:
    assert Redactor().text(f"before\n{BEGIN}\n{BODY}\n{END}\nafter") == "before\n[redacted]\nafter"
    assert (
        Redactor().text(f"{BEGIN}\n{BODY}\nTraceback (most recent")
        == "[redacted]\nTraceback (most recent"
    )


@pytest.mark.parametrize(
    ("flag", "secret", "rest"),
    [
        ("--mnemonic", WORDS.split(), ["--name", "me"]),
        ("--hf-token", ["correct horse"], ["--max-tokens", "512", "--token", "--verbose"]),
    ],
)
def test_what_follows_a_secret_flag_is_masked_in_a_command_that_is_a_list(
    flag: str, secret: list[str], rest: list[str]
) -> None:
    """run.db holds the command word by word, and the bundle is built from it."""
    masked = ["[redacted]"] * len(secret)
    assert Redactor().value(["x", flag, *secret, *rest]) == ["x", flag, *masked, *rest]


@pytest.mark.parametrize(
    "text",
    [
        BEGIN * 2_000,
        (BEGIN + "\n") * 2_000,
        BEGIN * 32_000,
        (BEGIN + '"') * 32_000,
        "-" * 256_000,
        f"{BEGIN}\n" + "a" * 64_000,
        "a" * 64_000 + END,
        "mnemonic" + "\\n" * 32_000,
        "mnemonic" + "\x1b[0m" * 16_000,
        "mnemonic is a " * 4_000,
        "abc " * 16_000,
        "wandb key " * 6_400,
        "eyJ-" * 16_000,
        "eyJ" * 20_000,
        "token=" + "\\" * 64_000,
        "token " + "a" * 64_000,
        "key " + "0a" * 32_000,
        "token --" + "a-" * 32_000,
        "token " + "--a" * 20_000,
        "key://" + "a" * 64_000,
        "://" + "a+" * 32_000,
        "x://u:" * 10_000,
        "--token '" * 7_000,
        "bearer " * 9_000,
        "mnemonic " + "abc " * 16_000,
        "https://discord.com/api/webhooks/" + "a/" * 32_000,
    ],
    ids=lambda text: repr(text[:40]),
)
def test_what_nearly_is_a_secret_takes_the_time_of_any_text(text: str) -> None:
    """A slow pattern search would stall the guard, because it holds the interpreter's lock."""
    started = time.process_time()
    Redactor().text(text)
    assert time.process_time() - started < 5.0


def test_a_careless_pattern_would_take_longer_on_such_text() -> None:
    def took(size: int) -> float:
        started = time.process_time()
        re.search(r"[\w-]+token", "token " + "a" * size)
        return time.process_time() - started

    assert took(16_000) > 5 * took(4_000), "with four times the text, sixteen times as long"


A, D, H = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF", "1234567890", "0123456789abcdef"

SAMPLES = {
    "ArtifactoryDetector": [f"jfrog login AKCp8{A}", f" AP6{A}{A} "],
    "AWSKeyDetector": [
        "AKIAIOSFODNN7EXAMPLE",
        "ABIAIOSFODNN7EXAMPLE",
        f"aws_key = '{(A + A)[:40]}'",
    ],
    "AzureStorageKeyDetector": [f"AccountKey={(A * 3)[:86]}=="],
    "BasicAuthDetector": ["https://miner:hunter2x@hub.example/repo"],
    "CloudantDetector": [f"cloudant_password = '{H * 4}'", f"cl_key={H * 4}"],
    "DiscordBotTokenDetector": [f"M{A[:23]}.{A[:6]}.{A[:27]}"],
    "GitHubTokenDetector": [f"ghp_{(A + A)[:36]}", f"ghs_{(A + A)[:36]}"],
    "GitLabTokenDetector": [
        f"glpat-{A[:20]}",
        f"gldt-{A[:20]}",
        f"GR1348941{A[:20]}",
        f"glcbt-{A[:20]}",
    ],
    "IbmCloudIamDetector": [
        f"ibm_cloud_iam_api_key = '{(A + A)[:44]}'",
        f"iam_password={(A + A)[:44]}",
    ],
    "IbmCosHmacDetector": [f"cos_hmac_secret_access_key: '{H * 3}'"],
    "JwtTokenDetector": [
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
    ],
    "MailchimpDetector": [f"{H}{H}-us12"],
    "NpmDetector": [f"//npm.example/:_authToken=npm_{(A + A)[:36]}"],
    "OpenAIDetector": [f"sk-{A[:20]}T3BlbkFJ{A[:20]}"],
    "PrivateKeyDetector": [
        f"-----BEGIN RSA PRIVATE KEY-----\n{A}{A}\n-----END RSA PRIVATE KEY-----"
    ],
    "PypiTokenDetector": [f"pypi-AgEIcHlwaS5vcmc{(A * 3)[:70]}"],
    "SendGridDetector": [f"SG.{A[:22]}.{(A + A)[:43]}"],
    "SlackDetector": [
        f"xoxb-{D}-{D}-{A.lower()}",
        "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXX",
    ],
    "SoftlayerDetector": [f"softlayer_api_key = '{H * 4}'"],
    "SquareOAuthDetector": [f"sq0csp-{(A + A)[:43]}"],
    "StripeDetector": [f"sk_live_{A[:24]}", f"rk_live_{A[:24]}"],
    "TelegramBotTokenDetector": [f"{D}:AA{(A + A)[:33]}"],
    "TwilioKeyDetector": [f"AC{H}{H}", f"SK{H}{H}"],
}
NO_SECRETS = {
    "IPPublicDetector": "an address is no secret, and the guard's messages name nodes by theirs"
}


def detectors() -> dict[str, Any]:
    """Every detector that recognises secrets by their shape; the others guess by entropy or by
    words."""
    requires.module("detect_secrets")
    import detect_secrets.plugins as plugins
    from detect_secrets.plugins.base import RegexBasedDetector

    found = {}
    for each in pkgutil.iter_modules(plugins.__path__):
        module = importlib.import_module(f"{plugins.__name__}.{each.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, RegexBasedDetector) and not inspect.isabstract(kind):
                found[name] = kind()
    return found


def test_every_detector_has_a_sample() -> None:
    """A new version of detect-secrets may add detectors that have no sample yet."""
    assert set(detectors()) == SAMPLES.keys() | NO_SECRETS.keys()


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_what_a_detector_finds_in_a_line_it_does_not_find_in_the_redacted_line(name: str) -> None:
    detector = detectors()[name]
    for sample in SAMPLES[name]:
        line = f"2026-01-02 INFO upload failed: {sample} was refused"
        assert list(detector.analyze_string(line)), f"no sample of {name}: {sample}"
        redacted = Redactor().text(line)
        left = set(detector.analyze_string(redacted)) - {"[redacted]"}
        secret = set(detector.analyze_string(line))
        assert not [found for found in left if found in secret], redacted
        assert "upload failed" in redacted
        assert "was refused" in redacted


ERRORS = [f"the server said: {form}" for form in FORMS.values()]


@pytest.fixture(scope="module")
def pieces() -> list[str]:
    return list(pieces_of_secrets())


@pytest.fixture
def log(tmp_path: Path) -> Log:
    written = Log(tmp_path / "state")
    for error in ERRORS:
        written.say("upload_failed", reason=error)
    whole = "".join(event.text for event in stored(written))
    assert any(piece in whole for piece in pieces_of_secrets()), "the deny-list has gaps"
    return written


def stored(log: Log) -> list[StoredEvent]:
    return RunReader(log.state.db).events(["upload_failed"])


def test_the_bundle(log: Log, tmp_path: Path, pieces: list[str]) -> None:
    lines = "".join(f"{event.text}\n" for event in stored(log))
    pack(tmp_path / "b.tar.gz", [Item("events.jsonl", "events", lines)], Redactor())
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        (name,) = (name for name in archive.getnames() if name.endswith("events.jsonl"))
        member = archive.extractfile(name)
        assert member is not None
        text = member.read().decode()
    assert "the server said" in text
    assert [piece for piece in pieces if piece in text] == []


def test_the_report(log: Log, pieces: list[str]) -> None:
    page = render(log.state)
    assert "UPLOAD FAILED" in page
    assert [piece for piece in pieces if piece in page] == []


def test_an_alert(tmp_path: Path, pieces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("miner_guard.show.alerts.Target.put", lambda _self, a: sent.append(a))
    config = Config(alerts=AlertSettings(urls=("json://127.0.0.1:9/",), min_level="error"))
    monitor = AlertsMonitor(context(tmp_path, config=config))
    for number, error in enumerate(ERRORS):
        text = f"UPLOAD FAILED: {error}"
        list(monitor.on_event(Event("upload_failed", "error", text, {"what": f"{number}"})))
        monitor.on_tick(math.inf, {})
    assert len(sent) == len(ERRORS)
    whole = "\n".join(alert.title + alert.body for alert in sent)
    assert "UPLOAD FAILED: the server said" in whole
    assert [piece for piece in pieces if piece in whole] == []


def test_a_log_record_of_otlp(log: Log, pieces: list[str]) -> None:
    requires.module("opentelemetry.sdk")
    from miner_guard.show.otel import _log_record

    records = [_log_record(event) for event in stored(log)]
    text = "".join(f"{record.body} {record.attributes}\n" for record in records)
    assert "the server said" in text
    assert [piece for piece in pieces if piece in text] == []


SECRET = "s3cr3t-of-the-bucket"


@pytest.fixture
def monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SecretLeaksMonitor:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", SECRET)
    return SecretLeaksMonitor(context(tmp_path))


def test_a_printed_secret_is_named_once_even_where_two_chunks_share_it(
    monitor: SecretLeaksMonitor,
) -> None:
    text = f"debug: {SECRET}\n".encode()
    events = show(monitor, *(bytes([byte]) for byte in text + text))
    assert [f.fields["kind"] for f in events] == ["the value of R2_WRITE_SECRET_ACCESS_KEY"]
    assert SECRET not in events[0].text


def test_a_secret_of_the_miners_env_file_is_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pm2, only that file contains the keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("export WANDB_API_KEY='key-of-the-file' # mine\n")
    config = Config(repo=RepoSettings(credentials="dotenv"))
    monitor = SecretLeaksMonitor(context(tmp_path, config=config))
    (event,) = show(monitor, b"login: key-of-the-file\n")
    assert event.fields["kind"] == "the value of WANDB_API_KEY"


def test_a_commitment_in_the_debug_log_is_warned_of(monitor: SecretLeaksMonitor) -> None:
    (event,) = show(monitor, b"Commitment - [" + b"0a" * 64 + b"]\n")
    assert "commitment" in event.text
    assert "0a0a" not in event.text


def test_of_several_lines_the_longest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value whose lines are all short would match ordinary words."""
    monkeypatch.setenv("DEPLOY_KEY", "-- BEGIN --\nline-of-the-key\n-- END --")
    monkeypatch.setenv("SPARE_KEY", "Step\nStep\nStep\n")
    monitor = SecretLeaksMonitor(context(tmp_path))
    events = show(monitor, b"Outer Step: 1\nline-of-the-key\n")
    assert [e.fields["kind"] for e in events] == ["the value of DEPLOY_KEY"]


def test_ordinary_output_says_nothing(monitor: SecretLeaksMonitor) -> None:
    assert show(monitor, b"Outer Step: 1 | Inner Step: 2\n" * 1000) == []
