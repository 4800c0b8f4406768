"""The benchmark under load: its options, and servers that are measured from outside."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from support.arrived import AZURE, MOONCAKE, written
from support.benched import runs_of
from support.commands import run_command
from support.http_server import Handler, LocalServer

from ragorder.cli import main
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.openai import OpenAIEngine, find_model
from ragorder.eval.engines.sim import SimEngine

pytestmark = pytest.mark.merge

invoke = partial(run_command, main, "bench", env={"COLUMNS": "200", "OPENAI_API_KEY": ""})


def bench(*arguments: str | Path) -> list[dict[str, Any]]:
    """The runs of a benchmark."""
    done = invoke("-o", "-", *arguments)
    assert done.exit_code == 0, done.output
    return runs_of(done.stdout)


def refusal(*arguments: str | Path) -> str:
    """What is said of a benchmark that cannot be run."""
    done = invoke(*arguments)
    assert done.exit_code != 0, done.output
    assert "Traceback" not in done.output
    return " ".join(done.stderr.split())


FAULTS = {
    "refused": (400, b'{"error": {}}'),
    "garbage": (200, b"data: {\n\n"),
    "error": (200, b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n'),
    "strange": (200, b'data: {"choices": [{}], "usage": [1]}\n\ndata: [DONE]\n\n'),
    "silent": (200, b"data: [DONE]\n\n"),
}


class FarServer(LocalServer):
    """An OpenAI-compatible server with a simulated cache, and the faults that servers have."""

    def __init__(
        self,
        *,
        root: str = "/nowhere",
        reports: str = "always",
        knows: Sequence[str] = ("ignore_eos", "cache_salt"),
        salts: bool = True,
        prefix_caching: bool = True,
        fault: Callable[[int], str | None] = lambda number: None,
    ) -> None:
        super().__init__(_Handler)
        self.base_url += "/v1"
        self.models = [{"id": "far", "root": root, "max_model_len": None}, {"id": "other"}]
        self.reports, self.knows, self.salts, self.fault = reports, knows, salts, fault
        self.engine = SimEngine(block_size=16, output_tokens=0, prefix_caching=prefix_caching)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    def cached_tokens(self, body: dict[str, Any]) -> int:
        with self.lock:
            salt = hash(body.get("cache_salt")) % 10**9 if self.salts else 0
            found = self.engine.generate([salt] * 16 + body["prompt"]).cached_tokens
        return max(0, found - 16)

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        cached_tokens = self.cached_tokens(body)
        if self.reports == "always" or (self.reports == "hits" and cached_tokens):
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage


class _Handler(Handler):
    server: FarServer

    def do_GET(self) -> None:
        models = json.dumps({"object": "list", "data": self.server.models})
        self.answer(*((200, models) if self.path == "/v1/models" else (404, "")))

    def do_POST(self) -> None:
        body = self.read_json()
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.headers.append(dict(self.headers))
        unknown = {"ignore_eos", "cache_salt"} & body.keys() - set(self.server.knows)
        fault = "refused" if unknown or self.path != "/v1/completions" else self.server.fault(number)
        if fault == "cut":
            self.close_connection = True
        elif fault is not None:
            self.answer(*FAULTS[fault])
        else:
            events = [{"choices": [{"text": word}]} for word in ("a", "", "\u2028b\x85")]
            usage = {"choices": [], "usage": self.server.usage(body)}
            lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in [*events, usage]]
            self.answer(200, (": ping\n\n" + "".join(lines) + "data: [DONE]\n\n").encode())


def engine_of(server: FarServer, **options: Any) -> OpenAIEngine:
    return OpenAIEngine(server.base_url, "far", **({"block_size": 16, "capacity_tokens": None} | options))


def with_engine(server: FarServer, use: Callable[[OpenAIEngine], Any], **options: Any) -> Any:
    """What a coroutine makes of an engine of a server."""

    async def session() -> Any:
        async with engine_of(server, **options) as engine:
            return await use(engine)

    return asyncio.run(session())


PROMPT = list(range(100))


@pytest.fixture
def far() -> Iterator[FarServer]:
    pytest.importorskip("httpx2")
    with FarServer() as server:
        yield server


class TestOpenAIEngine:
    def test_streams_a_completion_of_token_ids(self, far: FarServer) -> None:
        completion = with_engine(far, lambda engine: engine.complete(PROMPT), api_key="secret")
        assert (completion.cached_tokens, completion.prompt_tokens, completion.text) == (0, 100, "a\u2028b\x85")
        assert completion.ttft_s > 0
        (body,) = far.bodies
        assert body["prompt"] == PROMPT
        expected = {"model": "far", "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
        assert expected.items() <= body.items()
        assert body["stream_options"] == {"include_usage": True}
        assert far.headers[0]["Authorization"] == "Bearer secret"

    def test_the_time_between_tokens_is_that_from_the_first_chunk_to_the_last(
        self, far: FarServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ticks = count()
        monkeypatch.setattr(
            "ragorder.eval.engines.openai.time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
        )
        several, one = (
            with_engine(far, lambda engine, wanted=wanted: engine.complete(PROMPT, wanted)) for wanted in (5, 1)
        )
        # Three chunks a second apart, with five tokens in them.
        assert (several.ttft_s, several.total_s, several.tbt_s) == (1, 4, 2 / 4)
        assert one.tbt_s is None

    def test_a_reset_is_a_fresh_salt(self, far: FarServer) -> None:
        async def around(engine: OpenAIEngine) -> list[int]:
            before = [(await engine.complete(PROMPT)).cached_tokens for _ in range(2)]
            engine.reset()
            return before + [(await engine.complete(PROMPT)).cached_tokens for _ in range(2)]

        assert with_engine(far, around) == [0, 96, 0, 96]
        salts = [body["cache_salt"] for body in far.bodies]
        assert salts[0] == salts[1] != salts[2] == salts[3]
        assert engine_of(far).salt != engine_of(far).salt

    @pytest.mark.parametrize("wanted", [None, 1, 7])
    def test_an_answer_is_as_long_as_it_should_be(self, far: FarServer, wanted: int | None) -> None:
        with_engine(far, lambda engine: engine.complete(PROMPT, wanted), output_tokens=3)
        assert far.bodies[0]["max_tokens"] == (wanted or 3)
        assert engine_of(far, output_tokens=3).kept_output_tokens == 2

    @pytest.mark.parametrize("suffix", ["/v1/", "", "/"])
    def test_the_url_may_name_the_version(self, far: FarServer, suffix: str) -> None:
        far.base_url = far.base_url.removesuffix("/v1") + suffix
        with_engine(far, lambda engine: engine.complete(PROMPT))
        assert find_model(far.base_url).id == "far"

    def test_the_models_of_a_server_are_those_it_lists(self, far: FarServer) -> None:
        assert asdict(find_model(far.base_url)) == {"id": "far", "root": "/nowhere", "max_model_len": None}
        with pytest.raises(EngineError, match="no model 'nearer': give --served-model far or other"):
            find_model(far.base_url, "nearer")
        far.models = []
        with pytest.raises(EngineError, match="lists no models"):
            find_model(far.base_url)

    @pytest.mark.parametrize("fault", ["cut", *FAULTS])
    def test_a_request_that_fails_says_so_without_its_prompt(self, far: FarServer, fault: str) -> None:
        far.fault = lambda number: fault

        async def failing(engine: OpenAIEngine) -> str:
            with pytest.raises(RequestError) as error:
                await engine.complete(PROMPT)
            assert error.value.status == (400 if fault == "refused" else None)
            far.fault = lambda number: None
            assert (await engine.complete(PROMPT)).prompt_tokens == 100, "the engine goes on"
            return str(error.value)

        said = with_engine(far, failing)
        assert said and "98, 99" not in said

    def test_a_server_that_is_gone_is_a_failed_request(self, far: FarServer) -> None:
        async def gone(engine: OpenAIEngine) -> None:
            far.shutdown()
            far.server_close()
            with pytest.raises(RequestError, match="ConnectError"):
                await engine.complete(PROMPT)

        with_engine(far, gone)


class TestChecks:
    """What a server must be able to do is found out before a run."""

    @staticmethod
    def check(server: FarServer) -> None:
        async def checked(engine: OpenAIEngine) -> None:
            await engine.check(PROMPT)
            await engine.complete(PROMPT)

        with server:
            with_engine(server, checked)

    @pytest.mark.parametrize(
        ("options", "left_out"),
        [
            ({}, False),
            ({"reports": "hits"}, False),
            ({"knows": ["cache_salt"]}, True),
            # One failure is no reason.
            ({"fault": lambda number: "cut" if number == 0 else None}, False),
        ],
    )
    def test_leave_a_fresh_salt_and_ignore_eos_out_where_it_is_unknown(
        self, options: dict[str, Any], left_out: bool
    ) -> None:
        server = FarServer(**options)
        self.check(server)
        assert len({body["cache_salt"] for body in server.bodies}) >= 3
        assert ["ignore_eos" in body for body in server.bodies[1:]] == [not left_out] * (len(server.bodies) - 1)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"reports": "never"}, "--enable-prompt-tokens-details, SGLang with --enable-cache-report"),
            ({"prefix_caching": False}, "start it with prefix caching"),
            ({"salts": False}, "does not keep the caches of different cache_salt apart"),
            ({"knows": []}, r"does not serve a prompt of token ids with a cache_salt \(HTTP 400\)"),
            ({"fault": lambda number: "cut"}, "does not serve a prompt of token ids"),
        ],
    )
    def test_a_server_that_cannot_be_measured_is_refused_with_the_reason(
        self, options: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(EngineError, match=said):
            self.check(FarServer(**options))


LIMITED = ("--limit", "40", "--workload", "zipf10")


class TestOnTheCommandLine:
    def test_concurrency_is_a_closed_loop(self) -> None:
        closed = (*LIMITED, "--policy", "free", "--concurrency", "4")
        done = invoke(*closed, "--seeds", "0,1")
        assert done.exit_code == 0, done.output
        assert "4 in flight" in done.stdout
        tenths = done.stdout.partition("The run in tenths")[2]
        assert "tree" in tenths and tenths.count("│ ragorder (free)") == 1, "seeds are averaged"
        (run,) = bench(*closed)
        assert (run["concurrency"], run["ttft_ms"], run["failures"]) == (4, None, 0)
        assert {len(values) for values in run["tenths"].values()} == {10}
        assert "tenths" not in invoke(*closed[:-2]).stdout
        (run,) = bench(*closed[:-2])
        assert run["tenths"] is None and "concurrency" not in run

    def test_poisson_is_an_open_loop(self) -> None:
        slow, fast = (bench(*LIMITED, "--policy", "free", "--arrivals", f"poisson:{rate}")[0] for rate in ("0.1", "90"))
        assert [run["arrivals"] for run in (slow, fast)] == ["poisson:0.1", "poisson:90"]
        assert slow["tenths"]["in_flight"][-1] == 1
        assert fast["tenths"]["in_flight"][-1] > 5

    def test_steps_say_when_and_how_many(self) -> None:
        options = ("--workload", "zipf10", "--policy", "free", "--arrivals", "steps:60@10s,120@10s")
        (run,) = bench(*options, "--time-scale", "60")
        assert (run["requests"], run["arrivals"], run["time_scale"]) == (30, options[-1], 60)

    def test_a_trace_says_when_how_many_and_how_long(self, tmp_path: Path) -> None:
        made = written(tmp_path, MOONCAKE, "made.jsonl.gz")
        options = ("--workload", "zipf10", "--policy", "free", "--arrivals", made)
        assert bench(*options)[0]["requests"] == 3
        assert bench(*options, "--limit", "2")[0]["requests"] == 2
        (run,) = bench(*options, "--replicas", "8", "--time-scale", "2.5")
        assert run["requests"] == 24
        assert (run["arrivals"], run["time_scale"], run["replicas"]) == ("made.jsonl.gz", 2.5, 8)
        done = invoke(*options, "--replicas", "8", "--time-scale", "2.5", "--concurrency", "6")
        said = "6 in flight, arrivals made.jsonl.gz, time scale 2.5, replicas 8"
        assert said in " ".join(done.stdout.split())

    def test_the_modelled_rates_make_the_number_in_flight(self) -> None:
        def in_flight(*options: str) -> float:
            (run,) = bench(*LIMITED, "--policy", "free", "--arrivals", "poisson:5", *options)
            mean: float = run["tenths"]["in_flight"][-1]
            return mean

        usual = in_flight()
        assert in_flight("--decode-rate", "5") > 2 * usual
        assert in_flight("--prefill-rate", "5000") > 2 * usual
        assert in_flight("--output-tokens", "320") > 2 * usual

    def test_waiting_lets_the_tail_see_ahead_under_load_too(self) -> None:
        options = ["--limit", "200", "--policy", "free", "--concurrency", "4", "--waiting"]
        blind, seeing = (bench(*options, waiting)[0] for waiting in ("0", "8"))
        assert seeing["cached_tokens"] > blind["cached_tokens"]

    def test_a_batch_is_served_in_a_closed_loop(self) -> None:
        options = ["--workload", "zipf10", "--limit", "200", "--policy", "free", "--capacity-tokens", "20000"]
        alone, batch = (bench(*options, "--concurrency", "4", *extra)[0] for extra in ((), ("--batch",)))
        assert (batch["batch"], batch["requests"]) == (True, 200)
        assert batch["cached_tokens"] > alone["cached_tokens"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--engine", "vllm", "--concurrency", "2"), "--engine vllm serves one request at a time"),
            (("--batch", "--arrivals", "poisson:1"), "--batch plans all requests before the first is served"),
            (("--concurrency", "0"), "--concurrency"),
            (("--arrivals", "poisson:fast"), "requests per second, such as poisson:2.5"),
            (("--arrivals", "poisson:0"), "such as poisson:2.5"),
            (("--arrivals", "poisson:nan"), "such as poisson:2.5"),
            (("--arrivals", "poisson:inf"), "such as poisson:2.5"),
            (("--arrivals", "/nowhere/trace.csv"), "/nowhere/trace.csv: No such file"),
            (("--arrivals", "poisson:1", "--time-scale", "2"), "choose another rate"),
            (("--arrivals", "poisson:1", "--replicas", "2"), "choose another rate"),
            (("--arrivals", "TRACE", "--time-scale", "0"), "--time-scale"),
            (("--arrivals", "TRACE", "--time-scale", "nan"), "--time-scale"),
            (("--arrivals", "TRACE", "--time-scale", "inf"), "--time-scale"),
            (("--arrivals", "TRACE", "--replicas", "0"), "--replicas"),
            (("--arrivals", "TRACE", "--limit", "4"), "trace.csv has 3 arrivals: lower --limit (4)"),
            (("--time-scale", "2"), "give --arrivals FILE"),
            (("--replicas", "2"), "give --arrivals FILE"),
            (("--prefill-rate", "5"), "give --engine sim and --concurrency or --arrivals"),
            (("--decode-rate", "5"), "give --engine sim and --concurrency or --arrivals"),
            (("--concurrency", "2", "--decode-rate", "0"), "--decode-rate"),
            (("--concurrency", "2", "--prefill-rate", "nan"), "--prefill-rate"),
            (("--output-tokens", "0"), "--output-tokens"),
            (("--base-url", "http://x"), "--base-url and --served-model require --engine openai"),
            (("--served-model", "x"), "--base-url and --served-model require --engine openai"),
            (
                ("--engine", "openai", "--base-url", "x", "--base-url", "y"),
                "needs one --base-url, one for each --policy",
            ),
            (("--engine", "openai", "--capacity-tokens", "5%"), "give --capacity-tokens in tokens"),
            (("--policy", "events"), "use it with --engine openai"),
            (
                ("--engine", "openai", "--base-url", "x", "--policy", "events"),
                "policy 'events' needs --events-endpoint",
            ),
            (("--engine", "openai", "--events-endpoint", "ipc:///x"), "--events-endpoint requires --base-url"),
            (("--events-topic", "x"), "--replay-endpoint and --events-topic require --events-endpoint"),
            (("--engine", "openai", "--base-url", "x", "--policy", "none"), "policy 'none' is the server's to decide"),
            (("--engine", "openai", "--base-url", "x", "--policy", "oracle"), "--engine sim"),
            (("--engine", "openai", "--base-url", "http://127.0.0.1:9"), "cannot be reached"),
        ],
    )
    def test_what_cannot_be_run_is_refused(self, arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
        trace = str(written(tmp_path, AZURE))
        assert said in refusal(*(trace if argument == "TRACE" else argument for argument in arguments))


class TestBenchOnAServer:
    """The benchmark on a server whose cache is simulated."""

    @pytest.fixture
    def far(self, model_folder: Path) -> Iterator[FarServer]:
        pytest.importorskip("httpx2")
        with FarServer(root=str(model_folder)) as server:
            yield server

    @staticmethod
    def options(*servers: FarServer, policies: Sequence[str] = ("retrieval", "free")) -> list[str]:
        urls = [part for server in servers for part in ("--base-url", server.base_url)]
        named = [part for policy in policies for part in ("--policy", policy)]
        sizes = ["--block-size", "16", "--capacity-tokens", "unlimited"]
        return ["--engine", "openai", *urls, *named, *sizes, "--limit", "20"]

    def test_compares_policies_one_after_another_each_with_a_salt_of_its_own(self, far: FarServer) -> None:
        retrieval, auto = bench(*self.options(far))
        assert (auto["engine"], auto["requests"], auto["failures"]) == ("openai", 20, 0)
        assert auto["cached_tokens"] > retrieval["cached_tokens"] > 0
        assert auto["prediction_within_block"] == 1
        assert min(auto["ttft_ms"].values()) > 0
        served = [body["cache_salt"] for body in far.bodies][-40:]
        assert len(set(served[:20])) == len(set(served[20:])) == 1
        assert len(set(served)) == 2

    def test_who_is_first_changes_with_the_seed(self, far: FarServer) -> None:
        runs = bench(*self.options(far, policies=["retrieval", "sorted"]), "--seeds", "0,1")
        assert [(run["seed"], run["policy"]) for run in runs] == [
            (seed, policy) for seed in (0, 1) for policy in ("retrieval", "sorted")
        ]
        first_prompts: dict[str, list[int]] = {}
        for body in far.bodies:
            first_prompts.setdefault(body["cache_salt"], body["prompt"])
        prompts = list(first_prompts.values())
        # For each seed two salts of the check, which is in retrieval order, then one for each policy.
        for of_seed, expected in ((prompts[:4], "rrrs"), (prompts[4:], "rrsr")):
            assert "".join("r" if prompt == of_seed[0] else "s" for prompt in of_seed) == expected

    def test_arrivals_are_played_on_the_real_clock(self, far: FarServer, tmp_path: Path) -> None:
        options = self.options(far, policies=["free"])[:-2]
        played = ("--arrivals", written(tmp_path, MOONCAKE, "m.jsonl"), "--replicas", "4", "--time-scale", "50")
        (run,) = bench(*options, *played)
        assert (run["requests"], run["failures"]) == (12, 0)
        lengths = [body["max_tokens"] for body in far.bodies][-12:]
        # The second arrival says nothing of its answer: it gets the mean of the others.
        assert sorted(lengths) == [7] * 4 + [254] * 4 + [500] * 4

    @pytest.mark.parametrize("load", [(), ("--concurrency", "3")])
    def test_each_policy_may_have_a_server(self, far: FarServer, model_folder: Path, load: tuple[str, ...]) -> None:
        with FarServer(root=str(model_folder)) as other:
            retrieval, auto = bench(*self.options(far, other), *load)
            assert not load or auto["tenths"]["in_flight"][-1] > 1
            assert auto["cached_tokens"] > retrieval["cached_tokens"]
            for server in (far, other):
                assert len({body["cache_salt"] for body in server.bodies[-20:]}) == 1
            assert far.bodies[-1]["cache_salt"] != other.bodies[-1]["cache_salt"]

    def test_failures_are_counted_and_shown_in_red(self, far: FarServer) -> None:
        far.fault = lambda number: "cut" if number in (10, 15) else None
        (run,) = bench(*self.options(far, policies=["free"]))
        assert (run["requests"], run["failures"]) == (20, 2)
        far.bodies.clear()
        arguments = ["bench", *self.options(far, policies=["free"])]
        done = CliRunner().invoke(main, arguments, env={"COLUMNS": "200", "FORCE_COLOR": "1"}, color=True)
        assert done.exit_code == 0 and "failures" in done.stdout and "\x1b[1;31m2" in done.stdout

    def test_the_key_is_sent_and_another_model_can_be_named(self, far: FarServer, model_folder: Path) -> None:
        named = ("--api-key", "secret", "--served-model", "other", "--model", str(model_folder))
        bench(*self.options(far, policies=["free"]), *named)
        assert {headers["Authorization"] for headers in far.headers} == {"Bearer secret"}
        assert {body["model"] for body in far.bodies} == {"other"}

    def test_a_tokenizer_that_is_not_there_is_asked_for(self, far: FarServer) -> None:
        far.models[0]["root"] = "/nowhere"
        said = refusal(*self.options(far))
        assert "no tokenizer can be loaded from '/nowhere': give --model" in said

    def test_a_cache_of_unknown_size_is_asked_for(self, far: FarServer) -> None:
        options = [option for option in self.options(far) if option not in ("--capacity-tokens", "unlimited")]
        said = refusal(*options)
        assert "/metrics" in said and "--capacity-tokens and --block-size" in said

    def test_a_request_that_does_not_fit_is_refused_before_the_run(self, far: FarServer) -> None:
        far.models[0]["max_model_len"] = 300
        said = refusal(*self.options(far))
        assert "the server takes 300: lower --top-k or --output-tokens" in said
        assert far.bodies == []

    def test_needs_the_extra(self, python: Any) -> None:
        script = "from ragorder.cli import main; main(prog_name='ragorder')"
        arguments = ["bench", "--engine", "openai", "--base-url", "http://127.0.0.1:9"]
        done = python("-c", script, *arguments, blocked=("httpx2",))
        assert done.returncode == 1
        assert "pip install '.[live]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.vllm
class TestBenchOnVLLM:
    """The benchmark on a real server."""

    @staticmethod
    def options(server: Any, *, servers: int = 1) -> list[str]:
        urls = ["--base-url", f"{server.base_url}/v1"] * servers
        policies = ["--policy", "retrieval", "--policy", "free"]
        return ["--engine", "openai", *urls, *policies, "--limit", "20", "--top-k", "3"]

    @pytest.mark.slow
    @pytest.mark.parametrize("servers", [1, 2])
    def test_under_load(self, vllm_server: Any, servers: int) -> None:
        """Named twice, the one server holds both policies' blocks at a time; salts keep them apart."""
        vllm_server.reset()
        retrieval, auto = bench(
            *self.options(vllm_server, servers=servers), "--concurrency", "4", "--output-tokens", "4"
        )
        assert auto["capacity_tokens"] == vllm_server.capacity_tokens
        for run in (retrieval, auto):
            assert (run["requests"], run["failures"]) == (20, 0)
            assert min(run["ttft_ms"].values()) > 0
            assert run["tenths"]["in_flight"][-1] > 1
        assert auto["cached_tokens"] > retrieval["cached_tokens"]
        assert auto["prompt_tokens"] == retrieval["prompt_tokens"]

    @pytest.mark.slow
    def test_one_at_a_time_the_mirror_predicts_it(self, vllm_server: Any) -> None:
        """The second run begins with what the first one left, under another salt, and must not notice."""
        vllm_server.reset()
        first, second = bench(*self.options(vllm_server), "--policy", "prefix")[1:]
        for run in (first, second):
            assert run["prediction_within_block"] >= 0.95
            assert abs(run["prediction_bias_blocks"]) < 0.5

    def test_events_predict_what_a_server_given_reports(self, vllm_server: Any) -> None:
        vllm_server.reset()
        heard = ["--events-endpoint", vllm_server.events_endpoint, "--replay-endpoint", vllm_server.replay_endpoint]
        heard += ["--events-topic", vllm_server.events_topic, "--policy", "events"]
        *_, events = bench(*self.options(vllm_server), *heard)
        assert events["policy"] == "events"
        assert events["prediction_within_block"] >= 0.95
        assert events["cached_tokens"] > 0

    @pytest.mark.slow
    def test_a_server_is_started_where_none_is_given(self, vllm_model: Path) -> None:
        options = ["--engine", "openai", "--model", str(vllm_model), "--capacity-tokens", "8192", "--limit", "12"]
        retrieval, events = bench(*options, "--policy", "retrieval", "--policy", "events", "--concurrency", "2")
        assert events["capacity_tokens"] == 8192
        assert events["cached_tokens"] > retrieval["cached_tokens"]
        assert (events["requests"], events["failures"]) == (12, 0)
