"""Rules by provider, model and lifetime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, cast

from ragorder.clouds import anthropic, bedrock, deepseek, openai
from ragorder.clouds.rules import CacheRules

__all__ = ["PROVIDERS", "Provider", "cache_rules"]

Provider = Literal["anthropic", "bedrock", "deepseek", "openai"]


class _Table(Protocol):
    TTLS: Mapping[str, tuple[float, float]]

    def rules(self, model: str, ttl: str) -> CacheRules | None: ...


PROVIDERS: Mapping[str, _Table] = {
    name: cast(_Table, table)
    for name, table in (("anthropic", anthropic), ("bedrock", bedrock), ("deepseek", deepseek), ("openai", openai))
}


def cache_rules(provider: Provider | str, model: str, ttl: str | None = None) -> CacheRules:
    """The rules of a provider's model, whose entries live for `ttl`, as the provider spells it (None: its default).

        cache_rules("anthropic", "claude-opus-5-5", "1h")

    Raises ValueError for what no table has.
    """
    table = PROVIDERS.get(provider)
    if table is None:
        raise ValueError(
            f"unknown provider {provider!r}: choose from {', '.join(PROVIDERS)}, or give rules=CacheRules(…)"
        )
    if ttl is not None and ttl not in table.TTLS:
        raise ValueError(f"{provider} has no lifetime {ttl!r}: choose from {', '.join(table.TTLS)}")
    found = table.rules(model, next(iter(table.TTLS)) if ttl is None else ttl)
    if found is None:
        raise ValueError(
            f"the table of {provider} does not have the model {model!r}: give its rules, such as "
            "rules=CacheRules('mine', minimum_tokens=1024, ttl_s=300, write=1.25, read=0.1)"
        )
    if ttl is not None and found.ttl_s != table.TTLS[ttl][0]:
        raise ValueError(f"entries of {model!r} have one lifetime, whatever ttl says: leave ttl out")
    return found
