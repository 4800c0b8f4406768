"""Types of option values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

__all__ = ["ParamType", "Size"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SPELLED = {unit.lower(): size for unit, size in _UNITS.items()}

if TYPE_CHECKING:
    from click import ParamType
else:

    class ParamType(click.ParamType):
        """click's base class, subscripted for type checkers only: at run time it is generic from click 8.4 on."""

        def __class_getitem__(cls, value: Any) -> type:
            return cls


class Size(ParamType[int]):
    """Bytes: a number, with a unit or without."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?) ?([A-Za-z]*)", value.strip())
        size = _SPELLED.get(found[2].lower()) if found else None
        if found is None or size is None:
            self.fail(f"{value!r} is no size: write 8GiB, 500MB or a number of bytes", param, ctx)
        return round(float(found[1]) * size) if "." in found[1] else int(found[1]) * size
