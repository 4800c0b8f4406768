"""Documents ordered inside a server: what the application gets and answers, beside the proxy, and real vLLM."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from support.far_end import WHOLE, Answer, FarEnd, Request, answer_events, answer_json
from support.rings import length
from support.sent_requests import CERTIFICATES, CHAT, TEXTS, TOKEN, asked, get, post, tag, tagged, user
from support.serve_process import ServeProcess, launching

from ragorder import Orderer
from ragorder.adapters.proxy import DocumentTemplate, make_app
from ragorder.adapters.vllm import OrderDocuments
from ragorder.common.degraded import DegradedWarning

FORM = '<document id="{id}">\n{text}\n</document>'
SIZES: dict[str, Any] = {"capacity_tokens": 2000, "block_size": 16}
USAGE = {"prompt_tokens": 600, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


class Application(FarEnd):
    """Answers chats, and echoes other paths."""

    def app(self, **options: Any) -> Starlette:
        app = Starlette(routes=[Mount("/", self)])
        if options:
            app.add_middleware(cast(Any, OrderDocuments), **options)
        return app

    def play(self, request: Request) -> Answer:
        if request.target in ("/v1/embeddings", "/v1/models", "/health"):
            return Answer([request.body or b"ok"])
        if request.header("content-encoding"):
            return Answer([b"compressed"], 400)
        if request.json.get("fails"):
            return answer_json({"error": "no"}, 400)
        if not request.json.get("stream"):
            return answer_json(WHOLE | {"usage": USAGE})
        usage = json.dumps(USAGE).encode()
        return answer_events(TOKEN, b'data: {"choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % usage)


@pytest.fixture
def application() -> Application:
    return Application()


Inside = Callable[..., str]
Serve = Callable[[Any], str]


@pytest.fixture
def inside(serve: Serve, application: Application) -> Inside:
    """The application with the documents ordered inside it; its address."""
    return lambda **options: serve(application.app(**{"template": FORM, **SIZES} | options))


def start_in_vain(app: Any) -> None:
    """As vLLM starts its server."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    with pytest.raises(SystemExit):
        server.run()
    assert not server.started


def draws(count: int, seed: int = 0) -> list[list[str]]:
    rng = random.Random(seed)
    return [rng.sample("abcdef", 4) for _ in range(count)]


def chat(names: list[str], number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [user(asked(names) + str(number))], **fields}


class TestBesideTheProxy:
    @pytest.mark.parametrize("options", [{}, {"number_by_place": True}, {"stable_tools": True}])
    def test_the_application_gets_the_same_bodies(
        self, serve: Serve, inside: Inside, application: Application, options: dict[str, Any]
    ) -> None:
        """Written into messages, tagged, in the API's own form, and without documents; whole answers and streams."""
        other = Application()
        proxied = serve(
            make_app(Orderer(**SIZES), upstream=serve(other.app()), template=DocumentTemplate(FORM), **options)
        )
        own = inside(**options)
        tools = [{"type": "function", "function": {"name": name}} for name in "ba"]
        bodies: list[dict[str, Any]] = []
        for number, names in enumerate(draws(length(60, 20))):
            bodies.append(chat(names, number, stream=number % 2 == 0, tools=tools))
            bodies.append(tagged(names, str(number)))
            texts = [{"title": name, "text": TEXTS[name]} for name in names]
            bodies.append({"model": "m", "messages": [user(str(number))], "documents": texts})
            bodies.append({"model": "m", "messages": [user("Hello.")], "tools": tools})
        moved = 0
        for body in bodies:
            answers = [post(url, body) for url in (proxied, own)]
            assert answers[0].content == answers[1].content
            shown = ("x-ragorder-permutation", "x-ragorder-predicted-cached-tokens", "content-type")
            heads = [[answer.headers.get(name) for name in shown] for answer in answers]
            assert heads[0] == heads[1]
            assert application.bodies[-1] == other.bodies[-1]
            assert application.last.header("content-length") == [str(len(application.last.body))]
            moved += heads[1][0] not in (None, "0,1,2,3")
        assert moved > length(20, 6)


class TestAsItCame:
    def test_a_request_without_documents(self, inside: Inside, application: Application) -> None:
        url = inside()
        content = b'{ "model" : "m", "messages": [{"role": "user", "content": "\\u00e9 one <document>"}] }'
        answer = httpx2.post(f"{url}{CHAT}", content=content, verify=CERTIFICATES)
        assert answer.status_code == 200
        assert application.bodies == [content]

    def test_other_paths_and_encoded_bodies(self, inside: Inside, application: Application) -> None:
        url = inside()
        echoed = httpx2.post(f"{url}/v1/embeddings", content=b"\x00\xff", verify=CERTIFICATES)
        assert echoed.content == b"\x00\xff"
        assert get(f"{url}/health").text == "ok"
        packed = gzip.compress(json.dumps(chat(list("ab"))).encode())
        answer = httpx2.post(f"{url}{CHAT}", content=packed, headers={"content-encoding": "gzip"}, verify=CERTIFICATES)
        assert (answer.status_code, application.last.body) == (400, packed)

    def test_a_tag_on_another_path_is_refused(self, inside: Inside, application: Application) -> None:
        url = inside()
        body = {"model": "m", "input": "?"}
        assert post(url, body, "/v1/embeddings").json() == body
        refused = post(url, body | {"ragorder": tag("ab")}, "/v1/embeddings")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_documents_here")

    def test_after_an_error(self, inside: Inside, application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
        """But a tagged one is refused: the application would answer it without its documents."""

        def fail(*_: object) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr("ragorder.adapters.proxy.bodies.parsing.BodyParser.parse", fail)
        url = inside()
        body = chat(list("ab"))
        assert post(url, body).status_code == 200
        assert [json.loads(each) for each in application.bodies] == [body]
        refused = post(url, tagged("ab"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "ordering_failed")
        assert "secret" not in refused.text
        assert len(application.bodies) == 1

    def test_a_body_beyond_the_limit_but_a_malformed_tag_is_refused(
        self, inside: Inside, application: Application
    ) -> None:
        url = inside(body_limit=1000)
        body = chat(list("abcd"))
        assert post(url, body).status_code == 200
        assert [json.loads(each) for each in application.bodies] == [body]
        refused = post(url, tagged("abcd"))
        assert refused.status_code == 413
        assert "RAGORDER_BODY_LIMIT" in refused.text
        # And one that is malformed, with the field.
        refused = post(url, tagged("ab") | {"ragorder": tag("ab") | {"documents": 3}})
        assert refused.status_code == 400 and "ragorder.documents" in refused.text
        assert len(application.bodies) == 1


class TestTheSaving:
    def test_is_shown_at_the_servers_own_address(self, inside: Inside, application: Application) -> None:
        url = inside()
        for number, names in enumerate(draws(8)):
            post(url, chat(names, number))
        post(url, chat(list("ab"), fails=True))
        stats = get(f"{url}/ragorder/stats").json()
        assert (stats["served"], stats["discarded"]) == (8, 1)
        assert "ragorder_settled_requests" in get(f"{url}/ragorder/metrics").text
        assert "<h1>ragorder</h1>" in get(f"{url}/ragorder").text
        assert get(f"{url}/ragorder/served").json()["template"] == FORM

    @pytest.mark.slow
    def test_a_form_is_learned_in_shadow_mode_alone(self, serve: Serve, application: Application) -> None:
        url = serve(application.app(shadow=True, **SIZES))
        assert "was found in the prompts so far" in get(f"{url}/ragorder/template").json()["error"]["message"]
        rng = random.Random(3)
        words = ["order", "refund", "parcel", "label", "engine", "window", "policy", "account", "carrier"]
        texts = [" ".join(rng.choices(words, k=60)) for _ in range(40)]
        # Learning takes at most 1 ms of processor time a request, so how many it needs depends on the machine.
        for number in range(4000):
            found = "".join(f"[Passage]\n{text}\n[End]\n" for text in rng.sample(texts, 4))
            post(url, {"model": "m", "messages": [user(f"Answer from these:\n\n{found}\nQuestion {number}?")]})
            if number % 20 == 0 and get(f"{url}/ragorder/template").status_code == 200:
                break
        assert "{text}" in get(f"{url}/ragorder/template").text
        other = serve(Application().app(template=FORM, **SIZES))
        refused = get(f"{other}/ragorder/template")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_template")

    @pytest.mark.parametrize(("key", "status"), [("", 401), ("Bearer wrong", 401), ("Bearer right", 404)])
    def test_a_learned_form_is_for_those_who_may_list_models(self, serve: Serve, key: str, status: int) -> None:
        class Guarded(Application):
            """Checks keys below /v1 alone, after the layer, as vLLM does."""

            def play(self, request: Request) -> Answer:
                if request.target.startswith("/v1") and request.header("authorization") != ["Bearer right"]:
                    return answer_json({"error": "Unauthorized"}, 401)
                return super().play(request)

        url = serve(Guarded().app(shadow=True, **SIZES))
        headers = {"authorization": key} if key else {}
        assert httpx2.get(f"{url}/ragorder/template", headers=headers).status_code == status
        assert httpx2.get(f"{url}/ragorder/stats").status_code == 200

    def test_in_shadow_mode_nothing_moves(self, inside: Inside, application: Application) -> None:
        url = inside(shadow=True)
        bodies = [chat(names, number) for number, names in enumerate(draws(30))]
        for body in bodies:
            post(url, body)
        assert [json.loads(each) for each in application.bodies] == bodies
        assert get(f"{url}/ragorder/stats").json()["shadow"] is True


class TestSettings:
    def test_come_from_the_environment_and_a_file(
        self, serve: Serve, application: Application, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "ragorder.toml"
        file.write_text(f"template = '''{FORM}'''\nkeep_first = 4\ncapacity_tokens = 3000\nblock_size = 16\n")
        monkeypatch.setenv("RAGORDER_CONFIG", str(file))
        url = serve(application.app(shadow=False))
        bodies = [chat(names, number) for number, names in enumerate(draws(20))]
        for body in bodies:
            assert "x-ragorder-permutation" in post(url, body).headers
        assert [json.loads(each) for each in application.bodies] == bodies
        monkeypatch.setenv("RAGORDER_KEEP_FIRST", "0")
        freed = Application()
        url = serve(freed.app(shadow=False))
        for body in bodies:
            post(url, body)
        assert [json.loads(each) for each in freed.bodies] != bodies

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"template": "nothing"}, "RAGORDER_TEMPLATE"),
            ({"number_by_place": True, "template": "<d>{text}</d>"}, "number_by_place needs"),
            ({"keep_frist": 1}, "did you mean 'keep_first'"),
            ({"shared_orders": "http://127.0.0.1"}, "shared_orders: not a URL"),
            ("nowhere.toml", "there is no file"),
            ("broken.toml", "broken.toml"),
        ],
    )
    def test_that_are_wrong_end_the_servers_start(
        self, application: Application, monkeypatch: Any, caplog: Any, tmp_path: Path, options: Any, said: str
    ) -> None:
        if isinstance(options, str):
            (tmp_path / "broken.toml").write_text("keep_first =")
            monkeypatch.setenv("RAGORDER_CONFIG", str(tmp_path / options))
            options = {"shadow": False}
        start_in_vain(application.app(**options))
        assert said in caplog.text

    def test_that_are_wrong_answer_nothing_without_a_lifespan(self, application: Application) -> None:
        app: Any = OrderDocuments(application.app(), template="nothing")
        with pytest.raises(ValueError, match="RAGORDER_TEMPLATE"):
            asyncio.run(app({"type": "http", "method": "GET", "path": "/health"}, None, None))

    def test_an_unknown_cache_size_is_warned_about(self, serve: Serve, application: Application) -> None:
        app = application.app(template=FORM)
        with pytest.warns(DegradedWarning, match="RAGORDER_CAPACITY_TOKENS and RAGORDER_BLOCK_SIZE"):
            post(serve(app), chat(list("ab")))

    def test_without_the_extra_the_error_names_it(self, python: Callable[..., Any]) -> None:
        done = python("-c", "from ragorder.adapters.vllm import OrderDocuments", blocked=("starlette",))
        assert done.returncode
        assert ".[proxy]" in done.stderr


@pytest.mark.slow
@pytest.mark.vllm
class TestVLLM:
    """`vllm serve --middleware` on real vLLM."""

    NAME = "ragorder.adapters.vllm.OrderDocuments"

    @pytest.fixture(scope="class")
    def texts(self) -> list[str]:
        pytest.importorskip("vllm")
        from ragorder.eval.data.workloads import make_workload

        return [each.text[:300] for each in make_workload("paper-shuf", 0, requests=1).documents[:12]]

    @staticmethod
    def ask(url: str, number: int, written: list[str], **fields: str) -> tuple[int, int, str]:
        """The predicted and the cached tokens, and the order."""
        messages = [user("\n".join(written) + f"\nQuestion {number}?")]
        answer = post(url, {"model": "served", "messages": messages, "max_tokens": 1, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        names = ("predicted-cached-tokens", "permutation")
        predicted, order = (answer.headers[f"x-ragorder-{name}"] for name in names)
        return int(predicted), cached, order

    @staticmethod
    def four(texts: list[str], rng: random.Random) -> list[str]:
        return [FORM.format(id=rank, text=texts[rank]) for rank in rng.sample(range(len(texts)), 4)]

    def test_without_kv_events_it_hits_exactly_as_the_proxy(self, vllm_model: Path, texts: list[str]) -> None:
        from ragorder.eval.engines.server import VLLMServer

        def served(url: str) -> list[tuple[int, int, str]]:
            rng = random.Random(1)
            return [self.ask(url, number, self.four(texts, rng)) for number in range(40)]

        command = (sys.executable, "-c", "from ragorder.cli.serve import serve; serve()", "--port", "0")
        environment = {"RAGORDER_TEMPLATE": FORM}
        plain = {"blocks": 64, "kv_events": False}
        with VLLMServer(vllm_model, middleware=self.NAME, environment=environment, **plain) as server:
            inside = served(server.base_url)
            assert get(f"{server.base_url}/ragorder/stats").json()["served"] == len(inside)
        with (
            VLLMServer(vllm_model, **plain) as server,
            launching(ServeProcess, *command, "--template", FORM, PYTHONPATH="") as launch,
        ):
            proxied = served(launch("--upstream", server.base_url).url)
        assert [each[1:] for each in proxied] == [each[1:] for each in inside]
        assert sum(cached for _, cached, _ in inside) > 0
        assert len({order for _, _, order in inside}) > 1

    def test_it_predicts_to_the_token_what_is_cached(self, vllm_model: Path, texts: list[str]) -> None:
        """By the server's KV events: also after other clients' prompts, and after a reset."""
        from ragorder.eval.engines.server import VLLMServer

        rng, served = random.Random(1), []
        environment = {"RAGORDER_TEMPLATE": FORM}
        with VLLMServer(vllm_model, blocks=64, middleware=self.NAME, environment=environment) as server:
            url = server.base_url
            for number in range(30):
                served += [
                    self.ask(url, number, self.four(texts, rng), **salt) for salt in ({}, {"cache_salt": "tenant"})
                ]
                if number % 7 == 6:
                    prompt = [rng.randrange(3, 1500) for _ in range(1200)]
                    post(url, {"model": "served", "prompt": prompt, "max_tokens": 1}, "/v1/completions")
                if number == 20:
                    assert post(url, {}, "/reset_prefix_cache").status_code == 200
                # Events come after the answer, and nothing says when they have been read.
                time.sleep(1)
            assert get(f"{url}/ragorder/stats").json()["served"] == len(served)
        assert [predicted for predicted, _, _ in served] == [cached for _, cached, _ in served]
        assert sum(cached for _, cached, _ in served) > 0
        assert len({order for _, _, order in served}) > 1
