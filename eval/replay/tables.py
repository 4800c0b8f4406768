"""Tables of a replay's report."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from ragorder.eval.replay.report import CapacityInfo, ReplayReport, Verdict
from ragorder.eval.report.tables import Entry, Table, Tone

__all__ = ["print_report"]

_TONES: dict[Verdict, Tone] = {
    "helps": "good",
    "helps a little": "good",
    "not worth it": "doubtful",
    "costs": "bad",
}
_STYLES = {"good": "green", "doubtful": "yellow", "bad": "bold red"}


def print_report(report: ReplayReport, *, stderr: bool = False) -> None:
    console = Console(stderr=stderr, highlight=False)
    console.print(f"[bold]{escape(report.log.name)}[/]: {_served(report)}.\n")
    console.print("Cached tokens, % of prompt tokens, by policy and by cache:")
    console.print(_cached(report))
    if report.savings:
        console.print(f"\nPrefill tokens (those that the cache does not spare) that {report.compared_policy} saves:")
        console.print(_savings(report))
    for saving in report.savings:
        if saving.verdict != "helps":
            console.print(f"{saving.says[0].upper()}{saving.says[1:]}.", style=_STYLES[_TONES[saving.verdict]])
    for line in _why(report):
        console.print(line)
    for note in report.notes:
        console.print(f"Note: {note}.", style="yellow")
    console.print(f"\n[bold]Would it help?[/] {report.answer}")
    console.print(f"Replayed at {report.requests_per_s:,.0f} requests/s.", style="dim")


def _served(report: ReplayReport) -> str:
    log = report.log
    served = "one request at a time"
    if report.timed:
        in_flight = max(figures.in_flight_mean for figures in report.figures)
        served = f"requests at their recorded times, up to {in_flight:,.1f} in flight on average"
    tenants = f", {log.tenants:,} tenants" if log.tenants > 1 else ""
    documents = f"{log.documents:,} documents of {log.working_set_tokens:,} tokens together (100 %)"
    return f"{log.requests:,} requests{tenants}, {documents}; {served}; blocks of {report.block_size}"


def _cached(report: ReplayReport) -> Table:
    table = Table(headings=["policy", *(_heading(report, capacity) for capacity in report.capacities)])
    best = {
        capacity: max(report.at(policy, capacity).cached_tokens for policy in report.policies)
        for capacity in report.capacities
    }
    for policy in report.policies:
        cells = []
        for capacity in report.capacities:
            figures = report.at(policy, capacity)
            tone: Tone = "good" if figures.cached_tokens == best[capacity] else ""
            cells.append(Entry(f"{100 * figures.cached_ratio:.1f}", tone=tone))
        table.add(policy, *cells)
    return table


def _heading(report: ReplayReport, capacity: CapacityInfo) -> str:
    if capacity.tokens is None:
        return "no\nlimit"
    share = 100 * capacity.tokens / max(1, report.log.working_set_tokens)
    return f"{share:.3g} %\n{capacity.tokens:,}"


def _savings(report: ReplayReport) -> Table:
    timed = report.prefill_tokens_per_s is not None
    seconds = ["seconds\nper 1,000"] if timed else []
    table = Table(headings=["cache", "of the\nlog", "share", "per 1,000\nrequests", *seconds, "verdict"])
    for saving in report.savings:
        cells = [
            saving.capacity.removesuffix(" tokens"),
            f"{saving.saved_tokens:,}",
            f"{100 * saving.share_of_prefill:.1f} %",
            f"{saving.tokens_per_1000_requests:,.0f}",
        ]
        cells += [f"{saving.seconds_per_1000_requests:,.2f}"] if timed else []
        table.add(*cells, Entry(saving.verdict, tone=_TONES[saving.verdict]))
    return table


def _why(report: ReplayReport) -> list[str]:
    overlap = report.overlap
    about, estimated = "", ""
    if not overlap.exact:
        about, estimated = "about ", f" (estimated from {overlap.compared_requests:,} requests)"
    return [
        f"\n{100 * overlap.sharing_two_ratio:.1f} % of the requests share two documents or more with an earlier one; "
        f"the two sets are alike by {overlap.jaccard_mean:.2f} (mean Jaccard index){estimated}.",
        f"Of all prompt tokens {100 * overlap.first_seen_ratio:.1f} % are seen for the first time and "
        f"{100 * overlap.suffix_ratio:.1f} % are questions, so that no order can reuse more than "
        f"[bold]{100 * overlap.bound_ratio:.1f} %[/].",
        f"A cached prefix comes from one earlier prompt; with the nearest one they have "
        f"[bold]{about}{100 * overlap.one_prompt_ratio:.1f} %[/] in common: an order that foresaw all requests would "
        f"still not reuse more.",
    ]
