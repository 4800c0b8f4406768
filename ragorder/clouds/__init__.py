"""Clouds: prompt caches of providers that resume a prefix only where an earlier request has set a mark.

    orderer = Orderer.for_cloud("anthropic", model="claude-opus-5-5", ttl="5m", builder=builder)
    ordering = orderer.order(documents)              # ordering.breakpoints: documents in front of each mark
    prompt = builder.build(question, ordering)       # prompt.anthropic(), .openai(), .bedrock()
    answer = client.messages.create(model=…, max_tokens=…, **prompt.anthropic())
    ordering.readable()                              # at the first token: others may read what it writes
    usage = read_cloud_usage(answer.usage)
    ordering.confirm(usage.cached_tokens, prompt_tokens=usage.prompt_tokens, written_tokens=usage.written_tokens)
    ordering.cost                                    # in input tokens at the plain price, and in money

`cache_rules` has the rules of a provider's model from the tables beside (a file each, with date and sources);
`anthropic_content`, `openai_content` and `bedrock_content` make content parts with marks of any texts.
"""

from ragorder.clouds.cost import Cost
from ragorder.clouds.hybrid import hybrid_rules
from ragorder.clouds.parts import PromptParts, anthropic_content, bedrock_content, openai_content
from ragorder.clouds.prices import Prices
from ragorder.clouds.request import CloudModel, CloudRequest
from ragorder.clouds.rules import CacheRules, UsageFields
from ragorder.clouds.tables import Provider, cache_rules
from ragorder.clouds.turns import HistoryMark, TurnMarks, TurnParts
from ragorder.clouds.usage import CloudUsage, read_cloud_usage

__all__ = [
    "CacheRules",
    "CloudModel",
    "CloudRequest",
    "CloudUsage",
    "Cost",
    "HistoryMark",
    "Prices",
    "PromptParts",
    "Provider",
    "TurnMarks",
    "TurnParts",
    "UsageFields",
    "anthropic_content",
    "bedrock_content",
    "cache_rules",
    "hybrid_rules",
    "openai_content",
    "read_cloud_usage",
]
