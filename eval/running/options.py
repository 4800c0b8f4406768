"""Options of `ragorder eval run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragorder.eval.engines.sim import Like
from ragorder.eval.running.specs import ENGINES, EventsAddress
from ragorder.eval.running.suite import Suite

__all__ = ["SIM_LIKE", "HarnessError", "Options"]

DEFAULT_SEEDS = (0, 1, 2)

# Whatever else may differ between the invocations that write to one folder.
_MEASURED_WITH = ("engine", "like", "reduced", "model", "limit", "base_url", "served_model")


# The simulated engine reuses blocks as the real one does: on the same tokens it finds the same ones cached.
SIM_LIKE: Like = "vllm-0.32"


class HarnessError(ValueError):
    """Suites cannot be run as asked. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Options:
    """`policies` None: each suite's; `limit`: the most requests of a run; `reduced`: the suites' short forms. `corpora`
    and `questions` are folders of corpora and data sets. `parameters` ("top_k=1,5") replace the suites' own.

    Engine "openai" measures the server at `base_url`, with KV events at `events`, or starts servers.
    """

    engine: str = "sim"
    seeds: Sequence[int] = DEFAULT_SEEDS
    policies: Sequence[str] | None = None
    limit: int | None = None
    reduced: bool = False
    model: Path | None = None
    base_url: str | None = None
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    events: EventsAddress | None = None
    corpora: Path | None = None
    questions: Path | None = None
    parameters: tuple[str, ...] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise HarnessError(f"unknown engine {self.engine!r}: choose from {', '.join(ENGINES)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise HarnessError("--seeds: give each seed once, one at least")
        if self.engine != "openai" and (self.base_url or self.served_model):
            raise HarnessError("--base-url and --served-model require --engine openai")
        if self.events is not None and self.base_url is None:
            raise HarnessError("--events-endpoint requires --base-url")
        if self.engine == "sim" and self.model is not None:
            raise HarnessError("--model requires --engine vllm, torch or openai: the simulated engine has none")

    def arguments(self, suites: Sequence[Suite]) -> dict[str, Any]:
        """As recorded in a session: without keys and passwords."""
        return {
            "suites": [suite.name for suite in suites],
            "engine": self.engine,
            "like": SIM_LIKE if self.engine == "sim" else None,
            "reduced": self.reduced,
            "model": str(self.model) if self.model else None,
            "limit": self.limit,
            "base_url": self.base_url,
            "served_model": self.served_model,
            "seeds": list(self.seeds),
            "policies": None if self.policies is None else list(self.policies),
            "corpora": str(self.corpora) if self.corpora else None,
            "questions": str(self.questions) if self.questions else None,
            "dry_run": self.dry_run,
        } | ({"set": list(self.parameters)} if self.parameters else {})

    def check_same(self, earlier: Mapping[str, Any], folder: Path) -> None:
        """Raises HarnessError if earlier runs in the folder were measured otherwise."""
        ours = self.arguments([])
        depends = "suites" in earlier and not (self.dry_run or earlier.get("dry_run"))
        # What folders that are older than these arguments were measured with.
        earlier = {"like": "lru" if earlier.get("engine") == "sim" else None, "reduced": False} | dict(earlier)
        for name in _MEASURED_WITH if depends else ():
            if earlier.get(name) != ours[name]:
                option = "a simulated engine like" if name == "like" else "--" + name.replace("_", "-")
                raise HarnessError(
                    f"{folder} has results of {option} {earlier.get(name)}, and these are of {option} {ours[name]}: "
                    "choose another folder, or run with the same options to go on there"
                )
