"""Cache configuration and load of a vLLM server, from its metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ragorder.adapters.http_client import Server, ServerError
from ragorder.common.extras import needs
from ragorder.settings import Settings
from ragorder.trie.policies import POLICIES

_GAUGE = "vllm:cache_config_info"
_CAPACITY = re.compile(
    r'^vllm:ragorder_capacity_bytes\{[^}\n]*\btier="(\w+)"[^}\n]*\} ([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)$',
    re.MULTILINE,
)
_POLICY = re.compile(r'^vllm:ragorder_policy\{[^}\n]*\bpolicy="(\w+)"[^}\n]*\} 1(?:\.0)?$', re.MULTILINE)
_BY_HAND = "give the orderer capacity_tokens and block_size yourself"
_REQUESTS = re.compile(r"^vllm:num_requests_(?:waiting|running)(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache of each of a server's data-parallel `engines`. None means not published.

        read_cache_config("http://host:8000").capacity_tokens

    `block_size`: the unit of prefix hits, in tokens. `host_tokens`, `disk_tokens`, `tier_policy`: of ragorder's tiers,
    published after an engine's first request if these order its device. `hybrid`: layers such as Mamba resume only at
    stored states (docs/vllm.md).
    """

    block_size: int
    capacity_tokens: int
    prefix_caching: bool | None
    engines: int
    host_tokens: int = 0
    disk_tokens: int = 0
    tier_policy: str | None = None
    hybrid: bool | None = None

    def completes(self, settings: Settings) -> dict[str, Any]:
        """Return missing sizes, and the tiers' policy with their sizes."""
        found: dict[str, Any] = {"block_size": self.block_size, "capacity_tokens": self.capacity_tokens}
        tiers = {"host_tokens": self.host_tokens, "disk_tokens": self.disk_tokens}
        # Sizes given by hand belong to this orderer, and so does their policy.
        if not settings.model_fields_set & {"capacity_tokens", *tiers} and self.tier_policy in POLICIES:
            found |= tiers | {"tier_policy": self.tier_policy}
        return {name: value for name, value in found.items() if name not in settings.model_fields_set}


def read_cache_config(base_url: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> CacheConfig:
    """Raises ServerError, ImportError without ragorder[live]."""
    with Server(base_url, timeout_s=timeout_s, api_key=api_key) as server:
        return cache_config(server)


def engine_cache_config(vllm_config: Any) -> CacheConfig:
    """Raises ServerError if the engine of this `VllmConfig` has not started."""
    facts = {name: str(value) for name, value in vars(vllm_config.cache_config).items()}
    parallel = vllm_config.parallel_config
    # With an external or hybrid balancer the server has its local engines alone.
    is_local = getattr(parallel, "local_engines_only", False)
    engines = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
    return replace(_one_engine(facts, engines, "the engine"), engines=engines)


def cache_config(server: Server) -> CacheConfig:
    with needs("live", "talking to a server"):
        from prometheus_client.parser import text_string_to_metric_families
    try:
        page = server.get("/metrics")
    except ServerError as error:
        if error.status != 404:
            raise
        message = f"{server.root} has no /metrics: start SGLang with --enable-metrics, give vLLM's own address, or"
        raise ServerError(f"{message} {_BY_HAND}", error.status) from None
    lines = [line for line in page.split("\n") if line.startswith(f"{_GAUGE}{{")]
    if not lines:
        raise ServerError(f"{server.root}/metrics has no {_GAUGE}: {_why(page)}, or {_BY_HAND}")
    try:
        samples = [sample for family in text_string_to_metric_families("\n".join(lines)) for sample in family.samples]
    except ValueError:
        raise ServerError(f"{server.root}/metrics cannot be read: give vLLM's own address, or {_BY_HAND}") from None
    engines = {sample.labels.get("engine", ""): sample.labels for sample in samples}
    caches = [_one_engine(labels, len(engines), f"{server.root}/metrics") for labels in engines.values()]
    least = min(caches, key=lambda cache: cache.capacity_tokens)
    return replace(least, **_tiers(page, sum(cache.capacity_tokens for cache in caches), len(engines)))


def _tiers(page: str, capacity_tokens: int, engines: int) -> dict[str, Any]:
    """`capacity_tokens` is the sum of all devices."""
    sizes = dict.fromkeys(("device", "host", "disk"), 0.0)
    for tier, size in _CAPACITY.findall(page):
        sizes[tier] = sizes.get(tier, 0.0) + float(size)
    policy = _POLICY.search(page)
    if policy is None or not sizes["device"]:
        return {}
    tokens = {tier: int(sizes[tier] * capacity_tokens / sizes["device"] / engines) for tier in ("host", "disk")}
    return {"host_tokens": tokens["host"], "disk_tokens": tokens["disk"], "tier_policy": policy[1]}


def _one_engine(labels: dict[str, str], engines: int, source: str) -> CacheConfig:
    def number(name: str) -> int:
        value = _integer(labels.get(name))
        if value is None:
            found = repr(labels[name]) if name in labels else "missing"
            message = f"{source} does not say how large the cache is ({name} is {found})"
            raise ServerError(f"{message}: wait until the server has started, or {_BY_HAND}")
        return value

    # Under decode context parallelism a block is spread over GPUs, and block_size is one GPU's part of it.
    # hash_block_size, which may be finer in hybrid models, never leaves the engine's process and is None here.
    block_size = _integer(labels.get("effective_attention_block_size")) or number("block_size")
    # vLLM adds up the blocks of all engines and gives the sum for each; one block of an engine is its null block.
    tokens = (number("num_gpu_blocks") // engines - 1) * block_size
    # If layers differ (sliding windows and full attention) a token takes a block for each kind of layer.
    tokens = min(tokens, _integer(labels.get("kv_cache_size_tokens")) or tokens)
    if tokens < block_size:
        raise ServerError(f"{source}: the KV cache is smaller than a block: raise --kv-cache-memory-bytes")
    caching = {"True": True, "False": False}.get(labels.get("enable_prefix_caching", ""))
    # vLLM sets the mode of each model that has such layers. With "all" states are stored at every block.
    mode = labels.get("mamba_cache_mode")
    return CacheConfig(block_size, tokens, caching, engines, hybrid=None if mode is None else mode == "align")


def _integer(value: str | None) -> int | None:
    return int(value) if value is not None and re.fullmatch("[0-9]{1,15}", value) and int(value) > 0 else None


def _why(page: str) -> str:
    if "sglang:" in page:
        return "this is SGLang, which writes the sizes only to its log (max_total_num_tokens, page_size)"
    if "vllm:" in page:
        return "this is another version of vLLM, update it"
    return "start vLLM without --disable-log-stats"


def requests_on(page: str) -> int | None:
    """Return a /metrics page's waiting and running requests, or None without a count."""
    counts = [int(float(count)) for count in _REQUESTS.findall(page)]
    return sum(counts) if counts else None
