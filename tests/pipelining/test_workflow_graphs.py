"""Graphs of workflows: what compiles, which node runs when, and what the stage-by-stage run returns."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.workflows import PlainPrompts, ScriptedEngine, compiled, found_by_name, graphs

from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    Generation,
    GraphError,
    NodeError,
    RAGraph,
    Retrieval,
    State,
    WorkflowError,
    WorkflowResult,
    hyde,
    interpret,
    irg,
    multistep,
    one_shot,
    recomp,
)
from ragorder.pipelining.workflow.execution import answered, call_step, documents_of, found, query_of, question_of
from ragorder.pipelining.workflow.join import Tokens

QUESTION = "Which drawer holds the key?"


async def run(graph: CompiledGraph, engine: ScriptedEngine | None = None, **options: Any) -> WorkflowResult:
    prompts = PlainPrompts()
    try:
        return await interpret(
            graph, QUESTION, engine=engine or ScriptedEngine(), prompts=prompts, retrieve=found_by_name, **options
        )
    finally:
        assert prompts.open == 0


def chain(graph: RAGraph, *ids: Any) -> RAGraph:
    for source, target in zip((START, *ids), (*ids, END), strict=True):
        graph.add_edge(source, target)
    return graph


def nothing(_: State) -> dict[str, Any]:
    return {}


class TestPaper:
    def test_listing_1(self) -> None:
        hyde = RAGraph()
        hyde.add_generation(0, prompt="Generate a hypothesis for {input}.", output="hypopara")
        hyde.add_retrieval(1, topk=5, query="hypopara", output="docs")
        hyde.add_generation(2, prompt="Answer {query} using {docs}.")
        hyde.add_edge(START, 0)
        hyde.add_edge(0, 1)
        hyde.add_edge(1, 2)
        hyde.add_edge(2, END)
        compiled = hyde.compile()
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
    @pytest.mark.parametrize("make", [one_shot, hyde, multistep, irg, recomp, lambda: recomp(each=True)])
    async def test_compiles_as_it_is(self, make: Any) -> None:
        result = await run(make().compile())
        assert result.text == result.state["answer"] != ""

    async def test_multistep_answers_each_subquestion_and_then_the_question(self) -> None:
        engine = ScriptedEngine(
            lambda asked: "1. Where is it?\n\n- Who has it?\nWhen?" if not asked.documents else "No."
        )
        result = await run(multistep(rounds=3).compile(), engine)
        texts = [asked.question.text for asked in engine.sent]
        assert [text.rsplit("above: ", 1)[-1] for text in texts[1:]] == ["Where is it?", "Who has it?", QUESTION]
        assert "Where is it? No.\nWho has it? No.\n" in texts[-1]
        assert result.text == "No."

    async def test_multistep_without_subquestions_answers_once(self) -> None:
        engine = ScriptedEngine(lambda asked: "")
        await run(multistep().compile(), engine)
        assert len(engine.sent) == 2

    async def test_irg_searches_with_the_last_answer(self) -> None:
        queries = []

        async def retrieve(query: str, topk: int) -> list[str]:
            queries.append(query)
            return [query]

        engine = ScriptedEngine(lambda asked: f"answer {len(engine.sent)}")
        result = await interpret(
            irg(rounds=3).compile(), QUESTION, engine=engine, prompts=PlainPrompts(), retrieve=retrieve
        )
        assert queries == [QUESTION, f"{QUESTION} answer 1", f"{QUESTION} answer 2"]
        assert result.text == "answer 3"

    async def test_hyde_searches_for_the_guess(self) -> None:
        engine = ScriptedEngine(lambda asked: "In the third." if not asked.documents else "Third.")
        await run(hyde(topk=1).compile(), engine)
        assert engine.sent[1].documents == ("n the third./0",)

    @pytest.mark.parametrize("found", [0, 2, 5])
    async def test_recomp_sums_up_each_document_that_was_found(self, found: int) -> None:
        async def retrieve(query: str, topk: int) -> list[str]:
            return [f"document {rank}" for rank in range(found)]

        engine = ScriptedEngine(lambda asked: f"of {asked.documents}" if asked.documents else "the answer")
        await interpret(
            recomp(topk=5, each=True).compile(), QUESTION, engine=engine, prompts=PlainPrompts(), retrieve=retrieve
        )
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

    def graph(self) -> RAGraph:
        return RAGraph("refused").add_generation("a", prompt="{query}", output="a")

    def check(self, graph: RAGraph, match: str, **options: Any) -> None:
        with pytest.raises(GraphError, match=match) as caught:
            graph.compile(**options)
        assert "workflow 'refused'" in str(caught.value)

    def test_unreachable(self) -> None:
        graph = chain(self.graph(), "a").add_step("b", nothing).add_edge("b", END)
        self.check(graph, "no way leads from START to 'b'")

    def test_nothing_first(self) -> None:
        self.check(self.graph().add_edge("a", END), "nothing comes first")

    def test_nothing_after(self) -> None:
        self.check(self.graph().add_edge(START, "a"), r"nothing comes after node 'a': add_edge\('a', END\)")

    def test_no_way_to_end(self) -> None:
        graph = self.graph().add_edge(START, "a").add_edge("a", lambda state: "a", to=["a"])
        self.check(graph, "no way leads to END from 'a'", max_rounds=3)

    def test_a_loop_that_never_ends_beside_a_way_out(self) -> None:
        graph = chain(self.graph(), "a").add_step("b", nothing).add_edge("a", "b").add_edge("b", "a")
        self.check(graph, "the loop through 'a', 'b' never ends", max_rounds=3)

    def test_a_loop_without_a_bound(self) -> None:
        graph = chain(self.graph(), "a").add_edge("a", lambda state: "a", to=["a", END])
        self.check(graph, "a loop leads from 'a' back to 'a': bound it")

    @pytest.mark.parametrize("bound", [0, -1, 1.5, True])
    def test_a_wrong_bound(self, bound: Any) -> None:
        self.check(chain(self.graph(), "a"), "max_rounds must be an integer", max_rounds=bound)

    def test_an_edge_to_no_node(self) -> None:
        self.check(chain(self.graph(), "a").add_edge("a", "c"), "an edge names 'c', which is no node; there are 'a'")
        graph = self.graph().add_edge(START, "a").add_edge("a", lambda state: END, to=["c", END])
        self.check(graph, "an edge names 'c'")

    @pytest.mark.parametrize("reader", ["generation", "retrieval", "step"])
    def test_an_unknown_name(self, reader: str) -> None:
        graph = self.graph().add_generation("last", prompt="{query}")
        match reader:
            case "generation":
                graph.add_generation("b", prompt="{documents}", output="b")
            case "retrieval":
                graph.add_retrieval("b", query="documents")
            case _:
                graph.add_step("b", nothing, reads="documents")
        self.check(chain(graph, "a", "b", "last"), "node 'b' reads 'documents', which is written by no node")

    def test_a_name_that_is_written_later(self) -> None:
        graph = self.graph().add_generation("b", prompt="{c}", output="b").add_generation("c", prompt="{b}", output="c")
        self.check(chain(graph, "a", "b", "c"), "node 'b' reads 'c', which is written only after it")

    def test_a_name_that_only_the_node_itself_writes(self) -> None:
        graph = RAGraph("refused").add_generation("a", prompt="{a}", output="a")
        chain(graph, "a").add_edge("a", lambda state: END, to=["a", END])
        self.check(graph, "node 'a' reads 'a', which is written only after it", max_rounds=2)

    def test_suggests_a_name(self) -> None:
        graph = RAGraph("refused").add_retrieval("search", query="quary")
        self.check(chain(graph, "search"), r"did you mean 'query'\?")

    @pytest.mark.parametrize(("source", "target"), [("a", "END"), ("START", "a")])
    def test_a_constant_in_quotes(self, source: Any, target: Any) -> None:
        graph = self.graph().add_edge(START, "a").add_edge(source, target)
        self.check(graph, r"an edge names '(START|END)', which is no node; give the constant \1, without quotes")

    async def test_a_graph_that_is_not_compiled(self) -> None:
        with pytest.raises(GraphError, match=r"workflow 'refused': compile\(\) the graph first"):
            await run(chain(self.graph(), "a"))  # type: ignore[arg-type]

    def test_a_loop_that_branches_enter_at_two_nodes(self) -> None:
        """Which search comes first is not clear: each leads to the other under a condition."""
        graph = RAGraph("refused", max_rounds=3).add_step("kb", nothing).add_step("web", nothing)
        graph.add_generation("check", prompt="{query}")
        for name in ("kb", "web"):
            graph.add_edge(START, name).add_edge(name, lambda state: END, to=["check", END])
        graph.add_edge("check", lambda state: END, to=["kb", "web", END])
        self.check(
            graph, "branches that part after START enter the loop of 'kb', 'web', 'check' at 'kb', 'web', and it"
        )
        routed = RAGraph("routed", max_rounds=3).add_step("kb", nothing).add_step("web", nothing)
        routed.add_generation("check", prompt="{query}").add_edge(START, lambda state: "web", to=["kb", "web"])
        routed.add_edge("kb", "check").add_edge("web", "check")
        assert routed.add_edge("check", lambda state: END, to=["kb", "web", END]).compile().answer == "answer"

    def test_writers_side_by_side(self) -> None:
        graph = self.graph().add_generation("b", prompt="{query}", output="x").add_step("c", nothing, writes="x")
        graph.add_edge(START, "a").add_edge("a", "b").add_edge("a", "c").add_edge("b", END).add_edge("c", END)
        self.check(graph, "'b', 'c' may run side by side after 'a' and both write 'x'")

    def test_one_writer_after_the_other_is_no_conflict(self) -> None:
        graph = self.graph().add_generation("b", prompt="{query}", output="a")
        graph.add_edge(START, "a").add_edge(START, "b").add_edge("a", "b").add_edge("b", END)
        assert graph.compile().answer == "a"

    def test_writers_of_which_one_is_chosen_are_no_conflict(self) -> None:
        graph = RAGraph().add_step("one", nothing).add_step("two", nothing).add_step("meet", nothing)
        graph.add_generation("short", prompt="{query}").add_generation("long", prompt="{query}")
        graph.add_edge(START, "one").add_edge(START, "two").add_edge("one", "meet").add_edge("two", "meet")
        graph.add_edge("meet", lambda state: "long", to=["short", "long"]).add_edge("short", END).add_edge("long", END)
        assert graph.compile().answer == "answer"

    def test_no_answer(self) -> None:
        graph = RAGraph("refused").add_retrieval("search", query="query")
        self.check(chain(graph, "search"), r"no generation comes last: say which is the result, compile\(answer=…\)")
        self.check(graph, "answer='text' is written by no node", answer="text")
        assert graph.compile(answer="docs").answer == "docs"

    def test_several_answers(self) -> None:
        graph = self.graph().add_generation("b", prompt="{query}", output="b")
        graph.add_edge(START, "a").add_edge(START, "b").add_edge("a", END).add_edge("b", END)
        self.check(graph, "several generations come last, with 'a', 'b'")
        assert graph.compile(answer="b").answer == "b"

    def test_the_answer_may_come_before_a_last_step(self) -> None:
        graph = self.graph().add_generation("b", prompt="{a}", output="b").add_step("note", nothing)
        assert chain(graph, "a", "b", "note").compile().answer == "b"

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
            add(self.graph())
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
        ("returned", "match"),
        [
            (None, "must return a mapping of names to values, got NoneType"),
            ({"other": 1}, "the step returned 'other': name them in `writes`"),
        ],
    )
    async def test_a_step_that_returns_what_it_must_not(self, returned: Any, match: str) -> None:
        graph = RAGraph("broken").add_step("step", lambda state: returned, writes="name")
        graph.add_generation("answer", prompt="{query}")
        with pytest.raises(NodeError, match=match):
            await run(chain(graph, "step", "answer").compile())

    @pytest.mark.parametrize("target", ["c", None, START, ["a"]])
    async def test_a_conditional_edge_to_no_node(self, target: Any) -> None:
        graph = RAGraph("broken").add_generation("a", prompt="{query}").add_edge(START, "a")
        graph.add_edge("a", lambda state: target, to=["a", END])
        with pytest.raises(GraphError, match=r"the conditional edge from 'a' returned .* it may return 'a', END"):
            await run(graph.compile(max_rounds=2))

    async def test_a_conditional_edge_that_raises(self) -> None:
        graph = RAGraph("broken").add_generation("a", prompt="{query}").add_edge(START, "a")
        graph.add_edge("a", lambda state: state["missing"], to=[END])
        with pytest.raises(NodeError, match="node 'a': conditional edge: the state has no 'missing', only"):
            await run(graph.compile())

    async def test_documents_that_are_none(self) -> None:
        graph = RAGraph("broken").add_generation("a", prompt="{query}", output="a")
        graph.add_generation("b", prompt="{a}", documents="a")
        with pytest.raises(NodeError, match="node 'b': documents must be a sequence of them, got str"):
            await run(chain(graph, "a", "b").compile())

    async def test_a_name_that_this_branch_did_not_write(self) -> None:
        graph = RAGraph("broken").add_step("a", nothing, writes="note").add_generation("b", prompt="{note}")
        with pytest.raises(NodeError, match="node 'b': the state has no 'note'"):
            await run(chain(graph, "a", "b").compile())

    async def test_an_answer_that_no_branch_wrote(self) -> None:
        graph = RAGraph("broken").add_generation("a", prompt="{query}").add_edge("a", END)
        graph.add_edge(START, lambda state: END, to=["a", END])
        with pytest.raises(NodeError, match="no node on the way has written the answer, 'answer'"):
            await run(graph.compile())

    async def test_a_single_name_is_not_split_into_letters(self) -> None:
        graph = RAGraph("styled", inputs="style").add_generation("answer", prompt="{query} in {style}")
        assert graph.inputs == ("style",)
        graph.add_generation(3, prompt="{answer}", output="last")
        graph.add_edge(START, lambda state: "answer", to="answer").add_edge("answer", lambda state: 3, to=3)
        graph.add_edge(3, lambda state: END, to=END)
        compiled = graph.compile(answer="answer")
        assert [compiled.next_nodes(place) for place in (START, "answer", 3)] == [("answer",), (3,), ()]
        engine = ScriptedEngine()
        await run(compiled, engine, state={"style": "verse"})
        assert engine.sent[0].question.text == f"{QUESTION} in verse"

    async def test_inputs(self) -> None:
        graph = RAGraph("styled", inputs=["style"]).add_generation("a", prompt="{query} in {style}")
        compiled = chain(graph, "a").compile()
        engine = ScriptedEngine()
        await run(compiled, engine, state={"style": "verse"})
        assert engine.sent[0].question.text == f"{QUESTION} in verse"
        with pytest.raises(GraphError, match="workflow 'styled': give 'style' in `state`"):
            await run(compiled)
        with pytest.raises(GraphError, match=r"'query' in `state`: name them, RAGraph\(inputs=…\)"):
            await run(compiled, state={"style": "verse", "query": "other"})

    async def test_options_of_a_generation(self) -> None:
        graph = RAGraph().add_generation("a", prompt="{query}", max_tokens=7, temperature=0.5, stop=["."])
        engine = ScriptedEngine()
        await run(chain(graph, "a").compile(), engine, scope="tenant")
        question = engine.sent[0].question
        assert (question.scope, question.max_tokens, question.temperature) == ("tenant", 7, 0.5)
        assert question.options == {"stop": ["."]}

    async def test_documents_come_first_and_are_named_in_the_text(self) -> None:
        graph = RAGraph().add_retrieval("search", query="{query}", topk=2)
        graph.add_generation("answer", prompt="{query} Use {docs}.")
        engine = ScriptedEngine()
        await run(chain(graph, "search", "answer").compile(), engine)
        assert engine.sent[0].question.text == f"{QUESTION} Use the documents above."
        assert engine.sent[0].documents == ("lds the key?/0", "lds the key?/1")

    def test_documents_of_two_searches_are_shown_once_each(self) -> None:
        graph = RAGraph().add_retrieval("one", query="query", output="left").add_retrieval("two", query="query")
        graph.add_generation(
            "answer", prompt=lambda state: f"{state['left']}|{state['docs']}", documents=["left", "docs"]
        )
        node = chain(graph, "one", "two", "answer").compile().nodes["answer"]
        shared, own = object(), object()
        state = State.of(QUESTION).with_("left", (shared,)).with_("docs", (own, shared))
        assert documents_of(node, state) == (shared, own)
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
        assert state.with_("a", 1)["a"] == 1
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

    def go(self, tokens: Tokens, *ids: str) -> None:
        for run in tokens.running:
            if run.id in ids:
                tokens.finish(run, {run.id: run.round})

    def started(self, tokens: Tokens) -> list[tuple[Any, int]]:
        return [(run.id, run.round) for run in tokens.take()]

    def test_a_slow_branch_holds_up_only_what_needs_it(self) -> None:
        tokens = self.tokens((START, "a"), (START, "b"), ("a", "c"), ("c", "d"), ("b", "d"), ("d", END))
        assert self.started(tokens) == [("a", 0), ("b", 0)]
        self.go(tokens, "a")
        assert self.started(tokens) == [("c", 0)]
        self.go(tokens, "c")
        assert self.started(tokens) == []
        self.go(tokens, "b")
        assert self.started(tokens) == [("d", 0)]
        self.go(tokens, "d")
        assert tokens.done
        assert {"a", "b", "c", "d"} < set(tokens.state)

    def test_branches_inside_a_loop_run_side_by_side(self) -> None:
        again = iter([True, False])
        tokens = self.tokens(
            (START, "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"),
            ("d", lambda state: "a" if next(again) else END, "a", END),
            max_rounds=2,
        )  # fmt: skip
        for round in (0, 1):
            assert self.started(tokens) == [("a", round)]
            self.go(tokens, "a")
            assert self.started(tokens) == [("b", round), ("c", round)]
            self.go(tokens, "c")
            assert self.started(tokens) == []
            self.go(tokens, "b")
            assert self.started(tokens) == [("d", round)]
            self.go(tokens, "d")
        assert tokens.done

    def test_a_branch_that_was_not_taken_is_not_awaited(self) -> None:
        tokens = self.tokens((START, "a"), ("a", lambda state: "b", "b", "c"), ("b", "d"), ("c", "d"), ("d", END))
        self.started(tokens)
        self.go(tokens, "a")
        assert self.started(tokens) == [("b", 0)]
        self.go(tokens, "b")
        assert self.started(tokens) == [("d", 0)]

    def test_a_loop_ends_before_what_follows_it_joins(self) -> None:
        """However long the branch beside it takes."""
        for slow in (False, True):
            again = iter([True, True, False])
            tokens = self.tokens(
                (START, "kb"), (START, "refine"), ("kb", "answer"), ("answer", END),
                ("refine", lambda state, again=again: "refine" if next(again) else "answer", "refine", "answer"),
                max_rounds=3,
            )  # fmt: skip
            assert self.started(tokens) == [("kb", 0), ("refine", 0)]
            if not slow:
                self.go(tokens, "kb")
            for round in (1, 2):
                self.go(tokens, "refine")
                assert self.started(tokens) == [("refine", round)]
            self.go(tokens, "refine")
            if slow:
                assert self.started(tokens) == []
                self.go(tokens, "kb")
            assert self.started(tokens) == [("answer", 0)]
            self.go(tokens, "answer")
            assert tokens.done
            assert (tokens.state["kb"], tokens.state["refine"]) == (0, 2)

    def test_what_leaves_a_loop_in_each_round_arrives_once(self) -> None:
        again = iter([True, False])
        tokens = self.tokens(
            (START, "a"), ("a", "log"), ("log", END), ("a", lambda state: "a" if next(again) else END, "a", END),
            max_rounds=2,
        )  # fmt: skip
        for round in (0, 1):
            assert self.started(tokens) == [("a", round)]
            self.go(tokens, "a")
        assert self.started(tokens) == [("log", 0)]
        self.go(tokens, "log")
        assert tokens.done
        assert tokens.state["a"] == 1

    def test_a_loop_that_is_joined_beyond_its_head_begins_before_the_other_branch_ends(self) -> None:
        again = iter([True, False])
        tokens = self.tokens(
            (START, "kb"), (START, "web"), ("kb", "answer"), ("web", "answer"),
            ("answer", lambda state: "web" if next(again) else END, "web", END),
            max_rounds=2,
        )  # fmt: skip
        assert self.started(tokens) == [("kb", 0), ("web", 0)]
        self.go(tokens, "web")
        assert self.started(tokens) == []
        self.go(tokens, "kb")
        assert self.started(tokens) == [("answer", 0)]
        self.go(tokens, "answer")
        assert self.started(tokens) == [("web", 1)]
        self.go(tokens, "web")
        assert self.started(tokens) == [("answer", 1)]
        self.go(tokens, "answer")
        assert tokens.done

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


async def interleaved(graph: CompiledGraph, seed: int) -> WorkflowResult:
    """As `interpret`, but whichever node of those that run ends first is drawn."""
    engine, prompts, draw = ScriptedEngine(), PlainPrompts(), random.Random(seed)
    tokens = Tokens(graph, graph.begin(QUESTION))
    running: list[Any] = []
    while running := running + tokens.take():
        run = running.pop(draw.randrange(len(running)))
        values = await values_of(run, engine, prompts)
        tokens.finish(run, values)
    assert tokens.done
    return WorkflowResult.of(graph, tokens.state)


async def values_of(run: Any, engine: ScriptedEngine, prompts: PlainPrompts) -> Any:
    if isinstance(run.node, Generation):
        asked = prompts.preview(question_of(run.node, run.state), documents_of(run.node, run.state))
        return answered(run.node, engine.answer(asked), run.state)
    if isinstance(run.node, Retrieval):
        return found(run.node, await found_by_name(query_of(run.node, run.state), run.node.topk))
    return await call_step(run.node, run.state)


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

    @given(graphs(), st.integers(0, 2**32))
    def test_no_order_of_ends_makes_a_difference(self, graph: RAGraph, seed: int) -> None:
        if (made := compiled(graph)) is not None:
            assert asyncio.run(outcome(run(made))) == asyncio.run(outcome(interleaved(made, seed)))


async def outcome(running: Any) -> Any:
    """A result's state; an error's type: which of two failures comes first may differ."""
    try:
        return sorted((await running).state.items())
    except WorkflowError:
        return "failed"


def test_mermaid() -> None:
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


def test_mermaid_shows_any_id() -> None:
    graph = RAGraph().add_generation('say "hi"; [x]', prompt="{query}")
    assert '"say #34;hi#34;#59; #91;x#93;: answer"' in chain(graph, 'say "hi"; [x]').compile().to_mermaid()
