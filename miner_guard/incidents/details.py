"""Finds details in a line for use in its fix, such as a package, path, host, port or repo."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PLACE = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
_MAX_LENGTH = 4096
"""Maximum number of characters of a line to search."""

_FOLDERS = "validators|uploads|neurons|miner|template|utils|src|scripts|config|models?|data|tools"
"""Modules that are folders of a miner's own repository. Some name unrelated packages on PyPI."""

_QUOTED_PATH = r"['\"](/?[\w.@+~-]+(?:/[\w.@+~ -]+)*)['\"]"
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "package": (
        r"No module named '?([\w-]+)",
        r"site-packages/([\w-]+?)(?:\.cpython[\w.-]*|\.abi3)?(?:/|\.so\b)",
        r"dist-packages/([\w-]+?)(?:\.cpython[\w.-]*|\.abi3)?(?:/|\.so\b)",
        r"from (?:partially initialized module )?'([\w-]+)",
        r"^\w*Error: ([\w-]+)[<>=!~]=?[\w.,<>=!~ ]+ is required",
        r"requires the ([\w-]+) (?:library|package)",
        r"^\w*Error: .{0,80}? requires (?:the )?`?([\w-]+)`?[ >=]",
        r"module '([\w-]+)[\w.]*' has no attribute",
        r"/([\w-]+?)\.cpython-[\w.-]+\.so",
    ),
    "folder": (rf"No module named '?({_FOLDERS})\b",),
    "requirement": (r"^\w*Error: ([\w-]+[<>=!~]=?[\w.,<>=!~]+) is required",),
    "path": (
        r"(?:No space left on device|Disk quota exceeded|Read-only file system|Permission denied): "
        + _QUOTED_PATH,
        r"No such file or directory: " + _QUOTED_PATH,
        r"(?:Keyfile at|File|file|open|from|at|to) [`'\"]?(/[\w.@+~/-]+\.?[\w-]+)",
        r"cannot (?:open|create|write)[^:'\"]*[:'\"] ?'?(/[\w.@+~/-]+)",
    ),
    "host": (
        r"[Cc]onnect(?:ing)? to (?:any network address of )?[\[(]?([\w-]+(?:\.[\w-]+)+)",
        r"remote peer ([\w.-]+)",
        r"from peer ([\d.]+)",
        r"(?:recv|send|connect) (?:from|to) ([\d.]+)",
        r"host=\\?'([\w.-]+)",
        r"resolve host:? '?([\w.-]+)",
        r"Failed to resolve \\?'([\w.-]+)",
        r"https?://([\w.-]+)",
        r"\[([\d.]+|[\w.-]+)\]:\d{2,5}",
    ),
    "port": (
        r"(?:bind|listen)\w* (?:to|on) \[?[\w.:?]*\]?:(\d{2,5})\b",
        r"\bport\W{1,3}(\d{2,5})\b",
        r"address \(['\"][\w.:]{0,40}['\"], (\d{2,5})",
        r"[\w.\]]:(\d{4,5})\b",
    ),
    "repo": (
        r"huggingface\.co/(?:api/)?(?:models/|datasets/|spaces/)?([\w.-]+/[\w.-]+?)(?:/|\.$|[?\s'\")]|$)",
        r"Access to (?:model|dataset) ([\w.-]+/[\w.-]+?) is restricted",
        r"Repo (?:model|dataset) ([\w.-]+/[\w.-]+?) is gated",
    ),
    "library": (r"(lib[\w.+-]+\.so[\w.]*)",),
    "argument": (r"unexpected keyword argument '([\w-]+)'",),
    "bucket": (r"s3://([\w.-]+)", r"to ([\w.*-]+)/\S*: An error occurred"),
    "app": (
        r"App (?:name:|\[)([\w.-]+)",
        r"(?:gave up|exited): ([\w.:-]+)",
        r"for ([\w.@-]+\.service)",
        r"Script (\S+) had",
        r"container=([\w-]+)",
    ),
}
_NOT_A_REPO = ("repos/create", "settings/tokens", "docs/hub", "docs/huggingface_hub")
_DISTRIBUTIONS = {
    "flash_attn_2_cuda": "flash-attn",
    "flash_attn": "flash-attn",
    "flash_attn_cuda": "flash-attn",
    "cv2": "opencv-python",
    "yaml": "PyYAML",
    "PIL": "Pillow",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "bs4": "beautifulsoup4",
    "git": "GitPython",
    "dotenv": "python-dotenv",
    "Crypto": "pycryptodome",
    "google": "protobuf",
    "dateutil": "python-dateutil",
    "apex": "apex",
    "transformer_engine": "transformer-engine",
    "causal_conv1d_cuda": "causal-conv1d",
    "selective_scan_cuda": "mamba-ssm",
    "fused_layer_norm_cuda": "apex",
    "amp_C": "apex",
    "bitsandbytes": "bitsandbytes",
    "pkg_resources": "setuptools",
    "bt_decode": "bt-decode",
    "bittensor_wallet": "bittensor-wallet",
    "async_substrate_interface": "async-substrate-interface",
    "substrateinterface": "substrate-interface",
    "hf_transfer": "hf-transfer",
    "hf_xet": "hf-xet",
    "_C": "",
}
"""The PyPI package for each module; an empty string means that the package is unknown."""


def named(detail: str, texts: Iterable[str]) -> str:
    """The first match for `detail`, a key of `_PATTERNS`, in `texts`; empty if nothing matches."""
    for text in texts:
        for pattern in _PATTERNS[detail]:
            # re compiles and caches each pattern on first use, so none of them slows down the
            # guard's start.
            match = re.search(pattern, text[:_MAX_LENGTH])
            if match is None:
                continue
            found = match[1].rstrip(".")
            if detail == "package":
                found = _DISTRIBUTIONS.get(found, found)
                found = "" if re.fullmatch(_FOLDERS, found) else found
            if found and found not in _NOT_A_REPO:
                return found
    return ""


def filled(text: str, lines: Iterable[str]) -> str:
    """Replace each `{detail|default}` in `text` with the detail from the lines, or else with the
    default. `[[…]]` stands only if the lines name every `{detail}` in it."""
    lines = tuple(lines)

    def part(optional: re.Match[str]) -> str:
        named_all = all(named(place[1], lines) for place in _PLACE.finditer(optional[1]))
        return optional[1] if named_all else ""

    whole = _OPTIONAL.sub(part, text)
    return _PLACE.sub(lambda place: named(place[1], lines) or place[2] or "", whole).strip()


def unknown(text: str) -> list[str]:
    """Details that `text` uses but that no pattern finds, or that have neither a default nor an
    optional part around them."""
    bare = _PLACE.findall(_OPTIONAL.sub("", text))
    names = [place[1] for place in _PLACE.finditer(text) if place[1] not in _PATTERNS]
    return names + [name for name, default in bare if not default]
