"""Rules on a log of requests: why too little was cached.

A rule is a module of this folder with `check(case) -> Finding`. A finding has counts and kinds, never text of a
request.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from ragorder.adapters.doctor.case import Case
from ragorder.adapters.doctor.finding import Finding

__all__ = ["Rule", "all_rules"]


class Rule(Protocol):
    def check(self, case: Case) -> Finding: ...


def all_rules() -> list[Rule]:
    names = sorted(each.name for each in iter_modules(__path__))
    return [cast(Rule, import_module(f"{__name__}.{name}")) for name in names]
