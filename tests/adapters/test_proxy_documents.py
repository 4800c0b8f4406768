"""Where documents may stand in a body, what is told of those that are not found, and what of an order is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from ragorder import Orderer, PromptBuilder

pytest.importorskip("starlette")

import httpx2
from support.bodies import Bodies
from support.sent_requests import CHAT, TEMPLATE, TEXTS, assistant, echo, part, post_to, proxy_to, user, written

from ragorder.adapters.observing import ObservedOrderer
from ragorder.adapters.proxy import DocumentTemplate


def tagged(names: str, ids: Sequence[object] | None = None) -> dict[str, Any]:
    documents = [{"id": str(id), "text": TEXTS[name]} for name, id in zip(names, ids or names, strict=True)]
    return {"model": "m", "messages": [], "ragorder": {"documents": documents, "query": "Which?"}}


def request(mode: str, names: str, ids: Sequence[object] | None = None) -> dict[str, Any]:
    """The documents in a tag, or else written into a message."""
    return tagged(names, ids) if mode == "tagged" else {"messages": [user(written(names, ids))]}


Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> Said:
    """What was said, in the log or as a warning."""
    caplog.set_level(logging.WARNING, "ragorder")
    return lambda: (
        [record.getMessage() for record in caplog.records]
        + [str(each.message) for each in recwarn if each.category.__name__ == "DegradedWarning"]
    )


class WatchedBodies(Bodies):
    """Bodies whose reasons to be forwarded without documents are in `reasons`."""

    def __init__(self, template: str | None = TEMPLATE, *arguments: Any, **options: Any) -> None:
        self.reasons: list[str] = []
        super().__init__(template, *arguments, on_passed=self.reasons.append, **options)


IMAGE = {"type": "image_url"}
X, Y = "x" * 398, "y" * 398
DOCUMENTS = user(written("ab") + "\nWhich?")


class TestAfterTheDocuments:
    """What follows the documents takes room in the cache, and displaces others there."""

    def after(self, *messages: Any, tokenizer: Any = None) -> int:
        return WatchedBodies(tokenizer=tokenizer).found({"messages": list(messages)}).suffix_tokens

    @pytest.mark.parametrize(
        ("messages", "tokens"),
        [
            ([DOCUMENTS], 2),
            ([DOCUMENTS, assistant(X), user("y" * 798)], 302),
            ([assistant(X), user(Y), DOCUMENTS], 2),
            ([{"role": "system", "content": written("ab")}, user(X), assistant(Y)], 200),
            ([user([part("See:"), part(written("ab")), part(X), IMAGE, part(Y)])], 200),
            ([DOCUMENTS, user([part(X), IMAGE, part(Y)])], 202),
            ([DOCUMENTS, 3, None, [], {"content": 3}, {"content": [3, {}]}, {"content": {}}], 2),
        ],
        ids=["nothing", "later messages", "earlier ones", "a system message's", "later parts", "parts", "unreadable"],
    )
    def test_each_text_counts(self, messages: list[Any], tokens: int) -> None:
        assert self.after(*messages) == tokens

    def test_documents_of_later_turns_and_calls_of_tools_count(self) -> None:
        later = user(written("cdef") + "\nAnd now?")
        assert self.after(DOCUMENTS, assistant("So."), later) > len(written("cdef")) // 4
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 400}}]
        assert self.after(DOCUMENTS, {"role": "assistant", "content": None, "tool_calls": calls}) > 100

    def test_later_messages_count_with_a_tokenizer(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = tokenizers["chatml"]
        alone = self.after(DOCUMENTS, tokenizer=tokenizer)
        assert alone == len(tokenizer.encode("\nWhich?", add_special_tokens=False))
        assert self.after(DOCUMENTS, assistant(X), tokenizer=tokenizer) == alone + 100

    def test_the_mirror_makes_room_for_the_history(self) -> None:
        """The mirror holds what the engine holds: long histories leave room for few conversations."""
        orderer = Orderer(block_size=16, capacity_tokens=4096, strict=True)
        bodies = WatchedBodies(orderer=orderer)
        for number in range(8):
            history = [assistant(f"{number}" * 2000), user("Which?")]
            bodies.served({"messages": [user(written("ab")), *history], "max_tokens": 1})
            bodies.served({"messages": [user(written("cd")), *history], "max_tokens": 1})
        # Eight such requests of about 750 tokens are more than the cache; without history nothing would be displaced.
        assert orderer.evicted_blocks > 8 * 2000 // 4 // 16


class TestDocumentsInParts:
    """One content part for each document."""

    def parts(self, names: str, *, image: int | None = None) -> dict[str, Any]:
        made = [part("See:"), *(part(written(name), number=1.50) for name in names), part("Which?")]
        if image is not None:
            made.insert(image, {"type": "image_url", "image_url": {"url": "data:,"}})
        return {"messages": [{"role": "system", "content": "s"}, user(made)], "seed": 1}

    def texts(self, body: dict[str, Any]) -> str:
        return "".join(
            each["text"][14] for each in body["messages"][-1]["content"] if "document" in each.get("text", "")
        )

    def test_bytes_elsewhere_stay(self) -> None:
        bodies = WatchedBodies()
        bodies.served(self.parts("abc"))
        went_on = bodies.order(bodies.found(self.parts("acb"))).take_body()
        assert went_on.count(b"1.5") == 3
        # Documents that stay where they are stay as they were written.
        assert json.dumps(part(written("a"), number=1.50)).encode() in went_on

    @pytest.mark.parametrize("image", [0, 1, 4, 5])
    def test_an_image_around_them_does_not_matter(self, image: int) -> None:
        bodies = WatchedBodies()
        bodies.served(self.parts("abc", image=image))
        assert bodies.served(self.parts("cab", image=image)) == self.parts("abc", image=image)

    def test_several_in_a_part_and_a_text_around_them(self) -> None:
        def body(names: str) -> dict[str, Any]:
            parts = [part(f"See: {written(names[0])}"), part(f"{written(names[1:])} Hm?")]
            return {"messages": [user(parts)]}

        bodies = WatchedBodies()
        bodies.served(body("abc"))
        assert bodies.served(body("bca")) == body("abc")

    def test_text_between_them_separates(self) -> None:
        parts = [part(written("a") + "and"), part(written("b"))]
        assert WatchedBodies().parse("chat", json.dumps({"messages": [user(parts)]}).encode()) is None

    def test_a_document_over_two_parts_is_not_recognised(self) -> None:
        one = written("a")
        parts = [part(one[:30]), part(one[30:]), part(written("b")), part(written("c"))]
        read = WatchedBodies().found({"messages": [user(parts)]})
        assert [each.text for each in read.documents] == [written("b"), written("c")]

    def test_what_comes_before_them_separates(self) -> None:
        bodies = WatchedBodies()

        def scope(before: Iterable[str]) -> bytes:
            return bodies.found({"messages": [user([*map(part, before), *map(part, map(written, "ab"))])]}).scope

        assert len({scope(before) for before in (["x"], ["x", "y"], ["xy"], [])}) == 4

    def test_with_a_tokenizer_they_are_as_long_as_elsewhere(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = tokenizers["chatml"]
        read = WatchedBodies(tokenizer=tokenizer, send_facts=True).found(self.parts("abc"))
        for name, each in zip("abc", read.documents, strict=True):
            assert each.tokens == len(tokenizer.encode(written(name), add_special_tokens=False))
        assert len(read.gaps) == 2


class TestWithoutDocuments:
    """The proxy says what it has not done."""

    @pytest.mark.parametrize(
        ("body", "reason", "route"),
        [
            ({"messages": [user("Hello")]}, "no_documents", "chat"),
            ({"messages": []}, "no_documents", "chat"),
            ({"messages": [user(written("a"))]}, "one_document", "chat"),
            ({"messages": [user(written("a")), user(written("b"))]}, "one_document", "chat"),
            ({"messages": [user(written("ab"))], "cache_salt": 7}, "unreadable", "chat"),
            ({"messages": [user("".join(['<document id="1">\n\n</document>'] * 1025))]}, "unreadable", "chat"),
            ([], "unreadable", "chat"),
            (b"{", "unreadable", "chat"),
            ({"input": "x"}, "other_route", "other"),
            (b"{", "other_route", "other"),
        ],
    )
    def test_each_is_counted_with_its_reason(self, body: Any, reason: str, route: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        bodies = WatchedBodies()
        assert bodies.parse(route, content) is None
        assert bodies.reasons == [reason]
        # A counter that fails costs no request.
        assert Bodies(on_passed=lambda reason: 1 / 0).parse(route, content) is None

    @pytest.mark.parametrize("template", [TEMPLATE, None])
    def test_a_template_that_never_matches_is_said_once(self, template: str | None, said: Said) -> None:
        bodies = WatchedBodies(template)
        secret = {"messages": [user("<doc>secret</doc><doc>secret</doc>")]}
        for _ in range(19):
            bodies.served(secret)
        assert said() == []
        for _ in range(40):
            bodies.served(secret)
        (complaint,) = said()
        assert "--template" in complaint
        assert "secret" not in complaint
        assert bodies.reasons == ["no_documents"] * 59

    def test_a_template_that_matched_once_is_not_warned_of(self, said: Said) -> None:
        bodies = WatchedBodies()
        bodies.served({"messages": [user(written("ab"))]})
        bodies.served(tagged("a"))
        assert bodies.reasons == [], "requests with documents are not counted"
        for _ in range(40):
            bodies.served({"messages": [user("Hello")]})
        assert said() == []


class TestOrderedRequestsThatShareNothing:
    """The answers have all headers of an ordering, and nothing is saved."""

    def asked(self, number: int, front: str, names: str = "", **fields: Any) -> dict[str, Any]:
        documents = written(names) if names else "".join(TEMPLATE.format(id=i, text=f"{number} {i}") for i in "ab")
        return {"messages": [user(f"{front}\n{documents}\nWhich?")], **fields}

    @pytest.mark.parametrize("shadow", [False, True])
    def test_is_said_once_if_the_text_before_the_documents_is_never_the_same(self, shadow: bool, said: Said) -> None:
        bodies = WatchedBodies(orderer=ObservedOrderer(Orderer(), shadow=shadow))
        for number in range(20):
            bodies.served(self.asked(number, f"It is {number} o'clock, secret.", "abc"))
        assert said() == [], "the first one cannot share anything"
        for number in range(20, 200):
            bodies.served(self.asked(number, f"It is {number} o'clock, secret.", "abc"))
        (complaint,) = said()
        assert "the text before their documents is never the same" in complaint and "secret" not in complaint

    def test_is_said_later_if_no_document_comes_again(self, said: Said) -> None:
        bodies = WatchedBodies()
        for number in range(100):
            bodies.served(self.asked(number, "Hi."))
        assert said() == [], "the first questions of a large corpus have no document in common"
        for number in range(100, 300):
            bodies.served(self.asked(number, "Hi."))
        (complaint,) = said()
        assert "no document was in two of them" in complaint

    @pytest.mark.parametrize("kind", ["a document again", "a long prefix", "tenants that came once"])
    def test_is_not_said_of_those_that_could(self, kind: str, said: Said) -> None:
        bodies = WatchedBodies()
        if kind == "a document again":
            for names in ("ab", "cb"):
                bodies.served(self.asked(0, "Hi.", names))
        for number in range(120):
            fields = {"cache_salt": f"tenant {number}"} if kind == "tenants that came once" else {}
            bodies.served(self.asked(number, "Be brief. " * 40 if kind == "a long prefix" else f"{number}", **fields))
        assert said() == []


RANKS = [("abc", "123"), ("cab", "123"), ("dcba", "1234")]
RANKINGS = ["abcd", "bcda", "cdab", "dabc", "badc", "abdc", "acbd", "dcba"] * 2


class TestIdsThatAreRanks:
    """An id that changes with the order comes before its text, which is then not found again."""

    @pytest.mark.parametrize("mode", ["tagged", "template"])
    @pytest.mark.parametrize(
        ("ids", "advice"),
        [("1234", "x-ragorder-permutation"), ("1213", "would not change them"), (None, None)],
        ids=["ranks", "numbers of sources", "names"],
    )
    def test_ids_that_are_ranks_are_warned_of_once_and_the_option_is_advised_where_it_helps(
        self, mode: str, ids: str | None, advice: str | None, said: Said
    ) -> None:
        bodies = WatchedBodies()
        for names in RANKINGS:
            bodies.served(request(mode, names, ids))
        if advice is None:
            assert said() == []
        else:
            (complaint,) = said()
            assert "--number-by-place" in complaint and advice in complaint and "document about" not in complaint

    def test_new_documents_under_old_ids_are_no_ranks(self, said: Said) -> None:
        bodies = WatchedBodies()
        for number in range(100):
            documents = [{"id": str(rank), "text": f"{number} {rank}"} for rank in range(3)]
            bodies.served({"messages": [], "ragorder": {"documents": documents, "query": ""}})
        assert said() == []

    @pytest.mark.parametrize("mode", ["tagged", "template"])
    def test_prompts_numbered_by_place_share_their_beginning(self, mode: str) -> None:
        bodies = WatchedBodies(number_by_place=True)

        def prompt(names: str, ids: str) -> str:
            content: str = bodies.served(request(mode, names, ids))["messages"][-1]["content"]
            return content

        first, second, third = (prompt(names, ids) for names, ids in RANKS)
        shared = len(written("abc")) if mode == "template" else first.index("Question")
        assert first[:shared] == second[:shared] == third[:shared]
        ids = [first.index(f'id="{place}"' if mode == "template" else f"[{place}]") for place in (1, 2, 3)]
        assert ids == sorted(ids)

    @pytest.mark.parametrize(
        ("template", "document"),
        [
            ('<source id="{id}">{text}</source>', '<source id="@" name="manual of %.pdf">%</source>'),
            ("<source id='{id}'>{text}</source>", "<source id='@' page='3'>%</source>"),
            ("<source id={id}>{text}</source>", "<source id=@ page=3>%</source>"),
            ('<s name="{title}" id="{id}">{text}</s>', '<s name="7" id="@" page="3">%</s>'),
            ('<s><t>{text}</t><i id="{id}" /></s>', '<s><t>%</t><i id="@" page="3" /></s>'),
            ("Document [{id}]: {text} (end)", "Document [@] [p. 7]: % (end)"),
            ("Source {id}: {text} (end)", "Source @ (manual of %.pdf): % (end)"),
            ("Source {id}\n{text} (end)", "Source @. Manual of %\n% (end)"),
        ],
    )
    def test_nothing_but_the_number_of_a_place_is_replaced(self, template: str, document: str) -> None:
        bodies = WatchedBodies(template, number_by_place=True)

        def prompt(names: str) -> str:
            return "\n".join(document.replace("%", name * 70).replace("@", str(at)) for at, name in enumerate(names, 1))

        bodies.served({"messages": [user(prompt("abc"))]})
        assert bodies.served({"messages": [user(prompt("cab"))]}) == {"messages": [user(prompt("abc"))]}

    @pytest.mark.parametrize("mode", ["tagged", "template"])
    @pytest.mark.parametrize(
        "ids", ["1213", "2341", "1235", "0123", ["1", "2", "3", "x"], ["01", "02", "03", "04"]], ids=str
    )
    def test_ids_that_number_no_places_stay_with_documents(self, mode: str, ids: Sequence[str], said: Said) -> None:
        """Several documents of a source have one number, which is the source's."""
        bodies, ids_of = WatchedBodies(number_by_place=True), dict(zip("abcd", ids, strict=True))
        asked = [request(mode, names, [ids_of[name] for name in names]) for names in ("abcd", "dbca")]
        first, second = map(bodies.served, asked)
        assert second == first
        if mode == "template":
            assert first == asked[0]
        content = first["messages"][-1]["content"]
        for name, id in zip("abcd", ids, strict=True):
            before = content[: content.index(TEXTS[name])]
            assert before.endswith(f'"{id}">\n' if mode == "template" else f"[{id}]\n")
        (complaint,) = said()
        assert "numbers of sources" in complaint and "show none" in complaint and "document about" not in complaint

    @pytest.mark.parametrize("count", [200, 400])
    def test_numbers_are_replaced_only_if_the_answer_tells_the_order(self, count: int) -> None:
        bodies = WatchedBodies("<d id={id}>{text}</d>", number_by_place=True)
        texts = [f"{number} is a document about {number}. " * 3 for number in range(count)]

        def served(order: Sequence[int]) -> str:
            content = "\n".join(f"<d id={place}>{texts[each]}</d>" for place, each in enumerate(order, 1))
            sent = bodies.served({"messages": [user(content)]})["messages"][0]["content"]
            assert (sent != content) <= ("x-ragorder-permutation" in bodies.headers)
            return str(sent)

        first = served(range(count))
        assert (served(range(count - 1, -1, -1)) == first) == (count == 200)

    def test_an_id_that_is_not_shown_is_no_part_of_the_key(self) -> None:
        bodies = WatchedBodies(builder=PromptBuilder("", document_template="{text}\n\n"))
        prompts = [bodies.served(tagged(names, ids))["messages"][-1]["content"] for names, ids in RANKS]
        shared = prompts[0].index("Question")
        assert len({prompt[:shared] for prompt in prompts}) == 1

    def test_a_title_that_is_shown_is_part_of_the_key(self) -> None:
        bodies = WatchedBodies(builder=PromptBuilder("", document_template="{title}: {text}\n\n"))

        def keys(title: str) -> list[str]:
            document = {"id": "1", "text": "text", "title": title}
            read = bodies.found({"messages": [], "ragorder": {"documents": [document], "query": ""}})
            return [each.key for each in read.documents]

        assert keys("one") != keys("two")

    @pytest.mark.parametrize(
        ("template", "fields", "before", "after"),
        [
            (TEMPLATE, {"id": "7", "text": 'x">\ny'}, '<document id="', '">\nx">\ny\n</document>'),
            ("<d>{text}\nSource: {id}</d>", {"id": "7", "text": "a\nSource: 3"}, "<d>a\nSource: 3\nSource: ", "</d>"),
            ("<d>{title}|{id}|{text}</d>", {"id": "7", "title": "t", "text": "a|b"}, "<d>t|", "|a|b</d>"),
            ("<d>{text}|{title}|{id}</d>", {"id": "7", "title": "t", "text": "a|b"}, "<d>a|b|t|", "</d>"),
            ("<d>{text}|{id}|{title}</d>", {"id": "7", "title": "t", "text": "a|b"}, "<d>a|b|", "|t</d>"),
            ("<d>{title}|{text}|{id}</d>", {"id": "", "title": "", "text": ""}, "<d>||", "</d>"),
        ],
    )
    def test_no_text_is_taken_for_its_id(self, template: str, fields: Any, before: str, after: str) -> None:
        parts = DocumentTemplate(template).split(template.format(**fields))
        assert parts == ((before, after), fields["id"])
        assert parts.with_id("12") == f"{before}12{after}"


Post = Callable[..., httpx2.Response]


@pytest.fixture
def post() -> Post:
    """Sends bodies through a proxy to `echo`."""
    return partial(post_to, proxy_to(echo, template=DocumentTemplate(TEMPLATE)))


class TestOtherRoutes:
    """Documents that a route would ignore are refused."""

    @pytest.mark.parametrize(
        "path", ["/v1/responses/input_tokens", "/v1/messages/batches", "/v1/embeddings", "/v2/chat/completions", "/x"]
    )
    def test_a_tagged_body_is_refused(self, path: str, post: Post) -> None:
        response = post(tagged("ab"), path)
        error = response.json()["error"]
        assert response.status_code == 400
        if path.startswith("/v1/messages"):
            assert error["type"] == "invalid_request_error"
        else:
            assert (error["code"], error["param"]) == ("no_documents_here", "ragorder")
        assert CHAT in error["message"]
        assert "document about" not in response.text

    def test_a_tagged_body_that_is_not_json_is_refused(self, post: Post) -> None:
        body = json.dumps(tagged("ab") | {"temperature": float("nan")}).encode()
        for path in ("/v1/responses", "/v1/embeddings"):
            assert post(body, path).status_code == 400

    def test_what_is_no_json_is_not_read(self, post: Post) -> None:
        body = json.dumps(tagged("ab")).encode()
        response = post(body, "/v1/audio/transcriptions", **{"content-type": "multipart/form-data; boundary=x"})
        assert (response.status_code, response.content) == (200, body)


class TestTheOrderThatWasServed:
    @pytest.mark.parametrize("body", [{"messages": [user("Hello")]}, tagged("")], ids=["untagged", "empty"])
    def test_there_are_no_headers_without_documents(self, body: Any, post: Post) -> None:
        assert not any(name.startswith("x-ragorder") for name in post(body).headers)

    def test_a_long_permutation_header_is_left_out(self, post: Post) -> None:
        documents = [{"id": str(number), "text": "x"} for number in range(500)]
        headers = post({"messages": [], "ragorder": {"documents": documents, "query": ""}}).headers
        assert "x-ragorder-permutation" not in headers
        assert headers["x-ragorder-predicted-cached-tokens"] == "0"
