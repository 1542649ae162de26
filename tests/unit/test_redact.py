"""Secrets that a subnet miner prints, recognised by their shapes; lookalikes stay."""

from __future__ import annotations

import json
import time

import pytest

from miner_guard.record.redaction import Redactor

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
