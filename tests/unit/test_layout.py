"""The profile determines the layout of a repo: probes and audits find its files under any key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from miner_guard.config import RepoSettings
from miner_guard.uploads.repos import look_at
from miner_guard.uploads.repos.local import LocalRepo
from miner_guard.validators.layout import USUAL, Layout
from miner_guard.validators.limits import Limits

VERSIONED = Layout.of(Limits(gradients_key="gradient-{outer_step}-{uid}-v2.1.28.pt"))


def put(root: Path, key: str, text: str = "gradients", *, at: float = 1_000.0) -> None:
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))


def test_without_a_profile_the_layout_is_the_publishers() -> None:
    assert Layout.of(Limits()) == USUAL
    assert USUAL.gradients_of(56) == "epoch-56/gradients.pt"
    assert USUAL.config_of(56) == "epoch-56/config.json"
    assert (USUAL.prefix, USUAL.file) == ("epoch-", "gradients.pt")


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ("epoch-56/gradients.pt", 56),
        ("epoch-x/gradients.pt", None),
        ("epoch-56/config.json", None),
        ("other/epoch-56/gradients.pt", None),
    ],
)
def test_the_outer_step_is_read_from_a_key(key: str, step: int | None) -> None:
    assert USUAL.outer_step_of(key) == step


def test_a_profiles_keys_replace_all_of_the_usual_ones(tmp_path: Path) -> None:
    # Without the profile's layout, such a bucket looked empty: no metadata.json, no epoch
    # folder.
    put(tmp_path, "gradient-8-7-v2.1.28.pt", at=1_000.0)
    put(tmp_path, "gradient-9-7-v2.1.28.pt", "newer", at=1_600.0)
    put(tmp_path, "checkpoint-9.pt", at=1_900.0)
    assert VERSIONED.metadata is None
    repo = LocalRepo(tmp_path, wall=lambda: 2_000.0)
    seen = repo.state(VERSIONED)
    assert (seen.age_s, seen.outer_step, seen.size_bytes) == (400.0, 9, 5)
    assert (seen.inner_step, seen.revision, seen.reason) == (None, None, None)
    assert repo.state().empty


def test_a_probe_in_its_child_uses_the_layout(tmp_path: Path) -> None:
    put(tmp_path, "gradient-8-7-v2.1.28.pt")
    settings = RepoSettings(kind="local", path=str(tmp_path))
    assert look_at(settings, VERSIONED).outer_step == 8
    assert look_at(settings).empty


def test_another_layout_with_documents_is_followed(tmp_path: Path) -> None:
    layout = Layout("runs/{outer_step}/delta.bin", "runs/{outer_step}/run.json", "head.json")
    put(tmp_path, "runs/3/delta.bin")
    put(tmp_path, "runs/3/run.json", json.dumps({"block_list": [5]}))
    put(tmp_path, "head.json", json.dumps({"run": 5, "outer_step": 3, "inner_step": 12}))
    seen = LocalRepo(tmp_path).state(layout)
    assert (seen.revision, seen.config) == ("5.3.12", {"block_list": [5]})
    (tmp_path / "runs/3/delta.bin").unlink()
    reason = LocalRepo(tmp_path).state(layout).reason
    assert reason == "head.json points to outer step 3, which has no delta.bin"
