"""The proxy's work on bodies, without the network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.proxy import DocumentTemplate
from ragorder.adapters.proxy.bodies.parsing import BodyParser, ParsedBody, Route
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.adapters.proxy.ordering import OrderedRequest, RequestOrderer


class Bodies:
    """A parser and an orderer of bodies, made as `make_app` makes them."""

    def __init__(
        self,
        template: str | None = None,
        tokenizer: Any = None,
        builder: PromptBuilder | None = None,
        orderer: Orderer | None = None,
        *,
        templates: Sequence[DocumentTemplate] = (),
        send_facts: bool = False,
        on_sent: Any = None,
        **options: Any,
    ) -> None:
        self.orderer = orderer or Orderer(block_size=16, strict=True)
        builder = builder or PromptBuilder("", tokenizer=tokenizer)
        tokens = TokenCounter(builder, tokenizer)
        found = templates if template is None else DocumentTemplate(template)
        options.setdefault("warn", self.orderer.degrade)
        self.headers: dict[str, str] = {}
        self.parser = BodyParser(builder, tokens, found, send_facts=send_facts, **options)
        self.requests = RequestOrderer(self.orderer, send_facts=send_facts, exact=tokens.exact, on_sent=on_sent)

    def parse(self, route: Route, content: bytes) -> ParsedBody | None:
        return self.parser.parse(route, content)

    def found(self, body: Any, route: Route = "chat") -> ParsedBody:
        parsed = self.parse(route, json.dumps(body).encode())
        assert parsed is not None
        return parsed

    def order(self, parsed: ParsedBody, upcoming: Sequence[ParsedBody] = ()) -> OrderedRequest:
        return self.requests.order(parsed, upcoming)

    def ordered(self, content: bytes, route: Route = "chat") -> bytes:
        """The body that is forwarded; no answer comes."""
        parsed = self.parse(route, content)
        return content if parsed is None else self.order(parsed).take_body()

    def forwarded(self, body: Any, route: Route = "chat") -> Any:
        """As `ordered`, of JSON."""
        return json.loads(self.ordered(json.dumps(body).encode(), route))

    def served(self, body: Any, route: Route = "chat", *, status: int = 200, usage: Any = None) -> Any:
        """The body that is forwarded; its answer came. The headers of the answer are in `headers`."""
        content = json.dumps(body).encode()
        parsed = self.parse(route, content)
        self.headers = {}
        if parsed is not None:
            request = self.order(parsed)
            content = request.take_body()
            self.answer(request, status=status, usage=usage)
        return json.loads(content)

    def answer(self, request: OrderedRequest, *, status: int = 200, usage: Any = None) -> None:
        """The answer comes in one piece, with this usage or none."""
        request.begin(status, [(b"content-type", b"application/json")])
        self.headers = {name.decode(): value.decode() for name, value in request.headers()}
        if usage is not None:
            request.feed(json.dumps({"usage": usage}).encode())
            request.complete = True
        request.end()
