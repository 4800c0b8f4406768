"""Log of requests: OpenAI's or Anthropic's bodies with their answers' usage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ragorder.adapters.usage import read_usage
from ragorder.clouds import CloudUsage, read_cloud_usage
from ragorder.common.jsonl import JSONLines

__all__ = ["LoggedRequest", "Message", "RequestLog", "read_log"]

EXAMPLE = '{"messages": […], "usage": {…}}'
_MOST_REQUESTS = 5_000
_MOST_CHARACTERS = 1 << 27
_INSTRUCTIONS = ("system", "developer")


class Message(NamedTuple):
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request's prompt and reported counts (None if not reported).

    The first `system_end` characters of `text` are tools and system message. Requests of the same `scope` (model and
    salt) share a cache.
    """

    line: int
    model: str
    scope: tuple[str, str]
    messages: tuple[Message, ...]
    text: str
    system_end: int
    sent: Sequence[Mapping[str, Any]] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    written_tokens: int | None


@dataclass(frozen=True, slots=True)
class RequestLog:
    """Requests of a log. `cut`: more requests were not read."""

    requests: tuple[LoggedRequest, ...]
    cut: bool

    def tokens_per_character(self) -> float:
        known = [each for each in self.requests if each.prompt_tokens and each.text]
        characters = sum(len(each.text) for each in known)
        return sum(each.prompt_tokens or 0 for each in known) / characters if characters else 0.25


def read_log(path: Path, *, most_requests: int = _MOST_REQUESTS, most_characters: int = _MOST_CHARACTERS) -> RequestLog:
    """Read the first requests of a file of JSON lines, plain or compressed.

    A line is a body with `usage`, or has the body as `request` and the answer as `response` or its `usage`. Raises
    JSONLinesError, which names the line and does not quote it.
    """
    lines = JSONLines(path, example=EXAMPLE)
    found: list[LoggedRequest] = []
    characters = 0
    for number, line in lines.objects(_raise):
        if len(found) == most_requests or characters > most_characters:
            return RequestLog(tuple(found), cut=True)
        body = next((each for name in ("request", "body") if isinstance(each := line.get(name), dict)), line)
        if not any(name in body for name in ("messages", "prompt", "input")):
            raise lines.error(number, f'has neither "messages" nor "prompt": a line looks like {EXAMPLE}')
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
    messages = tuple(_messages(body))
    parts = [f"<{each.role}>\n{each.text}\n" for each in messages]
    leading = 0
    for message, part in zip(messages, parts, strict=True):
        if message.role not in ("tools", *_INSTRUCTIONS):
            break
        leading += len(part)
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
        system_end=leading,
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


def _messages(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("tools"):
        yield Message("tools", json.dumps(body["tools"], ensure_ascii=False))
    for name in ("system", "instructions"):
        if body.get(name):
            yield Message("system", _content(body[name]))
    yield from _turns(body.get("messages"))
    yield from _turns(body.get("input"))
    if (prompt := body.get("prompt")) is not None:
        yield Message("prompt", " ".join(map(str, prompt)) if isinstance(prompt, list) else str(prompt))
    yield from _tagged(body.get("ragorder"))


def _turns(messages: Any) -> Iterable[Message]:
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
