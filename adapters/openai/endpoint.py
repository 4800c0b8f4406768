"""A model on an OpenAI-compatible server, and the requests sent to it."""

from __future__ import annotations

import re
from typing import Any

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.adapters.request_facts import with_facts

__all__ = ["ModelEndpoint", "UsageOption", "check_client"]

_UNKNOWN_OPTION = re.compile(r"stream_options|include_usage|\bextra|unknown field|unrecogni[sz]ed", re.IGNORECASE)


def check_client(client: Any, user: str, refused_class: str, advice: str) -> None:
    """Raises ImportError without the openai package, TypeError for a client of openai's `refused_class`."""
    try:
        import openai
    except ImportError as error:
        raise ImportError(f"{user} needs openai: pip install 'ragorder[live]'") from error
    if isinstance(client, getattr(openai, refused_class)):
        raise TypeError(f"{user} cannot use a client of type {type(client).__name__}: use {advice}")


class ModelEndpoint:
    """Sends requests for `model` through an openai client, synchronous or not."""

    def __init__(self, client: Any, model: str, *, send_facts: bool) -> None:
        self.refuses_usage = False
        self._client = client
        self._model = model
        self._send_facts = send_facts

    def create(self, request: PromptRequest, options: dict[str, Any], usage: UsageOption) -> Any:
        """The result of the client's create() for a streamed answer; `options` are checked ones."""
        options = options | {"model": self._model, "stream": True}
        if self._send_facts:
            options["extra_body"] = with_facts(options["extra_body"], request.document_ends, request.scope)
        if usage.sent:
            options["stream_options"] = {"include_usage": True}
        if request.token_ids is None:
            return self._client.chat.completions.create(messages=request.messages, **options)
        return self._client.completions.create(prompt=request.token_ids, **options)


class UsageOption:
    """The `stream_options` of one request, for usage at the end of its stream. A server that refuses them is not sent
    them again once it has accepted the request without."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self.sent = not endpoint.refuses_usage
        self._endpoint = endpoint

    def drop(self, error: Exception) -> bool:
        """Leave the option out if this error refuses it: the request is then worth sending again."""
        refused = self.sent and _refuses_stream_options(error)
        self.sent = self.sent and not refused
        return refused

    def accepted(self) -> None:
        """The server has accepted the request."""
        if not self.sent:
            self._endpoint.refuses_usage = True


def _refuses_stream_options(error: Exception) -> bool:
    from openai import APIStatusError

    if not isinstance(error, APIStatusError) or error.status_code not in (400, 422):
        return False
    return bool(_UNKNOWN_OPTION.search(f"{error} {error.body} {error.param}"))
