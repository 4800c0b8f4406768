"""A server for profiles that is none: a prefix cache behind HTTP."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from support.http_server import Handler, LocalServer

BLOCK = 16
DEVICE_BLOCKS = 100
"""As its metrics say."""


class FarServer(LocalServer):
    """As much of an OpenAI-compatible server as a profile asks for, with a prefix cache of blocks of `BLOCK`, and with
    faults."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.models: list[dict[str, Any]] = [{"id": "far", "max_model_len": 2048}, {"id": "other"}]
        sizes = f'block_size="{BLOCK}",num_gpu_blocks="{DEVICE_BLOCKS + 1}",engine="0"'
        self.pages = {
            "/version": json.dumps({"version": "0.32.0"}),
            "/metrics": f"vllm:cache_config_info{{{sizes}}} 1.0\n",
        }
        self.reports = True
        self.longest = 2048
        self.forgets: Callable[[int], bool] = lambda number: False
        self.fails: Callable[[int], bool] = lambda number: False
        self.delay_s: Callable[[int], float] = lambda number: 0.0
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self._held: set[tuple[str, tuple[int, ...]]] = set()
        self._lock = Lock()

    def page(self, path: str) -> str | None:
        return json.dumps({"data": self.models}) if path == "/v1/models" else self.pages.get(path)

    def cached_tokens(self, body: dict[str, Any]) -> int:
        with self._lock:
            self.bodies.append(body)
            if self.forgets(len(self.bodies)):
                self._held.clear()
            prompt = body["prompt"]
            heads = [(body["cache_salt"], tuple(prompt[:end])) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
            usable = heads[: (len(prompt) - 1) // BLOCK]
            hits = next((number for number, head in enumerate(usable) if head not in self._held), len(usable))
            self._held.update(heads)
            return hits * BLOCK


class TieredServer(FarServer):
    """Keeps all blocks that were computed in each of its tiers, least recently used first out, and takes `load_s` for a
    token that it loads."""

    def __init__(self, host_blocks: int, *, disk: bool, load_s: dict[str, float] | None = None) -> None:
        super().__init__()
        sizes = {"device": DEVICE_BLOCKS, "host": host_blocks, "disk": 1 << 20 if disk else 0}
        self.tiers: dict[str, OrderedDict[Any, None]] = {tier: OrderedDict() for tier, size in sizes.items() if size}
        self.sizes = sizes
        self.load_s = load_s or {}
        self.hits: Counter[str] = Counter()
        self.queried = 0

    def cached_tokens(self, body: dict[str, Any]) -> int:
        prompt, salt = body["prompt"], body["cache_salt"]
        heads = [(salt, tuple(prompt[:end])) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        found = []
        for head in heads[: (len(prompt) - 1) // BLOCK]:
            source = next((tier for tier, held in self.tiers.items() if head in held), None)
            if source is None:
                break
            found.append(source)
        for tier, held in self.tiers.items():
            for head in reversed(heads):
                held[head] = None
                held.move_to_end(head)
            while len(held) > self.sizes[tier]:
                held.popitem(last=False)
        with self._lock:
            self.bodies.append(body)
            self.queried += len(prompt)
            self.hits.update({tier: BLOCK * count for tier, count in Counter(found).items()})
        time.sleep(sum(BLOCK * self.load_s.get(tier, 0.0) for tier in found))
        return BLOCK * len(found)

    def page(self, path: str) -> str | None:
        if path != "/metrics":
            return super().page(path)
        hits = "vllm:prompt_tokens_cached_by_source_total"
        lines = [f'{hits}{{source="{tier}"}} {self.hits[tier]}' for tier in self.tiers]
        lines.append(f"vllm:prefix_cache_queries_total {self.queried}")
        for tier, held in self.tiers.items() if self.queried else ():
            lines.append(f'vllm:ragorder_chunks{{tier="{tier}"}} {len(held)}')
            lines.append(f'vllm:ragorder_capacity_bytes{{tier="{tier}"}} {self.sizes[tier]}')
        return "\n".join([str(super().page(path)).strip(), *lines, ""])


class _Handler(Handler):
    server: FarServer

    def do_GET(self) -> None:
        page = self.server.page(self.path)
        self.answer(404 if page is None else 200, page or "")

    def do_POST(self) -> None:
        body = self.read_json()
        self.server.keys.add(self.headers.get("Authorization"))
        if len(body["prompt"]) > self.server.longest:
            self.answer(400, "{}")
            return
        if self.server.fails(len(self.server.bodies) + 1):
            self.server.bodies.append(body)
            self.answer(500, "{}")
            return
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
        cached_tokens = self.server.cached_tokens(body)
        time.sleep(self.server.delay_s(len(self.server.bodies)))
        if self.server.reports:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        if not body.get("stream"):
            self.answer(200, json.dumps({"choices": [{"text": "a"}], "usage": usage}))
            return
        events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
        self.answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
