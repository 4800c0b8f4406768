"""Pages of the proxy: metrics, statistics, their history, and readiness."""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib.resources import files
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import NOT_JSON
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.observing.stats import Stats
from ragorder.adapters.proxy.admission import AdmissionQueue
from ragorder.adapters.proxy.fleet import Fleet
from ragorder.adapters.proxy.upstream import Upstream
from ragorder.adapters.structs import readable_by_threads

T = TypeVar("T")
Answer = Callable[[Request], Awaitable[Response]]

_EVERY_S = 2.0
_MOST_POINTS = 900


class _Counted(NamedTuple):
    prompt: int = 0
    served: int = 0
    other: int | None = 0


class History:
    """Cached share of each order over time: the last 900 points, each of requests that ended within two seconds.
    Thread-safe."""

    def __init__(self, read: Callable[[], Stats], clock: Callable[[], float] = time.time) -> None:
        self._read = read
        self._clock = clock
        self._points: deque[dict[str, Any]] = deque(maxlen=_MOST_POINTS)
        self._before = _Counted()
        self._lock = Lock()

    def read(self) -> Stats:
        with self._lock:
            stats = self._read()
            now = round(1000 * self._clock())
            since = self._points[-1]["at"] if self._points else 0
            if not 0 <= now - since < 1000 * _EVERY_S:
                self._add(now, stats)
            return stats

    def after(self, at: float) -> list[dict[str, Any]]:
        with self._lock:
            return [point for point in self._points if point["at"] > at]

    async def keep(self) -> None:
        while True:
            # The next read may succeed.
            with suppress(Exception):
                await run_in_threadpool(self.read)
            await asyncio.sleep(_EVERY_S)

    def _add(self, at: int, stats: Stats) -> None:
        now = _Counted(stats.prompt_tokens, stats.cached_tokens, stats.predicted_other_tokens)
        before, self._before = self._before, now
        prompt = now.prompt - before.prompt
        if prompt <= 0:
            return
        served, other = now.served - before.served, (now.other or 0) - (before.other or 0)
        # If reports contradict the predictions, nothing is known of the other order.
        is_known = now.other is not None and (stats.cannot_compare is None or not stats.reports)
        shares = _share(served, prompt), _share(other, prompt) if is_known else None
        ours, theirs = reversed(shares) if stats.shadow else shares
        self._points.append({"at": at, "prompt_tokens": prompt, "ours": ours, "theirs": theirs})


def _share(cached: int, prompt: int) -> float:
    return min(1.0, max(0.0, cached / prompt))


TEMPLATE_PATH = "/ragorder/template"


class StatsPages:
    """`metrics_path`, `/ragorder/stats` (JSON; `?after=` a time in ms adds the history since), `/ragorder` (live HTML),
    and `/ragorder/template` (TOML) with the `learned` form. An application adds the `routes` and runs
    `history.keep`."""

    def __init__(
        self,
        metrics: Metrics,
        admission: AdmissionQueue | None = None,
        *,
        metrics_path: str = "/metrics",
        learned: Callable[[], str | None] | None = None,
    ) -> None:
        self.history = History(lambda: Stats.of(metrics.whole.collect()))
        self._metrics = metrics
        self._admission = admission
        self._metrics_path = metrics_path
        self._learned = learned
        self._page = files("ragorder.adapters.proxy").joinpath("page.html").read_text("utf-8")
        self._headers = {
            "Content-Security-Policy": _policy(self._page),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
        }

    @property
    def routes(self) -> list[Route]:
        return [
            Route(self._metrics_path, self._show_metrics),
            Route("/ragorder/stats", self._show_stats),
            Route("/ragorder", self._show_page),
            Route(TEMPLATE_PATH, self._show_template),
        ]

    async def _show_metrics(self, request: Request) -> Response:
        page = await run_in_threadpool(generate_latest, self._metrics.whole)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _show_stats(self, request: Request) -> Response:
        figures = await run_in_threadpool(self._figures, request.query_params.get("after", ""))
        if self._admission is not None:
            figures["queue"] = self._admission.as_json()
        return JSONResponse(figures, headers={"Cache-Control": "no-store"})

    def _figures(self, after: str) -> dict[str, Any]:
        figures = self.history.read().as_json()
        with suppress(ValueError):
            figures["history"] = self.history.after(float(after))
        return figures

    async def _show_template(self, request: Request) -> Response:
        toml = None if self._learned is None else self._learned()
        if toml is None:
            why = "this proxy does not learn: it is not in shadow mode, or has a template"
            if self._learned is not None:
                why = "no form was found in the prompts so far: it takes a few hundred requests whose documents recur"
            message = f"There is no template: {why}."
            raise HTTPError(404, message, code="no_template")
        return Response(toml, media_type="application/toml", headers={"Cache-Control": "no-store"})

    async def _show_page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._headers)


def _policy(page: str) -> str:
    def digests(tag: str) -> str:
        inline = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inline)

    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {digests('script')}; style-src {digests('style')}"
    )


_PATH = "/ragorder/replicas"


def replica_routes(fleet: Fleet) -> list[Route]:
    async def show(_: Request) -> JSONResponse:
        return JSONResponse({"replicas": fleet.as_json()}, headers={"Cache-Control": "no-store"})

    async def change(request: Request) -> JSONResponse:
        replica = next((each for each in fleet.replicas if str(each.number) == request.path_params["number"]), None)
        if replica is None:
            raise HTTPError(404, f"There is no such replica: {_PATH} lists them.", code="no_such_replica")
        replica.draining = request.url.path.endswith("/drain")
        return await show(request)

    paths = [f"{_PATH}/{{number}}/{verb}" for verb in ("drain", "resume")]
    return [Route(_PATH, show), *(Route(path, change, methods=["POST"]) for path in paths)]


_TIMEOUT_S = 2.0
_CHECK_S = 1.0
# A cloud lists hundreds of models.
_MODELS_S = 60.0
_MOST_BYTES = 1 << 20
_MOST_MODELS = 3
_LONGEST_NAME = 120


class _Kept(Generic[T]):
    def __init__(self, read: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._reading = asyncio.Lock()
        self._found: tuple[float, T] | None = None

    async def get(self) -> T:
        async with self._reading:
            if self._found is None or time.monotonic() - self._found[0] >= self._every_s:
                found = await self._read()
                self._found = time.monotonic(), found
            return self._found[1]


def readiness(check: Callable[[], Awaitable[bool]]) -> Answer:
    """Return the answer to /ragorder/ready, which checks at most once a second."""
    is_ready = _Kept(check, _CHECK_S)

    async def answer(_: Request) -> JSONResponse:
        if await is_ready.get():
            return JSONResponse({"status": "ready"})
        message = "The upstream server does not answer, or answers with an error."
        error = HTTPError(503, message, code="upstream_not_ready")
        return JSONResponse(error.content, status_code=error.status)

    return answer


@readable_by_threads
class _Model(msgspec.Struct):
    id: str


@readable_by_threads
class _Models(msgspec.Struct):
    data: list[_Model]


def served(servers: Sequence[Upstream], about: Mapping[str, Any]) -> Answer:
    """Return the answer to /ragorder/served: the servers, up to three models of the first (read once a minute), the
    number of its others, and facts `about` the proxy."""
    models = _Kept(partial(_models_of, servers[0]), _MODELS_S)
    facts = {"servers": list(dict.fromkeys(each.root for each in servers)), **about}

    async def answer(_: Request) -> JSONResponse:
        names = await models.get()
        shown = [name[:_LONGEST_NAME] for name in names[:_MOST_MODELS]]
        content = facts | {"models": shown, "more_models": len(names) - len(shown)}
        return JSONResponse(content, headers={"Cache-Control": "no-store"})

    return answer


async def _models_of(server: Upstream) -> list[str]:
    content = b""
    with suppress(HTTPError, TimeoutError, *NOT_JSON):
        async with (
            asyncio.timeout(_TIMEOUT_S),
            server.send("GET", b"/v1/models", [(b"accept-encoding", b"identity")], None) as response,
        ):
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > _MOST_BYTES:
                    return []
        return [model.id for model in msgspec.json.decode(content, type=_Models).data]
    return []
