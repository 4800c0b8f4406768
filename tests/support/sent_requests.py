"""Requests with documents as clients send them, over HTTP, and an orderer that keeps what became of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import httpx2

from ragorder import Orderer, Ordering
from ragorder.ordering import RequestOutcome
from support.waiting import eventually

# Made once: it takes longer than a request.
CERTIFICATES = httpx2.create_ssl_context()
CHAT = "/v1/chat/completions"
TEMPLATE = '<document id="{id}">\n{text}\n</document>'
TEXTS = {name: f"{name} is a document about {name}. " * 20 for name in "abcdefgh"}
# Events of a streamed chat.
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"yes"}}]}\n\n'


def tag(names: Iterable[str], query: str = "Which?", texts: dict[str, str] = TEXTS) -> dict[str, Any]:
    """The field of a tagged request."""
    return {"documents": [{"id": name, "text": texts[name]} for name in names], "query": query}


def tagged(
    names: Iterable[str], query: str = "Which?", *, texts: dict[str, str] = TEXTS, **fields: Any
) -> dict[str, Any]:
    """The body of a tagged chat."""
    return {"model": "m", "messages": [], "ragorder": tag(names, query, texts), **fields}


def plain(query: str = "?", **fields: Any) -> dict[str, Any]:
    """The body of a chat without documents."""
    return {"model": "m", "messages": [user(f"Question: {query}")], **fields}


def written(names: Iterable[str], ids: Sequence[object] | None = None) -> str:
    """Documents as an application writes them into a message; ids are their names, or else these."""
    names = list(names)
    return "\n".join(TEMPLATE.format(id=id, text=TEXTS[name]) for name, id in zip(names, ids or names, strict=True))


def asked(names: Iterable[str]) -> str:
    """Documents and then a question."""
    return f"{written(names)}\nWhich?"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def part(text: str, kind: str = "text", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, **fields}


def names_in(body: object) -> str:
    """The documents of a body or prompt, in their order."""
    return "".join(dict.fromkeys(re.findall(r"(\w) is a document about", str(body))))


def post(url: str, body: Any, path: str = CHAT, **headers: str) -> httpx2.Response:
    """On a connection of its own."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"content-type": "application/json", **headers}
    with httpx2.Client(trust_env=False, timeout=120, verify=CERTIFICATES) as client:
        return client.post(url + path, headers=headers, **given)


def get(url: str) -> httpx2.Response:
    with httpx2.Client(trust_env=False, timeout=120, verify=CERTIFICATES) as client:
        return client.get(url)


def post_to(app: Any, body: Any, path: str = CHAT, **headers: str) -> httpx2.Response:
    """To an application that no server serves."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://proxy") as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"} | headers)

    return asyncio.run(ask())


async def received(receive: Any) -> bytes:
    """The whole body of a request to an application."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """A far end that answers with the body that it gets."""
    body = await received(receive)
    headers = [(b"content-type", b"application/json"), (b"x-own", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def proxy_to(far_end: Any, orderer: Orderer | None = None, **options: Any) -> Any:
    """The proxy before an application that no server serves."""
    from ragorder.adapters.proxy import make_app

    options = {"upstream": "http://far.end", "make_transport": lambda: httpx2.ASGITransport(far_end)} | options
    return make_app(orderer or Orderer(block_size=16, strict=True), **options)


class RecordingOrderer(Orderer):
    """An orderer that keeps its calls and orderings, and how these were finished."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"block_size": 16, "strict": True} | options)
        self.orderings: list[Ordering[Any]] = []
        self.finished: list[RequestOutcome] = []
        self.calls: list[dict[str, Any]] = []

    def order(self, documents: Iterable[Any], **options: Any) -> Ordering[Any]:
        documents = list(documents)
        ordering = super().order(documents, **options)
        ordering.add_done_callback(self.finished.append)
        self.orderings.append(ordering)
        self.calls.append({"documents": documents, **options})
        return ordering

    @property
    def unfinished(self) -> int:
        return len(self.orderings) - len(self.finished)

    @property
    def waiting(self) -> list[int]:
        """How many requests waited at each call."""
        return [len(call["waiting"]) for call in self.calls]

    def outcome(self) -> RequestOutcome:
        """How the only request was finished, once it is."""
        assert eventually(lambda: self.finished), "never finished"
        assert len(self.finished) == 1
        return self.finished[0]
