"""A far end that speaks OpenAI's and Anthropic's protocols: chats, messages and responses, streamed and not; and
Cohere's chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from support.far_end import Answer, FarEnd, Request, answer_events, answer_json

PROMPT, CACHED, COMPLETION = 600, 512, 7
_OPENAI = {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION, "total_tokens": PROMPT + COMPLETION}
_CHAT_USAGE = _OPENAI | {"prompt_tokens_details": {"cached_tokens": CACHED}}
_MESSAGES_USAGE = {
    "input_tokens": PROMPT - CACHED - 20,
    "cache_creation_input_tokens": 20,
    "cache_read_input_tokens": CACHED,
    "output_tokens": COMPLETION,
}
_RESPONSES_USAGE = {
    "input_tokens": PROMPT,
    "input_tokens_details": {"cached_tokens": CACHED, "cache_write_tokens": 0},
    "output_tokens": COMPLETION,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": PROMPT + COMPLETION,
}
_CHAT = {"id": "chatcmpl-1", "created": 0, "model": "m"}
_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_sequence": None}
_RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 0,
    "model": "gpt",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}


class Cloud:
    """Keeps the bodies and headers that it gets, and answers "yes", or the `error`: a status and a body."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.error: tuple[int, dict[str, Any]] | None = None
        self._far_end = FarEnd()
        self._far_end.play = self._play  # type: ignore[method-assign]

    @property
    def last(self) -> dict[str, Any]:
        return self.bodies[-1]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._far_end(scope, receive, send)

    def _play(self, request: Request) -> Answer:
        self.contents.append(request.body)
        self.bodies.append(request.json)
        self.headers.append(dict(request.headers))
        answers = {
            "/v1/chat/completions": _chat,
            "/v1/messages": _messages,
            "/v1/responses": _responses,
            "/v2/chat": _cohere,
        }
        answer = answers.get(request.target.partition("?")[0])
        if self.error is not None or answer is None:
            status, error = self.error or (404, {"error": {"message": "no such route", "type": "not_found_error"}})
            return answer_json(error, status)
        streamed = bool(self.last.get("stream"))
        return answer_events(*answer(True)) if streamed else Answer(answer(False))


def _event(content: dict[str, Any], *, named: bool = True) -> bytes:
    name = b"event: %s\n" % content["type"].encode() if named else b""
    return name + b"data: " + json.dumps(content).encode() + b"\n\n"


def _chat(streamed: bool) -> Iterator[bytes]:
    if not streamed:
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        whole = _CHAT | {"object": "chat.completion", "choices": [choice], "usage": _CHAT_USAGE}
        yield json.dumps(whole).encode()
        return
    chunk = _CHAT | {"object": "chat.completion.chunk"}
    for delta, reason in (({"role": "assistant", "content": ""}, None), ({"content": "yes"}, None), ({}, "stop")):
        yield _event(chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}, named=False)
    yield _event(chunk | {"choices": [], "usage": _CHAT_USAGE}, named=False)
    yield b"data: [DONE]\n\n"


def _cohere(streamed: bool) -> Iterator[bytes]:
    text = {"type": "text", "text": "yes"}
    tokens = {"input_tokens": PROMPT, "output_tokens": COMPLETION}
    whole = {"id": "c-1", "finish_reason": "COMPLETE", "message": {"role": "assistant", "content": [text]}}
    if not streamed:
        yield json.dumps(whole | {"usage": {"tokens": tokens}}).encode()
        return
    yield _event({"type": "message-start", "id": "c-1", "delta": {"message": {"role": "assistant", "content": []}}})
    yield _event({"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": "yes"}}}})
    yield _event({"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": {"tokens": tokens}}})


def _messages(streamed: bool) -> Iterator[bytes]:
    text = {"type": "text", "text": "yes"}
    if not streamed:
        yield json.dumps(_MESSAGE | {"content": [text], "stop_reason": "end_turn", "usage": _MESSAGES_USAGE}).encode()
        return
    begun = _MESSAGE | {"content": [], "stop_reason": None, "usage": _MESSAGES_USAGE | {"output_tokens": 1}}
    yield _event({"type": "message_start", "message": begun})
    yield _event({"type": "content_block_start", "index": 0, "content_block": text | {"text": ""}})
    yield _event({"type": "ping"})
    yield _event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "yes"}})
    yield _event({"type": "content_block_stop", "index": 0})
    delta = {"stop_reason": "end_turn", "stop_sequence": None}
    yield _event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": COMPLETION}})
    yield _event({"type": "message_stop"})


def _responses(streamed: bool) -> Iterator[bytes]:
    text = {"type": "output_text", "text": "yes", "annotations": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text]}
    whole = _RESPONSE | {"status": "completed", "output": [item], "usage": _RESPONSES_USAGE}
    if not streamed:
        yield json.dumps(whole).encode()
        return
    begun = _RESPONSE | {"status": "in_progress", "output": [], "usage": None}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    open_item = item | {"status": "in_progress", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": open_item},
        {"type": "response.content_part.added", **place, "part": text | {"text": ""}},
        {"type": "response.output_text.delta", **place, "delta": "yes", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "yes", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": text},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    for number, event in enumerate(events):
        yield _event(event | {"sequence_number": number})
