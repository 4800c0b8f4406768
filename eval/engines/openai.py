"""Any OpenAI-compatible server: streaming completions of token ids, timed from outside."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import needs
from ragorder.eval.engines.base import EngineCompletion, EngineError, RequestError, time_between_tokens

if TYPE_CHECKING:
    import httpx2

    from ragorder.trie.residency.blocks import EngineBlocks

_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 10.0
# Servers close a connection that was idle for 5 s: ours must be gone before, or a request goes out on a dead one.
_KEEPALIVE_S = 3.0
_REPORTS_NO_CACHED_TOKENS = (
    "the server does not report cached tokens (usage.prompt_tokens_details.cached_tokens), and without them there is "
    "nothing to compare: start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A listed model: id, name or folder of its weights, context length, if known."""

    id: str
    root: str
    max_model_len: int | None


def find_model(base_url: str, name: str | None = None, *, api_key: str | None = None) -> ServedModel:
    """The model `name`, by default the first listed. Raises EngineError without server or model, ImportError."""
    from ragorder.adapters.http_client import Server, ServerError

    try:
        with Server(base_url, timeout_s=_CONNECT_TIMEOUT_S, api_key=api_key) as server:
            answer = server.get_json("/v1/models")
    except ServerError as error:
        raise EngineError(str(error)) from None
    listed = answer.get("data") if isinstance(answer, dict) else None
    models = {str(model["id"]): model for model in listed or () if isinstance(model, dict) and "id" in model}
    if not models:
        raise EngineError(f"{base_url} lists no models: give the address of an OpenAI-compatible server")
    id = next(iter(models)) if name is None else name
    if id not in models:
        raise EngineError(f"the server has no model {name!r}: give --served-model {' or '.join(models)}")
    longest = models[id].get("max_model_len")
    return ServedModel(id, str(models[id].get("root") or id), longest if isinstance(longest, int) else None)


class OpenAIEngine:
    """A server at `base_url` (with or without /v1), for concurrent requests, in an `async with` block. Answers have
    `output_tokens` tokens if the server supports `ignore_eos`, else at most that. Each request carries a random
    `cache_salt`, replaced by `reset`. Under LRU eviction blocks of an old salt are older than all of the new one: a new
    salt is as good as an empty cache. `blocks` come from KV events."""

    name = "openai"
    partial_blocks_first = True

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        block_size: int,
        capacity_tokens: int | None,
        output_tokens: int = 1,
        api_key: str | None = None,
        blocks: EngineBlocks | None = None,
    ) -> None:
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        # The last token of an answer is never computed upon.
        self.kept_output_tokens = max(0, output_tokens - 1)
        self.base_url = base_url
        self.blocks = blocks
        self._url = f"{base_url.rstrip('/').removesuffix('/v1').rstrip('/')}/v1/completions"
        self._model = model
        self._output_tokens = output_tokens
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._extra: dict[str, Any] = {"ignore_eos": True}
        self._client: httpx2.AsyncClient | None = None
        self.reset()

    async def __aenter__(self) -> OpenAIEngine:
        """Raises ImportError."""
        with needs("live", "the openai engine"):
            import httpx2
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S)
        timeout = httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout, follow_redirects=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def reset(self) -> None:
        """Draw a new salt."""
        self.salt = secrets.token_hex(16)

    async def complete(self, token_ids: Sequence[int], output_tokens: int | None = None) -> EngineCompletion:
        """`ttft_s` ends at the first chunk with a choice, `tbt_s` at the last. Missing cached tokens count as none.
        Raises RequestError without content."""
        completion, _ = await self._complete(token_ids, output_tokens)
        return completion

    async def check(self, token_ids: Sequence[int]) -> None:
        """Serve a prompt a few times, and `reset`. Raises EngineError for a server without token ids, reported cached
        tokens, or salts."""
        try:
            await self._complete(token_ids)
        except RequestError as error:
            if error.status in (400, 422):
                self._extra = {}
        try:
            await self._complete(token_ids)
            again, reported = await self._complete(token_ids)
            self.reset()
            other = await self.complete(token_ids)
        except RequestError as error:
            raise EngineError(
                f"{self._url} does not serve a prompt of token ids with a cache_salt ({error}): "
                "is this the model's own server, vLLM or SGLang?"
            ) from None
        if not reported:
            raise EngineError(_REPORTS_NO_CACHED_TOKENS)
        if not again.cached_tokens:
            raise EngineError(
                "the server reuses nothing of a prompt that it has just served: start it with prefix caching"
            )
        if other.cached_tokens >= again.cached_tokens:
            raise EngineError(
                "the server does not keep the caches of different cache_salt apart, so that one run would find what "
                "another left: update it"
            )
        self.reset()

    async def _complete(
        self, token_ids: Sequence[int], output_tokens: int | None = None
    ) -> tuple[EngineCompletion, bool]:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(token_ids),
                "max_tokens": max(1, self._output_tokens if output_tokens is None else output_tokens),
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": self.salt,
                **self._extra,
            }
        )
        usage: Mapping[str, Any] | None = None
        ttft_s: float | None = None
        latest_s = 0.0
        texts = []
        start = time.perf_counter()
        async with self._stream(body) as events:
            async for event in events:
                if event.get("choices"):
                    latest_s = time.perf_counter() - start
                    ttft_s = latest_s if ttft_s is None else ttft_s
                    texts.append(event["choices"][0].get("text") or "")
                usage = event.get("usage") or usage
            total_s = time.perf_counter() - start
            if ttft_s is None or usage is None:
                raise RequestError("the answer ended before its usage")
            cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            prompt_tokens = usage.get("prompt_tokens") or len(token_ids)
            tbt_s = time_between_tokens(ttft_s, latest_s, usage.get("completion_tokens") or len(texts))
            completion = EngineCompletion(ttft_s, cached_tokens or 0, prompt_tokens, "".join(texts), total_s, tbt_s)
        return completion, cached_tokens is not None

    @asynccontextmanager
    async def _stream(self, body: str) -> AsyncIterator[AsyncIterator[Mapping[str, Any]]]:
        """Server-sent events. All failures are RequestErrors."""
        import httpx2

        assert self._client is not None, "use the engine in `async with`"
        try:
            async with self._client.stream("POST", self._url, content=body) as response:
                if response.status_code != 200:
                    raise RequestError(f"HTTP {response.status_code}", response.status_code)
                yield _events(response)
        except (httpx2.HTTPError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise RequestError(type(error).__name__) from None


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """httpx2 also ends a line at characters such as U+2028, which JSON may contain."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _events(response: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    async for line in _lines(response):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event: Mapping[str, Any] = json.loads(data)
        if "error" in event:
            raise RequestError("the server reports an error within the answer")
        yield event
