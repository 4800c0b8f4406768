"""Requests as applications write them: the documents of a question, in an order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from ragorder.adapters.proxy.bodies.presets import find_templates
from ragorder.adapters.proxy.bodies.template import DocumentTemplate
from ragorder.document import Document
from ragorder.prompt import PromptBuilder

Body = dict[str, Any]


class Passage(NamedTuple):
    """A retrieved document."""

    id: str
    title: str
    text: str


Write = Callable[[Sequence[Passage], str], Body]


@dataclass(frozen=True, slots=True)
class Shape:
    """`write` returns a body for documents in this order and a question; `template` is what `--template` takes, or the
    fields of its file. No text may have `plain`. `tag` returns what a client of the proxy sends instead; every request
    has the same `listed` passages, in any order; `stable_tools`: they are tools, sorted by their names."""

    write: Write
    template: str | Mapping[str, Any] = "auto"
    application: str = ""
    path: str = "/v1/chat/completions"
    plain: str = ""
    tag: Write | None = None
    listed: int = 0
    stable_tools: bool = False

    def encode(self, passages: Sequence[Passage], question: str) -> bytes:
        return msgspec.json.encode(self.write(passages, question))

    def ask(self, passages: Sequence[Passage], question: str) -> bytes:
        """Return the body that the proxy gets."""
        return msgspec.json.encode((self.tag or self.write)(passages, question))

    def orders(self, passages: Sequence[Passage], question: str, sent: bytes, permutation: str | None = None) -> bool:
        """Return whether the application would have sent this for its documents in some order, the header's first."""
        if self.stable_tools:
            return self.encode(sorted(passages, key=lambda each: each.id), question) == sent
        count = len(passages)
        ranks = [int(each) for each in permutation.split(",")] if permutation else []
        for first in range(count - len(ranks) + 1 if ranks else 0):
            order = [*range(first), *(first + rank for rank in ranks), *range(first + len(ranks), count)]
            if self.encode([passages[rank] for rank in order], question) == sent:
                return True
        return not self.listed and any(self.encode(order, question) == sent for order in permutations(passages))

    def templates(self) -> list[DocumentTemplate]:
        if isinstance(self.template, Mapping):
            return [DocumentTemplate(**self.template)]
        return find_templates(self.template)


def user(content: Any) -> list[Body]:
    return [{"role": "user", "content": content}]


def _system(content: Any, question: str) -> list[Body]:
    return [{"role": "system", "content": content}, *user(question)]


def listed(form: str, between: str, passages: Sequence[Passage], first: int = 1) -> str:
    return between.join(form.format(n=n, **each._asdict()) for n, each in enumerate(passages, first))


def in_user(head: str, form: str, between: str, tail: str, first: int = 1) -> Write:
    """Documents and the question in a user's message; the tail has the `{question}`."""

    def write(passages: Sequence[Passage], question: str) -> Body:
        text = head + listed(form, between, passages, first) + tail.replace("{question}", question)
        return {"model": "m", "messages": user(text)}

    return write


def in_system(head: str, form: str, between: str, tail: str, first: int = 1) -> Write:
    def write(passages: Sequence[Passage], question: str) -> Body:
        return {"model": "m", "messages": _system(head + listed(form, between, passages, first) + tail, question)}

    return write


def after_call(content: Callable[[Sequence[Passage], str], str]) -> Write:
    """Documents as the result of a tool in a chat."""

    def write(passages: Sequence[Passage], question: str) -> Body:
        call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        called = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        result = [{"role": "tool", "tool_call_id": "c1", "content": content(passages, question)}]
        return {"model": "m", "messages": [*user("Look it up."), *called, *result, *user(question)]}

    return write


def _scored_files(passages: Sequence[Passage], question: str) -> str:
    """LibreChat's file search: each text has a score for this question before it."""
    scores = [crc32(f"{question}{each.id}".encode()) % 10_000 for each in passages]
    files = zip(passages, scores, strict=True)
    return "\n---\n".join(
        f"File: {each.title}\nRelevance: 0.{score:04}\nContent: {each.text}\n" for each, score in files
    )


def objects(passages: Sequence[Passage]) -> list[Body]:
    return [{"id": each.id, "title": each.title, "content": each.text} for each in passages]


def _vllm_documents(passages: Sequence[Passage], question: str) -> Body:
    documents = [{"title": each.title, "text": each.text} for each in passages]
    return {"model": "m", "messages": user(question), "documents": documents}


def _cohere_chat(passages: Sequence[Passage], question: str) -> Body:
    documents = [{"id": each.id, "data": {"title": each.title, "snippet": each.text}} for each in passages]
    return {"model": "m", "messages": user(question), "documents": documents}


def _blocks(make: Callable[[Passage], Body]) -> Write:
    def write(passages: Sequence[Passage], question: str) -> Body:
        content = [*map(make, passages), {"type": "text", "text": question}]
        return {"model": "m", "max_tokens": 16, "messages": user(content)}

    return write


def _document_block(each: Passage) -> Body:
    source = {"type": "text", "media_type": "text/plain", "data": each.text}
    return {"type": "document", "source": source, "title": each.title, "citations": {"enabled": True}}


def search_result(each: Passage) -> Body:
    content = [{"type": "text", "text": each.text}]
    return {"type": "search_result", "source": each.id, "title": each.title, "content": content}


def _tagged_parts(passages: Sequence[Passage], question: str) -> Body:
    texts = [f'<document id="{each.id}">\n{each.text}\n</document>' for each in passages]
    return {"model": "m", "messages": user([{"type": "text", "text": text} for text in [*texts, question]])}


def _responses_text(passages: Sequence[Passage], question: str) -> Body:
    text = listed('<document id="{id}">\n{text}\n</document>', "\n", passages)
    return {"model": "m", "prompt_cache_key": "k", "instructions": "Be brief.", "input": f"{text}\n\n{question}"}


def _tagged(passages: Sequence[Passage], question: str) -> Body:
    documents = [{"id": each.id, "text": each.text} for each in passages]
    return {"model": "m", "messages": [], "ragorder": {"documents": documents, "query": question}}


def _built(passages: Sequence[Passage], question: str) -> Body:
    """The message that a builder makes of tagged documents."""
    documents = [Document(each.id, each.text) for each in passages]
    return {"model": "m", "messages": user(PromptBuilder("").user_message(question, documents, range(len(documents))))}


def _with_tools(passages: Sequence[Passage], question: str) -> Body:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    functions = [{"name": each.id, "description": each.text, "parameters": schema} for each in passages]
    tools = [{"type": "function", "function": each} for each in functions]
    return {"model": "m", "tools": tools, "messages": _system("Be brief.", question)}


DOCUMENT = '<document id="{id}">\n{text}\n</document>'
XML = '<document index="{n}">\n<source>{title}</source>\n<document_content>\n{text}\n</document_content>\n</document>'
WEBUI = '### Task:\nCite only if a <source> tag has an id (e.g., <source id="1">).\n\n<context>\n'
_WEBUI_END = "\n</context>\n\n{question}"
_CITATIONS = (
    "For example:\nSource 1:\nThe sky is red in the evening.\nSource 2:\nWater is wet.\nQuery: When is water wet?\n"
    "Answer: Always [2].\nNow it's your turn. Below are several numbered sources of information:\n------\n"
)
_CONTEXT = "Context information is below.\n---------------------\n"
_GIVEN = (
    "\n---------------------\nGiven the context information and not prior knowledge, answer the query.\n"
    "Query: {question}\nAnswer: "
)
_STUFF = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say "
    "that you don't know, don't try to make up an answer.\n\n"
)

APPLICATIONS: dict[str, Shape] = {
    "anythingllm": Shape(
        in_system("Help.\nContext:\n", "[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n", "", "", 0),
        "anythingllm",
        "AnythingLLM",
    ),
    "llamaindex": Shape(
        in_user(_CONTEXT, "file_path: {title}\n\n{text}", "\n\n", _GIVEN),
        "llamaindex",
        "LlamaIndex, default prompt, nodes with `file_path`",
        plain="\n\nfile_path: ",
    ),
    "llamaindex-citations": Shape(
        in_user(_CITATIONS, "Source {n}:\n{text}\n", "\n\n", "\n------\nQuery: {question}\nAnswer: "),
        "llamaindex-citations",
        "LlamaIndex, citation engine",
    ),
    "open-webui": Shape(
        in_user(WEBUI, '<source id="{n}" name="{title}">{text}</source>', "\n", _WEBUI_END),
        "open-webui",
        "Open WebUI",
    ),
    "ragflow": Shape(
        in_system(
            "You are an assistant.\n        Here is the knowledge base:\n        ",
            "\nID: {n}\n├── Title: {title}\n└── Content:\n{text}",
            "\n",
            "\n        The above is the knowledge base.",
            0,
        ),
        "ragflow",
        "RAGFlow",
    ),
    "onyx": Shape(
        in_user(
            "",
            "DOCUMENT {n}: {title}\nSource: Web\nUpdated: June 1, 2026\n```\n{text}\n```",
            "\n\n",
            "\n\nQUERY: {question}",
        ),
        "onyx",
        "Onyx (before its documents became JSON)",
    ),
    "webpages": Shape(
        in_user(
            "# The following contents are the search results:\n",
            "[webpage {n} begin]{text}[webpage {n} end]",
            "\n",
            "\nCite.\n\n{question}",
        ),
        "webpages",
        "search results as `[webpage 1 begin]`",
    ),
    "anthropic-xml": Shape(
        in_user("<documents>\n", XML, "\n", "\n</documents>\n\n{question}"),
        "anthropic-xml",
        'Anthropic\'s `<document index="1">`',
    ),
    "cohere": Shape(
        in_system("<results>\n", "Document: {n}\ntitle: {title}\ntext: {text}", "\n\n", "\n</results>", 0),
        "cohere",
        "Cohere's `<results>`",
    ),
    "librechat": Shape(
        after_call(_scored_files),
        "librechat",
        "LibreChat's file search",
        plain="\n---\nFile: ",
    ),
    "langchain": Shape(
        in_user(_STUFF, "{text}", "\n\n", "\n\nQuestion: {question}\nHelpful Answer:"),
        "make up an answer.\n\n{text}\n\n{text}\n\nQuestion:",
        "LangChain's default join",
        plain="\n\n",
    ),
    "dify": Shape(
        in_system("Use this context.\n<context>\n", "{text}", "\n", "\n</context>\nWhen answering, be brief."),
        "<context>\n{text}\n{text}\n</context>",
        "Dify's context variable",
        plain="\n",
    ),
    "spring-ai": Shape(
        in_user(_CONTEXT, "{text}", "\n", _GIVEN),
        f"{_CONTEXT}{{text}}\n{{text}}\n---------------------\nGiven",
        "Spring AI's and Flowise's default join",
        plain="\n",
    ),
    "haystack": Shape(
        in_user("Context:\n", "\n    {text}\n", "", "\nQuestion: {question}\nAnswer:"),
        "Context:\n\n    {text}\n\n    {text}\n\nQuestion:",
        "Haystack's prompt in its tutorials",
        plain="\n\n",
    ),
    "json-tool": Shape(
        after_call(lambda each, _: json.dumps({"results": objects(each)})), "json", "results of tools as JSON"
    ),
    "vllm-documents": Shape(_vllm_documents, "auto", "`documents` of vLLM's chats"),
    "cohere-chat": Shape(_cohere_chat, "auto", "Cohere's API", "/v2/chat"),
    "document-blocks": Shape(_blocks(_document_block), "auto", "Anthropic's `document` blocks", "/v1/messages"),
    "search-results": Shape(_blocks(search_result), "auto", "Anthropic's `search_result` blocks", "/v1/messages"),
    "responses": Shape(_responses_text, DOCUMENT, "OpenAI's responses", "/v1/responses", plain="</document>"),
    "parts": Shape(_tagged_parts, DOCUMENT, "a content part for each document", plain="</document>"),
}
"""Applications and APIs of docs/proxy.md."""

MEASURED: dict[str, Shape] = APPLICATIONS | {
    "tagged": Shape(_built, "none", "documents that a client tags", tag=_tagged),
    "memories": Shape(
        in_system("[User Memory]\n- ", "{text}", "\n- ", "\n\nBe brief."),
        "memories",
        "twelve memories, in any order",
        plain="\n",
        listed=12,
    ),
    "tools": Shape(_with_tools, "none", "twelve tools, in any order", listed=12, stable_tools=True),
}
"""The applications, tagged documents, and lists before everything whose order changes."""
