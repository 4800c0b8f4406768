"""Clients that ask one server for prompts again and again, and check every answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ragorder.eval.engines.server import VLLMServer
from support.chaos.asking import Answer, ask
from support.chaos.prompts import Prompts

_TIMEOUT_S = 60.0


class Load:
    """`clients` threads that ask `server`. Use it in a `with` block, at whose end they stop.

    `right`, `wrong` and `cached_tokens` count answers; `broken` are requests that the server answered with an error;
    those whose connection broke, as a killed server's do, are `lost`. After each of these its client pauses.
    """

    def __init__(
        self, server: VLLMServer, prompts: Prompts, expected: Sequence[Answer], *, clients: int = 4, seed: int = 0
    ) -> None:
        self.right = self.wrong = self.lost = self.broken = self.cached_tokens = self.prompt_tokens = 0
        self.worst = 0.0
        self._server = server
        self._prompts = prompts
        self._expected = expected
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._answered = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(f"{seed} {client}"),), daemon=True)
            for client in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S + 5)

    def wait_for_an_answer(self, timeout_s: float) -> float:
        """Until the server has answered for the first time, or so long; and what time.monotonic() says then."""
        self._answered.wait(timeout_s)
        return time.monotonic()

    def _ask(self, rng: random.Random) -> None:
        import httpx2

        with httpx2.Client(timeout=_TIMEOUT_S) as client:
            while not self._over.is_set():
                number = self._prompts.draw(rng)
                prompt = self._prompts.prompts[number]
                try:
                    answer = ask(client, self._server.base_url, self._server.model_name, prompt)
                except httpx2.HTTPStatusError:
                    self._count("broken")
                except httpx2.HTTPError:
                    self._count("lost")
                else:
                    self._check(answer, self._expected[number])
                    continue
                self._over.wait(0.2)

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + 1)

    def _check(self, answer: Answer, expected: Answer) -> None:
        self._answered.set()
        self._count("right" if answer.agrees(expected) else "wrong")
        with self._lock:
            self.worst = max(self.worst, answer.difference(expected))
            self.cached_tokens += answer.cached_tokens
            self.prompt_tokens += answer.prompt_tokens
