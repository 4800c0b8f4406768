"""Orderings that are finished where the garbage collector runs: in the middle of anything, under any lock."""

from __future__ import annotations

import gc
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import deferred_in, held_while_working, lease_of, lock_of, lock_of_outcomes, scopes_of

from ragorder import Document, Orderer, Ordering, PromptBuilder
from ragorder.adapters.observing.observed import ObservedOrderer
from ragorder.common import lock
from ragorder.ordering import RequestOutcome

DOCUMENTS = [Document(str(number), "x" * 400) for number in range(200)]
PATIENCE_S = 20.0


class Request:
    """What an application keeps of a request, in a reference cycle."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.me = kept, self


class DiscardedWhenDropped(Request):
    """One that discards its ordering once it is dropped."""

    def __del__(self) -> None:
        self.kept.discard()


def ends(work: Callable[[], object]) -> None:
    """The work is done in a thread that is given up if it hangs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


@pytest.fixture
def by_hand(no_garbage_of_others: None) -> Iterator[None]:
    """The collector runs when a test says so, and then looks only at what the test has made."""
    gc.disable()
    yield
    gc.enable()


def collect_within(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Have the collector run within each call of a method. The result counts what it found."""
    found: list[int] = []
    real = getattr(owner, name)

    def collecting(*args: Any, **options: Any) -> Any:
        found.append(gc.collect())
        return real(*args, **options)

    monkeypatch.setattr(owner, name, collecting)
    return found


def sample(rng: random.Random) -> list[Document]:
    return rng.sample(DOCUMENTS, 10)


@pytest.mark.usefixtures("by_hand")
class TestTheOrderer:
    @pytest.mark.parametrize(
        "call", ["order", "preview", "predict_cached_tokens", "holds_prefix", "order_batch", "tree_size"]
    )
    def test_the_next_call_finds_it_finished(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer(strict=True, prefix_tokens=64)
        dropped = orderer.order(DOCUMENTS[:3])
        with held_while_working(orderer):
            dropped.discard()
        assert deferred_in(orderer), "nobody has worked it off"
        given: dict[str, tuple[Any, ...]] = {"holds_prefix": (), "order_batch": ([DOCUMENTS[:3]] * 2,)}
        if call == "tree_size":
            assert orderer.tree_size == 0
        else:
            result = getattr(orderer, call)(*given.get(call, (DOCUMENTS[:3],)))
            assert result != (48, 364)
        assert not deferred_in(orderer)

    def test_an_outcome_does_not_wait_for_another_thread_and_is_not_lost(self) -> None:
        orderer = Orderer(strict=True)
        ordering = orderer.order(DOCUMENTS[:3])
        entered, leave = threading.Event(), threading.Event()
        holder = threading.Thread(target=lambda: lock_of(orderer).run(lambda: (entered.set(), leave.wait(PATIENCE_S))))
        holder.start()
        entered.wait()
        ends(ordering.discard)
        assert scopes_of(orderer)[None].tree.size == 3, "its turn has not come"
        leave.set()
        holder.join()
        assert scopes_of(orderer)[None].tree.size == 0, "the thread that held the lock has seen to it"

    def test_the_effect_is_there_for_the_next_call_of_any_thread(self) -> None:
        orderer = Orderer(strict=True, capacity_tokens=100_000)
        errors: list[str] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(400):
                given = sample(rng)
                ordering = orderer.order(given, scope=seed)
                ordering.discard()
                if orderer.predict_cached_tokens(given, scope=seed)[0]:
                    errors.append("a discarded request still counts")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and not deferred_in(orderer) and orderer.tree_size == 0

    @pytest.mark.parametrize("finalise", ["del", "weakref"])
    def test_dropped_requests_of_a_busy_orderer(self, finalise: str) -> None:
        """What the attack did, with the collector at every tenth allocation."""
        orderer = Orderer(capacity_tokens=100_000, strict=True)

        def run() -> None:
            rng = random.Random(0)
            for _ in range(300):
                ordering = orderer.order(sample(rng))
                if finalise == "del":
                    DiscardedWhenDropped(ordering)
                else:
                    weakref.finalize(Request(ordering), ordering.discard)

        threshold = gc.get_threshold()
        gc.set_threshold(10)
        gc.enable()
        try:
            ends(run)
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert orderer.tree_size == 0 and orderer.fallbacks == 0


@pytest.mark.usefixtures("by_hand")
class TestObservers:
    def test_observers_are_not_called_while_the_collector_runs_and_one_that_raises_spoils_nothing(self) -> None:
        orderer, told = Orderer(strict=True), list[RequestOutcome]()
        ordering = orderer.order(DOCUMENTS[:3])
        ordering.add_done_callback(lambda outcome: 1 / 0)
        ordering.add_done_callback(told.append)
        DiscardedWhenDropped(ordering)
        del ordering
        gc.collect()
        assert told == []
        assert not orderer.order(DOCUMENTS[:3]).fallback
        assert told == [RequestOutcome(False)] and not lock.deferred

    def test_metrics_that_are_being_read_or_counted(self) -> None:
        """A Prometheus metric takes a plain lock: a finaliser that counts within it would wait for its own thread."""
        prometheus = pytest.importorskip("prometheus_client")
        from ragorder.adapters.observing.prometheus import Metrics

        metrics = Metrics()
        orderer = ObservedOrderer(Orderer(strict=True), [metrics])
        orderer.order(DOCUMENTS[:3]).confirm()
        DiscardedWhenDropped(orderer.order(DOCUMENTS[:3]))

        def within() -> None:
            with lock_of_outcomes(metrics):
                gc.collect()

        ends(within)
        orderer.order(DOCUMENTS[:3]).confirm()
        found = metrics.registry.get_sample_value("ragorder_settled_requests_total", {"outcome": "discarded"})
        assert found == 1
        assert prometheus.generate_latest(metrics.registry)


class Chunks:
    """A stream of the openai client, which takes its pool's lock when it is closed."""

    pool = threading.Lock()
    closed = 0

    def __enter__(self) -> Chunks:
        return self

    def __exit__(self, *_: object) -> None:
        with Chunks.pool:
            Chunks.closed += 1

    def __iter__(self) -> Iterator[Any]:
        for _ in range(5):
            delta = SimpleNamespace(content="w", model_extra={})
            choice = SimpleNamespace(delta=delta, finish_reason=None, text=None)
            yield SimpleNamespace(choices=[choice], usage=None, id="1")


@pytest.mark.usefixtures("by_hand")
class TestStreams:
    @staticmethod
    def client(orderer: Any) -> Any:
        pytest.importorskip("openai")
        from ragorder.adapters.openai import OrderedClient

        completions = SimpleNamespace(create=lambda **_: Chunks())
        fake: Any = SimpleNamespace(chat=SimpleNamespace(completions=completions))
        return OrderedClient(fake, model="m", orderer=orderer, builder=PromptBuilder("S"))

    def test_an_abandoned_stream_within_an_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer(strict=True)
        client = self.client(orderer)
        orderer.order(DOCUMENTS[:3]).confirm()
        session = Request(client.stream("q", DOCUMENTS[3:6]))
        next(session.kept)
        lease = lease_of(session.kept.ordering)
        del session
        found = collect_within(monkeypatch, scopes_of(orderer)[None].tree, "insert")
        ends(lambda: orderer.order(DOCUMENTS[:3]))
        assert sum(found) and not lease.open

    def test_an_abandoned_stream_is_closed_where_no_lock_of_its_pool_is_held(self) -> None:
        orderer = Orderer(strict=True)
        session = Request(self.client(orderer).stream("q", DOCUMENTS[3:6]))
        next(session.kept)
        del session
        before = Chunks.closed

        def within() -> None:
            with Chunks.pool:
                gc.collect()

        ends(within)
        assert Chunks.closed == before
        orderer.order(DOCUMENTS[:3])
        assert Chunks.closed == before + 1

    def test_an_abandoned_batch_does_not_wait_for_its_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They may wait for the very order that the collector interrupted."""
        orderer = Orderer(strict=True)
        orderer.order(DOCUMENTS[:3]).confirm()
        questions = [(str(number), DOCUMENTS[number : number + 5]) for number in range(40)]
        session = Request(self.client(orderer).generate_many(questions, concurrency=4))
        next(iter(session.kept))
        del session
        found = collect_within(monkeypatch, scopes_of(orderer)[None].tree, "insert")
        ends(lambda: orderer.order(DOCUMENTS[:3]))
        assert sum(found)


def test_a_collection_is_seen_while_it_runs(python: Any) -> None:
    """In a process of its own: while a thread of another test collects, `gc.collect` does nothing."""
    done = python("-c", COLLECTED)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "False", "False"]), done.stderr


COLLECTED = """
import gc, threading
from ragorder.common import lock

class Request:
    def __init__(self):
        self.me = self

    def __del__(self):
        print(lock.is_collecting())
        other = threading.Thread(target=lambda: print(lock.is_collecting()))
        other.start()
        other.join()

Request()
gc.collect()
print(lock.is_collecting())
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_an_interrupt_that_comes_while_the_collector_runs_is_not_swallowed(python: Any) -> None:
    """A callback in Python would be where it strikes, and the collector ignores what callbacks raise. In a process of
    its own: pytest's plug-ins have such callbacks, and its time limit uses the same signal."""
    done = python("-c", INTERRUPTED)
    assert (done.returncode, done.stdout) == (0, "interrupted " * 5), done.stderr


INTERRUPTED = """
import gc, signal
import ragorder

def interrupt(*_):
    raise KeyboardInterrupt

ballast = [[number] for number in range(200_000)]
signal.signal(signal.SIGALRM, interrupt)
for _ in range(5):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        for _ in range(1_000):
            gc.collect()
    except KeyboardInterrupt:
        print("interrupted", end=" ")
"""


def test_what_is_given_back_by_counting_alone_is_finished_at_once() -> None:
    orderer = Orderer(strict=True)
    ordering: Ordering[Document] = orderer.order(DOCUMENTS[:3])
    told: list[RequestOutcome] = []
    ordering.add_done_callback(told.append)

    class Plain:
        kept = ordering

        def __del__(self) -> None:
            self.kept.confirm()

    Plain()
    assert told == [RequestOutcome(True)]
