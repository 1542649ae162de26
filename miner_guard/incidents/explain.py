"""Explains a whole log, or one incident: its cause and fixes, with what its lines name filled in.

A text of the knowledge files may ask the lines for a detail, such as a package, path, host or port:
`{path|the disk}` is the path or else `the disk`, and `[[ in {path}]]` stands only if the
lines name the path. No placeholder reaches a reader.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from miner_guard.incidents import logs, oom
from miner_guard.incidents.knowledge import Fix, Knowledge
from miner_guard.incidents.root import Incident, RootCauseAnalyzer
from miner_guard.incidents.scan import Scanner

_PLACE = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
_MAX_LENGTH = 4096
"""Maximum number of characters of a line to search."""

_FOLDERS = "validators|uploads|neurons|miner|template|utils|src|scripts|config|models?|data|tools"
"""Modules that are folders of a miner's own repository. Some name unrelated packages on PyPI."""

_QUOTED_PATH = r"['\"](/?[\w.@+~-]+(?:/[\w.@+~ -]+)*)['\"]"
_DETAILS: Mapping[str, tuple[str, ...]] = {
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
    # No index has the guard: whoever registers its name there would be installed.
    **dict.fromkeys(("_C", "miner_guard", "monitoring_cost_tracker"), ""),
}
"""The PyPI package for each module; an empty string means that none is to be named."""


def named(detail: str, texts: Iterable[str]) -> str:
    """The first match for `detail`, a key of `_DETAILS`, in `texts`; empty if nothing matches."""
    for text in texts:
        for pattern in _DETAILS[detail]:
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
    names = [place[1] for place in _PLACE.finditer(text) if place[1] not in _DETAILS]
    return names + [name for name, default in bare if not default]


_CHUNK = 1 << 18
_SAMPLE = 400


@dataclass(frozen=True)
class Explained:
    """One incident in a log, in human-readable form."""

    label: str
    severity: str
    restart: str
    applies: str
    line: int
    excerpt: str
    cause: str
    fixes: tuple[str, ...]
    sources: tuple[str, ...]
    """Source of each fix; empty if the advice is our own."""

    count: int
    ranks: tuple[int, ...]
    root: bool

    def as_dict(self) -> dict[str, Any]:
        """The document that `explain --json` prints."""
        return {
            "label": self.label,
            "severity": self.severity,
            "line": self.line,
            "excerpt": self.excerpt,
            "cause": self.cause,
            "fixes": list(self.fixes),
            "sources": list(self.sources),
            "root": self.root,
        }


@dataclass(frozen=True)
class LogExplanation:
    """The faults found in a log."""

    findings: tuple[Explained, ...]
    lines: int
    size: int
    """Size of the log in bytes, as UTF-8."""

    @property
    def root(self) -> Explained | None:
        """The root cause of the others; None if nothing is wrong."""
        return next((finding for finding in self.findings if finding.root), None)

    def as_dict(self) -> dict[str, Any]:
        """The document that `explain --json` prints."""
        return {
            "root_cause": None if self.root is None else self.root.label,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def explain(
    log: BinaryIO, knowledge: Knowledge, training: oom.Training, redact: Callable[[str], str] = str
) -> LogExplanation:
    """Read all of `log` and explain it. Raises only OSError, if the log cannot be read."""
    scanner, case = Scanner(knowledge, notices=True), RootCauseAnalyzer(knowledge)
    size, unfinished = 0, False
    for chunk in _in_utf_8(log):
        size += len(chunk)
        unfinished = not chunk.endswith(b"\n")
        case.add(scanner.feed(chunk))
    case.add(scanner.finish())
    found = [
        in_words(incident, knowledge, training, redact) for incident in case.incidents(scanner.line)
    ]
    return LogExplanation(tuple(found), scanner.line - 1 + unfinished, size)


def _in_utf_8(log: BinaryIO) -> Iterator[bytes]:
    """The log's bytes in chunks. PowerShell and Windows tools write logs in UTF-16."""
    chunk = log.read(_CHUNK)
    # ASCII in UTF-16 has a NUL in every second byte.
    half = len(chunk[:_SAMPLE]) // 2 or 1
    little, big = (chunk[:_SAMPLE][at::2].count(0) > 0.8 * half for at in (1, 0))
    if chunk.startswith(codecs.BOM_UTF16_LE) or (little and not big):
        codec = "utf-16-le"
    elif chunk.startswith(codecs.BOM_UTF16_BE) or (big and not little):
        codec = "utf-16-be"
    else:
        while chunk:
            yield chunk
            chunk = log.read(_CHUNK)
        return
    decoder = codecs.getincrementaldecoder(codec)("replace")
    while chunk:
        yield decoder.decode(chunk).lstrip("\ufeff").encode("utf-8", "replace")
        chunk = log.read(_CHUNK)


def in_words(
    incident: Incident,
    knowledge: Knowledge,
    training: oom.Training,
    redact: Callable[[str], str] = str,
) -> Explained:
    """One incident's cause and fixes, with the details from its lines filled in."""
    label, sighting = knowledge.labels[incident.label], incident.first
    seen = (sighting, *incident.sightings)
    # The reason often follows on the line after the one that names the error.
    exact = next((s for s in seen if s.fix), sighting)
    notice = sighting.role == "notice"
    cause, fixes = sighting.cause or exact.cause or label.cause, list(label.fixes) * (not notice)
    if exact.fix:
        fixes.insert(0, Fix(exact.fix, exact.source))
    if incident.label == "cuda_oom":
        cause, fixes = _out_of_memory(incident, cause, fixes, training)
    texts = [redact(s.text) for s in seen]
    told = [Fix(filled(fix.do, texts), fix.source) for fix in fixes]
    told = [fix for fix in told if fix.do]
    return Explained(
        incident.label,
        "info" if notice else label.severity,
        "never" if notice else sighting.restart or label.restart,
        label.applies,
        sighting.line,
        logs.excerpt(redact(sighting.text)),
        f"{redact(filled(cause, texts))}{_where(incident)}",
        tuple(fix.do for fix in told),
        tuple(fix.source for fix in told),
        incident.count,
        tuple(incident.ranks),
        incident.root,
    )


def _out_of_memory(
    incident: Incident, cause: str, fixes: list[Fix], training: oom.Training
) -> tuple[str, list[Fix]]:
    parsed = [oom.parse(s.text) for s in (incident.first, *incident.sightings)]
    numbers = next((numbers for numbers in parsed if numbers.kind != "unknown"), parsed[0])
    shown = oom.describe(numbers)
    parts = [cause, f"It {shown}." if shown else "", oom.meaning(numbers)]
    return " ".join(part for part in parts if part), oom.fixes(numbers, fixes, training)


def _where(incident: Incident) -> str:
    more = len(incident.ranks) - 8
    ranks = ", ".join(map(str, incident.ranks[:8])) + (f" and {more} more" if more > 0 else "")
    seen = f"seen {incident.count} times" if incident.count > 1 else ""
    on = f"on rank {ranks}" if len(incident.ranks) == 1 else f"on ranks {ranks}" if ranks else ""
    words = " ".join(part for part in (seen, on) if part)
    return f" ({words})" if words else ""
