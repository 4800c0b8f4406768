"""Answers from documents' KV that was computed apart: full reuse, CacheBlend, FusionRAG (see docs/fusion.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from ragorder.eval.engines.base import RequestError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.suites.quality.base import QualityError

if TYPE_CHECKING:
    from ragorder.eval.engines.torch import TorchEngine
    from ragorder.kernels.engine import Completion, Request

__all__ = ["FUSED", "FusedReuse", "answer_fused", "fused_orders", "normalised_scores"]

FUSED = "fused"
_FUSED = f"+{FUSED}="
_LEAST_GAP = 1.0


@dataclass(frozen=True, slots=True)
class FusedReuse:
    """The share of the tokens taken over that is recomputed, and which ones (`--select` of the engine)."""

    recompute: float
    select: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "0.05:query"; "0" takes everything as it is. Raises QualityError."""
        from ragorder.kernels.fusion.selection import selections

        share, _, select = text.partition(":")
        try:
            found = cls(float(share), select or "none")
            selections.check(found.select)
        except ValueError as error:
            raise QualityError(f"{FUSED}={text}: {error}") from None
        if not 0 <= found.recompute <= 1:
            raise QualityError(f"{FUSED}={text}: give a share of the tokens, from 0 to 1")
        if found.recompute and not select:
            raise QualityError(f"{FUSED}={text}: say which tokens are recomputed, such as {FUSED}={text}:query")
        return found


def fused_orders(orders: Sequence[str], shares: Sequence[float], selections: Sequence[str]) -> tuple[str, ...]:
    """Names of each order with each of these shares and selections; the share 0 has no selection."""

    def names(order: str) -> Iterator[str]:
        for share in dict.fromkeys(shares):
            yield from (f"{order}{_FUSED}{share:g}:{each}" for each in selections if share)
            if not share:
                yield f"{order}{_FUSED}0"

    return tuple(name for order in orders for name in names(order))


def normalised_scores(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Of fused orders in percent (FusionRAG's equation 11): 0 is full reuse, 100 the same order without fusion. Scores
    by order, in points; none where full reuse loses hardly anything."""
    found = {}
    for name, score in scores.items():
        exact, fused, _ = name.partition(_FUSED)
        full, reuse = scores.get(exact), scores.get(f"{exact}{_FUSED}0")
        if fused and score is not None and full is not None and reuse is not None and full - reuse >= _LEAST_GAP:
            found[name] = 100 * (score - reuse) / (full - reuse)
    return found


def answer_fused(engine: TorchEngine, token_ids: PromptIds, fused: FusedReuse) -> Completion:
    """With each document first computed behind the system prompt alone, as by `ragorder fuse build --neighbours 0`:
    what is no exact prefix is then taken over. Raises RequestError."""
    from ragorder.kernels.engine import Fusion

    request = engine.request(token_ids)
    if len(token_ids.document_ends) > 1:
        system, *ends = token_ids.document_ends
        last = token_ids[ends[-1] :]
        for begin, end in pairwise(token_ids.document_ends):
            alone = PromptIds([*token_ids[:system], *token_ids[begin:end], *last], [system, system + end - begin])
            _serve(engine, _marked(engine.request(alone, output_tokens=1)))
        request = replace(_marked(request), fusion=Fusion(fused.recompute, fused.select))
    done = _serve(engine, request)
    engine.served.append(done)
    return done


def _marked(request: Request) -> Request:
    system, *ends = request.document_ends
    return replace(request, document_ends=ends, prefix_tokens=system)


def _serve(engine: TorchEngine, request: Request) -> Completion:
    [done] = engine.engine.generate([request])
    if done.finish_reason in ("error", "timeout"):
        raise RequestError(done.error or done.finish_reason)
    return done
