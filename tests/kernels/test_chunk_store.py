"""The chunk store: a bounded dictionary in a folder, which survives its process, and never gives back a wrong byte."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.chunks import (
    BLOCK,
    HEADER_BYTES,
    IDENTITY,
    KEY,
    OTHER,
    THIRD,
    bytes_on_disk,
    content,
    failing,
    file_of,
    holds,
    open_store,
    put,
    stored,
)
from support.rings import examples

from ragorder.kernels.store import ChunkStore, StoreRefusedError, survey
from ragorder.kernels.store.format import BadHeaderError, Header
from ragorder.trie.policies import POLICIES, History, Tier, TierNode, make_policy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


class TestAStoreIsADictionaryOnDisk:
    def test_any_buffer_of_bytes_will_do(self, folder: Path) -> None:
        numpy = pytest.importorskip("numpy")
        rows = numpy.arange(8192, dtype=numpy.int8).reshape(2, 4096)
        store = open_store(folder)
        assert store.write(KEY, memoryview(rows))
        back = numpy.zeros_like(rows)
        assert store.read(KEY, memoryview(back))
        assert (back == rows).all()

    def test_a_buffer_of_another_size_gets_nothing(self, folder: Path) -> None:
        store = stored(folder, KEY)
        assert not store.read(KEY, bytearray(4999))
        assert store.counters.refusals() == {"size": 1}
        assert KEY not in store

    def test_a_file_that_cannot_be_removed_takes_room(self, folder: Path) -> None:
        store = stored(folder, KEY)
        with failing("unlink", errno.EROFS):
            assert not store.remove(KEY)
        assert KEY not in store and store.used_bytes == bytes_on_disk(folder) > 0

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            *((lambda store, key=key: store.write(key, b"x"), "1 to 1024") for key in (b"", bytes(1025))),
            *((lambda store, key=key: store.write(KEY, b"x", key), "1 to 1024") for key in (b"", bytes(1025))),
            (lambda store: put(store, KEY, cost=float("nan")), "finite"),
            (lambda store: put(store, KEY, KEY), "own parent"),
            (lambda _: open_store(Path("x"), -1), "0 or more"),
            (lambda _: open_store(Path("x"), policy="mru"), "forecast, gdsf, lfu, lru, pgdsf"),
        ],
    )
    def test_what_cannot_be_is_refused(self, folder: Path, call: Callable[[ChunkStore], object], said: str) -> None:
        store = open_store(folder)
        with pytest.raises(ValueError, match=said):
            call(store)
        assert put(store, b"k") and put(store, b"l", b"k") and put(store, bytes(1024), bytes(1023) + b"p")
        assert holds(store, b"k") and holds(store, b"l") and holds(store, bytes(1024))

    def test_only_its_owner_can_look_into_it(self, folder: Path) -> None:
        before = os.umask(0)
        try:
            stored(folder, KEY)
        finally:
            os.umask(before)
        modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in (folder, *folder.rglob("*"))}
        assert modes == {(True, 0o700), (False, 0o600)}

    def test_of_a_folder_that_was_there_only_what_is_its_own_is_touched(self, folder: Path) -> None:
        folder.mkdir(mode=0o755)
        (folder / "somebody's.txt").write_text("else")
        (folder / "chunks").mkdir(mode=0o777)
        (folder / "chunks" / "notes.tmp").write_text("no name of ours")
        open_store(folder).close()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert stat.S_IMODE((folder / "chunks").stat().st_mode) == 0o700
        assert (folder / "somebody's.txt").exists() and (folder / "chunks" / "notes.tmp").exists()

    def test_a_closed_store_is_empty_and_its_folder_free(self, folder: Path) -> None:
        store = stored(folder, KEY)
        store.close()
        store.close()
        assert KEY not in store and not holds(store, KEY) and not put(store, OTHER)
        store.use([KEY])
        assert holds(open_store(folder), KEY)


class Machine(RuleBasedStateMachine):
    """The store held against a dictionary and a tier that are told the same."""

    keys = st.integers(0, 15).map(lambda number: number.to_bytes(4, "big") * 9)
    costs = st.none() | st.floats(0, 1)

    @initialize(policy=st.sampled_from(POLICIES), history=st.sampled_from([0, 4]), blocks=st.integers(0, 12))
    def open(self, policy: str, history: int, blocks: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chunk-store-"))
        self.policy, self.history, self.blocks, self.capacity = policy, history, blocks, blocks * BLOCK
        self.model: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.kept_cost: dict[bytes, float] = {}
        self.held: list[bytes] = []
        self.tier = self.new_tier()
        self.gone: list[bytes] = []
        self.store = self.new_store()

    def new_tier(self) -> Tier:
        return Tier(make_policy(self.policy), History(self.history) if self.history else None)

    def new_store(self) -> ChunkStore:
        settings = {"policy": self.policy, "history": self.history, "removed": self.gone.extend}
        return open_store(self.folder, self.capacity, **settings)

    @rule(
        key=keys,
        parent=st.none() | keys,
        size=st.integers(0, 9000),
        cost=costs,
        used=st.booleans(),
        protect=st.sets(keys),
    )
    def write(
        self, key: bytes, parent: bytes | None, size: int, cost: float | None, used: bool, protect: set[bytes]
    ) -> None:
        # Parents make a tree: here each is a lower number.
        parent = parent if parent is not None and parent < key else None
        told, refused = len(self.gone), self.store.counters.refusals().get("room", 0)
        written = self.store.write(key, content(key, size), parent, cost=cost, used=used, protected=protect)
        if key in self.model:
            assert written
            return
        on_disk = self.store.bytes_on_disk(key, size, parent)
        missing = self.tier.used + on_disk - self.capacity
        victims = self.tier.evict(missing, protect | set(self.held))
        assert written == (victims is not None)
        assert self.gone[told:] == (victims or [])
        assert self.store.counters.refusals().get("room", 0) == refused + (victims is None)
        if victims is not None:
            for victim in victims:
                del self.model[victim]
            self.tier.insert(key, on_disk, parent)
            self.model[key], self.parents[key], self.kept_cost[key] = content(key, size), parent, cost or 0.0
        if used:
            self.tier.use([key], cost=cost, computed={key})

    @rule(path=st.lists(keys, max_size=4), cost=costs, computed=st.sets(keys))
    def use(self, path: list[bytes], cost: float | None, computed: set[bytes]) -> None:
        self.store.use(path, cost=cost, computed=computed)
        self.tier.use(path, cost=cost, computed=computed)

    @rule(key=keys)
    def read(self, key: bytes) -> None:
        counters, known = self.store.counters, key in self.model
        before = counters.hits, counters.misses
        assert holds(self.store, key, len(self.model.get(key, b""))) == known
        assert (counters.hits, counters.misses) == (before[0] + known, before[1] + (not known))

    @rule(key=keys)
    def hold(self, key: bytes) -> None:
        self.store.pin([key])
        self.held.append(key)

    @rule()
    def release(self) -> None:
        if self.held:
            self.store.unpin([self.held.pop()])

    @rule(key=keys)
    def remove(self, key: bytes) -> None:
        told = len(self.gone)
        assert self.store.remove(key)
        assert self.gone[told:] == ([key] if key in self.model else [])
        if key in self.model:
            self.tier.remove(key)
            del self.model[key]

    @rule(smaller=st.booleans())
    def reopen(self, smaller: bool) -> None:
        """Oldest first, with parents and costs. A smaller store keeps what fits."""
        self.store.close()
        self.capacity = self.tier.used // 2 // BLOCK * BLOCK if smaller else self.blocks * BLOCK
        self.held.clear()
        self.tier = self.new_tier()
        sizes = {key: -(-file_of(self.folder, key).stat().st_size // BLOCK) * BLOCK for key in self.model}
        for key in self.model:
            known = TierNode(key)
            known.frequency, known.misses, known.cost = 1, 1, self.kept_cost[key]
            self.tier.insert(key, sizes[key], self.parents[key], known=known)
        restored = len(self.model)
        for victim in self.tier.evict(self.tier.used - self.capacity) or ():
            del self.model[victim]
        self.store = self.new_store()
        assert self.store.counters.restored == restored

    @invariant()
    def it_holds_what_the_dictionary_holds(self) -> None:
        assert len(self.store) == len(self.model)
        assert all(key in self.store for key in self.model)
        assert self.store.used_bytes == self.tier.used == bytes_on_disk(self.folder) <= self.capacity
        assert [*self.store] == [*self.model]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder)


Machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestItEvictsLikeADictionaryWithThatTier = Machine.TestCase


class TestAnotherProcessFindsItAll:
    def test_chunks_parents_and_costs_come_back_oldest_first(self, folder: Path) -> None:
        store = stored(folder, KEY, policy="lru")
        put(store, OTHER, KEY, cost=0.5)
        put(store, THIRD)
        store.use([KEY, OTHER])
        store.close()
        store = open_store(folder, 3 * 2 * BLOCK, policy="lru")
        assert store.counters.restored == 3
        # A parent is no candidate, and how often a chunk was used is not kept.
        assert put(store, b"new") and OTHER not in store
        assert put(store, b"newer") and KEY not in store
        assert put(store, b"newest") and THIRD not in store

    def test_half_written_files_are_removed(self, folder: Path) -> None:
        stored(folder, KEY).close()
        whole = file_of(folder, KEY)
        half = whole.with_suffix(".tmp")
        whole.rename(half)
        assert KEY not in open_store(folder)
        assert not half.exists()

    def test_of_two_writings_the_younger_one_counts(self, folder: Path) -> None:
        store = open_store(folder)
        store.write(KEY, content(OTHER))
        store.close()
        old = file_of(folder, KEY)
        kept = old.read_bytes()
        old.unlink()
        stored(folder, OTHER, KEY).close()
        old.write_bytes(kept)
        store = open_store(folder)
        assert holds(store, KEY)
        assert not old.exists()

    def test_the_oldest_chunk_tells_when_it_was_written(self, folder: Path) -> None:
        store = open_store(folder)
        assert store.oldest_written is None
        put(store, KEY)
        store.close()
        os.utime(file_of(folder, KEY), (1e9, 1e9))
        store = open_store(folder)
        put(store, OTHER)
        assert store.oldest_written == 1e9

    def test_a_survey_reads_a_folder_in_use(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            survey(folder)
        assert survey(tmp_path) is None
        store = open_store(folder)
        found = survey(folder)
        assert found is not None and (found.chunks, found.bytes, found.oldest) == (0, 0, None)
        put(store, KEY)
        put(store, OTHER)
        found = survey(folder)
        assert found is not None and (found.chunks, found.unfinished) == (2, 0)
        assert found.locked_by == str(os.getpid())
        assert found.identity is not None and IDENTITY not in found.identity
        store.close()
        file_of(folder, KEY).rename(file_of(folder, KEY).with_suffix(".tmp"))
        found = survey(folder)
        assert found is not None and (found.chunks, found.unfinished, found.locked_by) == (1, 1, None)


class TestAnotherIdentity:
    def test_a_folder_of_another_format_is_refused(self, folder: Path) -> None:
        open_store(folder).close()
        note = json.loads((folder / "identity").read_text())
        (folder / "identity").write_text(json.dumps(note | {"format": 99}))
        with pytest.raises(StoreRefusedError, match="version") as refused:
            open_store(folder)
        assert refused.value.reason == "format"

    def test_chunks_of_another_format_are_refused_counted_and_removed(self, folder: Path) -> None:
        store = open_store(folder)
        put(store, KEY, OTHER)
        store.close()
        path = file_of(folder, KEY)
        data = bytearray(path.read_bytes())
        data[8:10] = (2).to_bytes(2, "little")
        path.write_bytes(data)
        # A lost note: the chunks are looked at one by one.
        (folder / "identity").unlink()
        store = open_store(folder)
        assert KEY not in store and not path.exists()
        assert store.counters.refusals() == {"format": 1}
        assert put(store, KEY) and holds(store, KEY)

    @pytest.mark.parametrize("note", [b"\xff", b"[" * 4096, b"{}", b"[1]"])
    def test_where_the_folder_does_not_say_every_chunk_does(self, folder: Path, note: bytes) -> None:
        stored(folder, KEY).close()
        (folder / "identity").write_bytes(note)
        store = open_store(folder, identity="another model")
        assert KEY not in store
        assert store.counters.refusals() == {"identity": 1}
        assert put(store, KEY) and holds(store, KEY)

    def test_a_chunk_of_another_model_is_skipped_and_takes_room(self, folder: Path, tmp_path: Path) -> None:
        stored(tmp_path / "other", KEY, identity="another model")
        stranger = file_of(tmp_path / "other", KEY)
        open_store(folder).close()
        copy = folder / "chunks" / stranger.parent.name / stranger.name
        copy.parent.mkdir()
        shutil.copy(stranger, copy)
        store = open_store(folder, 3 * BLOCK)
        assert KEY not in store and copy.exists()
        assert store.counters.refusals() == {"identity": 1}
        assert store.used_bytes == 2 * BLOCK
        assert not put(store, OTHER)

    def test_a_chunk_that_becomes_another_models_is_not_read(self, folder: Path, tmp_path: Path) -> None:
        other = open_store(tmp_path / "other", identity="another model")
        other.write(KEY, content(OTHER))
        store = stored(folder, KEY)
        shutil.copy(file_of(tmp_path / "other", KEY), file_of(folder, KEY))
        assert not holds(store, KEY)
        assert store.counters.refusals() == {"identity": 1}


class TestWrongBytesAreNeverGivenBack:
    """The file of a chunk is damaged: under an open store, and before one is opened."""

    @pytest.fixture(params=[True, False])
    def opened(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    @contextmanager
    def damaged(self, folder: Path, opened: bool, reason: str | None = None) -> Iterator[Path]:
        store = open_store(folder)
        put(store, KEY, OTHER)
        if not opened:
            store.close()
        yield (path := file_of(folder, KEY))
        if not opened:
            store = open_store(folder)
        found = holds(store, KEY)
        store.close()
        assert not found and (reason != "truncated" or not path.exists())
        ((said, count),) = store.counters.refusals().items()
        assert count == 1 and reason in (said, None)

    def test_whichever_bit_of_the_header_is_flipped(self, folder: Path, opened: bool) -> None:
        for place in range(HEADER_BYTES):
            with self.damaged(folder / str(place), opened) as path:
                flip(path, place, 1 << place % 8)

    def test_whichever_bit_of_the_payload_is_flipped(self, folder: Path, opened: bool) -> None:
        chance = random.Random(0)
        for number, place in enumerate([0, 4999, *(chance.randrange(5000) for _ in range(30))]):
            with self.damaged(folder / str(number), opened, "checksum") as path:
                flip(path, HEADER_BYTES + place, 1 << chance.randrange(8))

    def test_wherever_the_file_is_cut_off(self, folder: Path, opened: bool) -> None:
        fields = [0, 1, 8, 10, 12, 14, 16, 24, 32, 48, 64, 64 + len(KEY)]
        near_payload = [HEADER_BYTES + place for place in (-16, -1, 0, 1, 4999)]
        chance = random.Random(1)
        for size in (*fields, *near_payload, *(chance.randrange(HEADER_BYTES + 5000) for _ in range(20))):
            with self.damaged(folder / str(size), opened, "truncated") as path:
                os.truncate(path, size)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (None, "truncated"),
            (bytes(6000), None),
            (b"\x89ragKV\r\n" * 700, None),
            (random.Random(2).randbytes(6000), None),
        ],
        ids=["longer", "zeros", "magic", "random"],
    )
    def test_a_file_that_is_longer_or_something_else(
        self, folder: Path, opened: bool, content: bytes | None, reason: str | None
    ) -> None:
        with self.damaged(folder, opened, reason) as path:
            kept = path.read_bytes()
            path.write_bytes(kept + bytes(1) if content is None else content[: len(kept)])

    def test_the_file_of_another_chunk_under_this_name(self, folder: Path, opened: bool) -> None:
        with self.damaged(folder, opened, "foreign") as path:
            spare, key = open_store(folder / "spare"), b"KEY" * 12
            put(spare, key, OTHER)
            shutil.copy(file_of(folder / "spare", key), path)

    @pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("elsewhere"), os.mkfifo])
    def test_what_is_no_file(self, folder: Path, opened: bool, make: Callable[[Path], object]) -> None:
        with self.damaged(folder, opened) as path:
            path.rename(path.parent / "elsewhere")
            make(path)

    def test_a_file_that_is_gone(self, folder: Path) -> None:
        with self.damaged(folder, True, "missing") as path:
            path.unlink()

    def test_what_was_refused_can_be_written_again(self, folder: Path) -> None:
        gone: list[bytes] = []
        store = stored(folder, KEY, removed=gone.extend)
        flip(file_of(folder, KEY), 300, 1)
        assert not holds(store, KEY) and KEY not in store and gone == [KEY]
        assert store.used_bytes == bytes_on_disk(folder) == 0
        assert put(store, KEY) and holds(store, KEY)

    @given(data=st.binary(max_size=300))
    def test_no_bytes_make_a_header_by_chance(self, data: bytes) -> None:
        with pytest.raises(BadHeaderError):
            Header.unpack(data)


def flip(path: Path, place: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)
