"""A far end, an orderer that records, and proxies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.far_end import Answer, FarEnd
from support.proxied import WHOLE, Proxy, Start
from support.sent_requests import CERTIFICATES, RecordingOrderer

from ragorder.adapters.proxy import make_app


@pytest.fixture
def far_end() -> FarEnd:
    return FarEnd(Answer([WHOLE]))


@pytest.fixture
def upstream(far_end: FarEnd, serve: Callable[[Any], str]) -> str:
    return serve(far_end)


@pytest.fixture
def orderer() -> RecordingOrderer:
    return RecordingOrderer()


@pytest.fixture
def start(upstream: str, orderer: RecordingOrderer, serve: Callable[[Any], str]) -> Iterator[Start]:
    """Starts proxies of the far end."""
    clients: list[httpx2.Client] = []

    def start(**options: Any) -> Proxy:
        url = serve(make_app(options.pop("orderer", orderer), **{"upstream": upstream} | options))
        clients.append(httpx2.Client(base_url=url, timeout=60, trust_env=False, verify=CERTIFICATES))
        return Proxy(url, clients[-1])

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def proxy(start: Start) -> Proxy:
    return start()
