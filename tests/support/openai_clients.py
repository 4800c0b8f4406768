"""Both clients of OpenAI-compatible servers, used alike, on a scripted server and with an orderer that records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from ragorder import Document, PromptBuilder
from ragorder.adapters.openai import Answer, AsyncOrderedClient, OrderedClient
from ragorder.ordering import RequestOutcome
from support.scripted_chat import Server
from support.sent_requests import RecordingOrderer

QUERY = "Which secret is kept where?"
DOCUMENTS = [Document(f"d{number}", f"Secret number {number} is kept in drawer {number}.") for number in range(4)]
DISCARDED = RequestOutcome(False)
CONFIRMED = RequestOutcome(True)
CONFIRMED_GOOD = RequestOutcome(True, 64, 102, 100)
"""With the usage of `scripted_chat.GOOD`."""


class Sync:
    """The synchronous client, as the tests use both."""

    def __init__(self, url: str, options: dict[str, Any], **connection: Any) -> None:
        self.client: Any = OrderedClient(openai.OpenAI(base_url=url, **connection), **options)

    def run(self, result: Any) -> Any:
        """What a call returns, awaited if it is asynchronous."""
        return result

    def generate(self, *arguments: Any, **options: Any) -> Answer:
        answer: Answer = self.run(self.client.generate(*arguments, **options))
        return answer

    def stream(self, *arguments: Any, take: int = 1000, of: Any = None, **options: Any) -> tuple[Any, list[str]]:
        """The stream after so many pieces were taken from it and it was closed, and the pieces."""
        pieces: list[str] = []
        with (of or self.client).stream(*arguments, **options) as stream:
            while len(pieces) < take and (piece := next(stream, None)) is not None:
                pieces.append(piece)
        return stream, pieces

    def close(self) -> None:
        pass


class Async(Sync):
    """The asynchronous client, driven from outside its event loop."""

    def __init__(self, url: str, options: dict[str, Any], **connection: Any) -> None:
        self.runner = asyncio.Runner()
        self.openai = openai.AsyncOpenAI(base_url=url, **connection)
        sleep = options.pop("sleep")

        async def async_sleep(seconds: float) -> None:
            sleep(seconds)

        self.client = AsyncOrderedClient(self.openai, sleep=async_sleep, **options)

    def run(self, result: Any) -> Any:
        return self.runner.run(result)

    def stream(self, *arguments: Any, take: int = 1000, of: Any = None, **options: Any) -> tuple[Any, list[str]]:
        async def read() -> tuple[Any, list[str]]:
            pieces: list[str] = []
            async with (of or self.client).stream(*arguments, **options) as stream:
                while len(pieces) < take and (piece := await anext(stream, None)) is not None:
                    pieces.append(piece)
            return stream, pieces

        return self.run(read())

    def close(self) -> None:
        self.run(self.openai.close())
        self.runner.close()


class Connect:
    """Makes clients of one kind for a server; `slept` are the seconds that they waited before a retry."""

    def __init__(self, kind: type[Sync], server: Server, url: str, orderer: RecordingOrderer) -> None:
        self.kind, self.server, self.url, self.orderer = kind, server, url, orderer
        self.builder = PromptBuilder("Be brief.")
        self.slept: list[float] = []
        self.made: list[Sync] = []

    def __call__(self, *, timeout: float = 60, max_retries: int = 0, **options: Any) -> Any:
        options = {"model": "served", "orderer": self.orderer, "builder": self.builder} | options
        options["sleep"] = self.slept.append
        connection = {"api_key": "key", "timeout": timeout, "max_retries": max_retries}
        self.made.append(self.kind(self.url, options, **connection))
        return self.made[-1]


@contextmanager
def connecting(kind: type[Sync], url: str | None = None, **options: Any) -> Iterator[Connect]:
    """Clients of a scripted server, or of the one at `url`. In the end every ordering has been finished."""
    orderer = RecordingOrderer(**{"block_size": 4} | options)
    with Server() as server:
        connect = Connect(kind, server, url or server.url, orderer)
        yield connect
        for made in connect.made:
            made.close()
    assert len(orderer.finished) == len(orderer.orderings)
