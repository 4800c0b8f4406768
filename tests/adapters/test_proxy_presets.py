"""Presets: prompts of known applications, as these would have written them in the sent order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bodies import Bodies

pytest.importorskip("starlette")

from ragorder import Orderer
from ragorder.adapters.observing import Metrics, Stats
from ragorder.adapters.proxy import TemplateError
from ragorder.adapters.proxy.bodies.presets import PromptRecogniser, find_templates, presets

NAMES = list(presets())
Write = Callable[[Sequence[str]], str]


def listed(form: str, between: str, texts: Sequence[str], first: int = 1) -> str:
    return between.join(
        form.replace("{n}", str(n)).replace("{name}", text[:1]).replace("{text}", text)
        for n, text in enumerate(texts, first)
    )


def anythingllm(texts: Sequence[str]) -> str:
    return "Help.\nContext:\n" + "".join(
        f"[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(texts)
    )


def open_webui(texts: Sequence[str]) -> str:
    context = listed('<source id="{n}" name="{name}.pdf">{text}</source>', "\n", texts)
    return (
        '### Task:\nCite only when the <source> tag has an id (e.g., <source id="1">).\n\n'
        f"<context>\n{context}\n</context>\n\nWhich?"
    )


def ragflow(texts: Sequence[str]) -> str:
    knowledge = listed("\nID: {n}\n├── Title: {name}\n└── Content:\n{text}", "\n", texts, 0)
    return f"Here is the knowledge base:\n      {knowledge}\n      The above is the knowledge base."


def citation_engine(texts: Sequence[str]) -> str:
    return (
        "For example:\nSource 1:\nThe sky is red.\nSource 2:\nWater is wet.\nQuery: When?\n"
        "Now it's your turn. Below are several numbered sources of information:\n------\n"
        + listed("Source {n}:\n{text}\n", "\n\n", texts)
        + "\n------\nQuery: Which?\nAnswer: "
    )


def onyx(texts: Sequence[str]) -> str:
    return listed("DOCUMENT {n}: {name}\nSource: Web\n```\n{text}\n```", "\n\n", texts) + "\n\nQUERY: Which?"


def webpages(texts: Sequence[str]) -> str:
    return "# Search results:\n" + listed("[webpage {n} begin]{text}[webpage {n} end]", "\n", texts) + "\nCite."


def anthropic_xml(texts: Sequence[str]) -> str:
    form = '<document index="{n}">\n<source>{name}.md</source>\n<document_content>\n{text}\n</document_content>'
    form += "\n</document>"
    return "<documents>\n" + listed(form, "\n", texts) + "\n</documents>\n\nWhich?"


def cohere(texts: Sequence[str]) -> str:
    return "<results>\n" + listed("Document: {n}\ntitle: {name}\ntext: {text}", "\n\n", texts, 0) + "\n</results>"


def librechat(texts: Sequence[str]) -> str:
    return listed("File: {name}.md\nRelevance: 0.5000\nContent: {text}\n", "\n---\n", texts)


def llamaindex(texts: Sequence[str]) -> str:
    return (
        "Context information is below.\n---------------------\n"
        + listed("file_path: {name}.md\n\n{text}", "\n\n", texts)
        + "\n---------------------\nGiven the context information, answer.\nQuery: Which?"
    )


WRITERS: dict[str, Write] = {
    "anythingllm": anythingllm,
    "llamaindex": llamaindex,
    "open-webui": open_webui,
    "ragflow": ragflow,
    "llamaindex-citations": citation_engine,
    "onyx": onyx,
    "webpages": webpages,
    "anthropic-xml": anthropic_xml,
    "cohere": cohere,
    "librechat": librechat,
}
# What documents have that looks like a mark.
MARKS = [
    "\n\n", "\n---\n", "\n```python\nx = 1\n```\n", "# Heading\n", "- a\n- b\n", "| a | b |\n|---|---|\n", "1. One\n",
    "[CONTEXT 1]:\n", "\n[END CONTEXT 1]", '<source id="1">', "</source>", "\nID: 1\n", "└── Content:\n", "Source 1:\n",
    "\n\n\nSource 2:\n", "------\n", "DOCUMENT 2: x\n```\n", "\n```\n\nDOCUMENT 1: x\n```\n", "[webpage 1 begin]",
    "[webpage 2 end]", '\n<document index="1">', "</document>", "\n\nDocument: 1\n", "File: x\n", "\nContent: x",
    "中文。", "{text}", "\r\n", "\\", "</context>", "<context>\n",
]  # fmt: skip


def post(prompt: str, role: str = "user") -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": role, "content": prompt}]}).encode()


def prompt_in(body: bytes) -> str:
    prompt: str = json.loads(body)["messages"][0]["content"]
    return prompt


def bodies(name: str, **options: Any) -> Bodies:
    return Bodies(None, templates=find_templates(name), **options)


class TestPresets:
    def test_each_has_a_writer(self) -> None:
        assert set(WRITERS) == set(NAMES)

    @pytest.mark.parametrize("name", NAMES)
    def test_its_sample_is_recognised_by_it_alone(self, name: str) -> None:
        sample = presets()[name].sample
        found = [other for other in NAMES if find_templates(other)[0].find(sample) is not None]
        assert found == [name]
        run = find_templates(name)[0].find(sample)
        assert run is not None
        assert len(run.documents) == 2
        assert all(preset.application and preset.origin for preset in presets().values())

    @pytest.mark.parametrize("name", NAMES)
    def test_documents_extend_the_cached_prefix(self, name: str) -> None:
        reads, texts = bodies(name), [f"{letter}{letter} is about {letter}. " * 20 for letter in "abcd"]
        write = WRITERS[name]
        for order, sent in (([0, 1, 2, 3], [0, 1, 2, 3]), ([3, 1, 0, 2], [0, 1, 2, 3]), ([2, 0, 1], [0, 1, 2])):
            body = reads.ordered(post(write([texts[place] for place in order])))
            assert prompt_in(body) == write([texts[place] for place in sent])

    @pytest.mark.parametrize("name", NAMES)
    @given(data=st.data())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def test_what_is_sent_is_what_the_application_writes_in_that_order(self, name: str, data: st.DataObject) -> None:
        write, reads = WRITERS[name], bodies(name)
        marks = [mark for mark in MARKS if name != "librechat" or mark != "\n---\n"]
        pieces = st.lists(st.sampled_from([*marks, "word ", "other words "]), min_size=1, max_size=6)
        pool = [f"{letter} {''.join(data.draw(pieces))} {letter * 40}" for letter in "abcde"]
        for _ in range(4):
            texts = data.draw(st.permutations(pool).map(lambda each: each[:4]))
            role = data.draw(st.sampled_from(["user", "system", "tool"]))
            sent = prompt_in(reads.ordered(post(write(texts), role)))
            assert sent in {write(order) for order in permutations(texts)}


def without_documents(rng: random.Random) -> str:
    """A prompt of another kind of program."""

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
        lambda: "Glossary:\n" + "\n".join(f"- {word()} = {word()}" for _ in range(6)) + f"\n\nTranslate: {line()}",
        lambda: json.dumps([{"name": word(), "options": [word(), word()]} for _ in range(4)]) + "\nChoose.",
        lambda: "\n---\n".join(f"## Step {n}\n{line()}" for n in range(1, 5)),
        lambda: f'<plan>\n<step id="1">{line()}</step>\n<step id="2">{line()}</step>\n</plan>',
        lambda: 'Cite (e.g., <source id="1">) and close with </source>.\nSource 1: ' + line() + "\nSource 2: " + line(),
        lambda: f"Context:\n{line()}\n\nQuestion: {line()}\nAnswer:",
        lambda: "| a | b |\n|---|---|\n" + "\n".join(f"| {word()} | {word()} |" for _ in range(6)),
    ]
    return "\n\n".join(rng.choice(kinds)() for _ in range(rng.randint(1, 3)))


class TestPromptsWithoutDocuments:
    def test_none_is_changed_by_a_byte(self) -> None:
        rng = random.Random(5)
        every = Bodies(None, templates=[find_templates(name)[0] for name in NAMES])
        for _ in range(2000):
            body = post(without_documents(rng), rng.choice(["user", "system", "tool"]))
            assert every.ordered(body) is body


class TestNames:
    def test_auto_takes_only_what_is_unmistakable_and_keeps_citations_true(self) -> None:
        automatic = [preset for preset in presets().values() if preset.automatic]
        assert automatic
        assert {preset.citations for preset in automatic} <= {"none", "moved"}
        texts = [letter * 200 for letter in "abc"]
        reads = bodies("auto")
        for name in NAMES:
            first, second = WRITERS[name](texts), WRITERS[name](texts[::-1])
            reads.ordered(post(first))
            assert prompt_in(reads.ordered(post(second))) == (first if presets()[name].automatic else second)

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
        assert run.arranged(permutation) == written([texts[rank] for rank in permutation])

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


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    pytest.importorskip("prometheus_client")
    yield Metrics()


class TestRecognition:
    """Without a template documents keep their order, and the proxy says what a preset would save."""

    def test_it_predicts_what_the_preset_saves(self, metrics: Metrics) -> None:
        rng = random.Random(1)
        texts = [f"{letter} is about {letter}. " * 20 for letter in "abcdefgh"]
        prompts = [anythingllm(rng.sample(texts, 4)) for _ in range(60)]
        watched = Bodies(None, recogniser=PromptRecogniser(Orderer(block_size=16).settings, metrics.recognised))
        for prompt in prompts:
            body = post(prompt)
            assert watched.ordered(body) is body
        from ragorder.adapters.observing import ObservedOrderer

        metrics.watch(ObservedOrderer(watched.orderer))
        ((name, share),) = Stats.of(metrics.registry.collect()).recognised.items()
        assert name == "anythingllm"
        assert 0.1 < share < 1

    def test_a_few_requests_say_nothing(self, metrics: Metrics) -> None:
        from ragorder.adapters.observing import ObservedOrderer

        watched = Bodies(None, recogniser=PromptRecogniser(Orderer(block_size=16).settings, metrics.recognised))
        metrics.watch(ObservedOrderer(watched.orderer))
        for _ in range(19):
            watched.ordered(post(anythingllm(["a" * 200, "b" * 200])))
        assert Stats.of(metrics.registry.collect()).recognised == {}

    def test_the_warning_names_the_preset(self) -> None:
        warned: list[str] = []
        recogniser = PromptRecogniser(Orderer().settings, lambda *_: None)
        watched = Bodies(None, recogniser=recogniser, warn=warned.append)
        for _ in range(20):
            watched.ordered(post(onyx(["a" * 200, "b" * 200])))
        (said,) = warned
        assert "Onyx" in said
        assert "--template onyx" in said
