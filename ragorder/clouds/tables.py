"""Rules by provider, model and TTL, from `providers.toml` (with sources)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragorder.clouds.rules import CacheRules, UsageFields, generation

Provider = Literal["anthropic", "bedrock", "deepseek", "openai"]


@dataclass(frozen=True, slots=True)
class _Table:
    """`models`: fields of `CacheRules` in which they differ from `rules`."""

    name: str
    date: str
    source: str
    usage: Mapping[str, Any]
    ttls: Mapping[str, tuple[float, float]]
    rules: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    variants: bool = False

    def rules_of(self, model: str, ttl: str | None) -> CacheRules | None:
        found = generation(model, self.models, variants=self.variants)
        if found is None:
            return None
        spelled = next(iter(self.ttls)) if ttl is None else ttl
        ttl_s, write = self.ttls[spelled]
        fields = {"resume": "marks", "ttl_s": ttl_s, "write": write, **self.rules, **self.models[found]}
        if fields["resume"] == "marks":
            fields["ttl"] = spelled
        if "read_marks" in fields:
            fields["read_marks"] = tuple(fields["read_marks"])
        usage = UsageFields(**self.usage)
        return CacheRules(f"{self.name}, {found}", usage=usage, source=self.source, date=self.date, **fields)


def _read_tables() -> dict[str, _Table]:
    given = tomllib.loads(Path(__file__).with_name("providers.toml").read_text("utf-8"))
    for fields in given.values():
        if like := fields.pop("like", None):
            fields.update({name: value for name, value in given[like].items() if name not in fields})
    return {provider: _Table(**fields) for provider, fields in given.items()}


PROVIDERS: Mapping[str, _Table] = _read_tables()


def cache_rules(provider: Provider | str, model: str, ttl: str | None = None) -> CacheRules:
    """Return the rules of a provider's model with a TTL, as the provider spells it (default: its default).

        cache_rules("anthropic", "claude-opus-5-5", "1h")

    Raises ValueError for an unknown provider, model or TTL.
    """
    table = PROVIDERS.get(provider)
    if table is None:
        raise ValueError(
            f"unknown provider {provider!r}: choose from {', '.join(PROVIDERS)}, or give rules to Orderer.for_rules"
        )
    if ttl is not None and ttl not in table.ttls:
        raise ValueError(f"{provider} has no TTL {ttl!r}: choose from {', '.join(table.ttls)}")
    found = table.rules_of(model, ttl)
    if found is None:
        raise ValueError(
            f"the table of {provider} does not have the model {model!r}: give its rules to Orderer.for_rules, such as "
            "CacheRules('mine', minimum_tokens=1024, ttl_s=300, write=1.25, read=0.1)"
        )
    if ttl is not None and found.ttl_s != table.ttls[ttl][0]:
        raise ValueError(f"entries of {model!r} have one fixed TTL: leave ttl out")
    return found
