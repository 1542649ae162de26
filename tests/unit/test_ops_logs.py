"""ops/: compose.yaml starts what its programs need, and Alloy ships guard.jsonl to Loki."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from pathlib import Path

from miner_guard.config import MinerSettings
from miner_guard.record.events import RESERVED
from miner_guard.state_dir import choose
from tests.support import requires
from tests.support.event_names import events as logged_events
from tests.support.ops_files import OPS, yaml_of


def test_compose_mounts_existing_files_where_its_programs_look() -> None:
    services = yaml_of("compose.yaml")["services"]
    foreign = {"prometheus", "alertmanager", "loki", "alloy", "grafana"}
    assert set(services) == {*foreign, "miner"}
    for name, service in services.items():
        assert ":" in service["image"] or name not in foreign, f"{name}: a pinned version"
        targets = [
            mount.split(":")[-2 if mount.endswith(":ro") else -1] for mount in service["volumes"]
        ]
        for mount in service["volumes"]:
            if mount.startswith("./"):
                assert (OPS / mount.partition(":")[0]).exists(), mount
        for word in service.get("command", []) if name in foreign else ():
            path = word.rpartition("=")[2]
            if path.startswith("/"):
                assert any(path.startswith(target) for target in targets), word
    sources = {
        source["type"]: source["url"]
        for source in yaml_of("grafana/datasources.yml")["datasources"]
    }
    assert set(sources) == {"prometheus", "loki"}
    assert services["alloy"]["environment"]["LOKI_URL"].startswith(sources["loki"])
    assert str(yaml_of("loki/loki.yml")["server"]["http_listen_port"]) in sources["loki"]
    provider = yaml_of("grafana/dashboards.yml")["providers"][0]["options"]["path"]
    assert any(f":{provider}/" in mount for mount in services["grafana"]["volumes"])


def test_docker_compose_accepts_the_file_and_asks_for_a_password() -> None:
    """Compose's own parser and schema; neither needs a daemon."""
    environment = {**os.environ, "GRAFANA_PASSWORD": "x"}
    compose = [requires.tool("docker-compose"), "-f", OPS / "compose.yaml", "--profile", "miner"]
    answer = subprocess.run(
        [*compose, "config"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "image: grafana/loki" in answer.stdout
    del environment["GRAFANA_PASSWORD"]
    refused = subprocess.run([*compose, "config"], env=environment, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "set GRAFANA_PASSWORD" in refused.stderr


def test_the_optional_miner_of_compose_is_seen_by_its_monitoring() -> None:
    compose = yaml_of("compose.yaml")
    miner, alloy = compose["services"]["miner"], compose["services"]["alloy"]
    assert miner["profiles"] == ["miner"], "monitoring a fleet starts no miner"
    assert (OPS / miner["build"]["context"] / miner["build"]["dockerfile"]).samefile(
        OPS / "Dockerfile"
    )
    assert int(miner["stop_grace_period"].rstrip("s")) > MinerSettings().stop_timeout_s
    (state,) = [mount for mount in miner["volumes"] if mount.endswith(":/state")]
    volume = state.partition(":")[0]
    assert volume in compose["volumes"]
    (seen,) = [mount for mount in alloy["volumes"] if mount.startswith(f"{volume}:")]
    log = Path(seen.split(":")[1]) / "guard.jsonl"
    assert any(fnmatch.fnmatch(str(log), path) for path in _alloys_paths())


def _alloy() -> str:
    return (OPS / "loki" / "config.alloy").read_text(encoding="utf-8")


def _alloys_paths() -> list[str]:
    return re.findall(r'"__path__" = "([^"]+)"', _alloy())


def _alloys_names(table: str) -> set[str]:
    """The keys of a table in one line."""
    (row,) = re.findall(rf"{table} = \{{ (.+) \}}", _alloy())
    return set(re.findall(r"(\w+) =", row))


def test_alloy_takes_guard_jsonl_to_loki_and_its_labels_are_fields_of_every_line() -> None:
    components = {".".join(each) for each in re.findall(r'^([\w.]+) "(\w+)" \{', _alloy(), re.M)}
    fed = re.findall(r"= \[?([\w.]+)\.(?:targets|receiver)\b", _alloy())
    assert {*fed, "loki.source.file.guard"} == components, "each is fed, none dangles"
    log = str(choose("miner", None, {"HOME": "/root"}).log)
    assert any(fnmatch.fnmatch(log, path) for path in _alloys_paths())
    assert _alloys_names("expressions") <= RESERVED
    labels = _alloys_names("values")
    assert labels <= _alloys_names("expressions") - {"ts"}, "a label per line would break Loki"


def test_queries_of_logs_name_only_events_and_labels_that_exist() -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in OPS.rglob("*.*")
        if path.suffix in (".md", ".yml")
    )
    text += (OPS / "grafana" / "miner-guard.json").read_text(encoding="utf-8").replace('\\"', '"')
    asked = re.findall(r'event(?:=|!=|=~|!~)"([^"]+)"', text)
    assert len(asked) > 3
    assert {name for names in asked for name in names.split("|")} <= logged_events().keys()
    asked_labels = {label for label, _ in re.findall(r'`\{(\w+)="(\w+)"\}`', text)}
    assert asked_labels <= _alloys_names("values")
