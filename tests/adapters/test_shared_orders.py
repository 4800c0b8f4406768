"""Orders shared through a real Valkey or Redis: other processes find them, and its loss costs nothing but them."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.inside import is_closed, unsent_in

from ragorder import Lengths

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("redis")
pytest.importorskip("starlette")

from hypothesis import given
from hypothesis import strategies as st
from support.bodies import Bodies
from support.redis_server import SERVER, STREAM, RedisServer
from support.waiting import eventually

from ragorder import Document, Orderer
from ragorder.adapters.observing import Observation, ObservedOrderer
from ragorder.adapters.shared_orders import SharedOrderer
from ragorder.adapters.shared_orders.orderer import LENGTH, SharedOrder, UnreadableError, read_order
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine

Sharing = Callable[..., SharedOrderer]

pytestmark = pytest.mark.skipif(SERVER is None, reason="needs valkey-server or redis-server: make installs it")

DOCUMENTS = [Document(name, f"{name} " * 200, tokens=100) for name in "abcdefgh"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.client.close()
    server.kill()


@pytest.fixture
def sharing(server: RedisServer) -> Iterator[Sharing]:
    """Orderers on the server, which are closed at the end."""
    made: list[SharedOrderer] = []

    def sharing(**options: Any) -> SharedOrderer:
        orderer = SharedOrderer(server.url, **{"capacity_tokens": 10_000, "block_size": 16, "strict": True, **options})
        made.append(orderer)
        return orderer

    yield sharing
    for orderer in made:
        orderer.close()


def ids(documents: list[Document]) -> list[str]:
    return [document.id for document in documents]


def known(*orderers: SharedOrderer, orders: int) -> bool:
    """Each has applied so many orders of others."""
    return eventually(lambda: [orderer.log.applied for orderer in orderers] == [orders] * len(orderers))


class TestSharing:
    def test_another_process_finds_the_order(self, sharing: Sharing) -> None:
        one, other = sharing(), sharing()
        first = one.order(DOCUMENTS[:3])
        assert known(other, orders=1)
        again = other.order([DOCUMENTS[5], *DOCUMENTS[2::-1]])
        assert ids(again.documents) == [*ids(first.documents), "f"]
        assert again.cached_tokens == 300 // 16 * 16

    def test_own_orders_are_not_applied_again(self, sharing: Sharing, server: RedisServer) -> None:
        one = sharing()
        for _ in range(5):
            one.order(DOCUMENTS[:3]).confirm()
        assert eventually(lambda: server.length() == 5 and one.log.appended == 5)
        last = server.client.xinfo_stream("ragorder:orders")["last-generated-id"]
        assert eventually(lambda: one.log.last == last)
        assert one.log.applied == 0

    def test_a_process_that_starts_later_reads_what_was_served_before(self, sharing: Sharing) -> None:
        one = sharing()
        first = one.order(DOCUMENTS[:3])
        first.confirm()
        one.order([DOCUMENTS[0], DOCUMENTS[6]])
        assert eventually(lambda: one.log.appended == 2)
        late = sharing()
        assert known(late, orders=2)
        assert late.order(DOCUMENTS[2::-1]).permutation == [2 - rank for rank in first.permutation]

    def test_tenants_stay_apart(self, sharing: Sharing) -> None:
        one, other = sharing(), sharing()
        for scope in ("x", b"y", 7):
            one.order(DOCUMENTS[:3], scope=scope)
        assert known(other, orders=3)
        for scope in ("x", b"y", 7):
            assert other.predict_cached_tokens(DOCUMENTS[:3], scope=scope)[0] > 0
        for scope in (None, "y", b"x", "7"):
            assert other.predict_cached_tokens(DOCUMENTS[:3], scope=scope)[0] == 0

    def test_lengths_are_those_of_the_request(self, sharing: Sharing) -> None:
        class Length:
            def __index__(self) -> int:
                return 64

        one, other = sharing(prefix_tokens=32), sharing(prefix_tokens=32)
        one.order(DOCUMENTS[:2], lengths=Lengths(prefix=Length(), suffix=16))
        one.order([Document("estimated", "words " * 100)], scope="estimated")
        twice = [DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]]
        one.order(twice, scope="twice")
        assert known(other, orders=3)
        expected = one.predict_cached_tokens(twice, scope="twice")
        assert other.predict_cached_tokens(twice, scope="twice") == expected > (32 + 200, 0)
        assert other.predict_cached_tokens(DOCUMENTS[:2]) == one.predict_cached_tokens(DOCUMENTS[:2]) == (256, 264)
        estimated = [Document("estimated", "words " * 100)]
        assert other.predict_cached_tokens(estimated, scope="estimated")[0] == (32 + 150) // 16 * 16

    def test_a_batch_is_shared_as_it_is_served(self, sharing: Sharing, server: RedisServer) -> None:
        one, other = sharing(), sharing()
        batch = one.order_batch([DOCUMENTS[:3], DOCUMENTS[3:6], DOCUMENTS[1:4]])
        batch[0]
        assert known(other, orders=1)
        for ordering in batch:
            ordering.confirm()
        assert known(other, orders=3)
        assert other.predict_cached_tokens(DOCUMENTS[:3])[0] == 300 // 16 * 16

    def test_engines_have_streams_of_their_own(self, sharing: Sharing, server: RedisServer) -> None:
        sharing(stream="engine 1").order(DOCUMENTS[:3])
        other = sharing(stream="engine 2")
        other.order(DOCUMENTS[3:6])
        assert eventually(lambda: server.length("engine 1") == server.length("engine 2") == 1)
        assert other.predict_cached_tokens(DOCUMENTS[:3])[0] == 0

    def test_the_stream_is_bounded(self, sharing: Sharing, server: RedisServer) -> None:
        one = sharing(capacity_tokens=1000)
        for number in range(LENGTH + 2000):
            one.order([Document(str(number), tokens=16)]).confirm()
            if number % 500 == 0:
                assert eventually(lambda number=number: one.log.appended > number)
        assert eventually(lambda: one.log.appended == LENGTH + 2000)
        assert LENGTH <= server.length() <= LENGTH + 200

    def test_documents_are_in_it_by_digest_alone(self, sharing: Sharing, server: RedisServer) -> None:
        sharing().order([Document("report.pdf", "secret words", tokens=16)])
        assert eventually(lambda: server.length() == 1)
        assert b"report" not in (content := repr(server.client.xrange("ragorder:orders")).encode())
        assert b"secret" not in content

    def test_keys_and_scopes_that_cannot_be_shared_are_no_error(self, sharing: Sharing, server: RedisServer) -> None:
        one = sharing(key=lambda document: (document.id,), tokens=lambda document: 16)
        with pytest.warns(UserWarning, match="not shared"):
            one.order(DOCUMENTS[:2])
        for scope in (("a", "tuple"), True, 1.0, 1 << 70, "\ud800", "s" * 1025):
            plain = sharing()
            with pytest.warns(UserWarning, match="not shared"):
                assert not plain.order(DOCUMENTS[:2], scope=scope).fallback
            assert (plain.fallbacks, len(plain.degraded)) == (0, 1)
        assert server.length() == 0

    def test_a_comparison_counts_what_others_had_served(self, sharing: Sharing) -> None:
        seen: list[Observation] = []

        class Watcher:
            def ordered(self, observation: Observation) -> Callable[[Any], None]:
                seen.append(observation)
                return lambda outcome: None

        one, other = sharing(), sharing()
        observed = ObservedOrderer(one, [Watcher()])
        for number, documents in enumerate((DOCUMENTS[:3], DOCUMENTS[2::-1]), 1):
            other.order(documents).confirm()
            assert known(one, orders=number)
        # In retrieval order both would have been computed, one after the other.
        observed.order(DOCUMENTS[2::-1])
        assert (seen[0].ordered_tokens, seen[0].retrieval_tokens) == (288, 288)


@pytest.mark.slow
class TestTheGoal:
    @pytest.mark.parametrize("processes", [4, 16])
    def test_many_processes_have_nine_tenths_of_the_hits_of_one(self, sharing: Sharing, processes: int) -> None:
        """mix8 on a cache of 32,768 tokens; an order is known to the others when the next request comes."""
        requests = trace_of_workload(make_workload("mix8", 0, requests=600), 600).requests

        def cached(orderers: list[Orderer], synced: Callable[[int], bool]) -> float:
            engine = SimEngine(block_size=16, capacity_tokens=32_768, like="vllm-0.32")
            prompts, rng = NumberedPrompts(), random.Random(1)
            running: deque[Any] = deque()
            cached_tokens = prompt_tokens = 0
            for place, request in enumerate(requests):
                assert synced(place)
                ordering = rng.choice(orderers).order(request.documents)
                done, handle = engine.admit(prompts.token_ids(place, request, ordering.documents), 32)
                cached_tokens += done.cached_tokens
                prompt_tokens += done.prompt_tokens
                running.append((ordering, handle, done))
                if len(running) > 16:
                    first, former, served = running.popleft()
                    engine.finish(former)
                    first.confirm(served.cached_tokens, served.prompt_tokens + 32)
            return cached_tokens / prompt_tokens

        options = {"capacity_tokens": 32_768, "block_size": 16, "prefix_tokens": 64, "suffix_tokens": 52}
        one = cached([Orderer(**options, strict=True)], lambda place: True)
        alone = cached([Orderer(**options, strict=True) for _ in range(processes)], lambda place: True)
        shared = [sharing(**options) for _ in range(processes)]

        def synced(place: int) -> bool:
            # Each order reaches all others.
            return eventually(lambda: sum(each.log.applied for each in shared) == place * (processes - 1))

        assert cached(list(shared), synced) >= 0.9 * one > alone


@pytest.mark.filterwarnings("ignore")
class TestALostServer:
    def test_costs_the_others_orders_until_it_is_back(self, sharing: Sharing, server: RedisServer) -> None:
        one, other = sharing(strict=False), sharing(strict=False)
        one.order(DOCUMENTS[:3]).confirm()
        assert known(other, orders=1)
        server.kill()
        for _ in range(50):
            other.order(DOCUMENTS[5:8]).confirm()
        assert eventually(lambda: any("is lost" in reason for reason in other.degraded))
        assert not any(str(server.port) in reason for reason in other.degraded)
        assert other.fallbacks == 0
        for documents in (DOCUMENTS[5:8], DOCUMENTS[:3]):
            assert other.predict_cached_tokens(documents)[0] == 300 // 16 * 16
        one.order(DOCUMENTS[3:6]).confirm()
        server.start()
        # What was ordered meanwhile comes as well.
        assert known(other, orders=2)
        one.order(DOCUMENTS[4:8]).confirm()
        assert known(other, orders=3)
        assert other.predict_cached_tokens(DOCUMENTS[3:6])[0] == 300 // 16 * 16

    def test_a_successor_with_a_slow_clock_is_read_on(self, sharing: Sharing, server: RedisServer) -> None:
        """It lacks the last entries, and gives the next ones ids that lie before those that were read."""
        one, other = sharing(strict=False), sharing(strict=False)
        for documents in (DOCUMENTS[:2], DOCUMENTS[2:4], DOCUMENTS[4:6]):
            one.order(documents).confirm()
        assert known(other, orders=3)
        entries = server.client.xrange(STREAM)
        ahead = int(time.time() * 1000) + 3_600_000
        server.kill()
        server.start()
        # An hour fast: that is where the readers had come to.
        for number, (_, fields) in enumerate(entries):
            server.client.xadd(STREAM, fields, id=f"{ahead + number}-0")
        assert eventually(lambda: other.log.last == f"{ahead + 2}-0".encode())
        server.kill()
        server.start()
        for number, (_, fields) in enumerate(entries[:2]):
            server.client.xadd(STREAM, fields, id=f"{ahead - 3_600_000 + number}-0")
        one.order(DOCUMENTS[5:8]).confirm()
        assert known(other, orders=4)
        assert other.predict_cached_tokens(DOCUMENTS[5:8])[0] == 300 // 16 * 16

    def test_a_deleted_stream_is_read_from_its_new_start(self, sharing: Sharing, server: RedisServer) -> None:
        """Without a lost connection."""
        one, other = sharing(), sharing()
        one.order(DOCUMENTS[:2]).confirm()
        assert known(other, orders=1)
        ((_, fields),) = server.client.xrange(STREAM)
        server.client.xadd(STREAM, fields, id=f"{int(time.time() * 1000) + 3_600_000}-0")
        assert eventually(lambda: int(other.log.last.partition(b"-")[0]) > time.time() * 1000)
        server.client.delete(STREAM)
        one.order(DOCUMENTS[2:5]).confirm()
        assert known(other, orders=2)
        assert other.predict_cached_tokens(DOCUMENTS[2:5])[0] == 300 // 16 * 16
        assert (one.degraded, other.degraded) == ((), ())

    def test_an_order_that_was_written_twice_is_applied_once(self, sharing: Sharing, server: RedisServer) -> None:
        """As after a connection that broke between a write and its answer."""
        one, other = sharing(), sharing()
        one.order(DOCUMENTS[:2]).confirm()
        assert known(other, orders=1)
        ((_, fields),) = server.client.xrange(STREAM)
        for _ in range(3):
            server.client.xadd(STREAM, fields)
        one.order(DOCUMENTS[2:4]).confirm()
        assert eventually(lambda: server.length() == 5)
        ((last, _),) = server.client.xrevrange(STREAM, count=1)
        assert eventually(lambda: other.log.last == last)
        assert (other.log.applied, other.degraded) == (2, ())

    def test_from_the_start_is_no_error(self, sharing: Sharing, server: RedisServer) -> None:
        server.kill()
        one = sharing(strict=False)
        assert not one.order(DOCUMENTS[:2]).fallback
        assert eventually(lambda: bool(one.degraded))
        server.start()
        assert eventually(lambda: one.log.appended == 1)

    def test_ordering_never_waits_for_it(self, sharing: Sharing, server: RedisServer) -> None:
        """A server that accepts and says nothing."""
        one = sharing(strict=False)
        one.order(DOCUMENTS[:2]).confirm()
        assert eventually(lambda: one.log.appended == 1)
        os.kill(server.pid, 19)
        try:
            began = time.monotonic()
            for _ in range(200):
                one.order(DOCUMENTS[2:5]).confirm()
            # A wait for the server takes five seconds, its time limit.
            assert time.monotonic() - began < 60
        finally:
            os.kill(server.pid, 18)
        assert eventually(lambda: one.log.appended >= 201)

    def test_unsent_orders_are_bounded(self, sharing: Sharing, server: RedisServer) -> None:
        server.kill()
        one = sharing(capacity_tokens=1000, strict=False)
        for number in range(LENGTH + 1000):
            one.order([Document(str(number), tokens=16)]).confirm()
        assert len(unsent_in(one.log)) <= LENGTH

    def test_a_thread_that_fails_says_so(self, sharing: Sharing, server: RedisServer) -> None:
        """Entries are bytes, which this client would read as text."""
        other = SharedOrderer(f"{server.url}?decode_responses=True", capacity_tokens=1000, block_size=16)
        sharing().order(DOCUMENTS[:2])
        assert eventually(lambda: any("is lost" in reason for reason in other.degraded))
        other.close()


class TestEntries:
    ORDER = SharedOrder(b"writer", "acme", ["a", b"b", 3], [10, 20, 30], [2, 0, 1], True, 5, 7)

    def test_are_read_as_written(self) -> None:
        assert read_order(self.ORDER.encode()) == self.ORDER

    @given(st.binary(max_size=80))
    def test_anything_else_is_unreadable(self, content: bytes) -> None:
        try:
            order = read_order(content)
        except UnreadableError:
            return
        assert sorted(order.permutation) == list(range(len(order.keys)))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"tokens": [10, 20]},
            {"tokens": [10, 20, -1]},
            {"permutation": [0, 0, 1]},
            {"permutation": [0, 1, 2, 3]},
            {"keys": ["a", ["b"], "c"]},
            {"scope": ["a"]},
            {"suffix_tokens": -1},
            {"prefix_tokens": -1},
            {"tokens": [10, 20, 10**12]},
            {"suffix_tokens": 10_000_001},
            {"keys": ["a", b"b" * 1025, 3]},
            {"scope": "s" * 1025},
            {"process": b"p" * 1025},
        ],
        ids=lambda wrong: str(wrong)[:40],
    )
    def test_contradictory_or_too_large_ones_are_neither_read_nor_written(self, wrong: dict[str, Any]) -> None:
        fields = {name: getattr(self.ORDER, name) for name in self.ORDER.__struct_fields__}
        order = SharedOrder(**{**fields, **wrong})
        with pytest.raises(UnreadableError):
            read_order(msgspec.msgpack.encode(order))
        with pytest.raises(UnreadableError):
            order.encode()

    def test_longer_than_a_mebibyte_are_not_even_decoded(self) -> None:
        names = [f"{number:01024}" for number in range(1100)]
        order = SharedOrder(b"writer", None, [*names], [1] * 1100, list(range(1100)))
        with pytest.raises(UnreadableError, match="bytes"):
            read_order(msgspec.msgpack.encode(order))

    def test_that_no_request_has_leave_everything_as_it_was(self, sharing: Sharing, server: RedisServer) -> None:
        """One order of 10^12 tokens emptied the mirror, and keys of a megabyte stayed in memory."""
        one = sharing()
        for start in range(5):
            one.order(DOCUMENTS[start : start + 3]).confirm()
        before = one.tree_size, one.evicted_blocks
        for keys, tokens in ((["giant"], 10**12), (["K" * 1_000_000], 16), ([b"k"] * 4097, 1)):
            order = SharedOrder(b"stranger", None, [*keys], [tokens] * len(keys), list(range(len(keys))))
            server.client.xadd(STREAM, {"order": msgspec.msgpack.encode(order), "number": 1})
        for fields in ({"order": b"\xc1"}, {"something": b"else"}):
            server.client.xadd(STREAM, fields)
        assert eventually(lambda: one.log.unreadable == 5)
        assert (one.tree_size, one.evicted_blocks) == before
        assert not one.degraded
        other = sharing()
        other.order(DOCUMENTS[:2]).confirm()
        assert known(one, orders=1)


class TestProcesses:
    def test_a_forked_child_shares_as_a_process_of_its_own(self, sharing: Sharing, server: RedisServer) -> None:
        script = f"""
import os, time
from ragorder import Document
from ragorder.adapters.shared_orders import SharedOrderer
orderer = SharedOrderer({server.url!r}, capacity_tokens=10_000, block_size=16, strict=True)
orderer.order([Document("parent", tokens=100)]).confirm()
while not orderer.log.appended: time.sleep(0.01)
child = os.fork()
orderer.order([Document("child" if not child else "again", tokens=100)]).confirm()
while not orderer.log.appended: time.sleep(0.01)
deadline = time.monotonic() + 60
while orderer.predict_cached_tokens([Document("again" if not child else "child", tokens=100)])[0] == 0:
    assert time.monotonic() < deadline
    time.sleep(0.01)
if child:
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""
        done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert server.length() == 3

    def test_copies_share_as_well(self, sharing: Sharing) -> None:
        one = sharing()
        other = pickle.loads(pickle.dumps(one))  # noqa: S301
        third = copy.copy(one)
        one.order(DOCUMENTS[:3])
        for each in (other, third):
            each.order(DOCUMENTS[4:6], scope="elsewhere")
            assert eventually(lambda each=each: each.predict_cached_tokens(DOCUMENTS[:3])[0] > 0)
            each.close()

    def test_an_orderer_that_is_dropped_ends_its_threads(self, server: RedisServer) -> None:
        orderer = SharedOrderer(server.url, capacity_tokens=1000, block_size=16)
        log = orderer.log
        del orderer
        assert eventually(lambda: gc.collect() >= 0 and is_closed(log))


class TestTheProxy:
    """Which may send an earlier turn in another order than the orderer's."""

    @pytest.fixture
    def send(self, sharing: Sharing) -> Callable[..., str]:
        """The names of the documents in the order in which they are sent."""
        orderer = sharing(at_once=False)
        proxy = Bodies("<d>{text}</d>", orderer=orderer, on_sent=orderer.share)

        def send(names: str, *later: str) -> str:
            texts = ["".join(f"<d>{name * 100}</d>" for name in names), *later]
            roles = ("user", "assistant")
            messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
            sent = json.loads(proxy.ordered(json.dumps({"model": "m", "messages": messages}).encode()))
            return re.sub(r"<d>(.)[^<]*</d>", r"\1", sent["messages"][0]["content"])

        return send

    def test_shares_what_it_sends(self, send: Callable[..., str], sharing: Sharing, server: RedisServer) -> None:
        other = sharing()
        assert send("ab") == "ab"
        assert send("cba") == "abc"
        # An earlier turn of its own, in the order of that time.
        assert send("cba", "yes", "Why?") == "abc"
        # An unknown earlier turn, whose beginning is cached in another order.
        assert send("da", "yes", "Why?") == "da"
        assert known(other, orders=4)
        entries = [read_order(fields[b"order"]) for _, fields in server.client.xrange(STREAM)]
        assert [entry.permutation for entry in entries] == [[0, 1], [2, 1, 0], [2, 1, 0], [0, 1]]


class TestOptions:
    @pytest.mark.parametrize(
        ("url", "said"),
        [("http://127.0.0.1:1", "scheme"), ("redis://127.0.0.1:1/0?no_such_option=1", "has an option")],
    )
    def test_a_malformed_url_is_refused(self, url: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            SharedOrderer(url)

    def test_shared_orders_of_the_proxy(self, server: RedisServer, run_serve: Callable[..., Any]) -> None:
        sizes = ["--capacity-tokens", "4096", "--block-size", "16"]
        served = run_serve(*sizes, "--shared-orders", server.url)
        assert served.exit_code == 0, served.said
        ordering = served.orderer.order(DOCUMENTS[:2])
        served.app["on_sent"](DOCUMENTS[:2], ordering.permutation)
        assert eventually(lambda: server.length() == 1)
        served.orderer.close()
        for wrong, reason in (
            (["--shared-orders", "nowhere"], "not a URL such as"),
            (["--shared-orders", server.url, "--shadow"], "several proxies of one server"),
        ):
            refused = run_serve(*sizes, *wrong)
            assert refused.exit_code == 2 and reason in refused.said
