"""Dataclasses for the sections of a JSON document that another version may have written.

If a section is missing or a value has an unexpected type, the field falls back to its default, so
that no reader has to check types."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

_Section = TypeVar("_Section", bound="Section")


class Section:
    """A section of the document. Subclasses are dataclasses whose fields all have defaults."""

    @classmethod
    def from_json(cls: type[_Section], document: Any) -> _Section:
        """Read the section; a field whose value is missing or unexpected gets its default."""
        if not isinstance(document, Mapping):
            return cls()
        values = {}
        for name, read in _readers(typing.cast(Any, cls)).items():
            value = document.get(name)
            if value is not None and (value := read(value)) is not None:
                values[name] = value
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The section as it is written to the document."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(typing.cast(Any, self))}


class LastRead(Generic[_Section]):
    """Reads sections. Parses each document only once, because the guard composes one every few
    seconds but its monitors read it on every tick."""

    def __init__(self, section: type[_Section]) -> None:
        self._section = section
        self._document: Any = None
        self._read = section()

    def of(self, document: Any) -> _Section:
        """The section that `document` contains. The document must not change afterwards."""
        if document is not self._document:
            self._document, self._read = document, self._section.from_json(document)
        return self._read


_Reader = Callable[[Any], Any]
"""Converts a value from JSON to the field's type; returns None if it does not fit."""


@functools.cache
def _readers(section: Any) -> Mapping[str, _Reader]:
    hints = typing.get_type_hints(section)
    return {f.name: _reader(hints[f.name]) for f in fields(section)}


def _reader(hint: Any) -> _Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        readers = [_reader(part) for part in arguments if part is not type(None)]
        if len(readers) == 1:
            return readers[0]
        return lambda value: next((v for read in readers if (v := read(value)) is not None), None)
    if origin is Mapping:
        return _table_reader(_reader(arguments[1]))
    if origin is Sequence:
        return lambda value: tuple(value) if isinstance(value, (list, tuple)) else None
    if is_dataclass(hint):
        section: type[Section] = typing.cast(Any, hint)
        return lambda value: section.from_json(value) if isinstance(value, Mapping) else None
    if hint is Any:
        return lambda value: value
    accepted = (int, float) if hint is float else hint
    return lambda value: value if isinstance(value, accepted) else None


def _table_reader(read: _Reader) -> _Reader:
    def table(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return None
        known = {str(key): read(item) for key, item in value.items()}
        return {key: item for key, item in known.items() if item is not None}

    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
