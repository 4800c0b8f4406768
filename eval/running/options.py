"""Options of `ragorder eval run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from ragorder.errors import RagorderError
from ragorder.eval.engines.sim import Like
from ragorder.eval.running.specs import ServedBy

# Whatever else may differ between the invocations that write to one folder.
_MEASURED_WITH = ("engine", "like", "reduced", "model", "limit", "base_url", "served_model")


# The simulated engine reuses blocks as the real one does: on the same tokens it finds the same ones cached.
SIM_LIKE: Like = "vllm-0.32"


class HarnessError(RagorderError, ValueError):
    """Suites cannot be run as asked. The message says what to change."""


class Options(ServedBy):
    """What suites are run with: `Options(engine="vllm", seeds=(0,), policies=("retrieval", "free"), limit=60)`."""

    base_url: str | None = Field(
        default=None,
        description="openai: the server.",
        json_schema_extra={"unset": "a vLLM server is started for each size of cache"},
    )
    seeds: Sequence[int] = Field(default=(0, 1, 2), description="Seeds of workloads and random orders, with commas.")
    policies: Sequence[str] | None = Field(default=None, description="Only these of each suite's policies. Repeatable.")
    limit: int | None = Field(
        default=None, ge=1, description="At most N requests a run.", json_schema_extra={"unset": "as the suite says"}
    )
    reduced: bool = Field(
        default=False,
        description="The suites' short forms, for slow engines: fewer cells, policies and requests, a smaller cache. A "
        "suite without a short form is left out with a note.",
    )
    parameters: Sequence[str] = Field(
        default=(),
        description="Replace a parameter of each suite's cells; several values are swept. Repeatable.",
    )
    corpora: Path | None = Field(
        default=None,
        description="Folder with a folder for each real corpus, yours as well: see `ragorder bench --help` for the "
        "files. Suite corpora takes all of them.",
    )
    questions: Path | None = Field(
        default=None,
        description="Folder with a folder for each data set of a suite about quality, such as hotpotqa/.",
        json_schema_extra={"unset": "loaded from the Hugging Face Hub"},
    )
    dry_run: bool = Field(
        default=False, description="List the runs without serving anything; quality runs all but the model."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("--seeds: give each seed once, one at least")
        if self.engine != "openai" and (self.base_url or self.served_model):
            raise ValueError("--base-url and --served-model require --engine openai")
        if self.events is not None and self.base_url is None:
            raise ValueError("--events-endpoint requires --base-url")
        if self.engine == "sim" and self.model is not None:
            raise ValueError("--model requires --engine vllm, torch or openai: the simulated engine has none")
        return self

    def arguments(self, suites: Sequence[str]) -> dict[str, Any]:
        """As recorded in a session: without keys and passwords."""
        return {
            "suites": list(suites),
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
        for name in _MEASURED_WITH if depends else ():
            if earlier.get(name) != ours[name]:
                option = "a simulated engine like" if name == "like" else "--" + name.replace("_", "-")
                raise HarnessError(
                    f"{folder} has results of {option} {earlier.get(name)}, and these are of {option} {ours[name]}: "
                    "choose another folder, or run with the same options to go on there"
                )
