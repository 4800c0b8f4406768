"""The chunk store: a bounded dictionary in a folder, which survives its process, and never gives back a wrong byte."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import shake_128
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.rings import examples

from ragorder.common.circuit_breaker import CircuitBreaker
from ragorder.kernels.store import ChunkStore, StoreRefusedError, survey
from ragorder.kernels.store.format import BadHeaderError, ChunkName, Header
from ragorder.kernels.store.scan import stored_bytes
from ragorder.trie.policies import POLICIES, History, Tier, TierNode, make_policy

IDENTITY = "a model"
PLENTY = 1 << 30
BLOCK = 4096
KEY, OTHER, THIRD = b"key" * 12, b"other" * 7, b"third" * 7
HEADER_BYTES = Header(KEY, OTHER, 5000, 0.0, bytes(16), bytes(16)).header_bytes


def content(key: bytes, size: int = 5000) -> bytes:
    """Bytes that no other key has, so that wrong ones are recognised."""
    return shake_128(key).digest(size)


def open_store(folder: Path, capacity_bytes: int = PLENTY, identity: str = IDENTITY, **settings: Any) -> ChunkStore:
    return ChunkStore(folder, capacity_bytes, identity, **{"patience_s": 0.0} | settings)


def put(store: ChunkStore, key: bytes, parent: bytes | None = None, size: int = 5000, **facts: Any) -> bool:
    return store.write(key, content(key, size), parent, **facts)


def stored(folder: Path, *keys: bytes, **settings: Any) -> ChunkStore:
    """A store with these chunks."""
    store = open_store(folder, **settings)
    for key in keys:
        assert put(store, key)
    return store


def holds(store: ChunkStore, key: bytes, size: int = 5000) -> bool:
    """Whether the store gives the chunk back. Anything else that it says is its bytes is wrong."""
    buffer = bytearray(size)
    if not store.read(key, buffer):
        return False
    assert buffer == content(key, size)
    return True


def files(folder: Path) -> list[Path]:
    return sorted((folder / "chunks").glob("??/*"))


def file_of(folder: Path, key: bytes) -> Path:
    (found,) = (path for path in files(folder) if ChunkName.parse(path.name).is_of(key))
    return found


def bytes_on_disk(folder: Path) -> int:
    return sum(-(-path.lstat().st_size // BLOCK) * BLOCK for path in files(folder))


@contextmanager
def failing(call: str, number: int) -> Iterator[None]:
    """The system refuses this call."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


class TestAStoreIsADictionaryOnDisk:
    def test_what_was_written_is_read(self, folder: Path) -> None:
        store = open_store(folder)
        assert put(store, KEY)
        assert put(store, OTHER, KEY, size=70_000)
        assert KEY in store and OTHER in store and THIRD not in store
        assert holds(store, KEY)
        assert holds(store, OTHER, size=70_000)
        assert not holds(store, THIRD)
        assert (store.counters.stored, store.counters.hits, store.counters.misses) == (2, 2, 1)

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

    def test_what_is_removed_is_gone_for_good(self, folder: Path) -> None:
        gone: list[bytes] = []
        store = stored(folder, KEY, removed=gone.extend)
        put(store, OTHER, KEY)
        assert list(store) == [KEY, OTHER]
        assert store.remove(KEY) and store.remove(THIRD)
        assert list(store) == [OTHER] and gone == [KEY]
        assert store.used_bytes == bytes_on_disk(folder) > 0
        store.close()
        store = open_store(folder)
        assert list(store) == [OTHER] and holds(store, OTHER)

    def test_a_file_that_cannot_be_removed_takes_room(self, folder: Path) -> None:
        store = stored(folder, KEY)
        with failing("unlink", errno.EROFS):
            assert not store.remove(KEY)
        assert KEY not in store and store.used_bytes == bytes_on_disk(folder) > 0

    @given(size=st.integers(0, 20_000), child=st.booleans())
    def test_what_a_chunk_will_take_is_known_before(self, size: int, child: bool) -> None:
        with tempfile.TemporaryDirectory() as name:
            store = open_store(Path(name) / "store")
            parent = OTHER if child else None
            expected = store.bytes_on_disk(KEY, size, parent)
            assert store.write(KEY, bytes(size), parent)
            assert store.used_bytes == expected
            assert stored_bytes(Path(name) / "store").keys() == {ChunkName.of(KEY, 0).digest}

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
        self.policy, self.history, self.capacity = policy, history, blocks * BLOCK
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
        told = len(self.gone)
        written = self.store.write(key, content(key, size), parent, cost=cost, used=used, protected=protect)
        if key in self.model:
            assert written
            return
        header = Header(key, parent, size, 0.0, bytes(16), bytes(16))
        on_disk = -(-header.file_bytes // BLOCK) * BLOCK
        missing = self.tier.used + on_disk - self.capacity
        victims = self.tier.evict(missing, protect | set(self.held))
        assert written == (victims is not None)
        assert self.gone[told:] == (victims or [])
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
        if key in self.model:
            assert holds(self.store, key, len(self.model[key]))
        else:
            assert not self.store.read(key, bytearray(10))

    @rule(key=keys)
    def hold(self, key: bytes) -> None:
        self.store.pin([key])
        self.held.append(key)

    @rule()
    def release(self) -> None:
        if self.held:
            self.store.unpin([self.held.pop()])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.held.clear()
        self.tier = self.new_tier()
        sizes = {key: -(-file_of(self.folder, key).stat().st_size // BLOCK) * BLOCK for key in self.model}
        for key in self.model:
            known = TierNode(key)
            known.frequency, known.misses, known.cost = 1, 1, self.kept_cost[key]
            self.tier.insert(key, sizes[key], self.parents[key], known=known)
        self.store = self.new_store()
        assert self.store.counters.restored == len(self.model)

    @invariant()
    def it_holds_what_the_dictionary_holds(self) -> None:
        assert len(self.store) == len(self.model)
        assert all(key in self.store for key in self.model)
        assert self.store.used_bytes == self.tier.used == bytes_on_disk(self.folder) <= self.capacity

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder)


Machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestItEvictsLikeADictionaryWithThatTier = Machine.TestCase


class TestWhatGoesFirst:
    def test_what_is_protected_or_held_does_not_make_room(self, folder: Path) -> None:
        store = stored(folder, KEY, OTHER, capacity_bytes=2 * 2 * BLOCK)
        store.pin([KEY])
        assert not put(store, THIRD, protected={OTHER})
        assert store.counters.refusals() == {"room": 1}
        assert put(store, THIRD)
        assert KEY in store and OTHER not in store
        store.unpin([KEY])
        assert put(store, OTHER, protected={THIRD})
        assert KEY not in store

    def test_removals_are_reported_to_the_callback(self, folder: Path) -> None:
        gone: list[bytes] = []
        store = stored(folder, KEY, OTHER, capacity_bytes=2 * BLOCK, removed=gone.extend)
        file_of(folder, OTHER).write_bytes(b"")
        assert not holds(store, OTHER)
        assert gone == [KEY, OTHER]


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

    def test_a_smaller_store_keeps_what_fits(self, folder: Path) -> None:
        stored(folder, *(b"%d" % number for number in range(10)), policy="lru").close()
        store = open_store(folder, 4 * 2 * BLOCK, policy="lru")
        assert [number for number in range(10) if b"%d" % number in store] == [6, 7, 8, 9]
        assert bytes_on_disk(folder) == store.used_bytes == 4 * 2 * BLOCK

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
    def test_a_folder_of_another_model_is_refused_and_left_alone(self, folder: Path) -> None:
        stored(folder, KEY).close()
        with pytest.raises(StoreRefusedError, match="another model") as refused:
            open_store(folder, identity="another model")
        assert refused.value.reason == "identity"
        assert holds(open_store(folder), KEY)

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
        store = stored(folder, KEY)
        flip(file_of(folder, KEY), 300, 1)
        assert not holds(store, KEY) and KEY not in store
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


LIMITED = """
import resource, sys
from pathlib import Path
from ragorder.kernels.store import ChunkStore
store = ChunkStore(Path(sys.argv[1]), 1 << 20, "a model")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
print(store.write(b"large", bytes(50_000)), store.write(b"small", bytes(5_000)), dict(store.counters.failed_writes))
"""


class TestADiskThatFails:
    """Nothing raises, everything is counted, and what can still be read is."""

    def test_a_write_that_fails_leaves_nothing(self, folder: Path) -> None:
        store = stored(folder, KEY)
        with failing("writev", errno.EIO):
            assert not put(store, OTHER)
        assert store.counters.failed_writes == {"EIO": 1}
        assert OTHER not in store and len(files(folder)) == 1
        assert store.used_bytes == bytes_on_disk(folder)
        assert put(store, OTHER) and holds(store, OTHER) and holds(store, KEY)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_room_that_does_not_help_is_made_once_a_pause(self, folder: Path, number: int) -> None:
        now = [0.0]
        store = open_store(folder, breaker=CircuitBreaker(3, 10.0, 30.0, clock=lambda: now[0]))
        old = [b"%d" % each for each in range(6)]
        assert all(put(store, key) for key in old)
        with failing("writev", number):
            for seconds in (10.0, 20.0, 30.0):
                assert not any(put(store, b"new %d" % each) for each in range(9))
                now[0] += seconds
        assert [holds(store, key) for key in old] == [False] * 3 + [True] * 3
        assert store.counters.evicted == 3
        assert store.counters.failed_writes == {errno.errorcode[number]: 5}
        assert store.used_bytes == bytes_on_disk(folder)
        assert put(store, KEY) and holds(store, KEY)

    def test_a_disk_that_fills_up_in_the_middle_of_a_write(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_store(folder)
        write = os.writev

        def half(descriptor: int, buffers: list[memoryview]) -> int:
            if len(buffers) > 1:
                return write(descriptor, [buffers[0], buffers[1][: len(buffers[1]) // 2]])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "writev", half)
        assert not put(store, KEY)
        assert files(folder) == [] and store.used_bytes == 0
        assert store.counters.refusals() == {"write_ENOSPC": 1}

    def test_a_system_that_writes_piece_by_piece(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write, read = os.writev, os.readv
        monkeypatch.setattr(os, "writev", lambda descriptor, buffers: write(descriptor, [buffers[0][:999]]))
        monkeypatch.setattr(os, "readv", lambda descriptor, buffers: read(descriptor, [buffers[0][:777]]))
        store = open_store(folder)
        assert put(store, KEY) and holds(store, KEY)

    def test_on_a_full_disk_newer_chunks_replace_older_ones(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A quota would look like this: the system says nothing of it but at the write."""
        quota = 10 * 2 * BLOCK
        write = os.writev

        def limited(descriptor: int, buffers: list[memoryview]) -> int:
            # The file itself is there already, and empty.
            if bytes_on_disk(folder) + 2 * BLOCK > quota:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return write(descriptor, buffers)

        monkeypatch.setattr(os, "writev", limited)
        removed: list[bytes] = []
        store = open_store(folder, removed=removed.extend, policy="lru")
        keys = [b"%d" % number for number in range(100)]
        assert all(put(store, key) for key in keys)
        assert [key for key in keys if key in store] == keys[-10:]
        assert all(holds(store, key) for key in keys[-10:])
        assert removed == keys[:90] and store.counters.evicted == 90
        assert store.counters.refusals() == {}
        assert store.used_bytes == bytes_on_disk(folder) == quota
        quota *= 2
        assert all(put(store, b"more %d" % number) for number in range(30))
        assert store.used_bytes == bytes_on_disk(folder) == quota
        assert store.counters.refusals() == {}

    def test_what_is_protected_is_not_given_up_for_it(self, folder: Path) -> None:
        store = stored(folder, KEY)
        with failing("writev", errno.ENOSPC):
            assert not put(store, OTHER, protected={KEY})
        assert holds(store, KEY) and store.counters.evicted == 0

    @pytest.fixture
    def small_disk(self, folder: Path) -> Iterator[Path]:
        """A file system of 256 KiB in the folder's place."""
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True).returncode:  # noqa: S607
            pytest.skip("no file system can be mounted here")
        yield folder
        # At the latest when the last file is closed.
        subprocess.run(["umount", "-l", folder], check=True)  # noqa: S607

    def test_a_real_disk_that_others_fill(self, small_disk: Path) -> None:
        store = open_store(small_disk, policy="lru")
        ballast = small_disk / "of somebody else"
        for taken in (180_000, 100_000, 0):
            ballast.write_bytes(bytes(taken))
            written = [key for number in range(100) if put(store, key := b"%d %d" % (taken, number))]
            assert len(written) == 100
            kept = [key for key in written if key in store]
            assert kept == written[-len(kept) :]
            assert all(holds(store, key) for key in kept)
            assert len(kept) > (256 * 1024 - taken) // (2 * BLOCK) - 4
            assert store.used_bytes == bytes_on_disk(small_disk)
            assert store.counters.refusals() == {} and store.counters.pauses == 0
        store.close()

    def test_a_real_disk_without_any_room_for_it(self, small_disk: Path) -> None:
        now = [0.0]
        store = open_store(small_disk, breaker=CircuitBreaker(3, 10.0, 10.0, clock=lambda: now[0]))
        with (small_disk / "of somebody else").open("wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(1024)):
                pass
        assert not any(put(store, b"%d" % number) for number in range(100))
        assert store.counters.failed_writes == {"ENOSPC": 3} and store.pausing
        (small_disk / "of somebody else").unlink()
        now[0] = 10.0
        assert all(put(store, b"%d" % number) for number in range(100))
        store.close()

    def test_a_limit_of_the_process(self, folder: Path, python: Any) -> None:
        done = python("-c", LIMITED, folder)
        assert done.stdout == "False True {'EFBIG': 1}\n", done.stderr
        assert len(files(folder)) == 1

    def test_after_some_failures_in_a_row_it_does_not_write_for_a_while(self, folder: Path) -> None:
        now = [0.0]
        store = stored(folder, KEY, breaker=CircuitBreaker(3, 10.0, 30.0, clock=lambda: now[0]))
        with failing("writev", errno.EIO):
            assert not any(put(store, b"%d" % number) for number in range(5))
        assert store.counters.failed_writes == {"EIO": 3}
        assert store.counters.skipped_writes == 2 and store.counters.pauses == 1 and store.pausing
        assert holds(store, KEY)
        now[0] = 10.0
        assert put(store, OTHER) and not store.pausing

    def test_a_disk_that_cannot_be_read(self, folder: Path) -> None:
        store = stored(folder, KEY, OTHER)
        with failing("readv", errno.EIO):
            assert not holds(store, KEY)
        assert store.counters.refusals() == {"read_EIO": 1}
        assert KEY not in store and holds(store, OTHER)

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
    def test_a_lack_of_descriptors_or_memory_costs_no_chunk(self, folder: Path, number: int) -> None:
        store = stored(folder, KEY)
        with failing("open", number):
            assert not holds(store, KEY)
        assert store.counters.refusals() == {f"read_{errno.errorcode[number]}": 1}
        assert holds(store, KEY)

    def test_a_disk_that_cannot_be_read_when_a_store_is_opened(self, folder: Path) -> None:
        stored(folder, KEY).close()
        with failing("readv", errno.EIO):
            store = open_store(folder)
            assert KEY not in store and store.counters.refusals() == {"read_EIO": 1}
            # It stays in the folder, and takes room.
            assert store.used_bytes == bytes_on_disk(folder) > 0
            store.close()
        with failing("scandir", errno.EIO), pytest.raises(StoreRefusedError) as refused:
            open_store(folder)
        assert refused.value.reason == "unusable"
        assert holds(open_store(folder), KEY)

    def test_victims_that_cannot_be_removed_go_on_counting(self, folder: Path) -> None:
        store = stored(folder, KEY, capacity_bytes=2 * 2 * BLOCK)
        put(store, OTHER, KEY)
        with failing("unlink", errno.EROFS):
            assert not put(store, THIRD)
        assert store.used_bytes == bytes_on_disk(folder) == 2 * 2 * BLOCK
        assert store.counters.failed_writes == {"EIO": 1}
        assert holds(store, KEY)

    def test_a_folder_that_vanishes(self, folder: Path) -> None:
        store = stored(folder, KEY, OTHER)
        shutil.rmtree(folder)
        assert not holds(store, KEY)
        assert not put(store, THIRD)
        assert store.counters.refusals() == {"missing": 1, "write_ENOENT": 1}
        folder.mkdir()
        assert not put(store, THIRD)
        assert list(folder.iterdir()) == []
        store.close()

    @pytest.mark.parametrize(
        ("number", "reason"),
        [(errno.EROFS, "read-only"), (errno.EACCES, "read-only"), (errno.ENOSPC, "full"), (errno.EIO, "unusable")],
    )
    def test_a_folder_that_cannot_be_opened_says_why(self, folder: Path, number: int, reason: str) -> None:
        with failing("open", number), pytest.raises(StoreRefusedError) as refused:
            open_store(folder)
        assert refused.value.reason == reason
        assert str(folder) in str(refused.value) and os.strerror(number) in str(refused.value)

    def test_a_file_system_that_is_read_only(self, folder: Path) -> None:
        open_store(folder).close()
        if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:  # noqa: S607
            pytest.skip("no file system can be mounted here")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)  # noqa: S607
            with pytest.raises(StoreRefusedError) as refused:
                open_store(folder)
            assert refused.value.reason == "read-only"
        finally:
            subprocess.run(["umount", folder], check=True)  # noqa: S607


HOLDER = """
import sys, time
from pathlib import Path
from ragorder.kernels.store import ChunkStore
store = ChunkStore(Path(sys.argv[1]), 1 << 20, "a model")
store.write(b"theirs", b"x" * 5000)
print("ready", flush=True)
time.sleep(600)
"""


class TestTwoProcesses:
    def test_who_comes_second_gets_no_store(self, folder: Path) -> None:
        store = open_store(folder)
        with pytest.raises(StoreRefusedError, match=f"process {os.getpid()} uses it") as refused:
            open_store(folder)
        assert refused.value.reason == "locked"
        assert put(store, KEY) and holds(store, KEY)
        store.close()
        assert holds(open_store(folder), KEY)

    def test_the_lock_goes_with_a_process_that_is_killed(self, folder: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
            with pytest.raises(StoreRefusedError, match=f"process {holder.pid} uses it"):
                open_store(folder)
            holder.kill()
            # It waits for a process that is ending.
            store = open_store(folder, patience_s=10.0)
        assert store.counters.restored == 1
        assert store.read(b"theirs", bytearray(5000))

    def test_a_replaced_lock_file_is_no_lock(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        open_store(folder).close()
        monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
        with pytest.raises(StoreRefusedError) as refused:
            open_store(folder)
        assert refused.value.reason == "locked"


class TestManyThreads:
    def test_what_threads_do_side_by_side_is_right_and_within_the_capacity(self, folder: Path) -> None:
        capacity = 20 * 2 * BLOCK
        store = open_store(folder, capacity, policy="lru", history=50)
        wrong: list[object] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(300):
                key = b"%d" % chance.randrange(40)
                try:
                    if chance.random() < 0.5:
                        put(store, key)
                    elif chance.random() < 0.5:
                        holds(store, key)
                    else:
                        store.use([key], cost=0.1, computed={key})
                        path = next(iter(files(folder)), None)
                        if path is not None and chance.random() < 0.1:
                            with suppress(FileNotFoundError):
                                os.truncate(path, 100)
                    assert store.used_bytes <= capacity
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        store.close()
        store = open_store(folder, capacity)
        assert bytes_on_disk(folder) == store.used_bytes <= capacity
        assert all(holds(store, b"%d" % number) for number in range(40) if b"%d" % number in store)

    def test_closing_waits_for_those_at_work(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = open_store(folder)
        writing, go_on = threading.Event(), threading.Event()
        write = os.writev

        def slow(descriptor: int, buffers: list[memoryview]) -> int:
            writing.set()
            assert go_on.wait(60)
            return write(descriptor, buffers)

        monkeypatch.setattr(os, "writev", slow)
        writer = threading.Thread(target=put, args=(store, KEY))
        writer.start()
        assert writing.wait(60)
        closer = threading.Thread(target=store.close)
        closer.start()
        with pytest.raises(StoreRefusedError):
            open_store(folder)
        go_on.set()
        closer.join()
        writer.join()
        assert holds(open_store(folder), KEY)


CHAOS = '''
"""Kills a process that reads and writes under load, again and again, damages files in between, and looks what is
left."""
import json, os, random, signal, sys, threading, time
from hashlib import shake_128
from pathlib import Path
from ragorder.kernels.store import ChunkStore

folder, cycles = Path(sys.argv[1]), int(sys.argv[2])
CAPACITY = 24 * 12288

def content(key):
    return shake_128(key).digest(4000 + key[0] * 100)

def keys(chance):
    return bytes([chance.randrange(60), 7]) * 16

def open_store():
    return ChunkStore(folder, CAPACITY, "a model", policy="lru")

def right(store, key):
    buffer = bytearray(len(content(key)))
    if store.read(key, buffer):
        if buffer != content(key):
            print("WRONG BYTES", flush=True)
            os._exit(3)
        return True
    return False

def load(seed, ready):
    store = open_store()
    os.write(ready, b"!")
    def work(chance):
        while True:
            key = keys(chance)
            parent = keys(chance)
            if chance.random() < 0.6:
                store.write(key, content(key), parent if parent < key else None)
            else:
                right(store, key)
    for number in range(2):
        threading.Thread(target=work, args=(random.Random(seed + number),)).start()
    while True:
        time.sleep(1)

def damage(chance):
    found = sorted((folder / "chunks").glob("??/*.kv"))
    for path in chance.sample(found, min(2, len(found))):
        data = bytearray(path.read_bytes())
        if chance.random() < 0.5:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            del data[chance.randrange(len(data)):]
        path.write_bytes(data)

chance = random.Random(5)
totals = {"restored": 0, "read": 0, "refused": 0, "unfinished": 0, "above": 0}
for cycle in range(cycles):
    reader, ready = os.pipe()
    child = os.fork()
    if not child:
        try:
            load(2 * cycle, ready)
        finally:
            os._exit(1)
    os.close(ready)
    assert os.read(reader, 1) == b"!", "the child got no store"
    os.close(reader)
    time.sleep(chance.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    totals["unfinished"] += len(list((folder / "chunks").glob("??/*.tmp")))
    if cycle % 2:
        damage(chance)
    store = open_store()
    assert not list((folder / "chunks").glob("??/*.tmp"))
    totals["restored"] += store.counters.restored
    totals["read"] += sum(right(store, bytes([number, 7]) * 16) for number in range(60))
    totals["refused"] += sum(store.counters.refusals().values())
    totals["above"] += store.used_bytes > CAPACITY
    store.close()
print(json.dumps(totals))
'''


class TestKilledAgainAndAgain:
    @pytest.mark.slow
    def test_after_each_of_200_kills_everything_that_can_be_read_is_right(self, folder: Path, python: Any) -> None:
        done = python("-c", CHAOS, folder, "200", timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        totals = json.loads(done.stdout)
        assert totals["above"] == 0
        # It was not the same empty folder 200 times, kills hit writes, and the damage was found.
        assert totals["read"] > 1000 and totals["unfinished"] > 0
        assert totals["refused"] >= 100
