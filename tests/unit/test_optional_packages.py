"""Messages advise installing only packages that exist on an index, never a name that anyone could
register."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from miner_guard.cli.main import run
from miner_guard.config import optional_deps
from tests.support import requires

RAISED = """  File "train.py", line 1, in <module>
    import something
ModuleNotFoundError: No module named '{}'
"""


def test_a_hint_names_the_extras_own_packages_with_their_versions() -> None:
    assert optional_deps.install("alerts") == "pip install 'apprise>=1.7'"
    assert re.fullmatch(
        r"pip install 'starlette[^ ]+' 'uvicorn[^ ]+'", optional_deps.install("http")
    )
    assert re.fullmatch(r"pip install 'torch[^ ]+' 'numpy[^ ]+'", optional_deps.install("torch"))


@pytest.mark.parametrize("extra", optional_deps.EXTRAS, ids=lambda extra: extra.name)
def test_without_metadata_the_modules_are_named(
    extra: optional_deps.Extra, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a source tree on PYTHONPATH, or in the miner's own interpreter."""

    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    packages = [module.replace(".", "-") for module in extra.modules]
    assert optional_deps.install(extra.name) == f"pip install {' '.join(packages)}"


def test_no_text_suggests_installing_an_unpublished_name() -> None:
    """A stranger could register the name, and what they upload would run beside hot keys."""
    texts = [
        p for folder in ("miner_guard", "ops", "docs") for p in (requires.REPO / folder).rglob("*")
    ]
    command = re.compile(r"(pip|uv|pipx)\s+(install|run|tool install)[^\n]*[\s'\"]miner[-_]guard\b")
    assert command.search("run `pip install 'miner-guard[s3]'`"), "it would be noticed"
    for path in [requires.REPO / "README.md", *texts]:
        if (
            path.suffix in (".py", ".toml", ".md", ".sh", ".yml", ".yaml", ".html")
            or path.name == "Dockerfile"
        ):
            assert not command.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("module", ["miner_guard", "miner_guard.rank", "monitoring_cost_tracker"])
def test_a_miner_without_the_hook_is_not_told_to_install_it_from_an_index(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice for other missing modules names `pip install`."""
    advice = {}
    for name in (module, "sacrebleu"):
        log = tmp_path / "miner.log"
        log.write_text(f"Traceback (most recent call last):\n{RAISED.format(name)}")
        run(["explain", str(log)])
        advice[name] = capsys.readouterr().out
    assert "`pip install sacrebleu`" in advice["sacrebleu"]
    assert "from its own source tree" in advice[module]
    assert "pip install" not in advice[module]
