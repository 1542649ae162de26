"""Private names in other packages: which ones the guard uses, and that they still exist."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator

import pytest

from tests.support import requires

PACKAGES = ("miner_guard",)
DOTTED = re.compile(r"[a-z]\w*(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")
USED = {
    # Documented, whatever their names look like.
    "os._exit",
    "_signal.getsignal",
    # The SDK's logs: stable on the wire, not yet in Python.
    "opentelemetry._logs.LogRecord",
    "opentelemetry._logs.SeverityNumber",
    "opentelemetry.exporter.otlp.proto.http._log_exporter.OTLPLogExporter",
    "opentelemetry.sdk._logs.LoggerProvider",
    "opentelemetry.sdk._logs.export.BatchLogRecordProcessor",
    # A hook that torch must not compile, and NCCL's own records. Without them the guard degrades.
    "torch._dynamo.eval_frame",
    "torch._C._dynamo.eval_frame",
    "torch._C._distributed_c10d",
    # What torch.func passes to autograd's engine. Without it, its steps are not seen.
    "torch._C._functorch",
}
NEEDED = {
    "torch._C._dynamo.eval_frame": ["set_eval_frame"],
    "torch._dynamo.eval_frame": ["skip_code"],
    "torch._C._functorch": [
        "get_unwrapped",
        "is_functorch_wrapped_tensor",
        "peek_interpreter_stack",
    ],
    "torch._C._distributed_c10d": ["_dump_fr_trace_json"],
}
"""Attributes that the guard uses from a module that it finds by name."""


def private_names(source: str) -> Iterator[str]:
    """Dotted names with a private part that this code imports, reads from a module or contains as
    text."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                modules[name.asname or name.name.partition(".")[0]] = name.name
                found.append(name.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
                found.append(f"{node.module}.{name.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of = modules.get(node.value.id)
            found += [f"{of}.{node.attr}"] if of and node.attr.startswith("_") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if DOTTED.fullmatch(node.value) else []
    for name in found:
        first, *_ = parts = name.split(".")
        if first not in (*PACKAGES, "__future__") and any(re.match("_[a-zA-Z]", p) for p in parts):
            yield name


def test_the_code_uses_the_listed_private_names_and_no_other() -> None:
    """Otherwise a new version could remove a private name without a failing test."""
    files = [path for package in PACKAGES for path in (requires.REPO / package).rglob("*.py")]
    used = {name for path in files for name in private_names(path.read_text(encoding="utf-8"))}
    assert used == USED


@pytest.mark.parametrize("name", sorted(USED))
def test_each_private_name_still_exists(name: str) -> None:
    if name.startswith("re._") and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has it as sre_parse and sre_constants")
    requires.module(name.partition(".")[0])
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError:
        found = getattr(importlib.import_module(module), attribute)
    for each in NEEDED.get(name, ()):
        assert hasattr(found, each), each


def test_private_names_are_found_in_imports_attributes_and_strings() -> None:
    source = "import os\nfrom typer._click import echo\nos._exit(1)\nfind('torch._dynamo.utils')\n"
    assert set(private_names(source)) == {"os._exit", "typer._click.echo", "torch._dynamo.utils"}
