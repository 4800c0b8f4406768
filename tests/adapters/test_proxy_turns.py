"""Conversations through the proxy: earlier turns are sent as before, and repeated documents are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Orderer

pytest.importorskip("starlette")

from support.bodies import Bodies
from support.inside import scopes_of, set_bounds
from support.rings import length
from support.sent_requests import TEMPLATE, RecordingOrderer, assistant, user, written

from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments, TemplateError
from ragorder.adapters.proxy.bodies.turns import SentTurns


def chat(*turns: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, *turns]}


def messages(*turns: Any) -> tuple[str, dict[str, Any]]:
    return "messages", {"model": "m", "max_tokens": 8, "system": "Be brief.", "messages": list(turns)}


def responses(*turns: Any) -> tuple[str, dict[str, Any]]:
    return "responses", {"model": "m", "instructions": "Be brief.", "input": list(turns), "prompt_cache_key": "k"}


ROUTES = pytest.mark.parametrize("route", [chat, messages, responses])
Route = Callable[..., tuple[Any, dict[str, Any]]]


class Proxy(Bodies):
    """Bodies whose answers came."""

    def __init__(self, **options: Any) -> None:
        super().__init__(TEMPLATE, **options)

    @property
    def named(self) -> str | None:
        return self.headers.get("x-ragorder-named")

    def sent(self, route: Any, body: dict[str, Any], *, fails: bool = False) -> Any:
        return self.served(body, route, status=503 if fails else 200)


def turns_of(body: dict[str, Any]) -> list[Any]:
    """The messages after the system prompt."""
    found = body.get("input", body.get("messages"))
    return [message for message in found if message.get("role") != "system"]


def with_repeats(**options: Any) -> Proxy:
    return Proxy(repeated=RepeatedDocuments(DocumentTemplate(TEMPLATE)), **options)


class Engine:
    """A prefix cache that never evicts: 4 characters a token, 16 tokens a block. Answers are not cached."""

    def __init__(self) -> None:
        self._blocks: set[str] = set()

    def serve(self, body: dict[str, Any]) -> tuple[int, int]:
        """Prompt and cached tokens."""
        text = "".join(f"<|{each['role']}|>{each['content']}" for each in body["messages"])
        prefixes = [text[:end] for end in range(64, len(text) + 1, 64)]
        cached = len(list(takewhile(self._blocks.__contains__, prefixes)))
        self._blocks.update(prefixes)
        return len(text) // 4, 16 * cached


class TestPredictions:
    @pytest.mark.parametrize("again", [False, True], ids=["documents in the first turn", "documents in each turn"])
    def test_what_follows_the_documents_is_found_again_in_the_next_turn(self, again: bool) -> None:
        """Questions, answers, and later documents: without them a conversation was predicted far too low, so that
        nothing could be said of the other order."""
        engine, proxy, off = Engine(), Proxy(), []
        for number, names in enumerate(("abc", "cad", "efg", "gbe")):
            history: list[Any] = []
            for turn in range(4):
                asked = f"What of {number} is it in turn {turn}? " * 4
                history.append(user(f"{written(names)}\n{asked}" if again or not turn else asked))
                request = proxy.order(proxy.found({"model": "m", "max_tokens": 8, "messages": history}))
                prompt, cached = engine.serve(json.loads(request.take_body()))
                details = {"prompt_tokens_details": {"cached_tokens": cached}}
                usage = {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8, **details}
                proxy.answer(request, usage=usage)
                off.append(abs(request.predicted_tokens - cached))
                history.append(assistant(f"It is {number} in turn {turn}."))
        assert max(off) <= 48

    def test_many_short_messages_never_have_negative_room(self) -> None:
        """Each is rounded up to whole tokens: together they have more than the answer has room for."""
        proxy = Proxy()
        for names in ("abc", "cab"):
            turns = [message for _ in range(200) for message in (assistant("Yes."), user("And?"))]
            body = {"max_tokens": 1, "messages": [user(f"{written(names)}\nWhich?"), *turns]}
            sent = proxy.forwarded(body)["messages"]
        assert sent[0]["content"].startswith(written("abc"))


CHANGED = TEMPLATE.format(id="a", text="It has changed since.")
FIRST = user(written("cba") + "\nWhich?")
LATER = [assistant("a"), user("Why?")]


def begun(route: Route, **options: Any) -> tuple[Proxy, list[Any]]:
    """A proxy whose cache has the documents in another order than the client's first turn, and what was sent of it."""
    proxy = Proxy(**options)
    proxy.sent(*route(user(written("abc") + "\nOther?")))
    return proxy, turns_of(proxy.sent(*route(FIRST)))


class TestEarlierTurns:
    @ROUTES
    def test_are_sent_as_they_were(self, route: Route) -> None:
        proxy, sent = begun(route)
        assert sent == [user(written("abc") + "\nWhich?")]
        assert turns_of(proxy.sent(*route(FIRST))) == sent, "the last turn may be generated again"
        # Whatever of the answer the client keeps.
        for answer in ("a", "a, but shorter", ""):
            later = [assistant(answer), user("Why?")]
            assert turns_of(proxy.sent(*route(FIRST, *later))) == [*sent, *later]
        # A client may keep what was sent.
        body = route(*sent, *LATER)
        assert proxy.sent(*body) == body[1]

    @ROUTES
    def test_the_beginning_of_an_answer_makes_no_earlier_turn(self, route: Route) -> None:
        """Clients prescribe it, as the last message."""
        proxy, _ = begun(route)
        prescribed = assistant("{")
        sent = turns_of(proxy.sent(*route(user(written("dcba") + "\nWhich?"), prescribed)))
        assert sent == [user(written("abcd") + "\nWhich?"), prescribed]

    @ROUTES
    def test_that_are_not_known_stay_as_they_are(self, route: Route) -> None:
        """The engine may have them from before this proxy."""
        orderer = RecordingOrderer()
        proxy = Proxy(orderer=orderer)
        proxy.sent(*route(user(written("ab") + "\nOther?")))
        body = route(FIRST, *LATER)
        assert proxy.sent(*body) == body[1]
        # The order that was not sent does not stay in flight.
        assert [outcome.served for outcome in orderer.finished] == [True, False, True]

    @ROUTES
    def test_that_another_process_has_sent_are_those_that_the_engine_holds(self, route: Route) -> None:
        orderer = Orderer(block_size=16, strict=True)
        _, sent = begun(route, orderer=orderer)
        assert turns_of(Proxy(orderer=orderer).sent(*route(FIRST, *LATER))) == [*sent, *LATER]

    @ROUTES
    def test_documents_of_later_turns_stay_in_rank_order(self, route: Route) -> None:
        proxy, sent = begun(route)
        for names in ("fed", "def", "cba"):
            body = route(FIRST, assistant("a"), user(written(names) + "\nWhy?"))
            assert turns_of(proxy.sent(*body)) == [*sent, *turns_of(body[1])[1:]]

    def test_documents_in_the_system_message_are_no_earlier_turn(self) -> None:
        proxy = Proxy()
        history = [user("Which?"), assistant("a"), user("Why?")]

        def body(names: str) -> dict[str, Any]:
            return {"messages": [{"role": "system", "content": written(names)}, *history]}

        proxy.sent("chat", body("abc"))
        assert proxy.sent("chat", body("cbad")) == body("abcd")
        instructions = {"instructions": written("cba"), "input": history, "prompt_cache_key": "k"}
        proxy.sent("responses", instructions | {"instructions": written("abc")})
        assert proxy.sent("responses", instructions)["instructions"] == written("abc")

    def test_tenants_have_histories_of_their_own(self) -> None:
        proxy = Proxy()

        def body(*turns: Any, salt: str) -> dict[str, Any]:
            return {"model": "m", "messages": list(turns), "cache_salt": salt}

        proxy.sent("chat", body(user(written("abc")), salt="one"))
        proxy.sent("chat", body(FIRST, salt="one"))
        later = body(FIRST, *LATER, salt="two")
        assert proxy.sent("chat", later) == later

    @ROUTES
    @pytest.mark.parametrize("dedup", [False, True])
    @given(
        st.lists(
            st.tuples(
                st.text("abcd", max_size=4), st.sampled_from(["ask", "fail", "branch", "other"]), st.integers(0, 3)
            ),
            max_size=10,
        ),
        st.sampled_from([300, None]),
    )
    def test_what_is_sent_extends_what_was_sent(
        self, route: Route, dedup: bool, steps: Sequence[Any], capacity_tokens: int | None
    ) -> None:
        """Whatever the cache has lost meanwhile, and whatever of an answer the client keeps."""
        orderer = Orderer(block_size=16, capacity_tokens=capacity_tokens, strict=True)
        proxy = with_repeats(orderer=orderer) if dedup else Proxy(orderer=orderer)
        # What each client has, and what the server got.
        branches: list[tuple[list[Any], list[Any]]] = [([], [])]
        for number, (names, kind, which) in enumerate(steps):
            place = which % len(branches)
            history, before = branches[place]
            if kind == "branch":
                branches.append((history, before))
            elif kind == "other":
                proxy.sent(*route(user(f"{written(names)}\nOther {number}?")))
            else:
                asked = [*history, user(f"{written(names)}\n{number}?")]
                sent = turns_of(proxy.sent(*route(*asked), fails=kind == "fail"))
                assert sent[: len(before)] == before
                assert len(sent) == len(asked)
                if kind == "ask":
                    answer = assistant(f"Answer {number}."[3 * which :])
                    branches[place] = ([*asked, answer], [*sent, answer])

    def test_many_turns_are_flat_in_memory(self) -> None:
        proxy = Proxy(orderer=Orderer(block_size=16, capacity_tokens=8000, strict=True))
        history: list[Any] = []
        before: list[Any] = []
        sizes = []
        count = length(1000, 300)
        for number in range(count):
            # A window of five to ten turns.
            if len(history) == 20:
                history, before = history[10:], []
            names = "".join("abcdefgh"[(number + place) % 8] for place in range(3))
            history.append(user(f"{written(names)}\n{number}?"))
            sent = turns_of(proxy.sent(*chat(*history)))
            assert sent[: len(before)] == before
            before = [*sent, assistant(str(number))]
            history.append(assistant(str(number)))
            sizes.append((proxy.orderer.tree_size, len(scopes_of(proxy.orderer))))
        assert max(sizes[count // 2 :])[0] <= max(sizes[: count // 2])[0]
        assert max(scopes for _, scopes in sizes) <= 1024

    def test_they_are_remembered_in_bounded_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, kept_turns=10)
        turns = SentTurns()
        for number in range(50):
            turns.remember(b"%d" % number, b"%d" % number, [1, 0])
        known = [turns.sent(b"%d" % number, 2) is not None for number in range(50)]
        assert known == [False] * 40 + [True] * 10


class TestRepeatedDocuments:
    @ROUTES
    def test_are_named_and_the_others_sent(self, route: Route) -> None:
        proxy = with_repeats()
        body = route(user(written("ab") + "\nWhich?"), assistant("a"), user(f"{written('cad')}\nWhy?"))
        *history, last = turns_of(proxy.sent(*body))
        assert history == turns_of(body[1])[:-1]
        assert last["content"] == f"{written('c')}\n[a] is above.\n{written('d')}\nWhy?"
        assert proxy.named == "1"

    @pytest.mark.parametrize(
        ("turns", "last", "named"),
        [
            ([user(written("a")), assistant("a"), user(f"{written('a')}\nWhy?")], "[a] is above.\nWhy?", "0"),
            (
                [user(written("ab")), assistant("a"), user(f"{CHANGED}\n{written('b')}")],
                f"{CHANGED}\n[b] is above.",
                "1",
            ),
            ([user("Which?"), assistant(written("ab")), user(written("ab"))], written("ab"), None),
            ([user(written("aab"))], written("aab"), None),
        ],
        ids=["a single one", "text that changed", "quoted by an answer", "twice in one text"],
    )
    def test_are_named_if_earlier_turns_hold_them(self, turns: list[Any], last: str, named: str | None) -> None:
        proxy = with_repeats()
        assert turns_of(proxy.sent(*chat(*turns))) == [*turns[:-1], user(last)]
        assert proxy.named == named

    def test_a_former_version_is_sent_again(self) -> None:
        """Its name would be that of the version that stands last."""
        body = chat(user(written("a")), assistant("a"), user(CHANGED), assistant("b"), user(written("a")))
        proxy = with_repeats()
        assert proxy.sent(*body) == body[1]
        again = chat(*body[1]["messages"][1:], assistant("c"), user(written("a")))
        assert turns_of(proxy.sent(*again))[-1] == user("[a] is above.")

    def test_in_the_system_message_they_stand_as_well(self) -> None:
        body = {"messages": [{"role": "system", "content": written("ab")}, user(f"{written('b')}\nWhich?")]}
        proxy = with_repeats()
        sent = proxy.sent("chat", body)
        assert sent["messages"] == [body["messages"][0], user("[b] is above.\nWhich?")]
        assert proxy.named == "0"

    def test_in_results_and_messages_of_tools(self) -> None:
        call = {"type": "function_call", "call_id": "1", "name": "search", "arguments": "{}"}

        def output(content: Any) -> dict[str, Any]:
            return {"type": "function_call_output", "call_id": "1", "output": content}

        body = responses(user("Which?"), call, output(written("ab")), call, output(written("bc")))
        sent = turns_of(with_repeats().sent(*body))
        assert sent == [*turns_of(body[1])[:-1], output(f"[b] is above.\n{written('c')}")]

        calls = [{"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]
        called = {"role": "assistant", "content": None, "tool_calls": calls}

        def result(content: str) -> dict[str, Any]:
            return {"role": "tool", "tool_call_id": "1", "content": content}

        asked = user(written("ab") + "\nWhich?")
        proxy = with_repeats()
        sent = turns_of(proxy.sent(*chat(asked, called, result(written("bc")), called, result(written("cd")))))
        named = [result(f"[b] is above.\n{written('c')}"), result(f"[c] is above.\n{written('d')}")]
        assert sent == [asked, called, named[0], called, named[1]]
        assert proxy.named == "0"

    def test_in_parts_of_results_of_tools(self) -> None:
        use = assistant([{"type": "tool_use", "id": "1", "name": "search", "input": {}}])

        def result(*texts: str) -> dict[str, Any]:
            return {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": t} for t in texts]}

        first = user([result(written("a"), written("b"))])
        body = messages(user("Which?"), use, first, use, user([result(written("b")), result(written("c"), "So.")]))
        sent = turns_of(with_repeats().sent(*body))
        assert sent[-1] == user([result("[b] is above."), result(written("c"), "So.")])
        assert sent[:-1] == turns_of(body[1])[:-1]

    def test_the_text_that_names_them_can_be_given(self) -> None:
        naming = RepeatedDocuments(DocumentTemplate(TEMPLATE), "(see {id})")
        proxy = Proxy(repeated=naming)
        body = chat(user(written("ab")), assistant("a"), user(written("a")))
        assert turns_of(proxy.sent(*body))[-1] == user("(see a)")

    @pytest.mark.parametrize(
        ("template", "reference", "message"),
        [
            (TEMPLATE, "[{id}] {text}", "reference needs {id}"),
            (TEMPLATE, "[{id", "reference needs {id}"),
            (TEMPLATE, "{id.real}", "reference needs {id}"),
            ("<d>{id}:{text}</d>", "<d>{id}:</d>", "looks like a document"),
        ],
    )
    def test_what_names_nothing_is_refused(self, template: str, reference: str, message: str) -> None:
        with pytest.raises(TemplateError, match=message):
            RepeatedDocuments(DocumentTemplate(template), reference)

    @given(st.lists(st.text("abcd", max_size=5), min_size=1, max_size=6), st.integers(0, 5))
    def test_every_document_of_the_last_turn_stands_in_what_is_sent(self, asked: Sequence[str], dropped: int) -> None:
        """Also if the client cuts off its history."""
        history: list[Any] = []
        for number, names in enumerate(asked):
            history += [user(f"{written(names)}\n{number}?"), assistant(f"a{number}")]
        kept = history[2 * min(dropped, len(asked) - 1) : -1]
        proxy = with_repeats()
        proxy.sent(*chat(*history[:-1]))
        sent = turns_of(proxy.sent(*chat(*kept)))
        texts = [message["content"] for message in sent]
        for name in asked[-1]:
            assert any(written(name) in text for text in texts)
        # No more than once, but within one text.
        for name in "abcd":
            assert sum(written(name) in text for text in texts) <= 1
        assert all(text.endswith("?") for text in texts[::2])
