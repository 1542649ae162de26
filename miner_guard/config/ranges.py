"""Types for settings that are numbers with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """The bounds of a number. None means no bound on that side; infinity and NaN are never
    allowed."""

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
