"""The embedded engine's order of admission: cached length / computation length within a window (RAGCache 5.2)."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import cache_of
from support.rings import length
from support.small_engine import BLOCK, Make, ask, block_bytes, greedy, run, small_tiers, tokens

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.kernels.engine import Request, TieredEngine
from ragorder.trie.profile import PrefillProfile

A, B, C = tokens(40, 1), tokens(40, 2), tokens(40, 3)


def served(engine: TieredEngine, *requests: Request) -> list[int]:
    """The requests' places, in the order in which they were served after all had arrived."""
    ids = [engine.add(request) for request in requests]
    return [ids.index(each) for each in run(engine)]


def overtakings(order: list[int]) -> list[int]:
    """By how many later requests each was overtaken."""
    return [sum(other > mine for other in order[:place]) for place, mine in enumerate(order)]


class TestTheNextTurn:
    def test_goes_to_what_is_cached(self, make: Make) -> None:
        engine = make(max_requests=1)
        engine.generate([ask([A], tokens(9, 5))])
        assert served(engine, ask([B], tokens(9, 6)), ask([C], tokens(9, 7)), ask([A], tokens(9, 8))) == [2, 0, 1]

    def test_goes_to_the_largest_ratio_of_cached_to_computed_tokens(self, make: Make) -> None:
        engine = make(max_requests=1)
        engine.generate([ask([A, B], tokens(9, 5)), ask([C], tokens(9, 5))])
        most_cached, largest_ratio = ask([A, B], tokens(90, 6)), ask([C], tokens(9, 6))
        assert served(engine, most_cached, largest_ratio) == [1, 0]

    def test_goes_to_the_oldest_of_equals(self, make: Make) -> None:
        engine = make(max_requests=1)
        engine.generate([ask([A], tokens(9, 5))])
        uncached = [ask([tokens(30, seed)], tokens(9, seed)) for seed in (11, 12)]
        cached = [ask([A], tokens(9, seed)) for seed in (13, 14)]
        assert served(engine, *uncached, *cached) == [2, 3, 0, 1]

    def test_goes_to_no_shorter_prompt_because_the_system_prompt_is_cached(self, make: Make) -> None:
        def asking(document: list[int]) -> Request:
            return Request([*A, *document, 7], [len(A) + len(document)], prefix_tokens=len(A))

        engine = make(max_requests=1)
        engine.generate([asking(B)])
        assert served(engine, asking(tokens(90, 6)), asking(tokens(9, 7))) == [0, 1]

    def test_is_decided_with_what_the_requests_before_have_cached(self, make: Make) -> None:
        engine = make(max_requests=1)
        requests = [ask([A], tokens(9, 5)), ask([B], tokens(9, 6)), ask([A], tokens(9, 7)), ask([B], tokens(9, 8))]
        assert served(engine, *requests) == [0, 2, 1, 3]

    @pytest.mark.parametrize("settings", [{"schedule": "fcfs"}, {"schedule_window": 0}])
    def test_comes_in_the_order_of_arrival_if_asked_for(self, make: Make, settings: dict[str, Any]) -> None:
        engine = make(max_requests=1, **settings)
        engine.generate([ask([A], tokens(9, 5))])
        assert served(engine, ask([B], tokens(9, 6)), ask([A], tokens(9, 7))) == [0, 1]

    def test_another_tenants_documents_count_for_nothing(self, make: Make) -> None:
        engine = make(max_requests=1)
        engine.generate([ask([A], tokens(9, 5), "one")])
        assert served(engine, ask([B], tokens(9, 6), "other"), ask([A], tokens(9, 7), "other")) == [0, 1]


class TestTiers:
    """A token costs nothing on the device, a tenth of a computed one in host memory, two tenths on the disk."""

    def test_the_device_goes_before_the_host_and_the_host_before_the_disk(
        self, make: Make, model: Any, tmp_path: Path
    ) -> None:
        engine = make(**small_tiers(model, tmp_path, 7), replicate_nodes=0, max_requests=1, policy="lru")
        documents = [tokens(40, 20 + seed) for seed in range(6)]
        for document in documents:
            engine.generate([ask([document], tokens(9, 5))])
        tiers = ("device", "host", "disk")
        asked = {document: ask([text], tokens(9, 6)) for document, text in enumerate(documents)}
        paths = {document: engine._validator.admit(0, each).path for document, each in asked.items()}
        where = {document: cache_of(engine).find(path) for document, path in paths.items()}
        held = [next(document for document in where if getattr(where[document], tier) == 40) for tier in tiers]
        assert served(engine, *(asked[document] for document in reversed(held))) == [2, 1, 0]

    def test_a_long_prefix_in_the_host_goes_before_a_short_one_on_the_device(self, make: Make, model: Any) -> None:
        engine = make(device_tokens=14 * BLOCK, host_bytes=64 * block_bytes(model), max_requests=1, policy="lru")
        engine.generate([ask([A, B, C], tokens(9, 5))])
        for seed in (31, 32, 33):
            engine.generate([ask([tokens(60, seed)], tokens(9, 5))])
        far, near = ask([A, B, C], tokens(20, 6)), ask([tokens(60, 33)], tokens(40, 7))
        done = [engine.add(near), engine.add(far)]
        completions = run(engine)
        assert list(completions) == [done[1], done[0]]
        assert completions[done[1]].cached == (0, 120, 0)
        assert completions[done[0]].cached == (60, 0, 0)

    @pytest.mark.parametrize(("host_s", "first"), [(1e-6, "far"), (45e-6, "near")])
    def test_what_a_load_takes_comes_from_the_profile(
        self, make: Make, model: Any, tmp_path: Path, host_s: float, first: str
    ) -> None:
        """50 µs to compute a token: a load of 45 µs saves next to nothing."""
        profile = tmp_path / "profile.json"
        PrefillProfile((0,), (1,), ((50e-6,),), loads={"host": host_s}).to_file(profile)
        sizes = {"device_tokens": 14 * BLOCK, "host_bytes": 64 * block_bytes(model), "max_requests": 1}
        engine = make(policy="lru", profile=profile, **sizes)
        engine.generate([ask([A, B, C], tokens(9, 5))])
        for seed in (31, 32, 33):
            engine.generate([ask([tokens(60, seed)], tokens(9, 5))])
        ids = {
            engine.add(ask([tokens(60, 33)], tokens(40, 7))): "near",
            engine.add(ask([A, B, C], tokens(20, 6))): "far",
        }
        assert ids[next(iter(run(engine)))] == first


class TestTheWindow:
    @pytest.mark.parametrize("window", [1, 3])
    def test_an_uncached_request_is_overtaken_by_so_many(self, make: Make, window: int) -> None:
        engine = make(max_requests=1, schedule_window=window)
        engine.generate([ask([A], tokens(9, 5))])
        order = served(engine, ask([B], tokens(9, 6)), *(ask([A], tokens(9, 10 + seed)) for seed in range(6)))
        assert order.index(0) == window
        assert order[:window] == list(range(1, window + 1))

    @pytest.mark.parametrize("seed", range(length(20, 2)))
    def test_bounds_the_starvation_of_any_traffic(self, make: Make, seed: int) -> None:
        random = Random(seed)
        window = random.randint(1, 5)
        engine = make(max_requests=random.choice((1, 3)), schedule_window=window, device_tokens=20 * BLOCK)
        documents = [tokens(40, 50 + number) for number in range(5)]
        ids, order = [], []
        for _ in range(60):
            for _ in range(random.choice((0, 1, 1, 2))):
                chosen = random.sample(documents, random.randint(1, 2))
                ids.append(engine.add(ask(chosen, tokens(random.randint(1, 30), random.randint(0, 99)))))
            order += [ids.index(update.request_id) for update in engine.step() if update.completion]
        order += [ids.index(each) for each in run(engine)]
        assert sorted(order) == list(range(len(ids)))
        # Besides the window, those of the same step may be before it.
        assert max(overtakings(order)) <= window + 2
        assert overtakings(order) != [0] * len(order)


class TestATurn:
    def test_is_kept_by_a_preempted_request(self, make: Make, plain: Any) -> None:
        """What is cached for those that arrive later does not bring them before it."""
        engine = make(device_tokens=12 * BLOCK)
        long = [ask([tokens(20, seed)], tokens(10, seed + 9), max_tokens=70) for seed in range(2)]
        ids = [engine.add(request) for request in long]
        while not engine.stats().preemptions:
            engine.step()
        late = ask([tokens(20, 0)], tokens(10, 77), max_tokens=3)
        ids.append(engine.add(late))
        done = run(engine)
        assert list(done) == ids
        for request_id, request in zip(ids, [*long, late], strict=True):
            assert list(done[request_id].token_ids) == greedy(plain, request)

    def test_changes_no_answer(self, make: Make, model: Any) -> None:
        """Tokens, drawn ones too, are those of the order of arrival."""
        random = Random(7)
        documents = [tokens(random.randint(10, 60), 60 + number) for number in range(8)]
        requests = [
            ask(
                random.sample(documents, random.randint(1, 3)),
                tokens(random.randint(1, 30), number),
                max_tokens=random.randint(1, 8),
                temperature=random.choice((0.0, 1.0)),
                seed=number,
            )
            for number in range(40)
        ]
        sizes = {"device_tokens": 24 * BLOCK, "host_bytes": 16 * block_bytes(model), "max_requests": 4}
        answers = []
        for schedule in ("fcfs", "cached-first"):
            engine = make(schedule=schedule, **sizes)
            answers.append([completion.token_ids for completion in engine.generate(requests)])
        assert answers[0] == answers[1]
