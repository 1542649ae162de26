"""Fixes quote details from the line: the package, path, host or repo that it names, never a
placeholder."""

from __future__ import annotations

import pytest

from miner_guard.incidents import explain


@pytest.mark.parametrize(
    ("detail", "line", "named"),
    [
        ("package", "ModuleNotFoundError: No module named 'flash_attn'", "flash-attn"),
        ("package", "ModuleNotFoundError: No module named 'yaml.loader'", "PyYAML"),
        (
            "package",
            (
                "ImportError: "
                "/v/site-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: "
                "undefined symbol: _ZN3"
            ),
            "flash-attn",
        ),
        (
            "package",
            "ImportError: tokenizers>=0.21,<0.22 is required for a normal functioning",
            "tokenizers",
        ),
        (
            "requirement",
            "ImportError: tokenizers>=0.21,<0.22 is required for",
            "tokenizers>=0.21,<0.22",
        ),
        (
            "path",
            "OSError: [Errno 28] No space left on device: '/data/ckpt/step 3.pt'",
            "/data/ckpt/step 3.pt",
        ),
        ("path", "RuntimeError: step 3 failed", ""),
        ("host", "connect to [node-3.local]:29500 (errno: 113 - No route to host)", "node-3.local"),
        ("host", "Call to recv from 10.119.24.53<49901> failed : Broken pipe", "10.119.24.53"),
        ("port", "failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use).", "29500"),
        (
            "repo",
            (
                "403 Client Error: Forbidden for url: "
                "https://huggingface.co/api/models/me/miner/preupload/main"
            ),
            "me/miner",
        ),
        ("repo", "Forbidden for url: https://huggingface.co/api/repos/create (Request ID", ""),
        ("app", "PM2 | App [miner:0] exited with code [1] via signal [SIGINT]", "miner"),
    ],
)
def test_a_line_names_its_detail(detail: str, line: str, named: str) -> None:
    assert explain.named(detail, [line]) == named


def test_a_placeholder_is_filled_from_the_first_line_that_names_it_or_by_its_default() -> None:
    text = "Free {path|the disk}, then look at {host|the host}."
    lines = ["nothing here", "No space left on device: '/scratch/a'"]
    assert explain.filled(text, lines) == "Free /scratch/a, then look at the host."
