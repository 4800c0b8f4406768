"""One policy at one capacity: a log served on a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ragorder import Lengths
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.replay.engine import PathPrompt, make_engine
from ragorder.eval.replay.log import Log, RecordedArrivals
from ragorder.eval.running.load import Advance, Load, ServiceTimes, serve_virtual
from ragorder.eval.running.policies import ORDERERS, make_orderer
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering

RETRIEVAL = "retrieval"
_STEPS = 100
# Without requests that wait, "queue" is "prefix".
REPLAY_POLICIES = (RETRIEVAL, *(name for name in ORDERERS if name != "queue"))


@dataclass(frozen=True, slots=True)
class Setup:
    """The engine: block size, and speed if requests come at recorded times."""

    block_size: int = 16
    service_times: ServiceTimes | None = None


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of one policy at one capacity (None: unlimited). `tenths`: cached ratios of the log's tenths.
    `fallbacks`: requests left in retrieval order by an internal error. Of all requests `reordered` have a document
    moved, `reordered_cold` although nothing is cached, and `best_moved` another document first than the best one;
    `displacement_mean`: places by which a document moves."""

    policy: str
    capacity_tokens: int | None
    prompt_tokens: int
    cached_tokens: int
    cached_ratio: float
    tenths: list[float] = field(default_factory=list)
    in_flight_mean: float = 1.0
    fallbacks: int = 0
    reordered: int = 0
    reordered_cold: int = 0
    best_moved: int = 0
    displacement_mean: float = 0.0


class _Sent(NamedTuple):
    row: int
    documents: list[int]
    ordering: Ordering[int] | None


class _Client:
    def __init__(self, log: Log, orderer: Orderer | None) -> None:
        self.in_flight = 0
        self.in_flight_sum = 0
        self.prompt_tokens = [0] * 10
        self.cached_tokens = [0] * 10
        self.moves: list[float] = [0, 0, 0, 0.0]
        self._log = log
        self._orderer = orderer
        self._sent = 0
        self._answer_tokens = log.output_tokens_mean

    @property
    def remaining(self) -> int:
        return len(self._log) - self._sent

    def send(self) -> _Sent:
        log, row = self._log, self._sent
        self._sent += 1
        self.in_flight += 1
        self.in_flight_sum += self.in_flight
        documents = log.ranking(row)
        if self._orderer is None:
            return _Sent(row, documents, None)
        scope = log.scopes[row]
        ordering = self._orderer.order(
            documents,
            scope=scope,
            lengths=Lengths(prefix=log.prefix_tokens[scope], suffix=log.suffix_tokens[row] + self._answer_tokens),
        )
        return _Sent(row, ordering.documents, ordering)

    def token_ids(self, sent: _Sent) -> PathPrompt:
        return PathPrompt(self._log.scopes[sent.row], sent.documents, self._log.suffix_tokens[sent.row])

    def end(self, sent: _Sent, completion: EngineCompletion) -> None:
        self.in_flight -= 1
        tenth = sent.row * 10 // len(self._log)
        self.prompt_tokens[tenth] += completion.prompt_tokens
        self.cached_tokens[tenth] += completion.cached_tokens
        if sent.ordering is not None:
            self.moves = [total + moved for total, moved in zip(self.moves, sent.ordering.moves, strict=True)]
            sent.ordering.confirm(completion.cached_tokens)


def steps(log: Log) -> int:
    """Calls of `advance` by `replay_run`."""
    return min(_STEPS, len(log))


def replay_run(
    log: Log, policy: str, capacity_tokens: int | None, setup: Setup, advance: Advance = lambda: None
) -> PolicyFigures:
    """Serve the log. `advance` is called after each hundredth of it."""
    engine = make_engine(
        log.document_tokens,
        log.prefix_tokens,
        block_size=setup.block_size,
        capacity_tokens=capacity_tokens,
        output_tokens=log.output_tokens_mean,
    )
    orderer = None
    if policy != RETRIEVAL:
        lengths = log.document_tokens.__getitem__
        orderer = make_orderer(policy, engine=engine, key=int, tokens=lengths, group=_no_group)
    client = _Client(log, orderer)
    in_turn = setup.service_times is None
    load = Load(1 if in_turn else None, RecordedArrivals(log))
    told = 0
    for number, _ in enumerate(serve_virtual(client, engine, load, setup.service_times or ServiceTimes()), 1):
        while told < number * steps(log) // len(log):
            told += 1
            advance()
    prompt_tokens, cached_tokens = sum(client.prompt_tokens), sum(client.cached_tokens)
    return PolicyFigures(
        policy,
        capacity_tokens,
        prompt_tokens,
        cached_tokens,
        round(cached_tokens / prompt_tokens, 6),
        [round(c / p, 6) for c, p in zip(client.cached_tokens, client.prompt_tokens, strict=True) if p],
        round(client.in_flight_sum / len(log), 2),
        orderer.fallbacks if orderer is not None else 0,
        reordered=int(client.moves[0]),
        reordered_cold=int(client.moves[1]),
        best_moved=int(client.moves[2]),
        displacement_mean=round(client.moves[3] / len(log), 4),
    )


def _no_group(document: int) -> None:
    return None
