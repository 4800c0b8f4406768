"""Fixtures of adapters that are served: applications on ports of this machine, and what a command would serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """Serve applications until the end of the test; return their addresses."""
    from support.serving_app import serving

    with serving() as serve:
        yield serve


@pytest.fixture
def run_serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `ragorder serve`, or another command, up to the moment from which it would serve; return a `Served`."""
    from support.serve_process import serve_until_listening

    return partial(serve_until_listening, monkeypatch)
