"""Costs of RAGDoll's two platforms with its two models (section 6.1), fitted to the paper's figures.

Fitted are, with the figure that each was read from:

- a pass over the database, and a batch's generation at the mean size of the paper's batches: Table 1, by engine
- growth of that time with the batch, 8B: twice as long at 64 requests as at 8 (Figure 4 says "doubles"). 70B: a
  prompt's FLOPs at half of the data sheet's, as the paper calls it bound by I/O
- the largest batches: 4 times the rate where nothing else is said; 64 and 32 where batches are fixed (Table 2), 48
  beside retrieval (Figure 9), 56 by vLLM's share of 24 GB; 36, 32, 22, 15 and 4 on PF-Low so that waiting is Table 1's
- memory that partitions may take, and how much one takes: three of them at 32 requests, two at 48 (Figure 9)
- what generation costs retrieval beside it: 388 s instead of 279 s (Table 1, 70B on PF-High)

Everything else is predicted: waiting, but for the sizes on PF-Low, RAGDoll's retrieval but for one, all totals and
ratios, ablations, traces and idle times.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteCell, one_of

PARTITIONS = 32
TOP_K = 5
"""Documents a request for which the costs hold."""

PARTITION_GB = 19.2
"""Host memory of a resident partition of 8 GB."""

# Seconds of retrieval beside generation, of those without it, if all weights are streamed.
_DISTURBED = 1.456
_LAYERS = {"8b": 32, "70b": 80}
FAR_AHEAD = 8
"""Layers that are as good as any number ahead."""

_STEPS = 32


def step_seconds(transfers_s: Sequence[float], computes_s: Sequence[float], depth: int) -> float:
    """Until the last layer is computed, if `depth` layers may be read ahead of the one that computes: 0 reads each when
    it is needed (accelerate), 1 the next one (FlexGen), more is a queue (RAGDoll).

    Steps that follow one another are one sequence: the first layer of the next is read during the last ones.
    """
    read_s = 0.0
    computed_s: list[float] = []
    for layer, (transfer_s, compute_s) in enumerate(zip(transfers_s, computes_s, strict=True)):
        freed_s = computed_s[layer - 1 - depth] if layer > depth else 0.0
        read_s = max(read_s, freed_s) + transfer_s
        computed_s.append(max(read_s, computed_s[-1] if computed_s else 0.0) + compute_s)
    return computed_s[-1] if computed_s else 0.0


@cache
def stalls(layers: int, compute: float, depth: int, jitter: float) -> float:
    """Return the time at this `depth` over that far ahead; the share `jitter` of each time is exponential."""
    draw = random.Random("layers")
    transfers = [_varied(1.0, jitter, draw) for _ in range(layers * _STEPS)]
    computes = [_varied(compute, jitter, draw) for _ in range(layers * _STEPS)]
    return step_seconds(transfers, computes, depth) / step_seconds(transfers, computes, FAR_AHEAD)


def _varied(mean: float, jitter: float, draw: random.Random) -> float:
    return mean * (1 - jitter + jitter * draw.expovariate(1.0))


@dataclass(frozen=True, slots=True)
class Generator:
    """An engine whose batch of B takes base_s + request_s x B, with at most `most` requests."""

    base_s: float
    request_s: float
    most: int

    @classmethod
    def doubling(cls, seconds: float, at: float, most: int) -> Generator:
        """Of a batch of `at`; twice as long at 64 as at 8."""
        request_s = seconds / (48 + at)
        return cls(48 * request_s, request_s, most)

    @classmethod
    def streaming(cls, seconds: float, at: float, request_s: float, most: int) -> Generator:
        return cls(seconds - request_s * at, request_s, most)

    def seconds(self, batch: int, *, top_k: int = TOP_K) -> float:
        """Prompts grow with the documents in them."""
        return self.base_s + self.request_s * batch * top_k / TOP_K


@dataclass(frozen=True, slots=True)
class Paper:
    """Mean seconds in Table 1."""

    waiting: float
    retrieval: float
    generation: float

    @property
    def latency(self) -> float:
        return self.waiting + self.retrieval + self.generation


@dataclass(frozen=True, slots=True)
class Setting:
    """A platform with a model. `pass_s`: over all partitions, none resident. `room_gb`: host memory for
    partitions and for KV that `device_kv_gb` does not hold; a request has `kv_gb`. `streamed`: share of the weights
    that a step streams. `serial_most`: the largest batch if no retrieval runs beside it; `fixed`: the size in Table
    2, or by analogy. `kv_bound`: whether KV limits batches."""

    words: str
    model: str
    pass_s: float
    room_gb: float
    kv_gb: float
    device_kv_gb: float
    streamed: float
    serial_most: int
    fixed: int
    kv_bound: bool
    generators: Mapping[str, Generator]
    paper: Mapping[str, Paper]
    jitter: float = 1.0

    def generator(self, engine: str, *, top_k: int = TOP_K) -> Generator:
        """Raises KeyError for an engine without figures."""
        known = self.generators[engine]
        if top_k == TOP_K or not self.kv_bound:
            return known
        return Generator(known.base_s, known.request_s, max(1, known.most * TOP_K // top_k))

    def prefetch_factor(self, batch: int, depth: int) -> float:
        """Times as long as with layers read far ahead, if only `depth` are."""
        engine = self.generators["prefetch"]
        compute = engine.request_s * batch / engine.base_s
        return stalls(_LAYERS[self.model], compute, depth, self.jitter)

    @property
    def load_s(self) -> float:
        return self.pass_s / PARTITIONS

    def host_kv_gb(self, batch: int, *, top_k: int = TOP_K) -> float:
        return max(0.0, batch * self.kv_gb * top_k / TOP_K - self.device_kv_gb)

    def device_kv_share(self, batch: int, *, top_k: int = TOP_K) -> float:
        return min(1.0, self.device_kv_gb / (batch * self.kv_gb * top_k / TOP_K))

    def resident(self, batch: int, *, top_k: int = TOP_K) -> int:
        """Partitions for which there is memory beside a batch's KV (Eq. 3)."""
        room_gb = self.room_gb - self.host_kv_gb(batch, top_k=top_k)
        return max(0, min(PARTITIONS, int(room_gb / PARTITION_GB)))

    @property
    def disturbed(self) -> float:
        return 1 + (_DISTURBED - 1) * self.streamed


# A request's prompt of 512 tokens and its answer of 32, 128 KiB a token of 8B and 320 KiB of 70B, in GB.
_KV_8B, _KV_70B = 0.071, 0.178

# Seconds of 512 tokens of 70B, 72 TFLOP, at half of 165 and of 111 TFLOP/s.
_REQUEST_70B_HIGH, _REQUEST_70B_LOW = 0.87, 1.3
_ROOM_HIGH, _ROOM_LOW = 62.1, 26.0

SETTINGS = {
    "low-8b": Setting(
        "PF-Low, 8B",
        "8b",
        pass_s=293,
        room_gb=_ROOM_LOW,
        kv_gb=_KV_8B,
        device_kv_gb=2.0,
        streamed=0.5,
        serial_most=64,
        fixed=64,
        kv_bound=False,
        generators={
            "prefetch": Generator.doubling(66, 50, 64),
            "vllm": Generator.doubling(57, 33, 36),
            "accelerate": Generator.doubling(176, 31, 32),
        },
        paper={
            "ragdoll": Paper(170, 320, 66),
            "vllmrag": Paper(1640, 293, 57),
            "accrag": Paper(3421, 288, 176),
        },
    ),
    "low-70b": Setting(
        "PF-Low, 70B",
        "70b",
        pass_s=376,
        room_gb=_ROOM_LOW,
        kv_gb=_KV_70B,
        device_kv_gb=1.2,
        streamed=0.95,
        serial_most=22,
        fixed=16,
        kv_bound=True,
        generators={
            "prefetch": Generator.streaming(466, 22, _REQUEST_70B_LOW, 22),
            "vllm": Generator.streaming(222, 15, _REQUEST_70B_LOW, 15),
            "accelerate": Generator.streaming(489, 4, _REQUEST_70B_LOW, 4),
        },
        paper={
            "ragdoll": Paper(5895, 494, 466),
            "vllmrag": Paper(12761, 376, 222),
            "accrag": Paper(79715, 357, 489),
        },
    ),
    "high-8b": Setting(
        "PF-High, 8B",
        "8b",
        pass_s=307,
        room_gb=_ROOM_HIGH,
        kv_gb=_KV_8B,
        device_kv_gb=5.0,
        streamed=0.0,
        serial_most=64,
        fixed=64,
        kv_bound=False,
        generators={
            "prefetch": Generator.doubling(36, 50, 64),
            "vllm": Generator.doubling(16, 47, 56),
            "accelerate": Generator.doubling(151, 49, 64),
        },
        paper={
            "ragdoll": Paper(162, 282, 36),
            "vllmrag": Paper(677, 307, 16),
            "accrag": Paper(1494, 307, 151),
        },
    ),
    "high-70b": Setting(
        "PF-High, 70B",
        "70b",
        pass_s=303,
        room_gb=_ROOM_HIGH,
        kv_gb=_KV_70B,
        device_kv_gb=1.2,
        streamed=0.9,
        serial_most=64,
        fixed=32,
        kv_bound=True,
        generators={
            "prefetch": Generator.streaming(262, 44, _REQUEST_70B_HIGH, 48),
            "vllm": Generator.streaming(219, 52, _REQUEST_70B_HIGH, 64),
            "accelerate": Generator.streaming(1152, 58, _REQUEST_70B_HIGH, 64),
        },
        paper={
            "ragdoll": Paper(606, 388, 242),
            "vllmrag": Paper(1808, 303, 219),
            "accrag": Paper(7936, 302, 1152),
        },
    ),
}


def checked_steps(text: str) -> str:
    if not text.startswith("steps:"):
        raise ValueError(f"arrivals come in steps, such as steps:4@20m,8@20m, got {text!r}")
    Arrivals.parse(text)
    return text


class BatchingCell(SuiteCell):
    """Requests that arrive in `steps` on a platform with a model (`setting`), with `top_k` documents each of a
    `corpus`, which systems that keep KV need. For dissections: partitions that are `resident`, the share of
    `weights` on the device, and a fixed `batch`; None: as the system decides."""

    setting: Annotated[str, one_of("setting", SETTINGS)] = "high-70b"
    steps: Annotated[str, AfterValidator(checked_steps)] = "steps:4@20m,8@20m,12@20m,16@20m"
    top_k: int = Field(5, ge=1, le=20)
    corpus: str = "covidqa"
    resident: int | None = Field(None, ge=0, le=PARTITIONS)
    weights: float | None = Field(None, ge=0, lt=1)
    batch: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _streams(self) -> BatchingCell:
        if self.weights is not None and not SETTINGS[self.setting].streamed:
            raise ValueError(f"weights: {self.setting} has all of them on the device: choose another setting")
        return self

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals.parse(self.steps)

    @property
    def requests(self) -> int:
        return self.arrivals.count or 0


@dataclass(frozen=True, slots=True)
class System:
    """`serial`: a batch is searched for, then generated. `sizes` of its batches; `placed`: partitions are resident
    where memory is left; `depth`: layers read ahead, None: all with room. `joined`: requests join
    generation at each step; `kept`: KV of prefixes is shared and kept, with documents by "rank", or "ordered";
    `passes`: requests join retrieval at each partition. `server`: the product's own, with the batches that are joined
    or not, and ordered KV if kept."""

    words: str
    engine: Literal["accelerate", "vllm", "prefetch"] = "prefetch"
    serial: bool = False
    sizes: Literal["backlog", "rate", "fixed"] = "backlog"
    placed: bool = True
    depth: int | None = None
    joined: bool = False
    kept: Literal["", "rank", "ordered"] = ""
    passes: bool = False
    server: bool = False
