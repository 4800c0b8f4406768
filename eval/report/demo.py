"""The demonstration: Python's documentation served in retrieval order and in ours."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ragorder.eval.data.corpora import PYDOCS
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.report.console import legend, results_table
from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.runner import Run, Served
from ragorder.eval.running.specs import Bench, EngineName

__all__ = ["DemoReport", "run_demo"]

_COLOURS = ("cyan", "magenta", "yellow", "blue", "bright_red", "bright_green", "bright_blue", "bright_magenta")


@dataclass(frozen=True, slots=True)
class DemoReport:
    engine: str
    plain: Run
    ordered: Run

    def print(self) -> None:
        console = Console()
        results = [self.plain.result(), self.ordered.result()]
        console.print(results_table(results))
        console.print(legend(results), style="dim")
        console.print(self._two_requests())
        console.print(self._what_is_real(), style="dim")

    def _two_requests(self) -> RenderableType:
        """The request that gained most, and the median one, by documents found and then by tokens."""
        pairs = sorted(zip(self.plain.served, self.ordered.served, strict=True), key=_gain)
        best = self._request(pairs[-1], f"of {len(pairs)} the one that gained most")
        median = self._request(pairs[(len(pairs) - 1) // 2], "the one with the median gain")
        legend = Text.assemble(("██", "green"), " found in the cache  ", ("░░", "red"), " computed", style="dim")
        return Group(best, median, legend)

    def _request(self, pair: tuple[Served, Served], which: str) -> RenderableType:
        before, after = pair
        colours = {document.id: colour for document, colour in zip(before.documents, _COLOURS, strict=False)}
        question = self.plain.trace.requests[before.number].question
        side_by_side = Table.grid(expand=True)
        side_by_side.add_row(_prompt("retrieval order", before, colours), _prompt("ragorder's order", after, colours))
        return Group(Text(f"\nRequest {before.number + 1}, {which}: {question}", style="bold"), side_by_side)

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


def run_demo(engine: EngineName, model: Path | None, limit: int, waiting: int, progress: Progress) -> DemoReport:
    """Raises ImportError naming the extras, or ValueError."""
    _check_installed(engine)
    bench = Bench(
        workloads=(PYDOCS,),
        policies=("retrieval", "auto"),
        engine=engine,
        model=model,
        capacity=Capacity(),
        limit=limit,
        waiting=waiting,
    )
    ((plain, ordered),) = run_traces(bench, progress, keep=True)
    return DemoReport(engine, plain, ordered)


def _check_installed(engine: str) -> None:
    needed = {"bm25s": "bm25"} | ({} if engine == "sim" else {engine: engine})
    lacking = {module: extra for module, extra in needed.items() if not _is_there(module)}
    if lacking:
        modules, extras = " and ".join(lacking), ",".join(lacking.values())
        raise ImportError(f"the demonstration needs {modules}: pip install 'ragorder[{extras}]'", name=min(lacking))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _gain(pair: tuple[Served, Served]) -> tuple[int, int]:
    before, after = pair
    documents = after.cached_documents - before.cached_documents
    return documents, after.completion.cached_tokens - before.completion.cached_tokens


def _prompt(title: str, served: Served, colours: dict[str, str]) -> Panel:
    lines = Text("██ system prompt\n", style="green", overflow="ellipsis", no_wrap=True)
    for place, document in enumerate(served.documents):
        cached = place < served.cached_documents
        lines.append("██ " if cached else "░░ ", style="green" if cached else "red")
        lines.append(f"{document.id}\n", style=colours.get(document.id, "white"))
    lines.append("░░ ", style="red")
    lines.append("question", style="dim")
    completion = served.completion
    lines.append(f"\n{completion.cached_tokens:,} of {completion.prompt_tokens:,} tokens cached", style="bold")
    if completion.ttft_s is not None:
        lines.append(f"\nfirst token after {completion.ttft_s * 1e3:,.0f} ms", style="bold")
    return Panel(lines, title=title)
