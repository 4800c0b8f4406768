"""A balancer before replicas of one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from support.http_server import Handler, LocalServer


def plain(messages: list[dict[str, Any]], open_end: bool) -> str:
    """A chat template that only appends."""
    return "".join(f"<{each['role']}>{each['content']}</>" for each in messages) + "<assistant>" * open_end


class Balancer(LocalServer):
    """Replicas of one engine, each with a prefix cache, and the vLLM routes that doctor asks."""

    def __init__(self, choose: Callable[[int, str | None], int], render: Callable[..., str] | None = None) -> None:
        super().__init__(_BalancerHandler)
        self.choose, self.render = choose, render
        self.reports = True
        self.caches: dict[int, set[str]] = {}
        self.topics: list[str | None] = []

    def complete(self, body: dict[str, Any], topic: str | None) -> dict[str, Any]:
        cache = self.caches.setdefault(self.choose(len(self.topics), topic), set())
        self.topics.append(topic)
        prompt = str(body["prompt"])
        cached = len(body["prompt"]) - 1 if prompt in cache else 0
        cache.add(prompt)
        details = {"cached_tokens": cached} if self.reports else None
        return {"usage": {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.render is not None
        return {"tokens": [ord(each) for each in self.render(body["messages"], body["add_generation_prompt"])]}


class _BalancerHandler(Handler):
    server: Balancer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "qwen", "max_model_len": 8192}]}))
        elif self.path == "/metrics":
            self.answer(200, 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1001",engine="0"} 1.0\n')
        else:
            self.answer(404)

    def do_POST(self) -> None:
        body = self.read_json()
        if self.path == "/v1/completions":
            self.answer(200, json.dumps(self.server.complete(body, self.headers.get("x-session-id"))))
        elif self.path == "/tokenize" and self.server.render is not None:
            self.answer(200, json.dumps(self.server.tokenize(body)))
        else:
            self.answer(404)
