"""The embedded engine as an application in this process: requests to it, and what it should answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from ragorder.adapters.embedded import AppTransport, EngineWorker

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SYSTEM = {"role": "system", "content": "Answer from the documents, please."}
TEXTS = {name: f"{name} is a document about {name}. " * 12 for name in "abcdefgh"}
LONGEST = 2048
WORD = "Zanzibar"
"""What no log may quote."""

Client = httpx2.AsyncClient
Load = Callable[..., EngineWorker]


@asynccontextmanager
async def reaching(app: Any) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(transport=AppTransport(app), base_url="http://embedded", timeout=60) as client:
        yield client


async def complete(client: Client, prompt: Any = "a is a document", **fields: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(client: Client, content: Any = "Which document?", **fields: Any) -> Any:
    messages = [SYSTEM, {"role": "user", "content": content}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which must end as one does."""
    response = await client.post(path, json={"temperature": 0, "max_tokens": 8, **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def fails_in_a_stream(client: Client, body: dict[str, Any], fail: Callable[[], Any] = lambda: None) -> Any:
    """The error at the end of a stream, which fails after its first piece."""
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True, "ignore_eos": True}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"]
        fail()
        *_, last = [line async for line in lines if line]
    return json.loads(last.removeprefix("data: "))["error"]


async def refusal(client: Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(path, content=content)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def facts(*ends: int, **others: Any) -> dict[str, Any]:
    """What says where documents end."""
    return {"kv_transfer_params": {"ragorder": {"documents": list(ends), **others}}}


def prompt_of(worker: EngineWorker, names: str, question: str = "Which?") -> tuple[list[int], list[int]]:
    """Tokens, and where the beginning and each document end."""
    encode = worker.engine.tokenizer.encode
    tokens = encode("Answer from the documents, please. ")
    ends = [len(tokens)]
    for name in names:
        tokens += encode(TEXTS[name])
        ends.append(len(tokens))
    return tokens + encode(question), ends
