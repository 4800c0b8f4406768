"""Attention kernels against one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar

from ragorder.benchmarks.kernels.attention.cells import TOLERANCE, AttentionCell, AttentionRecord
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.lines import draw_lines
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

_NO_GPU = "times need a GPU, and there is none here: attention-check checks results without one"


class Attention(Experiment):
    kind = "attention"
    base = AttentionRecord
    cell = AttentionCell
    facts = ("error", "flops", "bytes")
    policies: ClassVar[Any] = (
        "triton",
        "triton unsplit",
        "torch",
        "sdpa + mask",
        "flash",
        "flash + gather",
        "cudnn",
        "flex",
        "flex + mask",
    )
    unit = "shapes"
    one_job = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._checked = self._wrong = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if error is None and self._wrong:
            raise EngineError(f"{self._wrong} of {self._checked} results are wrong: see the report")

    def obstacle(self, suite: Suite, cell: AttentionCell, policy: str) -> str | None:
        lacking = lacks_torch()
        if lacking is not None:
            return lacking
        import torch

        return _NO_GPU if cell.timed and not torch.cuda.is_available() else None

    def missing(self, suite: Suite, cell: AttentionCell, policy: str, reason: str) -> Missing | None:
        return Missing(suite.name, {}, policy, reason)

    def steps(self, job: Job) -> int:
        return 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        import torch

        from ragorder.benchmarks.kernels.attention.contenders import AttentionShape, MissingError
        from ragorder.benchmarks.kernels.attention.measuring import measure, splits_of

        cell: AttentionCell = job.cell
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape = AttentionShape(**cell.shape)
        engine = {
            "name": "attention",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        }
        facts = {"flops": shape.flops, "bytes": shape.bytes, "splits": splits_of(shape, device)}
        repeats = cell.repeats if cell.timed else 0
        for name, found in measure(shape, job.policies, device=device, repeats=repeats, seed=job.seed):
            if isinstance(found, MissingError):
                yield Missing(job.suite.name, {}, name, str(found))
                continue
            error, ms = found
            self._checked += 1
            self._wrong += error > TOLERANCE[cell.dtype]
            yield {"policy": name, "engine": engine, "facts": {**facts, "error": error}, "rows": {"ms": ms}}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        advance()


_Group = RecordGroup[AttentionRecord]
_OURS = ("triton", "triton unsplit")

_TIMED = (
    "triton: the kernel, keys split as its table says, or not split; torch: the kernel's reference, blocks gathered; "
    "sdpa + mask: SDPA's own choice of a backend, keys in one piece and a mask; "
    "flash: SDPA's flash backend, keys in one piece, or gathered in the measured time; cudnn: SDPA's cuDNN backend, "
    "keys in one piece and a mask; flex: FlexAttention compiled, keys in one piece and a mask, or the mask made in the "
    "measured time. Medians from a cold L2; TFLOP/s count what the causal mask leaves, GB/s each byte once."
)

_UNTIMED = "Nothing was timed: results were held against the reference, that is all."


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(AttentionRecord, suite.name))
    devices = dict.fromkeys(f"attention on {group.engine['device']}" for group in groups)
    cells = [group.runs()[0].setting for group in groups]
    setting = dict.fromkeys(f"{cell.dtype}, blocks of {cell.block_size} tokens in random order" for cell in cells)
    return Part(
        [_table(groups)] if groups else [],
        engine="; ".join(devices),
        setting="; ".join(setting),
        pictures=lambda: _pictures(groups),
    )


def _table(groups: Sequence[_Group]) -> Table:
    lines = [(group, line) for group in groups for line in group.runs()]
    timed = any(line.rows["ms"] for _, line in lines)
    headings = ["requests", "new", "cached", "heads × D", "contender"]
    headings += ["ms", "TFLOP/s", "GB/s", "of the fastest other"] if timed else []
    table = Table("Attention of new tokens to a paged prefix", [*headings, "error"], labels=5)
    for group, line in lines:
        cell = line.setting
        rows = f"{cell.query:,} anywhere" if cell.scattered else f"{cell.query:,}"
        shape = (str(cell.batch), rows, f"{cell.context:,}", f"{cell.heads} × {cell.head_dim}")
        error = Entry(f"{line.facts['error']:.1e}{'' if line.right else ', wrong'}", tone="" if line.right else "bad")
        table.add(*shape, line.policy, *(_times(group, line) if timed else ()), error)
    bounds = ", ".join(f"{bound:g} ({dtype})" for dtype, bound in TOLERANCE.items())
    table.note = f"{_TIMED if timed else _UNTIMED} An error above {bounds} is wrong."
    return table


def _times(group: _Group, line: AttentionRecord) -> list[str]:
    ms = line.median_ms
    if ms is None:
        return ["not timed", "", "", ""]
    speed = _speed(group, line)
    relative = "" if speed is None else f"{format_number(speed, 2)} ×"
    return [
        format_number(ms, 3),
        format_number(line.facts["flops"] / ms / 1e9, 0),
        format_number(line.facts["bytes"] / ms / 1e6, 0),
        relative,
    ]


def _speed(group: _Group, line: AttentionRecord) -> float | None:
    # Both variants of the kernel count as one contender.
    others = [
        other.median_ms
        for other in group.runs()
        if other.median_ms is not None
        and other.policy != line.policy
        and not (line.policy in _OURS and other.policy in _OURS)
    ]
    return min(others) / line.median_ms if others and line.median_ms else None


def _pictures(groups: Sequence[_Group]) -> list[Picture]:
    found: dict[int, dict[int, list[float]]] = {}
    for group in groups:
        for line in group.runs("triton"):
            speed = _speed(group, line)
            if speed is not None:
                found.setdefault(line.setting.context, {}).setdefault(line.setting.query, []).append(speed)
    means = {
        context: [(query, sum(each) / len(each)) for query, each in sorted(queries.items())]
        for context, queries in sorted(found.items())
    }
    if not means:
        return []

    lines = {f"{context:,} cached": points for context, points in means.items()}
    alt = "; ".join(
        f"{name}: {', '.join(f'{format_number(speed, 2)} at {query:,}' for query, speed in points)}"
        for name, points in lines.items()
    )
    return [
        draw_lines(
            "The kernel against the fastest other",
            lines,
            "new tokens",
            "times as fast",
            alt=alt,
            caption="Above 1: the kernel is faster.",
            level=1,
            adjust=lambda axes: axes.set_xscale("log", base=2),
        )
    ]
