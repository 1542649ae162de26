"""What a setting may be: numbers with bounds, and the names of the usual ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """Allowed values of a number; `None` leaves that side open, but infinity is no number."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = handler(source)
        bounds = {"ge": self.ge, "gt": self.gt, "le": self.le}
        schema.update({name: limit for name, limit in bounds.items() if limit is not None})
        if schema["type"] == "float":
            schema["allow_inf_nan"] = False
        return schema


Positive = Annotated[float, Range(gt=0)]
NotNegative = Annotated[float, Range(ge=0)]
Percent = Annotated[float, Range(ge=0, le=100)]
Share = Annotated[float, Range(ge=0, le=1)]
Count = Annotated[int, Range(ge=0)]
AtLeastOne = Annotated[int, Range(ge=1)]
