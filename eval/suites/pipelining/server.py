"""A server whose pipelines are measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ragorder.adapters.openai.pipelined import OpenAIStreams, Question, ordered_pipeline
from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.common.extras import needs
from ragorder.document import Document
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.openai import OpenAIEngine, find_model
from ragorder.eval.running.specs import EngineSpec
from ragorder.orderer import Orderer
from ragorder.pipelining import Pipeline, Retrieval
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike

_TIMEOUT_S = 600.0
# As in `OpenAIEngine`: shorter than the server's, so that no request meets a closing connection.
_KEEPALIVE_S = 3.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Limits are in tokens; `longest_tokens` includes the answer."""

    base_url: str
    model: str
    tokenizer: Any
    longest_tokens: int | None
    block_size: int
    capacity_tokens: int
    api_key: str | None = None

    def engine(self, model: str) -> dict[str, Any]:
        """Return the engine as a record has it."""
        sizes = {"block_size": self.block_size, "capacity_tokens": self.capacity_tokens}
        return {"name": "openai", "model": model, **sizes}


def find_server(
    base_url: str,
    *,
    model: Path | None = None,
    served_model: str | None = None,
    api_key: str | None = None,
    block_size: int | None = None,
    capacity_tokens: int | None = None,
) -> ServerFacts:
    """Raises EngineError for a server that does not answer or does not report its cache, or without a tokenizer;
    ImportError naming the extra to install."""
    from ragorder.adapters.http_client import ServerError
    from ragorder.adapters.vllm.cache_config import read_cache_config

    found = find_model(base_url, served_model, api_key=api_key)
    try:
        if block_size is None or capacity_tokens is None:
            cache = read_cache_config(base_url, api_key=api_key)
            block_size, capacity_tokens = block_size or cache.block_size, capacity_tokens or cache.capacity_tokens
        tokenizer = load_tokenizer(model or found.root)
    except ServerError as error:
        raise EngineError(str(error)) from None
    except (OSError, ValueError) as error:
        where = str(model or found.root)
        raise EngineError(f"no tokenizer can be loaded from {where!r}: give --model ({type(error).__name__})") from None
    return ServerFacts(base_url, found.id, tokenizer, found.max_model_len, block_size, capacity_tokens, api_key)


def find_or_start(spec: EngineSpec, stack: ExitStack) -> ServerFacts:
    """The first server of a specification, or a new one for as long as the stack. Raises as `find_server`."""
    base_url = next(iter(spec.base_urls), None)
    if base_url is None:
        from ragorder.eval.running.live import start_server

        base_url = stack.enter_context(start_server(spec)).base_url
    return find_server(
        base_url,
        model=spec.model,
        served_model=spec.served_model,
        api_key=spec.api_key,
        block_size=spec.block_size,
        capacity_tokens=spec.capacity.tokens if spec.capacity else None,
    )


class MeasuredServer:
    """A server in an `async with` block; `streams` is the engine of its pipelines."""

    def __init__(self, facts: ServerFacts) -> None:
        with needs("live", "a pipeline on a server"):
            import openai
        self.facts = facts
        self._root = facts.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        # With the types of the HTTP library that this version of openai is built on.
        make_limits, make_timeout = type(openai.DEFAULT_CONNECTION_LIMITS), openai.Timeout
        limits = make_limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S)
        http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=make_timeout(_TIMEOUT_S, connect=10.0))
        key, url = facts.api_key or "none", f"{self._root}/v1"
        self._client = openai.AsyncOpenAI(api_key=key, base_url=url, http_client=http, max_retries=0)
        self.streams = OpenAIStreams(self._client, facts.model)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def check(self, builder: PromptBuilder) -> None:
        """Raises EngineError: see `OpenAIEngine.check`."""
        facts = self.facts
        async with OpenAIEngine(
            facts.base_url,
            facts.model,
            block_size=facts.block_size,
            capacity_tokens=facts.capacity_tokens,
            api_key=facts.api_key,
        ) as engine:
            await engine.check(list(builder.prefix_ids) * 2)

    def orderer(self, builder: PromptBuilder, *, tenants: int = 1, **settings: Any) -> Orderer:
        """An orderer for one of `tenants` that share the server's cache."""
        return Orderer(
            capacity_tokens=max(self.facts.block_size, self.facts.capacity_tokens // tenants),
            block_size=self.facts.block_size,
            prefix_tokens=builder.prefix_tokens,
            tokens=builder.document_tokens,
            **settings,
        )


MODES = {"none": (False, False), "warmup": (True, False), "speculative": (True, True)}
"""By mode: warm-up, speculation."""


@dataclass(frozen=True, slots=True)
class Asked(Question):
    """A question with its place in the trace."""

    number: int = 0


def ask(number: int, query: str, scope: str, output_tokens: int = 1) -> Asked:
    """A question of tenant `scope` with exactly `output_tokens`, where the server knows ignore_eos."""
    options = {"extra_body": {"ignore_eos": True}}
    return Asked(query, scope, max_tokens=output_tokens, options=options, number=number)


def make_pipeline(
    server: MeasuredServer,
    mode: str,
    retrieval: Retrieval[Any, Document],
    *,
    orderer: OrdererLike,
    builder: PromptBuilder,
    max_prefill_bs: int | None = None,
    cautious: bool = True,
) -> Pipeline[Any, Document, Any]:
    """A pipeline in one of the `MODES`."""
    warm_up, speculate = MODES[mode]
    return ordered_pipeline(
        server.streams,
        orderer=orderer,
        builder=builder,
        retrieval=retrieval,
        prompts="token_ids",
        warm_up=warm_up,
        speculate=speculate,
        max_prefill_bs=max_prefill_bs,
        cautious=cautious,
    )


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
