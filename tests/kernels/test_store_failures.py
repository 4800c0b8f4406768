"""The chunk store on disks that fail, and with other processes and threads: nothing raises, and no byte is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.chunks import (
    BLOCK,
    KEY,
    OTHER,
    THIRD,
    bytes_on_disk,
    failing,
    files,
    holds,
    open_store,
    put,
    stored,
)

from ragorder.common.circuit_breaker import CircuitBreaker
from ragorder.kernels.store import StoreRefusedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
    def test_the_lock_goes_with_a_process_that_is_killed(self, folder: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
            with pytest.raises(StoreRefusedError, match=f"process {holder.pid} uses it") as refused:
                open_store(folder)
            assert refused.value.reason == "locked"
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
