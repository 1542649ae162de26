"""Classifies a model as small or large: by source 002's names, else by parameter count."""

from __future__ import annotations

import re

SMALL, LARGE, UNKNOWN = "small", "large", "unknown"

_NAMES: tuple[tuple[str, str], ...] = (
    (r"resnet(18|34)(?!\d)", SMALL),
    (r"efficientnetb[012](?!\d)", SMALL),
    (r"mobilenet", SMALL),
    (r"tabular|mlp", SMALL),
    (r"^linear|logistic|svm", SMALL),
    (r"(small|simple)cnn", SMALL),
    (r"efficientnetb[4567](?!\d)", LARGE),
    (r"efficientnetv2l", LARGE),
    (r"resnet(101|152)(?!\d)", LARGE),
    (r"^vit|visiontransformer", LARGE),
    (r"bert|gpt", LARGE),
    (r"densenet161", LARGE),
)
"""Patterns that match a lower-case name without punctuation, from source 002's lists. For names in
neither list (ResNet-50, EfficientNet-B3, Llama), the parameter count settles it."""


def size_of(name: str | None, params: int | None, large_from: int) -> str:
    """`small`, `large`, or `unknown` if neither the name nor the parameter count settles it."""
    plain = re.sub(r"[^a-z0-9]", "", (name or "").rpartition("/")[2].lower())
    for pattern, size in _NAMES:
        if plain and re.search(pattern, plain):
            return size
    if params is None:
        return UNKNOWN
    return LARGE if params >= large_from else SMALL
