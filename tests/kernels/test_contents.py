"""A prompt as a path of segments, and documents' copies by content: which one is used after other documents."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.inside import bound

from ragorder.kernels.cache import (
    Contents,
    CopyKind,
    CopyLocation,
    DiskSettings,
    KnowledgeCache,
    Segment,
    content_of,
    segments_of,
)
from ragorder.kernels.paging import KVShape

SHAPE = KVShape(layers=1, kv_heads=1, head_dim=2, block_size=4)
SYSTEM = [1, 2, 3, 4, 5]
A, B, C, D = ([10 * place + each for each in range(6)] for place in range(1, 5))


def path_of(*documents: list[int], system: list[int] = SYSTEM, salt: str | None = None) -> tuple[Segment, ...]:
    tokens = [*system, *(token for document in documents for token in document), 0]
    ends = [len(system)] if system else []
    for document in documents:
        ends.append((ends[-1] if ends else 0) + len(document))
    return segments_of(tokens, ends, salt=salt, prefix_tokens=len(system))


class TestAPromptIsAPath:
    TOKENS = tuple(range(100, 120))

    @pytest.mark.parametrize(
        ("ends", "settings", "sizes"),
        [
            # Documents are nodes, the question is none, and the last token is in no node.
            ([5, 12, 18], {}, [5, 7, 6]),
            ([5, 20], {}, [5, 14]),
            ([19, 20], {}, [19]),
            # An impossible end is ignored with all that follow.
            *((ends, {}, [5]) for ends in ([5, 5, 9], [5, 4], [5, 21], [5, 0], [5, -1])),
            # Without any there are chunks.
            *((ends, {"chunk_tokens": 8}, [8, 8]) for ends in ([], [0], [21, 5])),
            ([], {"chunk_tokens": 10}, [10]),
            ([], {}, []),
        ],
    )
    def test_has_a_node_for_each_document(self, ends: list[int], settings: dict[str, int], sizes: list[int]) -> None:
        assert [segment.tokens for segment in segments_of(self.TOKENS, ends, **settings)] == sizes

    def test_of_one_token_or_none_is_empty(self) -> None:
        assert segments_of([1], [1]) == segments_of([], []) == ()

    @pytest.mark.parametrize(
        ("ends", "expected"), [([5, 12, 18], [9, 3, 1]), ([5, 12, 12], [9, 3]), ([5, 20], [9, 3]), ([21, 5], [0, 0])]
    )
    def test_a_forecast_is_of_the_documents(self, ends: list[int], expected: list[int]) -> None:
        path = segments_of(self.TOKENS, ends, chunk_tokens=8, expected_uses=[9, 3, 1])
        assert [segment.expected_uses for segment in path] == expected
        plain = segments_of(self.TOKENS, ends, chunk_tokens=8)
        assert [segment[:2] for segment in path] == [segment[:2] for segment in plain]

    def test_a_key_stands_for_its_tokens_all_before_them_and_whose_they_are(self) -> None:
        path = segments_of(self.TOKENS, [5, 12])
        assert segments_of([*self.TOKENS[:12], 1, 2, 3], [5, 12]) == path
        assert segments_of([0, *self.TOKENS[1:]], [5, 12])[1].key != path[1].key
        assert segments_of([*self.TOKENS[:11], 0, 0], [5, 12])[0] == path[0]
        keys = [segments_of(self.TOKENS, [5], salt=salt)[0].key for salt in (None, "", "a", "b")]
        assert len({*keys}) == 4
        assert all(len(key) == 32 for key in keys)
        assert path[-1].key != segments_of(self.TOKENS, [12])[-1].key


class TestAContent:
    def test_is_the_same_wherever_a_document_stands(self) -> None:
        first, second = path_of(A, B), path_of(C, B, A)
        assert first[1].content == second[3].content == content_of(SYSTEM, A)
        assert first[2].content == second[2].content == content_of(SYSTEM, B)
        assert len({segment.content for segment in second}) == 4

    def test_is_the_key_directly_after_the_system_prompt(self) -> None:
        assert path_of(A)[1].content == path_of(A)[1].key
        assert path_of(B, A)[2].content == path_of(A)[1].key
        assert path_of(A, system=[])[0].content == path_of(A, system=[])[0].key == content_of([], A)

    def test_is_of_one_system_prompt_and_one_tenant(self) -> None:
        contents = {
            path[-1].content
            for path in (path_of(A), path_of(A, system=[9]), path_of(A, system=[]), path_of(A, salt="a"), path_of(B))
        }
        assert len(contents) == 5
        assert content_of(SYSTEM, A, salt="a") == path_of(B, A, salt="a")[-1].content

    def test_is_of_marked_documents_only(self) -> None:
        tokens = list(range(40))
        assert not any(segment.content for segment in segments_of(tokens, [5, 20]))
        assert not any(segment.content for segment in segments_of(tokens, [], chunk_tokens=8, prefix_tokens=0))
        assert not segments_of(tokens, [5, 20], prefix_tokens=5)[0].content
        assert segments_of(tokens, [5, 20], prefix_tokens=5)[1].content
        for malformed in (-1, 4, 20, 999):
            assert segments_of(tokens, [5, 20], prefix_tokens=malformed)[0] == segments_of(tokens, [5, 20])[0]


def where(key: bytes, parent: bytes | None = None, start: int = 5) -> CopyLocation:
    return CopyLocation(key, parent, start, 6)


class TestContents:
    @pytest.fixture
    def contents(self) -> Contents:
        self.gone: set[bytes] = set()
        return Contents(lambda key: key not in self.gone)

    def test_prefer_a_preprocessed_copy_then_one_of_its_own(self, contents: Contents) -> None:
        contents.add(b"a", where(b"S/b/a", b"S/b"), CopyKind.AFTER_DOCUMENTS)
        assert contents.cover([b"a", b"b"]) == [where(b"S/b/a", b"S/b"), None]
        contents.add(b"a", where(b"a", b"S"), CopyKind.STANDALONE)
        assert contents.cover([b"a"]) == [where(b"a", b"S")]
        contents.add(b"a", where(b"a+", b"S"), CopyKind.PREPROCESSED)
        assert contents.cover([b"a"]) == [where(b"a+", b"S")]

    def test_prefer_the_longest_run_that_saw_itself(self, contents: Contents) -> None:
        for content in (b"a", b"b", b"c"):
            contents.add(content, where(content, b"S"), CopyKind.STANDALONE)
        contents.add(b"b", where(b"x/b", b"x"), CopyKind.AFTER_DOCUMENTS)
        contents.add(b"c", where(b"x/b/c", b"x/b"), CopyKind.AFTER_DOCUMENTS)
        found = contents.cover([b"a", b"b", b"c", b"a"])
        assert [each and each.key for each in found] == [b"a", b"x/b", b"x/b/c", b"a"]
        assert [each and each.key for each in contents.cover([b"c", b"b"])] == [b"c", b"b"]

    def test_a_preprocessed_copy_ends_a_run(self, contents: Contents) -> None:
        contents.add(b"a", where(b"a", b"S"), CopyKind.STANDALONE)
        contents.add(b"b", where(b"a/b", b"a"), CopyKind.AFTER_DOCUMENTS)
        contents.add(b"b", where(b"b+", b"S"), CopyKind.PREPROCESSED)
        assert [each and each.key for each in contents.cover([b"a", b"b"])] == [b"a", b"b+"]

    def test_forget_what_no_tier_holds(self, contents: Contents) -> None:
        contents.add(b"a", where(b"a"), CopyKind.STANDALONE)
        contents.add(b"a", where(b"x/a", b"x"), CopyKind.AFTER_DOCUMENTS)
        self.gone = {b"a"}
        assert contents.cover([b"a"]) == [where(b"x/a", b"x")]
        assert len(contents) == 1
        self.gone = {b"a", b"x/a"}
        assert contents.cover([b"a"]) == [None]
        assert len(contents) == 0

    def test_know_few_copies_of_a_document_that_stands_on_many_paths(self, contents: Contents) -> None:
        contents.add(b"a", where(b"a", b"S"), CopyKind.STANDALONE)
        contents.add(b"b", where(b"latest/b", b"latest"), CopyKind.AFTER_DOCUMENTS)
        for number in range(1_000):
            path = number.to_bytes(2, "big")
            contents.add(b"a", where(path + b"/a", path), CopyKind.AFTER_DOCUMENTS)
            assert len(contents) <= bound("copies") + 1
        # The one of its own, and the latest.
        assert contents.cover([b"a"]) == [where(b"a", b"S")]
        contents.add(b"b", where(path + b"/a/b", path + b"/a"), CopyKind.AFTER_DOCUMENTS)
        assert [each and each.key for each in contents.cover([b"a", b"b"])] == [path + b"/a", path + b"/a/b"]
        self.gone = {b"a"} | {number.to_bytes(2, "big") + b"/a" for number in range(1_000)}
        assert contents.cover([b"a"]) == [None]
        assert len(contents) == 2

    def test_do_not_grow_with_what_is_gone(self, contents: Contents) -> None:
        fewest = bound("contents")
        for number in range(10 * fewest):
            key = number.to_bytes(4, "big")
            contents.add(key, where(key), CopyKind.STANDALONE)
            if number % 10:
                self.gone.add(key)
        assert len(contents) <= 2 * fewest + 2
        alive = [key for number in range(0, 10 * fewest, 10) if (key := number.to_bytes(4, "big"))]
        assert all(contents.cover(alive))


def compute(cache: KnowledgeCache, path: tuple[Segment, ...]) -> None:
    """As a request that computes what is missing."""
    tokens = sum(segment.tokens for segment in path)
    lease = cache.acquire(path)
    cache.extend(lease, tokens + 1)
    for position in range(lease.cached_tokens, tokens + 1):
        cache.pool.kv[lease.block_table[position // 4], :, :, position % 4] = float(position)
    cache.commit(lease, tokens)
    cache.release(lease)


class TestALease:
    @pytest.fixture
    def cache(self) -> KnowledgeCache:
        cache = KnowledgeCache(SHAPE, device_blocks=64, host_blocks=64)
        compute(cache, path_of(A))
        compute(cache, path_of(B, C))
        return cache

    def test_borrows_what_was_computed_elsewhere(self, cache: KnowledgeCache) -> None:
        path = path_of(B, A, C, D)
        lease = cache.acquire(path, borrow=True)
        assert lease.cached_tokens == 11
        cache.extend(lease, 40)
        assert [(each.start, each.tokens, each.copy.node.start) for each in lease.borrowed] == [(11, 6, 5), (17, 6, 11)]
        assert cache.count_borrowed(lease) == (12, 0, 0)
        cache.give_back(lease)
        assert lease.borrowed == []
        assert cache.stats().device.hit_tokens == 5 + 11 + 12
        cache.release(lease)
        cache.clear()
        assert cache.pool.used_blocks == 0

    def test_finds_and_counts_after_a_clear_what_is_computed_again(self, cache: KnowledgeCache) -> None:
        cache.clear()
        assert len(cache.contents) == 0
        compute(cache, path_of(A))
        assert len(cache.contents) == 1
        lease = cache.acquire(path_of(B, C, A), borrow=True)
        assert [each.copy.node.start for each in lease.borrowed] == [5]
        cache.release(lease)

    @pytest.mark.parametrize(("fails", "starts"), [(False, [11]), (True, [])])
    def test_waits_for_the_step_that_computes_it_and_forgets_it_if_that_fails(
        self, cache: KnowledgeCache, fails: bool, starts: list[int]
    ) -> None:
        first = cache.acquire(path_of(D))
        cache.extend(first, 12)
        cache.commit(first, 11)
        second = cache.acquire(path_of(A, D), borrow=True)
        assert not second.ready
        (cache.discard if fails else cache.mark_computed)(first)
        assert second.ready and [each.start for each in second.borrowed] == starts
        cache.release(first)
        cache.release(second)

    @pytest.mark.parametrize(("documents", "start"), [((D, A, A), 11), ((A, A), 11)], ids=["after", "first"])
    def test_the_same_document_twice_is_loaded_from_the_disk_once(
        self, documents: tuple[list[int], ...], start: int, tmp_path: Path
    ) -> None:
        disk = DiskSettings(tmp_path / "disk", 1 << 20)
        cache = KnowledgeCache(SHAPE, device_blocks=8, disk=disk, identity="m", policy="lru")
        compute(cache, path_of(A))
        compute(cache, path_of([99] * 20))
        cache.close()
        cache = KnowledgeCache(SHAPE, device_blocks=32, disk=disk, identity="m")
        path = path_of(*documents)
        cache.prefetch(path, borrow=True)
        lease = cache.acquire(path, borrow=True)
        cache.extend(lease, 30)
        assert lease.borrowed[0].start == start
        held = cache.pool.kv[lease.borrowed[-1].copy.blocks][:, 0, 0, :, 0, 0].flatten()
        assert held[1:7].tolist() == [5, 6, 7, 8, 9, 10]
        cache.release(lease)
        cache.clear()
        assert cache.pool.used_blocks == 0
        cache.close()
