"""Graphs of workflows: what compiles, which node runs when, and what the stage-by-stage run returns."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from support.workflows import PlainPrompts, ScriptedEngine, chain, found_by_name, graphs

from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    GraphError,
    NodeError,
    RAGraph,
    State,
    WorkflowResult,
    hyde,
    interpret,
    irg,
    multistep,
    recomp,
)
from ragorder.pipelining.workflow.execution import documents_of, question_of
from ragorder.pipelining.workflow.join import Tokens

QUESTION = "Which drawer holds the key?"


async def run(graph: CompiledGraph, engine: ScriptedEngine | None = None, **options: Any) -> WorkflowResult:
    parts = {"engine": engine or ScriptedEngine(), "prompts": PlainPrompts(), "retrieve": found_by_name} | options
    try:
        return await interpret(graph, QUESTION, **parts)
    finally:
        assert parts["prompts"].open == 0


@dataclass(eq=False)
class Keyed:
    key: int


@dataclass
class ArrayLike:
    number: int

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")


def hit(number: int) -> dict[str, Any]:
    """With an embedding."""
    return {"vector": ArrayLike(number)}


def nothing(_: State) -> dict[str, Any]:
    return {}


def answering(*ids: str, **prompts: str) -> RAGraph:
    """Generations that write their own name, from this template, and steps that write nothing."""
    graph = RAGraph("refused")
    for id, prompt in prompts.items():
        graph.add_generation(id, prompt=prompt, output=id)
    for id in ids:
        graph.add_step(id, nothing)
    return graph


def ask() -> RAGraph:
    return answering(a="{query}")


def to(*targets: Any) -> dict[str, Any]:
    """A conditional edge to these."""
    return {"target": lambda state: targets[0], "to": targets}


class TestPaper:
    def test_listing_1(self) -> None:
        hyde = RAGraph()
        hyde.add_generation(0, prompt="Generate a hypothesis for {input}.", output="hypopara")
        hyde.add_retrieval(1, topk=5, query="hypopara", output="docs")
        hyde.add_generation(2, prompt="Answer {query} using {docs}.")
        compiled = chain(hyde, 0, 1, 2).compile()
        assert compiled.answer == "answer"
        assert compiled.nodes[2].documents == ("docs",)
        assert [compiled.next_nodes(id) for id in (START, 0, 1, 2)] == [(0,), (1,), (2,), ()]

    async def test_listing_1_with_a_loop(self) -> None:
        steps = RAGraph()
        steps.add_generation(0, prompt="Decompose {input} into subquestions.", output="subquestion")
        steps.add_retrieval(1, topk=2, query="subquestion", output="docs")
        steps.add_generation(2, prompt="Answer {subquestion} using {docs}.")
        steps.add_edge(START, 0).add_edge(0, 1).add_edge(1, 2)
        steps.add_edge(2, lambda state: 1 if state.get("subquestion") else END)
        with pytest.raises(GraphError, match=r"a loop leads from .* back to .*max_rounds"):
            steps.compile()
        with pytest.raises(GraphError, match="node 1 has run 3 times"):
            await run(steps.compile(max_rounds=3))


class TestLibrary:
    async def test_multistep_answers_each_subquestion_and_then_the_question(self) -> None:
        engine = ScriptedEngine(
            lambda asked: "1. Where is it?\n\n- Who has it?\nWhen?" if not asked.documents else "No."
        )
        result = await run(multistep(rounds=3).compile(), engine)
        texts = [asked.question.text for asked in engine.sent]
        assert [text.rsplit("above: ", 1)[-1] for text in texts[1:]] == ["Where is it?", "Who has it?", QUESTION]
        assert "Where is it? No.\nWho has it? No.\n" in texts[-1]
        assert result.text == "No."
        # Without subquestions it is answered once.
        engine = ScriptedEngine(lambda asked: "")
        await run(multistep().compile(), engine)
        assert len(engine.sent) == 2

    async def test_irg_searches_with_the_last_answer(self) -> None:
        queries = []

        async def retrieve(query: str, topk: int) -> list[str]:
            queries.append(query)
            return [query]

        engine = ScriptedEngine(lambda asked: f"answer {len(engine.sent)}")
        result = await run(irg(rounds=3).compile(), engine, retrieve=retrieve)
        assert queries == [QUESTION, f"{QUESTION} answer 1", f"{QUESTION} answer 2"]
        assert result.text == result.state["answer"] == "answer 3"

    async def test_hyde_searches_for_the_guess(self) -> None:
        engine = ScriptedEngine(lambda asked: "In the third." if not asked.documents else "Third.")
        await run(hyde(topk=1).compile(), engine)
        assert engine.sent[1].documents == ("n the third./0",)

    @pytest.mark.parametrize("found", [0, 2, 5])
    async def test_recomp_sums_up_each_document_that_was_found(self, found: int) -> None:
        async def retrieve(query: str, topk: int) -> list[str]:
            return [f"document {rank}" for rank in range(found)]

        engine = ScriptedEngine(lambda asked: f"of {asked.documents}" if asked.documents else "the answer")
        await run(recomp(topk=5, each=True).compile(), engine, retrieve=retrieve)
        *summaries, last = engine.sent
        assert [asked.documents for asked in summaries] == [(f"document {rank}",) for rank in range(found)]
        assert last.question.text.startswith("\n".join(f"of {asked.documents}" for asked in summaries))
        assert last.documents == ()

    @pytest.mark.parametrize("make", [multistep, irg])
    def test_needs_a_round(self, make: Any) -> None:
        with pytest.raises(ValueError, match="rounds must be an integer of at least 1"):
            make(rounds=0)


class TestRefused:
    """Each error names graph and node, and what to change."""

    @pytest.mark.parametrize(
        ("graph", "match", "options"),
        [
            (chain(ask(), "a").add_step("b", nothing).add_edge("b", END), "no way leads from START to 'b'", {}),
            (ask().add_edge("a", END), "nothing comes first", {}),
            (ask().add_edge(START, "a"), r"nothing comes after node 'a': add_edge\('a', END\)", {}),
            (ask().add_edge(START, "a").add_edge("a", **to("a")), "no way leads to END from 'a'", {"max_rounds": 3}),
            (
                chain(answering("b", a="{query}"), "a").add_edge("a", "b").add_edge("b", "a"),
                "the loop through 'a', 'b' never ends",
                {"max_rounds": 3},
            ),
            (chain(ask(), "a").add_edge("a", **to("a", END)), "a loop leads from 'a' back to 'a': bound it", {}),
            *(
                (chain(ask(), "a"), "max_rounds must be an integer", {"max_rounds": wrong})
                for wrong in (0, -1, 1.5, True)
            ),
            (chain(ask(), "a").add_edge("a", "c"), "an edge names 'c', which is no node; there are 'a'", {}),
            (ask().add_edge(START, "a").add_edge("a", **to("c", END)), "an edge names 'c'", {}),
            (ask().add_edge(START, "a").add_edge("a", "END"), "an edge names 'END', .*the constant END, without", {}),
            (chain(ask(), "a").add_edge("START", "a"), "an edge names 'START', .*the constant START, without", {}),
            (chain(answering(b="{documents}"), "b"), "node 'b' reads 'documents', which is written by no node", {}),
            (chain(RAGraph("refused").add_retrieval("b", query="documents"), "b"), "node 'b' reads 'documents'", {}),
            (chain(ask().add_step("b", nothing, reads="documents"), "a", "b"), "node 'b' reads 'documents'", {}),
            (chain(RAGraph("refused").add_retrieval("b", query="quary"), "b"), r"did you mean 'query'\?", {}),
            (chain(answering(b="{c}", c="{b}"), "b", "c"), "node 'b' reads 'c', which is written only after it", {}),
            (
                chain(answering(a="{a}"), "a").add_edge("a", **to("a", END)),
                "node 'a' reads 'a', which is written only after it",
                {"max_rounds": 2},
            ),
            (
                chain(ask().add_step("b", nothing, writes="x").add_step("c", nothing, writes="x"), "a", "b")
                .add_edge("a", "c")
                .add_edge("c", END),
                "'b', 'c' may run side by side after 'a' and both write 'x'",
                {},
            ),
        ],
    )
    def test_a_graph_that_cannot_run(self, graph: RAGraph, match: str, options: dict[str, Any]) -> None:
        self.check(graph, match, **options)

    def check(self, graph: RAGraph, match: str, **options: Any) -> None:
        with pytest.raises(GraphError, match=match) as caught:
            graph.compile(**options)
        assert "workflow 'refused'" in str(caught.value)

    async def test_a_graph_that_is_not_compiled(self) -> None:
        with pytest.raises(GraphError, match=r"workflow 'refused': compile\(\) the graph first"):
            await run(chain(ask(), "a"))  # type: ignore[arg-type]

    def test_a_loop_that_branches_enter_at_two_nodes(self) -> None:
        """Which search comes first is not clear: each leads to the other under a condition."""

        def entered() -> RAGraph:
            graph = answering("kb", "web", check="{query}").add_edge("check", **to("kb", "web", END))
            return graph.add_edge("kb", **to("check", END)).add_edge("web", **to("check", END))

        graph = entered().add_edge(START, "kb").add_edge(START, "web")
        entries = "branches that part after START enter the loop of 'check', 'kb', 'web' at 'kb', 'web', and it"
        self.check(graph, entries, max_rounds=3)
        assert entered().add_edge(START, **to("kb", "web")).compile(3, answer="check").answer == "check"

    def test_one_writer_after_the_other_or_one_of_both_is_no_conflict(self) -> None:
        graph = ask().add_generation("b", prompt="{query}", output="a")
        assert chain(graph, "a", "b").add_edge(START, "b").compile().answer == "a"
        graph = answering("one", "two", "meet").add_generation("short", prompt="{query}")
        graph.add_generation("long", prompt="{query}").add_edge("meet", **to("long", "short"))
        graph.add_edge(START, "one").add_edge(START, "two").add_edge("one", "meet").add_edge("two", "meet")
        assert graph.add_edge("short", END).add_edge("long", END).compile().answer == "answer"

    def test_no_answer_or_several(self) -> None:
        graph = chain(RAGraph("refused").add_retrieval("search", query="query"), "search")
        self.check(graph, r"no generation comes last: say which is the result, compile\(answer=…\)")
        self.check(graph, "answer='text' is written by no node", answer="text")
        assert graph.compile(answer="docs").answer == "docs"
        graph = chain(answering(a="{query}", b="{query}"), "a").add_edge(START, "b").add_edge("b", END)
        self.check(graph, "several generations come last, with 'a', 'b'")
        assert graph.compile(answer="b").answer == "b"
        assert chain(answering("note", a="{query}", b="{a}"), "a", "b", "note").compile().answer == "b"

    @pytest.mark.parametrize(
        ("add", "match"),
        [
            (lambda graph: graph.add_step("a", nothing), "two nodes 'a'"),
            (lambda graph: graph.add_step(START, nothing), "a node's id must be"),
            (lambda graph: graph.add_step("b", "nothing"), "node 'b': a step needs a function"),
            (lambda graph: graph.add_step("b", nothing, writes="two words"), "'two words' cannot be a name"),
            (lambda graph: graph.add_generation("b", prompt="{docs[0]}"), r"{docs\[0\]} is not a plain name"),
            (lambda graph: graph.add_generation("b", prompt="{"), "node 'b'"),
            (lambda graph: graph.add_generation("b", prompt="{query}", max_tokens=0), "max_tokens must be an integer"),
            (lambda graph: graph.add_retrieval("b", query="two words"), "neither a name of the state nor a template"),
            (lambda graph: graph.add_retrieval("b", query="query", topk=0), "topk must be an integer of at least 1"),
            (lambda graph: graph.add_edge(END, "a"), "cannot leave END"),
            (lambda graph: graph.add_edge("a", START), "leads to START"),
            (lambda graph: graph.add_edge("a", END, to=[END]), "`to` is for a function"),
        ],
    )
    def test_wrong_arguments(self, add: Any, match: str) -> None:
        with pytest.raises(GraphError, match=match) as caught:
            add(ask())
        assert "workflow 'refused'" in str(caught.value)


class TestRuns:
    async def test_a_node_that_raises_is_named_and_its_text_is_not(self) -> None:
        def broken(state: State) -> dict[str, Any]:
            raise RuntimeError(f"secret {state['query']}")

        graph = RAGraph("broken").add_step("rerank", broken).add_generation("answer", prompt="{query}")
        with pytest.raises(NodeError, match=r"^workflow 'broken', node 'rerank': RuntimeError$") as caught:
            await run(chain(graph, "rerank", "answer").compile())
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert str(copy.copy(caught.value)) == str(caught.value)

    @pytest.mark.parametrize(
        ("graph", "match"),
        [
            (
                chain(RAGraph("broken").add_step("step", lambda state: None, writes="name"), "step"),
                "node 'step': a step must return a mapping of names to values, got NoneType",
            ),
            (
                chain(RAGraph("broken").add_step("step", lambda state: {"other": 1}, writes="name"), "step"),
                "node 'step': the step returned 'other': name them in `writes`",
            ),
            (
                RAGraph("broken")
                .add_generation("a", prompt="{query}")
                .add_edge(START, "a")
                .add_edge("a", lambda state: state["missing"], to=[END]),
                "node 'a': conditional edge: the state has no 'missing', only",
            ),
            (
                chain(ask().add_generation("b", prompt="{a}", output="name", documents="a"), "a", "b"),
                "node 'b': documents must be a sequence of them, got str",
            ),
            (
                # Read a second time, it would have none.
                chain(
                    ask()
                    .add_step("b", lambda state: {"docs": filter(None, ["one"])}, writes="docs")
                    .add_generation("c", prompt="{a}", output="name", documents="docs"),
                    *"abc",
                ),
                "node 'c': documents must be a sequence of them, got filter",
            ),
            (
                chain(ask().add_step("b", nothing, writes="name").add_retrieval("c", query="name"), "a", "b", "c"),
                "node 'c': the state has no 'name'",
            ),
            (
                answering(name="{query}").add_edge("name", END).add_edge(START, lambda state: END, to=["name", END]),
                "no node on the way has written the answer, 'name'",
            ),
        ],
    )
    async def test_what_a_function_must_not_do_is_named(self, graph: RAGraph, match: str) -> None:
        with pytest.raises(NodeError, match=match):
            await run(graph.compile(answer="answer" if "missing" in match else "name"))

    @pytest.mark.parametrize("target", ["c", None, START, ["a"]])
    async def test_a_conditional_edge_to_no_node(self, target: Any) -> None:
        graph = ask().add_edge(START, "a").add_edge("a", lambda state: target, to=["a", END])
        with pytest.raises(GraphError, match=r"the conditional edge from 'a' returned .* it may return 'a', END"):
            await run(graph.compile(max_rounds=2))

    @pytest.mark.parametrize("inputs", ["style", ["style"]])
    async def test_inputs(self, inputs: Any) -> None:
        """A single name is not split into letters, nor is the target of an edge."""
        graph = RAGraph("styled", inputs=inputs).add_generation("answer", prompt="{query} in {style}")
        graph.add_generation(3, prompt="{answer}", output="last")
        graph.add_edge(START, lambda state: "answer", to="answer").add_edge("answer", lambda state: 3, to=3)
        compiled = graph.add_edge(3, lambda state: END, to=END).compile(answer="answer")
        assert [compiled.next_nodes(place) for place in (START, "answer", 3)] == [("answer",), (3,), ()]
        engine = ScriptedEngine()
        await run(compiled, engine, state={"style": "verse"})
        assert engine.sent[0].question.text == f"{QUESTION} in verse"
        with pytest.raises(GraphError, match="workflow 'styled': give 'style' in `state`"):
            await run(compiled)
        with pytest.raises(GraphError, match=r"'query' in `state`: name them, RAGraph\(inputs=…\)"):
            await run(compiled, state={"style": "verse", "query": "other"})

    async def test_a_generation_has_its_options_and_its_documents_before_a_text_that_names_them(self) -> None:
        graph = RAGraph().add_retrieval("search", query="{query}", topk=2)
        graph.add_generation("answer", prompt="{query} Use {docs}.", max_tokens=7, temperature=0.5, stop=["."])
        engine = ScriptedEngine()
        await run(chain(graph, "search", "answer").compile(), engine, scope="tenant")
        (asked,) = engine.sent
        assert asked.documents == ("lds the key?/0", "lds the key?/1")
        question = asked.question
        assert question.text == f"{QUESTION} Use the documents above."
        assert (question.scope, question.max_tokens, question.temperature) == ("tenant", 7, 0.5)
        assert question.options == {"stop": ["."]}

    @pytest.mark.parametrize("kind", [str, Keyed, lambda number: {"text": number}, ArrayLike, hit])
    def test_documents_of_two_searches_are_shown_once_each(self, kind: Any) -> None:
        """Equal ones too, and no other: a search that is repeated may return the same object or another."""
        graph = RAGraph().add_retrieval("one", query="query", output="left").add_retrieval("two", query="query")
        graph.add_generation(
            "answer", prompt=lambda state: f"{state['left']}|{state['docs']}", documents=["left", "docs"]
        )
        node = chain(graph, "one", "two", "answer").compile().nodes["answer"]
        shared, own = kind(1000), kind(1001)
        again = shared if kind in (ArrayLike, hit) else kind(1000)
        state = State.of(QUESTION).updated({"left": (shared,), "docs": (own, again)})
        assert list(map(id, documents_of(node, state))) == [id(shared), id(own)]
        assert question_of(node, state).text == "the documents above|the documents above"

    async def test_side_by_side_branches_do_not_see_each_other_and_meet(self) -> None:
        seen = {}

        def see(name: str) -> Any:
            async def step(state: State) -> dict[str, Any]:
                seen[name] = set(state) - {"input", "query"}
                return {name: name}

            return step

        graph = RAGraph().add_generation("answer", prompt="{left}{right}")
        for name in ("first", "left", "right"):
            graph.add_step(name, see(name), writes=name)
        graph.add_edge(START, "first").add_edge("first", "left").add_edge("first", "right")
        graph.add_edge("left", "answer").add_edge("right", "answer").add_edge("answer", END)
        engine = ScriptedEngine()
        await run(graph.compile(), engine)
        assert seen == {"first": set(), "left": {"first"}, "right": {"first"}}
        assert [asked.question.text for asked in engine.sent] == ["leftright"]

    def test_the_state_is_read_only_and_keeps_its_values_to_itself(self) -> None:
        state = State.of("secret")
        with pytest.raises(TypeError):
            state["query"] = "other"  # type: ignore[index]
        assert state.updated({"a": 1})["a"] == 1
        assert "a" not in state
        assert "secret" not in repr(state)


class TestJoins:
    """Which nodes start together: `Tokens`, without anything to run."""

    def tokens(self, *edges: Any, **options: Any) -> Tokens:
        graph = RAGraph()
        ids = dict.fromkeys(place for source, target, *_ in edges for place in (source, target))
        for id in ids:
            if isinstance(id, str):
                graph.add_step(id, nothing, writes=id)
        for source, target, *to in edges:
            graph.add_edge(source, target, to=to)
        return Tokens(
            graph.compile(answer=next(id for id in ids if isinstance(id, str)), **options), State.of(QUESTION)
        )

    def go(self, tokens: Tokens, *ids: str) -> list[tuple[Any, int]]:
        """End these runs; what starts then."""
        for run in tokens.running:
            if run.id in ids:
                tokens.finish(run, {run.id: run.round})
        return [(run.id, run.round) for run in tokens.take()]

    def test_a_loop_that_is_joined_beyond_its_head_begins_before_the_other_branch_ends(self) -> None:
        again = iter([True, False])
        tokens = self.tokens(
            (START, "kb"), (START, "web"), ("kb", "answer"), ("web", "answer"),
            ("answer", lambda state: "web" if next(again) else END, "web", END),
            max_rounds=2,
        )  # fmt: skip
        assert self.go(tokens) == [("kb", 0), ("web", 0)]
        assert self.go(tokens, "web") == []
        assert self.go(tokens, "kb") == [("answer", 0)]
        assert self.go(tokens, "answer") == [("web", 1)]
        assert self.go(tokens, "web") == [("answer", 1)]
        assert self.go(tokens, "answer") == [] and tokens.done

    def test_of_two_values_the_last_one_stays(self) -> None:
        """The one that was written in a round after, though fewer nodes led to it."""
        graph = RAGraph(max_rounds=2).add_step("a", nothing)
        graph.add_step("long", nothing).add_step("longer", nothing, writes="note").add_step(
            "short", nothing, writes="note"
        )
        graph.add_step("next", nothing).add_generation("last", prompt="{query}")
        rounds = iter(["long", "short"])
        graph.add_edge(START, "a").add_edge("a", "next").add_edge("long", "longer")
        graph.add_edge("a", lambda state: next(rounds), to=["long", "short"])
        for id in ("longer", "short"):
            graph.add_edge(id, lambda state: END, to=["a", END])
        ends = iter(["a", "last"])
        graph.add_edge("next", lambda state: next(ends), to=["a", "last"]).add_edge("last", END)
        tokens = Tokens(graph.compile(), State.of(QUESTION))
        while runs := tokens.take():
            for run in runs:
                tokens.finish(run, {"note": run.id} if run.node.writes == ("note",) else {})
        assert tokens.state["note"] == "short"

    @pytest.mark.parametrize("ends", ["ab", "ba"])
    def test_of_values_that_are_as_new_one_is_kept_whichever_branch_ends_first(self, ends: str) -> None:
        tokens = self.tokens((START, "a"), (START, "b"), ("a", "answer"), ("b", "answer"), ("answer", END))
        running = {run.id: run for run in tokens.take()}
        for id in ends:
            tokens.finish(running[id], {"note": id})
        (answer,) = tokens.take()
        assert answer.state["note"] == "a"


class TestRandomGraphs:
    """Loops, conditions and branches as they come."""

    @given(graphs())
    def test_compiles_or_says_why_not(self, graph: RAGraph) -> None:
        try:
            made = graph.compile()
        except GraphError as error:
            assert str(error).startswith("workflow 'random': ")
            return
        assert made.to_mermaid().startswith("flowchart TD\n")
        assert all(END in made.topology.later(id) for id in made.nodes)


def test_mermaid_shows_nodes_edges_and_any_id() -> None:
    assert irg().compile().to_mermaid() == (
        "flowchart TD\n"
        "    START((START))\n"
        "    END_((END))\n"
        '    n0[("search: docs")]\n'
        '    n1["answer: answer"]\n'
        '    n2[/"count: round"/]\n'
        "    START --> n0\n"
        "    n0 --> n1\n"
        "    n1 --> n2\n"
        "    n2 -.-> n0\n"
        "    n2 -.-> END_\n"
    )
    graph = RAGraph().add_generation('say "hi"; [x]', prompt="{query}")
    assert '"say #34;hi#34;#59; #91;x#93;: answer"' in chain(graph, 'say "hi"; [x]').compile().to_mermaid()
