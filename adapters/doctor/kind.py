"""Kind of a server, and advice for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from ragorder.adapters.doctor.finding import Finding
from ragorder.adapters.http_client import Server, ServerError

__all__ = ["Kind", "for_kind", "kind_of"]

Kind = Literal["engine", "proxy", "embedded", "other"]
"""engine: vLLM, SGLang or unknown; proxy: ragorder serve; embedded: ragorder's engine."""

_ENGINES = ("vllm", "sglang", "")
_SERVER = "check the server that it forwards to: ragorder doctor with the URL that `ragorder serve` has as --upstream"
_OTHER = {
    "prefix caching": "switch on the server's prefix cache: without it ordering documents saves nothing",
    "capacity": "give the orderer the size of the server's cache (RAGORDER_CAPACITY_TOKENS, RAGORDER_BLOCK_SIZE)",
    "cached tokens": "if the server can report usage.prompt_tokens_details.cached_tokens, let it",
    "KV events": "leave them out: vLLM and SGLang publish them",
}


def kind_of(server: Server, models: Iterable[dict[str, Any]]) -> Kind:
    owners = {owner.lower() for model in models if isinstance(owner := model.get("owned_by", ""), str)}
    if "ragorder" in owners:
        return "embedded"
    try:
        server.get_json("/ragorder/health")
    except ServerError:
        return "other" if owners and owners.isdisjoint(_ENGINES) else "engine"
    return "proxy"


def for_kind(kind: Kind, findings: list[Finding]) -> list[Finding]:
    if kind == "engine":
        return findings
    return [_fitting(kind, finding) for finding in findings]


def _fitting(kind: Kind, finding: Finding) -> Finding:
    check = finding.check
    if kind == "proxy":
        if check == "server":
            return replace(finding, found=f"{finding.found}; this is ragorder serve", advice=finding.advice or _SERVER)
        if check == "capacity":
            return replace(finding, found="this is ragorder serve, whose /metrics are its own", advice=_SERVER)
        return replace(finding, advice=_SERVER) if finding.advice and check in _OTHER else finding
    if kind == "embedded" and finding.verdict == "unknown" and check in ("capacity", "KV events"):
        found = {
            "capacity": "ragorder's own engine has it from its settings",
            "KV events": "ragorder's own engine needs none",
        }
        return replace(finding, verdict="good", found=found[check], advice="")
    if not finding.advice or check not in _OTHER:
        return finding
    known = "the server does not publish its cache size" if check == "capacity" else finding.found
    return replace(finding, found=known if finding.verdict == "unknown" else finding.found, advice=_OTHER[check])
