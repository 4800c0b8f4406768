"""What became of one question on its way through a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Trace"]


@dataclass(slots=True)
class Trace:
    """Seconds count from the question; None for what has not happened (yet).

    - `retrieval_s`: the search ended, after so many `stages`.
    - `speculations` were started, `refused` for want of room, `declined` as likely to cost more than they would
      save, and `right` says whether the last one was taken.
    - `exposed_search_s`: the part of the search that overlaps with no generation on its result (T1 of RAGCache Table 3;
      all of it, T2, where no speculation was taken).
    - `speculated_stage`: after which stage, from 1, the one that was taken was started.
    - `wasted_prompt_tokens`: the prompts of the speculations that were not taken, an upper bound of what was computed
      for nothing.
    - `warmed_up`: a warm-up of the system prompt was on its way during retrieval.
    - `first_token_s` is the time to the first token, `total_s` that to the last.
    """

    warmed_up: bool = False
    stages: int = 0
    speculations: int = 0
    refused: int = 0
    declined: int = 0
    right: bool = False
    speculated_stage: int | None = None
    wasted_prompt_tokens: int = 0
    retrieval_s: float | None = None
    exposed_search_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
