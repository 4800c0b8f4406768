"""Chats as tokens, by a server or the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ragorder.adapters.http_client import Server, ServerError
from ragorder.errors import RagorderError

__all__ = ["ChatTemplate", "LocalTemplate", "RenderError", "ServerTemplate"]

Chat = Sequence[Mapping[str, Any]]

_CLOCK = "strftime_now"


class RenderError(RagorderError):
    """The chat template fails. The message does not quote the chat."""


class ChatTemplate(Protocol):
    dated: bool
    """Whether it writes today's date."""

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        """Return a chat's tokens, with `open_end` up to the start of the answer. Raises RenderError."""


class ServerTemplate:
    dated = False

    def __init__(self, server: Server, model: str | None) -> None:
        self._server = server
        self._model = {} if model is None else {"model": model}

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        body = {"messages": list(messages), "add_generation_prompt": open_end, **self._model}
        try:
            answer = self._server.post_json("/tokenize", body)
        except ServerError as error:
            raise RenderError(str(error)) from None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise RenderError(f"{self._server.root}/tokenize returned no tokens: give --tokenizer")
        return tokens


class LocalTemplate:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.dated = _CLOCK in str(getattr(tokenizer, "chat_template", None) or "")

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_end)
            tokens: Sequence[Any] = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            # A template may raise anything, and the error may quote a message.
            raise RenderError(f"the chat template fails on it ({type(error).__name__})") from None
        return tokens
