"""Later turns not beginning with the turn before."""

from __future__ import annotations

from collections import Counter

from ragorder.adapters.doctor.beginnings import common_length
from ragorder.adapters.doctor.case import Case, counted, graded
from ragorder.adapters.doctor.finding import Finding
from ragorder.adapters.doctor.turns import Turn

__all__ = ["check"]

_CHECK = "earlier turns"
_ADVICE = (
    "send earlier turns again byte for byte, with their documents; put new documents into the new message, or "
    "documents for all turns into the system message; drop old turns rarely and many at once"
)


def check(case: Case) -> Finding:
    turns = case.turns
    if not turns:
        return Finding(_CHECK, "good", "no request continues another one of this log")
    kinds: Counter[str] = Counter()
    lost = 0
    for turn in turns:
        if (changed := turn.changed) is not None:
            kinds[_kind(turn, changed)] += 1
            lost += len(turn.before.text) - common_length(turn.before.text, turn.request.text)
    broken = sum(kinds.values())
    found = f"{broken:,} of {len(turns):,} later turns do not begin with the turn before"
    verdict = graded(broken, len(turns), bad=0.2, warning=0.02)
    if verdict == "good":
        return Finding(_CHECK, "good", found)
    tokens = case.tokens(lost / broken)
    return Finding(_CHECK, verdict, f"{found}: {counted(kinds)}; each loses {tokens:,} tokens on average", _ADVICE)


def _kind(turn: Turn, changed: int) -> str:
    before, after = turn.before.messages, turn.request.messages
    if changed >= len(after):
        return "messages were dropped"
    old, new = before[changed], after[changed]
    if old.role in ("system", "developer", "tools") or new.role in ("system", "developer", "tools"):
        return "the tools changed" if "tools" in (old.role, new.role) else "the system message changed"
    if new in before[changed + 1 :]:
        return "messages were dropped"
    if old.role != new.role:
        return "the roles of messages changed"
    role = old.role if old.role in ("user", "assistant", "tool") else "other"
    if new.text in old.text:
        return f"an earlier {role} message lost its documents or other text"
    return f"an earlier {role} message changed"
