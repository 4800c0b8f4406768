"""Replaying a log: what it may look like, an engine exact to the block, the figures of the benchmark, and what is made
of them."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import random
import re
import signal
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.benched import run_bench
from support.commands import run_command
from support.inside import replay_in_worker, set_bounds
from support.results import result_lines
from support.rings import examples, grid, length

from ragorder.eval.cli.replay import replay as command
from ragorder.eval.data.arrivals import Arrival, Arrivals, poisson_arrivals
from ragorder.eval.data.workloads import Workload, make_workload
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.replay import (
    REPLAY_POLICIES,
    DefaultLengths,
    Log,
    LogBuilder,
    LogError,
    ReplayError,
    ReplayReport,
    read_log,
    replay,
    sweep,
)
from ragorder.eval.replay.engine import PathPrompt, make_engine
from ragorder.eval.replay.example import EXAMPLE_LOG, example_lines
from ragorder.eval.replay.overlap import Overlap, measure_overlap
from ragorder.eval.replay.report import CapacityInfo, LogInfo
from ragorder.eval.replay.runs import PolicyFigures, Setup
from ragorder.eval.replay.tables import Replay
from ragorder.eval.report import make_report
from ragorder.eval.report.words import policy_words
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.reading import results_of
from ragorder.eval.running.specs import Bench

pytestmark = pytest.mark.merge

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "bing_covid_cord"
COMMAND = ("-c", "from ragorder.eval.cli.replay import replay; replay(prog_name='ragorder replay')")

Line = dict[str, Any]


def line(ids: Sequence[Any] = "ab", time: Any = 0, **fields: Any) -> Line:
    return {"time": time, "documents": list(ids), **fields}


def packed(*lines: Any) -> bytes:
    """Lines as a log holds them; bytes stand as they are."""
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def read(*lines: Any, **options: Any) -> Log:
    return read_log(io.BytesIO(packed(*lines)), **options)


def written(folder: Path, *lines: Any, name: str = "log.jsonl") -> Path:
    path = folder / name
    data = packed(*lines)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def rankings(log: Log) -> list[list[int]]:
    return [log.ranking(row) for row in range(len(log))]


def exported(workload: Workload, arrivals: Sequence[Arrival] = (), limit: int | None = None) -> Log:
    """A synthetic workload as the log that an application would have written of it."""
    lines = []
    for number, ranking in enumerate(workload.rankings[:limit]):
        documents = [workload.documents[document] for document in ranking]
        arrival = arrivals[number] if arrivals else Arrival(number)
        told = {} if arrival.output_tokens is None else {"output_tokens": arrival.output_tokens}
        tokens = [each.token_count for each in documents]
        lines.append(line([each.id for each in documents], arrival.at_s, tokens=tokens, **told))
    return read(*lines)


def random_log(seed: int, requests: int = 60, documents: int = 12, tenants: int = 1, k: int = 4) -> Log:
    rng = random.Random(seed)
    builder = LogBuilder()
    for number in range(requests):
        drawn = [rng.randrange(documents) for _ in range(rng.randint(0, k))]
        builder.add(
            float(number),
            drawn,
            [each * 37 % 90 for each in drawn],
            tenant=f"tenant {rng.randrange(tenants)}",
            prefix_tokens=40,
            suffix_tokens=rng.randint(1, 30),
            output_tokens=rng.randint(0, 20),
        )
    return builder.build("random")


def cached(report: ReplayReport) -> dict[tuple[str, int | None], int]:
    return {(figures.policy, figures.capacity_tokens): figures.cached_tokens for figures in report.figures}


class Steps:
    """What a progress bar would show."""

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}
        self.done: dict[str, int] = {}

    def __call__(self, description: str, steps: int) -> Callable[[], None]:
        self.announced[description] = steps
        self.done[description] = 0

        def advance() -> None:
            self.done[description] += 1

        return advance


class TestALog:
    def test_has_times_documents_and_their_lengths(self) -> None:
        log = read(line("abc", 3, tokens=[10, 20, 30]), line("ca", 4.5, tokens=[30, 10]))
        assert rankings(log) == [[0, 1, 2], [2, 0]]
        assert list(log.document_tokens) == [10, 20, 30]
        assert list(log.at_s) == [0.0, 1.5]
        assert log.working_set_tokens == 60

    @pytest.mark.parametrize(
        ("lines", "found"),
        [
            ([line([7, "7"]), line([7])], [[0, 1], [0]]),
            ([line(""), line("", tokens=[])], [[], []]),
            ([line("aba")], [[0, 1, 0]]),
            ([line("a", tokens=[length]) for length in (20, 10, 20, 10, 30)], [[0], [1], [0], [1], [2]]),
            ([line("a", prefix_tokens=5), line("a", prefix_tokens=6)], [[0], [1]]),
            ([line("a", tenant=name) for name in ("x", "y", "x", "")] + [line("a")], [[0], [1], [0], [2], [3]]),
            ([b"\xef\xbb\xbf" + json.dumps(line("a")).encode(), b"", b"  \t", line("b"), b""], [[0], [1]]),
        ],
        ids=[
            "integers are no strings",
            "none",
            "twice",
            "a document of another length is another one",
            "so is one after another system prompt",
            "tenants share none",
            "empty lines and a byte order mark",
        ],
    )
    def test_tells_documents_apart(self, lines: list[Any], found: list[list[int]]) -> None:
        assert rankings(read(*lines)) == found

    def test_counts_tenants_and_not_their_system_prompts(self) -> None:
        log = read(line("a", prefix_tokens=5), line("a", prefix_tokens=6), line("a", tenant="x"))
        assert (log.tenants, list(log.scopes)) == (2, [0, 1, 2])

    @pytest.mark.parametrize(
        ("asked", "top_k", "prompt_tokens", "longest_tokens"),
        [
            (line("ab"), None, 7 + 200 + 8, 7 + 200 + 8 + 9),
            (line("ab", tokens=50, prefix_tokens=10, suffix_tokens=5, output_tokens=3), None, 115, 118),
            (line("ab", tokens=[50, 60], prefix_tokens=10, prompt_tokens=140), None, 140, 149),
            (line([{"id": "a", "tokens": 5}, {"id": "b"}, "c"]), None, 7 + 205 + 8, 7 + 205 + 8 + 9),
            # The whole prompt counts the documents that are left out.
            (line("abc", tokens=10, prefix_tokens=5, prompt_tokens=40), 1, 5 + 10 + 5, 5 + 10 + 5 + 9),
        ],
        ids=["none", "every one", "the whole prompt", "documents", "fewer documents"],
    )
    def test_may_give_lengths(self, asked: Line, top_k: int | None, prompt_tokens: int, longest_tokens: int) -> None:
        lengths = DefaultLengths(document_tokens=100, prefix_tokens=7, suffix_tokens=8, output_tokens=9)
        log = read(asked, lengths=lengths, **({"top_k": top_k} if top_k else {}))
        assert (log.prompt_tokens(0), log.longest_tokens) == (prompt_tokens, longest_tokens)

    @pytest.mark.parametrize(
        ("earlier", "later"),
        [
            ("2025-01-31T12:00:00Z", "2025-01-31T12:00:01.5Z"),
            ("2025-01-31T12:00:00", "2025-01-31T12:00:01.5+00:00"),
            ("2025-01-31 14:00:00+02:00", "2025-01-31T12:00:01.500"),
            (1738324800, "2025-01-31T12:00:01.5Z"),
            (-0.5, 1),
        ],
    )
    def test_times_are_seconds_or_iso_dates(self, earlier: Any, later: Any) -> None:
        assert list(read(line(time=earlier), line(time=later)).at_s) == [0.0, 1.5]

    def test_dates_without_an_offset_are_utc_wherever_one_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        try:
            monkeypatch.setenv("TZ", "Asia/Kolkata")
            time.tzset()
            log = read(line(time="2025-01-31T12:00:00"), line(time="2025-01-31T12:00:01Z"))
        finally:
            monkeypatch.undo()
            time.tzset()
        assert list(log.at_s) == [0.0, 1.0]

    def test_lines_out_of_order_are_sorted_and_counted(self) -> None:
        log = read(line("a", 5, output_tokens=1), line("b", 9), line("c", 2, suffix_tokens=7), line("d", 5, tenant="x"))
        assert rankings(log) == [[2], [0], [3], [1]]
        assert list(log.at_s) == [0, 3, 3, 7]
        assert list(log.suffix_tokens) == [7, 20, 20, 20]
        assert list(log.output_tokens) == [32, 1, 32, 32]
        assert list(log.scopes) == [0, 0, 1, 0]
        assert log.out_of_order == 1

    def test_only_the_first_documents_and_requests_are_taken(self) -> None:
        log = read(line("abc", tokens=[1, 2, 3]), line("ca", 1), b"", line("b", 2), b"no JSON", top_k=2, limit=3)
        assert rankings(log) == [[0, 1], [2, 3], [4]]
        assert list(log.document_tokens) == [1, 2, 256, 256, 256]

    def test_lengths_that_are_not_given_are_estimated_from_texts_or_assumed_and_the_report_says_so(
        self, tmp_path: Path
    ) -> None:
        texts = [{"id": "a", "text": "x" * 40}, {"id": "b", "text": "x" * 40, "tokens": 7}, {"id": "c"}, "d"]
        log = read(line(texts), line("e", tokens=5))
        assert list(log.document_tokens) == [10, 7, 256, 256, 5]
        assert (log.estimated_lengths, log.assumed_lengths) == (1, 2)
        said = " ".join(invoke(written(tmp_path, line(texts)), "--no-sweep", "--capacity-tokens", "10k").output.split())
        assert "documents whose length is estimated from their text: 1" in said
        assert "documents without a length in the log: 2; each counts with the tokens of --document-tokens" in said

    @pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz", "log.txt"])
    def test_is_a_file_plain_or_gzipped(self, tmp_path: Path, name: str) -> None:
        path = written(tmp_path, line("ab"), line("b", 1), name=name)
        for source in (path, str(path)):
            log = read_log(source)
            assert rankings(log) == [[0, 1], [1]]
            assert log.name == name

    def test_may_be_an_open_file_which_stays_open(self, tmp_path: Path) -> None:
        data = io.BytesIO(packed(line("ab")))
        assert rankings(read_log(data)) == [[0, 1]]
        assert not data.closed
        with written(tmp_path, line("ab")).open("rb") as file:
            assert rankings(read_log(file)) == [[0, 1]]
            assert not file.closed

    def test_may_come_out_of_a_pipe(self) -> None:
        reading, writing = os.pipe()
        with open(reading, "rb") as source:
            with open(writing, "wb") as target:
                target.write(packed(*(line("ab", n) for n in range(600))))
            assert len(read_log(source, progress=Steps())) == 600

    def test_takes_less_than_200_bytes_a_request(self) -> None:
        count = length(20_000, 5_000)
        lines = packed(*(line([f"document {n * i % 500}" for i in range(5)], n, tokens=100) for n in range(count)))
        tracemalloc.start()
        try:
            log = read_log(io.BytesIO(lines))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(log) == count
        assert peak < 200 * count + 500_000


class TestFieldsOfOtherPrograms:
    """Real logs say more than a replay asks for."""

    def test_are_passed_over_and_named_once_with_what_may_have_been_meant(self, tmp_path: Path) -> None:
        logged = [line(user="u1", documents=[{"id": "a", "tokens": 3, "page": 4}, {"id": "b"}])] * 3
        assert dict(read(*logged, line(user="u2")).passed_over) == {"user": 4, "documents[].page": 3}
        path = written(tmp_path, line("ab", prefix_token=7, user="u"), line("ba", user="u"))
        note = " ".join(invoke(path, "--no-sweep", "--capacity-tokens", "10k").output.split())
        assert note.count("fields that a replay has no use for were passed over") == 1
        assert "prefix_token (1 line; was prefix_tokens meant?), user (2 lines)" in note

    def test_names_are_bounded_and_harmless(self) -> None:
        log = read(*(line(**{f"f{number}\x1b[2J" + "x" * 99: 1}) for number in range(300)))
        assert len(log.passed_over) <= 100
        assert all(len(name) <= 40 and name.isprintable() for name in log.passed_over)


SECRET = "hunter2"  # noqa: S105
DEEP = b'{"time": 1, "documents": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_LINES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"hunter2", "not JSON (column 1: Expecting value): a line looks like"),
    "cut off": (b'{"time": 1, "documents": ["hunter2', "not JSON"),
    "no object": ([SECRET], "must be an object, not a list: a line looks like"),
    "null": (None, "must be an object, not null"),
    "not UTF-8": (b'{"time": 1, "documents": ["hunter2\xff"]}', "not UTF-8"),
    "nested deeply": (DEEP, "nested too deeply"),
    "a number of too many digits": (b'{"time": %s, "documents": []}' % (b"9" * 5_000), "cannot be read"),
    "no time": ({"documents": [SECRET]}, '"time" is missing: add it'),
    "a time that is true": (line(time=True), '"time" must be an integer, a number or a string, not a boolean'),
    "a time that is a list": (line(time=[SECRET]), "not a list"),
    "a time that is NaN": (b'{"time": NaN, "documents": ["hunter2"]}', "NaN, infinite or too many digits"),
    "a time that is infinite": (b'{"time": Infinity, "documents": ["hunter2"]}', "NaN, infinite"),
    "a time beyond all floats": (b'{"time": 1e999, "documents": ["hunter2"]}', "NaN, infinite"),
    "a huge integer as time": (b'{"time": %s, "documents": []}' % (b"9" * 400), "too large"),
    "a time in milliseconds": (line(time=1738324800000), "divide milliseconds by 1,000"),
    "a time of the far past": (line(time=-1e12), "too large"),
    "a date that is none": (line(time=SECRET), "not an ISO 8601 date and time"),
    "a date that does not exist": (line(time="2025-02-30T12:00:00"), "not an ISO 8601 date and time"),
    "a tenant that is a number": (line(tenant=7), '"tenant" must be a string, not an integer'),
    "no documents": ({"time": 1}, '"documents" is missing: add it: a line looks like {"time": 12.5, "documents"'),
    "documents that are a string": ({"time": 1, "documents": SECRET}, '"documents" must be a list'),
    "a document's text that is none": (line([{"id": "a", "text": 5}]), '"documents[0].text" must be a string'),
    "a document that is nothing": (line([None]), '"documents[0]" must be a string, an integer or an object, not null'),
    "a document that is true": (line(["a", True]), '"documents[1]" must be a string, an integer or an object'),
    "a document that is a fraction": (line([1.5]), '"documents[0]" must be a string, an integer or an object'),
    "a document without an id": (line([{"tokens": 5}]), '"documents[0].id" is missing'),
    "lengths of another number": (line("ab", tokens=[1]), '"tokens" has 1 entries and "documents" has 2'),
    "lengths given twice": (line([{"id": "a", "tokens": 5}], tokens=[5]), "not in both"),
    "lengths that are a string": (line(tokens=SECRET), '"tokens" must be a list or an integer, not a string'),
    "a length that is a string": (line(tokens=[1, SECRET]), '"tokens[1]" must be an integer, not a string'),
    "a length that is true": (line(tokens=[1, True]), '"tokens[1]" must be an integer, not a boolean'),
    "a length that is a fraction": (line(tokens=[1, 2.0]), "not a decimal number"),
    "a length that is nothing": (line(tokens=[1, None]), "not null"),
    "a negative length": (line(tokens=[1, -1]), '"tokens[1]" must be at least 0'),
    "a negative length for all": (line(tokens=-1), '"tokens" must be at least 0'),
    "a length beyond measure": (line(tokens=[1, 10**30]), '"tokens[1]" must be at most 10,000,000'),
    "a document's length that is none": (line([{"id": "a", "tokens": -2}]), '"documents[0].tokens" must be at least 0'),
    "a prefix that is true": (line(prefix_tokens=True), '"prefix_tokens" must be an integer'),
    "a negative prefix": (line(prefix_tokens=-1), '"prefix_tokens" must be at least 0'),
    "no suffix at all": (line(suffix_tokens=0), '"suffix_tokens" must be at least 1'),
    "a negative answer": (line(output_tokens=-1), '"output_tokens" must be at least 0'),
    "a prompt shorter than its documents": (
        line(tokens=100, prompt_tokens=264),
        '"prompt_tokens" must be more than prefix and documents together, which are 264 tokens',
    ),
    "a prompt and a suffix": (line(prompt_tokens=900, suffix_tokens=5), "leave one of them out"),
}


class TestABadLog:
    @pytest.mark.parametrize(("bad", "problem"), BAD_LINES.values(), ids=BAD_LINES)
    def test_is_refused_in_one_line_that_says_where_and_what_and_quotes_nothing(
        self, tmp_path: Path, bad: Any, problem: str
    ) -> None:
        path = written(tmp_path, line("ab"), b"", bad)
        with pytest.raises(LogError) as error:
            read_log(path)
        message = str(error.value)
        assert message.startswith(f"{path}:3: ")
        assert problem in message
        assert SECRET not in message and "\n" not in message
        assert len(message) < 400 + len(str(path))
        assert error.value.__cause__ is None and error.value.__suppress_context__

    @pytest.mark.parametrize("data", [b"", b"\n\n  \n", gzip.compress(b"")], ids=["empty", "blank", "gzip of nothing"])
    def test_without_requests_is_refused(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "log"
        path.write_bytes(data)
        with pytest.raises(LogError, match=re.escape(f"{path}: no requests in it: a line looks like")):
            read_log(path)

    @pytest.mark.parametrize("damage", ["cut", "changed", "garbage after it"])
    def test_of_damaged_gzip_data_is_refused(self, tmp_path: Path, damage: str) -> None:
        path = written(tmp_path, *(line([f"d{n * 7919 % 1000}"], n) for n in range(2_000)), name="log.gz")
        data = path.read_bytes()
        changed = data[:500] + bytes(255 - byte for byte in data[500:520]) + data[520:]
        path.write_bytes({"cut": data[:-100], "changed": changed, "garbage after it": data + b"hunter2"}[damage])
        with pytest.raises(LogError, match=r"log\.gz:\d+: ") as error:
            read_log(path)
        assert SECRET not in str(error.value)

    def test_without_line_breaks_is_not_read_whole(self) -> None:
        with pytest.raises(LogError, match="<stdin>:1: longer than 16 MiB: write one object a line"):
            read_log(io.BytesIO(b" " * (1 << 25)))

    def test_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(LogError, match=r"nowhere\.jsonl: No such file or directory: name a file"):
            read_log(tmp_path / "nowhere.jsonl")
        with pytest.raises(LogError, match="Is a directory"):
            read_log(tmp_path)

    @settings(max_examples=examples(300))
    @given(
        st.binary(max_size=60)
        | st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["time", "documents", "tokens", "id", "tenant", "x"]), inner, max_size=4
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode())
    )
    def test_of_any_kind_is_refused_or_read_and_nothing_else(self, data: bytes) -> None:
        try:
            log = read_log(io.BytesIO(data))
        except LogError as error:
            assert str(error).startswith("<stdin>")
        else:
            assert len(log) > 0


def token_ids(prompt: PathPrompt, lengths: Sequence[int], prefixes: Sequence[int], number: int) -> array[int]:
    """The tokens of a prompt: those of its scope's documents, and at its end some that no other has."""
    ids = array("q", range(prompt.scope * 10**9, prompt.scope * 10**9 + prefixes[prompt.scope]))
    for document in prompt.documents:
        first = prompt.scope * 10**9 + (document + 1) * 10**6
        ids.extend(range(first, first + lengths[document]))
    ids.extend(range(10**12 + number * 1_000, 10**12 + number * 1_000 + prompt.suffix_tokens))
    return ids


class TestTheEngine:
    """What it finds cached is what the simulated engine finds that hashes every block."""

    @settings(max_examples=examples(200))
    @given(st.data())
    def test_equals_the_one_that_hashes_every_block(self, data: st.DataObject) -> None:
        lengths = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=10))
        prefixes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2))
        size = data.draw(st.sampled_from([1, 3, 16]))
        capacity = data.draw(st.none() | st.integers(1, 60) | st.integers(60, 1_500))
        hashing = SimEngine(block_size=size, capacity_tokens=capacity, output_tokens=7)
        engine = make_engine(lengths, prefixes, block_size=size, capacity_tokens=capacity, output_tokens=7)
        prompts = st.builds(
            PathPrompt,
            st.integers(0, len(prefixes) - 1),
            st.lists(st.integers(0, len(lengths) - 1), max_size=5),
            st.integers(1, 9),
        )
        running: list[tuple[int, int]] = []
        for number in range(data.draw(st.integers(1, 50))):
            if running and data.draw(st.booleans()):
                one, other = running.pop(data.draw(st.integers(0, len(running) - 1)))
                hashing.finish(one)
                engine.finish(other)
                continue
            prompt, answer = data.draw(prompts), data.draw(st.none() | st.integers(0, 40))
            ids = token_ids(prompt, lengths, prefixes, number)
            assert engine.has_room(prompt, answer) == hashing.has_room(ids, answer)
            (expected, one), (found, other) = hashing.admit(ids, answer), engine.admit(prompt, answer)
            assert found == expected
            running.append((one, other))

    @pytest.mark.parametrize("capacity", [None, 1_000])
    def test_passes_over_documents_without_tokens(self, capacity: int | None) -> None:
        engine = make_engine([0, 64, 32], [16], block_size=16, capacity_tokens=capacity, output_tokens=8)
        found = [
            engine.admit(PathPrompt(0, documents, 3))[0].cached_tokens for documents in ([0, 1], [1, 2], [1, 0, 2])
        ]
        assert found == [0, 80, 112]

    def test_does_not_grow_by_what_it_gave_up(self) -> None:
        engine = make_engine(range(1, 2_001), [16], block_size=16, capacity_tokens=4_096, output_tokens=8)

        def serve(rounds: range) -> int:
            for first in rounds:
                _, handle = engine.admit(PathPrompt(0, range(first, first + 5), 3))
                engine.finish(handle)
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            early, late = serve(range(1_000, 1_200)), serve(range(1_200, 1_990))
        finally:
            tracemalloc.stop()
        assert late < 1.5 * early


POLICIES = ("retrieval", "greedy", "prefix", "frequency", "popularity", "free")


class TestTheFiguresAreThoseOfTheBenchmark:
    """To the token: the same trace, policy and capacity."""

    @pytest.mark.parametrize(
        ("workload", "capacity", "block_size", "seed"),
        [
            *grid(list(product(["paper-shuf", "zipf10"], ["300", "4000", "20000", "unlimited"], [16], [0, 1])), 4),
            *product(["geo"], ["9000"], [1, 32], [0]),
        ],
    )
    def test_one_request_at_a_time(self, workload: str, capacity: str, block_size: int, seed: int) -> None:
        limit = length(300, 120)
        log = exported(make_workload(workload, seed), limit=limit)
        report = replay(log, policies=POLICIES, capacities=[capacity], sweep=(), block_size=block_size)
        sizes = {"capacity": Capacity.parse(capacity), "block_size": block_size, "limit": limit}
        bench = Bench(workloads=[workload], policies=POLICIES, seeds=[seed], **sizes)
        for figures, result in zip(report.figures, run_bench(bench), strict=True):
            for name in ("policy", "capacity_tokens", "prompt_tokens", "cached_tokens", "cached_ratio"):
                assert getattr(figures, name) == getattr(result, name)

    @pytest.mark.parametrize("capacity", grid(["6000", "40000", "unlimited"], 1))
    def test_under_load_at_the_recorded_times(self, capacity: str) -> None:
        arrivals = poisson_arrivals(4.0, 253, seed=0)
        log = exported(make_workload("zipf10", 0), arrivals, limit=253)
        rates = {"prefill_tokens_per_s": 9_000.0, "decode_tokens_per_s": 12.0}
        report = replay(log, policies=POLICIES, capacities=[capacity], sweep=(), **rates)
        timed = {"arrivals": Arrivals("poisson:4", rate=4.0), "service_times": ServiceTimes(**rates)}
        sizes = {"capacity": Capacity.parse(capacity), "limit": 253}
        bench = Bench(workloads=["zipf10"], policies=POLICIES, **sizes, **timed)
        results = run_bench(bench)
        assert [each.cached_tokens for each in report.figures] == [each.cached_tokens for each in results]
        assert all(figures.in_flight_mean > 3 for figures in report.figures)

    def test_with_answers_of_recorded_lengths(self) -> None:
        rng = random.Random(5)
        arrivals = [Arrival(number * 0.4, rng.randrange(1, 200)) for number in range(200)]
        log = exported(make_workload("paper-shuf", 0), arrivals, limit=200)
        report = replay(log, policies=POLICIES, capacities=[15_000], sweep=(), prefill_tokens_per_s=4_000)
        times = ServiceTimes(prefill_tokens_per_s=4_000)
        timed = {"arrivals": Arrivals("recorded", trace=arrivals), "service_times": times}
        bench = Bench(workloads=["paper-shuf"], policies=POLICIES, capacity=Capacity(15_000), **timed)
        assert [each.cached_tokens for each in report.figures] == [each.cached_tokens for each in run_bench(bench)]

    @pytest.mark.skipif(not CORPUS.exists(), reason="needs the real corpora")
    def test_on_a_real_corpus(self) -> None:
        from ragorder.eval.data.corpora import load_folder

        corpus = load_folder(CORPUS)
        log = exported(Workload("", corpus.documents, [ranking[:5] for ranking in corpus.rankings]), limit=500)
        report = replay(log, policies=POLICIES, capacities=[32_768], sweep=())
        bench = Bench(corpora=[str(CORPUS)], policies=POLICIES, capacity=Capacity(32_768), limit=500)
        assert [each.cached_tokens for each in report.figures] == [each.cached_tokens for each in run_bench(bench)]


class TestTenants:
    def test_share_nothing(self) -> None:
        lines = (line("abcde", number, tenant=name) for number, name in enumerate(("me", "you", "me")))
        report = replay(read(*lines), policies=POLICIES, capacities=["unlimited"], sweep=())
        # Only the third request finds anything: its own first one, up to the block in which the question begins.
        assert set(cached(report).values()) == {(64 + 5 * 256) // 16 * 16}

    def test_with_an_unlimited_cache_each_is_served_as_if_alone(self) -> None:
        workload = make_workload("paper-shuf", 0)
        rng = random.Random(1)
        lines = [
            line([f"d{d}" for d in ranking], number, tokens=[180 + d % 41 for d in ranking], tenant=rng.choice("xyz"))
            for number, ranking in enumerate(workload.rankings[:300])
        ]
        logs = (read(*(each for each in lines if each["tenant"] in tenants)) for tenants in ("xyz", "x", "y", "z"))
        together, *alone = (replay(log, policies=POLICIES, capacities=["unlimited"], sweep=()) for log in logs)
        assert together.log.tenants == 3
        for key, tokens in cached(together).items():
            assert tokens == sum(cached(report)[key] for report in alone)
        assert together.overlap.bound_tokens == sum(report.overlap.bound_tokens for report in alone)

    def test_share_the_room(self) -> None:
        """What one tenant does costs another one cached tokens where the cache is small."""
        mine = [line("ab", 2 * number, tenant="me", tokens=100) for number in range(20)]
        yours = [line([f"d{number}"], 2 * number + 1, tenant="you", tokens=300) for number in range(20)]
        alone = replay(read(*mine), capacities=[400], sweep=())
        both = replay(read(*mine, *yours), capacities=[400], sweep=())
        assert alone.at("retrieval", alone.capacities[0]).cached_tokens == 19 * ((64 + 200) // 16 * 16)
        assert both.at("retrieval", both.capacities[0]).cached_tokens < 19 * (64 + 200) // 2
        assert both.log.out_of_order == 1


class TestOverlap:
    @pytest.mark.parametrize("seed", grid(range(20), 6))
    def test_no_policy_reuses_more_than_the_bounds(self, seed: int) -> None:
        log = random_log(seed, tenants=1 + seed % 3)
        report = replay(log, policies=REPLAY_POLICIES, capacities=["unlimited"], block_size=1 + seed % 7)
        assert report.overlap.exact
        for figures in report.figures:
            assert figures.cached_ratio <= report.overlap.one_prompt_ratio <= report.overlap.bound_ratio
            assert figures.cached_tokens <= report.overlap.bound_tokens

    @pytest.mark.parametrize("seed", grid(range(10), 4))
    def test_is_that_of_comparing_all_with_all(self, seed: int) -> None:
        log = random_log(seed, tenants=2)
        seen, sharing, jaccard, one_prompt = 0, 0, 0.0, 0
        for row, ranking in enumerate(rankings(log)):
            earlier = [other for other in range(row) if log.scopes[other] == log.scopes[row]]
            sets = [set(log.ranking(other)) for other in earlier]
            before = set().union(*sets)
            prefix = 40 if earlier else 0
            seen += (prefix + sum(log.document_tokens[d] for d in ranking if d in before)) // 16 * 16
            common = [sum(log.document_tokens[d] for d in ranking if d in other) for other in sets]
            one_prompt += (prefix + max(common, default=0)) // 16 * 16
            sharing += any(len(other & set(ranking)) >= 2 for other in sets)
            jaccard += max(
                (len(other & set(ranking)) / len(other | set(ranking)) for other in sets if other | set(ranking)),
                default=0.0,
            )
        overlap = measure_overlap(log, 16)
        assert overlap.bound_tokens == seen
        assert overlap.one_prompt_ratio == pytest.approx(one_prompt / overlap.prompt_tokens, abs=1e-6)
        assert overlap.sharing_two_ratio == pytest.approx(sharing / len(log), abs=1e-6)
        assert overlap.jaccard_mean == pytest.approx(jaccard / len(log), abs=1e-6)

    def test_says_what_is_new_and_what_is_a_question(self) -> None:
        overlap = measure_overlap(read(line("ab", tokens=100), line("bc", 1, tokens=100)), 16)
        assert overlap.prompt_tokens == 2 * (64 + 200 + 20)
        assert overlap.suffix_ratio == pytest.approx(40 / 568, abs=1e-6)
        assert overlap.first_seen_ratio == pytest.approx((64 + 200 + 100) / 568, abs=1e-6)
        assert overlap.bound_tokens == (64 + 100) // 16 * 16

    def test_of_many_requests_is_estimated_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = exported(make_workload("paper-shuf", 0, requests=2_000), limit=2_000)
        whole = measure_overlap(log, 16)
        assert whole.exact
        assert whole.compared_requests == 2_000
        set_bounds(monkeypatch, compared_requests=300)
        steps = Steps()
        sampled = measure_overlap(log, 16, steps("", 0))
        assert not sampled.exact
        assert 200 < sampled.compared_requests <= 300
        assert steps.done[""] == sampled.compared_requests
        assert sampled.one_prompt_ratio == pytest.approx(whole.one_prompt_ratio, abs=0.05)
        assert sampled.jaccard_mean == pytest.approx(whole.jaccard_mean, abs=0.05)
        assert sampled.bound_ratio == whole.bound_ratio

    def test_of_documents_that_many_requests_had_is_with_the_latest_of_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, comparisons=1)
        first, others = line("abx", 0), [line("ab", number) for number in range(1, 30)]
        overlap = measure_overlap(read(first, *others, line("abx", 30)), 16)
        assert not overlap.exact
        # Seen from the last request, the first one lies too far back: two of three is the most that others have.
        assert overlap.jaccard_mean == pytest.approx((2 / 3 + 28 + 2 / 3) / 31, abs=1e-6)


class TestCapacities:
    def sizes(self, *capacities: Any, **options: Any) -> list[tuple[str, int | None, bool]]:
        log = exported(make_workload("paper-shuf", 0), limit=600)
        report = replay(log, policies=(), capacities=capacities, **options)
        return [(each.name, each.tokens, each.asked) for each in report.capacities]

    def test_are_shares_of_the_documents_and_unlimited(self) -> None:
        whole = exported(make_workload("paper-shuf", 0), limit=600).working_set_tokens
        shares = (5, 10, 25, 50, 100)
        expected = [(f"{share} %", whole * share // 100, False) for share in shares]
        assert self.sizes() == [*expected, ("unlimited", None, False)]

    def test_that_are_asked_for_join_the_sweep_in_order_of_size(self) -> None:
        names = [name for name, _, asked in self.sizes(30_000, "7.5%") if asked or name == "unlimited"]
        assert names == ["7.5 %", "30,000 tokens", "unlimited"]
        assert len(self.sizes(30_000, "7.5%")) == 8

    def test_of_one_size_are_one(self) -> None:
        assert [name for name, _, asked in self.sizes("5%", "unlimited") if asked] == ["5 %", "unlimited"]
        assert len(self.sizes("5%", "unlimited")) == 6

    def test_of_the_sweep_that_hold_no_prompt_are_left_out_and_noted(self) -> None:
        report = replay(read(line("abcd", tokens=100), line("efgh", 1, tokens=100)))
        assert [each.name for each in report.capacities] == ["100 %", "unlimited"]
        assert report.left_out == ["5 %", "10 %", "25 %", "50 %"]
        longest = "the longest prompt with its answer takes 516 tokens"
        assert report.notes == [f"caches of 5 %, 10 %, 25 %, 50 % were left out: {longest}"]

    def test_that_are_asked_for_and_hold_no_prompt_are_replayed_and_noted(self) -> None:
        report = replay(read(line("abcd", tokens=100)), capacities=[128], sweep=())
        assert report.notes == ["no engine has a cache of 128 tokens: the longest prompt with its answer takes 516"]


class TestPolicies:
    def test_retrieval_order_is_always_the_baseline(self) -> None:
        log = random_log(0)
        assert replay(log, policies=["free"]).policies == ["retrieval", "free"]
        assert replay(log, policies=["prefix", "retrieval", "prefix"]).policies == ["retrieval", "prefix"]
        assert replay(log).policies == ["retrieval", "greedy", "earned", "free"]

    def test_keep_to_the_settings_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = exported(make_workload("paper-shuf", 0), limit=200)
        monkeypatch.setenv("RAGORDER_KEEP_FIRST", "5")
        guarded = replay(log, capacities=["unlimited"], sweep=(), policies=["free"])
        plain, ordered = guarded.figures
        assert ordered.cached_tokens == plain.cached_tokens
        monkeypatch.setenv("RAGORDER_KEEP_FIRST", "1")
        less = replay(log, capacities=["unlimited"], sweep=(), policies=["free"])
        assert less.figures[1].cached_tokens > ordered.cached_tokens

    def test_a_log_has_no_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = exported(make_workload("paper-shuf", 0), limit=50)
        free = replay(log, policies=["free"]).figures
        monkeypatch.setenv("RAGORDER_KEEP_GROUPS", "1")
        assert replay(log, policies=["free"]).figures == free


ROUNDING = "no more than rounding to whole blocks explains"


def report_of(*gains: int, asked: int | None = None, rate: float | None = None) -> ReplayReport:
    """A report of 100 requests of 1,000 tokens. Retrieval order reuses a fifth, and auto so many more in all, at one
    capacity after the other."""
    capacities = [CapacityInfo(f"{1_000 * (n + 1):,} tokens", 1_000 * (n + 1), n == asked) for n in range(len(gains))]
    figures = [
        PolicyFigures(policy, capacity.tokens, 100_000, tokens, tokens / 100_000, [tokens / 100_000])
        for capacity, gain in zip(capacities, gains, strict=True)
        for policy, tokens in (("retrieval", 20_000), ("earned", 20_000 + gain))
    ]
    return ReplayReport(
        LogInfo("log", 100, 99.0, 1, 1, 50, 5.0, 10_000, 1_000.0, 1_000, 0),
        Overlap(100_000, 90_000, 0.9, 0.05, 0.05, 0.8, 0.5, 0.7, 100, True),
        capacities,
        figures,
        block_size=16,
        prefill_tokens_per_s=rate,
        seconds=2.0,
    )


class TestTheSaving:
    def test_is_what_auto_spares_of_retrieval_orders_prefill(self) -> None:
        (saving,) = report_of(16_000).savings
        assert (saving.policy, saving.saved_tokens, saving.share_of_prefill) == ("earned", 16_000, 16_000 / 80_000)
        assert (saving.tokens_per_1000_requests, saving.seconds_per_1000_requests) == (160_000, None)
        assert report_of(16_000, rate=8_000).savings[0].seconds_per_1000_requests == 20.0

    @pytest.mark.parametrize(
        ("gain", "verdict", "reason"),
        [
            (0, "not worth it", f"0.0 tokens a request: {ROUNDING}: not worth it"),
            (1_599, "not worth it", f"2.0 % of the prefill, 16.0 tokens a request: {ROUNDING}"),
            (-1_599, "not worth it", ROUNDING),
            (1_600, "helps a little", "little, yet more than rounding to whole blocks explains"),
            (3_999, "helps a little", "little, yet more than rounding to whole blocks explains"),
            (
                4_000,
                "helps",
                "at 1,000 tokens ragorder (earned) saves 5.0 % of the prefill, 40.0 tokens a request: worth it",
            ),
            (-1_600, "costs", "retrieval order reuses more; leave it as it is"),
        ],
    )
    def test_has_an_honest_verdict(self, gain: int, verdict: str, reason: str) -> None:
        (saving,) = report_of(gain).savings
        assert saving.verdict == verdict
        assert reason in saving.says

    @pytest.mark.parametrize(
        ("gains", "asked", "answer"),
        [
            ((0, 8_000, 16_000), None, "Yes: {} saves 10.0 to 20.0 % of the prefill tokens at 2 of the 3 capacities."),
            ((8_000, 16_000, 2_000), None, "Yes: {} saves 2.5 to 20.0 % of the prefill tokens at all capacities."),
            ((16_000,), None, "Yes: {} saves 20.0 % of the prefill tokens at all capacities."),
            ((0, 2_000), None, "A little: {} saves 2.5 % of the prefill tokens at 1 of the 2 capacities."),
            ((0, -9_000), None, "No: {} saves nothing worth having at any of these capacities."),
            ((16_000, 0), 1, "No: at 2,000 tokens {} saves 0.0 % of the prefill"),
            ((16_000, 0), 0, "Yes: at 1,000 tokens {} saves 20.0 %"),
        ],
    )
    def test_is_summed_up_or_that_of_the_capacity_asked_for(
        self, gains: tuple[int, ...], asked: int | None, answer: str
    ) -> None:
        assert report_of(*gains, asked=asked).answer.startswith(answer.format("ragorder (earned)"))

    def test_needs_something_to_compare_which_is_the_last_policy_where_auto_is_not_among_them(self) -> None:
        report = replay(random_log(0), policies=())
        assert report.savings == []
        assert report.answer == "Only retrieval order was replayed: there is nothing to compare it with."
        assert replay(random_log(0), policies=["prefix", "greedy"]).compared_policy == "greedy"
        assert replay(random_log(0), policies=["earned", "greedy"]).compared_policy == "earned"

    def test_figures_along_the_log_are_by_tenths(self) -> None:
        busy = [line("abcde", number, tokens=100) for number in range(50)]
        fresh = [line([f"{number} {rank}" for rank in range(5)], number, tokens=100) for number in range(50, 100)]
        report = replay(read(*busy, *fresh), capacities=["unlimited"], sweep=())
        tenths = report.at("free", report.capacities[0]).tenths
        assert len(tenths) == 10
        assert all(ratio > 0.9 for ratio in tenths[1:5])
        assert all(ratio < 0.12 for ratio in tenths[5:])


class TestProcesses:
    def test_change_no_figure(self) -> None:
        log = exported(make_workload("zipf10", 0), limit=200)
        options: dict[str, Any] = {"capacities": [5_000, 20_000], "sweep": ()}
        assert replay(log, processes=3, **options).figures == replay(log, **options).figures

    @pytest.mark.parametrize("processes", [1, 2])
    def test_the_progress_is_that_of_all_of_them(self, tmp_path: Path, processes: int) -> None:
        path = written(tmp_path, *(line([f"d{n % 40}", f"d{n % 7}"], n) for n in range(400)))
        steps = Steps()
        report = replay(path, progress=steps, processes=processes, capacities=["50%"], sweep=())
        assert report.processes == processes
        replaying = f"replaying {len(report.figures)} times 400 requests"
        assert list(steps.announced) == ["reading log.jsonl", "comparing requests", replaying]
        assert steps.done == steps.announced

    def test_the_progress_of_reading_ends_with_the_last_line_that_is_read(self, tmp_path: Path) -> None:
        path = written(tmp_path, *(line("ab", n) for n in range(5_000)))
        told, steps = [], Steps()
        read_log(path, limit=2_000, progress=lambda *announced: lambda: told.append(steps(*announced)))
        assert len(told) == 100

    def test_one_that_dies_ends_the_replay(self) -> None:
        def kill() -> None:
            for child in multiprocessing.active_children():
                assert child.pid is not None
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

        said = "a process of the replay died: if it ran out of memory, lower --processes"
        with pytest.raises(ReplayError, match=said):
            self.replay_and(kill)

    def test_workers_stop_at_the_next_step_once_their_results_are_not_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told, stop = array("q", [0]), SimpleNamespace(value=1)
        shared = random_log(0), Setup(), told, stop
        assert not replay_in_worker(monkeypatch, shared, sweep.ReplayJob("retrieval", None))
        assert list(told) == [1]

    def test_end_when_the_replay_is_interrupted(self) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.replay_and(interrupt)
        assert multiprocessing.active_children() == []

    def replay_and(self, disturb: Callable[[], None]) -> None:
        def progress(description: str, steps: int) -> Callable[[], None]:
            return disturb if description.startswith("replaying") else lambda: None

        replay(exported(make_workload("zipf10", 0)), progress=progress, processes=2)


invoke = partial(run_command, command, env={"COLUMNS": "160"})


def written_by(*arguments: str | Path, input: bytes | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The session and the record that a replay writes."""
    done = invoke(*arguments, "-o", "-", input=input)
    assert done.exit_code == 0, done.output
    session, record = (json.loads(each, parse_constant=pytest.fail) for each in done.stdout.splitlines())
    return session, record


def as_json(*arguments: str | Path, input: bytes | None = None) -> dict[str, Any]:
    """What the record of a replay says."""
    _, record = written_by(*arguments, input=input)
    return {**record["facts"], "engine": record["engine"]}


def refusal(*arguments: str | Path, input: bytes | None = None) -> str:
    done = invoke(*arguments, input=input)
    assert done.exit_code != 0, done.output
    assert "Traceback" not in done.output
    return done.stderr


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAGORDER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    """200 requests of a bursty trace, a second apart."""
    workload = make_workload("paper-shuf", 0)
    lines = [
        line([f"d{d}" for d in ranking], number, tokens=[180 + d % 41 for d in ranking])
        for number, ranking in enumerate(workload.rankings[:200])
    ]
    return written(tmp_path, *lines)


class TestTheCommand:
    def test_shows_what_is_cached_what_is_saved_why_and_the_answer(self, log_file: Path) -> None:
        done = invoke(log_file)
        assert done.exit_code == 0, done.output
        shown = " ".join(done.stdout.split())
        words = ["retrieval", "greedy", "earned", "5 %", "100 %", "that ragorder (earned) saves", "helps"]
        words += ["share two documents or more with an earlier one", "so that no order can reuse more than"]
        words += ["would it help? Yes: ragorder (earned) saves"]
        assert [each for each in words if each not in shown] == []

    def test_says_so_where_it_is_not_worth_it(self, tmp_path: Path) -> None:
        path = written(tmp_path, *(line([f"{n} {rank}" for rank in range(5)], n) for n in range(60)))
        shown = " ".join(invoke(path).stdout.split())
        assert f"ragorder (earned) saves 0.0 % of the prefill, 0.0 tokens a request: {ROUNDING}" in shown
        assert "would it help? No: ragorder (earned) saves nothing worth having at any of these capacities." in shown
        overlap = as_json(path)["overlap"]
        assert (overlap["sharing_two_ratio"], overlap["jaccard_mean"]) == (0, 0)

    @pytest.mark.parametrize("columns", [80, 200])
    def test_the_tables_fit_a_terminal(self, log_file: Path, columns: int) -> None:
        done = invoke(log_file, "--prefill-rate", "9000", "--capacity-tokens", "12345", env={"COLUMNS": str(columns)})
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= columns

    def test_replays_a_sample_log_without_one_of_ones_own(self, tmp_path: Path) -> None:
        done = invoke("--example", "-o", tmp_path)
        assert done.exit_code == 0, done.output
        assert "400 requests, 2 tenants" in done.stdout and "would it help? Yes" in " ".join(done.stdout.split())
        (record,) = result_lines(tmp_path, "replay")
        assert (record["suite"], record["facts"]["notes"]) == ("replay-example-jsonl", [])

    def test_the_sample_log_is_what_its_command_writes(self) -> None:
        lines = [json.loads(each) for each in EXAMPLE_LOG.read_text("utf-8").splitlines()]
        assert lines == [*example_lines()]

    def test_without_a_log_it_names_the_sample(self, log_file: Path) -> None:
        assert "LOG is missing" in refusal() and "--example" in refusal()
        for other in ((log_file,), ("--format", "langfuse")):
            assert "leave out LOG and --format" in refusal("--example", *other)

    def test_appends_a_session_and_a_record(self, log_file: Path, tmp_path: Path) -> None:
        for _ in range(2):
            assert invoke(log_file, "-o", tmp_path, "--capacity-tokens", "9000").exit_code == 0
        session, record, *again = result_lines(tmp_path)
        assert len(again) == 2 and session["schema"] == 1
        assert {"time", "python", "cores", "packages"} <= session["environment"].keys()
        assert session["arguments"] == {"command": "replay", "log": str(log_file), "capacity_tokens": ["9000"]}
        found = record["facts"]
        assert found["log"]["requests"] == 200
        assert len(found["runs"]) == 4 * 7
        assert {run["policy"] for run in found["runs"]} == {"retrieval", "greedy", "earned", "free"}
        assert all(len(run["tenths"]) == 10 for run in found["runs"])
        assert len(found["savings"]) == 7
        assert found["answer"].startswith("Yes: at 9,000 tokens ragorder (earned) saves")
        assert 0 < found["overlap"]["one_prompt_ratio"] < found["overlap"]["bound_ratio"] < 1
        assert found["speed"]["requests_per_s"] > 0

    def test_the_interval_of_a_headline_holds_the_gain_in_its_points(self, log_file: Path) -> None:
        pytest.importorskip("scipy")
        known, (_, record) = {"replay": Replay}, written_by(log_file)
        found = record["facts"]
        marks = make_report(results_of([record], known), {}, known=known).headline.charts[0].marks
        gains, plain = (
            {run["capacity_tokens"]: run["tenths"] for run in found["runs"] if run["policy"] == policy}
            for policy in ("earned", "retrieval")
        )
        assert len(marks) == len(gains) == len(plain)
        for mark, ordered, before in zip(marks, gains.values(), plain.values(), strict=True):
            tenths = [100 * (a - b) for a, b in zip(ordered, before, strict=True)]
            assert min(tenths) - 0.01 <= mark.low <= mark.high <= max(tenths) + 0.01

    def test_is_as_thin_as_the_python_api(self, log_file: Path) -> None:
        found, report = as_json(log_file), replay(log_file)
        assert found["runs"] == json.loads(json.dumps(report.as_json()["runs"]))
        assert found["savings"] == json.loads(json.dumps(report.as_json()["savings"]))

    def test_reads_standard_input_plain_or_gzipped_and_writes_records_alone_to_standard_output(
        self, log_file: Path
    ) -> None:
        data = log_file.read_bytes()
        runs = as_json(log_file)["runs"]
        assert as_json("-", input=data)["runs"] == runs
        done = invoke("-", "-o", "-", input=gzip.compress(data))
        assert json.loads(done.stdout.splitlines()[-1])["facts"]["runs"] == runs
        assert "would it help?" in done.stderr

    def test_its_lengths_stand_in_where_the_log_tells_none(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("abc"), line("abc", 1))
        lengths = ("--document-tokens", "100", "--prefix-tokens", "10", "--suffix-tokens", "5", "--output-tokens", "7")
        log = as_json(path, *lengths)["log"]
        assert log["prompt_tokens_mean"] == 10 + 300 + 5
        assert log["longest_tokens"] == 10 + 300 + 5 + 7
        assert log["working_set_tokens"] == 300

    def test_its_options_choose_what_is_replayed(self, log_file: Path) -> None:
        options = ("--policy", "prefix", "--policy", "greedy", "--capacity-tokens", "8000", "--capacity-tokens", "30%")
        found = as_json(log_file, *options, "--no-sweep", "--block-size", "32", "--top-k", "3", "--limit", "50")
        assert found["log"]["requests"] == 50
        assert found["log"]["documents_per_request_mean"] == 3
        assert found["engine"]["block_size"] == 32
        replayed = product([each["tokens"] for each in found["capacities"]], ["retrieval", "prefix", "greedy"])
        assert [(run["capacity_tokens"], run["policy"]) for run in found["runs"]] == list(replayed)
        assert {capacity["name"] for capacity in found["capacities"]} == {"8,000 tokens", "30 %"}
        assert all(run["cached_tokens"] % 32 == 0 for run in found["runs"])
        assert len(as_json(log_file, "--sweep")["capacities"]) > 2

    def test_its_rates_bring_requests_at_their_recorded_times(self, log_file: Path) -> None:
        found = as_json(log_file, "--prefill-rate", "2000", "--decode-rate", "8")
        assert found["engine"]["timed"]
        assert all(run["in_flight_mean"] > 2 for run in found["runs"])
        for saving in found["savings"]:
            expected = pytest.approx(saving["tokens_per_1000_requests"] / 2000, abs=1e-3)
            assert saving["seconds_per_1000_requests"] == expected
        in_turn = as_json(log_file)
        assert not in_turn["engine"]["timed"]
        assert all(run["in_flight_mean"] == 1 for run in in_turn["runs"])
        assert in_turn["savings"][0]["seconds_per_1000_requests"] is None

    def test_its_processes_change_nothing(self, log_file: Path) -> None:
        found = as_json(log_file, "--processes", "2")
        assert found["speed"]["processes"] == 2
        assert found["runs"] == as_json(log_file)["runs"]

    def test_says_that_lines_were_sorted(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("ab", 5), line("ab", 3), line("ab", 4))
        assert "Note: lines earlier than the line before them: 1; sorted by time." in invoke(path).stdout

    def test_a_files_name_is_no_markup(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("ab"), name="[red]log.jsonl")
        assert "[red]log.jsonl" in invoke(path).stdout

    @pytest.mark.slow
    def test_the_same_log_gives_the_same_figures_on_every_hash_seed(self, log_file: Path, python: Any) -> None:
        found = []
        for seed in ("0", "1", "4242"):
            done = python(*COMMAND, log_file, "-o", "-", PYTHONHASHSEED=seed)
            assert done.returncode == 0, done.stderr
            report = json.loads(done.stdout.splitlines()[-1])["facts"]
            found.append({name: report[name] for name in ("log", "overlap", "runs", "savings", "answer")})
        assert found[0] == found[1] == found[2]

    def test_needs_none_of_the_extras(self, log_file: Path, python: Any) -> None:
        blocked = ("numpy", "scipy", "matplotlib", "torch", "vllm", "transformers", "bm25s", "httpx2", "openai")
        done = python(*COMMAND, log_file, blocked=blocked)
        assert done.returncode == 0, done.stderr
        assert "would it help?" in done.stdout


class TestTheCommandRefuses:
    def test_a_bad_line_in_one_line(self, tmp_path: Path) -> None:
        path = written(tmp_path, line("ab"), line("ab", tokens=[1]))
        expected = f'Error: {path}:2: "tokens" has 1 entries and "documents" has 2: give one for each\n'
        assert refusal(path) == expected

    def test_bad_standard_input(self) -> None:
        example = 'a line looks like {"time": 12.5, "documents": ["a", "b"], "tokens": [210, 190]}'
        assert refusal("-", input=b"{}") == f'Error: <stdin>:1: "time" is missing: add it: {example}\n'
        assert refusal("-", input=b"") == f"Error: <stdin>: no requests in it: {example}\n"
        assert "is no capacity" in refusal("-", "--capacity-tokens", "lots", input=b"no log"), "before it is read"

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            *(
                (("--policy", policy), f"policy '{policy}' cannot be replayed: choose from retrieval, greedy, prefix")
                for policy in ("oracle", "events", "none", "queue", "fastest")
            ),
            *(
                (("--capacity-tokens", each), f"'{each}' is no capacity: give tokens")
                for each in ("lots", "0", "-5", "0%", "1e3")
            ),
            (("--block-size", "0"), "--block-size"),
            (("--no-sweep",), "no capacity to replay with: give --capacity-tokens, or leave out --no-sweep"),
            (("--suffix-tokens", "0"), "--suffix-tokens"),
            (("--document-tokens", "99999999999"), "99999999999 is not in the range 0<=x<=10000000"),
            (("--prefill-rate", "0"), "--prefill-rate"),
            (("--decode-rate", "inf"), "must be finite"),
            (("--prefill-rate", "nan"), "finite"),
            (("--plot", "plot.svg"), "--plot draws a PNG: give FILE.png"),
            (("--plot", "/no/such/folder/plot.png"), "in a writable folder"),
        ],
    )
    def test_what_cannot_be_done(self, log_file: Path, options: tuple[str, ...], problem: str) -> None:
        assert problem in refusal(log_file, *options)


class TestThePlot:
    @pytest.fixture(autouse=True)
    def matplotlib(self) -> None:
        pytest.importorskip("matplotlib")

    def test_shows_the_figures(self) -> None:
        from ragorder.eval.replay.plot import draw_report

        report = replay(exported(make_workload("paper-shuf", 0), limit=200), capacities=[9_000])
        figure = draw_report(report)
        by_capacity, along = figure.axes
        assert by_capacity.get_ylabel() == "cached tokens, % of prompt tokens"
        assert along.get_title() == "Along the log, cache 9,000 tokens"
        lines = {drawn.get_label(): list(drawn.get_ydata()) for drawn in by_capacity.lines}
        for policy in report.policies:
            expected = [100 * report.at(policy, capacity).cached_ratio for capacity in report.capacities]
            assert lines[policy_words(policy)] == expected
        tenths = {drawn.get_label(): list(drawn.get_ydata()) for drawn in along.lines}
        assert tenths["ragorder (free)"] == [100 * ratio for ratio in report.at("free", report.focus).tenths]
        bounds = [ydata[0] for label, ydata in lines.items() if label.startswith("bound")]
        assert bounds == [100 * report.overlap.bound_ratio, 100 * report.overlap.one_prompt_ratio]

    def test_nothing_of_it_is_cut_off(self) -> None:
        from ragorder.eval.replay.plot import draw_report

        report = replay(exported(make_workload("paper-shuf", 0), limit=200), policies=REPLAY_POLICIES)
        figure = draw_report(report)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        for box in (part.get_tightbbox() for part in (legend, *figure.axes)):
            assert min(box.x0, box.y0) >= 0 and box.x1 <= 1_200 and box.y1 <= 600

    def test_is_a_png_also_of_a_single_request(self, tmp_path: Path) -> None:
        from matplotlib.image import imread

        path = written(tmp_path, line("ab"))
        assert invoke(path, "--plot", tmp_path / "plot.png").exit_code == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        assert imread(tmp_path / "plot.png").shape[:2] == (600, 1_200)

    def test_without_matplotlib_names_the_extra_before_anything_is_read(self, tmp_path: Path, python: Any) -> None:
        done = python(*COMMAND, "-", "--plot", tmp_path / "plot.png", blocked=("matplotlib",), input="no log")
        assert done.returncode == 1
        assert done.stderr == "Error: a plot needs matplotlib: in a clone of ragorder, pip install '.[eval]'\n"
