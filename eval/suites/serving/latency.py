"""Pictures of times: distributions, and times by cached share."""

from __future__ import annotations

from typing import Any

from ragorder.eval.report.canvas import CARD, Picture, draw, label_ends, name_marks, style, titled
from ragorder.eval.report.groups import Group
from ragorder.eval.report.metrics import CACHED, TTFT_P50
from ragorder.eval.report.words import format_number, policy_words

__all__ = ["depth_by_time", "distributions"]

POINTS = 250


def distributions(group: Group) -> Picture | None:
    import numpy as np

    columns = {policy: group.values(policy, "ttft_ms") for policy in group.policies}
    times = {
        policy: np.sort(found[np.isfinite(found)]) for policy, found in columns.items() if np.isfinite(found).any()
    }
    if not times:
        return None

    def paint(axes: Any) -> None:
        ends = []
        for policy, found in times.items():
            looks = style(policy)
            shares = 100 * np.arange(1, len(found) + 1) / len(found)
            kept = np.unique(np.linspace(0, len(found) - 1, 200).astype(int))
            axes.step(found[kept], shares[kept], where="post", color=looks.colour, linestyle=looks.dashes)
            ends.append((policy, float(np.quantile(found, 0.5)), looks))
        axes.set_ylim(0, 100)
        axes.set_xlim(0, max(float(np.quantile(found, 0.995)) for found in times.values()) * 1.03)
        axes.set_xlabel("TTFT, ms")
        axes.set_ylabel("requests answered by then, %")
        for _, middle, looks in ends:
            axes.plot(middle, 50, looks.marker, color=looks.colour, markersize=6, markeredgecolor=CARD)
        name_marks(axes, list(times), lines=True)

    medians = {policy: float(np.quantile(found, 0.5)) for policy, found in times.items()}
    said = ", ".join(f"{policy_words(policy)} p50 {format_number(middle)} ms" for policy, middle in medians.items())
    return draw(
        paint,
        title=titled("Time to first token", group.label),
        alt=said,
        caption="Further left is faster. The marks are the medians.",
        height=3.1 + 0.2 * ((len(times) + 1) // 2),
    )


def depth_by_time(group: Group) -> list[Picture]:
    """Figure 2: requests by hit depth and TTFT, and policies by hit rate and median TTFT."""
    import numpy as np

    rows: dict[str, tuple[Any, Any]] = {}
    for policy in group.policies:
        cached, prompts = group.values(policy, "cached_tokens"), group.values(policy, "prompt_tokens")
        times = group.values(policy, "ttft_ms")
        if len(times) and len(cached) == len(prompts) == len(times):
            rows[policy] = (100 * cached / np.maximum(1, prompts), times)
    if not rows:
        return []
    most = max(float(np.nanquantile(times, 0.995)) for _, times in rows.values()) * 1.03
    rng = np.random.default_rng(0)

    def scatter(axes: Any) -> None:
        for policy, (depths, times) in rows.items():
            looks = style(policy)
            known = np.flatnonzero(np.isfinite(depths) & np.isfinite(times))
            kept = rng.permutation(known)[:POINTS]
            axes.plot(
                depths[kept], times[kept], looks.marker, color=looks.colour, markersize=3, alpha=0.35, linestyle=""
            )
        axes.set_xlim(-2, 102)
        axes.set_ylim(0, most)
        axes.set_xlabel("cached, % of the request's prompt tokens")
        axes.set_ylabel("TTFT, ms")
        name_marks(axes, list(rows))

    everything = [np.concatenate(side) for side in zip(*rows.values(), strict=True)]
    known = np.isfinite(everything[0]) & np.isfinite(everything[1])
    spread = everything[0][known].std() > 0 and everything[1][known].std() > 0
    together = (
        f"correlation {format_number(float(np.corrcoef(everything[0][known], everything[1][known])[0, 1]), 2)}"
        if spread
        else ""
    )
    found = [
        draw(
            scatter,
            title=titled("Hit depth and TTFT, request by request", group.label),
            alt=f"each request's cached share and its time to first token; {together}",
            caption=f"Up to {POINTS} requests a policy{'; over all of them ' if together else ''}{together}.",
            height=3.1 + 0.2 * ((len(rows) + 1) // 2),
        )
    ]
    places = {p: (group.value(p, CACHED), group.value(p, TTFT_P50)) for p in rows}

    def strategies(axes: Any) -> None:
        ends = []
        for policy, (share, middle) in places.items():
            looks = style(policy)
            axes.plot(share, middle, looks.marker, color=looks.colour, markersize=8)
            ends.append((share or 0.0, middle or 0.0, policy_words(policy), looks))
        axes.margins(0.12, 0.15)
        axes.set_xlabel("cached, % of all prompt tokens")
        axes.set_ylabel("TTFT p50, ms")
        label_ends(axes, ends)

    said = ", ".join(
        f"{policy_words(p)} {format_number(s)} % and {format_number(m)} ms" for p, (s, m) in places.items()
    )
    found.append(draw(strategies, title=titled("Hit rate and TTFT, by strategy", group.label), alt=said))
    return found
