"""Secrets out of text: before anything that the guard stores or prints on its own account.

Standard library only. Two kinds of rule: shapes (a token looks like one wherever it stands) and values
(what the environment names as a secret is one, whatever it looks like).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miner_guard.config import Config

MASK = "[redacted]"

SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSWD|MNEMONIC|CREDENTIAL", re.IGNORECASE)
"""Environment variables so named hold secrets."""

_COUNTS = re.compile(r"TOKENS|TOKENIZ", re.IGNORECASE)
_NO_SECRET = re.compile(r"[\d._,]+|true|false", re.IGNORECASE)
"""`MAX_TOKENS=100000`, `TOKENIZERS_PARALLELISM=false`: settings, and words that stand everywhere."""

_SHORTEST_SECRET = 6
"""Shorter values would redact ordinary words (`KEY=1`)."""

_SHORTEST_WORD = 4
"""After `--token` and the like."""

_SHAPES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\bhf_[A-Za-z0-9]{20,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        # A subnet 38 commitment: account id 32 + read key id 32 + read secret 64.
        r"\b[0-9a-fA-F]{128}\b|(?<![A-Za-z0-9])[A-Za-z0-9]{128}(?![A-Za-z0-9])",
        # An R2 secret key; what is named as a checksum, or a file of a content-addressed cache, is none.
        r"(?<!sha256[:=-])(?<!/blobs/)\b[0-9a-f]{64}\b",
        r"\bgh[pousr]_[A-Za-z0-9]{30,}",
        r"\bsk-[A-Za-z0-9_-]{20,}",
    )
)
# No prefix without a bound anywhere below: on a long word (hex, base64) each of its letters would begin a search of the
# rest, with the interpreter's lock held. 16 KB took a minute, in which the guard stood still.
_NAMED = re.compile(
    r"(?i)((?:(?:secret(?:[_-]?key)?|token|password|passwd|api[_-]?key|access[_-]?key(?:[_-]id)?|mnemonic))[\"']?\s*[=:]\s*[\"']?)"
    r"(?!\[redacted\])([^\s\"',;&|)}\]]{4,})"
)
_FLAG_NAME = (
    r"--[\w.-]{0,64}(?:secret(?:[_-]?key)?|token|password|passwd|api[_-]?key|access[_-]?key(?:[_-]?id)?|mnemonic)"
)
_SECRET_FLAG = re.compile(_FLAG_NAME, re.IGNORECASE)
# Quoted as a shell does: what follows a space inside the quotes belongs to it.
_FLAG = re.compile(rf"(?i)({_FLAG_NAME}[ =])(?=.{{4}})((?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"])+|\S+)")
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)([A-Za-z0-9._~+/=-]{8,})")
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{0,31}://[^\s/:@]{0,256}:)([^\s/@]+)(@)", re.IGNORECASE)
_MNEMONIC = re.compile(r"(?i)(\b(?:mnemonic|seed phrase)\b\W+)((?:[a-z]{3,8}[ ]+){11,23}[a-z]{3,8})")
_WORTH_A_LOOK = re.compile(
    r"(?i)secret|token|passw|key|mnemonic|seed phrase|bearer|basic|hf_|sk-|gh[pousr]_|AKIA|ASIA|://|[0-9A-Za-z]{64}"
)


def _is_secret_variable(name: str, value: str) -> bool:
    if not SECRET_NAME.search(name) or value.startswith("/"):
        return False
    return not (_COUNTS.search(name) and _NO_SECRET.fullmatch(value))


class Redactor:
    """Replaces secrets by `[redacted]`. Immutable; calling it is safe from any thread."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = sorted({v for v in values if len(v) >= _SHORTEST_SECRET}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, known))) if known else None

    @classmethod
    def from_environment(cls, env: Mapping[str, str], more: Iterable[str] = ()) -> Redactor:
        """Knows the values of variables named *KEY*, *SECRET*, *TOKEN*, *PASSWORD*, and `more`."""
        return cls([*(value for name, value in env.items() if _is_secret_variable(name, value)), *more])

    @classmethod
    def for_guard(cls, env: Mapping[str, str], config: Config) -> Redactor:
        """Knows the environment's secrets and those that the guard's own settings hold."""
        alerts = config.alerts
        return cls.from_environment(env, [*alerts.urls, alerts.heartbeat_url or "", config.http.token or ""])

    def text(self, text: str) -> str:
        """`text` without secrets."""
        if self._values is not None:
            text = self._values.sub(MASK, text)
        if not _WORTH_A_LOOK.search(text):
            return text
        for shape in _SHAPES:
            text = shape.sub(MASK, text)
        text = _MNEMONIC.sub(rf"\1{MASK}", text)
        text = _URL.sub(rf"\1{MASK}\3", text)
        text = _BEARER.sub(rf"\1{MASK}", text)
        text = _FLAG.sub(rf"\1{MASK}", text)
        return _NAMED.sub(rf"\1{MASK}", text)

    def value(self, value: Any, name: str = "") -> Any:
        """`value` without secrets, through mappings and sequences; a field named like a secret is masked whole."""
        if isinstance(value, str):
            return MASK if name and _is_secret_field(name) and value else self.text(value)
        if isinstance(value, Mapping):
            return {k: self.value(v, str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return self._items(value, name)
        return value

    def _items(self, items: Sequence[Any], name: str) -> list[Any]:
        """A command line is a list of words: the one after `--token` is a secret, though it looks like none."""
        safe, masked = [], False
        for item in items:
            hidden = masked and isinstance(item, str) and len(item) >= _SHORTEST_WORD and not item.startswith("--")
            safe.append(MASK if hidden else self.value(item, name))
            masked = isinstance(item, str) and _SECRET_FLAG.fullmatch(item) is not None
        return safe


_SECRET_FIELD = re.compile(r"(?i)(?:^|_)(?:secret|token|password|api_?key|access_?key(?:_id)?|mnemonic)$")


def _is_secret_field(name: str) -> bool:
    return bool(_SECRET_FIELD.search(name))
