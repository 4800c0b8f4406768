"""Checks of a request log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ragorder.adapters.doctor.case import Case, Finding, LocalTemplate, ServerTemplate
from ragorder.adapters.doctor.request_log import EXAMPLE, read_log
from ragorder.adapters.doctor.rules import RULES
from ragorder.adapters.doctor.server import probe_topic
from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import cache_config

_CHECK = "requests"
_LEAST_SHARE = 0.02
_REPORTING = (
    "log the usage of each answer (streams have it with stream_options.include_usage), and start vLLM with "
    "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
)
_NOTHING_IN_COMMON = "no cache can help requests that begin differently: order the documents of each request"
_EXPLAINED = "see the findings below"
_LOST = "the cache is too small for the time between two such requests, or several replicas share them"


def examine_requests(
    path: Path,
    *,
    base_url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 30.0,
    tokenizer: Any = None,
    block_size: int | None = None,
    topic_header: str | None = None,
) -> list[Finding]:
    """Find why requests of a log are not cached.

    The server at `base_url` gives its block size and renders chats; otherwise `block_size` and a transformers
    `tokenizer` do. For a `topic_header` it gets eight test requests. Findings quote no request. Raises JSONLinesError,
    AddressError, ImportError without ragorder[live].
    """
    case = Case(read_log(path), block_size, None if tokenizer is None else LocalTemplate(tokenizer), topic_header)
    if not case.log.requests:
        return [Finding(_CHECK, "unknown", "the log is empty", f"log requests, a line each: {EXAMPLE}")]
    with ExitStack() as stack:
        if base_url is not None:
            _ask(case, stack.enter_context(Server(base_url, timeout_s=timeout_s, api_key=api_key)), model)
        found = [rule(case) for rule in RULES]
        return [_cached(case, found), *found]


def _ask(case: Case, server: Server, model: str | None) -> None:
    name = model
    with suppress(ServerError):
        name = name or next((each["id"] for each in server.models()), None)
    if case.block_size is None:
        with suppress(ServerError):
            case.block_size = cache_config(server).block_size
    if case.template is None:
        case.template = ServerTemplate(server, name)
    if case.topic_header is not None:
        case.probe = partial(probe_topic, server, name, case.topic_header)


def _cached(case: Case, others: Sequence[Finding]) -> Finding:
    requests = case.log.requests
    found = f"{len(requests):,} requests{' at the beginning of the log' if case.log.cut else ''}"
    reports = {id(each): each for each in requests if each.cached_tokens is not None and each.prompt_tokens}
    if not reports:
        return Finding(_CHECK, "warning", f"{found}, and none reports its cached tokens", _REPORTING)
    prompt_tokens = sum(each.prompt_tokens or 0 for each in reports.values())
    cached_tokens = sum(each.cached_tokens or 0 for each in reports.values())
    common_tokens = sum(
        min(case.tokens(shared.characters), case.length(each))
        for each, shared in case.beginnings
        if id(each) in reports
    )
    cached, common = cached_tokens / prompt_tokens, common_tokens / prompt_tokens
    found += f": {100 * cached:.1f} % of {prompt_tokens:,} prompt tokens were cached, "
    found += f"{100 * common:.1f} % were at the beginning of an earlier request"
    found += " of the same model and salt" if len({each.scope for each in requests}) > 1 else ""
    is_explained = any(each.verdict in ("warning", "bad") for each in others)
    if common < _LEAST_SHARE and cached < _LEAST_SHARE:
        return Finding(_CHECK, "warning", found, _EXPLAINED if is_explained else _NOTHING_IN_COMMON)
    if cached >= 0.8 * common:
        # The cache did what it could: requests that begin differently are no success.
        is_good = cached >= 0.5 or not is_explained
        return Finding(_CHECK, "good", found) if is_good else Finding(_CHECK, "warning", found, _EXPLAINED)
    return Finding(_CHECK, "warning" if cached >= 0.2 * common else "bad", found, _EXPLAINED if is_explained else _LOST)
