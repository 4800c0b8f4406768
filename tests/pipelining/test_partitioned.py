"""A search by partition reads an index from disk in parts, and ends with what FAISS finds in the whole of it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import file_of, reader_of, reads_ahead
from support.waiting import eventually

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import AsFaiss, D, assert_same, build, clustered, last, write

from ragorder.pipelining import PartitionedSearch, Stage

N = 1200


def write_apart(index: Any, folder: Path) -> Path:
    """Inverted lists in a file of their own."""
    index = faiss.clone_index(index)
    ivf = faiss.extract_index_ivf(index)
    lists = faiss.OnDiskInvertedLists(ivf.nlist, ivf.code_size, str(folder / "index.ivfdata"))
    parts = faiss.InvertedListsPtrVector()
    parts.push_back(ivf.invlists)
    lists.merge_from_multiple(parts.data(), parts.size())
    ivf.replace_invlists(lists)
    return write(index, folder)


@pytest.fixture(scope="module")
def index() -> Any:
    return build(vectors=clustered(N, 0), nprobe=11)


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(60, 1)


class TestTheLastStageIsTheSearch(AsFaiss):
    def found(self, index: Any, queries: Any, k: int, folder: Path, chance: Random) -> Stage:
        partitions = chance.randint(1, min(8, faiss.extract_index_ivf(index).nlist))
        resident = chance.randint(0, partitions)
        path, cores = write(index, folder), chance.randint(1, 2)
        with PartitionedSearch(path, partitions, resident=resident, cores=cores) as search:
            last(search.search(queries, k))
            return last(search.search(queries, k))

    @pytest.mark.parametrize(("resident", "read_ahead", "cores"), [(0, True, 1), (3, False, 2), (6, True, 2)])
    def test_of_lists_in_a_file_of_their_own(
        self, index: Any, queries: Any, resident: int, read_ahead: bool, cores: int, tmp_path: Path
    ) -> None:
        path = write_apart(index, tmp_path)
        with PartitionedSearch(path, 6, resident=resident, read_ahead=read_ahead, cores=cores) as search:
            for _ in range(3):
                assert_same(last(search.search(queries, 5)), index.search(queries, 5))

    def test_concurrent_searches_do_not_disturb_each_other(self, index: Any, path: Path) -> None:
        with PartitionedSearch(path, 6, resident=2, cores=1) as search, ThreadPoolExecutor(4) as pool:
            batches = [clustered(20, seed) for seed in range(40)]
            for batch, found in zip(batches, pool.map(lambda b: last(search.search(b, 5)), batches), strict=True):
                assert_same(found, index.search(batch, 5))


class TestPartitions:
    def test_have_about_equal_bytes_and_all_clusters(self, path: Path, index: Any) -> None:
        with PartitionedSearch(path, 6) as search:
            assert search.partitions == len(search.partition_bytes) == 6
            assert sum(search.partition_bytes) == N * (4 * D + 8)
            largest = max(index.get_list_size(number) for number in range(24)) * (4 * D + 8)
            assert max(search.partition_bytes) - min(search.partition_bytes) <= 2 * largest
        for count in (1, 24):
            with PartitionedSearch(path, count) as search:
                assert len(search.partition_bytes) == count

    def test_a_batch_of_queries_reads_each_once_and_residents_never_again(self, path: Path, queries: Any) -> None:
        with PartitionedSearch(path, 6, resident=2, nprobe=24) as search:
            stages = list(search.search(queries, 5))
            assert [stage.final for stage in stages] == [False] * 5 + [True]
            assert [stage.number for stage in stages] == list(range(1, 7))
            assert search.read_bytes == sum(search.partition_bytes) and len(search.held) == 2
            stages = list(search.search(queries, 5))
            # The residents together, and each of the other four.
            assert len(stages) == 5
            assert search.read_bytes == 2 * sum(search.partition_bytes) - search.held_bytes
            assert search.held_bytes == sum(search.partition_bytes[number] for number in search.held)

    def test_without_clusters_of_a_query_are_not_read(self, path: Path, index: Any, queries: Any) -> None:
        with PartitionedSearch(path, 6, nprobe=1, read_ahead=False) as search:
            (stage,) = search.search(queries[:1], 5)
            assert search.read_bytes in search.partition_bytes
            assert_same(stage, index.search(queries[:1], 5, params=faiss.SearchParametersIVF(nprobe=1)))

    def test_those_used_most_stay(self, path: Path, index: Any) -> None:
        query = clustered(1, 3)
        cluster = int(index.quantizer.search(query, 1)[1][0, 0])
        with PartitionedSearch(path, 8, resident=1, nprobe=1) as search:
            home = int(file_of(search).home[cluster])
            for batch in (clustered(50, 1), *[query] * 400):
                last(search.search(batch, 3))
            read_bytes = search.read_bytes
            last(search.search(query, 3))
            assert search.held == [home] and search.read_bytes == read_bytes

    def test_are_given_back_and_held_as_asked_for_between_batches(self, path: Path, index: Any, queries: Any) -> None:
        expected = index.search(queries, 5)
        with PartitionedSearch(path, 6, resident=6, nprobe=11) as search:
            assert_same(last(search.search(queries, 5)), expected)
            assert search.held == list(range(6))
            search.resize(2)
            assert search.resident == len(search.held) == 2
            assert_same(last(search.search(queries, 5)), expected)
            assert search.relieve() and search.resident == len(search.held) == 1
            assert search.relieve() and not search.relieve() and search.held_bytes == 0
            assert_same(last(search.search(queries, 5)), expected)
            assert search.held == []
            search.resize(3)
            assert_same(last(search.search(queries, 5)), expected)
            assert len(search.held) == 3
            for wrong in (-1, 7):
                with pytest.raises(ValueError, match="resident must be 0 to 6"):
                    search.resize(wrong)

    def test_change_during_a_pass(self, path: Path, index: Any, queries: Any) -> None:
        with PartitionedSearch(path, 6, resident=4) as search:
            last(search.search(queries, 5))
            passing = search.search(queries, 5)
            next(passing)
            search.resize(0)
            assert_same(last(passing), index.search(queries, 5))


class TestFailures:
    def test_a_file_that_is_cut_off_is_an_error_and_not_the_end(self, index: Any, queries: Any, tmp_path: Path) -> None:
        path, data = write_apart(index, tmp_path), tmp_path / "index.ivfdata"
        whole = data.read_bytes()
        with PartitionedSearch(path, 4, nprobe=24) as search:
            passing = search.search(queries, 5)
            next(passing)
            os.truncate(data, len(whole) // 2)
            with pytest.raises(OSError, match=r"index\.ivfdata ends before its inverted lists do"):
                last(passing)
            with open(data, "r+b") as file:
                file.write(whole)
            assert_same(last(passing), index.search(queries, 5, params=faiss.SearchParametersIVF(nprobe=24)))

    def test_a_closed_search_says_so(self, path: Path, queries: Any) -> None:
        search = PartitionedSearch(path, 6)
        passing = search.search(queries, 5)
        next(passing)
        search.close()
        search.close()
        for again in (lambda: next(passing), lambda: search.search(queries, 5)):
            with pytest.raises(RuntimeError, match="closed"):
                again()

    def test_a_search_closed_while_a_stage_waits_for_its_partition_says_so(self, path: Path, queries: Any) -> None:
        search = PartitionedSearch(path, 6)
        passing = search.search(queries, 5)
        begun, go_on = threading.Event(), threading.Event()

        def busy() -> Any:
            begun.set()
            go_on.wait(60)

        reader_of(search).submit(busy)
        assert begun.wait(60)
        next(passing)
        with ThreadPoolExecutor(2) as pool:
            try:
                waiting = pool.submit(next, passing)
                assert eventually(lambda: not reads_ahead(passing))
                closing = pool.submit(search.close)
                with pytest.raises(RuntimeError, match="closed"):
                    waiting.result(60)
            finally:
                go_on.set()
            closing.result(60)

    def test_what_was_read_ahead_for_an_abandoned_pass_is_given_back(self, path: Path, queries: Any) -> None:
        with PartitionedSearch(path, 6) as search:
            passing = search.search(queries, 5)
            next(passing)
            passing.close()
            assert list(passing) == [] and search.held == []


class TestBadInput:
    def test_what_is_no_index_file(self, tmp_path: Path, index: Any) -> None:
        with pytest.raises(TypeError, match=r"got IndexIVFFlat: write it with faiss\.write_index"):
            PartitionedSearch(index)
        with pytest.raises(FileNotFoundError, match="missing"):
            PartitionedSearch(tmp_path / "missing.faiss")
        (tmp_path / "text.faiss").write_text("no index")
        says = r"FAISS cannot open .*text\.faiss as an index \(8 bytes\): .*give a whole file"
        with pytest.raises(ValueError, match=says):
            PartitionedSearch(tmp_path / "text.faiss")
        with pytest.raises(OSError, match=str(tmp_path)):
            PartitionedSearch(tmp_path)

    def test_a_file_that_is_cut_off_or_missing_before_it_is_opened(self, index: Any, tmp_path: Path) -> None:
        path, data = write_apart(index, tmp_path), tmp_path / "index.ivfdata"
        missing = data.stat().st_size // 2
        os.truncate(data, data.stat().st_size - missing)
        cut_off = rf"index\.ivfdata is cut off: {missing} bytes .* are missing: copy it again"
        with pytest.raises(ValueError, match=cut_off):
            PartitionedSearch(path, 4)
        data.unlink()
        with pytest.raises(FileNotFoundError, match=r"index.ivfdata, which does not exist"):
            PartitionedSearch(path, 2)

    def test_an_index_without_clusters_or_untrained_or_in_lists_that_are_read_as_a_whole(self, tmp_path: Path) -> None:
        for index, message in (
            (build("Flat"), "PartitionedSearch cannot search IndexFlat"),
            (build("IVF24,FlatPanorama4"), r"the inverted lists in .* cannot be read in parts"),
            (faiss.index_factory(D, "IVF24,Flat"), "not trained: train it"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                PartitionedSearch(write(index, tmp_path), 2)

    def test_a_folder_that_has_been_moved(self, index: Any, queries: Any, tmp_path: Path) -> None:
        (tmp_path / "before").mkdir()
        write_apart(index, tmp_path / "before")
        (tmp_path / "before").rename(tmp_path / "after")
        with PartitionedSearch(tmp_path / "after" / "index.faiss", 3) as search:
            assert_same(last(search.search(queries, 5)), index.search(queries, 5))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"partitions": 0}, "partitions must be 1 to 24, the clusters of .*, got 0"),
            ({"partitions": 25}, "partitions must be 1 to 24"),
            ({"partitions": 4, "resident": -1}, "resident must be 0 to 4, the partitions, got -1"),
            ({"partitions": 4, "resident": 5}, "resident must be 0 to 4"),
            ({"partitions": 4, "nprobe": 0}, "nprobe must be at least 1"),
            ({"partitions": 4, "cores": 0}, "cores must be at least 1"),
        ],
    )
    def test_settings_out_of_range(self, path: Path, settings: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PartitionedSearch(path, **settings)

    def test_queries_of_another_dimension_a_k_below_one_and_nothing_to_resume(self, path: Path) -> None:
        with PartitionedSearch(path, 4) as search:
            for ask, message in (
                (lambda: search.search(np.zeros((2, 3), np.float32), 5), r"shape \(n, 16\), got \(2, 3\)"),
                (lambda: search.search(clustered(1, 0), 0), "k must be at least 1"),
                (lambda: search.resume([]), "at least one"),
            ):
                with pytest.raises(ValueError, match=message):
                    ask()


_MEMORY = """
import faiss, numpy as np, sys
from ragorder.pipelining import PartitionedSearch

def resident_mb():
    pages = next(line for line in open("/proc/self/status") if line.startswith(sys.argv[2]))
    return int(pages.split()[1]) / 1024

faiss.omp_set_num_threads(1)
search = PartitionedSearch(sys.argv[1], 32, resident=4, nprobe=256)
queries = np.random.default_rng(1).random((8, 64), np.float32)
before = resident_mb()
for _ in range(3):
    for stage in search.search(queries, 5):
        pass
sizes = search.partition_bytes
print(resident_mb() - before, search.held_bytes / 2**20, max(sizes) / 2**20, sum(sizes) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("measure", ["VmHWM", "VmRSS"])
def test_memory_holds_the_residents_and_two_partitions(measure: str, python: Any, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).random((300_000, 64), np.float32)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(64), 64, 256)
    index.quantizer.add(vectors[:256])
    index.is_trained = True
    index.add(vectors)
    path = write(index, tmp_path)
    del index, vectors
    done = python("-c", _MEMORY, path, measure)
    assert done.returncode == 0, done.stderr
    grown, held, largest, total = map(float, done.stdout.split())
    assert held <= 4 * largest < total / 4
    # 4 MiB for all else: results, and what the allocator keeps.
    assert held <= grown < held + 2 * largest + 4
