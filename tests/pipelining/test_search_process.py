"""A search in another process finds what it finds in this one, and survives that process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.ivf import D, build, clustered, write

from ragorder.pipelining import QueueFullError, staged_retrieval
from ragorder.pipelining.search import History, IndexTiers, SearchProcess, SearchProcessError

N = 2000
WAIT_S = 60


@pytest.fixture(scope="module")
def index() -> Any:
    return build("IDMap2,IVF24,Flat", ids=np.arange(N)[::-1] + 10**12)


@pytest.fixture(scope="module")
def path(index: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(index, tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def search(path: Path) -> Iterator[SearchProcess]:
    with SearchProcess(path, nprobe=9, cores=1) as search:
        yield search


@pytest.fixture(scope="module")
def queries() -> Any:
    return clustered(100, 1)


@pytest.fixture(scope="module")
def expected(index: Any, queries: Any) -> Any:
    ivf = faiss.downcast_index(index.index)
    ivf.nprobe = 9
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    found = index.search(queries, 5)
    faiss.omp_set_num_threads(before)
    return found


def test_finds_the_same_for_many_threads(search: SearchProcess, queries: Any, expected: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: search.submit(query, 5).result(WAIT_S), queries))
    for row, stage in enumerate(found):
        assert stage.final
        np.testing.assert_array_equal(stage.ids[0], expected[1][row])
        np.testing.assert_array_equal(stage.distances[0], expected[0][row])
        with pytest.raises(ValueError, match="read-only"):
            stage.ids[0, 0] = 7
    assert search.in_flight == 0


def test_finds_the_same_for_many_queries_and_another_nprobe(search: SearchProcess, index: Any, queries: Any) -> None:
    params = faiss.SearchParametersIVF(nprobe=3)
    *_, found = search.search(queries[:1], 5, params=params)
    np.testing.assert_array_equal(found.ids, index.search(queries[:1], 5, params=params)[1])
    *_, found = search.search(queries, 5)
    assert found.ids.shape == (100, 5)


def test_it_says_whether_larger_distances_are_nearer(search: SearchProcess, tmp_path: Path) -> None:
    assert not search.similarity
    index = faiss.index_factory(D, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    stored = clustered(N, 0)
    index.train(stored)
    index.add(stored)
    faiss.write_index(index, str(tmp_path / "products.index"))
    with SearchProcess(tmp_path / "products.index", cores=1) as products:
        assert products.similarity


async def test_is_a_retrieval(search: SearchProcess, queries: Any, expected: Any) -> None:
    retrieval = staged_retrieval(search, lambda row: queries[row : row + 1], int, top_k=5)
    async for found in retrieval(3):
        documents = list(found.documents)
    assert found.final
    assert documents == expected[1][3].tolist()


def test_a_history_stays_with_its_request(search: SearchProcess, queries: Any, expected: Any) -> None:
    history = History(kept=7)
    for _ in range(3):
        stage = search.submit(queries[0], 5, history=history).result(WAIT_S)
        np.testing.assert_array_equal(stage.ids[0], expected[1][0])
    assert len(history) == 3
    past = history.similar(queries[0])
    assert past is not None
    assert len(past.ids) == 7
    assert not search._histories


def test_a_search_can_be_cancelled_and_promoted(search: SearchProcess, queries: Any, expected: Any) -> None:
    ahead = search.submit(queries[0], 5, due=False)
    ahead.promote()
    assert ahead.result(WAIT_S).ids[0].tolist() == expected[1][0].tolist()
    assert not ahead.cancel()
    handles = [search.submit(query, 5) for query in queries]
    ended = [handle.cancel() for handle in handles]
    for handle, cancelled in zip(handles, ended, strict=True):
        if cancelled:
            with pytest.raises(CancelledError):
                handle.result(WAIT_S)
        else:
            assert handle.result(WAIT_S).final
    assert search.in_flight == 0


@pytest.mark.parametrize(
    ("query", "k", "params", "says"),
    [
        (np.zeros(D + 1), 5, {}, r"queries must have the shape \(n, 16\), got \(1, 17\)"),
        (np.zeros((2, D)), 5, {}, "submit takes one query, got 2"),
        (np.zeros(D), N + 1, {}, "k=2001, but the index has 2000 vectors"),
        (np.zeros(D), 5, {"nprobe": 0}, "nprobe must be at least 1"),
        (
            np.zeros(D),
            5,
            {"sel": faiss.IDSelectorBatch([1, 2])},
            "IDSelectorBatch does not give back its ids.*IDSelectorArray",
        ),
        (
            np.zeros(D),
            5,
            {"sel": faiss.IDSelectorNot(faiss.IDSelectorBatch([1]))},
            "IDSelectorBatch does not give back its ids",
        ),
    ],
)
def test_bad_input_is_refused_here(query: Any, k: int, params: Any, says: str, search: SearchProcess) -> None:
    with pytest.raises(ValueError, match=says):
        search.submit(query, k, params=faiss.SearchParametersIVF(**params) if params else None)


def selectors(index: Any) -> dict[str, Any]:
    ids = faiss.vector_to_array(index.id_map)
    chosen = ids[:: len(ids) // 40]
    bits = np.zeros(1 + int(ids.max() - 10**12) // 8, np.uint8)
    some, low = faiss.IDSelectorArray(chosen), faiss.IDSelectorRange(10**12, 10**12 + 700)
    return {
        "array": some,
        "range": low,
        "sorted": faiss.IDSelectorRange(10**12 + 5, 10**12 + 900, True),
        "none": faiss.IDSelectorArray([]),
        "all": faiss.IDSelectorAll(),
        "bitmap": faiss.IDSelectorBitmap(bits + 255),
        "not": faiss.IDSelectorNot(some),
        "and": faiss.IDSelectorAnd(some, low),
        "or": faiss.IDSelectorOr(some, faiss.IDSelectorNot(low)),
        "xor": faiss.IDSelectorXOr(some, low),
    }


@pytest.mark.parametrize("name", ["array", "range", "sorted", "none", "all", "bitmap", "not", "and", "or", "xor"])
def test_finds_the_same_with_a_selector(name: str, search: SearchProcess, index: Any, queries: Any) -> None:
    params = faiss.SearchParametersIVF(nprobe=9, sel=selectors(index)[name])
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    expected = index.search(queries[:10], 5, params=params)
    faiss.omp_set_num_threads(before)
    *_, found = search.search(queries[:10], 5, params=params)
    np.testing.assert_array_equal(found.ids, expected[1])
    np.testing.assert_array_equal(found.distances, expected[0])
    assert (expected[1] == -1).all() == (name in ("none", "bitmap"))
    alone = search.submit(queries[0], 5, params=params).result(WAIT_S)
    np.testing.assert_array_equal(alone.ids[0], expected[1][0])


def test_a_selector_set_afterwards_is_sent_too(search: SearchProcess, queries: Any) -> None:
    params = faiss.SearchParametersIVF(nprobe=9)
    params.sel = faiss.IDSelectorArray([10**12 + 3])
    assert search.submit(queries[0], 5, params=params).result(WAIT_S).ids[0].tolist()[1:] == [-1] * 4


def test_a_selector_has_no_history(search: SearchProcess, queries: Any) -> None:
    params = faiss.SearchParametersIVF(nprobe=9, sel=faiss.IDSelectorAll())
    with pytest.raises(ValueError, match="a search with a selector has no history"):
        search.submit(queries[0], 5, history=History(), params=params)


def test_has_tiers_of_its_own(path: Path, queries: Any, expected: Any) -> None:
    pytest.importorskip("torch")
    from ragorder.kernels.vectors import TorchClusterScan

    tiers = partial(IndexTiers, TorchClusterScan("L2"), 1 << 30, every=1)
    with SearchProcess(path, nprobe=9, cores=1, tiers=tiers) as search:
        assert search.tier_gains == (0.0, math.inf, math.inf)
        for _ in range(2):
            for row, query in enumerate(queries):
                found = search.submit(query, 5).result(WAIT_S)
                np.testing.assert_allclose(found.distances[0], expected[0][row], rtol=1e-4, atol=1e-5)
        gains = search.tier_gains
        assert gains is not None
        assert gains.hit_share > 0.5
        # On the cores alone the share falls.
        for query in queries:
            search.submit(query, 5, fast=False).result(WAIT_S)
        assert 0 < search.tier_gains.hit_share < gains.hit_share


def test_tiers_that_cannot_be_sent_are_refused_here(path: Path) -> None:
    with pytest.raises(TypeError, match="tiers cannot be sent to the search's process"):
        SearchProcess(path, tiers=lambda: IndexTiers(None, 1))  # type: ignore[arg-type]


def test_tiers_that_cannot_be_made_are_an_error_at_the_start(path: Path) -> None:
    with pytest.raises(ValueError, match="capacity_bytes must be at least 1, got 0"):
        SearchProcess(path, tiers=partial(IndexTiers, None, 0))  # type: ignore[arg-type]


def test_without_tiers_there_are_no_gains(search: SearchProcess) -> None:
    assert search.tier_gains is None


def test_files_and_settings_that_no_search_can_have_are_errors_at_the_start(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"missing\.index"):
        SearchProcess(tmp_path / "missing.index")
    flat = tmp_path / "flat.index"
    faiss.write_index(faiss.IndexFlatL2(D), str(flat))
    with pytest.raises(TypeError, match="cannot search IndexFlat"):
        SearchProcess(flat)
    with pytest.raises(ValueError, match="max_searches >= 1"):
        SearchProcess(path, max_searches=0)


def test_a_killed_process_fails_its_searches_and_is_started_again(path: Path, queries: Any, expected: Any) -> None:
    with SearchProcess(path, nprobe=9, cores=1, max_searches=3, restarts=1) as search:
        first = search.pid
        assert first is not None
        # Searches that it can no longer answer.
        os.kill(first, signal.SIGSTOP)
        handles = [search.submit(query, 5) for query in queries[:3]]
        with pytest.raises(QueueFullError, match="3 searches are in flight"):
            search.submit(queries[3], 5)
        os.kill(first, signal.SIGKILL)
        for handle in handles:
            with pytest.raises(SearchProcessError, match="ended with code -9: ask again"):
                handle.result(WAIT_S)
        assert search.submit(queries[0], 5).result(WAIT_S).ids[0].tolist() == expected[1][0].tolist()
        assert search.pid != first
        # Twice in a row without an answer in between is once more than allowed.
        for _ in range(2):
            os.kill(search.pid or 0, signal.SIGSTOP)
            handle = search.submit(queries[0], 5)
            os.kill(search.pid or 0, signal.SIGKILL)
            with pytest.raises(SearchProcessError):
                handle.result(WAIT_S)
        with pytest.raises(SearchProcessError, match="ended 2 times, with code -9"):
            search.submit(queries[0], 5)


def test_a_closed_search_says_so(path: Path, queries: Any) -> None:
    search = SearchProcess(path)
    pid = search.pid
    search.close()
    search.close()
    with pytest.raises(RuntimeError, match="this search is closed"):
        search.submit(queries[0], 5)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


def test_callers_do_not_wait_for_a_process_that_takes_nothing(path: Path, queries: Any) -> None:
    many = np.tile(queries, (10, 1))
    with SearchProcess(path, nprobe=9, cores=1) as search, ThreadPoolExecutor(1) as pool:
        assert search.pid is not None
        os.kill(search.pid, signal.SIGSTOP)
        # More than its pipe holds.
        submitted = pool.submit(lambda: [search.submit(query, 5, history=History()) for query in many])
        try:
            handles = submitted.result(WAIT_S)
        finally:
            os.kill(search.pid, signal.SIGCONT)
        assert all(handle.result(WAIT_S).final for handle in handles)


def test_it_holds_no_more_messages_than_searches_may_be_in_flight(path: Path, queries: Any) -> None:
    def submit_and_cancel() -> None:
        for query in np.tile(queries, (1000, 1)):
            search.submit(query, 5).cancel()

    with SearchProcess(path, nprobe=9, cores=1, max_searches=3) as search, ThreadPoolExecutor(1) as pool:
        assert search.pid is not None
        os.kill(search.pid, signal.SIGSTOP)
        try:
            with pytest.raises(QueueFullError, match="3 searches are in flight"):
                pool.submit(submit_and_cancel).result(WAIT_S)
        finally:
            os.kill(search.pid, signal.SIGCONT)
        assert search.in_flight == 0


def test_a_process_that_cannot_be_started_again_leaves_no_caller_waiting(
    path: Path, queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise OSError("Cannot allocate memory")

    with SearchProcess(path, nprobe=9, cores=1) as search:
        assert search.pid is not None
        os.kill(search.pid, signal.SIGSTOP)
        handle = search.submit(queries[0], 5)
        monkeypatch.setattr(type(search._worker.process), "start", out_of_memory)
        os.kill(search.pid, signal.SIGKILL)
        with pytest.raises(SearchProcessError, match="ended with code -9"):
            handle.result(WAIT_S)
        with pytest.raises(SearchProcessError, match="cannot be started again: Cannot allocate memory"):
            search.submit(queries[0], 5)


def test_a_program_that_ends_without_closing_it_ends_its_process(path: Path, tmp_path: Path, python: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, sys\n"
        "def submit():\n"
        "    try:\n"
        "        search.submit([0.0] * 16, 5)\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "if __name__ == '__main__':\n"
        "    # The first to be registered is the last to be called.\n"
        "    atexit.register(submit)\n"
        "    from ragorder.pipelining.search import SearchProcess\n"
        "    search = SearchProcess(sys.argv[1], nprobe=9, cores=1)\n",
        "utf-8",
    )
    ended = python(program, path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "this search is closed\n", "")
