"""Prompt caches of clouds, which resume at cache breakpoints: `Orderer.for_cloud` (docs/clouds.md)."""

from ragorder.clouds.parts import PromptParts, anthropic_content, bedrock_content, openai_content
from ragorder.clouds.prices import Cost, Prices
from ragorder.clouds.request import CloudModel, CloudRequest, CloudUsage, read_cloud_usage
from ragorder.clouds.rules import CacheRules, UsageFields
from ragorder.clouds.tables import Provider, cache_rules
from ragorder.clouds.turns import HistoryMark, TurnMarks, TurnParts

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
    "openai_content",
    "read_cloud_usage",
]
