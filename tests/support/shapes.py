"""Shapes of requests beside those of the measured applications."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ragorder.benchmarks.proxy.shapes import (
    APPLICATIONS,
    DOCUMENT,
    WEBUI,
    XML,
    Body,
    Passage,
    Shape,
    Write,
    after_call,
    in_system,
    in_user,
    listed,
    objects,
    search_result,
    user,
)  # fmt: skip


def _described(
    write: Callable[[str, str, str, str], Write],
    head: str,
    form: str,
    between: str,
    tail: str = "",
    rest: str = "{question}",
) -> Shape:
    """Return a text whose template's file has all but the `rest`."""
    fields = {"head": head, "form": form, "between": between, **({"tail": tail} if tail else {})}
    return Shape(write(head, form, between, tail + rest), fields)


def _results_of_tool(passages: Sequence[Passage], question: str) -> Body:
    """Anthropic's results of a search tool, as blocks."""
    use = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [*map(search_result, passages)]}
    messages = [*user(question), {"role": "assistant", "content": [use]}, *user([result])]
    return {"model": "m", "max_tokens": 16, "messages": messages}


def _pages_with_pictures(passages: Sequence[Passage], question: str) -> Body:
    parts: list[Body] = []
    for each in passages:
        parts += [
            {"type": "text", "text": f'<page of="{each.id}">{each.text}</page>'},
            {"type": "image_url", "image_url": {"url": f"https://pages.example/{each.id}.png"}},
        ]
    return {"model": "m", "messages": user([*parts, {"type": "text", "text": question}])}


def _responses_search(passages: Sequence[Passage], question: str) -> Body:
    """OpenAI's responses with the output of a function."""
    call = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": json.dumps({"results": objects(passages)})}
    return {"model": "m", "prompt_cache_key": "k", "input": [*user(question), call, output]}


def _completion(passages: Sequence[Passage], question: str) -> Body:
    return {"model": "m", "prompt": listed("<doc>{text}</doc>", "\n", passages) + f"\nQ: {question}\nA:"}


_SCORED = '<hit id="{id}" score="0.5">\n{text}\n</hit>'
SHAPES: dict[str, Shape] = APPLICATIONS | {
    "open-webui-system": Shape(
        in_system(WEBUI, '<source id="{n}">{text}</source>', "\n", "\n</context>"), "open-webui"
    ),
    "webpages-joined": Shape(in_user("", "[webpage {n} begin]{text}[webpage {n} end]", "", "\n{question}"), "webpages"),
    "ids": Shape(in_user("", DOCUMENT, "\n", "\n{question}"), DOCUMENT, plain="</document>"),
    "ids-after": Shape(
        in_user("", "<doc>\n{text}\nfrom ({id})</doc>", "\n", "\n{question}"),
        "<doc>\n{text}\nfrom ({id})</doc>",
        plain="doc",
    ),
    "indented": Shape(
        in_user("<ctx>\n", "  <item key='{id}'>\n    {text}\n  </item>", "\n", "\n</ctx>\n{question}"),
        "<item key='{id}'>\n    {text}\n  </item>",
        plain="item",
    ),
    "crlf": Shape(
        in_user("<ctx>\r\n", "<item n='{n}'>\r\n{text}\r\n</item>", "\r\n", "\r\n</ctx>\r\n{question}"),
        "<item n='{n}'>\r\n{text}\r\n</item>",
    ),
    "scored": Shape(in_user("", _SCORED, "\n\n", "\n{question}"), '<hit id="{id}"{*}>\n{text}\n</hit>', plain="hit"),
    "numbered-list": _described(in_user, "Facts:\n", "{n}. {text}", "\n", "\n\nQuestion: "),
    "bracketed": _described(in_system, "Sources:\n", "[{n}] {text}", "\n\n", "\n\nEnd of sources.", ""),
    "passages": _described(in_user, "Passages.\n", "Passage {n}: {text}", "\n\n", "\n\nAnswer this: "),
    "titled": _described(
        in_user, "Search results:\n\n", "Document [{n}](Title: {title}) {text}", "\n", "\n\nQuestion: "
    ),
    "headings": _described(
        in_system,
        "# Knowledge\n\n",
        "### Document {n}: {title}\n\n{text}",
        "\n\n---\n\n",
        "\n\n# Rules\n",
        "Be brief.",
    ),
    "rulers": Shape(
        in_user("Notes:\n", "{text}", "\n=====\n", "\n=====\nEnd of notes.\n{question}"),
        "Notes:\n{text}\n=====\n{text}\n=====\nEnd of notes.",
        plain="=====",
    ),
    "source-lines": Shape(
        in_user("Sources:\n", "{id}.pdf: {text}", "\n", "\nEnd.\n{question}"),
        "Sources:\n{text}\n{text}\nEnd.\n",
        plain="\n",
    ),
    "no-tail": _described(in_system, "Sources\n\n", "Source {n}:\n{text}", "\n\n", rest="\n\nCite them."),
    "json-indented": Shape(after_call(lambda each, _: json.dumps(objects(each), indent=2)), "json"),
    "json-responses": Shape(_responses_search, "json", path="/v1/responses"),
    "pages": Shape(_pages_with_pictures, '<page of="{id}">{text}</page>', plain="page"),
    "completion": Shape(_completion, "<doc>{text}</doc>", path="/v1/completions", plain="doc>"),
    "results-of-tool": Shape(_results_of_tool, path="/v1/messages"),
    "xml-tool": Shape(after_call(lambda each, _: listed(XML, "\n", each)), "anthropic-xml"),
}
"""The applications, and other shapes that their templates or a file describe."""
KEPT = ("json-responses", "results-of-tool")
"""Those whose documents keep their order: they stand after the question."""
OPEN_ENDED = "no-tail"
"""The one with nothing that marks the end of the list."""
