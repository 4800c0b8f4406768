"""The embedded engine's order of admission: cached length / computation length within a window (RAGCache 5.2)."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import cache_of, path_of
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


def asking(*documents: list[int], question: int = 9, salt: str | None = None) -> Request:
    return ask(documents, tokens(question, 5), salt)


def with_system(document: list[int]) -> Request:
    """A is the system prompt."""
    return Request([*A, *document, 7], [len(A) + len(document)], prefix_tokens=len(A))


TURNS: dict[str, tuple[list[Request], list[Request], list[int]]] = {
    "what is cached goes first": ([asking(A)], [asking(B), asking(C), asking(A)], [2, 0, 1]),
    "the largest ratio of cached to computed tokens": (
        [asking(A, B), asking(C)],
        [asking(A, B, question=90), asking(C)],
        [1, 0],
    ),
    "the oldest of equals": ([asking(A)], [asking(B), asking(C), asking(A), asking(A)], [2, 3, 0, 1]),
    "a cached system prompt counts for nothing": (
        [with_system(B)],
        [with_system(tokens(90, 6)), with_system(tokens(9, 7))],
        [0, 1],
    ),
    "what requests before have cached": ([], [asking(A), asking(B), asking(A), asking(B)], [0, 2, 1, 3]),
    "another tenant's documents count for nothing": (
        [asking(A, salt="one")],
        [asking(B, salt="other"), asking(A, salt="other")],
        [0, 1],
    ),
}


@pytest.mark.parametrize(("cached", "requests", "order"), TURNS.values(), ids=TURNS)
def test_the_next_turn(make: Make, cached: list[Request], requests: list[Request], order: list[int]) -> None:
    engine = make(max_requests=1)
    engine.generate(cached)
    assert served(engine, *requests) == order


@pytest.mark.parametrize("settings", [{"schedule": "fcfs"}, {"schedule_window": 0}])
def test_turns_are_in_the_order_of_arrival_if_the_settings_say_so(make: Make, settings: dict[str, Any]) -> None:
    engine = make(max_requests=1, **settings)
    engine.generate([asking(A)])
    assert served(engine, asking(B), asking(A)) == [0, 1]


class TestTiers:
    """A token costs nothing on the device, a tenth of a computed one in host memory, two tenths on the disk."""

    def test_the_device_goes_first_and_the_disk_last(self, make: Make, model: Any, tmp_path: Path) -> None:
        engine = make(**small_tiers(model, tmp_path, 7), replicate_nodes=0, max_requests=1, policy="lru")
        documents = [tokens(40, 20 + seed) for seed in range(6)]
        for document in documents:
            engine.generate([ask([document], tokens(9, 5))])
        tiers = ("device", "host", "disk")
        asked = {document: ask([text], tokens(9, 6)) for document, text in enumerate(documents)}
        paths = {document: path_of(engine, each) for document, each in asked.items()}
        where = {document: cache_of(engine).find(path) for document, path in paths.items()}
        held = [next(document for document in where if getattr(where[document], tier) == 40) for tier in tiers]
        assert served(engine, *(asked[document] for document in reversed(held))) == [2, 1, 0]

    @pytest.mark.parametrize(("host_s", "far_first"), [(None, True), (1e-6, True), (45e-6, False)])
    def test_a_long_prefix_in_the_host_goes_first_if_its_load_saves_more(
        self, make: Make, model: Any, tmp_path: Path, host_s: float | None, far_first: bool
    ) -> None:
        """A token is computed in 50 µs: a load of 45 µs saves next to nothing."""
        profile = None
        if host_s is not None:
            profile = tmp_path / "profile.json"
            PrefillProfile((0,), (1,), ((50e-6,),), loads={"host": host_s}).to_file(profile)
        sizes = {"device_tokens": 14 * BLOCK, "host_bytes": 64 * block_bytes(model), "max_requests": 1}
        engine = make(policy="lru", profile=profile, **sizes)
        engine.generate([asking(A, B, C)])
        for seed in (31, 32, 33):
            engine.generate([asking(tokens(60, seed))])
        near, far = engine.add(asking(tokens(60, 33), question=40)), engine.add(asking(A, B, C, question=20))
        done = run(engine)
        assert list(done) == ([far, near] if far_first else [near, far])
        assert (done[near].cached, done[far].cached) == ((60, 0, 0), (0, 120, 0))


class TestTheWindow:
    @pytest.mark.parametrize("window", [1, 3])
    def test_an_uncached_request_is_overtaken_by_so_many(self, make: Make, window: int) -> None:
        engine = make(max_requests=1, schedule_window=window)
        engine.generate([asking(A)])
        order = served(engine, asking(B), *(asking(A) for _ in range(6)))
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
