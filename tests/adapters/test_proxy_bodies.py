"""What one body may cost the proxy: a time that grows with its length, and little memory."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import set_bounds

from ragorder import Document, Orderer, PromptBuilder
from ragorder.common.counts import Estimate

pytest.importorskip("starlette")

from support.bodies import Bodies
from support.rings import grid, length
from support.sent_requests import TEMPLATE, tag, tagged, user

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import MAX_VALUES, TooManyValuesError, count_values
from ragorder.adapters.proxy.bodies.parsing import Route
from ragorder.common.lru_cache import LRUCache

MIB = 1 << 20


def make(template: str | None = TEMPLATE, tokenizer: Any = None) -> Bodies:
    return Bodies(template, tokenizer, orderer=Orderer(strict=True))


def refused(bodies: Bodies, content: bytes, route: Route = "chat") -> dict[str, Any]:
    with pytest.raises(HTTPError) as caught:
        bodies.ordered(content, route)
    error: dict[str, Any] = caught.value.content["error"]
    return {"status": caught.value.status, **error}


def document(name: object, text: str = "text") -> str:
    return TEMPLATE.format(id=name, text=text)


def repeated(item: str, count: int, frame: str) -> bytes:
    return frame.replace("ITEMS", ",".join([item] * count)).encode()


IN_MESSAGES = '{"messages":[ITEMS]}'
IN_PARTS = '{"messages":[{"role":"user","content":[ITEMS]}]}'
IN_DOCUMENTS = '{"ragorder":{"query":"q","documents":[ITEMS]}}'
MESSAGE = '{"role":"user","content":"x"}'
PART = '{"type":"text","text":"x"}'


def cpu_s(work: Callable[[], object]) -> float:
    """The least of five times."""
    taken = []
    for _ in range(5):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize(("item", "frame"), [(MESSAGE, IN_MESSAGES), (PART, IN_PARTS)], ids=["messages", "parts"])
def test_time_grows_with_the_number_of_messages_and_not_with_its_square(item: str, frame: str) -> None:
    bodies = make()
    few, many = (repeated(item, count, frame) for count in (512, 4096))
    assert cpu_s(lambda: bodies.ordered(many)) < 24 * cpu_s(lambda: bodies.ordered(few))


def values_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_of, inner))


class TestValues:
    """No body becomes more objects than are counted before."""

    @pytest.mark.parametrize(
        ("route", "frame"),
        [
            ("chat", '{"messages":[],ITEMS}'),
            ("chat", '{"messages":[{"role":"user","content":"",ITEMS}]}'),
            ("chat", '{"messages":[{"role":"user","content":[{"type":"text","text":"",ITEMS}]}]}'),
            ("chat", '{"messages":[],"tools":[{ITEMS}]}'),
            ("completions", '{"prompt":"",ITEMS}'),
            ("messages", '{"messages":[{"content":[{"type":"tool_result","content":[{"text":"",ITEMS}]}]}]}'),
            ("responses", '{"input":[{"content":"",ITEMS}]}'),
        ],
    )
    def test_a_body_with_more_is_forwarded_and_counted(self, route: Route, frame: str) -> None:
        reasons: list[str] = []
        bodies = Bodies(TEMPLATE, on_passed=reasons.append)
        few, many = (
            frame.replace("ITEMS", ",".join(f'"{n:x}":0' for n in range(count))).encode()
            for count in (MAX_VALUES - 20, MAX_VALUES)
        )
        assert bodies.ordered(few, route) == few
        assert bodies.ordered(many, route) == many
        assert reasons == ["no_documents", "too_many_values"]

    @pytest.mark.parametrize("frame", ["{TAG,ITEMS}", '{"x":{ITEMS},TAG}', '{"messages":[{ITEMS}],TAG}'])
    def test_a_tagged_one_is_refused_with_the_limit(self, frame: str) -> None:
        names = ",".join(f'"{n:x}":0' for n in range(MAX_VALUES))
        tag = '"ragorder":{"documents":[],"query":"q"}'
        error = refused(make(), frame.replace("ITEMS", names).replace("TAG", tag).encode())
        assert (error["status"], error["code"], error["param"]) == (400, "too_many_values", "ragorder")
        assert f"{MAX_VALUES:,}" in error["message"]

    def test_one_with_as_many_is_ordered_with_all_of_them(self) -> None:
        names = {f"{n:x}": 0 for n in range(MAX_VALUES - 20)}
        bodies = make()
        for order in ("ab", "ba"):
            content = "".join(document(name, name * 400) for name in order)
            sent = bodies.forwarded({**names, "messages": [user(content)]})
        assert sent["messages"][0]["content"].startswith(document("a", "a" * 400))
        assert sent.keys() == {*names, "messages"}

    @given(
        st.recursive(
            st.none() | st.integers() | st.text('a,[]{}:"\\\né\ud83d', max_size=6),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text('a,["\\', max_size=4), inner, max_size=4)
            ),
            max_leaves=30,
        ),
        st.booleans(),
    )
    def test_no_value_is_missed_and_texts_count_nothing(self, value: object, padded: bool) -> None:
        count = values_of(value)
        # Longer than what is looked at in one piece.
        content = json.dumps([value, ',[{"' * (1 << 17)] if padded else value).encode()
        count += 2 * padded
        assert count <= count_values(content, 2 * count) <= 2 * count
        if count > 1:
            with pytest.raises(TooManyValuesError):
                count_values(content, count - 1)

    @pytest.mark.parametrize("text", [",", "[", '\\"', "\\\\", '\\\\\\"', "\\u005c", "{"])
    def test_a_long_text_is_one_value(self, text: str) -> None:
        assert count_values(b'["' + text.encode() * (1 << 20) + b'",1]', 10) <= 4


def told(surrogates: str, names: str = "ab") -> str:
    return "".join(document(name, f"{name * 400} {surrogates}") for name in names)


class TestLoneSurrogates:
    """A text that was cut in the middle of a character, as clients in Python and JavaScript write it."""

    CUT = (
        "\ud83d",
        "\ude00",
        "\ud800\ud800",
        "\ud83d \ude00",
        "\\\ud83d",
        "\U0001f600\ud83d",
        "\ud83d\U0001f600\ude00",
    )

    @pytest.mark.parametrize("cut", CUT, ids=ascii)
    @pytest.mark.parametrize("ascii_only", [True, False])
    def test_documents_are_ordered_and_stay_as_they_are(self, cut: str, ascii_only: bool) -> None:
        bodies = make()
        for order in ("ab", "ba"):
            body = {"messages": [{"role": "user", "content": told(cut, order), "x": "ü" + cut}], "user": cut}
            sent = bodies.ordered(written_as(body, ascii_only))
        assert json.loads(sent) == {
            "messages": [{"role": "user", "content": told(cut, "ab"), "x": "ü" + cut}],
            "user": cut,
        }

    @pytest.mark.parametrize("cut", CUT, ids=ascii)
    def test_tagged_ones_reach_the_prompt(self, cut: str) -> None:
        (message,) = make().forwarded(tagged("ab", cut + "?", texts={name: name + cut for name in "ab"}))["messages"]
        assert [each in message["content"] for each in ("a" + cut, "b" + cut, cut + "?")] == [True] * 3

    @pytest.mark.parametrize("cut", [b"\\ud83d", b"\\uD83D"])
    def test_what_is_not_reordered_stays_byte_for_byte(self, cut: bytes) -> None:
        content = json.dumps(told("CUT")).encode().replace(b"CUT", cut)
        body = b'{"messages": [{"role": "user", "content": %s}], "user" : "%s"}' % (content, cut)
        bodies = make()
        assert [bodies.ordered(body) for _ in range(2)] == [body, body]

    @pytest.mark.parametrize("own", ["\U0010f83d", "\U0010ffff"])
    def test_characters_that_stand_for_them_inside_stay_what_they_are(self, own: str) -> None:
        bodies = make()
        for order in ("ab", "ba"):
            body = {"messages": [user(told(own, order))]}
            assert bodies.forwarded(body)["messages"][0]["content"] == told(own)
        mixed = json.dumps({"messages": [user(told(own + "\ud83d"))]}).encode()
        assert make().ordered(mixed) == mixed

    def test_parts_of_a_message_are_told_apart(self) -> None:
        bodies = make()
        for order in ("ab", "ba"):
            parts = [{"type": "text", "text": document(name, name * 400 + "\ud800")} for name in order]
            sent = bodies.forwarded({"messages": [user(parts)]})
        texts = [each["text"] for each in sent["messages"][0]["content"]]
        assert texts == [document(name, name * 400 + "\ud800") for name in "ab"]

    def test_a_tag_on_another_route_is_refused_as_ever(self) -> None:
        error = refused(make(), b'{"ragorder": {}, "x": "\\ud83d"}', "other")
        assert error["code"] == "no_documents_here"


def written_as(body: object, ascii_only: bool) -> bytes:
    """JSON with its other characters as they are, or escaped as well."""
    text = json.dumps(body, ensure_ascii=False)
    escaped = "".join(f"\\u{ord(each):04x}" if "\ud800" <= each <= "\udfff" else each for each in text)
    return json.dumps(body).encode() if ascii_only else escaped.encode()


class TestTheTag:
    def tag(self, fields: str) -> bytes:
        return f'{{"ragorder":{{"query":"q","documents":[],{fields}}}}}'.encode()

    def test_reading_stops_at_the_first_unknown_field(self) -> None:
        bodies = make()
        few, many = (self.tag(",".join(f'"s{n:x}":0' for n in range(count))) for count in (10, 60_000))
        tracemalloc.start()
        try:
            assert refused(bodies, few) == refused(bodies, many)
            # The body itself is copied; an error for each name was 90 bytes for each byte.
            assert tracemalloc.get_traced_memory()[1] < 4 * len(many)
        finally:
            tracemalloc.stop()
        assert refused(bodies, many)["param"] == "ragorder"

    @pytest.mark.parametrize("item", ["0", "{}", '{"id":"1","text":""}'])
    def test_documents_are_counted_before_any_is_built(self, item: str) -> None:
        bodies, body = make(), repeated(item, 300_000, IN_DOCUMENTS)
        tracemalloc.start()
        try:
            error = refused(bodies, body)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
        finally:
            tracemalloc.stop()
        assert (error["status"], error["code"]) == (400, "too_many_values")

    @pytest.mark.parametrize(("tokens", "known"), [("3", 3), ("3.0", 3), ("3e2", 300)])
    def test_as_many_as_are_allowed_are_read(self, tokens: str, known: int) -> None:
        document = f'{{"id":"1","text":"a,b","tokens":{tokens}}}'
        read = make().parse("chat", repeated(document, 1024, IN_DOCUMENTS))
        assert read is not None
        assert [(type(each.tokens), each.tokens) for each in read.documents] == [(int, known)] * 1024
        error = refused(make(), repeated(document, 1025, IN_DOCUMENTS))
        assert (error["status"], error["param"]) == (400, "ragorder.documents")
        assert "1024" in error["message"]


class Counting:
    """A tokenizer that counts what it is asked: a token for each word."""

    all_special_tokens: Sequence[str] = ()
    added_tokens_decoder: Mapping[int, Any] = {}
    chat_template = None
    bos_token = None

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded.append(text)
        return [len(word) for word in text.split()]


def held_by(keeper: object) -> str:
    """All texts and bytes that are reachable from an object, short ones and code aside."""
    seen: set[int] = set()
    texts: list[str] = []
    waiting = [keeper]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, str | bytes | bytearray):
            texts.append(str(each))
        waiting += gc.get_referents(each)
    return "\n".join(texts)


class TestWhatIsKept:
    def text(self, number: int, words: int = 50) -> str:
        return f"secret{number} " * words

    def tagged(self, text: str, scope: str | None = None) -> bytes:
        given = tag("12", "q", {"1": text, "2": "two"}) | ({} if scope is None else {"scope": scope})
        return json.dumps({"messages": [], "ragorder": given}).encode()

    def written(self, text: str, scope: str | None = None) -> bytes:
        body: dict[str, Any] = {"messages": [user(document(1, text) + document(2, "two"))]}
        return json.dumps(body | ({} if scope is None else {"cache_salt": scope})).encode()

    @pytest.mark.parametrize("exact", [True, False], ids=["tokenizer", "estimated"])
    @pytest.mark.parametrize("kind", ["tagged", "written"])
    def test_no_text_is_kept(self, kind: str, exact: bool) -> None:
        tokenizer = Counting()
        bodies = make(tokenizer=tokenizer if exact else None)
        bodies.ordered(getattr(self, kind)(self.text(7), "secret"))
        assert ("secret" in held_by(bodies)) == exact, "the tokenizer of this test keeps them"
        tokenizer.encoded.clear()
        assert "secret" not in held_by(bodies)

    @pytest.mark.parametrize("kind", ["tagged", "written"])
    def test_another_tenants_text_is_counted_again(self, kind: str) -> None:
        tokenizer = Counting()
        bodies = make(tokenizer=tokenizer)

        def counted(scope: str | None) -> int:
            before = len(tokenizer.encoded)
            bodies.ordered(getattr(self, kind)(self.text(7), scope))
            return sum("secret" in text for text in tokenizer.encoded[before:])

        assert [counted(scope) for scope in ("one", "one", "two", None, None, "two")] == [1, 0, 1, 1, 0, 0]

    @pytest.mark.parametrize("kind", ["tagged", "written"])
    def test_long_documents_take_no_more_room_than_short_ones(self, kind: str) -> None:
        def kept(words: int) -> int:
            tokenizer = Counting()
            bodies = make(tokenizer=tokenizer)
            tracemalloc.start()
            try:
                for number in range(length(100, 40)):
                    bodies.ordered(getattr(self, kind)(self.text(number, words)))
                    tokenizer.encoded.clear()
                gc.collect()
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

        # Documents of 20 KB each: kept, they would be 800 KB or more.
        assert kept(2000) < kept(10) + 200_000

    def test_the_builders_tokens_are_bounded_in_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, prompt_bytes=1 << 20)
        tokenizer = Counting()
        builder = PromptBuilder("", tokenizer=tokenizer)

        def encoded(number: int) -> bool:
            tokenizer.encoded.clear()
            assert len(builder.document_ids(Document(str(number), "word " * 10_000))) == 10_001
            return bool(tokenizer.encoded)

        assert all(map(encoded, range(40)))
        tokenizer.encoded.clear()
        assert "word word" not in held_by(builder)
        # Of 40 documents with 80 kB of ids each, a few are kept, those that were used last.
        assert [encoded(number) for number in (39, 38, 0)] == [False, False, True]

    def test_lengths_of_prefixes_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, kept_prefixes=10)
        tokenizer = Counting()
        bodies = make(tokenizer=tokenizer)

        def counted(number: int) -> bool:
            tokenizer.encoded.clear()
            body = {"prompt": f"secret {number}", "ragorder": {"documents": [], "query": ""}}
            bodies.ordered(json.dumps(body).encode(), "completions")
            return any("secret" in text for text in tokenizer.encoded)

        assert all(map(counted, range(50)))
        assert [counted(number) for number in (49, 40, 0)] == [False, False, True]


class TestKept:
    @pytest.mark.parametrize("entries", [0, 1, 3, 100])
    def test_bounds_hold_and_the_least_recently_used_goes_first(self, entries: int) -> None:
        """A step reads a key, or puts a value that is its own size."""
        draw, kept = random.Random(entries), LRUCache[int](entries, 10)
        model: list[tuple[int, int]] = []
        for _ in range(1000):
            key, size = draw.randrange(6), draw.choice([None, *range(12)])
            found = [each for each in model if each[0] == key]
            model = [each for each in model if each[0] != key]
            if size is None:
                assert kept.get(key) == (found[0][1] if found else None)
                model += found
            else:
                kept.put(key, size, size)
                # What is larger than all is not kept.
                model += [(key, size)] if size <= 10 else []
            while len(model) > entries or sum(size for _, size in model) > 10:
                model.pop(0)
            assert (len(kept), kept.used) == (len(model), sum(size for _, size in model))
        # Without sizes the number of entries is the only bound.
        unsized = LRUCache[int](entries)
        for key in range(5):
            unsized.put(key, key)
        assert [unsized.get(key) for key in range(5)] == [key if key >= 5 - entries else None for key in range(5)]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_child_does_not_wait_for_a_thread_of_its_parent(self) -> None:
        begun, release = threading.Event(), threading.Event()

        class Held:
            """A key that keeps its reader inside the cache."""

            def __hash__(self) -> int:
                begun.set()
                return int(release.wait(60))

        kept: LRUCache[int] = LRUCache(2)
        kept.put("a", 1)
        reader = threading.Thread(target=kept.get, args=(Held(),))
        reader.start()
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            kept.put("b", 2)
            os._exit(0 if (kept.get("a"), kept.get("b")) == (None, 2) else 1)
        assert os.waitpid(child, 0)[1] == 0
        release.set()
        reader.join()
        assert kept.get("a") == 1


HOSTILE = {
    "messages": repeated(MESSAGE, MIB // 30, IN_MESSAGES),
    "parts": repeated(PART, MIB // 27, IN_PARTS),
    "zeros": repeated("0", MIB // 2, IN_MESSAGES),
    "zero parts": repeated("0", MIB // 2, IN_PARTS),
    "names": json.dumps({f"{number:x}": 0 for number in range(MIB // 11)}).encode(),
    "names in the tag": json.dumps({"ragorder": {f"{number:x}": 0 for number in range(MIB // 11)}}).encode(),
    "no documents": repeated("0", MIB // 2, IN_DOCUMENTS),
    "empty documents": repeated("{}", MIB // 3, IN_DOCUMENTS),
    "lists in the tag": b'{"ragorder":' + b"[" * (MIB // 2) + b"]" * (MIB // 2) + b"}",
    "a long text": json.dumps({"ragorder": tag("a", "", {"a": "[<|a" * 240_000})}).encode(),
    "names in a message": json.dumps({"messages": [{f"{number:x}": 0 for number in range(MIB // 11)}]}).encode(),
    "documents": json.dumps({"messages": [user("".join(document(n, "") for n in range(MIB // 36)))]}).encode(),
}


@pytest.mark.parametrize("name", grid(list(HOSTILE), 3))
def test_a_mebibyte_takes_a_second_and_64_mb_at_most(name: str) -> None:
    bodies, body = make(), HOSTILE[name]

    def work() -> None:
        try:
            bodies.ordered(body)
        except HTTPError as error:
            assert error.status == 400

    start = time.process_time()
    work()
    assert time.process_time() - start < len(body) / MIB
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < 64e6 * len(body) / MIB
    finally:
        tracemalloc.stop()


class TestLengthsByScript:
    """Without a tokenizer: tokens of 100 characters of each script, within what usual vocabularies have."""

    @pytest.mark.parametrize(
        ("letter", "least", "most"),
        [("a", 25, 25), ("é", 25, 25), ("б", 30, 60), ("م", 30, 60), ("ก", 40, 90), ("单", 55, 100), ("😀", 100, 300)],
    )
    def test_each_script_has_its_own(self, letter: str, least: int, most: int) -> None:
        bodies = Bodies("<d>{text}</d>")
        content = "".join(f"<d>{n}{letter * 100}</d>" for n in (1, 2))
        for body in ({"messages": [user(content)]}, tagged("ab", "?", texts=dict.fromkeys("ab", letter * 100))):
            for document in bodies.found(body).documents:
                # The marks have a few.
                assert least <= document.token_count <= most + 8
                assert document.tokens is None or isinstance(document.tokens, Estimate)

    @pytest.mark.parametrize(("letter", "tokens"), [("单", 1.0), ("单", 0.5), ("م", 0.6), ("a", 0.5)])
    def test_reported_prompts_correct_those_of_other_scripts(self, letter: str, tokens: float) -> None:
        bodies = Bodies("<d>{text}</d>")
        counts: list[int] = []
        for number in range(12):
            texts = [f"{number}{n}" + letter * (1000 + 50 * n) for n in range(4)]
            content = "".join(f"<d>{text}</d>" for text in texts)
            parsed = bodies.found({"messages": [user(content)]})
            counts.append(parsed.documents[0].token_count)
            count = round(tokens * sum(map(len, texts))) + 20
            bodies.answer(bodies.order(parsed), usage={"prompt_tokens": count, "completion_tokens": 1})
        # Latin lengths are the orderer's to learn.
        expected = 250 if letter == "a" else 1000 * tokens
        assert counts[-1] == pytest.approx(expected, rel=0.1)
