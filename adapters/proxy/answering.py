"""The outermost layer: whatever goes wrong inside, the client gets an answer that says so, and the log no content."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragorder.adapters.http_server.errors import ProxyError

__all__ = ["AnswerErrors"]

_logger = logging.getLogger("ragorder")


class AnswerErrors:
    """Answers with the ProxyError that is raised inside, and with a plain one for any other error. An answer that has
    begun is broken off, so that nobody takes it for a whole one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, noted)
            return
        except ProxyError as error:
            answer = error
        except Exception as error:
            # The message of an error may quote a prompt: only its type is logged.
            _logger.error("the proxy failed with %s", type(error).__name__)
            answer = ProxyError(500, "The proxy failed: its log has the kind of error.", code="proxy_error")
        if begun:
            _logger.warning("an answer was broken off: %s", answer.code)
        else:
            await answer.send(send)
