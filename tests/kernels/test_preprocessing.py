"""FusionRAG's offline stage: each document's KV after its neighbours, in a folder that a disk tier opens."""

from __future__ import annotations

import copy
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import model_of, models_held
from support.killed import changes_of
from support.rings import ALL, length
from support.small_engine import Make, ask, difference, exactly, small_model, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.preprocessing.builder import FusionBuilder, SourceDocument, WriteFailedError
from ragorder.kernels.preprocessing.manifest import BuildError, Manifest, ManifestError
from ragorder.kernels.preprocessing.neighbours import GivenNeighbours, Neighbours, PreprocessingSettings
from ragorder.kernels.preprocessing.preprocessor import Prefill, Preprocessor
from ragorder.kernels.store import StoreRefusedError
from ragorder.kernels.store.format import ChunkName

PREFIX = tokens(21, 1)
ENGINE = EngineSettings(device_tokens=2048, host_bytes=0, verify=False)

Open = Callable[..., FusionBuilder]


class Following(Neighbours):
    """The documents that follow in the corpus, in a ring."""

    def nearest(self, ids: Sequence[str], vectors: Any, count: int) -> list[list[int]]:
        every = len(ids)
        return [[(place + step) % every for step in range(1, min(count, every - 1) + 1)] for place in range(every)]


def corpus(count: int, seed: int = 0) -> list[SourceDocument]:
    """Documents of 5 to 40 tokens."""
    lengths = random.Random(seed)
    return [
        SourceDocument(f"d{n}", f"text {n}", tokens(lengths.randint(5, 40), 1000 * seed + n + 2)) for n in range(count)
    ]


def files(folder: Path) -> dict[str, bytes]:
    """The chunks' bytes. A name is that of its key; which number of a write it has is chance."""
    found = {}
    for path in (folder / "chunks").glob("??/*"):
        name = ChunkName.parse(path.name)
        assert name is not None and name.finished
        assert name.digest not in found
        found[name.digest] = path.read_bytes()
    return found


def rows(folder: Path) -> list[Any]:
    manifest = Manifest.of(folder)
    try:
        return list(manifest)
    finally:
        manifest.close()


@pytest.fixture
def open_builder(model: Any, tmp_path: Path) -> Iterator[Open]:
    """Builders on copies of the model. Closed in the end, if they are not."""
    opened: list[FusionBuilder] = []

    def made(
        folder: Path | str = "build",
        choice: Neighbours | None = None,
        *,
        of: Any = None,
        engine: EngineSettings = ENGINE,
        prefix: Sequence[int] = PREFIX,
        salt: str | None = None,
        **settings: Any,
    ) -> FusionBuilder:
        chosen = PreprocessingSettings(**{"neighbours": 2, "batch_documents": 3} | settings)
        patched = PatchedModel(copy.deepcopy(model if of is None else of), engine)
        path = tmp_path / folder
        opened.append(FusionBuilder(patched, path, prefix, choice or Following(), chosen, engine, salt=salt))
        return opened[-1]

    yield made
    for builder in opened:
        close(builder)


def built(
    open_builder: Open, documents: Sequence[SourceDocument], *arguments: Any, made: Any = None, **settings: Any
) -> FusionBuilder:
    """A builder that has planned and built these documents, and is open."""
    builder = open_builder(*arguments, **settings)
    builder.plan(documents, made)
    list(builder.build())
    return builder


def close(builder: FusionBuilder) -> None:
    if model_of(builder)[0] in models_held():
        builder.close()


@pytest.fixture
def preprocessor(model: Any) -> Iterator[Callable[..., Preprocessor]]:
    patched: list[PatchedModel] = []

    def made(prefix: Sequence[int] = PREFIX, workspace_tokens: int = 1024, **settings: Any) -> Preprocessor:
        patched.append(PatchedModel(copy.deepcopy(model), ENGINE))
        return Preprocessor(patched[-1], prefix, workspace_tokens=workspace_tokens, **settings)

    yield made
    for each in patched:
        each.restore()


def full_kv(plain: Any, token_ids: Sequence[int], mask: Any = None) -> Any:
    """KV (tokens, layers, 2, heads, dim) of a prompt in transformers, under a mask (tokens, tokens) of what is seen."""
    arguments = {}
    if mask is not None:
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        arguments["attention_mask"] = bias[None, None]
    with torch.no_grad():
        cache = plain(torch.tensor([list(token_ids)]), use_cache=True, **arguments).past_key_values
    layers = [torch.stack((layer.keys[0], layer.values[0])).permute(2, 0, 1, 3) for layer in cache.layers]
    return torch.stack(layers, 1)


def moved(model: Any, kv: Any, by: int) -> Any:
    from ragorder.kernels.fusion.rotation import Rotation

    rotation = Rotation.of(model)
    found = kv.clone()
    for layer in range(kv.shape[1]):
        found[:, layer, 0] = rotation.shift(kv[:, layer, 0], by, layer)
    return found


class TestKVAfterNeighbours:
    """Equations 5 and 10 against transformers."""

    @pytest.mark.parametrize("lengths", [(19,), (1, 1, 40), (16, 16)])
    def test_a_document_has_seen_all_neighbours_and_they_not_each_other(
        self, preprocessor: Any, plain: Any, lengths: tuple[int, ...]
    ) -> None:
        neighbours = [tokens(count, 10 + count + place) for place, count in enumerate(lengths)]
        document = tokens(30, 3)
        maker = preprocessor()
        *kv_alone, alone = maker.compute([Prefill(each) for each in (*neighbours, document)])
        [kv] = maker.compute([Prefill(document, kv_alone)])
        # The first layer's KV depends on the token alone, the second's on what was seen.
        assert (kv - alone)[:, 0].abs().max() <= 1e-4
        assert (kv - alone)[:, 1].abs().max() > 0.01
        prompt = [*PREFIX, *(token for neighbour in neighbours for token in neighbour), *document]
        seen = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
        start = len(PREFIX)
        for neighbour in neighbours:
            end = start + len(neighbour)
            seen[start:end, len(PREFIX) : start] = False
            start = end
        expected = full_kv(plain, prompt, seen)[start:]
        assert (kv - moved(plain, expected, len(PREFIX) - start)).abs().max() <= 1e-4

    @pytest.mark.parametrize("max_batch_tokens", [7, 64])
    def test_batches_and_steps_change_nothing(self, preprocessor: Any, max_batch_tokens: int) -> None:
        maker = preprocessor()
        documents = [tokens(count, count) for count in (5, 16, 40, 1)]
        alone = [maker.compute([Prefill(document)])[0] for document in documents]
        prefills = [Prefill(document, alone[place + 1 :]) for place, document in enumerate(documents)]
        one_by_one = [maker.compute([prefill])[0] for prefill in prefills]
        together = preprocessor(max_batch_tokens=max_batch_tokens).compute(prefills)
        for one, other in zip(one_by_one, together, strict=True):
            assert (one - other).abs().max() <= 1e-5

    def test_a_workspace_bounds_what_is_computed_together(self, preprocessor: Any) -> None:
        maker = preprocessor(workspace_tokens=100)
        assert maker.longest == maker.workspace_tokens == 96
        assert maker.room(12, 0) == 48 and maker.room(11, 0) == 32
        with pytest.raises(ValueError, match="2 documents do not fit into 96 tokens"):
            maker.compute([Prefill(tokens(30, 1)), Prefill(tokens(30, 2))])

    def test_a_system_prompt_is_needed_that_leaves_room(self, preprocessor: Any) -> None:
        with pytest.raises(ValueError, match="the system prompt is empty"):
            preprocessor([])
        with pytest.raises(ValueError, match="21 tokens, but only 16 fit"):
            preprocessor(workspace_tokens=16)


class TestABuildIsADiskTier:
    def test_without_neighbours_an_engine_finds_exact_prefixes(
        self, make: Make, open_builder: Open, plain: Any, tmp_path: Path
    ) -> None:
        documents = corpus(5)
        with open_builder(neighbours=0) as builder:
            builder.plan(documents)
            assert [each.id for each in builder.build()] == ["d0", "d1", "d2", "d3", "d4"]
        for _ in range(2):
            engine = make(disk_path=tmp_path / "build")
            for document in documents:
                request = ask([PREFIX, document.token_ids], tokens(7, 9), max_tokens=2)
                [completion] = exactly(engine, plain, request)
                assert completion.cached.total == len(PREFIX) + len(document.token_ids)
                assert completion.cached.disk >= len(document.token_ids)
            engine.close()

    def test_after_neighbours_it_is_never_found_as_a_prefix(
        self, make: Make, open_builder: Open, tmp_path: Path
    ) -> None:
        documents = corpus(5)
        built(open_builder, documents).close()
        engine = make(disk_path=tmp_path / "build")
        [completion] = engine.generate([ask([PREFIX, documents[3].token_ids], tokens(7, 9))])
        assert completion.cached.total == len(PREFIX)

    def test_an_engine_that_fuses_takes_documents_from_it_after_a_restart(
        self, make: Make, open_builder: Open, plain: Any, tmp_path: Path
    ) -> None:
        """A document computed after the only other one of the prompt has the KV of full attention: nothing is lost."""
        documents = corpus(5)
        questions = [ask([PREFIX, documents[4].token_ids, documents[3].token_ids], tokens(7, n)) for n in range(3)]
        requests = [replace(question, prefix_tokens=len(PREFIX)) for question in questions]
        lengths = {number: len(documents[number].token_ids) for number in (3, 4)}
        lost: dict[str, list[float]] = {}
        for name, graph in (("seen", {"d3": ["d4"]}), ("unseen", {"d0": ["d1"]})):
            built(open_builder, documents, name, GivenNeighbours(graph)).close()
            lost[name] = []
            for request in requests:
                engine = make(disk_path=tmp_path / name, reuse="fused", recompute=0.0)
                [done] = engine.generate([request])
                assert (done.cached.disk, done.fused.disk, done.recomputed) == (len(PREFIX) + lengths[4], lengths[3], 0)
                lost[name].append(difference(done, plain, request))
                engine.close()
        assert max(lost["seen"]) <= 1e-4
        assert min(lost["unseen"]) > 1e-2

    def test_the_engine_counts_and_logs_what_keeps_requests_from_using_it(
        self, make: Make, open_builder: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        built(open_builder, corpus(3)).close()
        known = corpus(3)[1].token_ids
        engine = make(disk_path=tmp_path / "build", reuse="fused")
        cases = {
            "used": (PREFIX, known),
            "other_prefix": (tokens(5, 77), known),
            "other_documents": (PREFIX, tokens(12, 78)),
        }
        for fit, (prefix, document) in cases.items():
            for _ in range(2):
                request = ask([prefix, document, document], tokens(7, 9))
                engine.generate([replace(request, prefix_tokens=len(prefix))])
            assert engine.stats().build_fits[fit] == 2
        request = replace(ask([PREFIX, known], tokens(7, 9), "tenant"), prefix_tokens=len(PREFIX))
        engine.generate([request, replace(request, fusion="exact"), ask([], tokens(7, 9))])
        assert engine.stats().build_fits == {"used": 2, "other_model": 0, "other_prefix": 3, "other_documents": 2}
        engine.close()
        said = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
        assert len(said) == 2
        assert "after a system prompt of 21 tokens, and a request begins with another one, of 5 tokens" in said[0]
        assert "none of its documents" in said[1]

    def test_the_engine_logs_that_it_is_another_models(
        self, make: Make, open_builder: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = small_model(hidden_size=32)
        built(open_builder, corpus(1), of=other, made={"recipe": {"model": "org/other"}}).close()
        engine = make(disk_path=tmp_path / "build", reuse="fused")
        assert "is not used: it was built for org/other, and this is " in caplog.text
        request = ask([PREFIX, corpus(1)[0].token_ids], tokens(7, 9))
        engine.generate([replace(request, prefix_tokens=len(PREFIX))])
        assert engine.stats().build_fits == {"used": 0, "other_model": 1, "other_prefix": 0, "other_documents": 0}

    def test_tenants_share_nothing(self, open_builder: Open, tmp_path: Path) -> None:
        found = []
        for place, salt in enumerate((None, "", "a")):
            built(open_builder, corpus(2), str(place), salt=salt).close()
            found.append(files(tmp_path / str(place)).keys())
        assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]

    def test_is_for_its_owner_only(self, open_builder: Open, tmp_path: Path) -> None:
        with open_builder() as builder:
            builder.plan(corpus(1))
        for path in [tmp_path / "build", *(tmp_path / "build").rglob("*")]:
            assert not path.stat().st_mode & 0o077, path

    def test_documents_of_the_same_tokens_have_one_copy(self, open_builder: Open, tmp_path: Path) -> None:
        documents = corpus(3)
        twin = SourceDocument("twin", "same", documents[0].token_ids)
        with open_builder() as builder:
            builder.plan([*documents, twin])
            assert len(list(builder.build())) == 3
            builder.remove(["d0"])
            assert builder.estimate().documents == 0
            builder.remove(["twin"])
            assert len(files(tmp_path / "build")) == 3

    def test_as_many_neighbours_as_fit(self, open_builder: Open, tmp_path: Path) -> None:
        engine = ENGINE.model_copy(update={"max_model_len": 64})
        documents = [SourceDocument(str(n), "", tokens(count, n)) for n, count in enumerate((20, 30, 10, 43))]
        with open_builder(engine=engine, neighbours=3) as builder:
            builder.plan(documents)
            assert len(list(builder.build())) == 4
        found = rows(tmp_path / "build")
        contents = [each.content for each in found]
        # 43 tokens are left after the system prompt: the next ones that fit, the nearest first.
        assert [[contents.index(each) for each in row.neighbours] for row in found] == [[2], [2], [0], []]

    def test_the_estimate_is_what_is_written(self, open_builder: Open, tmp_path: Path) -> None:
        with open_builder() as builder:
            builder.plan(corpus(7))
            estimate = builder.estimate()
            assert (estimate.documents, estimate.tokens) == (7, sum(len(each.token_ids) for each in corpus(7)))
            built = list(builder.build())
            assert sum(each.tokens for each in built) == estimate.tokens
            on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "build" / "chunks").glob("??/*"))
            assert sum(each.bytes for each in built) < estimate.bytes == on_disk
            assert builder.estimate().documents == builder.estimate().bytes == 0


def build_ten(model: Any, folder: Path) -> None:
    patched = PatchedModel(model, ENGINE)
    settings = PreprocessingSettings(neighbours=2, batch_documents=3)
    with FusionBuilder(patched, folder, PREFIX, Following(), settings, ENGINE) as builder:
        if not builder.facts:
            builder.plan(corpus(10), {"made": "whole"})
        builder.verify()
        for _ in builder.build():
            pass


class TestInterrupted:
    @pytest.fixture(scope="class")
    def whole_folder(self, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A build of 10 documents that nothing has interrupted."""
        folder = tmp_path_factory.mktemp("builds") / "whole"
        build_ten(copy.deepcopy(model), folder)
        return folder

    @pytest.fixture
    def whole(self, whole_folder: Path) -> dict[str, bytes]:
        return files(whole_folder)

    @pytest.mark.parametrize("done", [0, 4, 9])
    def test_it_goes_on_with_the_same_bytes(
        self, open_builder: Open, whole: dict[str, bytes], whole_folder: Path, tmp_path: Path, done: int
    ) -> None:
        with open_builder() as builder:
            builder.plan(corpus(10))
            assert len(list(islice(builder.build(), done))) == done
        with open_builder() as builder:
            assert builder.is_planned(corpus(10)) and not builder.is_planned(corpus(9))
            assert builder.estimate().documents == 10 - done
            assert len(list(builder.build())) == 10 - done
        assert files(tmp_path / "build") == whole
        assert rows(tmp_path / "build") == rows(whole_folder)

    def test_it_needs_no_memory_for_neighbours(
        self, open_builder: Open, whole: dict[str, bytes], tmp_path: Path
    ) -> None:
        built(open_builder, corpus(10), host_bytes=0).close()
        assert files(tmp_path / "build") == whole

    def test_parts_are_one_build(self, open_builder: Open, whole: dict[str, bytes], tmp_path: Path) -> None:
        parts: dict[str, bytes] = {}
        for number in (1, 2, 3):
            with open_builder(f"part {number}") as builder:
                builder.plan(corpus(10))
                list(builder.build((number, 3)))
                assert builder.estimate((number, 3)).documents == 0
            found = files(tmp_path / f"part {number}")
            # The system prompt is in each.
            assert len(parts.keys() & found.keys()) == (1 if number > 1 else 0)
            parts |= found
        assert parts == whole
        with pytest.raises(BuildError, match="shard 4/3: give i/n"):
            list(open_builder("x").build((4, 3)))

    def test_killed_anywhere_the_next_one_ends_with_the_same_bytes(
        self, model: Any, whole: dict[str, bytes], whole_folder: Path, tmp_path: Path
    ) -> None:
        """Killed with SIGKILL at calls of the system from the folder's making to the last rename, evenly spread."""
        folder = tmp_path / "build"
        build = partial(build_ten, model, folder)
        counted = changes_of(partial(build_ten, model, tmp_path / "counted"))
        assert counted is not None and counted >= 50
        kills = length(50, 4)
        places = [1 + (2 * number + 1) * counted // (2 * kills) for number in range(kills)]
        unfinished = 0
        for place in places:
            assert changes_of(build, killed_at=place) is None, place
            unfinished += len(list((folder / "chunks").glob("??/*.tmp")))
            assert changes_of(build) is not None
            assert files(folder) == whole, place
            assert rows(folder) == rows(whole_folder), place
            shutil.rmtree(folder)
        assert unfinished > 0 or not ALL


class TestAnotherCorpus:
    def test_further_documents_are_computed_and_others_stay_until_refreshed(
        self, open_builder: Open, tmp_path: Path
    ) -> None:
        documents = corpus(6)
        with built(open_builder, documents[:4]) as builder:
            before = files(tmp_path / "build")
            assert builder.add(documents) == 2
            assert [each.id for each in builder.build()] == ["d4", "d5"]
            after = files(tmp_path / "build")
            assert before.items() < after.items() and len(after) == len(before) + 2
            # In the ring, two were followed by others before: d2 (d3, d0) and d3 (d0, d1).
            assert builder.stale() == ["d2", "d3"]
            assert builder.add(documents) == 0
            # They are computed again when that is asked for.
            assert builder.refresh() == 2
            assert sorted(each.id for each in builder.build()) == ["d2", "d3"]
            assert builder.stale() == [] and builder.refresh() == 0
        built(open_builder, documents, "fresh").close()
        assert files(tmp_path / "build").keys() == files(tmp_path / "fresh").keys()
        assert [(row.id, row.neighbours) for row in rows(tmp_path / "build")] == [
            (row.id, row.neighbours) for row in rows(tmp_path / "fresh")
        ]

    def test_a_changed_text_takes_the_place_of_the_former(self, open_builder: Open, tmp_path: Path) -> None:
        changed = SourceDocument("d1", "new", tokens(12, 77))
        with built(open_builder, corpus(4)) as builder:
            before = files(tmp_path / "build")
            assert builder.add([changed, corpus(4)[2]]) == 1
            assert len(files(tmp_path / "build")) == len(before) - 1
            assert [each.id for each in builder.build()] == ["d1"]
            assert len(builder) == 4
            # Those that had seen the former text.
            assert builder.stale() == ["d0", "d3"]

    def test_what_is_removed_is_gone_and_those_that_had_seen_it_stay(self, open_builder: Open, tmp_path: Path) -> None:
        with built(open_builder, corpus(5)) as builder:
            before = files(tmp_path / "build")
            builder.remove(["d2", "d2"])
            after = files(tmp_path / "build")
            assert after.items() < before.items() and len(after) == len(before) - 1
            assert builder.stale() == ["d0", "d1"]
            assert builder.estimate().documents == 0 and list(builder.build()) == []
            with pytest.raises(BuildError, match="no document 'x'"):
                builder.remove(["d0", "x"])
            assert len(builder) == 4

    def test_a_lost_copy_whose_neighbour_is_gone_gets_another_one(self, open_builder: Open, tmp_path: Path) -> None:
        with built(open_builder, corpus(5)) as builder:
            builder.remove(["d2"])
        for path in (tmp_path / "build" / "chunks").glob("??/*"):
            path.unlink()
        with open_builder() as builder:
            assert [each.id for each in builder.build()] == ["d0", "d1", "d3", "d4"]
            assert builder.stale() == []

    def test_a_graph_may_leave_documents_without_neighbours(self, open_builder: Open, tmp_path: Path) -> None:
        built(open_builder, corpus(3), choice=GivenNeighbours({"d0": ["d1", "x"]})).close()
        assert [len(row.neighbours) for row in rows(tmp_path / "build")] == [1, 0, 0]


class TestRefused:
    def test_another_models_folder(self, open_builder: Open, tmp_path: Path) -> None:
        built(open_builder, corpus(2)).close()
        before = files(tmp_path / "build")
        other = small_model()
        with torch.no_grad():
            next(other.parameters())[0, 0] += 1
        engines = [ENGINE.model_copy(update=update) for update in ({"dtype": "bfloat16"}, {"block_size": 32})]
        for arguments in ({"of": other}, *({"engine": engine} for engine in engines)):
            with pytest.raises(StoreRefusedError, match="another model, or of the same one set up differently"):
                open_builder(**arguments)
        assert files(tmp_path / "build") == before

    def test_a_disk_that_is_too_small_before_anything_is_computed(
        self, open_builder: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with open_builder() as builder:
            builder.plan(corpus(4))
            needed = builder.estimate().bytes
            monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=needed - 1, f_frsize=1))
            with pytest.raises(
                BuildError, match=f"{needed - 1:,} bytes free.*4 documents.*needs {needed:,}: make room"
            ):
                next(builder.build())
            assert files(tmp_path / "build") == {}
            monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=needed, f_frsize=1))
            assert len(list(builder.build())) == 4

    def test_a_disk_that_fills_up_keeps_what_is_there(
        self, open_builder: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        write, written = os.writev, 0

        def fill_up(descriptor: int, buffers: Any) -> int:
            nonlocal written
            written += 1
            if written > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, buffers)

        with open_builder() as builder:
            builder.plan(corpus(6))
            with monkeypatch.context() as patch:
                patch.setattr(os, "writev", fill_up)
                with pytest.raises(WriteFailedError, match="ENOSPC"):
                    list(builder.build())
            assert len(files(tmp_path / "build")) == 3
            assert builder.estimate().documents == 4
            assert len(list(builder.build())) == 4

    @pytest.mark.parametrize(
        ("documents", "problem"),
        [
            ([("a", 3), ("b", 3), ("a", 4)], "document 'a' occurs twice"),
            ([("a", 0), ("b", 1)], "document 'a' has no tokens"),
            ([("a", 3), ("b", 1500), ("c", 2000)], r"document 'b' \(and 1 more\) has more than the 1,003 tokens"),
        ],
    )
    def test_documents_that_cannot_be_computed(
        self, open_builder: Open, documents: list[tuple[str, int]], problem: str
    ) -> None:
        with open_builder() as builder:
            with pytest.raises(BuildError, match=problem):
                builder.plan([SourceDocument(id, "", tokens(count, 3)) for id, count in documents])
            assert builder.facts == {}

    @pytest.mark.parametrize("neighbours", [0, 1])
    def test_kv_that_is_not_all_numbers(self, open_builder: Open, tmp_path: Path, neighbours: int) -> None:
        model = small_model()
        with torch.no_grad():
            model.get_input_embeddings().weight[299] = float("inf")
        texts = {"a": [1, 2, 3], "b": [4, 299, 5], "c": [6, 7]}
        documents = [SourceDocument(name, "", ids) for name, ids in texts.items()]
        with open_builder(of=model, neighbours=neighbours, batch_documents=2) as builder:
            builder.plan(documents)
            with pytest.raises(BuildError, match=r"the KV of document 'b' contains NaN or inf.*leave it out"):
                list(builder.build())
            # The system prompt, and what was computed before it.
            assert len(files(tmp_path / "build")) == 2 - neighbours
            builder.remove(["b"])
            builder.refresh()
            assert [each.id for each in builder.build()] == (["a", "c"] if neighbours else ["c"])

    def test_a_folder_without_a_build_or_with_a_damaged_manifest(self, tmp_path: Path, open_builder: Open) -> None:
        with pytest.raises(ManifestError, match="has no build"):
            Manifest.of(tmp_path)
        open_builder().close()
        with pytest.raises(ManifestError, match="interrupted before it began"):
            Manifest.of(tmp_path / "build")
        with open_builder() as builder:
            builder.plan(corpus(2))
        [path] = (tmp_path / "build").glob("*.sqlite")
        path.write_bytes(b"no database" * 1000)
        with pytest.raises(ManifestError, match="build into another folder"):
            open_builder()
