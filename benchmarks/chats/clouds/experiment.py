"""Costs at clouds that cache prompts, by order and marks (simulated)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from statistics import fmean
from typing import Any, ClassVar

from ragorder.benchmarks.chats.clouds.policies import (
    CHATS,
    POLICIES,
    CloudChat,
    CloudsCell,
    make_builder,
    make_document,
    make_orderer,
    make_question,
    make_text,
)
from ragorder.benchmarks.chats.talks import NEAREST, TOPICS, draw_topics, find_again
from ragorder.benchmarks.common.clouds import SimulatedCloud
from ragorder.benchmarks.common.served import cached_share
from ragorder.clouds import CacheRules, cache_rules
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column
from ragorder.eval.report.tables import Entry, Tone
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

_ANSWER_TOKENS = 200
Rankings = Sequence[Sequence[Sequence[int]]]
WINDOW = 1000
"""Requests over which the worst cost is taken."""


class CloudsRecord(Record):
    """What a run at a cloud cost."""

    @property
    def cost(self) -> float:
        """In multiples of what the prompts cost without a cache."""
        return self.cost_of(self)

    def cost_of(self, other: CloudsRecord) -> float:
        """In multiples of what another run's prompts cost without a cache."""
        return float(sum(self._costs()) / max(1, sum(other.rows["prompt_tokens"])))

    @property
    def worst(self) -> float:
        """The same over the worst `WINDOW` consecutive requests, or over all if they are fewer."""
        costs, plain = self._costs(), self.rows["prompt_tokens"]
        size = min(WINDOW, len(plain))
        cost, tokens = sum(costs[:size]), sum(plain[:size])
        worst = float(cost / max(1, tokens))
        for last in range(size, len(plain)):
            cost += costs[last] - costs[last - size]
            tokens += plain[last] - plain[last - size]
            worst = max(worst, cost / max(1, tokens))
        return worst

    @property
    def exact(self) -> float | None:
        """Return the share of exact predictions (in conversations, to a token a turn), or None without predictions."""
        pairs = zip(self.rows["cached_tokens"], self.rows["predicted_tokens"], strict=True)
        most = CloudsCell.model_validate(self.cell).turns if self.cell.get("workload") == "conversations" else 0
        right = [abs(cached - predicted) <= most for cached, predicted in pairs if predicted >= 0]
        return sum(right) / len(right) if right else None

    def _costs(self) -> list[float]:
        write, read = self.facts["write"], self.facts["read"]
        columns = (self.rows[name] for name in ("prompt_tokens", "cached_tokens", "written_tokens"))
        return [
            prompt + (read - 1) * cached + (write - 1) * written
            for prompt, cached, written in zip(*columns, strict=True)
        ]


class _Cloud:
    """A simulated cloud in virtual time, and rows of a record."""

    def __init__(self, cell: CloudsCell, rules: CacheRules, seed: int, advance: Callable[[], None]) -> None:
        self.now_s = 0.0
        self.rng = random.Random(f"arrivals {seed}")
        self.rows: dict[str, list[int]] = {name: [] for name in Clouds.columns}
        self._cell = cell
        self._advance = advance
        self._cloud = SimulatedCloud(rules)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (at_s, next(self._numbers), happen))

    def run(self, until_s: float = inf) -> None:
        """Let all happen that is due by then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, happen = heappop(self._events)
            happen()

    def ask(
        self,
        body: Mapping[str, Any],
        predicted_tokens: int,
        readable: Callable[[], None],
        answered: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Send a request now: it is `readable` at its first token, and `answered` at its last one."""
        answer = self._cloud.begin(body, self.now_s)

        def first_token() -> None:
            self._cloud.first_token(answer)
            readable()

        cell = self._cell
        self.at(self.now_s + cell.first_token_s, first_token)
        last_s = self.now_s + max(cell.first_token_s, cell.answer_s)
        self.at(last_s, lambda: answered(self._cloud.usage(answer)))
        figures = answer.prompt_tokens, answer.cached_tokens, answer.written_tokens, predicted_tokens
        for name, tokens in zip(self.rows, figures, strict=True):
            self.rows[name].append(tokens)
        self._advance()


def serve(
    rankings: Sequence[Sequence[int]],
    cell: CloudsCell,
    rules: CacheRules,
    policy: str,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Return rows of a record. Requests overlap: what one writes can be read from its first token on."""
    cloud, builder = _Cloud(cell, rules, seed, advance), make_builder(cell)
    documents = {number: make_document(number, cell.document_tokens) for ranking in rankings for number in ranking}
    asked = POLICIES[policy](rules, builder, lambda: cloud.now_s, cell.question_tokens)
    at_s = 0.0
    for number, ranking in enumerate(rankings):
        at_s += cloud.rng.expovariate(1 / cell.gap_s)
        cloud.run(at_s)
        cloud.now_s = at_s
        ordering = asked.ordering([documents[each] for each in ranking])
        predicted = asked.predicted(ordering)
        body = asked.body(make_question(number, cell.question_tokens), ordering)
        cloud.ask(body, predicted, ordering.readable, partial(asked.confirm, ordering))
    return cloud.rows


def talks(conversations: int, turns: int, seed: int) -> Rankings:
    """Return the numbers of the documents of each turn of conversations: five of its topic's eight."""
    rng = random.Random(f"talks {seed}")
    topics = [range(topic * NEAREST, (topic + 1) * NEAREST) for topic in range(TOPICS)]
    return [
        [find_again(rng, topics[topic]) for _ in range(turns)]
        for topic in draw_topics(rng, range(TOPICS), conversations)
    ]


def serve_conversations(
    rankings: Rankings,
    cell: CloudsCell,
    rules: CacheRules,
    policy: str,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Return rows of a record, in the order in which turns are asked."""
    cloud, builder, questions = _Cloud(cell, rules, seed, advance), make_builder(cell), count()
    orderer = make_orderer(rules, builder, lambda: cloud.now_s, cell.question_tokens)
    numbers = {number for turns in rankings for turn in turns for number in turn}
    documents = {number: make_document(number, cell.document_tokens) for number in numbers}

    def ask(chat: CloudChat, turns: Sequence[Sequence[int]]) -> None:
        number = next(questions)
        body = chat.ask(make_question(number, cell.question_tokens), [documents[each] for each in turns[0]])

        def answered(usage: Mapping[str, Any]) -> None:
            chat.answered(make_text(number, _ANSWER_TOKENS), usage)
            if turns[1:]:
                pause_s = cloud.rng.expovariate(1 / cell.pause_s)
                cloud.at(cloud.now_s + pause_s, partial(ask, chat, turns[1:]))

        cloud.ask(body, chat.predicted_tokens, chat.readable, answered)

    at_s = 0.0
    for turns in rankings:
        at_s += cloud.rng.expovariate(1 / (cell.gap_s * len(turns)))
        cloud.at(at_s, partial(ask, CHATS[policy](rules, builder, orderer), turns))
    cloud.run()
    return cloud.rows


_OURS = "ragorder"
_APPENDS = "automatic"
_MOST = 103.0

_CHAT_WORDS: Mapping[str, str] = {
    "automatic": "appended as retrieved, the provider's automatic mark",
    "system prompt": "appended, a mark after the system prompt (ContextPilot's adapters)",
    "sorted by id, four": "appended sorted by id, four marks",
    _OURS: "ragorder's turns for the cloud",
}

_WORDS: Mapping[str, str] = {
    "automatic": "as retrieved, the provider's automatic mark",
    "system prompt": "any order, a mark after the system prompt (ContextPilot's adapters)",
    "end": "as retrieved, marks after system prompt and documents",
    "sorted by id, four": "sorted by id, four marks",
    "engine order, end": "ordered as for an engine, marks after system prompt and documents",
    "engine order, four": "ordered as for an engine, four marks",
    _OURS: "ragorder for the cloud",
}


def _title(block: Block) -> str:
    cell: CloudsCell = block.cell
    ttl = f" ({cell.ttl})" if cell.ttl is not None else ""
    shown = f"{cell.workload}: {cell.model}{ttl}, a request every {cell.gap_s:g} s"
    return f"{shown}, {cell.turns} turns {cell.pause_s:g} s apart" if cell.converses else shown


def _bill(row: Row) -> str:
    """Named documents make prompts shorter."""
    costs = [run.cost_of(appended) for appended, run in row.group.pairs(_APPENDS, row.policy)]
    return format_number(100 * fmean(costs) if costs else None)


def _worst(row: Row) -> Entry:
    worst = max(100 * run.worst for run in row.runs)
    tone: Tone = ("good" if worst <= _MOST else "bad") if row.policy == _OURS else ""
    return Entry(format_number(worst), tone=tone)


def _columns(block: Block) -> list[Column]:
    converses = block.cell.converses
    return [
        policy_column("order and marks", _CHAT_WORDS if converses else _WORDS),
        figure("cost, %", lambda run: run.cost, scale=100, spread=True),
        *([Column("of what appending costs without a cache, %", _bill)] if converses else []),
        Column(f"worst {WINDOW:,} requests, %", _worst),
        figure("read, %", cached_share, scale=100),
        figure(
            "written, %",
            partial(cached_share, tokens="written_tokens"),
            scale=100,
        ),
        figure("predicted, %", lambda run: run.exact, scale=100),
    ]


def _note(block: Block) -> str:
    requests = max(len(run.rows["prompt_tokens"]) for run in block.runs)
    return (
        f"Of what the prompts cost without a cache. Mean of {block.seeds} seeds (in brackets their range), "
        f"{requests:,} requests each. Predicted: requests whose cached tokens were predicted exactly"
        f"{' (to a token a turn)' if block.cell.converses else ''}."
    )


class Clouds(Experiment):
    """Columns: tokens of each request; -1 predicted: nothing was. Facts: prices, as multiples of the plain input
    price."""

    kind = "clouds"
    base = CloudsRecord
    cell = CloudsCell
    columns = ("prompt_tokens", "cached_tokens", "written_tokens", "predicted_tokens")
    facts = ("write", "read")
    policies: ClassVar[Any] = tuple(POLICIES)
    simulated = True
    tables: ClassVar[Any] = [TableForm(_title, _columns, _note)]

    @classmethod
    def cells(cls, suite: Suite, where: str) -> Iterator[Any]:
        for cell in super().cells(suite, where):
            try:
                _rules(cell)
            except ValueError as error:
                raise SuiteError(f"{where}: {error}") from None
            yield cell

    def obstacle(self, suite: Suite, cell: CloudsCell, policy: str) -> str | None:
        if cell.converses and policy not in CHATS:
            return f"conversations are sent by {', '.join(CHATS)}"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: CloudsCell = job.cell
        rules = _rules(cell)
        if cell.converses:
            conversations = talks(max(1, job.requests // cell.turns), cell.turns, job.seed)
        else:
            rankings = make_workload(cell.workload, job.seed, requests=job.requests).rankings[: job.requests]
        for policy in job.policies:
            if cell.converses:
                rows = serve_conversations(conversations, cell, rules, policy, job.seed, advance)
            else:
                rows = serve(rankings, cell, rules, policy, job.seed, advance)
            yield {
                "policy": policy,
                "engine": {"name": "simulated cloud", "model": cell.model},
                "rows": rows,
                "facts": {"write": rules.write, "read": rules.read, "minimum": rules.minimum_tokens},
            }


def _rules(cell: CloudsCell) -> CacheRules:
    return cache_rules(cell.provider, cell.model, cell.ttl)
