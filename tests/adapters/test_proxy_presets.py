"""Presets: prompts of known applications, as these would have written them in the sent order."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")

from support.bodies import Bodies
from support.rings import ALL, grid, length
from support.sent_requests import TEXTS, echo, post_to, proxy_to
from support.shaped_requests import CORPORA, MARKS, ask, retrievals, texts_of
from support.shapes import KEPT, OPEN_ENDED, SHAPES

from ragorder import Orderer
from ragorder.adapters.learning.suggestion import suggest
from ragorder.adapters.observing import Metrics, ObservedOrderer, Stats
from ragorder.adapters.proxy import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.bodies.presets import PromptRecogniser, find_templates, presets
from ragorder.benchmarks.proxy.shapes import APPLICATIONS, Passage, Shape

NAMES = list(presets())
SENT = CORPORA if ALL else CORPORA[:1]


def asked(names: Sequence[str], texts: Mapping[str, str] | None = None) -> list[Passage]:
    return [Passage(name, f"{name}.md", (texts or TEXTS)[name]) for name in names]


def written(shape: str, names: Sequence[str]) -> bytes:
    return SHAPES[shape].encode(asked(names), "Which?")


def bodies(name: str, **options: Any) -> Bodies:
    return Bodies(None, templates=find_templates(name), **options)


class TestPresets:
    def test_each_is_the_shape_of_an_application(self) -> None:
        assert set(NAMES) < set(APPLICATIONS)
        assert all(SHAPES[name].template == name for name in NAMES)

    def test_the_documented_options_are_those_that_are_measured(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text("utf-8")
        table = page.partition("| application | option |")[2].partition("\n\n")[0]
        options = re.findall(r"\| `--template '?(.+?)'?` \|", table)
        measured = [shape.template for shape in APPLICATIONS.values()]
        assert len(options) > len(NAMES)
        assert [each for each in options if each.replace("\\n", "\n") not in measured] == []

    @pytest.mark.parametrize("name", NAMES)
    def test_its_sample_is_recognised_by_it_alone(self, name: str) -> None:
        sample = presets()[name].sample
        found = [other for other in NAMES if find_templates(other)[0].find(sample) is not None]
        assert found == [name]
        run = find_templates(name)[0].find(sample)
        assert run is not None
        assert len(run.documents) == 2
        assert all(preset.application and preset.origin for preset in presets().values())


class TestShapes:
    """What is sent is what the application writes for its documents in the sent order, or what it has sent."""

    @pytest.mark.parametrize("name", [name for name in SHAPES if name not in KEPT])
    def test_documents_extend_the_cached_prefix(self, name: str) -> None:
        shape = SHAPES[name]
        reads = Bodies(None, templates=shape.templates(), finds_native=True)
        # Without a tail the last document stays where it is.
        last = "e" if name == OPEN_ENDED else ""
        for order, sent in (("abcd", "abcd"), ("dbac", "abcd"), ("cab", "abc")):
            body = reads.ordered(written(name, order + last), ROUTES[shape.path])
            assert body == written(name, sent + last)

    @pytest.mark.parametrize("name", SHAPES)
    @given(data=st.data())
    @settings(max_examples=length(40, 10), suppress_health_check=list(HealthCheck))
    def test_texts_may_have_marks_of_any_application(self, name: str, data: st.DataObject) -> None:
        shape = SHAPES[name]
        reads = Bodies(None, templates=shape.templates(), finds_native=True)
        pieces = st.lists(st.sampled_from([*MARKS, "word ", "other words "]), min_size=1, max_size=6)
        texts = {letter: f"{letter} {''.join(data.draw(pieces))} {letter * 40}" for letter in "abcde"}
        for _ in range(4):
            order = data.draw(st.permutations("abcde"))[:4]
            own = ask(shape, (asked(order, texts), "Which?"))
            body = shape.encode(*own)
            sent = reads.ordered(body, ROUTES[shape.path])
            assert sent is body or shape.orders(*own, sent)

    @pytest.mark.parametrize("name", grid(list(SHAPES), 5))
    def test_through_the_proxy(self, name: str) -> None:
        shape = SHAPES[name]
        assert bool(moved_by(shape.templates(), shape)) == (name not in KEPT)

    @pytest.mark.parametrize("name", grid(list(SHAPES), 2))
    def test_with_template_auto(self, name: str) -> None:
        shape = SHAPES[name]
        is_recognised = shape.template == "auto" or (name in NAMES and presets()[name].automatic)
        assert bool(moved_by(find_templates("auto"), shape)) == (is_recognised and name not in KEPT)

    @pytest.mark.parametrize("name", grid(list(SHAPES), 2))
    def test_by_a_template_learnt_from_the_first_requests(self, name: str, tmp_path: Path) -> None:
        """Documents have marks of all applications."""
        shape, file = SHAPES[name], tmp_path / "learnt.toml"
        for corpus in SENT:
            requests = retrievals(corpus, length(300, 200))
            if requests is None:
                continue
            found = suggest([texts_of(shape.encode(*each)) for each in requests[:150]], 131_072)
            if isinstance(found, str) or found.refused:
                continue
            file.write_text(found.toml(), "utf-8")
            send = proxied(find_templates(str(file)))
            for each in requests[150:]:
                sent, permutation = send(shape.path, body := shape.encode(*each))
                assert sent == body or shape.orders(*each, sent, permutation)


ROUTES: Mapping[str, Any] = {
    "/v1/chat/completions": "chat",
    "/v2/chat": "cohere",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/completions": "completions",
}
Send = Callable[[str, bytes], tuple[bytes, str | None]]


def proxied(templates: Sequence[DocumentTemplate]) -> Send:
    """Through a proxy: sends a body, and gives what came and in which order."""
    app = proxy_to(echo, template=templates)

    def send(path: str, body: bytes) -> tuple[bytes, str | None]:
        answer = post_to(app, body, path)
        assert answer.status_code == 200
        return answer.content, answer.headers.get("x-ragorder-permutation")

    return send


def moved_by(templates: Sequence[DocumentTemplate], shape: Shape) -> int:
    """The number of requests whose documents are sent in another order."""
    moved, send = 0, proxied(templates)
    for each in chain.from_iterable(retrievals(corpus, length(300, 30)) or () for corpus in SENT):
        own = ask(shape, each)
        sent, permutation = send(shape.path, body := shape.encode(*own))
        if sent != body:
            assert shape.orders(*own, sent, permutation)
            moved += 1
    return moved


def without_documents(rng: random.Random) -> bytes:
    """A request of another kind of program."""

    def word() -> str:
        return rng.choice("order refund engine window policy return parcel manual gasket torque".split())  # noqa: SIM905

    def line() -> str:
        return " ".join(word() for _ in range(rng.randint(3, 12)))

    kinds: list[Callable[[], str]] = [
        lambda: f"{line()}?",
        lambda: "\n".join(f"{n}. {line()}" for n in range(1, rng.randint(3, 9))),
        lambda: "\n\n".join(f"Thought: {line()}\nAction: {word()}\nObservation: {line()}" for _ in range(4)),
        lambda: f"```python\ndef {word()}():\n    return '{line()}'\n```\n\n```\n{line()}\n```\nFix it.",
        lambda: "".join(f"Input: {line()}\nOutput: {word()}\n\n" for _ in range(5)) + f"Input: {line()}\nOutput:",
        lambda: "".join(f"<example>\n{line()}\n<answer>{word()}</answer>\n</example>\n" for _ in range(4)),
        lambda: "Glossary:\n" + "\n".join(f"- {word()} = {word()}" for _ in range(6)) + f"\n\nTranslate: {line()}",
        lambda: json.dumps([{"name": word(), "options": [word(), word()]} for _ in range(4)]) + "\nChoose.",
        lambda: "\n---\n".join(f"## Step {n}\n{line()}" for n in range(1, 5)),
        lambda: f'<plan>\n<step id="1">{line()}</step>\n<step id="2">{line()}</step>\n</plan>',
        lambda: 'Cite (e.g., <source id="1">) and close with </source>.\nSource 1: ' + line() + "\nSource 2: " + line(),
        lambda: f"Context:\n{line()}\n\nQuestion: {line()}\nAnswer:",
        lambda: "| a | b |\n|---|---|\n" + "\n".join(f"| {word()} | {word()} |" for _ in range(6)),
        lambda: "\n".join(f"2026-06-0{n} 12:00:0{n} ERROR [{word()}] {line()}" for n in range(1, 8)),
        lambda: f"diff --git a/{word()} b/{word()}\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-{line()}\n+{line()}\n",
        lambda: "".join(f"File: src/{word()}.py\n```\n{line()}\n```\n" for _ in range(3)) + "Review them.",
        lambda: "\n".join(f"Document {n}: {line()}" for n in range(1, 4)) + "\nWhich of my drafts is best?",
        lambda: f"{line()}\n\n[1] {line()}\n[2] {line()}\n",
        lambda: "---------------------\n" + f"{line()}\n" + "---------------------\nGiven the above, answer.",
    ]

    def text() -> str:
        return "\n\n".join(rng.choice(kinds)() for _ in range(rng.randint(1, 3)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for number in range(rng.randint(0, 3)):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        if rng.random() < 0.5:
            call = {"id": f"c{number}", "type": "function", "function": {"name": word(), "arguments": "{}"}}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": f"c{number}", "content": text()}]
    parts = [{"type": "text", "text": text()}, {"type": "text", "text": text()}]
    messages.append({"role": "user", "content": rng.choice([text(), parts])})
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if rng.random() < 0.5:
        body["tools"] = [{"type": "function", "function": {"name": word(), "parameters": {}}} for _ in range(3)]
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()


class TestPromptsWithoutDocuments:
    @pytest.mark.parametrize("name", ["auto", *NAMES])
    def test_none_is_changed_by_a_byte(self, name: str) -> None:
        rng, reads = random.Random(name), bodies(name, finds_native=True)
        for _ in range(length(2000, 200)):
            body = without_documents(rng)
            assert reads.ordered(body) is body

    def test_nor_in_shadow(self) -> None:
        rng = random.Random(5)
        recogniser = PromptRecogniser(Orderer().settings, lambda *_: None)
        shadow = Bodies(None, finds_native=True, recogniser=recogniser, warn=lambda _: None)
        for _ in range(length(2000, 500)):
            body = without_documents(rng)
            assert shadow.ordered(body) is body
        assert recogniser.hint() == ""


class TestNames:
    def test_auto_takes_only_what_is_unmistakable_and_keeps_citations_true(self) -> None:
        automatic = [preset for preset in presets().values() if preset.automatic]
        assert automatic
        assert {preset.citations for preset in automatic} <= {"none", "moved"}
        reads = bodies("auto")
        for name in NAMES:
            first, second = written(name, "abc"), written(name, "cba")
            reads.ordered(first)
            assert reads.ordered(second) == (first if presets()[name].automatic else second)

    def test_a_file_has_what_a_preset_has(self, tmp_path: Path) -> None:
        file = tmp_path / "own.toml"
        file.write_text('head = "Facts:\\n"\nform = "* {text}"\nbetween = "\\n"\ntail = "\\n\\n"')
        (template,) = find_templates(str(file))
        run = template.find("Facts:\n* a\n* b\n\n?")
        assert run is not None
        assert list(run.documents) == ["* a", "* b"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [("anything", "no preset: anythingllm, "), ("none.toml", "No such file"), ("<d>{id}</d>", "{text}")],
    )
    def test_what_names_no_template_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(TemplateError, match=said.replace("{", "\\{")):
            find_templates(text)

    def test_a_file_with_other_names_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "own.toml"
        file.write_text('form = "{text}"\nseparator = "x"')
        with pytest.raises(TemplateError, match="separator"):
            find_templates(str(file))


class TestJSON:
    @given(
        texts=st.lists(st.text(min_size=1, max_size=40), min_size=2, max_size=6),
        indent=st.sampled_from([None, 1, 4]),
        ascii=st.booleans(),
        rng=st.randoms(),
    )
    @settings(deadline=None)
    def test_objects_move_as_they_were_written(
        self, texts: list[str], indent: int | None, ascii: bool, rng: random.Random
    ) -> None:
        def written(texts: list[str]) -> str:
            listed = [{"id": text[:2], "content": text, "more": [1, {"a": None}]} for text in texts]
            return f"Found [3]:\n{json.dumps({'results': listed}, indent=indent, ensure_ascii=ascii)}\nWhich?"

        run = find_templates("json")[0].find(written(texts))
        assert run is not None
        permutation = rng.sample(range(len(texts)), len(texts))
        moved = "".join(run.pieces_with([run.documents[rank] for rank in permutation]))
        assert moved == written([texts[rank] for rank in permutation])

    @pytest.mark.parametrize(
        "text",
        [
            "[1, 2, 3]",
            '["a", "b"]',
            '[{"a": "x"}]',
            '[{"a": 1}, {"a": 2}]',
            '[{"a": "x"}, {"b": "y"}]',
            '[{"a": "x"}, {"a": "y"}',
            '[{"a": "x"} {"a": "y"}]',
            '[{"a": "x"}, {"a": "y"}, 3]',
            "[{a}, {b}]",
            "[" * 100_000,
            '[{"a":' * 100_000,
            '[{"a": "x"}, ' * 50_000,
        ],
        ids=lambda text: text[:30],
    )
    def test_other_lists_stay(self, text: str) -> None:
        assert find_templates("json")[0].find(text) is None


class TestRecognition:
    """Without a template documents keep their order, and the proxy says what a preset would save."""

    def test_it_predicts_what_the_preset_saves(self) -> None:
        pytest.importorskip("prometheus_client")
        rng, metrics = random.Random(1), Metrics()
        watched = Bodies(None, recogniser=PromptRecogniser(Orderer(block_size=16).settings, metrics.recognised))
        metrics.watch(ObservedOrderer(watched.orderer))
        for number in range(60):
            if number == 19:
                assert Stats.of(metrics.registry.collect()).recognised == {}, "too few to say anything"
            body = written("anythingllm", rng.sample("abcdefgh", 4))
            assert watched.ordered(body) is body
        ((name, share),) = Stats.of(metrics.registry.collect()).recognised.items()
        assert name == "anythingllm"
        assert 0.1 < share < 1

    def test_the_warning_names_the_preset(self) -> None:
        warned: list[str] = []
        recogniser = PromptRecogniser(Orderer().settings, lambda *_: None)
        watched = Bodies(None, recogniser=recogniser, warn=warned.append)
        for _ in range(20):
            watched.ordered(written("onyx", "ab"))
        (said,) = warned
        assert "Onyx" in said
        assert "--template onyx" in said
