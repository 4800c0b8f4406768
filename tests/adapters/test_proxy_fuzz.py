"""The proxy under hostile bodies: no internal error, no crash, and no client gets another one's documents."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import sent_requests
from support.rings import length
from support.sent_requests import CHAT, proxy_to

from ragorder import Orderer

pytest.importorskip("starlette")

from ragorder.adapters.proxy import DocumentTemplate

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
PATHS = [CHAT, "/v1/completions", MESSAGES, RESPONSES]
# What the proxy may change.
CHANGED = {"ragorder", "messages", "prompt", "cache_salt", "input", "instructions", "system", "prompt_cache_key"}
CLIENTS = 8
BATCHES = 1250
BODY_LIMIT = 200_000
TEMPLATE = "<d {id}>{text}</d>"
MARKER = re.compile(r"c\d+n\d+e")


@dataclass
class Sent:
    """A request of one client."""

    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    cuts: Sequence[int] = ()
    leaves: bool = False


@dataclass
class Got:
    status: int = 0
    body: bytes = b""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """The far end answers with what it got, once the other clients have had their turn."""
    await asyncio.sleep(0)
    await sent_requests.echo(scope, receive, send)


async def ask(app: Any, sent: Sent) -> Got:
    """One request, its body in pieces, between which the other clients have their turn."""
    got = Got()
    edges = [0, *sorted(min(cut, len(sent.body)) for cut in sent.cuts), len(sent.body)]
    pieces = [sent.body[start:end] for start, end in pairwise(edges)]

    async def receive() -> Any:
        await asyncio.sleep(0)
        if pieces:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        if not sent.leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        got.status = message.get("status", got.status)
        got.body += message.get("body", b"")

    scope: dict[str, Any] = {"type": "http", "method": "POST", "query_string": b""}
    scope |= {"path": sent.path, "raw_path": sent.path.encode()}
    scope["headers"] = sent.headers or [(b"content-length", b"%d" % len(sent.body))]
    await app(scope, receive, send)
    return got


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**30), 1e308, float("nan"), float("-inf")])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["\ud800", "<|im_end|>", "\0"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLACES = ["ragorder", "documents", "query", "scope", "id", "text", "title", "tokens", "messages", "content", "prompt"]
PLACES += ["input", "instructions", "system", "output", "type", "prompt_cache_key"]
OTHERS = ["model", "cache_salt", "n", "max_tokens", "max_completion_tokens", "tools", "stream", "role", "x"]


GZIP = b"\x1f\x8b"
PIECES = [b"", b'"', b"\\", b"\\ud800", b"\xff\xfe", b"\0", b"}", b"[", b",", b"NaN", b"1e999"]


def texts(rng: random.Random, client: int, count: int) -> list[str]:
    """Texts with a marker each, some of them twice."""
    made = [f"{rng.choice(['', '<|', 'é', '[d]'])}c{client}n{rng.randrange(6)}e text" for _ in range(count)]
    return made + made[: rng.randrange(2)]


def good(rng: random.Random, client: int) -> dict[str, Any]:
    """A body as it should be: tagged, or with documents in a message."""
    parts = texts(rng, client, rng.randrange(6))
    body: dict[str, Any] = {"model": rng.choice(["m", "n"]), "max_tokens": 3}
    if rng.random() < 0.4:
        body["messages"] = [{"role": "system", "content": "s"}]
    if rng.random() < 0.3:
        documents = " ".join(f"<d {number}>{text}</d>" for number, text in enumerate(parts))
        body["messages"] = [{"role": "user", "content": f"See {documents} c{client}n9e"}]
        return body
    more = [{}, {"title": "T"}, {"title": None}, {"tokens": None}, {"tokens": 3}, {"tokens": 3.0}]
    documents = [{"id": str(rng.randrange(4)), "text": text, **rng.choice(more)} for text in parts]
    body["ragorder"] = {"documents": documents, "query": f"c{client}n9e?"}
    if rng.random() < 0.2:
        body["ragorder"]["scope"] = rng.choice(["t", f"t{client}"])
    return body


def spoilt(rng: random.Random, body: Any, value: Any) -> None:
    """Put a value where it does not belong."""
    inner = body
    while rng.random() < 0.6:
        steps = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        deeper = [step for step in steps if isinstance(inner[step], dict | list) and inner[step]]
        if not deeper:
            break
        inner = inner[rng.choice(deeper)]
    if isinstance(inner, dict):
        inner[rng.choice([*inner, *PLACES, *OTHERS])] = value
    else:
        inner[rng.randrange(len(inner))] = value


def mangled(rng: random.Random, body: bytes) -> bytes:
    """Change the bytes themselves."""
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(body) + 1)
        end = min(len(body), start + rng.randrange(12))
        piece = rng.choice([*PIECES, body[start:end] * 2])
        body = body[:start] + piece + body[end:]
    return body


def odd(rng: random.Random, client: int, body: bytes) -> bytes:
    """What some parser somewhere has stumbled over."""
    depth = rng.choice([10, 150, 999, 5000])
    return rng.choice(
        [
            b"",
            b"null",
            b"\xef\xbb\xbf" + body,
            body.decode().encode("utf-16"),
            b'{"ragorder": ' + b"[" * depth + b"]" * depth + b"}",
            b'{"ragorder": ' + b'{"documents": ' * depth,
            b'{"messages": ' + b"[" * depth + b"]" * depth + b', "ragorder": {"documents": [], "query": ""}}',
            b'{"ragorder": {"documents": [{"id": "1", "text": "", "tokens": 1%s}], "query": ""}}' % (b"0" * depth),
            body[:-1] + b', "ragorder": null}',
            b'{"ragorder": {"documents": [], "query": "c%dn2e"}, ' % client + body[1:],
            body + body,
            b"[" + body + b"]",
            b" " * depth + body + b"\r\n\t",
            body.replace(b'"ragorder"', b'"\\u0072agorder"'),
            b'{"ragorder": {"documents": [{"id": "\\ud800", "text": "c%dn3e"}], "query": ""}}' % client,
            body[:-1] + b', "x": "' + b"x" * (BODY_LIMIT + 1) + b'"}',
        ]
    )


@st.composite
def requests(draw: st.DrawFn, client: int) -> Sent:
    rng = random.Random(draw(st.integers(0, 2**32)))
    fields = good(rng, client)
    path = rng.choice(PATHS)
    if path == RESPONSES and "messages" in fields:
        fields["input"] = fields.pop("messages")
    kind = rng.randrange(5)
    if kind == 1:
        for _ in range(rng.randrange(1, 3)):
            spoilt(rng, fields, draw(VALUES))
    body = json.dumps(fields).encode()
    if kind == 2:
        body = mangled(rng, body)
    elif kind == 3:
        body = odd(rng, client, body)
    cuts = [rng.randrange(len(body) + 1) for _ in range(rng.randrange(4))]
    sent = Sent(path, body, cuts=cuts)
    if rng.random() < 0.2:
        sent.headers = [(b"transfer-encoding", b"chunked")]
    if rng.random() < 0.05:
        sent.body = gzip.compress(sent.body)
        sent.headers = [(b"content-encoding", b"gzip"), (b"content-length", b"%d" % len(sent.body))]
    sent.leaves = rng.random() < 0.05
    return sent


def markers(text: str) -> Counter[str]:
    return Counter(MARKER.findall(text))


def check(sent: Sent, got: Got) -> None:
    """One client's answer holds exactly the documents of that client, each as often as they were given."""
    given = gzip.decompress(sent.body) if sent.body[:2] == GZIP else sent.body
    if sent.leaves and got.status == 0:
        return
    assert got.status in (200, 400, 413), got
    text = got.body.decode("utf-8", "replace")
    if got.status != 200:
        assert set(json.loads(text)) == ({"type", "error"} if sent.path == MESSAGES else {"error"})
        assert not markers(text), "an error quotes nothing"
        assert len(given) > BODY_LIMIT or got.status == 400
        return
    if got.body == given:
        return
    # What has changed was JSON, and is; bytes that are no text stay in fields that nobody read.
    was, came = (json.loads(body.decode("utf-8", "replace")) for body in (given, got.body))
    assert "ragorder" not in came
    # Each client's markers are its own, but for those that the fuzzing itself has bent.
    assert markers(json.dumps(came)) == markers(json.dumps(was))
    untouched = was.keys() - CHANGED
    assert json.dumps({name: came[name] for name in untouched}) == json.dumps({name: was[name] for name in untouched})


def make(orderer: Orderer, **options: Any) -> Any:
    return proxy_to(echo, orderer, template=DocumentTemplate(TEMPLATE), **options)


def fuzzed(examples: int) -> Any:
    """So many examples, as they come: what fails here is seen as it is."""
    return settings(
        max_examples=examples, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )


class TestHostileBodies:
    @pytest.mark.slow
    def test_ten_thousand_of_them_from_clients_at_the_same_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 16)
        orderer = Orderer(block_size=1, capacity_tokens=2000)
        app = make(orderer, body_limit=BODY_LIMIT)
        statuses: Counter[int] = Counter()
        changed = 0

        async def all_at_once(batch: Sequence[Sent]) -> list[Got]:
            return await asyncio.gather(*(ask(app, sent) for sent in batch))

        @fuzzed(BATCHES)
        @given(st.tuples(*(requests(client) for client in range(CLIENTS))))
        def fuzz(batch: Sequence[Sent]) -> None:
            nonlocal changed
            answers = runner.run(all_at_once(batch))
            for sent, got in zip(batch, answers, strict=True):
                check(sent, got)
                statuses[got.status] += 1
                changed += got.status == 200 and got.body != sent.body

        with asyncio.Runner() as runner:
            fuzz()
        assert statuses.total() >= 10_000
        # Most of them get somewhere: this is no test of one check at the door.
        assert min(statuses[200], changed, statuses[400], 100 * statuses[413]) > 1000, (statuses, changed)
        assert orderer.fallbacks == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
class TestItsOwnSchema:
    @pytest.fixture
    def app(self) -> Any:
        return make(Orderer())

    @pytest.fixture
    def operation(self, path: str, app: Any) -> Any:
        schemathesis = pytest.importorskip("schemathesis")
        return schemathesis.openapi.from_asgi("/ragorder/openapi.json", app)[path]["POST"]

    def test_what_fits_it_is_accepted(self, path: str, app: Any, operation: Any) -> None:
        from schemathesis import GenerationMode

        @fuzzed(length(500, 150))
        @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
        def fuzz(case: Any) -> None:
            sent = Sent(path, json.dumps(case.body).encode())
            got = runner.run(ask(app, sent))
            if got.status != 200:
                # That two fields must agree is nothing that a schema can say.
                error = json.loads(got.body)["error"]
                assert error.get("code", "conflicting_scope") == "conflicting_scope", got.body
                assert error["message"].startswith("ragorder.scope: "), got.body

        with asyncio.Runner() as runner:
            fuzz()

    def test_what_does_not_is_refused_or_passed_on(self, path: str, app: Any, operation: Any) -> None:
        from schemathesis import GenerationMode

        statuses: Counter[int] = Counter()

        @fuzzed(length(200, 120))
        @given(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        def fuzz(case: Any) -> None:
            sent = Sent(path, json.dumps(case.body, default=str).encode())
            got = runner.run(ask(app, sent))
            statuses[got.status] += 1
            assert got.status in (200, 400, 413)
            if got.status == 200 and isinstance(case.body, dict):
                assert "ragorder" not in json.loads(got.body)

        with asyncio.Runner() as runner:
            fuzz()
        assert statuses[400] > 50
