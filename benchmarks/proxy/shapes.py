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
    fields of its file. No text may have `plain`; `open_ended`: nothing marks the end of the list; `kept`: why the
    documents keep their order. `tag` returns what a client of the proxy sends instead; every request has the same
    `listed` passages, in any order; `stable_tools`: they are tools, sorted by their names."""

    write: Write
    template: str | Mapping[str, Any] = "auto"
    application: str = ""
    path: str = "/v1/chat/completions"
    plain: str = ""
    open_ended: bool = False
    kept: str = ""
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


def _user(content: Any) -> list[Body]:
    return [{"role": "user", "content": content}]


def _system(content: Any, question: str) -> list[Body]:
    return [{"role": "system", "content": content}, *_user(question)]


def _listed(form: str, between: str, passages: Sequence[Passage], first: int = 1) -> str:
    return between.join(form.format(n=n, **each._asdict()) for n, each in enumerate(passages, first))


def _in_user(head: str, form: str, between: str, tail: str, first: int = 1) -> Write:
    """Documents and the question in a user's message; the tail has the `{question}`."""

    def write(passages: Sequence[Passage], question: str) -> Body:
        text = head + _listed(form, between, passages, first) + tail.replace("{question}", question)
        return {"model": "m", "messages": _user(text)}

    return write


def _in_system(head: str, form: str, between: str, tail: str, first: int = 1) -> Write:
    def write(passages: Sequence[Passage], question: str) -> Body:
        return {"model": "m", "messages": _system(head + _listed(form, between, passages, first) + tail, question)}

    return write


def _described(
    write: Callable[[str, str, str, str], Write],
    head: str,
    form: str,
    between: str,
    tail: str = "",
    rest: str = "{question}",
    open_ended: bool = False,
) -> Shape:
    """Return a text whose template's file has all but the `rest`."""
    fields = {"head": head, "form": form, "between": between, **({"tail": tail} if tail else {})}
    return Shape(write(head, form, between, tail + rest), fields, open_ended=open_ended)


def _after_call(content: Callable[[Sequence[Passage], str], str]) -> Write:
    """Documents as the result of a tool in a chat."""

    def write(passages: Sequence[Passage], question: str) -> Body:
        call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        called = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        result = [{"role": "tool", "tool_call_id": "c1", "content": content(passages, question)}]
        return {"model": "m", "messages": [*_user("Look it up."), *called, *result, *_user(question)]}

    return write


def _scored_files(passages: Sequence[Passage], question: str) -> str:
    """LibreChat's file search: each text has a score for this question before it."""
    scores = [crc32(f"{question}{each.id}".encode()) % 10_000 for each in passages]
    files = zip(passages, scores, strict=True)
    return "\n---\n".join(
        f"File: {each.title}\nRelevance: 0.{score:04}\nContent: {each.text}\n" for each, score in files
    )


def _objects(passages: Sequence[Passage]) -> list[Body]:
    return [{"id": each.id, "title": each.title, "content": each.text} for each in passages]


def _vllm_documents(passages: Sequence[Passage], question: str) -> Body:
    documents = [{"title": each.title, "text": each.text} for each in passages]
    return {"model": "m", "messages": _user(question), "documents": documents}


def _cohere_chat(passages: Sequence[Passage], question: str) -> Body:
    documents = [{"id": each.id, "data": {"title": each.title, "snippet": each.text}} for each in passages]
    return {"model": "m", "messages": _user(question), "documents": documents}


def _blocks(make: Callable[[Passage], Body]) -> Write:
    def write(passages: Sequence[Passage], question: str) -> Body:
        content = [*map(make, passages), {"type": "text", "text": question}]
        return {"model": "m", "max_tokens": 16, "messages": _user(content)}

    return write


def _document_block(each: Passage) -> Body:
    source = {"type": "text", "media_type": "text/plain", "data": each.text}
    return {"type": "document", "source": source, "title": each.title, "citations": {"enabled": True}}


def _search_result(each: Passage) -> Body:
    content = [{"type": "text", "text": each.text}]
    return {"type": "search_result", "source": each.id, "title": each.title, "content": content}


def _results_of_tool(passages: Sequence[Passage], question: str) -> Body:
    """Anthropic's results of a search tool, as blocks."""
    use = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [*map(_search_result, passages)]}
    messages = [*_user(question), {"role": "assistant", "content": [use]}, *_user([result])]
    return {"model": "m", "max_tokens": 16, "messages": messages}


def _tagged_parts(passages: Sequence[Passage], question: str) -> Body:
    texts = [f'<document id="{each.id}">\n{each.text}\n</document>' for each in passages]
    return {"model": "m", "messages": _user([{"type": "text", "text": text} for text in [*texts, question]])}


def _pages_with_pictures(passages: Sequence[Passage], question: str) -> Body:
    parts: list[Body] = []
    for each in passages:
        parts += [
            {"type": "text", "text": f'<page of="{each.id}">{each.text}</page>'},
            {"type": "image_url", "image_url": {"url": f"https://pages.example/{each.id}.png"}},
        ]
    return {"model": "m", "messages": _user([*parts, {"type": "text", "text": question}])}


def _responses_text(passages: Sequence[Passage], question: str) -> Body:
    text = _listed('<document id="{id}">\n{text}\n</document>', "\n", passages)
    return {"model": "m", "prompt_cache_key": "k", "instructions": "Be brief.", "input": f"{text}\n\n{question}"}


def _responses_search(passages: Sequence[Passage], question: str) -> Body:
    """OpenAI's responses with the output of a function."""
    call = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": json.dumps({"results": _objects(passages)})}
    return {"model": "m", "prompt_cache_key": "k", "input": [*_user(question), call, output]}


def _tagged(passages: Sequence[Passage], question: str) -> Body:
    documents = [{"id": each.id, "text": each.text} for each in passages]
    return {"model": "m", "messages": [], "ragorder": {"documents": documents, "query": question}}


def _built(passages: Sequence[Passage], question: str) -> Body:
    """The message that a builder makes of tagged documents."""
    documents = [Document(each.id, each.text) for each in passages]
    return {"model": "m", "messages": _user(PromptBuilder("").user_message(question, documents, range(len(documents))))}


def _with_tools(passages: Sequence[Passage], question: str) -> Body:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    functions = [{"name": each.id, "description": each.text, "parameters": schema} for each in passages]
    tools = [{"type": "function", "function": each} for each in functions]
    return {"model": "m", "tools": tools, "messages": _system("Be brief.", question)}


def _completion(passages: Sequence[Passage], question: str) -> Body:
    return {"model": "m", "prompt": _listed("<doc>{text}</doc>", "\n", passages) + f"\nQ: {question}\nA:"}


_DOCUMENT = '<document id="{id}">\n{text}\n</document>'
_XML = '<document index="{n}">\n<source>{title}</source>\n<document_content>\n{text}\n</document_content>\n</document>'
_WEBUI = '### Task:\nCite only if a <source> tag has an id (e.g., <source id="1">).\n\n<context>\n'
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
        _in_system("Help.\nContext:\n", "[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n", "", "", 0),
        "anythingllm",
        "AnythingLLM",
    ),
    "llamaindex": Shape(
        _in_user(_CONTEXT, "file_path: {title}\n\n{text}", "\n\n", _GIVEN),
        "llamaindex",
        "LlamaIndex, default prompt, nodes with `file_path`",
        plain="\n\nfile_path: ",
    ),
    "llamaindex-citations": Shape(
        _in_user(_CITATIONS, "Source {n}:\n{text}\n", "\n\n", "\n------\nQuery: {question}\nAnswer: "),
        "llamaindex-citations",
        "LlamaIndex, citation engine",
    ),
    "open-webui": Shape(
        _in_user(_WEBUI, '<source id="{n}" name="{title}">{text}</source>', "\n", _WEBUI_END),
        "open-webui",
        "Open WebUI",
    ),
    "ragflow": Shape(
        _in_system(
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
        _in_user(
            "",
            "DOCUMENT {n}: {title}\nSource: Web\nUpdated: June 1, 2026\n```\n{text}\n```",
            "\n\n",
            "\n\nQUERY: {question}",
        ),
        "onyx",
        "Onyx (before its documents became JSON)",
    ),
    "webpages": Shape(
        _in_user(
            "# The following contents are the search results:\n",
            "[webpage {n} begin]{text}[webpage {n} end]",
            "\n",
            "\nCite.\n\n{question}",
        ),
        "webpages",
        "search results as `[webpage 1 begin]`",
    ),
    "anthropic-xml": Shape(
        _in_user("<documents>\n", _XML, "\n", "\n</documents>\n\n{question}"),
        "anthropic-xml",
        'Anthropic\'s `<document index="1">`',
    ),
    "cohere": Shape(
        _in_system("<results>\n", "Document: {n}\ntitle: {title}\ntext: {text}", "\n\n", "\n</results>", 0),
        "cohere",
        "Cohere's `<results>`",
    ),
    "librechat": Shape(
        _after_call(_scored_files),
        "librechat",
        "LibreChat's file search",
        plain="\n---\nFile: ",
    ),
    "langchain": Shape(
        _in_user(_STUFF, "{text}", "\n\n", "\n\nQuestion: {question}\nHelpful Answer:"),
        "make up an answer.\n\n{text}\n\n{text}\n\nQuestion:",
        "LangChain's default join",
        plain="\n\n",
    ),
    "dify": Shape(
        _in_system("Use this context.\n<context>\n", "{text}", "\n", "\n</context>\nWhen answering, be brief."),
        "<context>\n{text}\n{text}\n</context>",
        "Dify's context variable",
        plain="\n",
    ),
    "spring-ai": Shape(
        _in_user(_CONTEXT, "{text}", "\n", _GIVEN),
        f"{_CONTEXT}{{text}}\n{{text}}\n---------------------\nGiven",
        "Spring AI's and Flowise's default join",
        plain="\n",
    ),
    "haystack": Shape(
        _in_user("Context:\n", "\n    {text}\n", "", "\nQuestion: {question}\nAnswer:"),
        "Context:\n\n    {text}\n\n    {text}\n\nQuestion:",
        "Haystack's prompt in its tutorials",
        plain="\n\n",
    ),
    "json-tool": Shape(
        _after_call(lambda each, _: json.dumps({"results": _objects(each)})), "json", "results of tools as JSON"
    ),
    "vllm-documents": Shape(_vllm_documents, "auto", "`documents` of vLLM's chats"),
    "cohere-chat": Shape(_cohere_chat, "auto", "Cohere's API", "/v2/chat"),
    "document-blocks": Shape(_blocks(_document_block), "auto", "Anthropic's `document` blocks", "/v1/messages"),
    "search-results": Shape(_blocks(_search_result), "auto", "Anthropic's `search_result` blocks", "/v1/messages"),
    "responses": Shape(_responses_text, _DOCUMENT, "OpenAI's responses", "/v1/responses", plain="</document>"),
    "parts": Shape(_tagged_parts, _DOCUMENT, "a content part for each document", plain="</document>"),
}
"""Applications and APIs of docs/proxy.md."""

MEASURED: dict[str, Shape] = APPLICATIONS | {
    "tagged": Shape(_built, "none", "documents that a client tags", tag=_tagged),
    "memories": Shape(
        _in_system("[User Memory]\n- ", "{text}", "\n- ", "\n\nBe brief."),
        "memories",
        "twelve memories, in any order",
        plain="\n",
        listed=12,
    ),
    "tools": Shape(_with_tools, "none", "twelve tools, in any order", listed=12, stable_tools=True),
}
"""The applications, tagged documents, and lists before everything whose order changes."""

_SCORED = '<hit id="{id}" score="0.5">\n{text}\n</hit>'
_SHAPES: dict[str, Shape] = {
    "open-webui-system": Shape(
        _in_system(_WEBUI, '<source id="{n}">{text}</source>', "\n", "\n</context>"), "open-webui"
    ),
    "webpages-joined": Shape(
        _in_user("", "[webpage {n} begin]{text}[webpage {n} end]", "", "\n{question}"), "webpages"
    ),
    "ids": Shape(_in_user("", _DOCUMENT, "\n", "\n{question}"), _DOCUMENT, plain="</document>"),
    "ids-after": Shape(
        _in_user("", "<doc>\n{text}\nfrom ({id})</doc>", "\n", "\n{question}"),
        "<doc>\n{text}\nfrom ({id})</doc>",
        plain="doc",
    ),
    "indented": Shape(
        _in_user("<ctx>\n", "  <item key='{id}'>\n    {text}\n  </item>", "\n", "\n</ctx>\n{question}"),
        "<item key='{id}'>\n    {text}\n  </item>",
        plain="item",
    ),
    "crlf": Shape(
        _in_user("<ctx>\r\n", "<item n='{n}'>\r\n{text}\r\n</item>", "\r\n", "\r\n</ctx>\r\n{question}"),
        "<item n='{n}'>\r\n{text}\r\n</item>",
    ),
    "scored": Shape(_in_user("", _SCORED, "\n\n", "\n{question}"), '<hit id="{id}"{*}>\n{text}\n</hit>', plain="hit"),
    "numbered-list": _described(_in_user, "Facts:\n", "{n}. {text}", "\n", "\n\nQuestion: "),
    "bracketed": _described(_in_system, "Sources:\n", "[{n}] {text}", "\n\n", "\n\nEnd of sources.", ""),
    "passages": _described(_in_user, "Passages.\n", "Passage {n}: {text}", "\n\n", "\n\nAnswer this: "),
    "titled": _described(
        _in_user, "Search results:\n\n", "Document [{n}](Title: {title}) {text}", "\n", "\n\nQuestion: "
    ),
    "headings": _described(
        _in_system,
        "# Knowledge\n\n",
        "### Document {n}: {title}\n\n{text}",
        "\n\n---\n\n",
        "\n\n# Rules\n",
        "Be brief.",
    ),
    "rulers": Shape(
        _in_user("Notes:\n", "{text}", "\n=====\n", "\n=====\nEnd of notes.\n{question}"),
        "Notes:\n{text}\n=====\n{text}\n=====\nEnd of notes.",
        plain="=====",
    ),
    "source-lines": Shape(
        _in_user("Sources:\n", "{id}.pdf: {text}", "\n", "\nEnd.\n{question}"),
        "Sources:\n{text}\n{text}\nEnd.\n",
        plain="\n",
    ),
    "no-tail": _described(
        _in_system, "Sources\n\n", "Source {n}:\n{text}", "\n\n", rest="\n\nCite them.", open_ended=True
    ),
    "json-indented": Shape(_after_call(lambda each, _: json.dumps(_objects(each), indent=2)), "json"),
    "json-responses": Shape(_responses_search, "json", path="/v1/responses", kept="they stand after the question"),
    "pages": Shape(_pages_with_pictures, '<page of="{id}">{text}</page>', plain="page"),
    "completion": Shape(_completion, "<doc>{text}</doc>", path="/v1/completions", plain="doc>"),
    "results-of-tool": Shape(_results_of_tool, path="/v1/messages", kept="they stand after the question"),
    "xml-tool": Shape(_after_call(lambda each, _: _listed(_XML, "\n", each)), "anthropic-xml"),
}

SHAPES: dict[str, Shape] = APPLICATIONS | _SHAPES
"""The applications, and other shapes that their templates or a file describe."""
