"""Critical tokens computed as though their document were the last of the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from support.families import VOCABULARY, make_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor

from ragorder.kernels.attention import PackedBatch, sparse_attention
from ragorder.kernels.fusion.as_if_last import AsIfLast
from ragorder.kernels.fusion.rotation import Rope, Rotation

BLOCK = 16
PREFIX, DOCUMENTS, QUESTION = 5, (13, 22, 9), 4


def spans(lengths: Sequence[int], prefix: int = PREFIX) -> list[tuple[int, int]]:
    ends = [prefix + sum(lengths[: place + 1]) for place in range(len(lengths))]
    return list(zip([prefix, *ends], ends, strict=False))


def cache(sequences: Sequence[Tensor], order: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Sequences (tokens, KV heads, D) in blocks anywhere, and their tables."""
    blocks = torch.zeros(len(order), BLOCK, *sequences[0].shape[1:])
    free, tables = order.tolist(), []
    for sequence in sequences:
        tables.append([free.pop() for _ in range(-(-len(sequence) // BLOCK))])
        for block, piece in zip(tables[-1], sequence.split(BLOCK), strict=True):
            blocks[block, : len(piece)] = piece
    return blocks, tables


@dataclass
class Seen:
    """What a model's layers attend with, and what comes of it: (T, heads, D) each."""

    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        self.layers.append(tuple(each[0].transpose(0, 1) for each in (q, k, v, out)))
        return out.transpose(1, 2), None


def look(model: Any, ids: Sequence[int]) -> Seen:
    seen = Seen()
    transformers.AttentionInterface.register("ragorder_seen", seen.attention)
    model.set_attn_implementation("ragorder_seen")
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    model.set_attn_implementation("sdpa")
    return seen


def texts() -> tuple[list[int], list[list[int]], list[int]]:
    ids = torch.randint(0, VOCABULARY, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    bounds = [0, PREFIX, *(end for _, end in spans(DOCUMENTS))]
    prefix, *documents = (ids[begin:end] for begin, end in pairwise(bounds))
    return prefix, documents, ids[bounds[-1] : bounds[-1] + QUESTION]


def first_layer(model: Any, order: Sequence[int], critical: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """With the documents in this order: the model's own result for all tokens, ours if the tokens of one document are
    critical, and which tokens these are."""
    prefix, documents, question = texts()
    ids = [*prefix, *(token for number in order for token in documents[number]), *question]
    q, k, v, out = look(model, ids).layers[0]
    places = spans([len(documents[number]) for number in order])
    begin, end = places[order.index(critical)]
    order_of_blocks = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    (keys, tables), (values, _) = cache([k], order_of_blocks), cache([v], order_of_blocks)
    positions = torch.arange(len(ids), dtype=torch.int32)
    batch = PackedBatch.pack([len(ids)], [len(ids)], tables)
    chosen = (positions >= begin) & (positions < end)
    last = AsIfLast(batch, positions, chosen, [places], Rotation.of(model))
    scale = model.model.layers[0].self_attn.scaling
    return out, last.attend(q, keys, values, 0, scale=scale), chosen, list(range(begin, end))


class TestInTheFirstLayer:
    @pytest.mark.parametrize(
        ("name", "others"), [("Llama", {}), ("Glm", {"head_dim": 16}), ("SmolLM3", {"no_rope_layers": [0, 1, 1]})]
    )
    @pytest.mark.parametrize("critical", range(len(DOCUMENTS)))
    def test_a_document_is_computed_as_by_a_model_that_has_it_last(
        self, name: str, others: dict[str, Any], critical: int
    ) -> None:
        model = make_model(name, **others)
        _, ours, _, rows = first_layer(model, (0, 1, 2), critical)
        really_last = [number for number in range(len(DOCUMENTS)) if number != critical] + [critical]
        theirs, _, _, wanted = first_layer(model, really_last, critical)
        assert float((ours[rows] - theirs[wanted]).abs().max()) < 1e-5

    def test_other_tokens_are_computed_where_they_stand(self) -> None:
        model = make_model("Llama")
        theirs, ours, critical, _ = first_layer(model, (0, 1, 2), 1)
        assert float((ours - theirs)[~critical].abs().max()) < 1e-5
        assert float((ours - theirs)[critical].abs().max()) > 1e-2

    def test_it_does_not_matter_where_the_document_is(self) -> None:
        model = make_model("Llama")
        results = []
        for order in ((1, 0, 2), (0, 1, 2), (0, 2, 1)):
            _, ours, _, rows = first_layer(model, order, 1)
            results.append(ours[rows])
        assert all(float((result - results[0]).abs().max()) < 1e-5 for result in results)


@dataclass(frozen=True)
class Asked:
    """A request: lengths of its documents, and at which positions it has rows, some of them critical."""

    documents: tuple[int, ...]
    critical: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    @property
    def spans(self) -> list[tuple[int, int]]:
        return spans(self.documents)

    @property
    def tokens(self) -> int:
        return self.spans[-1][1] + QUESTION


ASKED = (
    Asked((13, 22, 9), critical=(5, 17, 18, 30, 39, 40, 48), others=(49, 50, 51, 52)),
    Asked((30,), others=tuple(range(20, 39))),
    Asked((8, 8, 8, 8), critical=(12, 13, 29, 36), others=(6, 7, 40)),
    Asked((40,), critical=(7, 20)),
)


def reference(
    asked: Asked, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, softcap: float | None
) -> dict[int, Tensor]:
    """Position by position, by keys rotated to where they would be."""
    spot = torch.arange(asked.tokens)
    end_of_documents = asked.spans[-1][1]
    found = {}
    for row, position in enumerate(sorted(asked.critical + asked.others)):
        query, at, seen = q[row : row + 1], spot, spot <= position
        if position in asked.critical:
            begin, end = next(span for span in asked.spans if span[0] <= position < span[1])
            mine, behind = (spot >= begin) & (spot < end), (spot >= end) & (spot < end_of_documents)
            moved = end_of_documents - end
            at = spot - (end - begin) * behind + moved * mine
            query = rotation.shift(query, moved, 0)
            seen = (spot < end_of_documents) & (~mine | (spot <= position))
        keys = rotation.shift(k, at - spot, 0).repeat_interleave(q.shape[1] // k.shape[1], 1)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        scores = torch.einsum("hd,khd->hk", query[0], keys) / math.sqrt(q.shape[-1])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        found[position] = torch.einsum("hk,khd->hd", weights, values)
    return found


class TestABatch:
    heads, kv_heads, head_dim = 4, 2, 16

    @pytest.fixture(params=[False, True], ids=["halves", "side by side"])
    def rotation(self, request: pytest.FixtureRequest) -> Rotation:
        return Rotation([Rope(1000.0 ** -(torch.arange(0, 12, 2) / 12), request.param)])

    def given(self, asked: Sequence[Asked]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        rng = torch.Generator().manual_seed(0)
        rows = [len(each.critical + each.others) for each in asked]
        q = [torch.randn(count, self.heads, self.head_dim, generator=rng) for count in rows]
        k, v = ([torch.randn(each.tokens, self.kv_heads, self.head_dim, generator=rng) for each in asked] for _ in "kv")
        return q, k, v

    def step(self, asked: Sequence[Asked], k: list[Tensor], v: list[Tensor]) -> tuple[Any, ...]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
        (keys, tables), (values, _) = cache(k, order), cache(v, order)
        rows = [sorted(each.critical + each.others) for each in asked]
        positions = torch.tensor([position for own in rows for position in own], dtype=torch.int32)
        critical = torch.tensor(
            [position in each.critical for own, each in zip(rows, asked, strict=True) for position in own]
        )
        batch = PackedBatch.pack([len(own) for own in rows], [each.tokens for each in asked], tables)
        return keys, values, batch, positions, critical

    @pytest.mark.parametrize("softcap", [None, 4.0])
    def test_is_what_keys_rotated_to_other_places_give(self, rotation: Rotation, softcap: float | None) -> None:
        q, k, v = self.given(ASKED)
        keys, values, batch, positions, critical = self.step(ASKED, k, v)
        last = AsIfLast(batch, positions, critical, [each.spans for each in ASKED], rotation)
        found = last.attend(torch.cat(q), keys, values, 0, softcap=softcap)
        wanted = [reference(each, *given, rotation, softcap) for each, *given in zip(ASKED, q, k, v, strict=True)]
        flat = torch.stack([each[position] for each in wanted for position in sorted(each)])
        assert float((found - flat).abs().max()) < 1e-5

    def test_serves_every_layer(self, rotation: Rotation) -> None:
        q, k, v = self.given(ASKED)
        keys, values, batch, positions, critical = self.step(ASKED, k, v)
        layers = Rotation([*rotation.ropes, None])
        last = AsIfLast(batch, positions, critical, [each.spans for each in ASKED], layers)
        first, second, again = (last.attend(torch.cat(q), keys, values, layer) for layer in (0, 1, 0))
        assert torch.equal(first, again)
        assert not torch.allclose(first[critical], second[critical])
        assert torch.equal(first[~critical], second[~critical])

    def test_in_the_last_document_a_critical_token_is_an_ordinary_one(self, rotation: Rotation) -> None:
        asked = [Asked((13, 22, 9), critical=(40, 41, 48), others=(50,)), Asked((30,), critical=(5, 9, 34))]
        q, k, v = self.given(asked)
        keys, values, batch, positions, critical = self.step(asked, k, v)
        last = AsIfLast(batch, positions, critical, [each.spans for each in asked], rotation)
        ordinary = sparse_attention(torch.cat(q), keys, values, batch, positions)
        assert float((last.attend(torch.cat(q), keys, values, 0) - ordinary).abs().max()) < 1e-5

    def test_without_critical_tokens_is_the_ordinary_one(self, rotation: Rotation) -> None:
        asked = [Asked((13, 9), others=(3, 20, 30)), Asked((30,), others=(35, 36))]
        q, k, v = self.given(asked)
        keys, values, batch, positions, critical = self.step(asked, k, v)
        last = AsIfLast(batch, positions, critical, [each.spans for each in asked], rotation)
        ordinary = sparse_attention(torch.cat(q), keys, values, batch, positions)
        assert torch.equal(last.attend(torch.cat(q), keys, values, 0), ordinary)

    @pytest.mark.parametrize("position", [2, 50])
    def test_refuses_a_critical_token_in_no_document(self, rotation: Rotation, position: int) -> None:
        asked = [Asked((13, 22, 9), critical=(position,))]
        _, k, v = self.given(asked)
        _, _, batch, positions, critical = self.step(asked, k, v)
        with pytest.raises(ValueError, match=f"position {position} is in none of its request's documents"):
            AsIfLast(batch, positions, critical, [asked[0].spans], rotation)
