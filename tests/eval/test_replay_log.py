"""Logs of requests: what they may look like, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import re
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run_command
from support.replayed import Line, line, packed, rankings, read, written
from support.rings import examples, length

from ragorder.eval.cli.replay import replay as command
from ragorder.eval.replay import DefaultLengths, LogError, read_log

pytestmark = pytest.mark.merge

invoke = partial(run_command, command, env={"COLUMNS": "160"})


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

    def test_may_be_an_open_file_which_stays_open(self) -> None:
        data = io.BytesIO(packed(line("ab")))
        assert rankings(read_log(data)) == [[0, 1]]
        assert not data.closed

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
BAD_LINES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"hunter2", "not JSON (column 1: Expecting value): a line looks like"),
    "cut off": (b'{"time": 1, "documents": ["hunter2', "not JSON"),
    "no object": ([SECRET], "must be an object, not a list: a line looks like"),
    "no time": ({"documents": [SECRET]}, '"time" is missing: add it'),
    "a time that is true": (line(time=True), '"time" must be an integer, a number or a string, not a boolean'),
    "a huge integer as time": (b'{"time": %s, "documents": []}' % (b"9" * 400), "too large"),
    "a time in milliseconds": (line(time=1738324800000), "divide milliseconds by 1,000"),
    "a time of the far past": (line(time=-1e12), "too large"),
    "a date that is none": (line(time=SECRET), "not an ISO 8601 date and time"),
    "no documents": ({"time": 1}, '"documents" is missing: add it: a line looks like {"time": 12.5, "documents"'),
    "a document that is nothing": (line([None]), '"documents[0]" must be a string, an integer or an object, not null'),
    "a document without an id": (line([{"tokens": 5}]), '"documents[0].id" is missing'),
    "lengths that are a string": (line(tokens=SECRET), '"tokens" must be a list or an integer, not a string'),
    "a length that is a string": (line(tokens=[1, SECRET]), '"tokens[1]" must be an integer, not a string'),
    "a negative length": (line(tokens=[1, -1]), '"tokens[1]" must be at least 0'),
    "a length beyond measure": (line(tokens=[1, 10**30]), '"tokens[1]" must be at most 10,000,000'),
    "a document's length that is none": (line([{"id": "a", "tokens": -2}]), '"documents[0].tokens" must be at least 0'),
    "a negative prefix": (line(prefix_tokens=-1), '"prefix_tokens" must be at least 0'),
    "no suffix at all": (line(suffix_tokens=0), '"suffix_tokens" must be at least 1'),
    "a negative answer": (line(output_tokens=-1), '"output_tokens" must be at least 0'),
    "a prompt shorter than its documents": (
        line(tokens=100, prompt_tokens=264),
        '"prompt_tokens" must be more than prefix and documents together, which are 264 tokens',
    ),
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

    def test_without_line_breaks_is_not_read_whole(self) -> None:
        with pytest.raises(LogError, match="<stdin>:1: longer than 16 MiB: write one object a line"):
            read_log(io.BytesIO(b" " * (1 << 25)))

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
