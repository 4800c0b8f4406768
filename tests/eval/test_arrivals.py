"""Arrivals of requests: at random, in steps, and as traces of services have them."""

from __future__ import annotations

import gzip
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrived import AZURE, MOONCAKE, TRACES, written

from ragorder import Document
from ragorder.eval.data.arrivals import Arrival, Arrivals, ArrivalsError, load_arrivals, poisson_arrivals, replicate
from ragorder.eval.data.trace import trace_of_corpus

pytestmark = pytest.mark.merge


def times(arrivals: Sequence[Arrival]) -> list[float]:
    return [arrival.at_s for arrival in arrivals]


class TestPoissonArrivals:
    @pytest.mark.parametrize("rate", [0.5, 300.0])
    def test_begin_at_zero_and_come_at_their_rate(self, rate: float) -> None:
        drawn = times(poisson_arrivals(rate, 20_001, seed=2))
        gaps = [after - before for before, after in pairwise(drawn)]
        assert drawn[0] == 0 and min(gaps) > 0
        assert 20_000 / drawn[-1] == pytest.approx(rate, rel=0.03)
        # As many gaps are longer than the mean as an exponential distribution has: 1 / e.
        assert sum(gap * rate > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)

    def test_are_those_of_their_seed_however_many_are_drawn(self) -> None:
        assert poisson_arrivals(2.0, 50, seed=4) == poisson_arrivals(2.0, 50, seed=4)
        assert poisson_arrivals(2.0, 50, seed=4) != poisson_arrivals(2.0, 50, seed=5)
        assert poisson_arrivals(2.0, 50, seed=4)[:20] == poisson_arrivals(2.0, 20, seed=4)


class TestTraces:
    @pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
    def test_azures_have_times_and_lengths(self, tmp_path: Path, name: str) -> None:
        arrivals = load_arrivals(written(tmp_path, AZURE, name))
        assert times(arrivals) == pytest.approx([0, 4.314579, 4.541577])
        assert [arrival.output_tokens for arrival in arrivals] == [44, 109, 55]

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
    def test_mooncakes_are_in_milliseconds(self, tmp_path: Path, name: str) -> None:
        arrivals = load_arrivals(written(tmp_path, MOONCAKE, name))
        assert arrivals == [Arrival(0, 500), Arrival(0.027, None), Arrival(3, 7)]

    def test_unsorted_or_empty_lines_windows_line_ends_and_a_byte_order_mark_change_nothing(
        self, tmp_path: Path
    ) -> None:
        header, *lines = AZURE.splitlines()
        for text in ("\n".join([header, *lines[1:], lines[0]]), "\ufeff" + AZURE.replace("\n", "\r\n\r\n")):
            assert load_arrivals(written(tmp_path, text, "odd.csv")) == load_arrivals(written(tmp_path, AZURE))

    @pytest.mark.parametrize(
        ("name", "text", "place"),
        [
            ("azure.csv", "2023-11-16 18:15:50,396", ":5: expected a line such as 2023-11-16 18:15:46.68,374,44"),
            ("azure.csv", "2023-11-16 18:15:50,396,1,2", ":5: expected a line such as"),
            ("azure.csv", "yesterday,396,109", ":5: expected a line such as"),
            ("azure.csv", "2023-11-16 18:15:50+00:00,396,109", ":5: expected a line such as"),
            ("azure.csv", "2023-11-16 18:15:50,396,many", ":5: expected a line such as"),
            ("azure.csv", "2023-11-16 18:15:50,396,-1", ":5: expected a line such as"),
            ("mooncake.jsonl", "{", ":4: "),
            ("mooncake.jsonl", '{"output_length": 5}', ":4: "),
            ("mooncake.jsonl", '{"timestamp": 5, "output_length": -5}', ":4: "),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, name: str, text: str, place: str) -> None:
        path = written(tmp_path, f"{AZURE if name == 'azure.csv' else MOONCAKE}{text}\n", name)
        with pytest.raises(ArrivalsError) as error:
            load_arrivals(path)
        assert str(error.value).startswith(f"{path}{place}")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"\xff\xfe\x00", ""),
            (gzip.compress(b"\n\n"), ""),
            (gzip.compress(AZURE.splitlines()[0].encode()), ""),
            (gzip.compress(b"time,length\n1,2\n"), ":1: expected the columns TIMESTAMP,ContextTokens,GeneratedTokens"),
        ],
        ids=["text", "empty", "head", "columns"],
    )
    def test_a_file_without_arrivals_is_refused_by_name(self, tmp_path: Path, content: bytes, said: str) -> None:
        path = tmp_path / "trace.csv.gz"
        path.write_bytes(content)
        with pytest.raises(ArrivalsError) as error:
            load_arrivals(path)
        assert f"{path}{said}" in str(error.value)

    @pytest.mark.parametrize(
        ("name", "count", "seconds"),
        [
            ("azure_llm_2023_conv.csv.gz", 19_366, 3_501.7),
            ("azure_llm_2023_code.csv.gz", 8_819, 3_435.9),
            ("mooncake_conversation.jsonl.gz", 12_031, 3_537.0),
        ],
    )
    def test_the_published_ones_are_read_whole(self, name: str, count: int, seconds: float) -> None:
        if not (TRACES / name).exists():
            pytest.skip("needs the traces of ../shared")
        arrivals = load_arrivals(TRACES / name)
        assert (len(arrivals), arrivals[0].at_s) == (count, 0)
        assert arrivals[-1].at_s == pytest.approx(seconds, abs=0.1)
        assert min(arrival.output_tokens or 0 for arrival in arrivals) >= 1


class TestPlayingATrace:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        return written(tmp_path, AZURE)

    def test_time_scale_divides_the_times_and_nothing_else(self, trace: Path) -> None:
        plain, fast = (Arrivals.parse(str(trace), time_scale=scale, replicas=3).draw(9, 0) for scale in (1.0, 8.0))
        assert times(fast) == pytest.approx([at_s / 8 for at_s in times(plain)])
        assert [each.output_tokens for each in fast] == [each.output_tokens for each in plain]
        assert Arrivals.parse(str(trace)).draw(2, 0) == load_arrivals(trace)[:2]

    @given(
        st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 3), st.integers(1, 60)
    )
    def test_replicas_stay_between_their_arrival_and_the_next(
        self, drawn: list[int], replicas: int, seed: int, limit: int
    ) -> None:
        trace = [Arrival(float(at_s), number) for number, at_s in enumerate(sorted(drawn))]
        spread = replicate(trace, replicas, seed)
        assert times(spread) == sorted(times(spread))
        for number, arrival in enumerate(trace):
            own = [each.at_s for each in spread if each.output_tokens == number]
            assert len(own) == replicas
            assert min(own) == arrival.at_s
            if number + 1 < len(trace):
                assert max(own) <= trace[number + 1].at_s
        count = min(limit, len(spread))
        first = Arrivals("made", trace=trace, replicas=replicas).draw(count, seed)
        if count <= (len(trace) - 1) * replicas:
            assert first == spread[:count]

    def test_replicas_are_those_of_their_seed(self, trace: Path) -> None:
        arrivals = Arrivals.parse(str(trace), replicas=4)
        assert arrivals.draw(12, 1) == arrivals.draw(12, 1) != arrivals.draw(12, 2)


class TestSteps:
    TEXT = "steps:4@20m,8@20m,12@20m,16@20m"

    def test_each_has_its_rates_requests_within_its_time(self) -> None:
        """RAGDoll's Figure 7."""
        arrivals = Arrivals.parse(self.TEXT)
        assert (arrivals.name, arrivals.count, arrivals.output_tokens_mean) == (self.TEXT, 800, None)
        at_s = times(arrivals.draw(800, seed=1))
        assert at_s == sorted(at_s)
        in_step = [sum(1200 * step <= each < 1200 * (step + 1) for each in at_s) for step in range(4)]
        assert in_step == [80, 160, 240, 320]

    def test_come_at_random_within_a_step(self) -> None:
        """Gaps of a Poisson process: they scatter as much as they are wide."""
        at_s = times(Arrivals.parse("steps:600@30m").draw(18_000, seed=2))
        gaps = [after - before for before, after in pairwise(at_s)]
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.01)
        assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.05)

    def test_are_those_of_their_seed_and_fewer_are_the_first_of_them(self) -> None:
        arrivals = Arrivals.parse(self.TEXT)
        assert arrivals.draw(800, 1) == arrivals.draw(800, 1) != arrivals.draw(800, 2)
        assert arrivals.draw(100, 1) == arrivals.draw(800, 1)[:100]
        with pytest.raises(ArrivalsError, match=r"has 800 arrivals: lower --limit \(801\)"):
            arrivals.draw(801, 1)

    def test_may_pause_and_last_seconds_or_hours(self) -> None:
        at_s = times(Arrivals.parse("steps: 30@90s, 0@1h, 2.5@2m").draw(50, 0))
        assert [each < 90 for each in at_s] == [True] * 45 + [False] * 5
        assert all(3690 <= each < 3810 for each in at_s[45:])

    @pytest.mark.parametrize(
        "step", ["", "4", "4@", "4@20", "4@m", "@20m", "x@20m", "-1@20m", "nan@1m", "4@0m", "4@-1m"]
    )
    def test_that_are_malformed_are_refused(self, step: str) -> None:
        with pytest.raises(ArrivalsError, match=r"is no step: give requests a minute.*such as steps:4@20m,8@20m"):
            Arrivals.parse(f"steps:4@20m,{step}")

    def test_without_a_request_are_refused_and_so_are_replicas(self) -> None:
        with pytest.raises(ArrivalsError, match="has no requests"):
            Arrivals.parse("steps:0@20m,1@10s")
        with pytest.raises(ArrivalsError, match="with steps choose other rates"):
            Arrivals.parse("steps:4@20m", replicas=2)


class TestCorporaUnderArrivals:
    def test_start_again_from_the_first_question(self) -> None:
        from ragorder.eval.data.corpora import Corpus
        from ragorder.eval.data.corpora.base import CorpusQuestion

        documents = [Document(f"d{n}", "x" * 400) for n in range(4)]
        questions = [CorpusQuestion(f"q{n}", f"{n}?") for n in range(3)]
        corpus = Corpus("small", documents, questions, [[0, 1], [1, 2], [2, 3]])
        options: dict[str, Any] = {"top_k": 2, "order": "data", "seed": 0}
        repeated = trace_of_corpus(corpus, **options, limit=7, repeat=True)
        assert [request.question for request in repeated.requests] == ["0?", "1?", "2?", "0?", "1?", "2?", "0?"]
        assert len(trace_of_corpus(corpus, **options, limit=7).requests) == 3
        assert len(trace_of_corpus(corpus, **options, limit=2, repeat=True).requests) == 2
