"""What leaves the machine holds no secret of the miner's output, whatever its shape; the words that
explain an incident stay."""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Iterator

import pytest

from miner_guard.record.redaction import GONE, public

WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"
A = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF"
X = "kQzRtWbNpLxVmYhGcJdFsTkQ"
H = "0123456789abcdef"

FORMS = {
    "hugging face": f"hf_{A}",
    "hugging face of letters": f"hf_{X}{X[:10]}",
    "token as user of a URL": f"https://{A}@github.com/me/repo.git",
    "token as password of a URL": f"https://oauth2:{A}@gitlab.com/me/repo.git",
    "word as user of a URL": "https://correcthorse@host.example/x",
    "short password of a URL": "redis://default:hunter2@10.0.0.1:6379/0",
    "nvidia": f"nvapi-{A}{A}",
    "runpod": f"rpa_{A.upper()}AB",
    "groq": f"gsk_{A}{A[:20]}",
    "docker hub": f"dckr_pat_{A[:27]}",
    "tailscale": f"tskey-auth-{A[:17]}CNTRL-{A}",
    "vault": f"hvs.{A}{A}",
    "vault batch": f"hvb.AAAAAQ{A}",
    "authorization token": f"Authorization: Token {A}",
    "authorization without a scheme": f"authorization: {A}",
    "authorization of letters": "Authorization: Token correcthorsebattery",
    "bearer": f"Authorization: Bearer {A}",
    "basic": "Authorization: Basic bWluZXI6aHVudGVyMng=",
    "x-api-key": f"x-api-key: {A}",
    "pass in a dictionary": "{'user': 'me', 'pass': 'correcthorse'}",
    "pass in JSON": '{"pass": "correcthorse"}',
    "password assignment": "password=correcthorse",
    "password in words": "the password correcthorse",
    "passphrase": "PASSPHRASE: correct-horse-battery",
    "secret of an environment": f"MY_SECRET={A}",
    "api key": f"OPENAI_API_KEY='sk-proj-{A}'",
    "anthropic": f"sk-ant-api03-{A}{A}",
    "openai": f"sk-{A}",
    "openrouter": f"sk-or-v1-{H * 4}",
    "github": f"ghp_{A}abcd",
    "github fine-grained": f"github_pat_{A}_{A}",
    "gitlab": f"glpat-{A[:20]}",
    "slack": f"xoxb-1234567890-1234567890-{A[:24]}",
    "slack hook": f"https://hooks.slack.com/services/T0XU8DSBRD/B0E28JHYQU/{A[:24]}",
    "discord hook": f"https://discord.com/api/webhooks/112233445566778899/{A}",
    "telegram": f"https://api.telegram.org/bot123456789:AA{A}/sendMessage",
    "aws id": "AKIAIOSFODNN7EXAMPLE",
    "aws secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "aws session": f"AWS_SESSION_TOKEN={A}{A}{A}",
    "google": f"AIza{A}abc",
    "azure storage": f"AccountKey={A}{A}{A[:22]}==",
    "azure signature": "https://a.blob.core.windows.net/c?sv=2022&sig=XWzP0q162DnfZ%3D",
    "presigned": "https://r2/b?X-Amz-Signature=8de91165aa0bc1239f&X-Amz-Expires=60",
    "r2 secret": H * 4,
    "commitment": H * 8,
    "bare private key": "0x" + H * 4,
    "bare seed in upper case": "0X" + H.upper() * 4,
    "keyfile": '{"privateKey": "0x' + "d9" * 64 + '"}',
    "seed": "secretSeed: 0x" + "f9" * 32,
    "web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
    "pypi": f"pypi-AgEIcHlwaS5vcmc{A}{A}",
    "npm": f"npm_{A}abcd",
    "stripe": f"sk_live_{A[:24]}",
    "sendgrid": f"SG.{A[:22]}.{A}{A[:11]}",
    "twilio": f"SK{H}{H}",
    "mailgun": f"key-{H}{H}",
    "digital ocean": f"dop_v1_{H * 4}",
    "linear": f"lin_api_{A}",
    "replicate": f"r8_{A}abcde",
    "wandb": f"wandb login {H}{H}01234567",
    "cohere-like": A + A[:8],
    "letters in mixed case": X + X,
    "vast.ai": H * 4,
    "lambda cloud": f"secret_name_{A}.{A}",
    "cookie": f"Cookie: session={A}",
    "private key": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj",
    "ssh key": "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW",
    "mnemonic": f"Your mnemonic is: {WORDS}",
    "mnemonic alone": WORDS,
    "mnemonic in prose": f"using wallet words {WORDS} for hotkey",
    "mnemonic of 24 words": f"{WORDS} {WORDS}",
    "mnemonic numbered": " ".join(f"{n}. {w}" for n, w in enumerate(WORDS.split(), 1)),
    "mnemonic as JSON": json.dumps(WORDS.split()),
    "mnemonic as a tuple": str(tuple(WORDS.split())),
    "mnemonic one word a line": "\n".join(WORDS.split()),
    "mnemonic numbered one a line": "\n".join(
        f"{n:2d}) {w}" for n, w in enumerate(WORDS.split(), 1)
    ),
    "mnemonic with commas": WORDS.replace(" ", ", "),
    "mnemonic with dashes": WORDS.replace(" ", "-"),
    "flag": f"train.py --hf-token {A} --lr 0.1",
    "flag with a word": "train.py --password correcthorse --lr 0.1",
    "uuid key": "RUNPOD_KEY 550e8400-e29b-41d4-a716-446655440000",
}

_SECRETS = (
    *(A, X, H, H.upper(), "correct", "hunter2", "winner", "sausage", "XWzP0q", "8de911", "d9d9"),
    *("f9f9", "IOSF", "wJalr", "bPxRf", "bWluZXI", "eyJhbG", "SflKx", "MIIEv", "b3Blb", "550e8400"),
)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("around", ["{}", "RuntimeError: cannot log in with {} at step 5", "'{}'"])
def test_no_part_of_a_secret_is_public(name: str, around: str) -> None:
    text = public(around.format(FORMS[name]))
    assert GONE in text
    assert [part for part in pieces_of_secrets() if part in text] == []


def pieces_of_secrets() -> Iterator[str]:
    """Pieces of the secrets above: a secret that is cut in two is a secret still."""
    for secret in _SECRETS:
        size = max(6, min(8, len(secret)))
        for at in range(0, max(1, len(secret) - size + 1), 3):
            yield secret[at : at + size]


USEFUL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 19.68 GiB. GPU 0 has a total "
    "capacity of 23.68 GiB of which 11.88 GiB is free.",
    "[rank3]: RuntimeError: NCCL error in: torch/csrc/distributed/c10d/NCCLUtils.cpp:77, 2.19.3",
    '  File "/opt/lib/python3.10/site-packages/torch/nn/modules/module.py", line 1532, in _call',
    "Loss is NaN or Inf at step 512",
    "ModuleNotFoundError: No module named 'flash_attn'",
    "OSError: [Errno 28] No space left on device: '/data/checkpoints/step-500.pt'",
    "2026-01-02T03:04:05.678901Z W socket.cpp:426 errno: 98 - Address already in use 0.0.0.0:29500",
    "the mnemonic of the wallet was not found anywhere",
    "step 12 took 0.5s, keys of the batch: input_ids labels",
    "invalid token: expired",
    "WorkNCCL(SeqNum=4, OpType=ALLTOALL_BASE, Timeout(ms)=1800000) ran for 1800009 milliseconds",
)


@pytest.mark.parametrize("line", USEFUL)
def test_what_explains_an_incident_stays(line: str) -> None:
    assert public(line) == line


def test_random_strings_are_not_taken_for_words() -> None:
    """A service that nobody has thought of yet: letters and digits, 20 to 64 of them."""
    chance = random.Random(7)
    alphabet = string.ascii_letters + string.digits
    secrets = ["".join(chance.choices(alphabet, k=chance.randint(20, 64))) for _ in range(5_000)]
    assert [secret for secret in secrets if secret in public(f"key of new service {secret}")] == []


def test_a_public_line_stays_what_it_is() -> None:
    for text in FORMS.values():
        assert public(public(text)) == public(text)


HOSTILE = ("a", "token=", "abc ", "/a", "1.", "-", "://", "x-a", "1\n", "a\n", "\\", "'a': ")


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_lines_take_time_linear_in_their_length(piece: str) -> None:
    started = time.process_time()
    public(piece * (200_000 // len(piece)))
    assert time.process_time() - started < 3.0
