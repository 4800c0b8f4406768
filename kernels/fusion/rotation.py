"""Rotary position embeddings (RoPE) of a model's cached keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ragorder.kernels.attention.runs import QueryTurn
from ragorder.kernels.models.support import UnsupportedModelError

# Relative difference of two keys' norms: far below that of other frequencies, far above rounding.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}

# Frequencies that depend on the sequence's length.
_REFUSED = ("dynamic", "longrope")

_FARTHEST = 32_768
_PROBES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """`frequencies` float32 (n,), radians a token, rotate a head's first 2 n dimensions: i with i + n, or 2 i with
    2 i + 1 if `adjacent`."""

    frequencies: Tensor
    adjacent: bool

    def angles(self, by: Tensor, origin: Tensor | None) -> Tensor:
        frequencies = self.frequencies.to(by.device)
        if origin is None:
            return by[:, None] * frequencies.double()
        # Rounded as in the model: in single precision, angles far from 0 have few digits.
        before, after = (position[:, None].float() * frequencies for position in (origin, origin + by))
        return after.double() - before.double()


class Turn:
    def __init__(self, ropes: Sequence[Rope | None], by: Tensor, origin: Tensor | None) -> None:
        self._ropes = ropes
        self._by = by
        self._origin = origin
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._queries: dict[int, QueryTurn] = {}

    def apply(self, vectors: Tensor, layer: int) -> Tensor:
        rope = self._ropes[layer]
        if rope is None:
            return vectors
        cos, sin = self._turn(rope, vectors.device)
        turned = 2 * cos.shape[-1]
        rotated = vectors[..., :turned].float()
        first, second = (rotated[..., 0::2], rotated[..., 1::2]) if rope.adjacent else rotated.chunk(2, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        found = (torch.stack(pair, -1).flatten(-2) if rope.adjacent else torch.cat(pair, -1)).to(vectors.dtype)
        return found if turned == vectors.shape[-1] else torch.cat((found, vectors[..., turned:]), -1)

    def queries(self, layer: int, head_dim: int) -> QueryTurn | None:
        """Return the rotation of a layer's queries, or None without positions."""
        rope = self._ropes[layer]
        if rope is None:
            return None
        if id(rope) not in self._queries:
            cos, sin = (each.squeeze(1) for each in self._turn(rope, self._by.device))
            rotary, count = 2 * cos.shape[-1], len(cos)
            table = torch.zeros(count, 2, head_dim, device=cos.device)
            table[:, 0, rotary:] = 1
            first, second = (slice(0, rotary, 2), slice(1, rotary, 2)) if rope.adjacent else _halves(rotary)
            table[:, 0, first] = table[:, 0, second] = cos
            table[:, 1, first], table[:, 1, second] = -sin, sin
            self._queries[id(rope)] = QueryTurn(table, rotary, rope.adjacent)
        return self._queries[id(rope)]

    def _turn(self, rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
        if id(rope) not in self._turns:
            angles = rope.angles(self._by, self._origin)[:, None]
            self._turns[id(rope)] = angles.cos().float().to(device), angles.sin().float().to(device)
        return self._turns[id(rope)]


class Rotation:
    """Rotations of each layer's keys and queries, None for a layer without positions. A key rotated by a difference of
    positions is that of the new position (FusionRAG, A.1)."""

    def __init__(self, ropes: Sequence[Rope | None]) -> None:
        self.ropes = tuple(ropes)

    @classmethod
    def of(cls, model: Any) -> Self:
        """Find each layer's rotation among the model's frequencies. Raises UnsupportedModelError."""
        candidates = list(_candidates(model))
        # Of a sequence of one token, only the position changes its keys.
        positions = (3 ** torch.arange(_PROBES)).clamp(max=_last_position(model))
        before, after = _keys(model, torch.zeros_like(positions)), _keys(model, positions)
        ropes: list[Rope | None] = []
        for layer, (old, new) in enumerate(zip(before, after, strict=True)):
            fitting = [None, *(rope for rope in candidates if 2 * len(rope.frequencies) <= old.shape[-1])]
            errors = [_difference(_turned(rope, old, positions), new) for rope in fitting]
            least = min(errors)
            if not least <= _tolerance(old):
                raise _refusal(model, f"the keys of layer {layer} do not rotate with their position")
            ropes.append(fitting[errors.index(least)])
        return cls(ropes)

    def turn(self, by: Tensor | int, origin: Tensor | int | None = None) -> Turn:
        moved = torch.as_tensor(by).reshape(-1)
        start = None if origin is None else torch.as_tensor(origin, device=moved.device).reshape(-1)
        return Turn(self.ropes, moved, start)

    def shift(self, keys: Tensor, by: Tensor | int, layer: int, *, origin: Tensor | int | None = None) -> Tensor:
        """Move keys or queries (T, heads, D) `by` positions, int64 (T,) or one for all. With their positions `origin`
        the result is rounded as by the model."""
        return self.turn(by, origin).apply(keys, layer)

    def verify(self, model: Any) -> None:
        """Compare moved keys with the model's, over all positions. Raises UnsupportedModelError."""
        last = _last_position(model)
        old = torch.linspace(0, last, _PROBES).long()
        new = old.flip(0) // 2 + last // 3
        turn = self.turn(new - old, old)
        for layer, (before, after) in enumerate(zip(_keys(model, old), _keys(model, new), strict=True)):
            error = _difference(turn.apply(before, layer), after)
            if not error <= _tolerance(before):
                raise _refusal(
                    model,
                    f"keys of layer {layer} moved to another position differ from those computed there by {error:.1e} "
                    f"of their norm (allowed: {_tolerance(before):g})",
                )


def _candidates(model: Any) -> Iterator[Rope]:
    found: list[Tensor] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name:
                continue
            _check_types(model, getattr(module, "rope_type", "default"))
            if not any(torch.equal(buffer, other) for other in found):
                found.append(buffer)
    if not found:
        raise _refusal(model, "it has no rotary position embeddings (RoPE)")
    for frequencies in found:
        for adjacent in (False, True):
            yield Rope(frequencies.detach().float().cpu(), adjacent)


def _check_types(model: Any, types: object) -> None:
    for kind in types.values() if isinstance(types, dict) else (types,):
        if any(refused in str(kind) for refused in _REFUSED):
            raise _refusal(model, f"the frequencies of {kind} RoPE depend on the length of the sequence")


def _keys(model: Any, positions: Tensor) -> list[Tensor]:
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(len(positions))
    tokens = torch.randint(0, embedding.shape[0], (len(positions), 1), generator=generator).to(embedding.device)
    implementation, training = model.config._attn_implementation, model.training
    # An engine's own attention only runs within its steps.
    model.set_attn_implementation("eager")
    model.eval()
    try:
        with torch.inference_mode():
            cache = model(input_ids=tokens, position_ids=positions[:, None].to(tokens.device), use_cache=True)
        return [layer.keys[:, :, 0] for layer in cache.past_key_values.layers]
    except Exception as error:
        raise _refusal(model, f"its keys cannot be read ({type(error).__name__}: {error})") from error
    finally:
        model.set_attn_implementation(implementation)
        model.train(training)


def _last_position(model: Any) -> int:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(longest or _FARTHEST, _FARTHEST) - 1


def _turned(rope: Rope | None, keys: Tensor, by: Tensor) -> Tensor:
    return Rotation([rope]).shift(keys, by, 0, origin=0)


def _halves(rotary: int) -> tuple[slice, slice]:
    return slice(0, rotary // 2), slice(rotary // 2, rotary)


def _difference(found: Tensor, wanted: Tensor) -> float:
    distance = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12)
    return float(distance)


def _tolerance(keys: Tensor) -> float:
    return _TOLERANCE.get(keys.dtype, 0.0)


def _refusal(model: Any, reason: str) -> UnsupportedModelError:
    kind = getattr(model.config, "model_type", "unknown")
    return UnsupportedModelError(
        f"documents' KV cannot be reused at other positions with {type(model).__name__} ({kind}): {reason}"
    )
