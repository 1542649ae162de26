"""A setting that needs no pydantic gets the value that pydantic would give it."""

from __future__ import annotations

import subprocess
import sys
import typing
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from miner_guard.config import loading

HINTS = {
    f"{section}.{key}": hint
    for section, cls in loading.sections().items()
    for key, hint in typing.get_type_hints(cls, include_extras=True).items()
}
NUMBERS = (0, 1, -1, 65536, 10**20, 0.0, 0.5, 100.0, 101.0, -0.5, float("nan"), float("inf"))
TEXTS = ("", "0", "1", "-1", "007", "1.5", "1e3", " 1", "1_0", "٣", "true", "True", "no", "auto")
LISTS = ((), ("a", "b"), (1,))
VALUES: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *LISTS, {"a": 1.0}, "enforce")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", HINTS)
def test_a_plain_value_is_what_pydantic_makes_of_it(name: str, strict: bool) -> None:
    hint = HINTS[name]
    for value in VALUES:
        plain = loading.plain_value(hint, value, strict=strict)
        if plain is loading.UNSURE:
            continue
        try:
            expected = TypeAdapter(hint).validate_python(value, strict=strict)
        except ValidationError as error:
            pytest.fail(f"{value!r} is refused: {error}")
        assert (type(plain), plain) == (type(expected), expected), value


def test_the_usual_settings_need_no_pydantic() -> None:
    """A single flag must not make the start import pydantic."""
    usual = {
        "gpu.preflight": "false",
        "miner.stop_timeout_s": "45",
        "restart.max_restarts": 5,
        "miner.profile": "sn38",
        "miner.attach": "auto",
        "gpu.expect": "8",
        "alerts.urls": ("json://localhost",),
    }
    values = {
        name: loading.plain_value(HINTS[name], value, strict=False) for name, value in usual.items()
    }
    assert loading.UNSURE not in values.values(), values
    code = (
        "import sys; from miner_guard.config import loading; "
        "loading.load(flags={'gpu.preflight': False, 'gpu.expect': '2'}); "
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
