"""Prefill times of a server: the suites of kind "profile"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.lines import draw_lines
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table, Tone
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.trie.profile import PrefillProfile

_Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, Field(strict=False)]


class ProfileCell(SeedlessCell):
    """Numbers of `cached` and `new` tokens (by default a series each), measured in `repeats` rounds; `block_size` of a
    server that does not publish it."""

    cached: _Counts = None
    new: _Counts = None
    repeats: int = Field(5, ge=1)
    block_size: int | None = Field(None, ge=1)


class ProfileRecord(Record):
    """A server's profile: a row for each pair of `cached_tokens` and `new_tokens`."""

    called: ClassVar[str] = "a prefill profile"
    is_run: ClassVar[bool] = False

    type: Literal["profile"] = "profile"
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self.profile  # noqa: B018
        return self

    @property
    def profile(self) -> PrefillProfile:
        cached, new = (tuple(dict.fromkeys(map(int, self.rows[name]))) for name in ("cached_tokens", "new_tokens"))
        seconds, width = self.rows["seconds"], len(new)
        rows = [tuple(seconds[start : start + width]) for start in range(0, len(seconds), width)]
        return PrefillProfile(cached, new, tuple(rows), self.facts)

    @staticmethod
    def rows_of(profile: PrefillProfile) -> dict[str, list[Any]]:
        pairs = [(cached, new) for cached in profile.cached_tokens for new in profile.new_tokens]
        cached_tokens, new_tokens = map(list, zip(*pairs, strict=True))
        seconds = [time_s for row in profile.seconds for time_s in row]
        return {"cached_tokens": cached_tokens, "new_tokens": new_tokens, "seconds": seconds}


class Profiling(Experiment):
    kind = "profile"
    record = ProfileRecord
    cell = ProfileCell
    policies: ClassVar[Any] = ("prefill",)

    def obstacle(self, suite: Suite, cell: ProfileCell, policy: str) -> str | None:
        return None if self.options.engine == "openai" else "prefill times are those of a server: use --engine openai"

    def missing(self, suite: Suite, cell: ProfileCell, policy: str, reason: str) -> Missing:
        return Missing(suite.name, {}, policy, reason)

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.eval.suites.profiling.measuring import measure_profile, plan_grid, profiled_server

        cell: ProfileCell = job.cell
        options = self.options
        with profiled_server(
            options.base_url,
            model=options.model,
            served_model=options.served_model,
            api_key=options.api_key,
            block_size=cell.block_size,
        ) as server:
            grid = plan_grid(server, cell.cached, cell.new)
            made = measure_profile(server, grid, repeats=cell.repeats, seed=job.seed, progress=self.progress)
        yield {
            "policy": "prefill",
            "engine": {"name": "openai", "model": server.model, "block_size": server.block_size},
            "facts": made.facts,
            "rows": ProfileRecord.rows_of(made),
        }


_WIDE_SPREAD = 0.25


def make_part(suite: Suite, results: Results) -> Part:
    profiles = [line.profile for line in results.of(ProfileRecord, suite.name)]
    return Part(
        [profile_table(profile) for profile in profiles],
        words=[f"{doubt[0].upper()}{doubt[1:]}." for profile in profiles for doubt in doubts(profile.facts)],
        pictures=lambda: [_picture(profile) for profile in profiles],
    )


def profile_table(profile: PrefillProfile) -> Table:
    facts = profile.facts
    table = Table(
        f"{facts['model']} on {facts['engine']}: ms to the first token, new tokens a second",
        ["cached", *(f"{new:,} new" for new in profile.new_tokens)],
    )
    best = max(new / s for row in profile.seconds for new, s in zip(profile.new_tokens, row, strict=True))
    for cached, row in zip(profile.cached_tokens, profile.seconds, strict=True):
        table.add(
            f"{cached:,}", *(_entry(s, new / s / best, new) for new, s in zip(profile.new_tokens, row, strict=True))
        )
    typical, largest = (100 * facts["spread_share"][name] for name in ("median", "largest"))
    table.note = (
        f"median of {facts['repeats']}, which spread by {typical:.0f} % of it (in one cell {largest:.0f} %), seed "
        f"{facts['seed']}, blocks of {facts['block_size']} tokens"
    )
    return table


def _entry(seconds: float, share: float, new: int) -> Entry:
    tone: Tone = "good" if 3 * share >= 2 else "doubtful" if 3 * share >= 1 else "bad"
    return Entry(format_number(1e3 * seconds), f"{format_number(new / seconds, 0)}/s", tone=tone)


def doubts(facts: Mapping[str, Any]) -> Iterator[str]:
    pooled, again = facts["pooled"], facts["sent_again"]
    if facts["spread_share"]["median"] > _WIDE_SPREAD:
        yield "times differ much between repeats: measure again on an idle server and machine"
    if pooled["cells"]:
        size = f"{pooled['cells']} cells, by {100 * pooled['largest_share']:.1f} % at most"
        yield f"smoothed, because times fell although tokens were added: {size}"
    for tier in facts.get("load_missing", ()):
        yield f"no prefix came back from the {tier} in time, and its load time is missing: raise --loads-limit"
    if again:
        yield f"requests repeated, because they failed or found something else cached: {again}"


def _picture(profile: PrefillProfile) -> Picture:
    chosen = dict.fromkeys((0, len(profile.cached_tokens) // 2, len(profile.cached_tokens) - 1))
    lines = [(profile.cached_tokens[place], [1e3 * s for s in profile.seconds[place]]) for place in chosen]
    alt = "; ".join(f"{cached:,} cached: {', '.join(map(format_number, ms))} ms" for cached, ms in lines)
    points = {f"{cached:,} cached": list(zip(profile.new_tokens, ms, strict=True)) for cached, ms in lines}
    caption = f"{profile.facts['model']} on {profile.facts['engine']}."
    return draw_lines("Prefill times", points, "new tokens", "time to the first token, ms", alt=alt, caption=caption)
