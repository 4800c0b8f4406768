"""The demonstration: Python's documentation served in retrieval order and in ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from ragorder.eval.data.corpora import PYDOCS
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.report.tables import Table
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.runner import Run, Served
from ragorder.eval.running.specs import Bench, EngineName
from ragorder.extras import install_hint

__all__ = ["DemoReport", "Pair", "run_demo"]

_ENGINES = {
    "sim": "a simulated cache",
    "torch": "ragorder's embedded engine, with a small model",
    "vllm": "vLLM, with a small model",
}
_QUESTIONS = {"sim": 400, "torch": 60, "vllm": 60}
_COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_red", "bright_green", "bright_blue", "bright_magenta")
_BUSY = 1.5
"""The machine is busy if a quarter of the probes take this many times as long as undisturbed, or longer."""
_BY_FAR = 2
"""A time contradicts the tokens if it is this many times as long as that of a request with more to compute, ..."""
_SHORT = 0.25
"""... or as this share of the median time, below which no two times are told apart."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A question served in retrieval order and in ragorder's."""

    question: str
    plain: Served
    ordered: Served

    @property
    def gained_tokens(self) -> int:
        return self.ordered.completion.cached_tokens - self.plain.completion.cached_tokens

    @property
    def gain(self) -> tuple[int, int]:
        """Documents, then tokens."""
        return self.ordered.cached_documents - self.plain.cached_documents, self.gained_tokens


@dataclass(frozen=True, slots=True)
class DemoReport:
    """`slowdowns`: how many times as long as undisturbed the same work took, each time that it was repeated."""

    engine: EngineName
    pairs: Sequence[Pair]
    waiting: int = 0
    slowdowns: Sequence[float] = ()

    def print(self) -> None:
        console = Console()
        disturbed = self._disturbance()
        timed = self._timed and not disturbed
        for part in (self._setting(), self._table(timed), self._what_changed(timed)):
            console.print(part)
            console.print()
        if disturbed:
            console.print(
                f"The times of this run were disturbed: do not read them. {disturbed} The cached tokens are right.\n",
                style="yellow",
            )
        for pair, which in self._examples():
            self._print_pair(console, pair, which, timed)
        console.print(self._what_is_real(), style="dim")

    @property
    def _timed(self) -> bool:
        return all(each.completion.ttft_s is not None for pair in self.pairs for each in (pair.plain, pair.ordered))

    def _setting(self) -> Text:
        known = f" The next {self.waiting} questions are known when one is asked." if self.waiting else ""
        documents = max(len(pair.plain.documents) for pair in self.pairs)
        return Text(
            f"{len(self.pairs):,} questions about Python's standard library, each with {documents} documents in its "
            f"prompt. Engine: {_ENGINES[self.engine]}; its cache has room for all documents.{known}",
            "bold",
        )

    def _table(self, timed: bool) -> Table:
        table = Table(headings=["", "retrieval order", "ragorder's order"])
        sides = [[pair.plain for pair in self.pairs], [pair.ordered for pair in self.pairs]]
        table.add("prompt tokens found in the cache", *(f"{100 * _cached_share(side):.1f} %" for side in sides))
        table.add("cached tokens of a request", *(_spread(map(_cached_tokens, side)) for side in sides))
        if timed:
            table.add("first token after, ms", *(_spread(1e3 * _ttft_s(each) for each in side) for side in sides))
        table.note = f"median [quartiles] of {len(self.pairs):,} requests"
        return table

    def _what_changed(self, timed: bool) -> Text:
        gains = [pair.gained_tokens for pair in self.pairs]
        count = len(gains)
        more, fewer = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        if more == count:
            said = "Every request gains: it finds more tokens in the cache in ragorder's order."
        else:
            share = f"{100 * (count - more) / count:.0f} % of the requests gain nothing"
            said = (
                f"{share if more else 'No request gains anything'}: {count - more - fewer:,} of {count:,} find as many "
                f"tokens in the cache in both orders, {fewer:,} find fewer in ragorder's order"
            )
            said += f" and {more:,} find more." if more else "."
            said += " The median request gains nothing." if more and median(gains) <= 0 else ""
        if timed:
            low, middle, high = _quartiles([_ttft_s(pair.ordered) / _ttft_s(pair.plain) for pair in self.pairs])
            said += (
                f"\nIn ragorder's order the first token takes {middle:.2f} times as long as in retrieval order (median "
                f"of {count:,} requests; the middle half: {low:.2f} to {high:.2f} times)."
            )
        return Text(said)

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
        said += _contradiction([each for pair in self.pairs for each in (pair.plain, pair.ordered)])
        return " ".join(said)

    def _examples(self) -> list[tuple[Pair, str]]:
        """The request that gained most and a typical one of those that gained."""
        gained = sorted((pair for pair in self.pairs if pair.gained_tokens > 0), key=lambda pair: pair.gain)
        if not gained:
            return []
        best = gained[-1]
        others = [pair for pair in gained if _shown(pair) != _shown(best)]
        examples = [(best, f"of all {len(self.pairs):,} the one that gained most")]
        if others:
            examples.append((others[(len(others) - 1) // 2], "a typical one of those that gained"))
        return examples

    def _print_pair(self, console: Console, pair: Pair, which: str, timed: bool) -> None:
        ranks = {document.id: rank for rank, document in enumerate(pair.plain.documents, 1)}
        side_by_side = Grid.grid(expand=True)
        sides = {"retrieval order": pair.plain, "ragorder's order": pair.ordered}
        side_by_side.add_row(*(_prompt(title, side, ranks, timed) for title, side in sides.items()))
        console.print(Text(f"Request {pair.plain.number + 1}, {which}: {pair.question}", style="bold"))
        console.print(side_by_side)
        console.print(
            Text.assemble(("██", "green"), " found in the cache  ", ("░░", "red"), " computed\n", style="dim")
        )

    def _what_is_real(self) -> str:
        real = (
            "Real: the documents (this Python's standard library), the retrieval (BM25), the orders, the token counts"
        )
        if self.engine == "sim":
            return (
                f"{real} (characters / 4). Simulated: the engine's cache, to the block; there is no model and no time."
            )
        engine = "vLLM with its prefix cache" if self.engine == "vllm" else "the embedded engine with its cache"
        return (
            f"{real}, {engine}, the times of this machine. Random: the model's weights, so that "
            "times and hits are honest and answers mean nothing."
        )


def run_demo(engine: EngineName, model: Path | None, limit: int | None, waiting: int, progress: Progress) -> DemoReport:
    """Without a `limit` the engine's own number of questions. Raises ImportError naming engines and extras, or
    ValueError."""
    _check_installed(engine)
    bench = Bench(
        workloads=(PYDOCS,),
        policies=("retrieval", "earned"),
        engine=engine,
        model=model,
        capacity=Capacity(),
        limit=limit or _QUESTIONS[engine],
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
            if engine != "sim":
                probe.repeat()

        return step

    ((plain, ordered),) = run_traces(bench, announce, keep=True)
    return DemoReport(engine, _pairs(plain, ordered), waiting, probe.slowdowns)


class _Probe:
    """A fixed piece of work, which takes longer when other programs use the processor."""

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


def _pairs(plain: Run, ordered: Run) -> list[Pair]:
    questions = plain.trace.requests
    both = zip(plain.served, ordered.served, strict=True)
    return [Pair(questions[before.number].question, before, after) for before, after in both]


def _check_installed(engine: EngineName) -> None:
    lacking = {name: _lacking(name) for name in _ENGINES}
    if not lacking[engine]:
        return
    modules, extras = " and ".join(lacking[engine]), ",".join(lacking[engine].values())
    said = f"the demonstration on the engine '{engine}' needs {modules}: {install_hint(extras)}"
    installed = [name for name, modules in lacking.items() if not modules]
    if installed:
        said += f". Installed already: {' or '.join(f'`ragorder demo --engine {name}`' for name in installed)}"
    elif engine != "sim":
        said += f". The smallest: {install_hint('bm25')}, then `ragorder demo --engine sim`"
    raise ImportError(said, name=min(lacking[engine]))


def _lacking(engine: str) -> dict[str, str]:
    """The extras of missing modules."""
    needed = {"bm25s": "bm25"} | ({} if engine == "sim" else {engine: engine})
    return {module: extra for module, extra in needed.items() if not _is_there(module)}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


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


def _ttft_s(served: Served) -> float:
    return served.completion.ttft_s or 0.0


def _cached_tokens(served: Served) -> int:
    return served.completion.cached_tokens


def _computed_tokens(served: Served) -> int:
    return served.completion.prompt_tokens - served.completion.cached_tokens


def _cached_share(side: Sequence[Served]) -> float:
    return sum(map(_cached_tokens, side)) / sum(each.completion.prompt_tokens for each in side)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _spread(values: Iterable[float]) -> str:
    low, middle, high = _quartiles(list(values))
    return f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"


def _shown(pair: Pair) -> tuple[object, ...]:
    """What the pictures of a request show, but for its times."""
    sides = (pair.plain, pair.ordered)
    return tuple(([document.id for document in each.documents], each.completion.cached_tokens) for each in sides)


def _prompt(title: str, served: Served, ranks: dict[str, int], timed: bool) -> Panel:
    completion = served.completion
    lines = Text(overflow="ellipsis", no_wrap=True)
    _part(lines, "system prompt", cached=completion.cached_tokens > 0)
    for place, document in enumerate(served.documents):
        rank = ranks.get(document.id, 0)
        colour = _COLOURS[(rank - 1) % len(_COLOURS)]
        _part(lines, f"{rank} {document.id}", cached=place < served.cached_documents, style=colour)
    _part(lines, "question", cached=False)
    lines.append(f"{completion.cached_tokens:,} of {completion.prompt_tokens:,} tokens cached", style="bold")
    if timed:
        lines.append(f"\nfirst token after {1e3 * _ttft_s(served):,.0f} ms", style="bold")
    return Panel(lines, title=title)


def _part(lines: Text, words: str, *, cached: bool, style: str = "") -> None:
    lines.append("██ " if cached else "░░ ", style="green" if cached else "red")
    lines.append(f"{words}\n", style=style)
