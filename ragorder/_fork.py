"""Hooks that renew locks after a fork."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Forked", "follow"]


class Forked(Protocol):
    def after_fork(self) -> None:
        """Renew the state. Called first in the child process, where the parent's other threads do not exist."""


_followed: WeakSet[Forked] = WeakSet()


def follow(each: Forked) -> None:
    _followed.add(each)


def _tell() -> None:
    for each in list(_followed):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
