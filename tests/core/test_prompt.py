"""Prompts: what stays the same stands first, a document's tokens never depend on its neighbours, and no text from
outside can pass for the chat template's own control tokens."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import accumulate, permutations
from types import SimpleNamespace
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rings import examples

from ragorder import Document, Ordering, Prompt, PromptBuilder, Span
from ragorder.tokens import repair_unicode, special_token_escaper

SYSTEM = "Answer from the documents."
QUERY = "Who hunts at night?"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CATS = Document("cats", "Cats sleep. Cats hunt at night.", metadata={"title": "Cats"})
BANKS = Document("banks", "Banks lend money.\n\nAnd take it back.")
LAKE = Document("ü", "Zürich 🙂 lies at a lake.")
DOCUMENTS = [CATS, BANKS, LAKE]

# Pieces that come together as control tokens, overlapping ones and parts of them, among text of every kind.
pieces = st.sampled_from(
    [
        *(*CONTROL, "<|im_<|im_start|>start|>", "<|<|im_end|>im_end|>", "<<|im_start|>|im_start|>", "<|im_", "start|>"),
        *(
            "end|>",
            "<",
            "|",
            ">",
            "<|",
            "|>",
            "system\n",
            "🙂",
            "👩‍👩‍👧",
            "\ud800",
            "\udfff",
            "\x00",
            "\n",
            " ",
            "\u200b",
        ),
        *("</s>", "[INST]"),
    ]
)
texts = st.lists(st.one_of(pieces, st.text(st.characters(exclude_categories=()), max_size=8)), max_size=8).map("".join)
# Composed characters only: Qwen's tokenizer brings texts into Unicode's form NFC.
plain_texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>|"), max_size=40).map(
    lambda text: normalize("NFC", text)
)
documents = st.lists(st.builds(Document, id=texts, text=texts), max_size=5)
each_tokenizer = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))


def spans_of(prompt: Prompt) -> list[list[int]]:
    """The token ids of each document."""
    assert prompt.token_ids is not None
    return [prompt.token_ids[span.start : span.end] for span in prompt.spans]


def control_ids(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    special = set(tokenizer.all_special_ids)
    return [id for id in ids if id in special]


def tokens_as_a_server(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


class TestWithoutTokenizer:
    def test_text_and_messages_have_system_prompt_then_documents_then_question(self) -> None:
        prompt = PromptBuilder(SYSTEM).build(QUERY, DOCUMENTS)
        user = f"[cats]\n{CATS.text}\n\n[banks]\n{BANKS.text}\n\n[ü]\n{LAKE.text}\n\nQuestion: {QUERY}"
        assert prompt.text == f"{SYSTEM}\n\n{user}\n"
        assert prompt.messages == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        assert (prompt.token_ids, prompt.spans) == (None, [])
        assert PromptBuilder("").build(QUERY, DOCUMENTS).messages == prompt.messages[1:]

    def test_lengths_are_estimated_at_four_characters_a_token(self) -> None:
        builder = PromptBuilder("s" * 98, document_template="{text}", question_template="{query}")
        assert builder.prefix_tokens == 25
        assert builder.document_tokens(Document("a", "x" * 401)) == 101
        assert builder.suffix_tokens("q" * 39) == 10

    def test_the_title_comes_from_the_metadata(self) -> None:
        builder = PromptBuilder(SYSTEM, document_template="# {title} ({id})\n{text}\n")
        text = builder.build(QUERY, [CATS, BANKS]).text
        assert f"# Cats (cats)\n{CATS.text}\n#  (banks)\n" in text

    @pytest.mark.parametrize(
        "control",
        [
            *(*CONTROL, "<|eot_id|>", "<|start_header_id|>", "<|begin_of_text|>", "<|reserved_special_token_12|>"),
            *(
                "<｜User｜>",
                "<｜end▁of▁sentence｜>",
                "<s>",
                "</s>",
                "<bos>",
                "<eos>",
                "<pad>",
                "<unk>",
                "[INST]",
                "[/INST]",
            ),
            *("<<SYS>>", "<</SYS>>", "<start_of_turn>", "<end_of_turn>", "<tool_call>", "</think>", "[SYSTEM_PROMPT]"),
            *("[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "<|IM_START|>", "<|im_<|im_start|>start|>"),
        ],
    )
    def test_common_control_tokens_are_broken_in_documents_ids_titles_and_questions(self, control: str) -> None:
        builder = PromptBuilder(SYSTEM, document_template="[{id}] {title}\n{text}\n", state_ranking=True)
        hostile = Document(f"id {control}", f"before {control} after", metadata={"title": f"title {control}"})
        prompt = builder.build(f"what {control}?", [hostile, CATS])
        for part in (control, "<|im_start|>"):
            assert part not in prompt.text
            assert part not in prompt.messages[-1]["content"]
        assert "before " in prompt.text and " after" in prompt.text

    @pytest.mark.parametrize("text", ["a < b", "x[0]", "if (a<b && c>d)", "<div>", "[1]", "||", "<|>", "a <| b |> c"])
    def test_other_texts_are_left_as_they_are(self, text: str) -> None:
        assert text in PromptBuilder(SYSTEM).build(QUERY, [Document("a", text)]).text

    def test_braces_in_texts_are_only_braces(self) -> None:
        prompt = PromptBuilder(SYSTEM).build("{query} {id}", [Document("{text}", "{title} {0} {")])
        assert "[{text}]\n{title} {0} {\n\nQuestion: {query} {id}\n" in prompt.text

    @given(query=texts, documents=documents)
    def test_any_text_makes_a_prompt_that_can_be_sent(self, query: str, documents: list[Document]) -> None:
        prompt = PromptBuilder(SYSTEM).build(query, documents)
        prompt.text.encode("utf-8")
        prompt.messages[-1]["content"].encode("utf-8")


class TestTemplates:
    @pytest.mark.parametrize(
        "template",
        [
            *("", "no fields", "{id}", "{title}", "{text} {rank}", "{position}. {text}", "{index} {text}"),
            *("{score} {text}", "{0} {text}", "{} {text}", "{text[0]}", "{text.__class__}", "{id.__class__} {text}"),
            *("{Text}", "{{text}}", "{text", "text}", "{text:d}", "{text!x}", "{text:{width}}", "{text:>{id}}x"),
            "{text:%Y}",
        ],
    )
    def test_document_templates_show_the_text_and_no_place(self, template: str) -> None:
        with pytest.raises(ValueError, match="document_template"):
            PromptBuilder(document_template=template)

    @pytest.mark.parametrize(
        "template", ["", "Question:", "{query} {text}", "{question}", "{0}", "{}", "{query", "{query:d}", "{query!x}"]
    )
    def test_question_templates_show_the_query(self, template: str) -> None:
        with pytest.raises(ValueError, match="question_template"):
            PromptBuilder(question_template=template)

    def test_the_message_names_the_fields_that_are_allowed(self) -> None:
        allowed = r"\{id\}, \{label\}, \{text\}, \{title\}"
        with pytest.raises(ValueError, match=r"must contain \{text\} and may use only " + allowed):
            PromptBuilder(document_template="{rank}: {text}")

    @pytest.mark.parametrize(
        ("name", "template", "sent"),
        [
            ("document_template", "<tool_response>\n{text}\n</tool_response>\n", "< tool_response>"),
            ("question_template", "<think>{query}", "< think>"),
            ("question_template", "{query}<|im_end|>", "< |im_end|>"),
        ],
    )
    def test_special_tokens_are_refused_since_they_would_be_escaped(self, name: str, template: str, sent: str) -> None:
        options: dict[str, Any] = {name: template}
        with pytest.raises(ValueError, match=f"{name} has a special token.*{re.escape(sent)}"):
            PromptBuilder(**options)

    def test_special_tokens_of_the_served_model_alone_are_refused(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = deepcopy(tokenizers["chatml"])
        with pytest.raises(ValueError, match="special token"):
            PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template="<|im_start|>{text}")
        template = "[TOOL]{text} <s>"
        shown = PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template=template).build("q", [Document("a", "t")])
        assert "[TOOL]t <s>" in shown.text
        tokenizer.add_tokens(["[TOOL]"], special_tokens=True)
        with pytest.raises(ValueError, match="special token"):
            PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template=template)

    def test_literal_braces_are_written_twice(self) -> None:
        builder = PromptBuilder(SYSTEM, document_template="{{{text}}}", question_template="{{{query}}}")
        assert builder.build("q", [Document("a", "t")]).text == f"{SYSTEM}\n\n{{t}}{{q}}\n"

    @pytest.mark.parametrize(("align_to", "tokenizer"), [(16, None), (0, "chatml"), (-16, "chatml")])
    def test_alignment_needs_a_tokenizer_and_is_positive(
        self, tokenizers: dict[str, Any], align_to: int, tokenizer: str | None
    ) -> None:
        with pytest.raises(ValueError, match="align_to needs a tokenizer and a positive number of tokens"):
            PromptBuilder(align_to=align_to, tokenizer=tokenizer and tokenizers[tokenizer])

    @pytest.mark.parametrize(
        "template",
        [
            "nothing of it",
            "{% for m in messages %}{{ m['role'] }}{% endfor %}",
            "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
        ],
    )
    def test_a_chat_template_that_does_not_show_the_user_once_is_refused(
        self, tokenizers: dict[str, Any], template: str
    ) -> None:
        tokenizer = deepcopy(tokenizers["chatml"])
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="must show the user's message exactly once"):
            PromptBuilder(SYSTEM, tokenizer=tokenizer)


class TestRanking:
    """`state_ranking` says what retrieval thought, where it does not disturb the prefix."""

    def test_lists_ids_by_rank_between_the_documents_in_any_order_and_the_question(self) -> None:
        for order in permutations(range(3)):
            ordering = Ordering([DOCUMENTS[rank] for rank in order], order)
            text = PromptBuilder(SYSTEM, state_ranking=True).build(QUERY, ordering).text
            note = "Documents from most to least relevant: cats, banks, ü\n\nQuestion: "
            places = [text.index(each) for each in [*(DOCUMENTS[rank].text for rank in order), note, QUERY]]
            assert places == sorted(places)
        assert "relevant" not in PromptBuilder(SYSTEM, state_ranking=True).build(QUERY, []).text

    def test_the_ranking_does_not_change_the_text_before_it(self, tokenizer: Any) -> None:
        stated = PromptBuilder(SYSTEM, tokenizer=tokenizer, state_ranking=True).build(QUERY, DOCUMENTS)
        plain = PromptBuilder(SYSTEM, tokenizer=tokenizer).build(QUERY, DOCUMENTS)
        assert stated.spans == plain.spans
        end = plain.spans[-1].end
        assert stated.token_ids is not None and plain.token_ids is not None
        assert stated.token_ids[:end] == plain.token_ids[:end]
        assert len(stated.token_ids) > len(plain.token_ids)


class TestTokens:
    @each_tokenizer
    @given(query=texts, documents=documents, seed=st.integers())
    def test_tokens_never_depend_on_neighbours_or_place(
        self, tokenizer: Any, query: str, documents: list[Document], seed: int
    ) -> None:
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template="{id}{text}")
        shuffled = random.Random(seed).sample(documents, len(documents))
        alone = [spans_of(builder.build("", [document]))[0] for document in shuffled]
        fresh = PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template="{id}{text}")
        assert spans_of(fresh.build(query, shuffled)) == alone

    @pytest.mark.parametrize("aligned", [False, True])
    @each_tokenizer
    @given(query=texts, documents=documents, align_to=st.integers(1, 40))
    def test_spans_cover_the_documents_where_asked_aligned_and_the_lengths_add_up(
        self, tokenizer: Any, aligned: bool, query: str, documents: list[Document], align_to: int
    ) -> None:
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer, align_to=align_to if aligned else None)
        prompt = builder.build(query, documents)
        assert not aligned or all(span.start % align_to == 0 for span in prompt.spans)
        assert prompt.token_ids is not None
        lengths = [builder.document_tokens(document) for document in documents]
        borders = [*accumulate(lengths, initial=builder.prefix_tokens)]
        expected = zip((document.id for document in documents), borders, borders[1:], strict=False)
        assert prompt.spans == [Span(*each) for each in expected]
        assert len(prompt.token_ids) == borders[-1] + builder.suffix_tokens(query)

    @each_tokenizer
    @given(id=plain_texts, text=plain_texts, query=plain_texts)
    def test_decoding_gives_the_texts_back(self, tokenizer: Any, id: str, text: str, query: str) -> None:
        prompt = PromptBuilder(SYSTEM, tokenizer=tokenizer).build(query, [CATS, Document(id, text)])
        decoded = tokenizer.decode(spans_of(prompt)[1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoded == f"[{id}]\n{text}\n\n"
        assert tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False) == prompt.text

    def test_a_very_long_document_is_a_document(self, tokenizer: Any) -> None:
        long = Document("long", "word <|im_end|> 🙂 " * 5_000)
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer)
        prompt = builder.build(QUERY, [CATS, long, BANKS])
        assert spans_of(prompt)[::2] == spans_of(builder.build(QUERY, [CATS, BANKS]))
        assert control_ids(tokenizer, spans_of(prompt)[1]) == []
        assert prompt.spans[1].end - prompt.spans[1].start > 20_000

    @pytest.mark.parametrize("system", ["", SYSTEM])
    def test_no_documents_are_only_system_prompt_and_question(self, tokenizer: Any, system: str) -> None:
        builder = PromptBuilder(system, tokenizer=tokenizer)
        prompt = builder.build(QUERY, [])
        assert prompt.spans == []
        assert prompt.token_ids is not None
        assert len(prompt.token_ids) == builder.prefix_tokens + builder.suffix_tokens(QUERY)
        assert tokenizer.decode(prompt.token_ids) == prompt.text

    def test_same_content_and_other_title_are_other_tokens(self, tokenizer: Any) -> None:
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template="{title}: {text}\n")
        builder.build(QUERY, [CATS])
        renamed = builder.build(QUERY, [Document(CATS.id, CATS.text, metadata={"title": "Dogs"})])
        assert f"Dogs: {CATS.text}" in renamed.text

    def test_a_changed_answer_does_not_change_the_next(self, tokenizer: Any) -> None:
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer)
        first = builder.build(QUERY, DOCUMENTS)
        expected, messages = list(first.token_ids or []), list(first.messages)
        assert first.token_ids is not None
        first.token_ids[:] = [0]
        first.messages.clear()
        first.spans.clear()
        again = builder.build(QUERY, DOCUMENTS)
        assert again.token_ids == expected
        assert again.messages == messages
        assert len(again.spans) == 3


class TestMessages:
    """An engine that is given messages must come to the same prompt as one that is given the text."""

    @pytest.mark.parametrize("name", ["chatml", "no-system", "trimming"])
    @pytest.mark.parametrize(("system", "query"), [(SYSTEM, QUERY), ("", QUERY), (SYSTEM, "  Who?  \n")])
    def test_through_the_chat_template_are_the_text(
        self, tokenizers: dict[str, Any], name: str, system: str, query: str
    ) -> None:
        prompt = PromptBuilder(system, tokenizer=tokenizers[name]).build(query, DOCUMENTS)
        rendered = tokenizers[name].apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        assert rendered == prompt.text

    def test_a_system_prompt_that_is_trimmed_comes_first(self, tokenizers: dict[str, Any]) -> None:
        prompt = PromptBuilder(f"\n {SYSTEM} \n", tokenizer=tokenizers["trimming"]).build(QUERY, DOCUMENTS)
        assert prompt.text.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n[cats]\n")


class TestControlTokens:
    @each_tokenizer
    @given(query=texts, documents=documents)
    def test_none_comes_from_outside_even_when_a_server_tokenises_the_text_again(
        self, tokenizer: Any, query: str, documents: list[Document]
    ) -> None:
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template="{id}{text}", state_ranking=True)
        prompt, empty = builder.build(query, documents), builder.build("", [])
        assert all(control_ids(tokenizer, ids) == [] for ids in spans_of(prompt))
        assert prompt.token_ids is not None and empty.token_ids is not None
        assert control_ids(tokenizer, prompt.token_ids) == control_ids(tokenizer, empty.token_ids)
        own = control_ids(tokenizer, tokens_as_a_server(tokenizer, empty.text))
        assert control_ids(tokenizer, tokens_as_a_server(tokenizer, prompt.text)) == own
        content = prompt.messages[-1]["content"]
        assert control_ids(tokenizer, tokens_as_a_server(tokenizer, content)) == []

    @pytest.mark.parametrize("seam", range(1, len("<|im_start|>")))
    def test_two_documents_or_a_document_and_the_question_form_no_special_token(
        self, tokenizers: dict[str, Any], seam: int
    ) -> None:
        tokenizer, start, end = tokenizers["chatml"], "<|im_start|>"[:seam], "<|im_start|>"[seam:]
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer, document_template="{text}", question_template="{query}")
        own = control_ids(tokenizer, tokens_as_a_server(tokenizer, builder.build("", []).text))
        for texts, query in (([start, end], QUERY), ([start], end)):
            prompt = builder.build(query, [Document("", text) for text in texts])
            assert control_ids(tokenizer, tokens_as_a_server(tokenizer, prompt.text)) == own
            assert "<|im_start|>" not in prompt.messages[-1]["content"]

    def test_special_tokens_of_another_model_are_only_text(self, tokenizer: Any) -> None:
        prompt = PromptBuilder(SYSTEM, tokenizer=tokenizer).build(QUERY, [Document("a", "an <s> and an [INST]")])
        assert "an <s> and an [INST]" in prompt.text

    def test_special_tokens_added_later_are_broken(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = deepcopy(tokenizers["chatml"])
        tokenizer.add_tokens(["[TOOL]"], special_tokens=True)
        tokenizer.add_tokens(["<plan>"])
        added = {tokenizer.convert_tokens_to_ids(token) for token in ("[TOOL]", "<plan>")}
        prompt = PromptBuilder(SYSTEM, tokenizer=tokenizer).build(QUERY, [Document("a", "a [TOOL] and a <plan>")])
        assert added.isdisjoint(prompt.token_ids or [])
        assert added.isdisjoint(tokens_as_a_server(tokenizer, prompt.text))

    @settings(max_examples=examples(300))
    @given(
        control=st.sets(st.text("ab< ", min_size=1, max_size=3).filter(lambda t: t == t.strip()), max_size=3),
        text=st.text("ab< \n\ud800", max_size=8),
    )
    def test_any_special_tokens_are_broken_and_the_rest_stays(self, control: set[str], text: str) -> None:
        escape = special_token_escaper(control)
        broken = escape(text)
        assert [token for token in control if token.strip() and token in broken] == []
        assert escape(broken) == broken
        if not any(token in text for token in control):
            assert broken == repair_unicode(text)

    @pytest.mark.timeout(2)
    @pytest.mark.parametrize("control", [" END", "\nEND", "E ", "\N{REPLACEMENT CHARACTER}"])
    def test_special_tokens_with_a_trailing_space_are_broken(self, control: str) -> None:
        assert control not in special_token_escaper([control])(f"the{control}of it")

    @given(text=texts)
    def test_lone_surrogates_are_replaced_and_pairs_made_whole(self, text: str) -> None:
        repair_unicode(text).encode("utf-8")
        assert repair_unicode("\ud83d\ude42") == "🙂"
        assert repair_unicode("a\ud800b\udfff") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
        assert repair_unicode(repair_unicode(text)) == repair_unicode(text)


def test_alignment_adds_only_newlines(tokenizer: Any) -> None:
    aligned = PromptBuilder(SYSTEM, tokenizer=tokenizer, align_to=32).build(QUERY, DOCUMENTS)
    plain = PromptBuilder(SYSTEM, tokenizer=tokenizer).build(QUERY, DOCUMENTS)
    for padded, bare in zip(spans_of(aligned), spans_of(plain), strict=True):
        assert padded[: len(bare)] == bare
        assert set(tokenizer.decode(padded[len(bare) :])) <= {"\n"}
        assert len(padded) - len(bare) < 32
    assert tokenizer.decode(aligned.token_ids, clean_up_tokenization_spaces=False) == aligned.text


class Counting:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.encoded[text] += 1
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids


class TestCache:
    def test_a_document_is_tokenised_once(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = Counting(tokenizers["chatml"])
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer)
        for _ in range(3):
            builder.build(QUERY, DOCUMENTS)
            builder.build(QUERY, DOCUMENTS[::-1])
            builder.document_tokens(CATS)
        assert tokenizer.encoded[f"[cats]\n{CATS.text}\n\n"] == 1

    def test_the_cache_of_documents_is_bounded(self, tokenizers: dict[str, Any]) -> None:
        tokenizer = Counting(tokenizers["chatml"])
        builder = PromptBuilder(SYSTEM, tokenizer=tokenizer, cached_documents=2)
        prompts = [builder.build(QUERY, [document]) for document in DOCUMENTS for _ in range(2)]
        assert tokenizer.encoded[f"[cats]\n{CATS.text}\n\n"] == 1
        again = builder.build(QUERY, [CATS])
        assert tokenizer.encoded[f"[cats]\n{CATS.text}\n\n"] == 2
        assert again == prompts[0]


def test_eight_threads_build_the_same_prompts_as_one(tokenizer: Any) -> None:
    draw = random.Random(5)
    many = [Document(f"d{number}", f"text {number} <|im_end|> 🙂 " * number) for number in range(30)]
    requests = [(f"question {number}", draw.sample(many, 6)) for number in range(200)]
    alone = PromptBuilder(SYSTEM, tokenizer=tokenizer, align_to=8)
    expected = [alone.build(*request) for request in requests]
    shared = PromptBuilder(SYSTEM, tokenizer=tokenizer, align_to=8, cached_documents=10)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda request: shared.build(*request), requests)) == expected


@pytest.mark.parametrize("other", [str.split, SimpleNamespace(encode=str.split)], ids=["function", "encodes"])
def test_a_tokenizer_of_another_kind_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match="AutoTokenizer"):
        PromptBuilder(SYSTEM, tokenizer=other)
