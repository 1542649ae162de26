"""`config --validate` and `--schema`: a file is checked before a guard reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.config import loading, sections
from miner_guard.validators import profiles
from miner_guard.validators.profiles import load_profile
from tests.support import requires


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MINER_GUARD_")]:
        monkeypatch.delenv(name)


def test_only_the_named_file_is_validated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("guard.toml").write_text("this is not read")
    Path("other.toml").write_text("[gpu]\nexpect = 4\n[restart]\nbackoff_s = 2\n")
    assert run(["config", "--validate", "other.toml"]) == 0
    assert capsys.readouterr().out == "other.toml: 2 settings, all valid\n"
    assert run(["config", "--validate", "guard.toml"]) == 78


PROFILE = 'name = "own"\ntitle = "x"\nread_from = "x"\ndated = 2026-01-01\n'
OWN = 'profile = "own.toml"'


@pytest.mark.parametrize(
    ("profile", "settings", "words"),
    [
        ("[settings.gate]\nmin_inner_stepp = 30", OWN, "unknown key gate.min_inner_stepp"),
        ("", 'profile = "nosuch"', "no profile 'nosuch'"),
        (
            "[patterns]\npush = ['pushed (?P<tga>.+)']",
            OWN,
            "own.toml: [patterns] push: 'pushed (?P<tga>.+)' has the group",
        ),
        (
            "",
            "log_patterns = ['step (?P<step>.) (?P<los>.)']",
            "has the group 'los'; allowed: step",
        ),
        ("", "log_patterns = ['(']", "guard.toml: miner.log_patterns: '(' is not a valid regular"),
    ],
)
def test_the_profile_and_the_patterns_that_a_file_names_are_checked_with_it(
    capsys: pytest.CaptureFixture[str], profile: str, settings: str, words: str
) -> None:
    """Otherwise a mistake in a profile would not be reported until the guard starts, and a group or
    a source could be accepted although nothing reads it."""
    Path("own.toml").write_text(f"{PROFILE}{profile}\n")
    Path("guard.toml").write_text(f"[miner]\n{settings}\n")
    assert run(["config", "--validate", "guard.toml"]) == 78
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a = " + "[" * 100_000, "nested too deeply", id="arrays"),
        pytest.param("a = " + "{a = " * 100_000, "nested too deeply", id="tables"),
        ("[gpu]\nexpct = 4", "other.toml: unknown key gpu.expct; did you mean expect? allowed in"),
        ("[restrat]\nx = 1", "unknown section [restrat]; did you mean restart? allowed: miner"),
        ("[zzz]\nx = 1", "other.toml: unknown section [zzz]; allowed: miner"),
        *((f"[steps]\nslow_s = {n}", "steps.slow_s") for n in ("inf", "-inf", "nan")),
        ("[hang]\nfactor = 3.0", "unknown key hang.factor"),  # a constant is no setting
    ],
)
def test_a_mistyped_name_is_refused_with_a_suggestion_and_a_deep_file_at_once(
    capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    Path("other.toml").write_text(text)
    assert run(["config", "--validate", "other.toml"]) == 78
    assert words in capsys.readouterr().err


def test_a_profile_given_by_name_is_validated_as_one_given_by_path_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = load_profile("iota").path.read_text(encoding="utf-8")
    (tmp_path / "edited.toml").write_text(text.replace('status = "alive"', 'status = "closed"'))
    monkeypatch.setattr(profiles, "__file__", str(tmp_path / "__init__.py"))
    Path("guard.toml").write_text('[miner]\nprofile = "edited"\n')
    assert run(["config", "--validate", "guard.toml"]) == 78
    assert "edited.toml: status is 'closed'" in capsys.readouterr().err


def test_the_schema_knows_every_setting_its_limits_and_its_words() -> None:
    requires.module("jsonschema")
    import jsonschema

    schema = loading.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for good in ({}, {"gpu": {"expect": 4}}, {"gpu": {"expect": "auto"}}):
        assert list(validator.iter_errors(good)) == []
    for bad in ({"gpu": {"expct": 4}}, {"nonsense": {}}, {"restart": {"backoff_s": -1}}):
        assert list(validator.iter_errors(bad))
    for name, cls in sections().items():
        for key, setting in schema["$defs"][cls.__name__]["properties"].items():
            assert setting.get("description"), f"{name}.{key} has no docstring"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_each_shell_asks_the_program_itself(shell: str) -> None:
    program = str(Path(sys.executable).with_name("miner-guard"))
    env = {**os.environ, "_MINER_GUARD_COMPLETE": f"source_{shell}"}
    script = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60).stdout
    assert "_MINER_GUARD_COMPLETE" in script
    if shell == "bash":
        env |= {
            "_MINER_GUARD_COMPLETE": "complete_bash",
            "COMP_WORDS": "miner-guard do",
            "COMP_CWORD": "1",
        }
        answer = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60)
        assert answer.stdout.split() == ["doctor"]


def test_the_version_has_a_short_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["-V"]) == 0
    assert json.dumps(capsys.readouterr().out).startswith('"miner-guard ')
