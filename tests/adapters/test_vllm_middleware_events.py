"""Documents ordered inside a server that publishes KV events: what is predicted is what its engine holds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.event_server import TOPIC, Server, event_servers
from support.sent_requests import CHAT, TEMPLATE, asked, get, post, tagged, user, written
from support.waiting import eventually

from ragorder.adapters.proxy.bodies.followed_tokens import FollowedTokens
from ragorder.adapters.vllm import OrderDocuments
from ragorder.common.counts import KnownTokens
from ragorder.common.degraded import DegradedWarning
from ragorder.prompt import PromptBuilder

BLOCK = 16
Serve = Callable[[Any], str]


class Engine:
    """A fake application with its engine, which tells its blocks as vLLM does.

    Another application with the same engine is another API process.
    """

    def __init__(self, server: Server, tokenizer: Any, **config: Any) -> None:
        self.server = server
        self._tokenizer = tokenizer
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": None, "topic": TOPIC}
        self.events = SimpleNamespace(**events | {"endpoint": server.endpoint} | config)
        self.api_processes = 1
        self.parallel: dict[str, Any] = {"data_parallel_size": 1}

    def app(self, **options: Any) -> Starlette:
        app = Starlette(routes=[Route(CHAT, self._chat, methods=["POST"])])
        app.add_middleware(cast(Any, OrderDocuments), **{"template": TEMPLATE} | options)
        cache = SimpleNamespace(
            block_size=BLOCK, num_gpu_blocks=1001, enable_prefix_caching=True, mamba_cache_mode="none"
        )
        parallel = SimpleNamespace(**self.parallel, _api_process_count=self.api_processes)
        app.state.vllm_config = SimpleNamespace(
            cache_config=cache, parallel_config=parallel, kv_events_config=self.events
        )
        app.state.engine_client = SimpleNamespace(get_tokenizer=lambda: self._tokenizer)
        app.state.openai_serving_models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="m")])
        return app

    def evict(self, count: int) -> None:
        """The last blocks, as for another client's prompt."""
        self.server.remove(*list(self.server.held)[-count:])

    async def _chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        text = self._tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        salt = body.get("cache_salt")
        if body["model"] != "m":
            salt = f"{salt}/{body['model']}"
        cached = self.server.serve(ids, salt)
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
        return JSONResponse({"choices": [{"message": {"content": "yes"}}], "usage": usage})


Play = Callable[..., Engine]


@pytest.fixture
def play(tmp_path: Path, tokenizers: dict[str, Any]) -> Iterator[Play]:
    with event_servers(tmp_path) as serve:
        yield lambda ports=False, **config: Engine(serve(block_size=BLOCK, ports=ports), tokenizers["chatml"], **config)


@pytest.fixture
def engine(play: Play) -> Engine:
    return play()


def chat(names: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [user(asked(names))], **fields}


def ask(url: str, body: dict[str, Any]) -> tuple[int, int]:
    """The predicted and the cached tokens."""
    answer = post(url, body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["prompt_tokens_details"]
    return int(answer.headers["x-ragorder-predicted-cached-tokens"]), usage["cached_tokens"]


def after(change: Callable[[], None]) -> None:
    change()
    # Events are read in another thread.
    time.sleep(0.2)


class TestWhatTheEngineTells:
    @pytest.mark.parametrize(
        "body",
        [chat("abcd"), chat("abcd", cache_salt="tenant"), tagged("abcd")],
        ids=["written", "of a tenant", "tagged"],
    )
    def test_a_reset_and_evictions_count_at_once(self, engine: Engine, serve: Serve, body: dict[str, Any]) -> None:
        url = serve(engine.app())
        engine.server.wait_for_subscriber()
        ask(url, body)
        whole, cached = ask(url, body)
        # The question is cached, too.
        assert 300 < whole <= cached < whole + 2 * BLOCK

        def after_a_reset() -> bool:
            after(engine.server.clear)
            return ask(url, body) == (0, 0)

        assert eventually(after_a_reset)

        def after_an_eviction() -> bool:
            after(lambda: engine.evict(12))
            predicted, cached = ask(url, body)
            return predicted == cached < whole

        assert eventually(after_an_eviction)

    def test_orders_of_another_process_are_found(self, engine: Engine, serve: Serve) -> None:
        one, other = serve(engine.app()), serve(engine.app())
        engine.server.wait_for_subscriber()
        engine.server.wait_for_subscriber()
        names = iter(["abc", "def", "gha", "bdf", "ceg", "hdb", "acf"])

        def found() -> bool:
            given = next(names)
            ask(one, chat(given))
            time.sleep(0.2)
            answer = post(other, chat(given[::-1]))
            return answer.headers["x-ragorder-permutation"] == "2,1,0"

        assert eventually(found)

    def test_an_adapters_blocks_are_not_the_models_own(self, engine: Engine, serve: Serve) -> None:
        """They have the same tokens."""
        url = serve(engine.app())
        assert get(f"{url}/ragorder/served").json()["lengths"] == "counted"
        engine.server.wait_for_subscriber()
        for _ in range(2):
            ask(url, chat("abcd"))
            time.sleep(0.2)
        assert ask(url, chat("abcd", model="adapter")) == (0, 0)


class TestOneRankOfSeveral:
    def test_with_a_server_of_its_own_has_its_own_cache_and_events(self, play: Play, serve: Serve) -> None:
        """As with an external balancer: the engine's rank is added to the configured ports."""
        engine = play(ports=True)
        address, _, port = engine.server.endpoint.rpartition(":")
        engine.events.endpoint = f"{address}:{int(port) - 2}"
        engine.parallel = {"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_index": 2}
        engine.parallel["local_engines_only"] = True
        with warnings.catch_warnings():
            # It would be told of caches that it does not have.
            warnings.simplefilter("error", DegradedWarning)
            url = serve(engine.app())
        engine.server.wait_for_subscriber()
        ask(url, chat("abcd"))
        assert ask(url, chat("abcd"))[0] > 0
        after(engine.server.clear)
        assert ask(url, chat("abcd")) == (0, 0)


class TestWithoutThem:
    def test_nothing_is_followed_without_events(self, play: Play, serve: Serve) -> None:
        url = serve(play(enable_kv_cache_events=False).app())
        assert ask(url, chat("ab"))[0] == 0
        assert get(f"{url}/ragorder/served").json()["lengths"] == "estimated"

    def test_several_processes_are_told_to_publish_them(self, play: Play, serve: Serve) -> None:
        engine = play(publisher="null")
        engine.api_processes = 2
        with pytest.warns(DegradedWarning, match="--kv-events-config"):
            serve(engine.app())

    def test_a_tokenizer_of_another_kind_is_warned_about(self, engine: Engine, serve: Serve) -> None:
        app = engine.app()
        app.state.engine_client = SimpleNamespace(get_tokenizer=object)
        with pytest.warns(DegradedWarning, match="KV events are not followed"):
            url = serve(app)
        assert ask(url, chat("ab"))[0] == 0


class TestTokens:
    """They are known only where no token reaches across a boundary."""

    @pytest.mark.parametrize(("gap", "known"), [("\n", True), ("\n\n", True), ("", False)])
    def test_between_documents(self, tokenizers: dict[str, Any], gap: str, known: bool) -> None:
        tokenizer = tokenizers["chatml"]
        tokens = FollowedTokens(PromptBuilder("", tokenizer=tokenizer), tokenizer, {"m"})
        names = ["e cat sleeps on th", "e parser hunts at th"]
        lengths = tokens.run(names, [gap], None)
        assert [isinstance(each, KnownTokens) for each in lengths] == [known] * 2
        if known:
            both = tokenizer.encode(gap.join(names) + gap, add_special_tokens=False)
            assert [id for each in lengths for id in cast(KnownTokens, each).ids] == both

    def test_not_if_gaps_differ(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = tokenizers["chatml"]
        tokens = FollowedTokens(PromptBuilder("", tokenizer=tokenizer), tokenizer, {"m"})
        lengths = tokens.run([written("a"), written("b"), written("c")], ["\n", "\n\n"], None)
        assert not any(isinstance(each, KnownTokens) for each in lengths)
