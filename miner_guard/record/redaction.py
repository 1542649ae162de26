"""Removes secrets from everything that the guard itself stores or prints.

Standard library only. There are two kinds of rules. Shapes are patterns that recognise a token
wherever it occurs. Values are the contents of environment variables with names such as `API_KEY`,
which are masked whatever they look like. `public` at the end is stricter: of a raw line, it lets
only harmless words leave this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miner_guard.config import Config

MASK = "[redacted]"

SECRET_NAME = re.compile(
    r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|MNEMONIC|CREDENTIAL|WEBHOOK|OTLP_(?:\w+_)?HEADERS",
    re.IGNORECASE,
)
"""Environment variables whose names match this contain secrets."""

_COUNTS = re.compile(r"TOKENS|TOKENIZ", re.IGNORECASE)
_NO_SECRET = re.compile(r"[\d._,]+|true|false", re.IGNORECASE)
"""Exceptions such as `MAX_TOKENS=100000` or `TOKENIZERS_PARALLELISM=false`: these are settings, and
masking their values would mask common words everywhere."""

_MIN_SECRET_LENGTH = 6
"""Ignore values shorter than this: masking them would mask ordinary words (`KEY=1`)."""

_MIN_WORD_LENGTH = 3
"""Ignore values shorter than this after `--token` and similar flags."""

_SHAPES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\bhf_[A-Za-z0-9]{20,}",
        r"\b(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[A-Z0-9]{16}\b",
        # A subnet 38 commitment: account id 32 + read key id 32 + read secret 64.
        # With 0x it is the private key of a keyfile.
        r"\b(?:0x)?[0-9a-fA-F]{128}\b|(?<![A-Za-z0-9])[A-Za-z0-9]{128}(?![A-Za-z0-9])",
        # An R2 secret key; exclude labelled checksums and files of a content-addressed cache.
        r"(?<!sha256[:=-])(?<!/blobs/)\b[0-9a-f]{64}\b",
        r"\bgh[pousr]_[A-Za-z0-9]{30,}",
        r"\bgithub_pat_[A-Za-z0-9_]{20,}",
        r"\b(?:gl(?:pat|dt|ft|soat|rt|cbt)-|GR1348941)[A-Za-z0-9_-]{20,}",
        r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
        r"\bsk-[A-Za-z0-9_-]{20,}",
        # NVIDIA, RunPod, Groq, Docker Hub, Tailscale, Vault, Digital Ocean, Linear, Replicate.
        r"\b(?:nvapi-|rpa_|gsk_|dckr_[po]at_|tskey-[a-z]{2,12}-|hv[sb]\.|dop_v1_|lin_api_|r8_)"
        r"[\w.-]{20,}",
        # A private key or seed; exclude labelled hashes and ids of accounts and blocks.
        r"(?<![\w#])(?<!hash: )(?<!hash=)(?<!hash )(?<!Id: )(?<!id: )(?<!block )(?<!root: )"
        r"(?<!\": \")0[xX][0-9a-fA-F]{64}\b",
        r"\bwandb_v\d_[A-Za-z0-9_]{20,}",
        r"\bAIza[A-Za-z0-9_-]{35}",
        # A JSON web token.
        r"(?<![\w-])eyJ[A-Za-z0-9_-]{11,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
        # PyPI, npm, SendGrid, Stripe, Square, Artifactory, Azure, Mailchimp, Twilio, a Discord bot.
        r"\bpypi-Ag[A-Za-z0-9_-]{50,}|\bnpm_[A-Za-z0-9]{36}\b|\bSG\.[\w-]{22}\.[\w-]{43}"
        r"|\b[rs]k_live_[0-9A-Za-z]{24}|\bsq0csp-[\w\\-]{43}|\bAKC[A-Za-z0-9]{20,}"
        r"|\bAP[0-9A-F][A-Za-z0-9]{30,}",
        r"(?<=AccountKey=)[A-Za-z0-9+/=]{88}|\b[0-9a-z]{32}-us\d{1,2}\b|\b(?:AC|SK)[a-z0-9]{32}\b"
        r"|\b[MNO][A-Za-z\d_-]{23,25}\.[\w-]{6}\.[\w-]{27}",
        # The token of a Telegram bot.
        r"(?<![\w-])\d{8,12}:AA[A-Za-z0-9_-]{30,}",
    )
)
_LONG_RUN = re.compile(r"[\w-]{14}")
"""Text without such a run matches none of the shapes. The limit is 14 because the date and hour in
a line's timestamp take up 13 characters."""

_WEBHOOK = re.compile(
    r"(?i)(\b(?:discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/|hooks\.slack\.com/(?:services|workflows|triggers)/"
    r"|api\.telegram\.org/(?:file/)?bot|\.webhook\.office\.com/webhookb2/"
    r"|(?:discord|gotifys?|msteams|ntfys?|pbul|pover|slack|tgram)://))(?!\[redacted\])[^\s\"'<>\\]+?"
    # The method name in the URL of a bot's API is not secret.
    r"(?=/(?:send|get|set|edit|delete)[A-Za-z]|[\s\"'<>\\),;]|\Z)"
)
_SIGNED_URL = re.compile(
    r"(?i)((?:[?&]|&amp;|\\u0026)(?:sig|signature|AWSAccessKeyId|X-Amz-(?:Signature|Credential|Security-Token))=)"
    r"(?!\[redacted\])[^\s\"'&<>\\]+"
)
_WANDB = re.compile(
    r"(?i)(\bwandb\b[^\n]{0,40}?\b(?:key|login|password)\b[^\n]{0,20}?)(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"
)
_NETRC = re.compile(r"((?:\b|\\[nrt])password[ \t]+)[0-9a-f]{40}\b")

_PEM_TITLE = r"[A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"
_PEM_BEGIN = re.compile(rf"-----BEGIN {_PEM_TITLE}")
_PEM_END = re.compile(rf"-----END {_PEM_TITLE}")
_PEM_BODY = re.compile(r"\A(?:(?:\s|\\[nr])*[A-Za-z0-9+/=]{16,})*")
_PEM_REST = re.compile(rf"\A[A-Za-z0-9+/=\s]{{1,20000}}-----END {_PEM_TITLE}")
_MAX_PEM = 20_000
# No pattern below has an unbounded prefix: in a long word (hex, base64) each letter would start a
# search of the rest while holding the GIL. A word of 16 KB blocked the guard for a minute.
_NAMES = (
    r"(?:secret(?:[_-]?(?:key|seed|phrase))?|private[_-]?key|token|password|passwd|(?<![a-z])pass|pwd|passphrase|api[_-]?key"
    r"|access[_-]?key(?:[_-]?id)?|webhook(?:[_-]?url)?|mnemonic)"
)
_SECRET_FIELD = re.compile(rf"(?i)(?:^|[._]){_NAMES}$")
# Quotes may be escaped, because the bundle redacts JSON inside JSON. Never cut an escape in half:
# the result would not parse.
_NAMED = re.compile(
    rf"(?i)({_NAMES}(?:\\{{0,7}}[\"'])?\s*[=:]\s*(?:\\{{0,7}}[\"'])?)"
    r"(?!\[redacted\])((?:[^\s\"',;&|)}\]\\]|\\(?!\\{0,7}[\"'\s])){4,})"
)
# Match only at the start of a word: in a row of dashes every dash would start a search.
_FLAG_NAME = rf"(?<![\w.-])--[\w.-]{{0,64}}{_NAMES}"
_SECRET_FLAG = re.compile(_FLAG_NAME, re.IGNORECASE)
# Handle shell quotes: inside them the value may contain spaces.
_FLAG = re.compile(
    rf"(?i)({_FLAG_NAME}[ =])(?!\[redacted\])(?=.{{4}})((?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"])+|\S+)"
)
_AWS_NAMED = re.compile(
    r"(?i)(\baws.{0,20}?(?:key|pwd|pw|password|pass|token).{0,20}?['\"])[0-9a-zA-Z/+]{40}(?=['\"])"
)
_BEARER = re.compile(
    r"(?i)(\b(?:bearer|basic|authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:token|apikey))\s+)([A-Za-z0-9._~+/=-]{8,})"
)
_USER = re.compile(
    r"(?i)(\b[a-z][a-z0-9+.-]{0,31}://(?:[^\s/:@]{0,256}:)?)(?!git@)[^\s/@]{1,512}(?=@)"
)
_AFTER_A_NAME = (_WANDB, _NETRC, _AWS_NAMED, _BEARER, _FLAG, _NAMED)
_ANSI = r"(?:\x1b|\\u001b|\\x1b)\[[\d;]{0,12}m"
_STOPS = (
    "the|and|for|was|not|has|are|from|been|were|but|its|did|had|her|him|his|off|our|per|too|via|who"
    "|why|yet|failed|error|warning|using|loading|found|file|line|step|loss|rank|device|module"
    "|training|redacted"
)
"""Frequent words of logs that are not in the list of mnemonic words (BIP 39); they end a phrase."""

_WORD = rf"(?!(?:{_STOPS})(?![A-Za-z]))[a-z]{{3,8}}(?![A-Za-z])"
# Between two words: spaces, or the signs around numbered, listed, quoted or coloured words, but no
# colon, which ends a key of JSON. Text matches in only one way; otherwise a row of `\\n` would
# effectively hang the search.
_BETWEEN = rf"(?=\d*[^\dA-Za-z])(?:{_ANSI}|\\[nrt]|\\{{1,7}}[\"']|[^A-Za-z/:=_\\\x1b]){{1,24}}"
_PHRASE = re.compile(rf"(?:(?<![A-Za-z])|(?<=\\[nrt])){_WORD}(?:{_BETWEEN}{_WORD}){{10,}}")
_HALF_A_PHRASE = re.compile(rf"(?:(?<![A-Za-z])|(?<=\\[nrt])){_WORD}(?:{_BETWEEN}{_WORD}){{7,}}")
"""A mnemonic has 12 to 24 words. The first one may be hidden already, because it follows a name; a
truncated line may hold fewer."""

_MAY_HOLD_SECRET = re.compile(
    r"(?i)secret|token|passw|passp|pwd|key|mnemonic|phrase|(?:seed|recovery|backup).words|bearer|basic|xox|wandb"
    r"|(?<![a-z])pass[\"']|authorization|webhook|bot\d|eyJ|://|x-amz|[?&]sig|u0026sig"
    # All other shapes contain a run of at least this length.
    r"|[\w-]{20}"
)


def _without_private_keys(text: str) -> str:
    """Mask each PEM block in `text`, whether it spans lines, has a prefix on each line, or is
    inside a JSON string. A truncated block ends where its base64 ends."""
    head, *blocks = _PEM_BEGIN.split(text)
    return head + "".join(MASK + _after_key(block) for block in blocks)


def _after_key(block: str) -> str:
    end = _PEM_END.search(block, 0, _MAX_PEM)
    if end is not None and '"' not in block[: end.start()]:
        return block[end.end() :]
    return _PEM_BODY.sub("", block, count=1)


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables whose names suggest secrets, for a process that does not
    need them."""
    return {name: value for name, value in env.items() if not SECRET_NAME.search(name)}


def _is_secret_variable(name: str, value: str) -> bool:
    if not SECRET_NAME.search(name) or value.startswith("/"):
        return False
    return not (_COUNTS.search(name) and _NO_SECRET.fullmatch(value))


class Redactor:
    """Replaces secrets with `[redacted]`. Immutable and thread-safe."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        secrets = sorted({v for v in values if len(v) >= _MIN_SECRET_LENGTH}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, secrets))) if secrets else None

    @classmethod
    def from_environment(cls, env: Mapping[str, str], more: Iterable[str] = ()) -> Redactor:
        """A redactor that masks `more` and the values of variables whose names match
        `SECRET_NAME`."""
        return cls(
            [*(value for name, value in env.items() if _is_secret_variable(name, value)), *more]
        )

    @classmethod
    def for_guard(cls, env: Mapping[str, str], config: Config) -> Redactor:
        """A redactor that masks the secrets in the environment and in the guard's settings."""
        alerts = config.alerts
        return cls.from_environment(
            env, [*alerts.urls, alerts.heartbeat_url or "", config.http.token or ""]
        )

    def text(self, text: str) -> str:
        """Return `text` with its secrets masked."""
        if self._values is not None:
            text = self._values.sub(MASK, text)
        if _MAY_HOLD_SECRET.search(text):
            text = self._without_named(text)
        # Last, because a phrase may run into the scheme of a URL or into the name of a password.
        return _PHRASE.sub(MASK, text)

    @staticmethod
    def _without_named(text: str) -> str:
        """Mask what follows a name or has a known shape."""
        if "PRIVATE KEY" in text:
            text = _PEM_REST.sub(MASK, _without_private_keys(text))
        for address in (_WEBHOOK, _USER, _SIGNED_URL):
            text = address.sub(rf"\1{MASK}", text)
        if _LONG_RUN.search(text):
            for shape in _SHAPES:
                text = shape.sub(MASK, text)
        for named in _AFTER_A_NAME:
            text = named.sub(rf"\1{MASK}", text)
        return text

    def public(self, text: str) -> str:
        """Return what a raw line may say outside this machine (the function `public`)."""
        return self.text(public(text))

    def value(self, value: Any, name: str = "") -> Any:
        """Return `value` with its secrets masked, including those inside mappings and sequences. A
        field whose name suggests a secret is masked completely."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            return MASK if value and _SECRET_FIELD.search(name) else self.text(value)
        if isinstance(value, (dict, Mapping)):
            return {k: self.value(v, str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return self._items(value, name)
        return value

    def _items(self, items: Sequence[Any], name: str) -> list[Any]:
        """Redact the items of a list. If it is a command line, the word after `--token` is a secret
        whatever it looks like, and all words after `--mnemonic` are."""
        safe, flag = [], ""
        for item in items:
            word = item if isinstance(item, str) else ""
            is_flag = word.startswith("--")
            hidden = bool(flag) and not is_flag and len(word) >= _MIN_WORD_LENGTH
            safe.append(MASK if hidden else self.value(item, name))
            if is_flag or not flag.lower().endswith("mnemonic"):
                flag = word if _SECRET_FLAG.fullmatch(word) else ""
        return safe


GONE = "[…]"

_RUN = re.compile(r"[\w.+/=~@%:-]+|\s+|.", re.DOTALL)
"""Splits a line into runs that a secret could fill, white space, and single other characters."""

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")

_NUMBER = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,12})?(?:e[+-]?\d{1,3})?"
    r"(?:%|[a-zA-Zµ]{1,3}(?:/s|/it)?|it/s|ms|bytes|tokens|seconds|MiB|GiB|KiB)?"
)
_STAMP = re.compile(
    r"\d{8}T\d{6}|\d{4}-\d\d-\d\dT?(?:\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?)?|\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
)
_VERSION = re.compile(
    r"v?\d{1,4}(?:\.\d{1,6}){1,4}(?:\.?(?:post|dev|rc|a|b)\d{1,3})?(?:\+(?:cu\d{2,3}|cpu))?"
)
_SMALL = re.compile(r"[A-Za-z]{1,8}\d{1,4}|\d{1,4}[A-Za-z]{1,4}|[a-z]\d{1,2}[a-z]|x86|amd64|sm\d\d")
"""Names with a number, such as `rank0`, `c10d`, `bf16`, `H100` or `cu121`: short enough that a
secret cannot hide in one."""

_JOINT = re.compile(r"([._/:=+@%~-]+)")
_MAX_WORD = 24
_MAX_ACRONYM = 8
_SURE = 12
"""A lower-case word of at most this length needs a vowel; a longer one also the mix of an ordinary
word."""

_MIN_VOWELS, _MAX_VOWELS = 0.26, 0.62
_CONSONANTS = re.compile(
    r"[bcdfghjklmnpqrstvwxz]{6}|q[^u]|[jqv][bcdfghjkmnpqrvwxz]|([a-z])\1\1", re.IGNORECASE
)

_NAMED_SECRET = re.compile(
    r"(?i)(\b(?:[\w-]{0,32}[_-])?(?:pass(?:word|wd|phrase)?|pwd|pw|token|secret|key|auth|credential|api_?key"
    r"|access_?key|private_?key|seed|pin|otp|cookie|session(?:id)?|signature|sig|login|bearer|basic)s?"
    r"(?:[\"']|\\{1,4}[\"'])?\s{0,3}(?::=|[=:])\s{0,3}|\b(?:authorization|x-[\w-]{1,32})(?:[\"'])?\s{0,3}[=:]\s{0,3}"
    r"(?:[\"'])?(?:\w{1,12}\s)?|\b(?:bearer|basic|token|password|passphrase)\s)(?P<value>[^\s,;)}\]]{3,})"
)
"""After such a name even an ordinary word is a secret."""

_USER_AT = re.compile(r"(://)[^\s/@\"']{1,512}@")
_PLAIN_VALUE = re.compile(
    r"[\"']?(?:\d{1,9}(?:\.\d+)?|none|null|true|false|error|invalid|missing|expired|is|was|not|must|cannot|required|unset|empty)\b[\"'.]*",
    re.IGNORECASE,
)

_LONE = re.compile(r"(?m)^[^A-Za-z\n]{0,24}[a-z]{3,8}[^A-Za-z\n]{0,8}$")


def public(text: str) -> str:
    """Return `text` without anything that could be a secret."""
    text = _USER_AT.sub(rf"\1{GONE}@", text)
    text = _NAMED_SECRET.sub(_hide_value, text)
    text = _HALF_A_PHRASE.sub(GONE, _LONE.sub(GONE, text))
    return "".join(_shown(run) for run in _RUN.findall(text.replace(GONE, "\0"))).replace(
        "\0", GONE
    )


def public_around(place: str, text: str) -> str:
    """`public`, except that `place`, a path of the guard's own, stays as it is."""
    return place.join(public(part) for part in text.split(place))


def public_values(value: Any) -> Any:
    """`value` with `public` applied to every string in it; the keys of mappings stay."""
    if isinstance(value, Mapping):
        return {key: public_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [public_values(each) for each in value]
    return public(value) if isinstance(value, str) else value


def _hide_value(match: re.Match[str]) -> str:
    value = match["value"]
    if _PLAIN_VALUE.fullmatch(value) or match.string.startswith(f" {GONE}", match.end()):
        return match[0]
    return match[0][: -len(value)] + GONE


def _shown(run: str) -> str:
    if not run.strip() or (not run[0].isalnum() and len(run) == 1):
        return run
    pieces = _JOINT.split(run)
    if all(_harmless(piece) for piece in pieces[::2]) and len(run) <= 256:
        return run
    if _STAMP.fullmatch(run.strip(".:")) or _NUMBER.fullmatch(run.strip(".:")):
        return run
    if run.startswith(("/", "~/", "./")) or ":" in run or "=" in run:
        # Keep the harmless parts of a path, an assignment or an address.
        return "".join(
            piece if place % 2 or _harmless(piece) else GONE for place, piece in enumerate(pieces)
        )
    return GONE


def _harmless(piece: str) -> bool:
    """Return True if a piece without separators is a word, a number or a short name."""
    if piece in ("", "\0") or (piece.isdigit() and len(piece) <= 15):
        return True
    if any(kind.fullmatch(piece) for kind in (_NUMBER, _SMALL, _VERSION, _STAMP)):
        return True
    if not piece.isascii():
        return not any(char.isascii() and char.isalnum() for char in piece)
    words = (
        piece.rstrip("0123456789") if len(piece) - len(piece.rstrip("0123456789")) <= 3 else piece
    )
    return words.isalpha() and len(words) <= 2 * _MAX_WORD and _is_name(words)


def _is_name(letters: str) -> bool:
    if len(letters) <= 3:
        return True
    parts = _PART.findall(letters)
    if len(parts) > 2 and len(letters) < 4 * len(parts):
        return False
    return all(_is_word(part) for part in parts)


def _is_word(letters: str) -> bool:
    """Return True if the letters look like a word or an acronym."""
    if len(letters) <= 3 or (letters.isupper() and len(letters) <= _MAX_ACRONYM):
        return True
    if letters == "nvml":  # in the name of a check
        return True
    if len(letters) > _MAX_WORD or _CONSONANTS.search(letters):
        return False
    share = sum(char in "aeiouyAEIOUY" for char in letters) / len(letters)
    if len(letters) <= _SURE:
        return share > 0 or len(letters) <= 5
    return _MIN_VOWELS <= share <= _MAX_VOWELS
