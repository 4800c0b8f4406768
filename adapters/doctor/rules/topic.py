"""Balancers without one replica for each topic."""

from __future__ import annotations

from ragorder.adapters.doctor.case import Case
from ragorder.adapters.doctor.finding import Finding
from ragorder.adapters.http_client import ServerError

__all__ = ["check"]

_CHECK = "topic's replica"
_NOT_CHECKED = "if one address has several replicas: give it as URL, and the header of topics as --topic-header"
_IGNORED = (
    "have the balancer choose the replica by this header (docs/replicas.md has the settings, deploy/README.md the "
    "traps), and check that nothing in between drops it"
)


def check(case: Case) -> Finding:
    """Send one random prompt several times with the same topic: each repetition must be cached."""
    if case.probe is None:
        return Finding(_CHECK, "unknown", "not checked", _NOT_CHECKED)
    try:
        cached_tokens = case.probe()
    except ServerError as error:
        return Finding(_CHECK, "unknown", str(error), "see the server's log; --timeout allows more time")
    times, header = len(cached_tokens), case.topic_header
    if all(each is None for each in cached_tokens):
        advice = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
        return Finding(_CHECK, "unknown", "answers report no cached tokens", advice)
    hits = sum(1 for each in cached_tokens if each)
    if hits == times:
        return Finding(_CHECK, "good", f"{times} requests with the same {header} reused the first one's prefix")
    found = f"{hits} of {times} requests with the same {header} reused the first one's prefix"
    also = "" if hits else "; if there is one replica alone, its prefix cache is off"
    return Finding(_CHECK, "bad", found, f"{_IGNORED}{also}")
