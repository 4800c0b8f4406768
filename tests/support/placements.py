"""Models, indexes and budgets for placements, drawn at random; all placements of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from random import Random

from ragorder.pipelining.placement.base import IndexSizes, ModelSizes, Placement, Spread, Workload
from ragorder.pipelining.placement.budgets import Budgets

STEP = 64


@dataclass(frozen=True)
class TableCosts:
    """Times from tables: generation by layers on the device and in host memory, retrieval by partitions."""

    model: ModelSizes
    index: IndexSizes
    workload: Workload
    device_s: Sequence[float]
    host_gain: float
    exponent: float
    partitions_s: Sequence[float]
    batches: Sequence[int] = (1, 2, 4, 8)
    step_tokens: int = STEP
    kv_s: float = 1.0
    estimated: bool = field(default=False)

    def generation_s(self, batch: int, weights: Spread, step_tokens: int, kv_host_layers: int = 0) -> float:
        streamed = weights.host + weights.disk
        saved = self.host_gain * weights.host / streamed if streamed else 0.0
        whole = self.device_s[-1]
        seconds = self.device_s[weights.device]
        copied = self.kv_s * kv_host_layers / len(self.model.layers)
        return float((seconds - saved * (seconds - whole) + copied) * batch**self.exponent)

    def retrieval_s(self, partitions: int) -> float:
        return self.partitions_s[partitions]


def drawn_costs(random: Random, *, layers: int, partitions: int) -> TableCosts:
    """Times fall by steps of any size, so that they are not convex."""
    slot = random.randint(500, 2000)
    model = ModelSizes(
        layers=tuple(random.randint(slot // 2, slot) for _ in range(layers)),
        outside=random.randint(0, 3000),
        kv_token=random.randint(1, 8),
        step_bytes=((STEP, random.randint(10, 2000)), (8 * STEP, 4000)),
        staging=random.choice([0, 0, 700]),
    )
    index = IndexSizes(
        fixed=random.randint(0, 900), partitions=tuple(random.randint(100, 1500) for _ in range(partitions))
    )
    workload = Workload(prompt_tokens=random.randint(8, 200), answer_tokens=random.randint(1, 32))
    return TableCosts(
        model,
        index,
        workload,
        falling(random, layers + 1, random.choice([0.1, 1, 10])),
        random.random(),
        random.uniform(0, 1.2),
        falling(random, partitions + 1, random.choice([0.1, 1, 10])),
        kv_s=random.choice([0.01, 0.1, 1]),
    )


def falling(random: Random, count: int, scale: float) -> list[float]:
    drops = [random.choice([0.0, random.random(), random.random() ** 4]) for _ in range(count)]
    return [scale * (0.05 + total) for total in accumulate(drops)][::-1]


def drawn_budgets(random: Random, costs: TableCosts) -> Budgets:
    most = costs.model.weights + 4 * costs.model.slot
    host = costs.model.weights + costs.index.total
    return Budgets(
        random.randint(0, 2 * most), random.randint(0, 2 * host), random.randint(0, 5000), unified=random.random() < 0.4
    )


def all_placements(budgets: Budgets, costs: TableCosts) -> Iterator[Placement]:
    """Every number of layers, partitions and layers' KV in each place, with each batch, whether it fits or not.
    The KV is the batch's."""
    count = len(costs.model.layers)
    for batch in costs.batches:
        kv = costs.model.kv(costs.workload.kv_tokens(batch), batch)
        for device in range(count + 1):
            for host in range(count - device + 1):
                streamed = count - device
                for partitions, in_host in product(range(len(costs.index.partitions) + 1), range(count + 1)):
                    yield Placement(
                        weights=Spread(device, host, streamed - host),
                        kv=Spread(device=kv),
                        partitions=partitions,
                        batch=batch,
                        step_tokens=costs.step_tokens,
                        slots=1 if streamed else 0,
                        kv_host_layers=in_host,
                    )
