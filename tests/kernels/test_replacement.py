"""Replacement: what a tier gives up first, against a plain model of Algorithm 1, and what that takes."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples

from ragorder.trie.policies import POLICIES, AwaitedNodes, History, ReplacementPolicy, Tier, TierNode, make_policy

KEYS = range(12)


def parent_of(key: int) -> int | None:
    """The tree of the random traces: two children each."""
    return (key - 1) // 2 if key else None


def path_to(key: int) -> list[int]:
    """From the root down."""
    path = [key]
    while (above := parent_of(path[-1])) is not None:
        path.append(above)
    return path[::-1]


@dataclass
class Known:
    """A node of the model."""

    frequency: int = 0
    costs: list[float] = field(default_factory=list)
    estimate: float = 0.0
    expected: float = 0.0
    used: int = 0
    size: int = 0
    parent: int | None = None
    priority: float = 0.0
    pins: int = 0

    @property
    def cost(self) -> float:
        """Formula 4. One after the other, as a sum of floats divided by their number may be another float."""
        mean = 0.0
        for number, cost in enumerate(self.costs, 1):
            mean += (cost - mean) / number
        return mean if self.costs else self.estimate


class Model:
    """Algorithm 1 as it is printed: all leaves are looked at to find the least."""

    def __init__(self, policy: str, max_history: int | None) -> None:
        self.policy = policy
        self.max_history = max_history
        self.held: dict[int, Known] = {}
        self.past: dict[int, Known] = {}
        self.clock = self.turnovers = 0.0
        self.time = 0

    def priority(self, node: Known) -> float:
        return {
            "pgdsf": self.clock + node.frequency * node.cost,
            "gdsf": self.clock + node.frequency,
            "lru": node.used,
            "lfu": node.frequency,
            "forecast": math.log((node.expected or max(node.frequency, 1)) * max(node.cost, 1e-12))
            + 0.5 * self.turnovers,
        }[self.policy]

    def use(
        self, path: Sequence[int], cost: float | None, computed: Container[int], expected: Mapping[int, float]
    ) -> None:
        for key in path:
            self.time += 1
            if key in self.held:
                node = self.held[key]
            elif self.max_history is not None:
                node = self.past.setdefault(key, Known())
            else:
                continue
            node.frequency += 1
            node.used = self.time
            node.expected = expected.get(key, node.expected)
            if cost is not None and key in computed:
                node.costs.append(cost)
            elif cost is not None and not node.costs:
                node.estimate = cost
            if key in self.held:
                node.priority = self.priority(node)
            self.forget()

    def insert(self, key: int, size: int) -> None:
        self.time += 1
        node = self.held[key] = self.past.pop(key, Known())
        node.size, node.parent, node.used, node.pins = size, parent_of(key), self.time, 0
        node.priority = self.priority(node)

    def remove(self, key: int) -> None:
        node = self.held.pop(key)
        if self.max_history is not None:
            self.past[key] = node
            self.forget()

    def forget(self) -> None:
        while self.max_history is not None and len(self.past) > self.max_history:
            del self.past[min(self.past, key=lambda key: self.past[key].used)]

    def leaves(self, without: Container[int], protected: Container[int] = ()) -> list[int]:
        parents = {node.parent for key, node in self.held.items() if key not in without}
        return [
            key
            for key, node in self.held.items()
            if key not in without and key not in parents and key not in protected and not node.pins
        ]

    def order(self, protected: Container[int] = ()) -> Iterator[int]:
        gone: set[int] = set()
        while leaves := self.leaves(gone, protected):
            least = min(leaves, key=lambda key: (self.held[key].priority, self.held[key].used))
            gone.add(least)
            yield least

    def evict(self, size: int, protected: Container[int]) -> list[int] | None:
        order = self.order(protected)
        gone: list[int] = []
        while sum(self.held[key].size for key in gone) < size:
            victim = next(order, None)
            if victim is None:
                return None
            gone.append(victim)
        for key in gone:
            self.clock = max(self.clock, self.held[key].priority)
            self.turnovers += self.held[key].size / max(sum(node.size for node in self.held.values()), 1)
            self.remove(key)
        return gone

    def clear(self) -> None:
        self.held.clear()
        self.past.clear()


ANY_KEY = st.sampled_from(KEYS)
FORECASTS = st.dictionaries(ANY_KEY, st.sampled_from([0.0, 0.5, 1.0, 3.0, 900.0]), max_size=6)
STEPS = st.one_of(
    st.tuples(
        st.just("use"),
        ANY_KEY,
        st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.0])),
        st.frozensets(ANY_KEY),
        FORECASTS,
    ),
    st.tuples(st.just("insert"), ANY_KEY, st.integers(0, 3)),
    st.tuples(st.just("remove"), ANY_KEY),
    st.tuples(st.just("pin"), ANY_KEY),
    st.tuples(st.just("unpin"), ANY_KEY),
    st.tuples(st.just("evict"), st.integers(-1, 8), st.frozensets(ANY_KEY, max_size=3)),
    st.tuples(st.just("clear")),
)
SERVE = st.tuples(st.just("serve"), ANY_KEY, st.sampled_from([0.1, 0.3, 1.0, 7.0]), st.integers(3, 9), FORECASTS)


def play(tier: Tier, model: Model, step: tuple[Any, ...]) -> None:
    """One step on both; the tier refuses exactly what cannot be."""
    action, *values = step
    if action == "serve":
        key, cost, capacity, expected = values
        path = path_to(key)
        missing = [each for each in path if each not in model.held]
        play(tier, model, ("evict", len(model.held) + len(missing) - capacity, frozenset(path)))
        for each in missing:
            play(tier, model, ("insert", each, 1))
        play(tier, model, ("use", key, cost, frozenset(missing), expected))
    elif action == "use":
        key, cost, computed, expected = values
        tier.use(path_to(key), cost=cost, computed=computed, expected=expected)
        model.use(path_to(key), cost, computed, expected)
    elif action == "insert":
        key, size = values
        if key in model.held:
            with pytest.raises(ValueError, match="already"):
                tier.insert(key, size, parent_of(key))
        else:
            tier.insert(key, size, parent_of(key))
            model.insert(key, size)
    elif action == "evict":
        size, protected = values
        held = set(model.held)
        gone = tier.evict(size, protected)
        assert gone == model.evict(size, protected)
        for place, key in enumerate(gone or ()):
            assert {child for child in held if parent_of(child) == key} <= set(gone[:place]), "leaves go first"
            assert key not in protected
    elif action == "clear":
        tier.clear()
        model.clear()
    elif values[0] not in model.held:
        with pytest.raises(KeyError):
            getattr(tier, action)(values[0])
    elif action == "remove":
        tier.remove(values[0])
        model.remove(values[0])
    elif action == "unpin" and not model.held[values[0]].pins:
        with pytest.raises(ValueError, match="not pinned"):
            tier.unpin(values[0])
    else:
        getattr(tier, action)(values[0])
        model.held[values[0]].pins += 1 if action == "pin" else -1


def compare(tier: Tier, model: Model, history: History | None, policy: ReplacementPolicy) -> None:
    """All that can be seen is the same."""
    assert len(tier) == len(model.held)
    assert tier.used == sum(node.size for node in model.held.values())
    for key in KEYS:
        assert (key in tier) == (key in model.held)
        node = tier.get(key)
        if node is not None:
            known = model.held[key]
            assert (node.frequency, node.cost, node.size) == (known.frequency, known.cost, known.size)
            if model.policy != "lru":
                assert node.priority == known.priority
    assert list(tier.victims()) == list(model.order())
    assert getattr(policy, "clock", model.clock) == model.clock
    if history is not None:
        assert {key for key in KEYS if key in history} == set(model.past)
        assert len(history) == len(model.past) <= history.max_nodes


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicyAgainstAlgorithm1:
    @settings(max_examples=examples(150))
    @given(steps=st.lists(STEPS | SERVE, max_size=50), max_history=st.sampled_from([None, 0, 1, 3, 100]))
    def test_the_same_goes_in_the_same_order(self, name: str, steps: list[Any], max_history: int | None) -> None:
        policy = make_policy(name)
        history = None if max_history is None else History(max_history)
        tier, model = Tier(policy, history), Model(name, max_history)
        for step in steps:
            play(tier, model, step)
            compare(tier, model, history, policy)


@pytest.fixture(params=POLICIES)
def tier(request: pytest.FixtureRequest) -> Tier:
    """An empty tier of each policy, without a history."""
    return Tier(make_policy(request.param))


def fill(tier: Tier, path: Iterable[str], parent: str | None = None) -> None:
    """A request computes these documents and uses them once."""
    path = list(path)
    for key in path:
        tier.insert(key, 1, parent)
        parent = key
    tier.use(path, cost=1.0, computed=path)


def test_a_node_may_come_back_elsewhere(tier: Tier) -> None:
    fill(tier, "abc")
    tier.remove("c")
    tier.insert("c", 1, "a")
    assert sorted(islice(tier.victims(), 2)) == ["b", "c"]


class TestWhatCannotBe:
    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda tier: tier.insert("a", parent="a"), "its own parent"),
            (lambda tier: tier.insert("a", -1), "-1"),
            (lambda tier: tier.use("x", cost=-1.0), "finite"),
            (lambda tier: tier.use("x", cost=math.inf), "finite"),
            (lambda tier: tier.use("x", cost=math.nan), "finite"),
            (lambda _: History(-1), "-1"),
            (lambda _: make_policy("arc"), "forecast, gdsf, lfu, lru, pgdsf"),
        ],
    )
    def test_is_refused_and_changes_nothing(self, tier: Tier, call: Callable[[Tier], Any], said: str) -> None:
        fill(tier, "x")
        with pytest.raises(ValueError, match=said):
            call(tier)
        node = tier.get("x")
        assert len(tier) == 1 and node is not None and node.frequency == 1

    def test_a_history_of_two_tiers_is_refused(self) -> None:
        history = History(3)
        Tier(make_policy("lru"), history)
        with pytest.raises(ValueError, match="one tier"):
            Tier(make_policy("lru"), history)


def test_a_tier_inherits_the_statistics_of_another(tier: Tier) -> None:
    fill(tier, "a")
    tier.use("a", expected={"a": 6.0})
    host = Tier(make_policy("forecast"))
    host.insert("a", known=tier.get("a"))
    node = host.get("a")
    assert node is not None
    assert (node.frequency, node.misses, node.cost, node.expected) == (2, 1, 1.0, 6.0)


def test_whatever_was_forecast_leaves_once_it_is_not_used() -> None:
    """At most log(uses) / 0.5 turnovers later, of a third of the tier each."""
    tier = Tier(make_policy("forecast"))
    tier.insert("a", 100)
    tier.use("a", cost=1.0, expected={"a": 1000.0})
    for number in range(3 * math.ceil(math.log(1000.0) / 0.5) + 3):
        tier.insert(number, 100)
        tier.use([number], cost=1.0)
        if tier.used > 200:
            tier.evict(100)
    assert "a" not in tier


def test_pgdsf_by_hand() -> None:
    """The knowledge tree of Fig. 10: S is the system prompt, sizes are tokens, costs seconds a token."""

    def priorities() -> dict[str, float]:
        nodes = ((key, tier.get(key)) for key in ("S", "D1", "D2", "D3"))
        return {key: node.priority for key, node in nodes if node is not None}

    policy: Any = make_policy("pgdsf")
    tier = Tier(policy)
    # [S, D1, D2], nothing cached.
    for key, size, parent in (("S", 100, None), ("D1", 400, "S"), ("D2", 500, "D1")):
        tier.insert(key, size, parent)
    tier.use(["S", "D1", "D2"], cost=0.5, computed={"S", "D1", "D2"})
    # [S, D3], S cached.
    tier.insert("D3", 300, "S")
    tier.use(["S", "D3"], cost=0.25, computed={"D3"})
    assert priorities() == {"S": 2 * 0.5, "D1": 0.5, "D2": 0.5, "D3": 0.25}
    assert policy.clock == 0
    assert tier.evict(300) == ["D3"]
    assert policy.clock == 0.25
    tier.insert("D3", 300, "S")
    tier.use(["S", "D3"], cost=0.75, computed={"D3"})
    assert priorities() == {"S": 0.25 + 3 * 0.5, "D1": 0.5, "D2": 0.5, "D3": 0.25 + 1 * 0.75}
    assert tier.evict(600) == ["D2", "D1"]
    assert policy.clock == 0.5


@pytest.mark.parametrize(
    ("name", "order"), [("pgdsf", "dcba"), ("gdsf", "adcb"), ("lru", "abdc"), ("lfu", "adcb"), ("forecast", "dcba")]
)
def test_each_policy_has_an_order_of_its_own(name: str, order: str) -> None:
    """a: computed once at a high cost; b: used three times; c: used last. d: as a, but cheap."""
    tier = Tier(make_policy(name))
    for key in "abdc":
        tier.insert(key)
    for key, cost in (("a", 9.0), ("b", 1.0), ("b", 1.0), ("b", 1.0), ("d", 0.5), ("c", 1.0)):
        tier.use(key, cost=cost, computed=key)
    assert "".join(map(str, tier.victims())) == order


class TestAwaitedNodes:
    def test_have_a_bound_and_the_first_requests_have_precedence(self) -> None:
        awaited = AwaitedNodes(10)
        first = awaited.add([("a", 4), ("b", 4), ("c", 4), ("d", 1)])
        assert first == ("a", "b"), "nothing after a node without room"
        assert awaited.add([("e", 3)]) == ()
        assert awaited.add([("a", 4), ("f", 2)]) == ("a", "f")
        awaited.remove(first)
        assert awaited.add([("e", 4)]) == ("e",)

    @given(st.lists(st.tuples(st.booleans(), st.lists(ANY_KEY, max_size=4, unique=True)), max_size=30))
    def test_are_never_more_than_there_is_room_for(self, steps: list[tuple[bool, list[int]]]) -> None:
        awaited, waiting = AwaitedNodes(12), []
        for ends, path in steps:
            if ends and waiting:
                awaited.remove(waiting.pop())
            else:
                waiting.append(awaited.add((key, key) for key in path))
            assert {key for key in KEYS if key in awaited} == {key for added in waiting for key in added}
            assert sum(key for key in KEYS if key in awaited) <= 12
        for added in waiting:
            awaited.remove(added)
        assert not len(awaited)
        assert awaited.add([("all", 12)]) == ("all",), "all room is back"


SCRIPT = """
import random
from ragorder.trie.policies import POLICIES, History, Tier, make_policy
for name in POLICIES:
    rng = random.Random(0)
    tier = Tier(make_policy(name), History(20))
    for _ in range(300):
        path = ["".join(rng.choices("abc", k=depth)) for depth in (1, 2)]
        path = [path[0], path[0] + path[1]]
        missing = [key for key in path if key not in tier]
        gone = tier.evict(tier.used + len(missing) - 7, protected=set(path))
        for key in missing:
            tier.insert(key, 1, path[0] if key != path[0] else None)
        tier.use(path, cost=rng.choice([0.5, 1.0]), computed=set(missing))
        print(name, gone)
    print(list(tier.victims()))
"""


def test_what_goes_does_not_depend_on_how_python_hashes(python: Any) -> None:
    first, second = (python("-c", SCRIPT, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 301 * len(POLICIES)
    assert first.stdout == second.stdout


class Counted(float):
    """A priority that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__


class CountedPGDSF:
    """PGDSF with priorities that count."""

    def __init__(self) -> None:
        self._policy = make_policy("pgdsf")

    def priority(self, node: TierNode) -> float:
        return Counted(self._policy.priority(node))

    def evicted(self, node: TierNode, used: int) -> None:
        self._policy.evicted(node, used)


def counted_tier(nodes: int, seed: int = 0) -> Tier:
    """A tree of so many nodes with priorities at random; the history hands each its own."""
    rng = random.Random(seed)
    tier = Tier(CountedPGDSF(), History(1))
    for key in range(nodes):
        tier.use([key], cost=rng.random(), computed=[key])
        tier.insert(key, 1, (key - 1) // 5 if key else None)
    return tier


def comparisons(step: Any) -> int:
    """Two tuples are compared by asking once whether their first members are equal."""
    Counted.comparisons = 0
    step()
    return Counted.comparisons


class TestWhatItTakes:
    """Counted in comparisons of priorities, the only steps that could be many."""

    @pytest.fixture(scope="class")
    def tiers(self) -> dict[int, Tier]:
        return {nodes: counted_tier(nodes) for nodes in (1_000, 30_000)}

    def test_an_eviction_takes_about_the_same_however_many_nodes_there_are(self, tiers: dict[int, Tier]) -> None:
        means = {}
        for nodes, tier in tiers.items():
            counts = [comparisons(partial(tier.evict, 1)) for _ in range(100)]
            assert 0 < max(counts) <= 6 * math.log2(nodes)
            means[nodes] = sum(counts) / len(counts)
        assert means[30_000] < 2.2 * means[1_000]

    def test_a_request_takes_about_the_same_however_many_nodes_there_are(self, tiers: dict[int, Tier]) -> None:
        def serve(tier: Tier, path: list[str]) -> None:
            tier.evict(5, protected=set(path))
            for above, key in zip([None, *path], path, strict=False):
                tier.insert(key, 1, above)
            tier.use(path, cost=0.5, computed=set(path))

        for nodes, tier in tiers.items():
            for number in range(20):
                path = [f"{number} {place}" for place in range(5)]
                assert comparisons(partial(serve, tier, path)) <= 5 * 10 * math.log2(nodes)

    @pytest.mark.parametrize("history", [None, 3_000])
    def test_a_node_takes_less_than_half_a_kilobyte(self, history: int | None) -> None:
        keys = list(range(3_000))
        tracemalloc.start()
        try:
            tier = Tier(make_policy("pgdsf"), None if history is None else History(history))
            for key in keys:
                tier.insert(key)
            tier.use(keys, cost=0.1, computed=set(keys))
            if history is not None:
                for key in keys:
                    tier.remove(key)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken / len(keys) < 450
        assert not hasattr(TierNode(0), "__dict__")
