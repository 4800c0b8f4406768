"""Access control of the proxy, and warnings about its requests."""

from __future__ import annotations

import hmac
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import header
from ragorder.adapters.proxy.bodies.parsed import PassReason, digest_of
from ragorder.common.lru_cache import LRUCache

THIS_MACHINE = frozenset({"127.0.0.1", "::1", "localhost"})
# Without this header a page of another origin cannot read an error. Its key or origin has been checked, or the error
# only says that a key is needed.
_READABLE = (b"access-control-allow-origin", b"*")
_CHALLENGES = [(b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="ragorder", charset="UTF-8"')]


class AccessMiddleware:
    """Requires that `check` raises no HTTPError, except for `open_paths`."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None], *, open_paths: frozenset[str]) -> None:
        self._app = app
        self._check = check
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            self._check(scope)
        try:
            await self._app(scope, receive, send)
        except HTTPError as error:
            error.headers = [*error.headers, _READABLE]
            raise


def key_check(key: str) -> Callable[[Scope], None]:
    """Require the key as Bearer token, basic authentication's password (browsers) or x-api-key (Anthropic's clients),
    except for CORS preflights, which browsers send without it."""
    # Secret files often end in a newline, which no header can contain.
    expected = key.strip().encode()

    def check(scope: Scope) -> None:
        secrets = [_secret(value) for name, value in scope["headers"] if name == b"authorization"]
        secrets = secrets or [value for name, value in scope["headers"] if name == b"x-api-key"]
        if not (len(secrets) == 1 and hmac.compare_digest(secrets[0], expected)) and not _is_preflight(scope):
            raise HTTPError(
                401,
                "The proxy requires its API key: send it as Authorization: Bearer KEY or x-api-key: KEY (the api_key "
                "of an OpenAI or Anthropic client).",
                code="invalid_api_key",
                headers=[*_CHALLENGES, _READABLE],
            )

    return check


def host_check(hosts: Collection[str]) -> Callable[[Scope], None]:
    """Refuse other hosts and their web pages (DNS rebinding), for a proxy without a key."""
    known = frozenset(host.lower() for host in hosts)

    def is_foreign(address: bytes) -> bool:
        try:
            return b"@" in address or urlsplit(address.decode("latin-1")).hostname not in known
        except ValueError:
            return True

    def check(scope: Scope) -> None:
        sent_to = [value for name, value in scope["headers"] if name == b"host"]
        if len(sent_to) != 1 or is_foreign(b"//" + sent_to[0]):
            raise _refused("It was sent to a host", "Host", "foreign_host")
        if any(is_foreign(value) for name, value in scope["headers"] if name == b"origin"):
            raise _refused("It comes from a web page of a host", "Origin", "foreign_origin")

    return check


def _is_preflight(scope: Scope) -> bool:
    headers = scope["headers"]
    return (
        scope["method"] == "OPTIONS"
        and header(headers, b"origin") is not None
        and header(headers, b"access-control-request-method") is not None
        and header(headers, b"transfer-encoding") is None
        and header(headers, b"content-length") in (None, b"0")
    )


def _secret(authorization: bytes) -> bytes:
    scheme, _, secret = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return secret.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(secret.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _refused(what: str, header: str, code: str) -> HTTPError:
    message = f"{what} ({header}) that is not allowed: allow it (--allow-host), or require a key (--api-key)."
    return HTTPError(403, message, code=code)


# Requests, or texts, needed for a verdict; requests without a document that came before.
_ENOUGH = 20
_MANY = 100
_REMEMBERED = 16384

_NEVER_FOUND = (
    f"no documents were ordered: --template did not match two adjacent documents in any of {_ENOUGH} requests; "
    "compare it with a prompt that the proxy receives"
)
_NEVER_TAGGED = (
    f"no documents were ordered: none of {_ENOUGH} requests was tagged, and there is no --template to find documents "
    "in messages"
)
_CLIENT_MARKS = (
    "documents keep their order in requests whose client sets cache breakpoints (cache_control): the server's cache is "
    "assumed to resume only there; let --marks set the breakpoints, or give --no-marks if the cache finds any common "
    "prefix, as vLLM's does"
)
_RENAMED = (
    "document ids are not stable: the same text appears under new ids, and nothing after a new id is cached; give "
    "stable ids, or show none"
)
_OR_BY_PLACE = (
    "; these ids number positions, so --number-by-place helps as well, if the client reads x-ragorder-permutation in "
    "answers to map numbers to documents"
)
_NO_PLACES = (
    "; these ids are not 1, 2, … by position (do they number sources?), so --number-by-place would not change them"
)
_NEVER_THE_SAME_FRONT = (
    f"none of {_ENOUGH} requests shares anything with another: the text before their documents is never the same; put "
    "what changes (a date, a name, the question, other text that was found) after the documents"
)
_NEVER_THE_SAME_DOCUMENT = (
    f"none of {_MANY} requests shares anything with another: no document was in two of them; leave what changes (a "
    "rank, a score, a date) out of their texts, and compare two prompts with the same document"
)
_KEPT = (
    "--number-by-place did not change ids that are not 1, 2, … by position: names, or numbers of sources that several "
    "documents share; if such an id changes between requests, nothing after it is cached: give each source a stable "
    "id, such as its path, or show none"
)


class UnorderedRequests:
    """Warns if the first 20 requests have no documents (and adds `hint`), and once if a client sets breakpoints."""

    def __init__(
        self,
        on_passed: Callable[[str], None] | None,
        warn: Callable[[str], None],
        *,
        template: bool,
        hint: Callable[[], str] | None = None,
    ) -> None:
        self._on_passed = on_passed
        self._warn = warn
        self._template = template
        self._hint = hint or str
        self._without: int | None = 0
        self._told_of_marks = False

    def found(self) -> None:
        self._without = None

    def passed(self, reason: PassReason) -> None:
        # A counter that fails must not fail the request.
        with suppress(Exception):
            if self._on_passed is not None:
                self._on_passed(reason)
        if reason in ("client_marks", "no_marks"):
            self.found()
            if reason == "client_marks" and not self._told_of_marks:
                self._told_of_marks = True
                self._warn(_CLIENT_MARKS)
            return
        # Another thread may find documents meanwhile.
        without = self._without
        if without is None or reason in ("other_route", "compressed"):
            return
        self._without = without = without + 1
        if without == _ENOUGH:
            self._without = None
            self._warn((_NEVER_FOUND if self._template else _NEVER_TAGGED) + self._hint())


class _Detector:
    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._watching = True

    def _end(self, said: str) -> None:
        self._watching = False
        self._warn(said)


class RenamedIds(_Detector):
    """Warns if most recurring texts have new ids, such as ranks; with `by_place`, if ids do not number positions. Keeps
    16,384 digests (5 MB)."""

    def __init__(self, warn: Callable[[str], None], *, by_place: bool = False) -> None:
        super().__init__(warn)
        self._by_place = by_place
        self._known: LRUCache[bytes] = LRUCache(_REMEMBERED)
        self._again = self._renamed = 0
        self._are_places = True

    def look(self, salt: str | None, documents: Iterable[tuple[str, str]], *, are_places: bool) -> None:
        if not self._watching:
            return
        if self._by_place:
            if not are_places:
                self._end(_KEPT)
            return
        # A text that occurs twice in a request says nothing about the next one.
        for text, id in {text: id for id, text in documents}.items():
            key, name = digest_of(salt or "", text), digest_of(id)
            known = self._known.get(key)
            self._known.put(key, name)
            if known is not None:
                self._again += 1
                self._renamed += known != name
        self._are_places = self._are_places and are_places
        if self._renamed >= _ENOUGH and 2 * self._renamed > self._again:
            self._end(_RENAMED + (_OR_BY_PLACE if self._are_places else _NO_PLACES))


class UnsharedRequests(_Detector):
    """Warns after 20 ordered requests whose texts before the documents all differ, or 100 without a document of an
    earlier one. A tenant's first request does not count."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(warn)
        self._known: LRUCache[bool] = LRUCache(_REMEMBERED)
        self._requests = self._fronts = 0

    def look(self, salt: str | None, scope: bytes, keys: Iterable[str], *, shares: bool) -> None:
        """`shares`: part of the prompt should be cached."""
        if not self._watching:
            return
        has_tenant, has_front = self._is_known(digest_of(salt)), self._is_known(digest_of("front", scope))
        # A document that is twice in a request says nothing about the next one.
        known = [self._is_known(key) for key in {digest_of("document", scope, key) for key in keys}]
        if shares or any(known):
            self._watching = False
        elif has_tenant:
            self._requests += 1
            self._fronts += not has_front
            if self._fronts == self._requests == _ENOUGH:
                self._end(_NEVER_THE_SAME_FRONT)
            elif self._requests == _MANY:
                self._end(_NEVER_THE_SAME_DOCUMENT)

    def _is_known(self, key: bytes) -> bool:
        known = self._known.get(key) is not None
        self._known.put(key, True)
        return known
