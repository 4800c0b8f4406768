"""`ParamType`: click's base class of option types, subscripted for type checkers only.

At run time it is generic from click 8.4 on, and applications still bring click 8.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

__all__ = ["ParamType"]

if TYPE_CHECKING:
    from click import ParamType
else:

    class ParamType(click.ParamType):
        def __class_getitem__(cls, value: Any) -> type:
            return cls
