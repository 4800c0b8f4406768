"""Haystack: a ranker that gives the documents back as they are, in the order that the cache wants."""

from __future__ import annotations

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("haystack")

from haystack import Document, Pipeline, component
from haystack.components.builders import PromptBuilder
from haystack.components.rankers import LLMRanker
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.core.errors import SerializationError
from haystack.core.serialization import component_from_dict, component_to_dict
from haystack.dataclasses import ByteStream, ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.document_stores.types import DuplicatePolicy
from support.framework_contract import FrameworkContract
from support.network import local_connections_only  # noqa: F401

from ragorder import Orderer
from ragorder.adapters.haystack import CacheOrderChatPromptBuilder, CacheOrderRanker
from ragorder.benchmarks.ragcache.replacement.tiers import A10G

TEMPLATE = "{% for document in documents %}{{ document.content }}\n{% endfor %}Question: {{ question }}"


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=1)


def found(*names: str, **options: Any) -> list[Document]:
    return [
        Document(id=name, content=f"the text of {name}.", score=1 / rank, **options)
        for rank, name in enumerate(names, 1)
    ]


def names(documents: Sequence[Document]) -> list[str]:
    return [document.id for document in documents]


def by_title(document: Document) -> Any:
    return document.meta["title"]


def id_of(document: Document) -> Any:
    return document.id


def one_token(document: Document) -> int:
    return 1


class TestContract(FrameworkContract):
    options = ("key", "tokens")

    def adapter(self, orderer: Any, **options: Any) -> CacheOrderRanker:
        return CacheOrderRanker(orderer, **options)

    def found(self, *names: str, text: str = "the text of {}.", source: str | None = None) -> list[Document]:
        meta = {} if source is None else {"source": source}
        return [Document(id=name, content=text.format(name), meta=meta) for name in names]

    def order(self, adapter: CacheOrderRanker, documents: list[Document]) -> Any:
        return adapter.run(documents)["documents"]

    async def aorder(self, adapter: CacheOrderRanker, documents: list[Document]) -> Any:
        return (await adapter.run_async(documents))["documents"]

    def read(self, document: Any) -> tuple[str, str]:
        return (document.id, document.content) if isinstance(document, Document) else ("", "")


def test_documents_without_text_are_ordered_like_others(orderer: Orderer) -> None:
    images = [Document(blob=ByteStream(data)) for data in (b"1", b"2")]
    documents = [*found("a"), images[0], Document(id="nothing"), images[1]]
    ranker = CacheOrderRanker(orderer)
    ranker.run(documents)
    ordered = ranker.run([images[1], documents[2], images[0], documents[0]])["documents"]
    assert ordered[0] is documents[0]
    assert Counter(map(id, ordered)) == Counter(map(id, documents))
    assert [ordered[ordered.index(image)].blob for image in images] == [image.blob for image in images]
    assert orderer.fallbacks == 0


def test_score_and_embedding_do_not_matter(orderer: Orderer) -> None:
    ranker = CacheOrderRanker(orderer)
    ranker.run(found("a", "b"))
    assert names(ranker.run(found("b", "a", embedding=[1.0]))["documents"]) == ["a", "b"]


class TestTopK:
    async def test_that_of_a_run_replaces_that_of_the_ranker(self, orderer: Orderer) -> None:
        ranker = CacheOrderRanker(orderer, top_k=2)
        assert names(ranker.run(found("a", "b", "c"))["documents"]) == ["a", "b"]
        assert names(ranker.run(found("b", "a", "c"))["documents"]) == ["a", "b"]
        assert names(ranker.run(found("b", "a", "c"), top_k=3)["documents"]) == ["a", "b", "c"]
        assert names((await ranker.run_async(found("c", "b", "a", "d"), top_k=3))["documents"]) == ["a", "b", "c"]
        assert names(ranker.run(found("c"), top_k=3)["documents"]) == ["c"]

    @pytest.mark.parametrize("top_k", [0, -1])
    async def test_it_is_positive(self, orderer: Orderer, top_k: int) -> None:
        with pytest.raises(ValueError, match="give 1 or more"):
            CacheOrderRanker(orderer, top_k=top_k)
        with pytest.raises(ValueError, match="give 1 or more"):
            CacheOrderRanker(orderer).run(found("a"), top_k=top_k)
        with pytest.raises(ValueError, match="give 1 or more"):
            await CacheOrderRanker(orderer).run_async(found("a"), top_k=top_k)


def test_an_orderer_is_given_or_made_of_settings_or_of_the_environment(
    orderer: Orderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGORDER_BLOCK_SIZE", "32")
    assert CacheOrderRanker(orderer).orderer is orderer
    assert CacheOrderRanker(settings={"block_size": 8}).orderer.settings.block_size == 8
    assert CacheOrderRanker().orderer.settings.block_size == 32
    with pytest.raises(ValueError, match="either an orderer or settings"):
        CacheOrderRanker(orderer, settings={})


class TestSerialisation:
    def test_what_is_read_again_has_the_same_parameters_in_any_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HAYSTACK_DESERIALIZATION_ALLOWLIST", __name__)
        orderer = Orderer(block_size=8, capacity_tokens=None)
        ranker = CacheOrderRanker(orderer, top_k=3, scope="a tenant", key=by_title, tokens=one_token)
        data = component_to_dict(ranker, "ranker")
        assert data["type"] == "ragorder.adapters.haystack.CacheOrderRanker"
        assert data["init_parameters"]["settings"] == orderer.settings.model_dump()
        monkeypatch.setenv("RAGORDER_KEEP_FIRST", "2")
        again = component_from_dict(CacheOrderRanker, data, "ranker")
        assert again.to_dict() == data
        assert again.orderer.settings == orderer.settings
        assert (again.top_k, again.scope) == (3, "a tenant")
        assert CacheOrderRanker.from_dict({"type": data["type"], "init_parameters": {}}).top_k is None

    @pytest.mark.parametrize("made", [CacheOrderRanker, CacheOrderChatPromptBuilder])
    def test_an_orderer_with_a_profile_is_loaded_with_it(self, made: Any, tmp_path: Path) -> None:
        replace(A10G, loads={"host": 0.1, "disk": 1.0}).to_file(tmp_path / "profile.json")
        orderer = Orderer(host_tokens=1000, profile=tmp_path / "profile.json")
        pipeline = Pipeline()
        pipeline.add_component("order", made(orderer))
        again = Pipeline.loads(pipeline.dumps(), allowed_modules=["ragorder"])
        assert again.get_component("order").orderer.settings == orderer.settings

    def test_functions_without_a_name_cannot_be_written(self, orderer: Orderer) -> None:
        with pytest.raises(SerializationError, match="lambda"):
            CacheOrderRanker(orderer, key=lambda document: document.id).to_dict()


@component
class Judge:
    """Stands for the model that a ranker asks."""

    @component.output_types(replies=list[ChatMessage])
    def run(self, messages: list[ChatMessage]) -> dict[str, list[ChatMessage]]:
        return {"replies": [ChatMessage.from_assistant('{"documents": [{"index": 2}, {"index": 1}, {"index": 3}]}')]}


class TestInAPipeline:
    TEXTS = ("lamp lamp lamp lens", "lens lens lens lamp", "lamp lamp lens keeper", "lens lamp harbour")

    def pipeline(self, ranker: CacheOrderRanker | LLMRanker | None) -> Pipeline:
        store = InMemoryDocumentStore()
        store.write_documents([Document(content=text) for text in self.TEXTS], policy=DuplicatePolicy.SKIP)
        pipeline = Pipeline()
        pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=4))
        pipeline.add_component("prompts", PromptBuilder(TEMPLATE, required_variables="*"))
        if ranker is not None:
            pipeline.add_component("ranker", ranker)
            pipeline.connect("retriever.documents", "ranker.documents")
        pipeline.connect(f"{'retriever' if ranker is None else 'ranker'}.documents", "prompts.documents")
        return pipeline

    @staticmethod
    def data(question: str, **ranker: Any) -> dict[str, Any]:
        asked = {"retriever": {"query": question}, "prompts": {"question": question}}
        return asked | ({"ranker": ranker} if ranker else {})

    @staticmethod
    def lines(result: dict[str, Any]) -> list[str]:
        return list(result["prompts"]["prompt"].splitlines()[:-1])

    QUESTIONS = ("lamp", "lens", "keeper lens", "harbour lamp")

    async def test_prompts_hold_the_same_documents_and_begin_alike(self, orderer: Orderer) -> None:
        plain, ordered = self.pipeline(None), self.pipeline(CacheOrderRanker(orderer))
        before = [self.lines(plain.run(self.data(question))) for question in self.QUESTIONS]
        after = [self.lines(ordered.run(self.data(question))) for question in self.QUESTIONS]
        assert list(map(sorted, after)) == list(map(sorted, before))
        assert before[1] != before[0]
        assert after[1] == after[0]
        asynchronous = await ordered.run_async(self.data("lens"))
        assert self.lines(asynchronous) == after[0]

    async def test_scope_and_top_k_of_a_run_replace_those_of_the_ranker(self, orderer: Orderer) -> None:
        pipeline = self.pipeline(CacheOrderRanker(orderer, scope="ours"))
        first, second = (self.lines(self.pipeline(None).run(self.data(question))) for question in ("lamp", "lens"))
        assert self.lines(pipeline.run(self.data("lamp"))) == first
        assert self.lines(pipeline.run(self.data("lens", scope="theirs"))) == second
        assert self.lines(await pipeline.run_async(self.data("lens", scope="nobody's"))) == second
        assert self.lines(pipeline.run(self.data("lens", scope="ours"))) == first
        assert len(self.lines(pipeline.run(self.data("lens", top_k=2)))) == 2

    async def test_it_accepts_the_inputs_of_the_ranker_that_it_replaces(self, orderer: Orderer) -> None:
        data = self.data("lamp", query="lamp", top_k=2)
        replaced = self.pipeline(LLMRanker(chat_generator=Judge()))
        assert len(self.lines(replaced.run(data))) == 2
        pipeline = self.pipeline(CacheOrderRanker(orderer))
        best_two = self.lines(self.pipeline(None).run(self.data("lamp")))[:2]
        assert self.lines(pipeline.run(data)) == self.lines(await pipeline.run_async(data)) == best_two

    async def test_a_pipeline_from_yaml_orders_as_the_one_that_was_written(self) -> None:
        pipeline = self.pipeline(CacheOrderRanker(Orderer(block_size=1), top_k=4, scope="a tenant", key=id_of))
        again = Pipeline.loads(pipeline.dumps(), allowed_modules=["ragorder", __name__])
        assert again.to_dict()["components"] == pipeline.to_dict()["components"]
        store = pipeline.get_component("retriever").document_store
        again.get_component("retriever").document_store.write_documents(
            store.filter_documents(), policy=DuplicatePolicy.OVERWRITE
        )
        for question in self.QUESTIONS:
            data = self.data(question)
            assert self.lines(await again.run_async(data)) == self.lines(pipeline.run(data))

    def test_a_copied_pipeline_shares_the_orderer(self, orderer: Orderer) -> None:
        pipeline = Pipeline()
        pipeline.add_component("ranker", CacheOrderRanker(orderer))
        pipeline.run({"ranker": {"documents": found("a", "b")}})
        copied = copy.deepcopy(pipeline)
        assert names(copied.run({"ranker": {"documents": found("b", "a")}})["ranker"]["documents"]) == ["a", "b"]
