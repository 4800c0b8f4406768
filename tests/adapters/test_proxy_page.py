"""The proxy's page, in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product, takewhile
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")

import httpx2
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from support.sent_requests import CERTIFICATES, get, post, tagged
from support.serving_app import serving
from support.waiting import eventually

from ragorder import Orderer
from ragorder.adapters.observing.observed import ObservedOrderer
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.proxy import DocumentTemplate, make_app
from ragorder.adapters.proxy.pages import StatsPages

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
SETS = [("a", "b", "c"), ("c", "b", "d"), ("b", "a", "c"), ("d", "c", "b"), ("e", "a", "b")]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium"),
    pytest.mark.merge,
]


class Proxy:
    """The proxy of a server that answers at once."""

    def __init__(self, upstream: str, *, shadow: bool = False, api_key: str | None = None, **options: Any) -> None:
        self.metrics = Metrics()
        orderer = Orderer(block_size=16, capacity_tokens=4_000, suffix_tokens=16)
        observed = ObservedOrderer(orderer, [self.metrics], shadow=shadow)
        pages = StatsPages(self.metrics)
        options |= {"routes": pages.routes, "background": [pages.history.keep], "api_key": api_key}
        self._app = make_app(observed, upstream=upstream, **options)
        self._until_stopped = ExitStack()

    def __enter__(self) -> Proxy:
        self.url = self._until_stopped.enter_context(serving())(self._app)
        return self

    def __exit__(self, *_: object) -> None:
        self._until_stopped.close()

    def ask(self, *names: str) -> None:
        texts = {name: f"secret of {name} " * 40 for name in names}
        # A client that leaves before the end has no report.
        assert post(self.url, tagged(names, "?", texts=texts), authorization="Bearer key").status_code == 200

    def stats(self, query: str = "") -> Any:
        headers = {"authorization": "Bearer key"}
        return httpx2.get(f"{self.url}/ragorder/stats{query}", headers=headers, verify=CERTIFICATES, timeout=60).json()


class Upstream:
    """A server that answers at once, with a prefix cache that never evicts: 4 characters a token, 16 tokens a block."""

    def __init__(self) -> None:
        self.reports = True
        self.models: list[str] | None = None
        self.says = b'{"error": "no such path"}'
        self._seen: list[str] = []

    async def complete(self, request: Request) -> JSONResponse:
        messages = (await request.json())["messages"]
        prompt = "".join(message["content"] for message in messages)
        alike = (takewhile(lambda pair: pair[0] == pair[1], zip(prompt, seen, strict=False)) for seen in self._seen)
        cached = max((len(list(pairs)) for pairs in alike), default=0) // 64 * 16
        self._seen.append(prompt)
        tokens = len(prompt) // 4
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        if self.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "."}}
        return JSONResponse({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})

    async def list_models(self, _: Request) -> JSONResponse:
        if self.models is None:
            return Response(self.says, 404)
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})


@pytest.fixture
def engine() -> Upstream:
    return Upstream()


@pytest.fixture
def upstream(engine: Upstream) -> Iterator[str]:
    routes = [Route("/v1/chat/completions", engine.complete, methods=["POST"]), Route("/v1/models", engine.list_models)]
    with serving() as serve:
        yield serve(Starlette(routes=routes))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


class Page:
    """A tab that shows the proxy's page, with all that went wrong in it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self.problems.append(message.text))
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(f"{url}/ragorder")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def wait_for(self, selector: str, text: str) -> None:
        playwright.expect(self.tab.locator(selector)).to_contain_text(text, timeout=15_000)


def figures(page: Page) -> dict[str, str]:
    terms, values = page.tab.locator("dt").all_text_contents(), page.tab.locator("dd").all_text_contents()
    return dict(zip(terms, values, strict=True))


class TestPage:
    def test_shows_the_figures_and_keeps_them_up_to_date(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream) as proxy, Page(browser, proxy.url) as page:
            page.wait_for("#verdict", "no request has ended yet")
            page.wait_for("#state", "live")
            for names in SETS * 4:
                proxy.ask(*names)
            page.wait_for("#verdict", "20 requests")
            stats = proxy.stats()
            assert stats["saved_tokens"] > 0
            assert page.tab.text_content("#saved") == f"{stats['saved_tokens']:,} tokens"
            assert page.tab.text_content("#share-ours") == f"{100 * stats['cached_share']:.1f}\u00a0%"
            assert page.tab.text_content("#share-theirs") == f"{100 * stats['other_cached_share']:.1f}\u00a0%"
            assert "serving ragorder's order" in page.tab.text_content("#mode")
            # The report of the last answer is counted when that has been forwarded.
            playwright.expect(page.tab.locator("#origin-ours")).to_have_text("reported", timeout=15_000)
            assert page.tab.text_content("#origin-theirs") == "predicted, corrected"
            assert "give or take" in page.tab.text_content("#verdict")
            shown = figures(page)
            assert (shown["Requests"], shown["Fallbacks"], shown["Counted by"]) == ("20", "0", "the engine")
            assert re.fullmatch(r"[\d.]+ (µs|ms|s)", shown["Order time, 99 of 100"])
            assert shown["Prompt tokens"] == f"{stats['prompt_tokens']:,}"
            # A point of the chart for each time that there were new requests.
            assert page.tab.locator("polyline").count() == 2
            proxy.ask("a", "b")
            page.wait_for("#verdict", "21 requests")
            points = [page.tab.get_attribute(f"#line-{name}", "points").split() for name in ("ours", "theirs")]
            assert len(points[0]) == len(points[1]) >= 2
            assert page.problems == []
            assert {url.partition("/ragorder")[0] for url in page.asked} == {proxy.url}
            assert "secret" not in page.tab.content()

    def test_in_shadow_mode_says_what_would_have_been(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream, shadow=True) as proxy:
            for names in SETS * 4:
                proxy.ask(*names)
            with Page(browser, proxy.url) as page:
                page.wait_for("#verdict", "would have been saved in 20 requests")
                page.wait_for("#mode", "shadow mode")
                stats = proxy.stats()
                shown = [page.tab.text_content(f"#share-{name}") for name in ("ours", "theirs")]
                assert shown == [f"{100 * stats[name]:.1f}\u00a0%" for name in ("other_cached_share", "cached_share")]
                assert stats["other_cached_share"] > stats["cached_share"]

    @pytest.mark.slow
    def test_without_reports_predicts_only(self, browser: Any, engine: Upstream, upstream: str) -> None:
        engine.reports = False
        with Proxy(upstream) as proxy, Page(browser, proxy.url) as page:
            for names in SETS * 4:
                proxy.ask(*names)
            page.wait_for("#verdict", "predicted only: no request reported its cached tokens")
            assert page.tab.text_content("#saved") == "–"
            for name in ("ours", "theirs"):
                assert page.tab.text_content(f"#origin-{name}") == "predicted"
                assert "%" in page.tab.text_content(f"#share-{name}")
            assert figures(page)["Counted by"] == "prediction: the engine reports nothing"
            assert page.problems == []

    @pytest.mark.slow
    def test_says_that_requests_passed_without_documents(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream) as proxy, Page(browser, proxy.url) as page:
            page.wait_for("#verdict", "no request has ended yet")
            assert figures(page)["Counted by"] == "–"
            for _ in range(3):
                proxy.metrics.passed("no_documents")
            page.wait_for("#verdict", "nothing was ordered: 3 requests were forwarded unchanged")
            assert "no documents found" in page.tab.text_content("#figures")
            assert page.problems == []

    def test_a_proxy_that_does_not_learn_has_no_template(self, upstream: str) -> None:
        with Proxy(upstream) as proxy:
            refused = get(f"{proxy.url}/ragorder/template")
        assert refused.status_code == 404
        assert "it is not in shadow mode, or has a template" in refused.json()["error"]["message"]

    @pytest.mark.slow
    def test_says_that_a_form_was_learned_and_how_to_get_it(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream, shadow=True) as proxy, Page(browser, proxy.url) as page:
            proxy.metrics.recognised("learned", 100_000, 60_000, 20_000, 90)
            page.wait_for("#figures", "A form of documents was found")
            said = figures(page)["A form of documents was found"]
            assert said.startswith(f"ragorder template --from {proxy.url} -o app.toml")
            assert "would save 50.0\u00a0% of their prefill" in said
            assert page.problems == []

    @pytest.mark.slow
    def test_the_proxy_keeps_the_history_whether_a_page_is_open_or_not(self, browser: Any, upstream: str) -> None:
        """On an axis of time; a reload, and another browser, show the same."""
        with Proxy(upstream) as proxy:

            def has_all(requests: int) -> bool:
                stats = proxy.stats("?after=0")
                kept = sum(point["prompt_tokens"] for point in stats["history"])
                return stats["served"] == requests and kept == stats["prompt_tokens"]

            for number in (1, 2):
                for names in SETS:
                    proxy.ask(*names)
                assert eventually(partial(has_all, number * len(SETS)))
            count = len(proxy.stats("?after=0")["history"])
            lines = []
            for _ in range(2):
                with Page(browser, proxy.url) as page:
                    page.wait_for("#state", "live")
                    for _ in range(2):
                        lines.append([page.tab.get_attribute(f"#line-{name}", "points") for name in ("ours", "theirs")])
                        page.tab.reload()
                        page.wait_for("#state", "live")
                    times = page.tab.locator("text.time").all_text_contents()
                    assert times and all(re.fullmatch(r"\d\d:\d\d:\d\d", each) for each in times)
                    page.tab.hover("#chart")
                    assert "ragorder" in page.tab.text_content("#pointed")
                    assert page.problems == []
            assert len(lines[0][0].split()) == count >= 2
            assert lines == [lines[0]] * 4

    @pytest.mark.slow
    def test_names_the_server_its_models_and_the_template(self, browser: Any, engine: Upstream, upstream: str) -> None:
        engine.models = ["a <b>model</b>", "b", "c", "d", "e"]
        form = '<document id="{id}">\n{text}\n</document>'
        with Proxy(upstream, template=DocumentTemplate(form)) as proxy, Page(browser, proxy.url) as page:
            page.wait_for("#served", f"server {upstream}")
            said = page.tab.text_content("#served")
            assert "model a <b>model</b>, b, c and 2 more" in said
            assert r'<document id="{id}">\n{text}\n</document>' in said
            assert "lengths estimated" in said
            assert page.problems == []

    @pytest.mark.slow
    def test_a_server_that_lists_no_models_has_a_page(self, browser: Any, engine: Upstream, upstream: str) -> None:
        for says in (b'{"error": "no such path"}', b"", b'{"x": ' + b"[" * 100_000):
            engine.says = says
            with Proxy(upstream) as proxy, Page(browser, proxy.url) as page:
                page.wait_for("#served", f"server {upstream}")
                assert "model" not in page.tab.text_content("#served")
                assert page.problems == []

    @pytest.mark.slow
    def test_counts_without_sense_are_no_figures(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream) as proxy:
            for names in SETS * 4:
                proxy.ask(*names)
            stats = proxy.stats()
            tokens = {"cached_tokens": 100 * stats["prompt_tokens"], "saved_tokens": -6_512}
            absurd = stats | tokens | {"saved_share": -107.5}
            with Page(browser, proxy.url) as page:
                page.tab.route("**/ragorder/stats?*", lambda route: route.fulfill(json=absurd))
                page.wait_for("#saved", "6,512 tokens")
                assert "-" not in page.tab.text_content("#saved")
                assert "more prefill needed in 20 requests: 108.50 times" in page.tab.text_content("#verdict")
                assert page.tab.text_content("#share-ours") == "–"
                assert page.tab.text_content("#origin-ours").startswith("not plausible")

    @pytest.mark.slow
    def test_says_when_the_proxy_is_gone(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream) as proxy, Page(browser, proxy.url) as page:
            page.wait_for("#state", "live")
            proxy.__exit__()
            page.wait_for("#state", "no answer from the proxy")

    @pytest.mark.slow
    def test_fits_the_screen(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream) as proxy:
            for names in SETS:
                proxy.ask(*names)
            for width, scheme in product([390, 1280, 1920], ["light", "dark"]):
                screen = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
                with Page(browser, proxy.url, **screen) as page:
                    page.wait_for("#served", "server")
                    page.wait_for("#verdict", "5 of the first 8 requests reported")
                    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
                    assert page.problems == []

    @pytest.mark.slow
    def test_a_browser_gives_the_key_as_a_password(self, browser: Any, upstream: str) -> None:
        with Proxy(upstream, api_key="key") as proxy:
            with pytest.raises(playwright.Error, match="AUTH"), Page(browser, proxy.url):
                pass
            with Page(browser, proxy.url, http_credentials={"username": "", "password": "key"}) as page:
                page.wait_for("#state", "live")

    def test_lets_nothing_else_in(self, upstream: str) -> None:
        """No script but its own, no frame around it, nothing kept by caches."""
        with Proxy(upstream, api_key="key") as proxy:
            page = httpx2.get(f"{proxy.url}/ragorder", auth=("", "key"), verify=CERTIFICATES, timeout=60)
        assert page.headers["Cache-Control"] == "no-store"
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


FETCH = """async ([url, body, key]) => {
  const headers = {"content-type": "application/json", authorization: `Bearer ${key}`};
  const response = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
  return [response.status, await response.json()];
}"""


class TestThePageOfAnApplication:
    def test_asks_from_its_own_origin_and_reads_answers_and_errors(self, browser: Any, engine: Upstream) -> None:
        path = "/v1/chat/completions"
        allowed = Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        server = Starlette(routes=[Route(path, engine.complete, methods=["POST"])], middleware=[allowed])
        application = Starlette(routes=[Route("/", lambda _: HTMLResponse("<title>An application</title>"))])
        texts = {name: f"page {name} " * 40 for name in "abc"}
        with serving() as serve, Proxy(serve(server), api_key="key") as proxy:
            tab = browser.new_page()
            tab.goto(serve(application))

            def fetch(names: str, key: str = "key") -> tuple[int, Any]:
                return tuple(tab.evaluate(FETCH, [proxy.url + path, tagged(names, "?", texts=texts), key]))

            answers = [fetch(names) for names in ("abc", "cba")]
            assert [status for status, _ in answers] == [200, 200]
            assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for _, answer in answers] == [0, 1]
            status, refusal = fetch("abc", "another")
            assert (status, refusal["error"]["code"]) == (401, "invalid_api_key")
            tab.close()
