"""Interrupts, forks, odd numbers, odd names, many scopes: an orderer stays sound, answers, and keeps its bounds."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from linecache import getline
from types import FrameType
from typing import Any

import pytest
from support.inside import deferred_in, lock_of, scopes_of
from support.orders import check_sound
from support.rings import length

from ragorder import DegradedWarning, Document, Orderer
from ragorder.clouds import CacheRules
from ragorder.ordering import RequestOutcome
from ragorder.tokens import SegmentTokenizer
from ragorder.trie.residency.blocks import EngineBlocks

DOCUMENTS = [Document(str(number), "", tokens=100) for number in range(60)]
PATIENCE_S = 20.0

pytestmark = pytest.mark.filterwarnings("ignore::ragorder.DegradedWarning")


def check(orderer: Orderer) -> None:
    """It is sound, and the lock is free."""
    check_sound(orderer)
    free = threading.Thread(target=lambda: orderer.tree_size, daemon=True)
    free.start()
    free.join(PATIENCE_S)
    assert not free.is_alive(), "the lock is held for ever"


class StopError(BaseException):
    """As Ctrl-C, SystemExit, or the time limit of a framework."""


def interrupted(work: Callable[[], object], line: int) -> bool:
    """Do the work, and interrupt it before its n-th line in this package. False: it has fewer lines."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if "/ragorder/" not in frame.f_code.co_filename and "/trie/" not in frame.f_code.co_filename:
            return None
        # A line that begins a `with` comes twice: the second time the interrupt would come before the lock is given
        # back, between two instructions between which the interpreter lets no signal in.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
            if left == 0:
                raise StopError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except StopError:
        return True
    finally:
        sys.settrace(before)
    return False


class TestInterrupts:
    @pytest.mark.parametrize("end", ["confirm", "discard"])
    def test_before_any_line_of_an_order_or_of_its_end(self, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing stays pinned, miscounted or locked, wherever the interrupt comes."""
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 2)
        line, again = 1, True
        while again:
            orderer = Orderer(capacity_tokens=1_600)
            for first in range(0, 12, 3):
                orderer.order(DOCUMENTS[first : first + 5], scope=first % 2).confirm(None, 700)

            def work(orderer: Orderer = orderer) -> None:
                ordering = orderer.order(DOCUMENTS[7:12], scope=1)
                getattr(ordering, end)()

            again = interrupted(work, line)
            for scope in (1, 0, 1):
                ordering = orderer.order(DOCUMENTS[7:12], scope=scope)
                assert not ordering.fallback
                check(orderer)
                ordering.confirm()
            check(orderer)
            assert not deferred_in(orderer)
            line += 1 if line < 40 else length(3, 7)
        assert line > 100

    def test_news_of_another_scope_outlive_an_interrupt(self) -> None:
        """What one scope's request applies to all scopes' trees is applied in the end, wherever the interrupt comes."""

        def ids(document: Document) -> range:
            return range(100 * int(document.id), 100 * int(document.id) + 100)

        prompt = [token for document in DOCUMENTS[:3] for token in ids(document)]
        line, again = 1, True
        while again:
            blocks = EngineBlocks(100)
            orderer = Orderer(token_ids=ids, blocks=blocks, block_size=100)
            for scope in "ab":
                blocks.store([f"{scope}{place}" for place in range(3)], None, prompt, [[scope], None, None])
                orderer.order(DOCUMENTS[:3], scope=scope).confirm()
            assert orderer.predict_cached_tokens(DOCUMENTS[:3], scope="b")[0] == 300
            blocks.remove(["b1", "b2"])

            def work(orderer: Orderer = orderer) -> None:
                orderer.order(DOCUMENTS[2:9], scope="a").confirm()

            again = interrupted(work, line)
            assert not orderer.order(DOCUMENTS[:1], scope="a").fallback
            assert orderer.predict_cached_tokens(DOCUMENTS[:3], scope="b")[0] == 100
            line += 1 if line < 150 else 20
        assert line > 100

    def test_a_tree_that_was_left_half_changed_starts_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer(strict=True)
        orderer.order(DOCUMENTS[:3]).confirm()
        pending = orderer.order(DOCUMENTS[3:6])
        scope = scopes_of(orderer)[None]

        def lease(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(scope.residency, "lease", lease)
        with pytest.raises(KeyboardInterrupt):
            orderer.order(DOCUMENTS[:9])
        pending.confirm(0)
        assert orderer.order(DOCUMENTS[:3]).cached_tokens == 0
        assert scopes_of(orderer)[None] is not scope and orderer.tree_size == 3
        check(orderer)

    def test_an_error_while_a_request_is_finished_starts_the_scope_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer()
        ordering = orderer.order(DOCUMENTS[:3])
        monkeypatch.setattr(scopes_of(orderer)[None].mirror, "release", lambda *_: 1 / 0)
        ordering.confirm()
        assert orderer.fallbacks == 1
        assert orderer.order(DOCUMENTS[:3]).cached_tokens == 0
        check(orderer)


@contextmanager
def in_another_thread(work: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Runs the work in a thread, which waits, where the work calls its argument, until the block ends."""
    entered, leave = threading.Event(), threading.Event()
    holder = threading.Thread(target=work, args=(lambda: (entered.set(), leave.wait(PATIENCE_S)),))
    holder.start()
    entered.wait()
    try:
        yield
    finally:
        leave.set()
        holder.join()


def in_child(work: Callable[[], bool]) -> bool:
    """Whether the work says so in a forked process, within some seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))
        os._exit(0 if work() else 1)
    _, status = os.waitpid(child, 0)
    return status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestFork:
    def test_a_child_has_the_parents_state_unless_another_thread_was_changing_it(self) -> None:
        orderer = Orderer()
        orderer.order(DOCUMENTS[:3]).confirm()
        assert in_child(lambda: orderer.order(DOCUMENTS[:3]).cached_tokens == 288)

        def work() -> bool:
            ordering = orderer.order(DOCUMENTS[:3])
            ordering.confirm()
            return not ordering.fallback and ordering.cached_tokens == 0 and orderer.tree_size == 3

        with in_another_thread(lock_of(orderer).run):
            assert in_child(work), "what the other thread was changing starts over"
        assert orderer.order(DOCUMENTS[:3]).cached_tokens == 288, "the parent goes on as before"

    def test_a_child_without_events_warns(self) -> None:
        orderer = Orderer(token_ids=lambda document: range(100), blocks=EngineBlocks(16), capacity_tokens=8_000)

        def work() -> bool:
            orderer.order(DOCUMENTS[:3]).confirm()
            mirrors = orderer.order(DOCUMENTS[:3]).cached_tokens == 288
            follows = "residency=LRU mirror with feedback" not in repr(orderer)
            return mirrors and "after a fork only the parent process" in orderer.degraded[0] and not follows

        assert in_child(work) and not orderer.degraded

    def test_while_another_thread_tokenises(self) -> None:
        class Slow:
            added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
            wait: Any = None

            def encode(self, text: str, **_: object) -> list[int]:
                return [1] if text == "quick" else self.wait()

        slow = Slow()
        tokenizer = SegmentTokenizer(slow)

        def work(wait: Callable[[], object]) -> None:
            slow.wait = wait
            tokenizer.encode("slow")

        with in_another_thread(work):
            assert in_child(lambda: tokenizer.encode("quick") == [1])


class Evil:
    """A number that is none."""

    def __mul__(self, other: object) -> Any:
        raise RuntimeError

    __rmul__ = __add__ = __radd__ = __int__ = __mul__  # type: ignore[assignment]


class EvilFloat(float):
    def __le__(self, other: object) -> bool:
        raise RuntimeError

    __lt__ = __ge__ = __gt__ = __int__ = __trunc__ = __le__  # type: ignore[assignment]


NO_COUNTS = {
    "giant": 10**400,
    "negative giant": -(10**400),
    "2**32": 1 << 32,
    "negative": -1,
    "fraction": 16.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "negative infinite": -float("inf"),
    "truth": True,
    "text": "5",
    "object": object(),
    "evil": Evil(),
    "evil float": EvilFloat(5),
    "list": [1],
}
HYBRID = CacheRules("mine", resume="junctions", interval_tokens=64, marks=0, ttl_s=float("inf"))
EVERY_KIND: dict[str, Callable[[], Orderer]] = {
    "plain": lambda: Orderer(strict=True),
    "unlimited": lambda: Orderer(residency="none", capacity_tokens=None, strict=True),
    "tiers": lambda: Orderer(capacity_tokens=1_000, host_tokens=10_000, disk_tokens=10_000, strict=True),
    "fused": lambda: Orderer(reuse="fused", strict=True),
    "events": lambda: Orderer(blocks=EngineBlocks(16), token_ids=lambda each: range(each.token_count), strict=True),
    "cloud": lambda: Orderer.for_rules(CacheRules("mine", minimum_tokens=0, resume="marks"), strict=True),
    "hybrid": lambda: Orderer.for_rules(HYBRID, capacity_tokens=10_000, strict=True),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
class TestWrongTokenCounts:
    """In an engine's report: it counts as not reported, for every kind of orderer."""

    @pytest.mark.parametrize("estimated", [True, False])
    def test_are_ignored(self, kind: str, estimated: bool) -> None:
        documents = [Document(str(place), "x" * 400, None if estimated else 100) for place in range(6)]
        names = ("cached_tokens", "total_tokens", "prompt_tokens", "written_tokens")
        reports = [dict.fromkeys(each, bad) for bad in NO_COUNTS.values() for each in (names, *zip(names))]
        told, plain = EVERY_KIND[kind](), EVERY_KIND[kind]()
        for number, report in enumerate(reports):
            given = [documents[(number * step) % 6] for step in (1, 3, 4)]
            ordering, other = told.order(given), plain.order(given)
            assert ordering.permutation == other.permutation
            assert ordering.cached_tokens == other.cached_tokens, "as if nothing had been reported"
            outcomes: list[RequestOutcome] = []
            ordering.add_done_callback(outcomes.append)
            ordering.confirm(**report)
            other.confirm()
            assert outcomes == [RequestOutcome(True)]
            assert ordering.cost == other.cost
            check(told)
        ordering, reported = told.order(documents[:3]), list[RequestOutcome]()
        ordering.add_done_callback(reported.append)
        ordering.confirm(float("nan"), 400.0, prompt_tokens=390)
        assert reported == [RequestOutcome(True, None, 400, 390)], "what is right beside them counts"
        assert told.fallbacks == 0 and not told.degraded
        root = scopes_of(told)[None].tree.root
        assert root.leases == 0, "each request has ended"


def test_a_wrong_token_count_is_logged_once_without_its_content(python: Any) -> None:
    done = python("-c", REPORTED)
    assert done.returncode == 0 and done.stderr.count("an invalid token count (str") == 1, done.stderr
    assert "SECRET" not in done.stderr and "retrieval order" not in done.stderr


REPORTED = """
import logging
from ragorder import Document, Orderer
logging.basicConfig()
orderer = Orderer()
for report in ("SECRET", -1, 10**400):
    orderer.order([Document("a", "text")]).confirm(report)
"""


class BadHash:
    def __hash__(self) -> int:
        raise RuntimeError("SECRET")


class BadEqual:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("SECRET")


class Changing:
    count = 0

    def __hash__(self) -> int:
        Changing.count += 1
        return Changing.count


class TestNames:
    @pytest.mark.parametrize("make", [BadHash, BadEqual, Changing])
    def test_a_scope_that_cannot_be_found_again_raises_nothing(
        self, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 2)
        orderer = Orderer()
        for _ in range(4):
            scope = make()
            ordering = orderer.order(DOCUMENTS[:3], scope=scope)
            assert sorted(ordering.permutation) == [0, 1, 2]
            assert orderer.preview(DOCUMENTS[:3], scope=scope)
            if make is BadHash:
                assert orderer.predict_cached_tokens(DOCUMENTS[:3], scope=scope) == (0, 0)
            else:
                orderer.predict_cached_tokens(DOCUMENTS[:3], scope=scope)
            orderer.holds_prefix(scope=scope)
            for each in orderer.order_batch([DOCUMENTS[:3], DOCUMENTS[3:6]], scope=scope):
                each.confirm()
            ordering.confirm()
        for _ in range(2):
            served = orderer.order(DOCUMENTS[:3], scope="a")
            served.confirm()
        assert served.cached_tokens == 288, "others are served as ever"

    def test_a_key_that_uses_the_same_orderer_falls_back(self) -> None:
        """Before, it waited for ever for the lock that its own thread held."""
        inner: list[bool] = []

        class Key:
            def __init__(self, number: int) -> None:
                self.number = number

            def __hash__(self) -> int:
                return 7

            def __eq__(self, other: object) -> bool:
                inner.append(orderer.order(DOCUMENTS[:2]).fallback)
                return isinstance(other, Key) and other.number == self.number

        orderer: Orderer = Orderer(
            key=lambda each: Key(each) if isinstance(each, int) else each.key, tokens=lambda each: 100
        )
        thread = threading.Thread(
            target=lambda: [orderer.order(list(range(4))).confirm() for _ in range(2)], daemon=True
        )
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and any(inner), "some of them came from within the orderer"
        assert any("ReentryError" in reason for reason in orderer.degraded)
        check(orderer)

    def test_a_scope_without_a_salt_warns_with_events(self) -> None:
        orderer = Orderer(token_ids=lambda document: range(100), blocks=EngineBlocks(16))
        for scope in ("tenant", None):
            orderer.order(DOCUMENTS[:3], scope=scope)
        assert not orderer.degraded
        with pytest.warns(DegradedWarning, match="cache_salt"):
            orderer.order(DOCUMENTS[:3], scope=("SECRET", 1))
        orderer.order(DOCUMENTS[:3], scope="")
        assert len(orderer.degraded) == 1 and "SECRET" not in repr(orderer)


class TestBounds:
    @pytest.mark.parametrize(
        "options",
        [
            *({"capacity_tokens": 262_144}, {"residency": "none"}, {"capacity_tokens": None}, {"feedback": False}),
            # Whole scopes go.
            {"blocks": EngineBlocks(16), "token_ids": lambda document: range(document.token_count)},
        ],
        ids=["capacity", "none", "unlimited", "no feedback", "events"],
    )
    def test_nodes_are_bounded_over_all_scopes(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_NODES", 300)
        orderer = Orderer(strict=True, **options)
        rng = random.Random(0)
        for number in range(400):
            tokens = rng.choice([0, 16])
            documents = [Document(f"{number} {place}", "", tokens) for place in range(rng.randint(1, 40))]
            ordering = orderer.order(documents, scope=str(rng.randrange(30)))
            if rng.random() < 0.8:
                ordering.confirm() if rng.random() < 0.8 else ordering.discard()
            assert orderer.tree_size <= 300
        assert scopes_of(orderer), "the one in use stays"
        check(orderer)

    def test_scopes_in_use_share_the_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Round robin over scopes that do not fit together: each keeps what it used last, and none loses all."""
        monkeypatch.setattr("ragorder.scope.scopes.MAX_NODES", 120)
        orderer = Orderer(strict=True, residency="none")
        cached = 0
        for turn in range(20):
            for scope in range(8):
                documents = [*DOCUMENTS[:5], *(Document(f"{turn} {place}", "", 100) for place in range(5))]
                ordering = orderer.order(documents, scope=scope)
                cached += ordering.cached_tokens
                ordering.confirm()
        assert cached >= 19 * 8 * 480

    def test_names_that_are_never_used_again_leave_no_trace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 4)
        orderer = Orderer(strict=True)
        for number in range(2_000):
            orderer.order(DOCUMENTS[:2], scope=number).confirm()
        assert len(scopes_of(orderer).pool.holders) == 4
        assert len(scopes_of(orderer).pool.log) <= 2_048

    @pytest.mark.parametrize("finished", [True, False])
    def test_blocks_are_bounded_over_all_scopes_by_the_one_cache_that_they_share(self, finished: bool) -> None:
        orderer = Orderer(capacity_tokens=16_000, strict=True, prefix_tokens=40)
        rng = random.Random(0)
        for _ in range(300):
            ordering = orderer.order(rng.sample(DOCUMENTS, 8), scope=rng.randrange(40))
            if finished or rng.random() < 0.2:
                ordering.confirm(None, rng.choice([None, 100, 3_000])) if rng.random() < 0.8 else ordering.discard()
            assert scopes_of(orderer).pool.used_blocks <= 1_000
        check(orderer)
