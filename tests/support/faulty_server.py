"""A server with every fault that `ragorder doctor` looks for, and what the doctor says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Event, Lock
from typing import Any

from ragorder.adapters.doctor import Finding, examine
from support.http_server import Handler, LocalServer

BLOCK = 16
SYSTEM = "You answer questions from the documents that follow, and from nothing else. "


def gauge(**labels: object) -> str:
    """vLLM's own line about one engine's cache; a label given as None is left out."""
    known = {
        "block_size": BLOCK,
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": BLOCK,
        "enable_prefix_caching": "True",
        "engine": 0,
        "hash_block_size": "None",
        "kv_cache_size_tokens": 10_001 * BLOCK,
        "num_gpu_blocks": 10_001,
    } | labels
    inside = ",".join(f'{name}="{value}"' for name, value in known.items() if value is not None)
    return f"vllm:cache_config_info{{{inside}}} 1.0\n"


def page(*gauges: str) -> str:
    head = "# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n"
    return 'vllm:num_requests_running{engine="0"} 0.0\n' + head + "".join(gauges or (gauge(),))


def plain(messages: list[dict[str, Any]], open_end: bool) -> str:
    """A chat template that only appends."""
    return "".join(f"<{each['role']}>{each['content']}</>" for each in messages) + "<assistant>" * open_end


class FaultyServer(LocalServer):
    """As much of an OpenAI-compatible server as the doctor asks for, faults included, on a socket of its own. Each of
    its engines, or of the replicas that it balances, has a cache."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.models: Any = {"data": [{"id": "fake", "max_model_len": 8192}]}
        self.metrics: str | None = page()
        self.caching = True
        self.reporting = True
        self.completions = "ids"
        self.tokenizes = True
        self.engines = 1
        self.choose: Callable[[int, str | None], int] = lambda number, topic: number % self.engines
        self.render: Callable[[list[dict[str, Any]], bool], str] | None = None
        self.key: str | None = None
        self.status: dict[str, int] = {}
        self.raw: dict[str, bytes] = {}
        self.hangs: set[str] = set()
        self.on_tokens: Callable[[list[int]], object] = lambda token_ids: None
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.topics: list[str | None] = []
        self._caches: dict[int, set[str]] = {}
        self._lock = Lock()
        self._gone = Event()

    def stop(self) -> None:
        self._gone.set()
        super().stop()

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, _, body in self.seen if seen == path]

    def respond(self, handler: Handler, body: Any) -> None:
        path = handler.path
        self.seen.append((path, dict(handler.headers), body))
        if path in self.hangs:
            self._gone.wait(60)
        allowed = self.key is None or handler.headers.get("Authorization") == f"Bearer {self.key}"
        status, content = (self.status.get(path, 0), b"") if allowed else (401, b"")
        if not status:
            status, content = (200, self.raw[path]) if path in self.raw else self._route(handler, body)
        handler.answer(status, content)

    def _route(self, handler: Handler, body: Any) -> tuple[int, bytes]:
        path, topic = handler.path, handler.headers.get("x-session-id")
        if path == "/v1/models":
            return 200, json.dumps(self.models).encode()
        if path == "/metrics" and self.metrics is not None:
            return 200, self.metrics.encode()
        if path == "/tokenize" and self.tokenizes:
            return 200, json.dumps({"tokens": [ord(char) for char in self._text(body)]}).encode()
        if path == "/v1/completions" and self.completions in ("ids", "text"):
            if isinstance(body["prompt"], list) and self.completions == "text":
                return 400, b""
            return 200, self._complete(body["prompt"], topic)
        if path == "/v1/chat/completions" and self.completions == "chat":
            return 200, self._complete(body["messages"][0]["content"], topic)
        return 404, b""

    def _text(self, body: Any) -> str:
        if "prompt" in body:
            return str(body["prompt"])
        if self.render is not None:
            return self.render(body["messages"], body["add_generation_prompt"])
        return "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])

    def _complete(self, prompt: Any, topic: str | None) -> bytes:
        with self._lock:
            cache = self._caches.setdefault(self.choose(len(self.topics), topic), set())
            self.topics.append(topic)
        hit = (len(prompt) - 1) // BLOCK * BLOCK if self.caching and str(prompt) in cache else 0
        cache.add(str(prompt))
        if isinstance(prompt, list):
            self.on_tokens(prompt)
        details = {"cached_tokens": hit} if self.reporting else None
        return json.dumps({"usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": details}}).encode()


class _Handler(Handler):
    protocol_version = "HTTP/1.0"
    server: FaultyServer

    def do_GET(self) -> None:
        self.server.respond(self, None)

    def do_POST(self) -> None:
        self.server.respond(self, self.read_json())


def findings(server: FaultyServer, **options: Any) -> dict[str, Finding]:
    """Findings by check. Every one of them is complete."""
    found = examine(server.base_url, **{"timeout_s": 5.0} | options)
    for finding in found:
        assert finding.found
        assert finding.verdict == "good" or finding.advice
    assert len({finding.check for finding in found}) == len(found)
    return {finding.check: finding for finding in found}


def verdicts(server: FaultyServer, **options: Any) -> dict[str, str]:
    return {check: finding.verdict for check, finding in findings(server, **options).items()}


def chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
