"""Checks of a server, by test requests of random tokens."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ragorder.adapters.doctor.case import Finding, graded
from ragorder.adapters.doctor.events import Events, check_events
from ragorder.adapters.doctor.prompts import PromptSample, check_samples
from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.observing.tier_stats import fetch_tier_stats
from ragorder.adapters.usage import ReportedUsage, member, read_usage
from ragorder.adapters.vllm.cache_config import CacheConfig, cache_config
from ragorder.common.counts import reported_count
from ragorder.common.jsonl import printable

T = TypeVar("T")

# Ordinary or at least harmless tokens in any vocabulary.
_TOKEN_IDS = range(100, 256)
# Statuses of a server that lacks a route or does not take token ids.
_OTHER_FORM = (400, 404, 405, 422, 501)
_REPEATS = 7
_PROBE_TOKENS = 512
# engine: vLLM, SGLang or unknown; proxy: ragorder serve; embedded: ragorder's engine.
Kind = Literal["engine", "proxy", "embedded", "other"]
_ENGINES = ("vllm", "sglang", "")
_SERVER = "check the server that it forwards to: ragorder doctor with the URL that `ragorder serve` has as --upstream"
_OTHER = {
    "prefix caching": "switch on the server's prefix cache: without it ordering documents saves nothing",
    "capacity": "give the orderer the size of the server's cache (RAGORDER_CAPACITY_TOKENS, RAGORDER_BLOCK_SIZE)",
    "cached tokens": "if the server can report usage.prompt_tokens_details.cached_tokens, let it",
    "KV events": "leave them out: vLLM and SGLang publish them",
}
_OWN_ENGINE = {
    "capacity": "ragorder's own engine has it from its settings",
    "KV events": "ragorder's own engine needs none",
}
_PROMPT_TOKENS = 2000
_FEWEST_PROMPTS = 8
_UNKNOWN_BLOCK = 128
_LARGE_PIECES = 1024
_LONGEST_PROMPT = 1 << 30
_CACHING = "start vLLM with --enable-prefix-caching, SGLang without --disable-radix-cache"
_REPORTING = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
_BY_HAND = (
    "give the orderer the sizes in the server's log (RAGORDER_CAPACITY_TOKENS, RAGORDER_BLOCK_SIZE, or "
    "capacity_tokens= and block_size=)"
)
_LARGER = (
    "raise --gpu-memory-utilization or --kv-cache-memory-bytes, lower --max-model-len and --max-num-batched-tokens, or "
    "store 8 bits a value with --kv-cache-dtype fp8"
)
_REPLICAS = "if this address has several replicas, send requests that share documents to the same one"
_BUILD_AGAIN = (
    "build again with the --model, --system, --document-template and --salt of the requests; the engine's log names "
    "what differs"
)
_ASK_AGAIN = "see the server's log; --model names another model, --timeout allows more time"


@dataclass(frozen=True, slots=True)
class _Echo:
    prompt_tokens: int
    cached_tokens: list[int | None]

    @property
    def reported(self) -> bool:
        return any(cached is not None for cached in self.cached_tokens)

    @property
    def most(self) -> int:
        return max(cached or 0 for cached in self.cached_tokens)


def examine(
    base_url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    events: Events | None = None,
    samples: tuple[PromptSample, PromptSample] | None = None,
    document_marker: str | None = None,
    timeout_s: float = 30.0,
) -> list[Finding]:
    """Examine a server and, if given, its KV events and two sample prompts.

    `document_marker`: the text that begins a prompt's documents (default: guessed). Findings quote at most 40
    characters of each prompt. Raises ServerError for an unreachable server or a refused key, ImportError without
    ragorder[live].
    """
    with Server(base_url, timeout_s=timeout_s, api_key=api_key) as server:
        name, longest, kind, served = _check_server(server, model)
        config = _attempt(lambda: cache_config(server))
        known = config if isinstance(config, CacheConfig) else None
        block_size = known.block_size if known else None
        engines = known.engines if known else 1
        tokens = max(1, min(3 * (block_size or _UNKNOWN_BLOCK), longest - 1))
        echo = _attempt(lambda: _send_again_and_again(server, name, tokens, engines))
        if isinstance(echo, _Echo) and echo.reported and not echo.most and tokens < min(_LARGE_PIECES, longest - 1):
            # An engine may cache in larger units than its blocks.
            tokens = min(_LARGE_PIECES, longest - 1)
            echo = _attempt(lambda: _send_again_and_again(server, name, tokens, engines))
        findings = [
            served,
            _check_prefix_caching(known, echo),
            _check_capacity(config),
            _check_cached_tokens(known, echo),
            *check_events(events, server.host, engines, lambda: _send_tokens(server, name, tokens), timeout_s),
        ]
        if kind == "embedded":
            findings += _check_build(server.root, api_key, timeout_s)
        if samples is not None:
            findings += check_samples(server, name, samples, block_size, document_marker)
    return findings if kind == "engine" else [_fitting(kind, finding) for finding in findings]


def _check_server(server: Server, model: str | None) -> tuple[str | None, int, Kind, Finding]:
    try:
        listed = {entry["id"]: entry for entry in server.models()}
    except ServerError as error:
        if error.status in (None, 401, 403):
            raise
        return _unlisted(server, model, str(error))
    if not listed:
        return _unlisted(server, model, f"{server.root}/v1/models lists no model")
    name = model or next(iter(listed))
    kind = kind_of(server, listed.values())
    names = ", ".join(printable(each) for each in list(listed)[:8])
    if name not in listed:
        advice = f"give one of those with --model, or start the server with --served-model-name {printable(name)}"
        found = f"{server.root} does not serve {name!r}, but {names}"
        return name, _LONGEST_PROMPT, kind, Finding("server", "bad", found, advice)
    longest = reported_count(listed[name].get("max_model_len")) or _LONGEST_PROMPT
    found = f"{server.root} serves {names}"
    if model is None and len(listed) > 1:
        found += "; asked for the first, --model takes another"
    return name, longest, kind, Finding("server", "good", found)


def _unlisted(server: Server, model: str | None, found: str) -> tuple[str | None, int, Kind, Finding]:
    kind = kind_of(server, ())
    if model is None:
        advice = "give --model NAME, and the address under which the server has /v1"
        return None, _LONGEST_PROMPT, kind, Finding("server", "bad", found, advice)
    advice = f"check that the server serves {model!r}"
    return model, _LONGEST_PROMPT, kind, Finding("server", "warning", found, advice)


def _check_prefix_caching(config: CacheConfig | None, echo: _Echo | ServerError) -> Finding:
    if config and config.prefix_caching is False:
        return Finding("prefix caching", "bad", "off: every prompt is computed from its first token on", _CACHING)
    if isinstance(echo, _Echo) and echo.most:
        found = f"on: {echo.most:,} of {echo.prompt_tokens:,} tokens of a prompt were cached when it was repeated"
        return Finding("prefix caching", "good", found)
    if config and config.prefix_caching:
        return Finding("prefix caching", "good", "on, as the server's metrics say")
    if isinstance(echo, _Echo) and echo.reported:
        found = "probably off: a repeated prompt had no cached tokens"
        return Finding("prefix caching", "bad", found, f"{_CACHING}; {_REPLICAS}")
    return Finding("prefix caching", "unknown", "neither metrics nor answers show it", f"{_CACHING}; {_REPORTING}")


def _check_capacity(config: CacheConfig | ServerError) -> Finding:
    if isinstance(config, ServerError):
        return Finding("capacity", "unknown", str(config), _BY_HAND)
    prompts = config.capacity_tokens // _PROMPT_TOKENS
    each = f", in each of {config.engines} engines" if config.engines > 1 else ""
    found = f"{config.capacity_tokens:,} tokens in blocks of {config.block_size}{each}: "
    found += f"about {prompts:,} prompts of {_PROMPT_TOKENS:,} tokens"
    if prompts < _FEWEST_PROMPTS:
        return Finding("capacity", "warning", found, f"{_LARGER}: evicted tokens are not reused")
    return Finding("capacity", "good", found)


def _check_cached_tokens(config: CacheConfig | None, echo: _Echo | ServerError) -> Finding:
    check = "cached tokens"
    if isinstance(echo, ServerError):
        return Finding(check, "unknown", str(echo), _ASK_AGAIN)
    if not echo.reported:
        advice = f"{_REPORTING}: reported counts correct the orderer's predictions"
        return Finding(check, "warning", "answers do not report them", advice)
    if echo.most or (config and config.prefix_caching is False):
        return Finding(check, "good", "answers report them")
    found = f"answers report none, {len(echo.cached_tokens)} times in a row for the same prompt"
    return Finding(check, "warning", found, f"{_REPLICAS}; otherwise {_CACHING}")


def _send_again_and_again(server: Server, model: str | None, tokens: int, engines: int) -> _Echo:
    token_ids = random_tokens(tokens)
    prompt_tokens, cached_tokens = 0, []
    # With more requests than engines, two reach the same engine.
    for _ in range(engines + 1):
        usage, _exact = send(server, model, token_ids)
        prompt_tokens = usage.prompt_tokens or tokens
        cached_tokens.append(usage.cached_tokens)
        if usage.cached_tokens:
            break
    return _Echo(prompt_tokens, cached_tokens)


def _check_build(url: str, api_key: str | None, timeout_s: float) -> list[Finding]:
    try:
        stats = fetch_tier_stats(url, timeout_s=timeout_s, api_key=api_key)
    except ServerError:
        return []
    asked = sum(stats.build.values())
    if not stats.misfits:
        used = f"{asked:,} requests have used it" if asked else "no request with documents has been sent yet"
        return [Finding("build", "good" if asked else "unknown", used)] if stats.build else []
    verdict = graded(asked - stats.build.get("used", 0), asked)
    return [Finding("build", verdict, f"of {asked:,} requests that could use it, {stats.misfits}", _BUILD_AGAIN)]


def _send_tokens(server: Server, model: str | None, tokens: int) -> list[int]:
    token_ids = random_tokens(tokens)
    _, exact = send(server, model, token_ids)
    if not exact:
        raise ServerError(
            f"{server.root} takes no token ids as prompt, so its events cannot be recognised: check vLLM's own address"
        )
    return token_ids


def _attempt(ask: Callable[[], T]) -> T | ServerError:
    try:
        return ask()
    except ServerError as error:
        return error


def kind_of(server: Server, models: Iterable[dict[str, Any]]) -> Kind:
    owners = {owner.lower() for model in models if isinstance(owner := model.get("owned_by", ""), str)}
    if "ragorder" in owners:
        return "embedded"
    try:
        server.get_json("/ragorder/health")
    except ServerError:
        return "other" if owners and owners.isdisjoint(_ENGINES) else "engine"
    return "proxy"


def _fitting(kind: Kind, finding: Finding) -> Finding:
    check = finding.check
    if kind == "proxy":
        if check == "server":
            return replace(finding, found=f"{finding.found}; this is ragorder serve", advice=finding.advice or _SERVER)
        if check == "capacity":
            return replace(finding, found="this is ragorder serve, whose /metrics are its own", advice=_SERVER)
        return replace(finding, advice=_SERVER) if finding.advice and check in _OTHER else finding
    if kind == "embedded" and finding.verdict == "unknown" and check in _OWN_ENGINE:
        return replace(finding, verdict="good", found=_OWN_ENGINE[check], advice="")
    if not finding.advice or check not in _OTHER:
        return finding
    known = "the server does not publish its cache size" if check == "capacity" else finding.found
    return replace(finding, found=known if finding.verdict == "unknown" else finding.found, advice=_OTHER[check])


def random_tokens(count: int) -> list[int]:
    return random.choices(_TOKEN_IDS, k=count)


def send(
    server: Server, model: str | None, token_ids: list[int], headers: Mapping[str, str] | None = None
) -> tuple[ReportedUsage, bool]:
    """Return the answer's usage, and whether the server took token ids. Raises ServerError."""
    if model is None:
        raise ServerError(f"{server.root} got no test request, because it lists no model: give --model")
    text = " ".join(map(str, token_ids))
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": token_ids}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ]
    refusals = []
    for path, prompt in forms:
        try:
            answer = server.post_json(path, {"model": model, "max_tokens": 1, "temperature": 0, **prompt}, headers)
        except ServerError as error:
            if error.status not in _OTHER_FORM:
                raise
            refusals.append(error)
            continue
        return read_usage(member(answer, "usage")), prompt.get("prompt") is token_ids
    raise refusals[0]


def probe_topic(server: Server, model: str | None, header: str) -> list[int | None]:
    """Return the cached tokens of each repetition of a prompt with the same topic."""
    topic, token_ids = {header: secrets.token_hex(16)}, random_tokens(_PROBE_TOKENS)
    return [send(server, model, token_ids, topic)[0].cached_tokens for _ in range(_REPEATS + 1)][1:]
