"""The embedded engine on real weights: SmolLM2's answers and logits are transformers' own, wherever its KV and its
layers lie. Real weights have what random ones lack: a first token that takes most of the attention, and channels many
times as large as the others, which show a wrong position, scale or block at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from support.streamed import room_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder import Document, PromptBuilder
from ragorder.eval.data.corpora import Corpus, load_folder, load_pydocs
from ragorder.kernels.engine import Completion, EngineSettings, Request, Sampling, TieredEngine

# A machine without bfloat16 in its processor takes minutes, and a busy one longer.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NQOPEN = Path(__file__).parents[2].parent / "shared" / "data" / "nqopen"
BLOCK = 16
ANSWER = 12
# Of the logits, as a vector: float32 differs by the order of its sums alone.
FLOAT32 = 1e-5
# Times the distance of transformers in bfloat16 from float32, which varies as much with where a prompt is split.
BFLOAT16 = 3

Make = Callable[..., TieredEngine]


def relative(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())


@dataclass
class Reference:
    """What transformers says, each prompt computed whole, without a cache that others filled."""

    folder: Path
    dtype: str
    said: dict[tuple[int, ...], tuple[Any, list[int]]] = field(default_factory=dict)

    @cached_property
    def model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self.dtype)).eval()

    def logits(self, prompt: Sequence[int]) -> Any:
        """Of the next token."""
        with torch.no_grad():
            return self.model(torch.tensor([list(prompt)]), logits_to_keep=1).logits[0, -1].float()

    def says(self, prompt: Sequence[int]) -> tuple[Any, list[int]]:
        """The first token's logits, and the greedy answer."""
        key = tuple(prompt)
        if key not in self.said:
            given = torch.tensor([key])
            options = {"attention_mask": torch.ones_like(given), "max_new_tokens": ANSWER, "do_sample": False}
            with torch.no_grad():
                made = self.model.generate(given, **options, output_logits=True, return_dict_in_generate=True)
            self.said[key] = made.logits[0][0].float(), made.sequences[0, len(key) :].tolist()
        return self.said[key]

    def twin(self) -> Any:
        """Another model with the same weights, for an engine to change."""
        return copy.deepcopy(self.model, {id(each): each for each in self.model.parameters()})


class Checked:
    """Compares completions with transformers in the same dtype, and in float32."""

    def __init__(self, exact: Reference, plain: Reference) -> None:
        self.exact = exact
        self.plain = plain

    def check(self, completion: Completion, request: Request) -> None:
        assert completion.error is None, completion.error
        logits, answer = self.plain.says(request.token_ids)
        if self.plain is self.exact:
            assert relative(completion.logits, logits) <= FLOAT32
            assert list(completion.token_ids) == answer
            return
        true, _ = self.exact.says(request.token_ids)
        assert relative(completion.logits, true) <= BFLOAT16 * relative(logits, true)
        self._check_tokens(completion.token_ids, answer, request.token_ids)

    def _check_tokens(self, found: Sequence[int], expected: Sequence[int], prompt: Sequence[int]) -> None:
        """Where the answers part, the two tokens are as good as equal: by less than bfloat16 tells apart."""
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
            if ours != theirs:
                logits = self.exact.logits([*prompt, *expected[:place]])
                best = torch.topk(logits, 2).indices.tolist()
                assert {ours, theirs} == set(best)
                assert float(logits[best[0]] - logits[best[1]]) < 2**-7 * float(logits.abs().max())
                return
        assert len(found) == len(expected)


@pytest.fixture(scope="module")
def exact(smollm2_folder: Path) -> Reference:
    return Reference(smollm2_folder, "float32")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checked(request: pytest.FixtureRequest, exact: Reference) -> Checked:
    return Checked(exact, exact if request.param == "float32" else Reference(exact.folder, request.param))


@pytest.fixture
def make(checked: Checked) -> Iterator[Make]:
    """Engines on the weights. Closed in the end."""
    engines: list[TieredEngine] = []

    def made(**settings: Any) -> TieredEngine:
        options = {"device_tokens": 2048, "host_bytes": 0, "verify": False} | settings
        engines.append(TieredEngine(checked.plain.twin(), settings=EngineSettings(**options)))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def builder(smollm2_folder: Path) -> PromptBuilder:
    return PromptBuilder(
        "Answer the question from the documents, in a few words.",
        document_template="{text}\n\n",
        tokenizer=transformers.AutoTokenizer.from_pretrained(smollm2_folder),
    )


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Questions of people with passages of Wikipedia, or else about Python with its documentation."""
    return load_folder(NQOPEN) if NQOPEN.is_dir() else load_pydocs()


def retrieved(corpus: Corpus, number: int, count: int, characters: int = 400) -> list[Document]:
    found = [corpus.documents[place] for place in corpus.rankings[number][:count]]
    return [Document(document.id, document.text[:characters]) for document in found]


def ask(builder: PromptBuilder, question: str, documents: Sequence[Document], salt: str | None = None) -> Request:
    """A chat, as the model was trained on it; greedy."""
    prompt = builder.build(question, documents)
    ends = [span.end for span in prompt.spans]
    return Request(prompt.token_ids, ends, Sampling(max_tokens=ANSWER), salt, keep_logits=True)


def kv_block_bytes(model: Any) -> int:
    config = model.config
    head: int = config.head_dim * model.dtype.itemsize
    return BLOCK * int(config.num_hidden_layers) * 2 * int(config.num_key_value_heads) * head


@pytest.mark.parametrize("checked", ["float32"], indirect=True)
def test_an_answer_is_transformers_own_and_the_same_from_the_cache(
    make: Make, checked: Checked, builder: PromptBuilder
) -> None:
    facts = ["The drawer was opened first by Anna, on Monday.", "The lamp was broken by Paul, on Friday."]
    documents = [Document(str(number), text) for number, text in enumerate(facts)]
    engine = make(verify=True)
    request = ask(builder, "Who opened the drawer?", documents)
    for cached in (0, request.document_ends[-1]):
        [completion] = engine.generate([request])
        assert completion.cached.total == cached
        checked.check(completion, request)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checked.exact.folder)
    assert "Anna" in tokenizer.decode(completion.token_ids)


class TestExactness:
    def test_with_none_to_all_documents_cached(
        self, make: Make, checked: Checked, builder: PromptBuilder, corpus: Corpus
    ) -> None:
        engine = make(verify=True)
        documents = retrieved(corpus, 3, 3)
        for cached in range(len(documents) + 1):
            if cached:
                engine.generate([ask(builder, "What is it?", documents[:cached], str(cached))])
            request = ask(builder, corpus.questions[3].text, documents, str(cached))
            [completion] = engine.generate([request])
            assert completion.cached.total == (request.document_ends[cached - 1] if cached else 0)
            checked.check(completion, request)

    def test_to_the_bit_the_same_from_every_tier(
        self, make: Make, checked: Checked, builder: PromptBuilder, corpus: Corpus, tmp_path: Path
    ) -> None:
        """What was written and read back is what was computed."""
        request = ask(builder, corpus.questions[5].text, retrieved(corpus, 5, 3))
        others = [ask(builder, corpus.questions[5].text, retrieved(corpus, number, 3)) for number in (21, 22)]
        tokens, size = 32 * BLOCK, kv_block_bytes(checked.plain.model)
        disk = {"disk_path": tmp_path / "kv", "disk_bytes": "64MiB"}
        logits = {}
        cases: dict[str, dict[str, Any]] = {"device": {}, "host": {"host_bytes": 96 * size}, "disk": disk}
        for tier, tiers in cases.items():
            engine = make(device_tokens=tokens, **tiers)
            engine.generate([request])
            if tier != "device":
                engine.generate(others)
            [completion] = engine.generate([request])
            assert getattr(completion.cached, tier) == completion.cached.total == request.document_ends[-1]
            checked.check(completion, request)
            logits[tier] = completion.logits
        assert torch.equal(logits["device"], logits["host"])
        assert torch.equal(logits["device"], logits["disk"])

    @pytest.mark.parametrize("held", [0, 6])
    def test_to_the_bit_the_same_where_layers_are_read_one_by_one(
        self, checked: Checked, builder: PromptBuilder, corpus: Corpus, held: int
    ) -> None:
        """Three layers are on the device, `held` in host memory, and the others are read from the model's file in every
        step."""
        dtype, folder = checked.plain.dtype, checked.plain.folder
        scale = 2 if dtype == "float32" else 1
        layer = room_for(folder, 2) - room_for(folder, 1)
        like = {"max_batch_tokens": 64, "device_tokens": 1024, "dtype": dtype, "device": "cpu", "verify": False}
        budget = {"device_bytes": scale * room_for(folder, 3), "host_bytes": scale * held * layer}
        request = ask(builder, corpus.questions[9].text, retrieved(corpus, 9, 2))
        settings = EngineSettings(**budget, **like), EngineSettings(host_bytes=0, **like)
        with TieredEngine.load(folder, settings[0]) as streamed, TieredEngine.load(folder, settings[1]) as whole:
            stream = streamed.stats().stream
            assert stream.disk_layers > 15 and bool(stream.host_layers) == bool(held)
            for cached in (0, request.document_ends[-1]):
                [one], [other] = streamed.generate([request]), whole.generate([request])
                assert one.cached == other.cached and one.cached.total == cached
                assert one.token_ids == other.token_ids and torch.equal(one.logits, other.logits)
                checked.check(one, request)

    @pytest.mark.parametrize("checked", ["float32"], indirect=True)
    def test_in_a_long_prompt(self, make: Make, checked: Checked, builder: PromptBuilder, corpus: Corpus) -> None:
        documents = [document for number in range(7) for document in retrieved(corpus, number, 3)]
        documents = list({document.id: document for document in documents}.values())
        engine = make(device_tokens=8192, max_batch_tokens=512)
        engine.generate([ask(builder, "What is it?", documents[:10])])
        request = ask(builder, corpus.questions[2].text, documents)
        assert len(request.token_ids) > 1500
        [completion] = engine.generate([request])
        assert completion.cached.total == request.document_ends[9]
        checked.check(completion, request)
