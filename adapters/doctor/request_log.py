"""Log of requests: OpenAI's or Anthropic's bodies with their answers' usage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ragorder.adapters.usage import read_usage
from ragorder.clouds import CloudUsage, read_cloud_usage
from ragorder.common.jsonl import JSONLines

EXAMPLE = '{"messages": […], "usage": {…}}'
_MOST_REQUESTS = 5_000
_MOST_CHARACTERS = 1 << 27
INSTRUCTIONS = ("system", "developer")
_FIELDS = (
    *("model", "cache_salt", "prompt_cache_key", "chat_template_kwargs", "chat_template", "reasoning_effort"),
    *("reasoning", "thinking", "tool_choice"),
)


class Message(NamedTuple):
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request's prompt and reported counts.

    The first `tools_end` characters of `text` are tools, the first `system_end` tools and system message. Requests of
    one `scope` (model and salt) share a cache, unless `fields` separate them.
    """

    line: int
    model: str
    scope: tuple[str, str]
    messages: tuple[Message, ...]
    text: str
    tools_end: int
    system_end: int
    tools: Mapping[str, str]
    fields: Mapping[str, str]
    sent: Sequence[Mapping[str, Any]] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    written_tokens: int | None

    def with_tools(self, tools: Mapping[str, str]) -> LoggedRequest:
        head = shown(Message("tools", _listed(tools.values())))
        return replace(self, text=head + self.text[self.tools_end :], tools=tools)


@dataclass(frozen=True, slots=True)
class RequestLog:
    """`cut`: further requests were not read."""

    requests: tuple[LoggedRequest, ...]
    cut: bool

    def tokens_per_character(self) -> float:
        known = [each for each in self.requests if each.prompt_tokens and each.text]
        characters = sum(len(each.text) for each in known)
        return sum(each.prompt_tokens or 0 for each in known) / characters if characters else 0.25


def read_log(path: Path, *, most_requests: int = _MOST_REQUESTS, most_characters: int = _MOST_CHARACTERS) -> RequestLog:
    """Read the first requests of a file of JSON lines, plain or compressed.

    A line is a body with `usage`, or has the body as `request` and the answer as `response`, or its `usage`. Raises
    JSONLinesError, which quotes no line.
    """
    lines = JSONLines(path, example=EXAMPLE)
    found: list[LoggedRequest] = []
    characters = 0
    for number, line in lines.objects(_raise):
        if len(found) == most_requests or characters > most_characters:
            return RequestLog(tuple(found), cut=True)
        body = next((each for name in ("request", "body") if isinstance(each := line.get(name), dict)), line)
        if isinstance(more := body.get("extra_body"), dict):
            body = body | more
        if not any(name in body for name in ("messages", "prompt", "input")):
            raise lines.error(number, f'has none of "messages", "prompt" and "input": a line looks like {EXAMPLE}')
        try:
            request = _request(number, body, _usage(line))
        except RecursionError:
            raise lines.error(number, "nested too deeply") from None
        characters += len(request.text)
        found.append(request)
    return RequestLog(tuple(found), cut=False)


def _raise(error: Exception) -> NoReturn:
    raise error


def _request(line: int, body: Mapping[str, Any], usage: Any) -> LoggedRequest:
    tools = _tools(body.get("tools") or body.get("functions"))
    said = list(_messages(body, tools))
    leading = next((at for at, each in enumerate(said) if each.role not in ("tools", *INSTRUCTIONS)), len(said))
    # Where a chat template writes them is not known: most do so after the system message.
    messages = (*said[:leading], *_documents(body.get("documents")), *said[leading:])
    parts = [shown(each) for each in messages]
    sent = body.get("messages")
    chat = isinstance(sent, list) and bool(sent) and all(isinstance(each, dict) for each in sent)
    model = str(body.get("model") or "")
    report = _report(usage)
    return LoggedRequest(
        line=line,
        model=model,
        scope=(model, str(body.get("cache_salt") or body.get("prompt_cache_key") or "")),
        messages=messages,
        text="".join(parts),
        tools_end=len(parts[0]) if tools else 0,
        system_end=sum(map(len, parts[:leading])),
        tools=tools,
        fields={name: json.dumps(body[name], sort_keys=True) for name in _FIELDS if body.get(name) is not None},
        sent=sent if chat else None,
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        written_tokens=report.written_tokens,
    )


def _report(usage: Any) -> CloudUsage:
    """LiteLLM's usage has the names of two APIs."""
    cloud = read_cloud_usage(usage)
    if cloud.prompt_tokens is not None:
        return cloud
    engine = read_usage(usage)
    return CloudUsage(engine.cached_tokens, cloud.written_tokens, engine.prompt_tokens)


def _usage(line: Mapping[str, Any]) -> Any:
    answer = line.get("response")
    return line.get("usage") or (answer.get("usage") if isinstance(answer, dict) else None)


def _tools(tools: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for tool in tools if isinstance(tools, list) else ():
        text = json.dumps(tool, ensure_ascii=False)
        of = tool.get("function", tool) if isinstance(tool, dict) else None
        name = of.get("name") if isinstance(of, dict) else None
        found[name if isinstance(name, str) and name not in found else text] = text
    return found


def _listed(tools: Iterable[str]) -> str:
    return f"[{', '.join(tools)}]"


def shown(message: Message) -> str:
    return f"<{message.role}>\n{message.text}\n"


def _messages(body: Mapping[str, Any], tools: Mapping[str, str]) -> Iterator[Message]:
    if tools:
        yield Message("tools", _listed(tools.values()))
    for name in ("system", "instructions"):
        if body.get(name):
            yield Message("system", _content(body[name]))
    yield from messages_of(body.get("messages"))
    yield from messages_of(body.get("input"))
    if (prompt := body.get("prompt")) is not None:
        yield Message("prompt", " ".join(map(str, prompt)) if isinstance(prompt, list) else str(prompt))
    yield from _tagged(body.get("ragorder"))


def _documents(documents: Any) -> Iterator[Message]:
    if isinstance(documents, list) and documents:
        yield Message("documents", "\n".join(json.dumps(each, ensure_ascii=False) for each in documents))


def messages_of(messages: Any) -> Iterable[Message]:
    if isinstance(messages, str):
        return [Message("user", messages)]
    return (
        Message(str(each.get("role") or each.get("type") or ""), _content(_said(each)))
        for each in (messages if isinstance(messages, list) else ())
        if isinstance(each, Mapping)
    )


def _said(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    calls = message.get("tool_calls") or message.get("function_call")
    return content if not calls else f"{_content(content)}{json.dumps(calls, ensure_ascii=False)}"


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(_part(each) for each in content)
    return "" if content is None else str(content)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text", part.get("content"))
    if isinstance(text, str | list):
        return _content(text)
    return json.dumps({name: part[name] for name in part if name != "cache_control"}, ensure_ascii=False)


def _tagged(tag: Any) -> Iterator[Message]:
    if isinstance(tag, Mapping) and isinstance(documents := tag.get("documents"), list):
        texts = [
            f"[{each.get('id', '')}]\n{each.get('text', '')}\n\n" for each in documents if isinstance(each, Mapping)
        ]
        yield Message("user", f"{''.join(texts)}{tag.get('query') or ''}")
