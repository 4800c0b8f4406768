"""Answer quality: every question in every order, asked of servers and engines, and the command."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.commands import run_command
from support.http_server import Handler, LocalServer
from support.quality import (
    JSON,
    by_order,
    checks,
    corpus_folder,
    hotpot_folder,
    load_questions,
    make_bench,
    run_quality,
    written,
)
from support.results import result_lines

pytest.importorskip("scipy")

from ragorder.eval.cli.eval import eval as evaluate
from ragorder.eval.cli.quality import quality as command
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.running.load import silent
from ragorder.eval.suites.quality.answering import SYSTEM, Builders, OnceAnswers
from ragorder.eval.suites.quality.asking import ask_questions, serve_quality
from ragorder.eval.suites.quality.compare import summarise
from ragorder.eval.suites.quality.orders import DEFAULT_ORDERS, Order, QualityError, fused_orders
from ragorder.eval.suites.quality.questions import DATASETS
from ragorder.eval.suites.quality.specs import QualityBench, model_facts

Ask = Callable[..., list[JSON]]


@pytest.fixture
def hotpot(tmp_path: Path) -> Path:
    return hotpot_folder(tmp_path / "hotpotqa")


invoke = partial(run_command, command, env={"COLUMNS": "200"})


class TestDryRun:
    @pytest.mark.parametrize("dataset", DATASETS)
    def test_the_accepted_answer_scores_100_and_none_scores_0(self, tmp_path: Path, dataset: str) -> None:
        lines = run_quality(make_bench(dataset, corpus_folder(tmp_path / "c"), dry_run=True, top_k=3))
        for said, score in (("accepted", 100), ("empty", 0)):
            orders = by_order(lines, answers=said)
            assert tuple(orders) == DEFAULT_ORDERS
            assert {(line["em"], line["f1"]) for line in orders.values()} == {(score, score)}

    def test_an_answer_without_a_word_is_counted_instead_of_failing(self, tmp_path: Path) -> None:
        data = hotpot_folder(tmp_path / "c", range(2), {0: "A"})
        lines = run_quality(make_bench("hotpotqa", data, dry_run=True))
        assert {line["wordless_answers"] for line in by_order(lines).values()} == {1}
        assert by_order(lines, answers="empty")["retrieval"]["em"] == 50

    def test_an_answer_that_the_extraction_would_spoil_ends_it(self, tmp_path: Path) -> None:
        data = hotpot_folder(tmp_path / "c", range(1), {0: "Answer: 42"})
        said = r"the accepted answer to question '5a7a0' \(1 in all\) does not score 100"
        with pytest.raises(QualityError, match=said):
            run_quality(make_bench("hotpotqa", data, dry_run=True))

    def test_an_order_that_loses_a_document_ends_it(self, hotpot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from ragorder import PromptBuilder

        build = PromptBuilder.build

        def forgetful(self: Any, query: str, ordering: Any) -> Any:
            kept = ordering.documents[0].id in ("Radio City", "Echosmith 3")
            return build(self, query, ordering.documents[0 if kept else 1 :])

        monkeypatch.setattr(PromptBuilder, "build", forgetful)
        with pytest.raises(QualityError, match="order 'sorted' loses or changes documents of question '5a7a0'"):
            run_quality(make_bench("hotpotqa", hotpot, orders=("retrieval", "sorted"), dry_run=True))

    def test_counts_in_the_tokens_of_a_model_if_there_is_one(self, hotpot: Path, model_folder: Path) -> None:
        options = {"dry_run": True, "capacity_tokens": Capacity.parse("50%")}
        exact, estimated = (
            by_order(run_quality(make_bench("hotpotqa", hotpot, **options, **model)))["free"]["engine"]
            for model in ({"model": model_folder}, {})
        )
        assert exact["capacity_tokens"] != estimated["capacity_tokens"]


class TestLines:
    def test_hold_a_row_for_each_question_with_its_answer_and_no_document(self, hotpot: Path) -> None:
        lines = list(serve_quality(make_bench("hotpotqa", hotpot, dry_run=True)))
        for line in lines:
            assert line["rows"]["id"] == [f"5a7a{number}" for number in range(6)]
            assert {len(column) for column in line["rows"].values() if column is not None} == {6}
            assert line["rows"]["answer"] == ["Arthur's Magazine" * (line["cell"]["answers"] == "accepted")] * 6
        assert "1844" not in json.dumps(lines) and "magazine was started" not in json.dumps(lines)
        orders = by_order(lines)
        assert orders["retrieval"]["rows"]["gold_places"] == [[1, 2]] * 6
        assert orders["sorted"]["rows"]["gold_places"] == [[0, 2]] * 6
        assert orders["free+keep_last=2"]["rows"]["gold_places"][0][-1] == 2
        assert orders["sorted"]["rows"]["moved_share"] == [1.0, 0.5] * 3


class Service(LocalServer):
    """An OpenAI-compatible server on a port of its own. It answers with the title of the document that stands first,
    refuses the fields `refuses`, and every `fails`th question."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.base_url += "/v1"
        self.refuses: set[str] = set()
        self.fails = 0
        self.cached_tokens: int | None = 7
        self.content: Any = None
        self.bodies: list[JSON] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def say(self, body: JSON, key: str | None) -> tuple[int, Any]:
        if self.refuses & body.keys():
            return 400, {"error": "unknown field"}
        with self.lock:
            self.bodies.append(body)
            self.keys.append(key)
            if self.fails and len(self.bodies) % self.fails == 0:
                return 500, {}
        user = body["messages"][-1]["content"]
        first = user.partition("]")[0].removeprefix("[")
        usage: JSON = {"prompt_tokens": 50, "completion_tokens": 3}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        content = f"Answer: {first}." if self.content is None else self.content
        return 200, {"choices": [{"message": {"content": content}}], "usage": usage}


class _Handler(Handler):
    server: Service

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        models = {"data": [{"id": "Served-7B-Instruct"}, {"id": "other"}]}
        self.answer(200 if known else 404, json.dumps(models) if known else "")

    def do_POST(self) -> None:
        body, service = self.read_json(), self.server
        with service.lock:
            service.in_flight += 1
            service.most_in_flight = max(service.most_in_flight, service.in_flight)
        status, said = service.say(body, self.headers["Authorization"])
        with service.lock:
            service.in_flight -= 1
        self.answer(status, json.dumps(said))


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        yield service


@pytest.fixture
def ask(hotpot: Path, service: Service) -> Ask:
    def run(*orders: str, **options: Any) -> list[JSON]:
        server = {"engine": "openai", "base_url": service.base_url, "orders": orders or DEFAULT_ORDERS}
        return run_quality(make_bench("hotpotqa", hotpot, **server | options))

    return run


class TestServer:
    def test_every_question_is_asked_once_in_every_order_which_decides_what_it_sees(
        self, ask: Ask, service: Service
    ) -> None:
        lines = ask()
        assert len(service.bodies) == 6 * len(DEFAULT_ORDERS)
        orders = by_order(lines)
        assert tuple(orders) == DEFAULT_ORDERS
        assert {line["dry_run"] for line in lines} == {False}
        assert (orders["retrieval"]["em"], orders["sorted"]["em"]) == (0, 100)
        assert orders["sorted"]["rows"]["em"] == [1] * 6
        told = {"name": "openai", "model": "Served-7B-Instruct", "block_size": 16, "capacity_tokens": 262_144}
        assert orders["free"]["engine"] == told

    def test_requests_are_greedy_and_no_longer_than_asked(self, ask: Ask, service: Service) -> None:
        ask("retrieval", output_tokens=5, served_model="other", api_key="sk-1")
        body = service.bodies[0]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0, 5)
        assert body["messages"][0] == {"role": "system", "content": SYSTEM}
        assert body["messages"][1]["content"].startswith("[Radio City]\nRadio City is a radio station.")
        assert body["messages"][1]["content"].endswith("Question: Which magazine was started first, number 0?")
        assert service.keys == ["Bearer sk-1"] * 6

    def test_the_ranking_is_stated_where_the_order_says_so(self, ask: Ask, service: Service) -> None:
        ask("sorted+state_ranking")
        note = "Documents from most to least relevant: Radio City, First for Women 0, Arthur's Magazine, Echosmith 0"
        assert note in service.bodies[0]["messages"][1]["content"]

    def test_each_order_has_a_cache_of_its_own_and_policy_none_one_for_each_question(
        self, ask: Ask, service: Service
    ) -> None:
        lines = ask("retrieval", "free", "none")
        salts = [body["cache_salt"] for body in service.bodies]
        assert [len(set(salts[first : first + 6])) for first in (0, 6, 12)] == [1, 1, 6]
        assert salts[0] != salts[6]
        assert by_order(lines)["free"]["rows"]["cached_tokens"] == [7] * 6
        service.cached_tokens = None
        assert by_order(ask("free"))["free"]["rows"]["cached_tokens"] is None

    def test_a_server_without_salts_is_asked_without_and_its_cached_tokens_say_nothing(
        self, ask: Ask, service: Service
    ) -> None:
        service.refuses = {"cache_salt"}
        line = by_order(ask("retrieval", capacity_tokens=Capacity.parse("unlimited")))["retrieval"]
        assert (line["failures"], line["rows"]["cached_tokens"], line["engine"]["capacity_tokens"]) == (0, None, None)
        assert "cache_salt" not in service.bodies[0]

    def test_a_server_with_another_name_for_the_limit_is_understood(self, ask: Ask, service: Service) -> None:
        service.refuses = {"cache_salt", "max_tokens"}
        assert by_order(ask("retrieval", output_tokens=4, concurrency=3))["retrieval"]["failures"] == 0
        assert {body["max_completion_tokens"] for body in service.bodies} == {4}

    def test_questions_in_flight_change_no_order(self, ask: Ask, service: Service) -> None:
        def places() -> list[list[int]]:
            rows: list[list[int]] = by_order(ask("free", concurrency=3))["free"]["rows"]["gold_places"]
            return rows

        assert places() == places()
        assert service.most_in_flight <= 3

    def test_a_failed_question_is_counted_and_in_no_row(self, ask: Ask, service: Service) -> None:
        service.fails = 4
        lines = ask("retrieval", "sorted")
        orders = by_order(lines)
        assert [orders[name]["failures"] for name in ("retrieval", "sorted")] == [1, 2]
        assert orders["retrieval"]["rows"]["id"] == ["5a7a0", "5a7a1", "5a7a2", "5a7a4", "5a7a5"]
        assert checks(lines, "quality-comparison")[0]["questions"] == 3

    def test_an_empty_answer_is_a_wrong_one(self, ask: Ask, service: Service) -> None:
        service.content = ""
        found = by_order(ask("retrieval"))["retrieval"]
        assert (found["failures"], found["em"]) == (0, 0)

    @pytest.mark.parametrize(
        ("server", "options", "said"),
        [
            ({"content": ["x"]}, {}, "not one of 6 questions was answered: the answer has no text"),
            ({"content": {}}, {}, "not one of 6 questions was answered: the answer has no text"),
            ({"refuses": {"messages"}}, {}, "not one of 6 questions was answered: HTTP 400"),
            ({}, {"base_url": "http://127.0.0.1:9"}, "cannot be reached"),
            ({}, {"served_model": "mine"}, "no model 'mine'"),
        ],
    )
    def test_without_a_server_or_an_answer_it_ends_with_the_reason(
        self, ask: Ask, service: Service, server: JSON, options: JSON, said: str
    ) -> None:
        vars(service).update(server)
        with pytest.raises(EngineError, match=said):
            ask("retrieval", **options)

    def test_answers_that_contain_an_accepted_one_are_compared_as_well(self, ask: Ask, service: Service) -> None:
        service.content = "It was Arthur's Magazine, I think."
        lines = ask("retrieval", "sorted")
        assert {(each["em"], each["contains"]) for each in by_order(lines).values()} == {(0, 100)}
        (compared,) = checks(lines, "quality-comparison")
        assert (compared["contains"], compared["contains_won"]) == (100, 0)
        assert compared["contains_verdict"] == "no difference"


class TestPlaces:
    def test_only_the_best_gold_document_moves(self, ask: Ask) -> None:
        orders = by_order(ask("place=1", "place=4"))
        assert orders["place=1"]["rows"]["gold_places"] == [[0, 2], [0, 2]] * 3
        assert orders["place=4"]["rows"]["gold_places"] == [[1, 3], [1, 3]] * 3

    def test_questions_without_a_gold_document_are_left_out_and_counted(self, tmp_path: Path, service: Service) -> None:
        folder = corpus_folder(tmp_path / "c")
        written(folder / "run_mine.jsonl", *({"id": f"q{n}", "chunks": ["d7", "d0"]} for n in range(4)))
        bench = make_bench("corpus", folder, engine="openai", base_url=service.base_url, orders=("place=2",), top_k=2)
        (asked,) = serve_quality(bench)
        assert (asked["rows"]["id"], asked["passed_over"]) == (["q0"], {"questions without a gold document": 3})

    def test_the_command_asks_the_sample_that_comes_with_it(self, tmp_path: Path, service: Service) -> None:
        done = invoke(
            "--places", "--engine", "openai", "--base-url", service.base_url, "--limit", 3, "--output", tmp_path
        )
        assert done.exit_code == 0, done.output
        assert len(service.bodies) == 3 * 5
        said = " ".join(done.output.split())
        assert re.search(r"no difference found: [\d.]+ % of 3 answers are right with the best document first", said)
        assert 'leave Settings(best="any"), the default' in said


class TestAnswersOfAnEngineInThisProcess:
    """By a random model, whose answers are noise."""

    @pytest.fixture
    def bench(self, tmp_path: Path, model_folder: Path) -> QualityBench:
        pytest.importorskip("torch")
        options = {"orders": ("retrieval", "reversed", "none"), "answers": tmp_path / "answers.jsonl", "top_k": 2}
        options |= {"engine": "torch", "model": model_folder, "output_tokens": 4}
        return make_bench("corpus", corpus_folder(tmp_path / "c"), **options)

    def test_each_prompt_is_answered_once_however_many_orders_lead_to_it(
        self, bench: QualityBench, tmp_path: Path
    ) -> None:
        lines = by_order(list(serve_quality(bench)))
        kept = [json.loads(each) for each in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
        assert len(kept) == len({each["prompt"] for each in kept}) == 4 * 2, "none has the prompts of retrieval"
        assert lines["none"]["rows"]["answer"] == lines["retrieval"]["rows"]["answer"]
        assert sum(lines["none"]["rows"]["cached_tokens"]) == 0 < sum(lines["retrieval"]["rows"]["cached_tokens"])
        assert min(lines["retrieval"]["rows"]["prompt_tokens"]) > 50
        assert lines["retrieval"]["model"]["name"] == "smallest", "of a folder the name, without its place"

    def test_an_interrupted_run_goes_on(self, bench: QualityBench, tmp_path: Path) -> None:
        whole = list(serve_quality(bench))
        file = tmp_path / "answers.jsonl"
        kept = file.read_text("utf-8").splitlines(keepends=True)
        file.write_text("".join(kept[:3]) + kept[3][:20], "utf-8")
        assert list(serve_quality(bench)) == whole
        assert sorted(set(file.read_text("utf-8").splitlines())) == sorted({*map(str.strip, kept), kept[3][:20]})

    def test_another_length_of_answers_is_another_answer(self, bench: QualityBench, tmp_path: Path) -> None:
        list(serve_quality(bench))
        longer = bench.engine.model_copy(update={"output_tokens": 6})
        list(serve_quality(replace(bench, engine=longer)))
        assert len((tmp_path / "answers.jsonl").read_text("utf-8").splitlines()) == 2 * 4 * 2

    @pytest.mark.merge
    def test_every_way_of_reuse_is_asked_end_to_end(self, tmp_path: Path, model_folder: Path) -> None:
        pytest.importorskip("torch")
        hotpot = hotpot_folder(tmp_path / "hotpotqa", range(3))
        options = ["--engine", "torch", "--model", model_folder, "--output-tokens", 2, "--fusion", "0,.2,1"]
        done = invoke("hotpotqa", "--data", hotpot, "-o", tmp_path, "--select", "query,deviation", *options)
        assert done.exit_code == 0, done.output
        lines = result_lines(tmp_path)
        asked = by_order(lines)
        assert tuple(asked) == ("retrieval", *fused_orders(["retrieval"], [0, 0.2, 1], ["query", "deviation"]))
        exact = asked.pop("retrieval")
        assert exact["rows"]["fused_tokens"] is None
        for name, found in asked.items():
            recompute, rows = Order.parse(name).fused.recompute, found["rows"]  # type: ignore[union-attr]
            assert found["failures"] == 0
            assert min(*rows["fused_tokens"], *rows["cached_tokens"]) > 0
            assert rows["recomputed_tokens"] == [round(recompute * fused) for fused in rows["fused_tokens"]]
        (verdict,) = checks(lines, "quality-verdict")
        assert not verdict["measured"]


@pytest.mark.vllm
class TestVLLM:
    def test_every_order_is_asked_end_to_end(self, tmp_path: Path, vllm_model: Path, vllm_engine: Any) -> None:
        from ragorder.eval.engines.models import load_tokenizer

        hotpot = hotpot_folder(tmp_path / "hotpotqa", times=4)
        orders = ("none", *DEFAULT_ORDERS)
        bench = make_bench("hotpotqa", hotpot, model=vllm_model, output_tokens=8, orders=orders)
        data = load_questions("hotpotqa", hotpot)
        builders, facts = Builders(load_tokenizer(vllm_model)), model_facts("random", vllm_model)
        engine = OnceAnswers(vllm_engine, 8, capacity_tokens=vllm_engine.capacity_tokens, model="random")

        def ask() -> list[JSON]:
            parsed = [Order.parse(name) for name in orders]
            return list(ask_questions(bench, data, parsed, engine, builders, facts, silent, bench.cells[0]))

        ask()
        engine.answer_missing(silent)
        lines = ask()
        assert tuple(by_order(lines)) == orders
        for asked in lines:
            assert (asked["failures"], len(asked["rows"]["em"]), asked["engine"]["name"]) == (0, 6, "vllm")
        cached = {name: sum(asked["rows"]["cached_tokens"]) for name, asked in by_order(lines).items()}
        assert cached["free"] > cached["retrieval"] > cached["none"] == 0
        assert by_order(lines)["none"]["rows"]["answer"] == by_order(lines)["retrieval"]["rows"]["answer"]
        (verdict,) = checks(summarise(lines), "quality-verdict")
        assert verdict["message"] == "quality was NOT measured: the model has random weights: its answers are noise"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"capacity_tokens": Capacity.parse("64")}, r"the cache \(--capacity-tokens\) holds 64: lower --top-k"),
            ({"output_tokens": 5000}, "answer included, and the model takes 4,096"),
        ],
    )
    def test_prompts_that_cannot_fit_are_refused_before_the_model_is_loaded(
        self, hotpot: Path, vllm_model: Path, options: JSON, message: str
    ) -> None:
        with pytest.raises(QualityError, match=message):
            run_quality(make_bench("hotpotqa", hotpot, model=vllm_model, **options))

    @pytest.mark.slow
    def test_a_real_server_keeps_the_orders_apart(self, hotpot: Path, vllm_model: Path, vllm_server: Any) -> None:
        orders = ("none", "retrieval", "free")
        options = {"base_url": vllm_server.base_url, "model": vllm_model, "output_tokens": 4}
        lines = run_quality(make_bench("hotpotqa", hotpot, engine="openai", orders=orders, **options))
        cached = {name: asked["rows"]["cached_tokens"] for name, asked in by_order(lines).items()}
        assert cached["none"] == [0] * 6
        assert cached["retrieval"][0] == cached["free"][0] == 0
        assert sum(cached["free"]) > 0
        assert by_order(lines)["free"]["engine"]["capacity_tokens"] == 128 * 32
        (verdict,) = checks(lines, "quality-verdict")
        assert verdict["reason"] == "the model has random weights: its answers are noise"

    @pytest.mark.slow
    def test_the_command_starts_an_engine_of_its_own(self, hotpot: Path, vllm_model: Path, tmp_path: Path) -> None:
        arguments = ["--model", vllm_model, "--limit", 2, "--output-tokens", 4, "--policy", "free"]
        done = invoke("hotpotqa", "--data", hotpot, "-o", tmp_path / "out", *arguments)
        assert done.exit_code == 0, done.output
        assert "quality was NOT measured: the model has random weights" in " ".join(done.output.split())
        (asked,) = result_lines(tmp_path / "out", "quality")
        assert len(asked["rows"]["cached_tokens"]) == 2


class TestCommand:
    def test_a_dry_run_writes_a_session_the_orders_and_a_verdict(self, hotpot: Path, tmp_path: Path) -> None:
        done = invoke("hotpotqa", "--data", hotpot, "--dry-run", "-o", tmp_path / "out")
        assert done.exit_code == 0, done.output
        session, *lines = result_lines(tmp_path / "out")
        assert (session["type"], session["schema"], session["arguments"]["dry_run"]) == ("session", 1, True)
        assert session["environment"]["python"]
        assert [each["type"] for each in lines] == ["quality"] * 16 + ["check"] * 2
        assert {each["session"] for each in lines} == {session["session"]}
        assert {each["dry_run"] for each in lines} == {True}
        assert {line["engine"]["name"] for line in by_order(lines).values()} == {"stub"}
        assert {line["rows"]["cached_tokens"] for line in by_order(lines).values()} == {None}
        assert done.output.count("quality was NOT measured: this was a dry run, in which a stub answered") == 2
        verdicts = checks(lines, "quality-verdict")
        assert len(verdicts) == 2, "and no comparison"
        for verdict in verdicts:
            assert verdict["measured"] is False
            assert (verdict["reordered"]["retrieval"], verdict["reordered"]["sorted"]) == (0, 1)
            assert verdict["reordered"]["free"] > 0

    def test_what_is_there_is_not_asked_again_and_compared_with_what_is_new(
        self, hotpot: Path, tmp_path: Path, service: Service
    ) -> None:
        arguments = ["hotpotqa", "--data", hotpot, "--engine", "openai", "--base-url", service.base_url, "-o", tmp_path]
        assert invoke(*arguments, "--policy", "retrieval").exit_code == 0
        done = invoke(*arguments, "--policy", "retrieval", "--policy", "sorted")
        assert done.exit_code == 0, done.output
        assert len(service.bodies) == 12
        assert [each["policy"] for each in result_lines(tmp_path, "quality")] == ["retrieval", "sorted"]
        (compared,) = checks(result_lines(tmp_path), "quality-comparison")
        assert (compared["policy"], compared["em_won"], compared["em_verdict"]) == ("sorted", 6, "better")
        assert "quality was measured" in done.output
        again = invoke(*arguments, "--policy", "sorted")
        assert "already has results for all of these orders: nothing was asked" in again.output
        assert len(service.bodies) == 12

    def test_every_option_reaches_the_experiment(self, tmp_path: Path, service: Service) -> None:
        pytest.importorskip("bm25s")
        data = hotpot_folder(tmp_path / "corpus", range(4))
        done = invoke(
            "2wikimultihopqa",
            *("--data", data, "--limit", 3, "--order", "random", "--seed", 5),
            *("--top-k", 4, "--document-words", 4, "--retriever", "bm25", "--policy", "free+keep_first=1"),
            *("--engine", "openai", "--base-url", service.base_url, "--served-model", "other", "--api-key", "sk-9"),
            *("--concurrency", 2, "--capacity-tokens", "9000", "--block-size", 64, "--output-tokens", 6),
            *("-o", tmp_path / "out"),
        )
        assert done.exit_code == 0, done.output
        session, asked, *_ = result_lines(tmp_path / "out")
        assert "sk-9" not in json.dumps(session)
        assert (asked["suite"], asked["seed"], asked["policy"]) == ("quality", 5, "free+keep_first=1")
        cell = {"dataset": "2wikimultihopqa", "data": str(data), "limit": 3, "question_order": "random", "top_k": 4}
        cell |= {"document_words": 4, "retriever": "bm25", "engine": "openai", "model": "other", "concurrency": 2}
        cell |= {"base_url": service.base_url, "capacity_tokens": 9000, "block_size": 64, "output_tokens": 6}
        assert asked["cell"] == cell
        assert (asked["engine"]["block_size"], asked["engine"]["capacity_tokens"]) == (64, 9000)
        assert (service.keys[0], service.bodies[0]["max_tokens"]) == ("Bearer sk-9", 6)

    def test_ones_own_questions_as_the_documentation_has_them(
        self, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = (Path(__file__).parents[2] / "docs" / "quality.md").read_text("utf-8")
        monkeypatch.chdir(tmp_path)
        Path("my-corpus").mkdir()
        blocks = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
        for name, block in zip(("documents", "questions", "run_own"), blocks, strict=True):
            Path("my-corpus", f"{name}.jsonl").write_text(block, "utf-8")
        asked = []
        for words in re.findall(r"^ragorder eval quality .*", page, re.MULTILINE):
            del service.bodies[:]
            done = invoke(*words.replace("http://127.0.0.1:8000/v1", service.base_url).split()[3:])
            assert done.exit_code == 0, done.output
            asked.append(len(service.bodies))
        assert asked == [120 * 5, 2 * len(DEFAULT_ORDERS), 2 * 2]
        sent = json.dumps(service.bodies)
        assert "two years" in sent and "They must be unused." in sent

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["squad"], "'squad' is not one of"),
            (["hotpotqa", "--data", "nowhere"], "does not exist"),
            (["corpus", "--data", __file__], "--data is a folder with documents.jsonl"),
            (["corpus", "--data", "BROKEN", "--dry-run"], 'questions.jsonl:2: "question" is missing'),
            (["corpus", "--top-k", "9", "--dry-run"], "ranks 4 documents a question: lower --top-k (9)"),
            (["--policy", "free", "--policy", "free"], "the same order twice"),
            (["--base-url", "http://x"], "require --engine openai"),
            (["--served-model", "x"], "require --engine openai"),
            (["--fusion", "0,2"], "give shares from 0 to 1"),
            (["--fusion", "some"], "give shares from 0 to 1"),
            (["--select", "query"], "--select requires --fusion"),
            (["hotpotqa", "--fusion", "0.1"], "give --engine torch"),
            (["--places", "--policy", "free"], "--places uses its own orders"),
            (["hotpotqa", "--embedding-model", "x"], "--embedding-model requires --retriever dense"),
            (["hotpotqa", "--policy", "wild"], "unknown policy 'wild'"),
            (["hotpotqa", "--capacity-tokens", "lots"], "is no capacity"),
            (["hotpotqa", "--engine", "openai"], "needs --base-url"),
            (["hotpotqa", "--engine", "openai", "--base-url", "ftp://x"], "is not the URL of a server"),
            (["hotpotqa", "--concurrency", "2"], "requires --engine openai"),
            (["hotpotqa", "--retriever", "dense", "--embedding-model", "/nowhere"], "nowhere"),
        ],
    )
    def test_bad_input_is_one_line_without_a_traceback(
        self, hotpot: Path, tmp_path: Path, arguments: list[str], message: str
    ) -> None:
        broken = corpus_folder(tmp_path / "broken")
        written(broken / "questions.jsonl", {"id": "q0", "question": "?"}, {"id": "x"})
        data = [] if "--data" in arguments else ["--data", hotpot]
        asked = [broken if each == "BROKEN" else each for each in arguments]
        done = invoke(*asked, *data, "-o", tmp_path / "out")
        assert done.exit_code in (1, 2)
        assert message in " ".join(done.output.split())


SUITE = """
title = "Answers"
source = "tests"
says = "Something."
kind = "quality"
policies = ["retrieval", "sorted", "free+keep_first=1"]
warmup = 0
requests = 4
cell = { top_k = 2, document_words = 3, output_tokens = 6 }
sweep = { dataset = ["hotpotqa"] }
report = { chart = "quality" }
"""


class TestInASuite:
    @pytest.fixture
    def run(self, hotpot: Path, tmp_path: Path, service: Service) -> Ask:
        """The lines of `ragorder eval run` against the server, those of its session's beginning left out."""
        (tmp_path / "mine.toml").write_text(SUITE)

        def run(*options: str) -> list[JSON]:
            arguments = ["run", tmp_path / "mine.toml", "-o", tmp_path / "out", "--questions", hotpot.parent]
            arguments += ["--engine", "openai", "--base-url", service.base_url, *options]
            done = CliRunner().invoke(evaluate, [str(argument) for argument in arguments])
            assert done.exit_code == 0, done.output
            return [each for each in result_lines(tmp_path / "out") if each["type"] != "session"]

        return run

    def test_what_the_cell_says_reaches_the_server(self, run: Ask, service: Service) -> None:
        lines = run()
        assert by_order(lines).keys() == {"retrieval", "sorted", "free+keep_first=1"}
        cell = {"dataset": "hotpotqa", "top_k": 2, "document_words": 3, "output_tokens": 6}
        assert all(each["cell"] == cell for each in lines)
        assert [body["max_tokens"] for body in service.bodies] == [6] * 12
        prompt = json.dumps(service.bodies[0]["messages"])
        assert "Radio City is" in prompt and "First for Women" in prompt
        assert "Radio City is a" not in prompt and "Echosmith" not in prompt
        # It ends with the same checks as the command.
        found = [each for each in lines if each["type"] == "check"]
        assert [{**each, "session": ""} for each in found] == [{**each, "session": ""} for each in summarise(lines)]
        (verdict,) = checks(lines, "quality-verdict")
        assert verdict["measured"] is True
