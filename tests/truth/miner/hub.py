"""Replaces huggingface_hub, for miners that publish there: a folder and its tags."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.truth.miner import world


def _repo(name: str) -> Path:
    return world.current().folder / "hub" / name.replace("/", "--")


def repo_exists(repo_id: str, **_: Any) -> bool:
    world.current().call("repo_exists", repo_id)
    return _repo(repo_id).is_dir()


def create_repo(repo_id: str, **_: Any) -> None:
    world.current().call("create_repo", repo_id)
    _repo(repo_id).mkdir(parents=True)


def list_repo_refs(repo_id: str, **_: Any) -> Any:
    world.current().call("list_repo_refs", repo_id)
    tags = sorted(path.name for path in (_repo(repo_id) / ".tags").glob("*"))
    return SimpleNamespace(tags=[SimpleNamespace(name=tag, target_commit=tag) for tag in tags])


def create_tag(repo_id: str, *, tag: str, **_: Any) -> None:
    world.current().call("create_tag", repo_id, tag)
    (_repo(repo_id) / ".tags").mkdir(parents=True, exist_ok=True)
    (_repo(repo_id) / ".tags" / tag).touch()


def delete_tag(repo_id: str, *, tag: str, **_: Any) -> None:
    world.current().call("delete_tag", repo_id, tag)
    (_repo(repo_id) / ".tags" / tag).unlink()


def upload_folder(*, repo_id: str, folder_path: str, **_: Any) -> None:
    world.current().call("upload_folder", repo_id)
    shutil.copytree(folder_path, _repo(repo_id), dirs_exist_ok=True)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: world.current().call(name)
