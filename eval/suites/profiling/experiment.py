"""Prefill times of a server: the suites of kind "profile"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.data.machine import load_average
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.trie.profile import PrefillProfile

__all__ = ["ProfileCell", "ProfileRecord", "Profiling"]


_Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, Field(strict=False)]


class ProfileCell(SuiteCell):
    """Numbers of `cached` and `new` tokens (by default a series each), measured in `repeats` rounds; `block_size` of a
    server that does not publish it."""

    cached: _Counts = None
    new: _Counts = None
    repeats: int = Field(5, ge=1)
    block_size: int | None = Field(None, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


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

    @classmethod
    def lacks(cls, suite: Suite) -> str:
        return super().lacks(suite) or "--engine openai"

    def obstacle(self, suite: Suite, cell: ProfileCell, policy: str) -> str | None:
        return None if self.options.engine == "openai" else "prefill times are those of a server: use --engine openai"

    def missing(self, suite: Suite, cell: ProfileCell, policy: str, reason: str) -> Missing:
        return Missing(suite.name, {}, policy, reason)

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.eval.suites.profiling.measuring import measure_profile, plan_grid, profiled_server

        cell: ProfileCell = job.cell
        load = load_average()
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
            "load_average": load,
            "facts": made.facts,
            "rows": ProfileRecord.rows_of(made),
        }
