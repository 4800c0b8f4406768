"""Watching an orderer: metrics, spans, shadow mode, and what was saved."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any

import pytest
from click.testing import CliRunner
from support.http_server import PageServer

from ragorder import Document, Lengths, Orderer, PromptBuilder
from ragorder.adapters.observing.observed import Observation, ObservedOrderer
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.observing.stats import Stats
from ragorder.cli import main
from ragorder.ordering import Moves, RequestOutcome

prometheus_client = pytest.importorskip("prometheus_client")

BLOCK = 16
DOCUMENTS = [Document(f"d{number}", f"secret text {number}", tokens=100) for number in range(12)]
OPTIONS: dict[str, Any] = {"capacity_tokens": 2_000, "block_size": BLOCK, "prefix_tokens": 64, "suffix_tokens": 20}


def make_orderer(**options: Any) -> Orderer:
    return Orderer(**OPTIONS | {"strict": True} | options)


def asked(count: int, seed: int = 0) -> list[list[Document]]:
    rng = random.Random(seed)
    return [rng.sample(DOCUMENTS, 5) for _ in range(count)]


def serve(metrics: Metrics, requests: int, *report: int, compare: bool = True, **counts: int) -> None:
    watched = ObservedOrderer(make_orderer(), [metrics], compare=compare)
    for documents in asked(requests):
        watched.order(documents).confirm(*report, **counts)


def read(metrics: Metrics) -> Stats:
    return Stats.of(metrics.registry.collect())


class Recorder:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.observations: list[Observation] = []
        self.outcomes: list[RequestOutcome] = []

    def ordered(self, observation: Observation) -> Callable[[RequestOutcome], None]:
        self.observations.append(observation)
        return self.outcomes.append


class TestObservedOrderer:
    def test_plans_batches_as_the_orderer_that_it_wraps(self) -> None:
        requests = asked(30)
        plain, watched = make_orderer().order_batch(requests), ObservedOrderer(make_orderer()).order_batch(requests)
        assert list(watched.indices) == list(plain.indices)
        for expected, ordering in zip(plain, watched, strict=True):
            assert (ordering.index, ordering.documents) == (expected.index, expected.documents)

    def test_orders_as_the_orderer_that_it_wraps_with_scope_waiting_and_lengths(self) -> None:
        plain, watched = make_orderer(), ObservedOrderer(make_orderer(), [Recorder()])
        for documents, waiting in zip(asked(200), asked(200, seed=1), strict=True):
            for scope in ("a", "b", None):
                options: dict[str, Any] = {"scope": scope, "lengths": Lengths(8, 40)} if scope else {}
                expected = plain.order(documents, waiting=[waiting], **options)
                ordering = watched.order(iter(documents), waiting=[iter(waiting)], **options)
                assert (ordering.documents, ordering.permutation) == (expected.documents, expected.permutation)
                assert ordering.cached_tokens == expected.cached_tokens
                assert ordering.documents_end == (8 if scope else 64) + 500
                expected.confirm()
                ordering.confirm()
        assert (watched.tree_size, watched.evicted_blocks) == (plain.tree_size, plain.evicted_blocks)
        assert watched.evicted_blocks > 0

    def test_tells_what_the_other_order_would_have_had(self) -> None:
        recorder = Recorder()
        watched, unordered = ObservedOrderer(make_orderer(), [recorder]), make_orderer(max_displacement=0)
        for documents in asked(100):
            ordering, retrieval = watched.order(documents), unordered.order(documents)
            assert retrieval.documents == documents
            told = recorder.observations[-1]
            assert (told.ordered_tokens, told.retrieval_tokens) == (ordering.cached_tokens, retrieval.cached_tokens)
            assert (told.documents, told.documents_end, told.fallback) == (5, 564, False)
            assert told.moves == ordering.moves
            assert told.predicted_tokens == ordering.cached_tokens
            # Long answers take room from either.
            ordering.confirm(total_tokens=1_000)
            retrieval.confirm(total_tokens=1_000)
        assert sum(o.ordered_tokens or 0 for o in recorder.observations) > sum(
            o.retrieval_tokens or 0 for o in recorder.observations
        )

    def test_a_watcher_gets_each_outcome_once_and_a_failed_request_leaves_nothing_in_either_cache(self) -> None:
        recorder = Recorder()
        watched = ObservedOrderer(make_orderer(), [recorder])
        watched.order(DOCUMENTS[:5]).discard()
        ordering = watched.order(DOCUMENTS[:5])
        told = recorder.observations[-1]
        assert (told.ordered_tokens, told.retrieval_tokens) == (0, 0)
        ordering.confirm(64, 600, prompt_tokens=580)
        ordering.confirm(0)
        ordering.discard()
        assert recorder.outcomes == [RequestOutcome(False), RequestOutcome(True, 64, 600, 580)]

    def test_evictions_seen_in_a_report_count_in_either_order(self) -> None:
        recorder = Recorder()
        watched = ObservedOrderer(make_orderer(), [recorder])
        watched.order(DOCUMENTS[:5]).confirm()
        watched.order(DOCUMENTS[5:10]).confirm()
        watched.order(DOCUMENTS[5:10]).confirm(0)
        watched.order(DOCUMENTS[:5])
        assert recorder.observations[2].retrieval_tokens == 560
        # What is older than what was lost is lost as well; only the prefix was used since.
        assert (recorder.observations[3].ordered_tokens, recorder.observations[3].retrieval_tokens) == (64, 64)

    @pytest.mark.parametrize("broken", ["ordered", "settled"])
    def test_a_watcher_that_fails_breaks_nothing(self, broken: str, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Recorder):
            def ordered(self, observation: Observation) -> Callable[[RequestOutcome], None]:
                return self.settle if broken == "settled" else self.settle(None)  # type: ignore[return-value]

            def settle(self, outcome: Any) -> None:
                raise RuntimeError("secret text")

        watched, plain = ObservedOrderer(make_orderer(strict=False), [Broken()]), make_orderer()
        for documents in asked(20):
            ordering, expected = watched.order(documents), plain.order(documents)
            assert ordering.documents == expected.documents
            ordering.confirm()
            expected.confirm()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "RuntimeError" in caplog.text
        assert "secret" not in caplog.text

    @pytest.mark.parametrize("shadow", [False, True])
    def test_counts_what_falls_back(self, shadow: bool) -> None:
        recorder, metrics = Recorder(), Metrics()
        watched = ObservedOrderer(make_orderer(strict=False), [recorder, metrics], shadow=shadow)
        given: list[Any] = [DOCUMENTS[0], object()]
        assert watched.order(given).documents == given
        assert watched.fall_back(DOCUMENTS[:3], ValueError("x")).documents == DOCUMENTS[:3]
        watched.order(DOCUMENTS[:3])
        assert [told.fallback for told in recorder.observations] == [True, True, False]
        assert (watched.fallbacks, read(metrics).fallbacks) == (3 if shadow else 2, 2)

    def test_many_threads(self) -> None:
        metrics = Metrics()
        watched = ObservedOrderer(make_orderer(), [metrics])

        def serve(seed: int) -> None:
            for documents in asked(100, seed):
                ordering = watched.order(documents)
                assert sorted(d.id for d in ordering.documents) == sorted(d.id for d in documents)
                ordering.confirm(ordering.cached_tokens, prompt_tokens=600)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(serve, range(8)))
        stats = read(metrics)
        assert (stats.served, stats.documents, stats.prompt_tokens) == (800, 4_000, 480_000)
        assert stats.reports == 800


class TestShadowMode:
    def test_serves_retrieval_order_and_scores_ours(self) -> None:
        """What it says would have been saved is what ordering does save on the same requests."""
        shadowed, served = Metrics(), Metrics()
        shadow = ObservedOrderer(make_orderer(), [shadowed], shadow=True)
        active = ObservedOrderer(make_orderer(), [served])
        for documents in asked(300):
            ordering = shadow.order(documents)
            assert ordering.documents == documents
            assert list(ordering.permutation) == list(range(5))
            ordering.confirm(ordering.cached_tokens)
            served_ordering = active.order(documents)
            served_ordering.confirm(served_ordering.cached_tokens)
        predicted, saved = read(shadowed), read(served)
        assert predicted.shadow and not saved.shadow
        assert (predicted.saved_tokens, predicted.saved_share) == (saved.saved_tokens, saved.saved_share)
        assert saved.saved_share == (saved.saved_tokens or 0) / (saved.prompt_tokens - (saved.other_cached_tokens or 0))
        assert (shadow.tree_size, shadow.evicted_blocks) == (active.tree_size, active.evicted_blocks)
        assert (saved.saved_tokens or 0) > 20_000
        assert predicted.displacement_mean == saved.displacement_mean > 0

    @pytest.mark.parametrize("best", ["first", "last"])
    def test_retrieval_order_is_not_arranged_for_the_best_document(self, best: str) -> None:
        watched = ObservedOrderer(make_orderer(best=best), shadow=True)
        batches = [watched.order(documents) for documents in asked(20)], watched.order_batch(asked(20))
        assert all(list(ordering.permutation) == list(range(5)) for batch in batches for ordering in batch)
        assert [ordering.index for ordering in batches[1]] == list(range(20))

    def test_follows_what_the_engine_reports_of_the_order_that_it_got(self) -> None:
        recorder = Recorder()
        watched = ObservedOrderer(make_orderer(), [recorder], shadow=True)
        watched.order(DOCUMENTS[:5]).confirm()
        watched.order(DOCUMENTS[:5]).confirm(0)
        assert recorder.observations[1].predicted_tokens == recorder.observations[1].retrieval_tokens == 560


class TestMetrics:
    def test_counts_tokens_as_the_engine_reports_them(self) -> None:
        metrics = Metrics()
        watched = ObservedOrderer(make_orderer(), [metrics])
        watched.order(DOCUMENTS[:5]).confirm(0, 620, prompt_tokens=600)
        watched.order(DOCUMENTS[:5]).confirm(544, 620, prompt_tokens=600)
        watched.order(DOCUMENTS[:5]).confirm()
        watched.order(DOCUMENTS[:5]).discard()
        stats = read(metrics)
        assert (stats.served, stats.discarded, stats.reports, stats.documents) == (3, 1, 2, 20)
        assert stats.prompt_tokens == 600 + 600 + 564
        assert stats.cached_tokens == 0 + 544 + 560
        assert stats.predicted_other_tokens == 0 + 560 + 560
        assert stats.cannot_compare == "too early: 2 of the first 8 requests reported their cached tokens"
        # Predicted were 0 and 560.
        assert (stats.prediction_error_tokens, stats.prediction_bias_tokens) == (8.0, 8.0)
        assert stats.tree_nodes == watched.tree_size

    @pytest.mark.parametrize("shadow", [False, True])
    def test_usage_that_makes_no_sense_gives_no_absurd_share(self, shadow: bool) -> None:
        """Prompts are said to have 20 tokens, though their documents have 500: it showed 10853.3 %."""
        metrics = Metrics()
        watched = ObservedOrderer(make_orderer(), [metrics], shadow=shadow)
        for number, documents in enumerate(asked(200)):
            watched.order(documents).confirm(number % 90, prompt_tokens=20 + number % 7)
        stats = read(metrics)
        assert 0 <= stats.cached_share <= 1
        assert 0 <= (stats.predicted_other_share or 0) <= 1
        assert abs(stats.saved_share or 0) <= 1

    def test_no_sample_tells_of_a_document_or_of_a_tenant(self) -> None:
        metrics = Metrics()
        watched = ObservedOrderer(make_orderer(), [metrics])
        for scope in ("tenant-one", "tenant-two"):
            watched.order(DOCUMENTS[:5], scope=scope).confirm(0)
        page = prometheus_client.generate_latest(metrics.registry).decode()
        for secret in ("tenant", "secret", "d0", DOCUMENTS[0].key):
            assert secret not in page
        assert all(family.name.startswith("ragorder_") for family in metrics.registry.collect())
        labels = {label for family in metrics.registry.collect() for s in family.samples for label in s.labels}
        assert labels <= {"le", "order", "outcome", "reason"}

    def test_goes_into_the_applications_registry(self) -> None:
        registry = prometheus_client.CollectorRegistry()
        prometheus_client.Counter("app_requests", "The application's own.", registry=registry).inc()
        metrics = Metrics(registry)
        ObservedOrderer(make_orderer(), [metrics]).order(DOCUMENTS[:5]).confirm()
        page = prometheus_client.generate_latest(registry).decode()
        assert "app_requests_total 1.0" in page
        assert 'ragorder_settled_requests_total{outcome="served"} 1.0' in page
        with pytest.raises(ValueError, match="Duplicated"):
            Metrics(registry)

    def test_one_serves_several_orderers(self) -> None:
        metrics = Metrics()
        watched = [ObservedOrderer(make_orderer(), [metrics]) for _ in range(2)]
        for each in watched:
            each.order(DOCUMENTS[:5]).confirm()
        assert read(metrics).tree_nodes == 10
        del watched, each
        assert read(metrics).tree_nodes == 0
        assert read(metrics).served == 2

    def test_moves_are_counted(self) -> None:
        """Nothing moves; the last two do; all do although nothing is cached; and of these the best one is not first."""
        metrics = Metrics()
        for permutation, cached in [((0, 1, 2), 2), ((0, 2, 1), 1), ((0, 2, 1), 0), ((2, 0, 1), 0)]:
            metrics.ordered(Observation(False, 3, 300, 0, 0, Moves.of(permutation, cached), 1e-4, False))
        stats = read(metrics)
        assert (stats.ordered, stats.reordered, stats.reordered_cold, stats.best_moved) == (4, 3, 2, 1)
        assert (stats.reordered_share, stats.displacement_mean) == (0.75, 0.667)

    def test_times_are_counted_in_histograms_and_requests_that_passed_by_reason(self) -> None:
        metrics = Metrics()
        for order_s in [30e-6] * 98 + [3e-3] * 2:
            metrics.ordered(Observation(False, 5, 500, 0, 0, Moves.of((), 0), order_s, False))
        for tbt_s in (0.02, 0.03, 60.0):
            metrics.token_times(tbt_s)
        for reason in ["no_documents", "one_document", "no_documents"]:
            metrics.passed(reason)
        stats = read(metrics)
        assert 25 <= stats.order_us["p50"] <= 50
        assert 2_000 <= stats.order_us["p99"] <= 5_000
        page = prometheus_client.generate_latest(metrics.registry).decode()
        assert 'ragorder_time_between_tokens_seconds_bucket{le="0.025"} 1.0' in page
        assert "ragorder_time_between_tokens_seconds_count 3.0" in page
        assert (stats.served, stats.passed) == (0, {"no_documents": 2, "one_document": 1})
        assert stats.as_json()["passed"] == stats.passed


class TestTracing:
    @pytest.fixture
    def spans(self) -> Iterator[tuple[Any, Any]]:
        pytest.importorskip("opentelemetry.sdk")
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        yield exporter, provider.get_tracer("test")
        provider.shutdown()

    def test_a_request_is_two_linked_spans_below_the_applications(self, spans: tuple[Any, Any]) -> None:
        from ragorder.adapters.observing.opentelemetry import Tracing

        exporter, tracer = spans
        watched = ObservedOrderer(make_orderer(), [Tracing(tracer)])
        watched.order(DOCUMENTS[:5], scope="tenant").confirm()
        exporter.clear()
        with tracer.start_as_current_span("application"):
            watched.order(DOCUMENTS[:5], scope="tenant").confirm(544, prompt_tokens=600)
        order, settle, application = exporter.get_finished_spans()
        assert [order.name, settle.name] == ["ragorder.order", "ragorder.settle"]
        assert order.parent.span_id == settle.parent.span_id == application.context.span_id
        assert settle.links[0].context.span_id == order.context.span_id
        assert order.attributes["ragorder.documents"] == 5
        assert order.attributes["ragorder.predicted_cached_tokens"] == 560
        assert order.end_time > order.start_time
        assert dict(settle.attributes) == {
            "ragorder.reported_cached_tokens": 544,
            "ragorder.prompt_tokens": 600,
            "ragorder.served": True,
        }
        assert "secret" not in f"{order.to_json()}{settle.to_json()}"
        assert "tenant" not in f"{order.to_json()}{settle.to_json()}"
        watched.order(DOCUMENTS[:5]).discard()
        assert dict(exporter.get_finished_spans()[-1].attributes) == {"ragorder.served": False}

    def test_without_a_provider_it_costs_nothing_and_breaks_nothing(self) -> None:
        pytest.importorskip("opentelemetry")
        from ragorder.adapters.observing.opentelemetry import Tracing

        assert len(ObservedOrderer(make_orderer(), [Tracing()]).order(DOCUMENTS[:5]).documents) == 5


class TestStatsCommand:
    """`ragorder stats`, against a metrics page over HTTP."""

    @pytest.fixture
    def metrics(self) -> Metrics:
        return Metrics()

    @pytest.fixture
    def url(self, metrics: Metrics) -> Iterator[str]:
        def page(path: str, headers: Message) -> tuple[int, bytes]:
            if path != "/metrics":
                return 404, b"nothing here"
            if headers.get("Authorization") not in (None, "Bearer key"):
                return 401, b"nothing here"
            return 200, prometheus_client.generate_latest(metrics.registry)

        with PageServer(page) as server:
            yield server.base_url

    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(main, ["stats", *arguments], env={"COLUMNS": "140"})

    @staticmethod
    def serve_as_predicted(metrics: Metrics, **options: Any) -> ObservedOrderer:
        watched = ObservedOrderer(make_orderer(), [metrics], **options)
        for documents in asked(300):
            ordering = watched.order(documents)
            ordering.confirm(ordering.cached_tokens)
        return watched

    def test_says_what_was_saved(self, metrics: Metrics, url: str) -> None:
        self.serve_as_predicted(metrics)
        stats = read(metrics)
        done = self.run(url, "--prefill-rate", "1000")
        assert done.exit_code == 0
        assert f"ragorder saved {stats.saved_tokens:,} tokens" in done.stdout
        assert f"{(stats.saved_tokens or 0) / 1000:,.1f} s" in done.stdout
        assert f"{100 * stats.cached_share:.1f} %" in done.stdout
        assert f"{100 * (stats.other_cached_share or 0):.1f} %" in done.stdout
        assert "served; reported by the engine" in done.stdout
        assert "predicted for the same requests, corrected by the reports" in done.stdout

    def test_says_what_would_have_been_saved(self, metrics: Metrics, url: str) -> None:
        watched = self.serve_as_predicted(metrics, shadow=True)
        assert watched.shadow and "would have saved" in self.run(url).stdout

    @pytest.mark.parametrize(("shadow", "said"), [(False, "ragorder needed"), (True, "ragorder would have needed")])
    def test_more_prefill_is_no_negative_saving(self, shadow: bool, said: str, metrics: Metrics, url: str) -> None:
        ordered, retrieval = 100, 500
        for _ in range(20):
            settle = metrics.ordered(Observation(shadow, 5, 600, ordered, retrieval, Moves.of((1, 0), 0), 1e-4, False))
            settle(RequestOutcome(True, cached_tokens=retrieval if shadow else ordered, prompt_tokens=1000))
        watched = ObservedOrderer(make_orderer(), [metrics], shadow=shadow)
        assert watched.shadow == shadow
        assert f"{said} 8,000 tokens of prefill more" in self.run(url).stdout

    @pytest.mark.parametrize(
        ("make", "says", "says_not"),
        [
            (lambda metrics: None, ["No request has ended yet"], []),
            (
                lambda metrics: [metrics.passed(reason) for reason in ("no_documents", "no_documents", "other_route")],
                ["Nothing was ordered: 3 requests were forwarded unchanged", "does --template match the prompts?"],
                ["No request has ended yet", "reported by the engine"],
            ),
            (lambda metrics: serve(metrics, 1, compare=False), ["Not compared"], []),
            (
                lambda metrics: serve(metrics, 300),
                [
                    "Predicted only: no request reported its cached tokens (vLLM: --enable-prompt-tokens-details).",
                    *("predicted: the engine reports nothing", "without reports"),
                ],
                ["ragorder saved"],
            ),
            # An agent: both orders had 704 tokens cached, and retrieval order was said to have 4,960.
            (
                lambda metrics: serve(metrics, 60, 16, prompt_tokens=1_150),
                ["Cannot compare: predictions are off by", "--tokenizer MODEL", "unknown"],
                ["saved"],
            ),
        ],
        ids=["nothing", "passed", "not compared", "predicted", "an agent"],
    )
    def test_says_why_no_saving_is_known(
        self, metrics: Metrics, url: str, make: Any, says: list[str], says_not: list[str]
    ) -> None:
        make(metrics)
        said = " ".join(self.run(url).stdout.split())
        assert [words for words in says if words not in said] == []
        assert [words for words in says_not if words in said] == []

    def test_names_the_key_of_the_proxy(self, metrics: Metrics, url: str) -> None:
        done = self.run(url, "--api-key", "wrong")
        assert done.exit_code == 1
        assert "RAGORDER_PROXY_API_KEY" in done.stderr
        assert "RAGORDER_API_KEY" not in done.stderr

    def test_as_json(self, metrics: Metrics, url: str) -> None:
        ObservedOrderer(make_orderer(), [metrics]).order(DOCUMENTS[:5]).confirm(0, prompt_tokens=600)
        done = self.run(f"{url}/metrics", "--json", "--api-key", "key")
        assert json.loads(done.stdout) == read(metrics).as_json()
        assert json.loads(done.stdout)["prompt_tokens"] == 600

    def test_watches(self, metrics: Metrics, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each time a line; an interrupt ends it."""
        watched = ObservedOrderer(make_orderer(), [metrics])
        ends = iter([None, None, KeyboardInterrupt])

        def sleep(seconds: float) -> None:
            assert seconds == 0.5
            watched.order(DOCUMENTS[:5]).confirm()
            if (end := next(ends)) is not None:
                raise end

        monkeypatch.setattr("ragorder.cli.output.sleep", sleep)
        done = self.run(url, "--json", "--watch", "0.5")
        assert done.exit_code == 0
        assert [json.loads(line)["served"] for line in done.stdout.splitlines()] == [0, 1, 2]

    def test_a_server_without_our_metrics(self, metrics: Metrics, url: str) -> None:
        metrics.registry = prometheus_client.CollectorRegistry()
        done = self.run(url)
        assert done.exit_code == 1
        assert "has no ragorder metrics: give the address of `ragorder serve`" in done.stderr

    @pytest.mark.parametrize("wrong", ["http://127.0.0.1:9", "no url"])
    def test_no_server(self, wrong: str) -> None:
        done = self.run(wrong)
        assert done.exit_code == 1
        assert done.stderr.startswith("Error: ")
        assert "Traceback" not in done.stderr


class TestOrdering:
    """What the core reports to watchers."""

    def test_a_twin_has_the_same_documents_and_nothing_else(self) -> None:
        orderer = Orderer(key=str, tokens=lambda _: 48, block_size=BLOCK, strict=True)
        orderer.order("abc")
        clone = orderer.clone(max_displacement=0)
        assert clone.tree_size == 0
        assert clone.order("cab").documents == ["c", "a", "b"]
        assert clone.settings.max_displacement == 0
        assert orderer.settings.max_displacement is None
        assert clone.order("cab").cached_tokens == 144

    def test_the_prefix_of_a_scope_is_what_its_first_request_says(self) -> None:
        orderer = make_orderer()
        orderer.order(DOCUMENTS[:2], scope="long", lengths=Lengths(prefix=320))
        orderer.order(DOCUMENTS[:2], scope="short")
        assert orderer.order(DOCUMENTS[:2], scope="long").cached_tokens == 320 + 192
        assert orderer.order(DOCUMENTS[:2], scope="short").cached_tokens == 256
        assert make_orderer(strict=False).order(DOCUMENTS[:2], lengths=Lengths(prefix=-1)).fallback

    def test_evictions_of_a_forgotten_scope_still_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 1)
        orderer = make_orderer(capacity_tokens=600)
        for documents in asked(20):
            orderer.order(documents, scope="first").confirm()
        evicted = orderer.evicted_blocks
        assert evicted > 0
        orderer.order(DOCUMENTS[:1], scope="second")
        assert orderer.evicted_blocks == evicted

    @pytest.mark.parametrize("options", [{}, {"tokens": PromptBuilder().document_tokens}], ids=["document", "builder"])
    def test_reports_correct_estimated_lengths_only_if_clearly_different(self, options: dict[str, Any]) -> None:
        """Four characters a token is off by some: 15 % less than predicted is no eviction, half is."""
        older, newer = [[Document(f"{name}{n}", "x" * 400) for n in range(5)] for name in "ab"]
        orderer = make_orderer(**options)

        def serve(documents: list[Document], found: float | None = None) -> int:
            ordering = orderer.order(documents)
            ordering.confirm(None if found is None else found * ordering.cached_tokens)
            return ordering.cached_tokens

        for documents in (older, newer):
            serve(documents)
        whole = serve(newer, found=0.85)
        assert serve(older) == whole
        serve(newer)
        serve(newer, found=0.5)
        assert serve(older) < whole
        counted = make_orderer()
        for documents in (DOCUMENTS[:5], DOCUMENTS[5:10]):
            counted.order(documents).confirm()
        counted.order(DOCUMENTS[5:10]).confirm(0.85 * 560)
        assert counted.order(DOCUMENTS[:5]).cached_tokens < 560, "counted lengths are corrected at once"
