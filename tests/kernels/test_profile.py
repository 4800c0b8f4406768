"""What a prefill takes: the profile of it, on its grid and outside, its file, and how it is measured on a server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_command
from support.far_server import BLOCK, FarServer

from ragorder.cli import main
from ragorder.eval.engines.base import EngineError
from ragorder.eval.suites.profiling.experiment import ProfileRecord
from ragorder.eval.suites.profiling.measuring import (
    Grid,
    ProfiledServer,
    find_profiled,
    measure_profile,
    own_server,
    plan_grid,
)
from ragorder.trie.profile import LINEAR, PrefillProfile

HUGE = 10**400
SMALL = ["--cached", "0,32", "--new", "16,48", "--repeats", "1"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[float]]]:
    """A grid and times as they might be measured, noise and all."""
    cached = sorted(draw(st.sets(st.integers(0, 20_000), min_size=1, max_size=5)))
    new = sorted(draw(st.sets(st.integers(1, 20_000), min_size=1, max_size=5)))
    times = st.lists(st.floats(0, 100), min_size=len(new), max_size=len(new))
    return cached, new, draw(st.lists(times, min_size=len(cached), max_size=len(cached)))


profiles = tables().map(lambda table: PrefillProfile.measured(*table))
counts = st.integers(0, 50_000) | st.sampled_from([0, 1, HUGE])


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


class TestAProfile:
    @given(profiles)
    def test_is_what_was_measured_on_the_grid(self, profile: PrefillProfile) -> None:
        for (row, cached), (column, new) in product(enumerate(profile.cached_tokens), enumerate(profile.new_tokens)):
            assert profile(cached, new) == profile.seconds[row][column]

    @pytest.mark.parametrize(
        ("cached_axis", "new_axis", "seconds", "points"),
        [
            # Bilinear within the grid.
            (
                (0, 100),
                (10, 30),
                ((1.0, 3.0), (2.0, 8.0)),
                [(50, 20, 3.5), (25, 10, 1.25), (0, 15, 1.5), (75, 15, 0.25 * 1.5 + 0.75 * 3.5)],
            ),
            # Beyond it the last slope, with more cached tokens no flatter.
            (
                (0, 100),
                (100, 200, 400),
                ((1.0, 2.0, 6.0), (2.0, 3.0, 7.0)),
                [(0, 1400, 26.0), (600, 100, 7.0), (600, 1400, 32.0)],
            ),
            ((0, 100), (100, 200), ((1.0, 9.0), (9.0, 9.0)), [(100, 300, 17.0), (0, 300, 17.0)]),
            # Before it the fixed costs, and never less than nothing.
            ((0,), (100, 200), ((0.2, 0.3),), [(0, 0, 0.1), (0, 50, 0.15)]),
            ((0,), (100, 200), ((0.1, 0.3),), [(0, 0, 0.0), (0, 50, 0.05)]),
            ((64, 128), (100,), ((0.5,), (0.7,)), [(0, 100, 0.5), (63, 100, 0.5)]),
            # A single time is in proportion.
            ((0,), (100,), ((0.5,),), [(999, 0, 0.0), (999, 50, 0.25), (999, 100, 0.5), (999, 300, 1.5)]),
        ],
    )
    def test_at_some_points(self, cached_axis: Any, new_axis: Any, seconds: Any, points: Any) -> None:
        profile = PrefillProfile(cached_axis, new_axis, seconds)
        assert [profile(cached, new) for cached, new, _ in points] == [near(expected) for *_, expected in points]

    @given(profiles, counts, counts, counts, counts)
    def test_never_falls_as_tokens_are_added(
        self, profile: PrefillProfile, cached: int, new: int, more_cached: int, more_new: int
    ) -> None:
        seconds = profile(cached, new)
        for more in (profile(cached + more_cached, new), profile(cached, new + more_new)):
            assert more >= seconds or more == near(seconds)

    @given(profiles, counts, counts)
    def test_is_a_time_for_any_counts(self, profile: PrefillProfile, cached: int, new: int) -> None:
        for seconds in (profile(cached, new), profile(-cached, new), profile(cached, -new), profile.cost(cached, new)):
            assert 0 <= seconds < math.inf
        assert profile(-cached, -new) == profile(0, 0)

    @given(profiles, counts, st.integers(0, 50_000))
    def test_costs_its_share_of_each_new_token(self, profile: PrefillProfile, cached: int, new: int) -> None:
        assert profile.cost(cached, new) == profile(cached, max(1, new)) / max(1, new)

    @given(counts, st.integers(1, 1_000_000))
    def test_without_measurements_every_token_costs_the_same(self, cached: int, new: int) -> None:
        assert LINEAR(cached, new) == near(50e-6 * new)
        assert LINEAR.cost(cached, new) == near(50e-6)
        assert LINEAR(cached, 0) == 0


class TestMeasuredTimes:
    @given(tables())
    def test_are_made_to_ascend(self, table: tuple[list[int], list[int], list[list[float]]]) -> None:
        made = PrefillProfile.measured(*table)
        lines = [*made.seconds, *zip(*made.seconds, strict=True)]
        assert all(before <= after for line in lines for before, after in pairwise(line))
        measured = [time for row in table[2] for time in row]
        times = [time for row in made.seconds for time in row]
        assert sum(times) == pytest.approx(sum(measured), abs=1e-6), "means take the place of what they are means of"
        assert min(measured) - 1e-9 <= min(times) and max(times) <= max(measured) + 1e-9

    @given(profiles)
    def test_that_ascend_are_left_alone(self, profile: PrefillProfile) -> None:
        again = PrefillProfile.measured(profile.cached_tokens, profile.new_tokens, profile.seconds)
        assert again == profile
        assert again.facts == {"pooled": {"cells": 0, "largest_s": 0.0, "largest_share": 0.0}}

    def test_that_fall_become_their_mean_and_facts_count_them(self) -> None:
        made = PrefillProfile.measured((0,), (1, 2, 3), [[2.0, 1.0, 4.0]], {"engine": "slow"})
        assert made.seconds == ((1.5, 1.5, 4.0),)
        assert made.facts == {"engine": "slow", "pooled": {"cells": 2, "largest_s": 0.5, "largest_share": 0.5}}
        made = PrefillProfile.measured((0, 64), (1, 2), [[2.0, 3.0], [1.0, 4.0]])
        assert made.seconds == ((1.5, 3.0), (1.5, 4.0))


def changed(**fields: Any) -> dict[str, Any]:
    profile = PrefillProfile((0, 64), (1, 2), ((1.0, 2.0), (2.0, 3.0)), {"engine": "e"})
    return {**profile.as_json(), **fields}


class TestAFile:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        profile = PrefillProfile((0, 64), (1, 2), ((0.1, 0.2), (0.3, 1 / 3)), {"engine": "größer", "seed": 0})
        profile.to_file(tmp_path / "profile.json")
        again = PrefillProfile.from_file(tmp_path / "profile.json")
        assert again == profile
        assert again.facts == {"engine": "größer", "seed": 0}

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"{", "this is not JSON"),
            (b"[" * 100_000, "this is not JSON"),
            (b"[]", "not a prefill profile"),
            (changed(format="other"), "not a prefill profile"),
            (changed(version=2), "version 2, but this ragorder reads 1"),
            (changed(seconds=None), "a list of rows"),
            (changed(cached_tokens="0,64"), "lists of token counts"),
            (changed(facts=[]), "leave it out"),
            (changed(cached_tokens=[]), "cached_tokens must be one or more ascending whole numbers"),
            (changed(cached_tokens=[-1, 0]), "0 or more"),
            (changed(new_tokens=[0, 1]), "new_tokens must be one or more ascending whole numbers of tokens, 1 or more"),
            (changed(new_tokens=[True, 2]), "whole numbers"),
            (changed(new_tokens=[1, HUGE]), "whole numbers"),
            (changed(seconds=[[1.0, 2.0]]), "a row for each of the 2 cached_tokens"),
            (changed(seconds=[[1.0, 2.0], [2.0]]), "a time for each of the 2 new_tokens"),
            (changed(seconds=[[1.0, 2.0], [2.0, -3.0]]), "seconds must be numbers from 0"),
            (changed(seconds=[[1.0, 2.0], [2.0, math.nan]]), "this is not JSON"),
            (changed(seconds=[[1.0, 2.0], [2.0, HUGE]]), "seconds must be numbers from 0"),
            (changed(seconds=[[1.0, 2.0], [2.0, False]]), "seconds must be numbers from 0"),
            (changed(seconds=[[1.0, 2.0], [2.0, 1.0]]), "fall from 2 to 1 though tokens are added"),
            (changed(seconds=[[1.0, 2.0], [0.5, 3.0]]), "PrefillProfile.measured"),
        ],
    )
    def test_that_holds_none_is_refused(self, tmp_path: Path, content: Any, said: str) -> None:
        path = tmp_path / "profile.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(ValueError) as refusal:
            PrefillProfile.from_file(path)
        assert str(refusal.value).startswith(f"{path}: ")
        assert said in str(refusal.value)

    def test_that_does_not_exist_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path / "missing.json", tmp_path):
            with pytest.raises(ValueError, match="ragorder profile"):
                PrefillProfile.from_file(path)


def known(longest_tokens: int = 8192, block_size: int = BLOCK) -> ProfiledServer:
    return ProfiledServer("http://far", "m", "e", block_size, longest_tokens)


class TestAGrid:
    @given(st.integers(100, 200_000), st.sampled_from([1, 16, 32]))
    def test_fits_into_a_prompt_and_takes_up_most_of_it(self, longest: int, block_size: int) -> None:
        grid = plan_grid(known(longest, block_size))
        assert grid.cached_tokens[0] == 0 and grid.new_tokens[0] == 16
        assert all(tokens % block_size == 0 for tokens in grid.cached_tokens)
        assert longest // 2 < grid.cached_tokens[-1] + grid.new_tokens[-1] < longest
        for axis in (grid.cached_tokens[1:], grid.new_tokens):
            assert all(before < after <= 5 * before for before, after in pairwise(axis))
        assert grid.notes == ()

    def test_is_a_series_by_itself(self) -> None:
        grid = plan_grid(known(8192, 32))
        assert grid.new_tokens == (16, 64, 256, 1024, 4095)
        assert grid.cached_tokens == (0, 64, 256, 1024, 4096)

    @given(st.integers(1, 8191))
    def test_is_completed_by_what_still_fits(self, tokens: int) -> None:
        cached, new = plan_grid(known(), cached=[tokens]), plan_grid(known(), new=[tokens])
        assert cached.cached_tokens == (tokens // BLOCK * BLOCK,)
        assert new.new_tokens == (tokens,)
        for grid in (cached, new):
            assert grid.cached_tokens[-1] + grid.new_tokens[-1] <= 8191

    @pytest.mark.parametrize(
        ("cached", "new", "said"),
        [
            ([0, 8192], [16], "8,192 cached and 16 new tokens make a prompt that does not fit: the server takes 8,191"),
            ([0], [8192], "lower --cached or --new"),
            ([8192], None, "raise the server's --max-model-len"),
            (None, [8192], "raise the server's --max-model-len"),
            ([-16], [16], "--cached some of 0 or more"),
            ([0], [0], "--new some of 1 or more"),
            ([], [16], "needs token counts"),
            ([0], [], "needs token counts"),
        ],
    )
    def test_that_is_impossible_is_refused(self, cached: list[int] | None, new: list[int] | None, said: str) -> None:
        with pytest.raises(EngineError, match=said):
            plan_grid(known(), cached, new)

    def test_needs_room_for_some_blocks(self) -> None:
        with pytest.raises(EngineError, match="less than three of its blocks of 16"):
            plan_grid(known(48))


@pytest.fixture
def far() -> Iterator[FarServer]:
    pytest.importorskip("httpx2")
    pytest.importorskip("prometheus_client")
    with FarServer() as server:
        yield server


def measured(far: FarServer, **options: Any) -> tuple[PrefillProfile, list[tuple[int, str, tuple[int, ...]]]]:
    """A profile of two by two cells, and what was sent for it: tokens, salt and prompt of each request."""
    profile = measure_profile(find_profiled(far.base_url), Grid((0, 32), (16, 48)), **{"repeats": 2} | options)
    return profile, [(len(body["prompt"]), body["cache_salt"], tuple(body["prompt"])) for body in far.bodies]


class TestMeasuring:
    def test_has_a_time_for_each_cell_and_facts_of_how_it_was_measured(self, far: FarServer) -> None:
        steps: list[tuple[str, int]] = []

        def progress(description: str, count: int) -> Callable[[], None]:
            return lambda: steps.append((description, count))

        profile, _ = measured(far, seed=3, progress=progress)
        assert (profile.cached_tokens, profile.new_tokens) == ((0, 32), (16, 48))
        assert all(0 < seconds < 10 for row in profile.seconds for seconds in row)
        assert steps == [("profile", 12)] * 12
        facts = profile.facts
        assert (facts["engine"], facts["model"], facts["block_size"]) == ("vllm 0.32.0", "far", 16)
        assert (facts["repeats"], facts["seed"], facts["sent_again"]) == (2, 3, 0)
        assert facts["longest_tokens"] == 100 * BLOCK, "the cache is smaller than a prompt may be"
        assert facts["date"] == facts["environment"]["time"]
        assert 0 <= facts["spread_share"]["median"] <= facts["spread_share"]["largest"]
        again = PrefillProfile.measured((0, 32), (16, 48), facts["medians_s"])
        assert again == profile
        assert again.facts["pooled"] == facts["pooled"]

    def test_sends_the_prefix_just_before_and_fresh_tokens_after_it(self, far: FarServer) -> None:
        _, sent = measured(far)
        assert all(body["max_tokens"] == 1 and body["stream"] for body in far.bodies)
        prompts = [prompt for _, _, prompt in sent]
        long = [index for index in range(1, len(prompts)) if len(prompts[index - 1]) == 32]
        assert len(long) == 6, "two for each repeat and for the warm-up"
        for index in long:
            assert prompts[index][:32] == prompts[index - 1]
            assert sent[index][1] == sent[index - 1][1]
        assert len({prompts[index][32:] for index in long}) == 6
        assert len({sent[index][1] for index in long}) == 2, "a salt for each cell"

    def test_takes_the_cells_in_another_order_each_round_drawn_by_the_seed(self, far: FarServer) -> None:
        def order(seed: int) -> list[int]:
            far.bodies.clear()
            return [tokens for tokens, _, _ in measured(far, repeats=3, seed=seed)[1]]

        first = order(1)
        assert order(1) == first != order(2)
        rounds = [first[-18:-12], first[-12:-6], first[-6:]]
        assert [sorted(each) for each in rounds] == [[16, 32, 32, 48, 48, 80]] * 3
        assert len(set(map(tuple, rounds))) > 1

    def test_repeats_what_was_not_cached(self, far: FarServer) -> None:
        checks = 4
        # The second request of the cell with a prefix of 32 tokens, in the warm-up.
        far.forgets = lambda number: number == checks + 2 + 2
        profile, sent = measured(far)
        assert profile.facts["sent_again"] == 1
        salts = [salt for tokens, salt, _ in sent if tokens == 32]
        assert len(set(salts)) == 3, "with a salt of its own"

    def test_gives_up_on_a_server_that_never_has_the_prefix(self, far: FarServer) -> None:
        far.forgets = lambda number: number > 4
        with pytest.raises(EngineError, match=r"the server had 0 tokens cached of 32 .* in the last of 3 tries: see"):
            measured(far)

    def test_says_which_prompt_a_server_refuses(self, far: FarServer) -> None:
        far.longest = 1000
        with pytest.raises(EngineError, match=r"a prompt of 1,032 tokens \(HTTP 400\): see its log, or lower"):
            measure_profile(find_profiled(far.base_url), Grid((32,), (1000,)))

    def test_asks_for_the_block_size_where_the_server_does_not_say(self, far: FarServer) -> None:
        far.pages.clear()
        del far.models[0]["max_model_len"]
        with pytest.raises(EngineError, match="for a profile: --block-size"):
            find_profiled(far.base_url)
        found = find_profiled(far.base_url, served_model="other", api_key="sk", block_size=64)
        assert found == ProfiledServer(far.base_url, "other", "OpenAI-compatible server", 64, 8192, "sk")
        assert "sk" not in repr(found)

    @pytest.mark.vllm
    def test_of_a_server_of_its_own_is_of_one_with_room_for_some_prompts(self, vllm_model: Path) -> None:
        server = own_server(vllm_model)
        assert (server.block_size, server.capacity_tokens) == (32, 4 * 4096)
        assert own_server(vllm_model, block_size=64).block_size == 64


run = partial(run_command, main, "profile")


def refusal(*arguments: str | Path) -> str:
    done = run(*arguments)
    assert done.exit_code != 0, done.output
    return done.stderr


class TestTheSuite:
    def test_measures_the_same_and_shows_it(self, far: FarServer, tmp_path: Path) -> None:
        pytest.importorskip("scipy")
        changes = ["--set", "cached=0,40", "--set", "new=16,48", "--set", "repeats=2", "--set", "block_size=16"]
        command = ["eval", "run", "prefill-profile", "-o", str(tmp_path), "--engine", "openai", *changes]
        done = CliRunner().invoke(main, [*command, "--base-url", far.base_url])
        assert done.exit_code == 0, done.output
        lines = map(json.loads, (tmp_path / "results.jsonl").read_text("utf-8").splitlines())
        (line,) = [ProfileRecord.model_validate(line) for line in lines if line["type"] == "profile"]
        profile = line.profile
        assert (profile.cached_tokens, profile.new_tokens) == ((0, 32), (16, 48))
        assert ProfileRecord.rows_of(profile) == line.rows
        assert (line.facts["repeats"], line.facts["seed"], line.engine["block_size"]) == (2, 0, 16)
        shown = CliRunner().invoke(main, ["report", str(tmp_path), "--markdown", "-"]).output
        assert f"| 32 | {1e3 * profile(32, 16):,.1f}" in shown

    def test_needs_a_server(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(main, ["eval", "run", "prefill-profile", "-o", str(tmp_path)])
        assert done.exit_code == 0 and "1 unavailable" in done.output


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        monkeypatch.setenv("COLUMNS", "200")

    def test_writes_the_profile_and_shows_it(self, far: FarServer, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        far.models[1]["max_model_len"] = 1024
        server = ["--base-url", f"{far.base_url}/v1", "--served-model", "other", "--api-key", "sk-secret"]
        options = ["--cached", "0,40", "--new", "16,48", "--repeats", "2", "--seed", "5", "--block-size", "16"]
        done = run(*server, *options, "--output", path)
        assert done.exit_code == 0, done.output
        profile = PrefillProfile.from_file(path)
        assert (profile.cached_tokens, profile.new_tokens) == ((0, 32), (16, 48))
        assert (profile.facts["model"], profile.facts["repeats"], profile.facts["seed"]) == ("other", 2, 5)
        assert far.keys == {"Bearer sk-secret"}
        assert "sk-secret" not in done.output + path.read_text("utf-8")
        assert "cached tokens come in whole blocks of 16: 40 is 32" in done.stderr
        for words in ("other on vllm 0.32.0", "16 new", "48 new", "median of 2", "seed 5", "python: 3.", "cores: "):
            assert words in done.stdout
        assert f"{1e3 * profile(32, 48):,.1f}" in done.stdout
        assert f"{48 / profile(32, 48):,.0f}/s" in done.stdout

    def test_names_requests_that_were_repeated_and_times_that_were_pooled(self, far: FarServer, tmp_path: Path) -> None:
        far.fails = lambda number: number == 6
        path = tmp_path / "profile.json"
        done = run("--base-url", far.base_url, *SMALL, "-o", path)
        assert "requests repeated, because they failed or found something else cached: 1" in done.stdout
        pooled = PrefillProfile.from_file(path).facts["pooled"]
        said = f"{pooled['cells']} cells, by {100 * pooled['largest_share']:.1f} % at most"
        assert (said in done.stdout) == (pooled["cells"] > 0)
        assert "differ much between repeats" not in done.stdout, "there was one"

    def test_says_before_it_measures_that_it_cannot_write(self, far: FarServer, tmp_path: Path) -> None:
        said = refusal("--base-url", far.base_url, *SMALL, "-o", tmp_path / "missing" / "profile.json")
        assert "No such file or directory: give another --output" in said
        assert "is a directory" in refusal("--base-url", far.base_url, *SMALL, "-o", tmp_path)
        assert far.bodies == []

    def test_that_fails_leaves_no_file(self, far: FarServer, tmp_path: Path) -> None:
        far.reports = False
        path = tmp_path / "profile.json"
        said = refusal("--base-url", far.base_url, *SMALL, "-o", path)
        assert "does not report cached tokens" in said
        assert "--enable-prompt-tokens-details" in said
        assert not path.exists()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "Missing option '-o' / '--output'"),
            (["--base-url", "http://127.0.0.1:9", "--model", "."], "leave out --model or --base-url"),
            (["--served-model", "m"], "give --base-url"),
            (["--cached", "0;16"], "give integers separated by commas"),
            (["--repeats", "0"], "x>=1"),
            (["--base-url", "http://127.0.0.1:9"], "cannot be reached"),
        ],
    )
    def test_refuses_wrong_options_and_a_server_that_does_not_answer(
        self, tmp_path: Path, arguments: list[str], said: str
    ) -> None:
        pytest.importorskip("httpx2")
        output = ["-o", str(tmp_path / "p.json")] if arguments else []
        assert said in refusal(*arguments, *output)

    @pytest.mark.vllm
    def test_says_that_there_is_no_model(self, tmp_path: Path) -> None:
        pytest.importorskip("vllm")
        assert "Error: " in refusal("--model", tmp_path, "-o", tmp_path / "p.json")

    @pytest.mark.slow
    @pytest.mark.vllm
    def test_measures_a_real_server(self, vllm_server: Any, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        options = ["--cached", "0,100", "--new", "40,80", "--repeats", "1"]
        done = run("--base-url", vllm_server.base_url, *options, "-o", path)
        assert done.exit_code == 0, done.output
        profile = PrefillProfile.from_file(path)
        assert (profile.cached_tokens, profile.new_tokens) == ((0, 96), (40, 80))
        assert profile.facts["sent_again"] == 0, "what was cached is what had been sent"
        assert (profile.facts["block_size"], profile.facts["longest_tokens"]) == (32, 2048)
        assert profile.facts["engine"].startswith("vllm 0.")
        assert profile(0, 40) <= profile(0, 80) <= profile(96, 80)
        assert profile(0, 40) <= profile(96, 40) <= profile(96, 80)
