"""Locks in a child process: one that another thread of the parent held at the fork is never given back there."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Forked", "follow"]


class Forked(Protocol):
    def after_fork(self) -> None:
        """Called in the child, before anything else is: none of the parent's other threads goes on."""


_followed: WeakSet[Forked] = WeakSet()


def follow(each: Forked) -> None:
    """Have an object told of forks, as long as it lives."""
    _followed.add(each)


def _tell() -> None:
    for each in list(_followed):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
