"""KV events with media: which tier of an engine holds a block."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import msgpack
from support.event_server import BLOCK, Event, contents_of, removed, stored

from ragorder import Document, Orderer
from ragorder.adapters.vllm.kv_events import EventCounters, EventReader
from ragorder.benchmarks.ragcache.replacement.tiers import A10G
from ragorder.trie.residency import TierLevel
from ragorder.trie.residency.blocks import EngineBlocks


class Engine:
    """An engine with tiers, as its KV events show it; `send` takes events in the form of vLLM's maps."""

    def __init__(self) -> None:
        self.blocks = EngineBlocks(BLOCK)
        self.counters = EventCounters()
        self._reader = EventReader(msgpack.decode, self.counters)

    def send(self, *events: Event) -> None:
        self._reader.read(msgpack.encode([0.0, events, 0]), self.blocks)

    def compute(self, tokens: Sequence[int], salt: str | None = None) -> list[str]:
        """On the device; returns the blocks' hashes."""
        hashes = [f"{salt} {tokens[: start + BLOCK]}" for start in range(0, len(tokens), BLOCK)]
        keys = [[salt], *[None] * (len(hashes) - 1)] if salt else None
        self.send(stored(hashes, tokens, extra_keys=keys))
        return hashes

    def places(self, salt: str | None = None) -> list[TierLevel]:
        return list(map(self.blocks.place, contents_of(TOKENS, salt)))


def placeholder(hash: Hashable, medium: str) -> Event:
    """What vLLM's offloading sends without `self_describing_kv_events`."""
    return stored([hash], [], medium=medium, block_size=0, group_idx=0)


TOKENS = list(range(2 * BLOCK))


@pytest.fixture
def engine() -> Engine:
    return Engine()


class TestPlaces:
    @pytest.mark.parametrize(
        ("medium", "place"),
        [
            ("CPU", TierLevel.HOST),
            ("CPU_PINNED", TierLevel.HOST),
            ("STORAGE", TierLevel.DISK),
            ("DISK", TierLevel.DISK),
            ("HBM2", TierLevel.DEVICE),
            (None, TierLevel.DEVICE),
        ],
    )
    @pytest.mark.parametrize("describing", [True, False])
    def test_a_block_that_left_the_device_is_in_its_tier(
        self, engine: Engine, medium: str | None, place: TierLevel, describing: bool
    ) -> None:
        hashes = engine.compute(TOKENS)
        if describing or place is TierLevel.DEVICE:
            engine.send(stored(hashes, TOKENS, medium=medium))
        else:
            engine.send(*(placeholder(each, str(medium)) for each in hashes))
        assert engine.places() == [TierLevel.DEVICE] * 2
        engine.send(removed(hashes))
        assert engine.places() == [place] * 2
        engine.send(removed(hashes, medium))
        assert len(engine.blocks) == 0
        assert engine.counters.garbage == engine.counters.orphans == 0


class TestTenants:
    """vLLM leaves the salt out of a lower tier's events."""

    @pytest.mark.parametrize("describing", [True, False])
    def test_a_salted_block_stays_its_tenants(self, engine: Engine, describing: bool) -> None:
        hashes = engine.compute(TOKENS, salt="tenant")
        if describing:
            engine.send(stored(hashes, TOKENS, medium="CPU", extra_keys=None))
        else:
            engine.send(*(placeholder(each, "CPU") for each in hashes))
        engine.send(removed(hashes))
        assert engine.places("tenant") == [TierLevel.HOST] * 2
        assert len(engine.blocks) == 2
        assert not any(map(engine.blocks.holds, contents_of(TOKENS)))

    def test_a_block_that_the_device_never_had_is_known_only_with_a_salt_in_its_event(self, engine: Engine) -> None:
        engine.send(stored(["unknown"], TOKENS[:BLOCK], medium="CPU"), placeholder("unknown", "STORAGE"))
        assert len(engine.blocks) == 0
        assert engine.counters.orphans == 2
        engine.send(stored(["unknown"], TOKENS[:BLOCK], medium="CPU", extra_keys=[["tenant"]]))
        assert engine.places("tenant")[0] is TierLevel.HOST


PREFIX = tuple(range(100, 100 + BLOCK))
IDS = {name: tuple(range(1000 * number, 1000 * number + 8 * BLOCK)) for number, name in enumerate("abc", 2)}


class TestOrders:
    """An orderer that follows the events of an engine with tiers."""

    def orderer(self, engine: Engine, profile: Path | None) -> Orderer:
        return Orderer(
            capacity_tokens=1 << 12,
            block_size=BLOCK,
            prefix_tokens=len(PREFIX),
            suffix_tokens=0,
            tokens=lambda document: len(IDS[document.id]),
            token_ids=lambda document: IDS[document.id],
            prefix_ids=PREFIX,
            blocks=engine.blocks,
            profile=profile,
            strict=True,
        )

    @pytest.mark.parametrize(
        ("disk_s", "first"),
        [(None, ["a", "b"]), (1e-6, ["a", "b"]), (1.0, ["c"])],
        ids=["no profile", "a fast disk", "a slow disk"],
    )
    def test_the_cheaper_path_wins(
        self, engine: Engine, tmp_path: Path, disk_s: float | None, first: list[str]
    ) -> None:
        if disk_s is not None:
            replace(A10G, loads={"host": 1e-6, "disk": disk_s}).to_file(tmp_path / "profile.json")
        orderer = self.orderer(engine, tmp_path / "profile.json" if disk_s is not None else None)
        prompts = [(*PREFIX, *IDS["a"], *IDS["b"]), (*PREFIX, *IDS["c"])]
        long, short = (engine.compute(prompt) for prompt in prompts)
        engine.send(stored(long, prompts[0], medium="STORAGE"), removed(long[1:]))
        ordering = orderer.order([Document(name, text=name) for name in "bca"])
        assert [document.id for document in ordering.documents][: len(first)] == first
        if disk_s is not None:
            loaded = 16 * BLOCK if first == ["a", "b"] else 0
            assert (ordering.host_tokens, ordering.disk_tokens) == (0, loaded)
        assert ordering.cached_tokens == BLOCK + 8 * BLOCK * len(first)
        assert len(short) == 9

    def test_what_a_tier_keeps_stays_in_the_tree(self, engine: Engine, tmp_path: Path) -> None:
        replace(A10G, loads={"host": 1e-6}).to_file(tmp_path / "profile.json")
        orderer = self.orderer(engine, tmp_path / "profile.json")
        documents = [Document(name, text=name) for name in "ab"]
        orderer.order(documents).confirm()
        prompt = (*PREFIX, *IDS["a"], *IDS["b"])
        hashes = engine.compute(prompt)
        engine.send(stored(hashes, prompt, medium="CPU"), removed(hashes[9:]))
        ordering = orderer.order(documents)
        assert (ordering.cached_tokens, ordering.host_tokens) == (len(prompt), 8 * BLOCK)
        ordering.discard()
        engine.send(removed(hashes[9:], "CPU"))
        ordering = orderer.order(documents)
        assert (ordering.cached_tokens, ordering.host_tokens) == (9 * BLOCK, 0)
