"""Workflows of HedraRAG's evaluation (6.1)."""

from __future__ import annotations

import re
from typing import Any

from ragorder.pipelining.workflow.graph import RAGraph
from ragorder.pipelining.workflow.nodes import END, START, NodeId, State, Terminal

_BULLET = re.compile(r"^\s*(?:[-*•]|\d{1,2}[.)])\s+")
_ANSWER = "Answer the question using {docs}: {query}"


def one_shot(*, topk: int = 5, prompt: str = _ANSWER, max_tokens: int = 256) -> RAGraph:
    graph = RAGraph("one_shot")
    graph.add_retrieval("search", query="query", topk=topk)
    graph.add_generation("answer", prompt=prompt, max_tokens=max_tokens)
    return graph.add_edge(START, "search").add_edge("search", "answer").add_edge("answer", END)


def hyde(
    *,
    topk: int = 5,
    guess_prompt: str = "Write a short passage that answers the question: {query}",
    prompt: str = _ANSWER,
    guess_tokens: int = 128,
    max_tokens: int = 256,
) -> RAGraph:
    """Search with a hypothetical answer instead of the question (HyDE)."""
    graph = RAGraph("hyde")
    graph.add_generation("guess", prompt=guess_prompt, output="guess", max_tokens=guess_tokens)
    graph.add_retrieval("search", query="guess", topk=topk)
    graph.add_generation("answer", prompt=prompt, max_tokens=max_tokens)
    return (
        graph.add_edge(START, "guess").add_edge("guess", "search").add_edge("search", "answer").add_edge("answer", END)
    )


def multistep(
    *,
    topk: int = 2,
    rounds: int = 4,
    plan_prompt: str = "Split the question into simpler ones, to be answered one after another, one a line: {query}",
    prompt: str = "Known so far:\n{notes}\nAnswer the question using {docs}: {subquestion}",
    plan_tokens: int = 128,
    max_tokens: int = 256,
) -> RAGraph:
    """Split the question, answer each subquestion with the earlier answers, then the question itself."""

    def planned(text: str, state: State) -> tuple[str, ...]:
        return (*_lines(text)[: rounds - 1], state["query"])

    async def take(state: State) -> dict[str, Any]:
        notes = state.get("notes", "")
        if "answer" in state:
            notes += f"{state['subquestion']} {state['answer']}\n"
        first, *others = state["subquestions"]
        return {"subquestion": first, "subquestions": tuple(others), "notes": notes}

    def after(state: State) -> NodeId | Terminal:
        return "next" if state["subquestions"] else END

    graph = RAGraph("multistep", max_rounds=_checked("rounds", rounds))
    graph.add_generation("plan", prompt=plan_prompt, output="subquestions", parse=planned, max_tokens=plan_tokens)
    graph.add_step("next", take, reads="subquestions", writes=("subquestion", "subquestions", "notes"), pure=True)
    graph.add_retrieval("search", query="subquestion", topk=topk)
    graph.add_generation("answer", prompt=prompt, max_tokens=max_tokens)
    graph.add_edge(START, "plan").add_edge("plan", "next").add_edge("next", "search").add_edge("search", "answer")
    return graph.add_edge("answer", after, to=("next", END))


def irg(*, topk: int = 5, rounds: int = 3, prompt: str = _ANSWER, max_tokens: int = 256) -> RAGraph:
    """Search with the question and the last answer, and answer again, `rounds` times (ITER-RETGEN)."""

    def query(state: State) -> str:
        return f"{state['query']} {state.get('answer', '')}".rstrip()

    async def count(state: State) -> dict[str, Any]:
        return {"round": state.get("round", 0) + 1}

    def after(state: State) -> NodeId | Terminal:
        return "search" if state["round"] < rounds else END

    graph = RAGraph("irg", max_rounds=_checked("rounds", rounds))
    graph.add_retrieval("search", query=query, topk=topk)
    graph.add_generation("answer", prompt=prompt, max_tokens=max_tokens)
    graph.add_step("count", count, writes="round", pure=True)
    graph.add_edge(START, "search").add_edge("search", "answer").add_edge("answer", "count")
    return graph.add_edge("count", after, to=("search", END))


def recomp(
    *,
    topk: int = 5,
    each: bool = False,
    compress_prompt: str = "Sum up what {docs} say about the question: {query}",
    prompt: str = "{summary}\n\nAnswer the question using this summary: {query}",
    compress_tokens: int = 128,
    max_tokens: int = 256,
) -> RAGraph:
    """Search, sum the documents up, and answer from the summary (RECOMP). `each`: a summary per document."""
    graph = RAGraph("recomp")
    graph.add_retrieval("search", query="query", topk=topk)
    graph.add_generation("answer", prompt=prompt, max_tokens=max_tokens)
    graph.add_edge(START, "search").add_edge("answer", END)
    if not each:
        graph.add_generation("compress", prompt=compress_prompt, output="summary", max_tokens=compress_tokens)
        return graph.add_edge("search", "compress").add_edge("compress", "answer")
    ranks = range(1, _checked("topk", topk) + 1)

    async def deal(state: State) -> dict[str, Any]:
        return {f"docs_{rank}": (document,) for rank, document in zip(ranks, state["docs"], strict=False)}

    async def gather(state: State) -> dict[str, Any]:
        summaries = (state.get(f"summary_{rank}", "") for rank in ranks)
        return {"summary": "\n".join(filter(None, summaries))}

    graph.add_step("deal", deal, reads="docs", writes=[f"docs_{rank}" for rank in ranks], pure=True)
    graph.add_step("gather", gather, writes="summary", pure=True)
    graph.add_edge("search", "deal").add_edge("gather", "answer")
    for rank in ranks:
        _compress(graph, rank, compress_prompt, compress_tokens)
    return graph


def _compress(graph: RAGraph, rank: int, prompt: str, max_tokens: int) -> None:
    compress, documents = f"compress_{rank}", f"docs_{rank}"

    def chosen(state: State) -> NodeId | Terminal:
        return compress if documents in state else "gather"

    graph.add_generation(
        compress,
        prompt=prompt.replace("{docs}", f"{{{documents}}}"),
        documents=documents,
        output=f"summary_{rank}",
        max_tokens=max_tokens,
    )
    graph.add_edge("deal", chosen, to=(compress, "gather")).add_edge(compress, "gather")


def _lines(text: str) -> list[str]:
    return [question for line in text.splitlines() if (question := _BULLET.sub("", line).strip())]


def _checked(name: str, value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return value
