"""The proxy's metrics and statistics as pages."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.observing.stats import Stats
from ragorder.adapters.proxy.admission import AdmissionQueue

__all__ = ["stats_routes"]


def stats_routes(metrics: Metrics, admission: AdmissionQueue | None = None) -> list[Route]:
    """`/metrics`, `/ragorder/stats` (JSON) and `/ragorder` (HTML, live)."""
    page = files("ragorder.adapters.proxy").joinpath("page.html").read_text("utf-8")
    headers = {"Content-Security-Policy": _policy(page), "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}

    async def show_metrics(request: Request) -> Response:
        return Response(await run_in_threadpool(generate_latest, metrics.whole), media_type=CONTENT_TYPE_LATEST)

    async def show_stats(request: Request) -> Response:
        stats = await run_in_threadpool(lambda: Stats.of(metrics.whole.collect()))
        queue = {} if admission is None else {"queue": admission.as_json()}
        return JSONResponse(stats.as_json() | queue, headers={"Cache-Control": "no-store"})

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    return [Route("/metrics", show_metrics), Route("/ragorder/stats", show_stats), Route("/ragorder", show_page)]


def _policy(page: str) -> str:
    def digests(tag: str) -> str:
        inline = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inline)

    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {digests('script')}; style-src {digests('style')}"
    )
