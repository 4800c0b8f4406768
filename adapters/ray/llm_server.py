"""Ray's own server of vLLM, ordering for its engine's cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

from ray.serve.config import RequestRouterConfig

from ragorder.adapters.ray import application
from ragorder.adapters.ray.ordered_calls import OrderedCalls
from ragorder.common.extras import needs
from ragorder.orderer import Orderer

with needs("ray,vllm", "Ray's LLM server"):
    from ray.serve.llm.deployment import LLMServer

__all__ = ["BY_SESSION", "OrderedLLMServer"]

BY_SESSION = RequestRouterConfig(request_router_class=application.BY_SESSION)
"""`request_router_config` that sends requests with one `x-session-id` to one replica."""


class OrderedLLMServer(LLMServer):  # type: ignore[misc]
    """Ray's `LLMServer` with ordered documents in chats and completions.

        config = LLMConfig(
            model_loading_config={"model_id": "llama", "model_source": "/models/llama"},
            deployment_config={"num_replicas": 4, "request_router_config": BY_SESSION},
            server_cls=OrderedLLMServer,
        )
        serve.run(build_openai_app({"llm_configs": [config]}))

    Requests need their topic in the header `x-session-id`: from `OrderedClient(topic_header=…)`, or from
    `ragorder route` before Ray. Direct streaming bypasses this class.
    """

    def make_calls(self) -> OrderedCalls:
        """Return the calls with this replica's orderer; subclasses may change it."""
        return OrderedCalls(Orderer())

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._calls.run("chat", super().chat, request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return await self._calls.run("completions", super().completions, request, raw_request_info)

    @cached_property
    def _calls(self) -> OrderedCalls:
        return self.make_calls()
