"""The embedded engine: caching, scheduling, sampling, and failures."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.inside import cache_of, host_of, preempt, runner_of, scheduler_of
from support.small_engine import (
    BLOCK,
    VOCABULARY,
    Make,
    ask,
    block_bytes,
    crowd,
    difference,
    exactly,
    greedy,
    run,
    small_tiers,
    tokens,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import (
    EngineSettings,
    ModelLoadError,
    Request,
    RequestRefusedError,
    Sampling,
    TieredEngine,
    UnsupportedModelError,
)
from ragorder.kernels.engine.detokenize import TextStream
from ragorder.kernels.engine.runner import choose
from ragorder.kernels.paging import BlockPool, ThreadTransfers


def used_blocks(engine: TieredEngine) -> int:
    """Blocks that are taken although nothing is cached: 0, or something was not given back."""
    engine.clear_cache()
    return cache_of(engine).pool.used_blocks


@contextmanager
def spoiled(engine: TieredEngine, spoil: Callable[[Any], Any]) -> Iterator[None]:
    """The model's logits are what `spoil` makes of them."""
    forward = runner_of(engine).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_of(engine), "forward", lambda *arguments: spoil(forward(*arguments).clone()))
        yield


def hold_loads(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until the event is set, nothing arrives on the device from the host."""
    gate, loads, start = threading.Event(), ThreadTransfers(), ThreadTransfers.start

    def start_apart(transfers: ThreadTransfers, source: BlockPool, *blocks: Any) -> Any:
        return start(transfers if source is cache_of(engine).pool else loads, source, *blocks)

    monkeypatch.setattr(ThreadTransfers, "start", start_apart)
    monkeypatch.setattr(host_of(cache_of(engine)).pool, "settle", lambda: gate.wait(60))
    return gate


class TestExactness:
    @pytest.mark.parametrize("max_batch_tokens", [1, 16, 64])
    def test_a_prompt_computed_in_chunks_is_the_same(self, make: Make, plain: Any, max_batch_tokens: int) -> None:
        engine = make(max_batch_tokens=max_batch_tokens)
        documents = [tokens(33, 1), tokens(20, 2)]
        requests = [ask(documents, tokens(9, 3)), ask(documents[:1], tokens(30, 4), max_tokens=3)]
        for _ in range(2):
            exactly(engine, plain, *requests)

    @pytest.mark.parametrize("block_size", [1, 48])
    def test_boundaries_may_lie_anywhere_in_a_block(self, make: Make, plain: Any, block_size: int) -> None:
        engine = make(block_size=block_size)
        system = tokens(5, 1)
        for length in (1, 10, 11, 12, 27, 48, 123, 128):
            document = tokens(length, length)
            for question in (tokens(1, 7), tokens(12, 8)):
                request = ask([system, document], question, max_tokens=2)
                exactly(engine, plain, request)

    def test_many_requests_of_one_step_that_part_within_a_block(self, make: Make, plain: Any) -> None:
        """They arrive together: a later request may use what is computed for an earlier one in the same step."""
        engine = make()
        system = tokens(21, 1)
        documents = [tokens(length, length) for length in (30, 35, 18)]
        requests = [
            ask([system, documents[a], documents[b]], tokens(5 + a + b, a + 10 * b), max_tokens=4)
            for a in range(3)
            for b in range(3)
            if a != b
        ]
        exactly(engine, plain, *requests)
        assert engine.stats().cached.total >= 4 * 21

    def test_without_documents_a_prompt_is_cached_in_chunks(self, make: Make, plain: Any) -> None:
        engine = make(chunk_tokens=32)
        prompt = tokens(100, 1)
        engine.generate([Request(prompt)])
        request = Request(prompt[:70] + tokens(20, 2), keep_logits=True)
        [completion] = exactly(engine, plain, request)
        assert completion.cached.device == 64

    def test_salts_share_nothing(self, make: Make, plain: Any) -> None:
        engine = make()
        document, question = tokens(40, 1), tokens(5, 2)
        found = [
            engine.generate([ask([document], question, salt)])[0].cached.total for salt in (None, "a", "b", "a", None)
        ]
        assert found == [0, 0, 0, 40, 40]

    def test_random_traffic_over_small_tiers_is_exact(self, make: Make, plain: Any, tmp_path: Path, model: Any) -> None:
        """Documents come, go to host and disk, and come back, while others are computed."""
        engine = make(**small_tiers(model, tmp_path, 20), max_batch_tokens=100, max_requests=3)
        random = Random(5)
        documents = [tokens(random.randint(10, 60), seed) for seed in range(9)]
        seen: Counter[str] = Counter()
        for _ in range(12):
            requests = [
                ask(
                    random.sample(documents, random.randint(1, 3)),
                    tokens(random.randint(1, 9), random.randint(0, 99)),
                    max_tokens=random.randint(1, 6),
                )
                for _ in range(random.randint(1, 5))
            ]
            for completion, request in zip(exactly(engine, plain, *requests), requests, strict=True):
                # Of one token, too, which `exactly` leaves out.
                assert list(completion.token_ids) == greedy(plain, request)
                seen.update(completion.cached._asdict())
        assert min(seen[tier] for tier in ("device", "host", "disk")) > 0
        assert used_blocks(engine) == 0


class TestTiers:
    def test_what_left_the_host_stays_on_the_disk(self, make: Make, plain: Any, model: Any, tmp_path: Path) -> None:
        tiers = small_tiers(model, tmp_path, 8)
        engine = make(**tiers)
        first = ask([tokens(37, 1), tokens(30, 2)], tokens(9, 3))
        engine.generate([first])
        for seed in range(5):
            engine.generate([ask([tokens(90, 10 + seed)], tokens(9, 3))])
        [again] = exactly(engine, plain, first)
        assert again.cached == (0, 0, 67)
        engine.close()

        restarted = make(**tiers)
        last = ask([tokens(90, 12)], tokens(4, 8))
        for request, cached in ((first, 67), (last, 90)):
            [completion] = exactly(restarted, plain, request)
            assert completion.cached == (0, 0, cached)

    @pytest.mark.parametrize(("backlog", "kept"), [("1KiB", False), ("1MiB", True)])
    def test_the_backlog_is_bounded(self, make: Make, plain: Any, tmp_path: Path, backlog: str, kept: bool) -> None:
        tiers = {"device_tokens": 8 * BLOCK, "disk_path": tmp_path / "kv", "disk_bytes": "16MiB"}
        engine = make(**tiers, disk_backlog_bytes=backlog)
        request = ask([tokens(90, 1)], tokens(9, 3))
        engine.generate([request])
        crowd(engine)
        [completion] = exactly(engine, plain, request)
        assert (completion.cached.disk > 0) == kept
        assert ((engine.stats().cache.disk.refused or {}).get("backlog", 0) > 0) != kept

    def test_a_prefix_being_loaded_delays_no_other_request(
        self, make: Make, plain: Any, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make(device_tokens=16 * BLOCK, host_bytes=64 * block_bytes(model))
        slow = ask([tokens(90, 1)], tokens(9, 3))
        engine.generate([slow])
        crowd(engine)
        gate = hold_loads(engine, monkeypatch)
        loading = engine.add(slow)
        quick = engine.add(ask([], tokens(20, 4)))
        ended = [update.request_id for _ in range(5) for update in engine.step() if update.completion]
        assert ended == [quick]
        assert engine.stats().waiting == 1
        gate.set()
        done = run(engine)
        assert list(done) == [loading]
        assert done[loading].cached == (0, 90, 0)
        assert difference(done[loading], plain, slow) <= 1e-4

    def test_of_many_documents_only_the_first_are_kept(self, make: Make, plain: Any) -> None:
        engine = make(max_cached_documents=2)
        documents = [tokens(30, seed) for seed in range(5)]
        request = ask(documents, tokens(9, 7), max_tokens=3)
        for cached in (0, 60):
            [completion] = exactly(engine, plain, request)
            assert completion.cached.total == cached
        assert engine.stats().cache.device.nodes == 2
        [fewer] = engine.generate([ask(documents[:1], tokens(9, 8))])
        assert fewer.cached.total == 30

    def test_a_prefix_is_a_node_of_its_own_beside_the_documents(self, make: Make, plain: Any) -> None:
        engine = make(max_cached_documents=1)
        system, first, second = tokens(20, 1), tokens(30, 2), tokens(30, 3)
        engine.generate([Request([*system, *first, *second, 5], [50, 80], prefix_tokens=20)])
        request = Request([*system, *second, 5], [50], prefix_tokens=20, keep_logits=True)
        [completion] = exactly(engine, plain, request)
        assert completion.cached.total == 20
        assert engine.generate([Request([*system, *first, 6], [50], prefix_tokens=20)])[0].cached.total == 50
        for prefix_tokens in (-1, 50, 999):
            [completion] = engine.generate([Request([*system, *second, 5], [50], prefix_tokens=prefix_tokens)])
            assert completion.finish_reason == "length"


class TestScheduling:
    def test_requests_of_different_age_share_steps(self, make: Make, plain: Any) -> None:
        engine = make()
        early = ask([], tokens(20, 1), max_tokens=8)
        late = ask([], tokens(30, 2), max_tokens=3)
        first = engine.add(early)
        assert [update.request_id for update in engine.step()] == [first]
        second = engine.add(late)
        assert [update.request_id for update in engine.step()] == [first, second]
        assert engine.stats().computed_tokens == 20 + 1 + 30
        done = run(engine)
        assert list(done[first].token_ids) == greedy(plain, early)
        assert list(done[second].token_ids) == greedy(plain, late)

    def test_a_step_computes_no_more_than_max_batch_tokens_in_the_order_of_arrival(self, make: Make) -> None:
        engine = make(max_batch_tokens=32)
        ids = [engine.add(ask([], tokens(20, seed), max_tokens=2)) for seed in range(3)]
        computed, firsts = [], []
        while engine.has_unfinished:
            before = engine.stats().computed_tokens
            firsts += [update.request_id for update in engine.step() if update.request_id not in firsts]
            computed.append(engine.stats().computed_tokens - before)
        assert max(computed) <= 32
        assert computed[0] == 32
        assert firsts == ids

    def test_when_blocks_run_out_the_youngest_waits_and_nothing_is_lost(self, make: Make, plain: Any) -> None:
        engine = make(device_tokens=10 * BLOCK)
        requests = [ask([tokens(20, seed)], tokens(10, seed + 9), max_tokens=60) for seed in range(3)]
        ids = [engine.add(request) for request in requests]
        ended = []
        texts: dict[int, list[int]] = {request_id: [] for request_id in ids}
        while engine.has_unfinished:
            for update in engine.step():
                texts[update.request_id] += update.token_ids
                if update.completion is not None:
                    ended.append(update.request_id)
        assert ended == ids
        assert engine.stats().preemptions > 0
        for request_id, request in zip(ids, requests, strict=True):
            assert texts[request_id] == greedy(plain, request)
        assert used_blocks(engine) == 0

    def test_a_request_may_fill_the_whole_pool(self, make: Make, plain: Any) -> None:
        """Even where the nodes that it shares would need blocks of their own beside it."""
        engine = make(device_tokens=6 * BLOCK)
        system = tokens(5, 1)
        for seed in range(4):
            documents = [system, tokens(20, 20 + seed), tokens(21, 30 + seed)]
            request = ask(documents, tokens(6 * BLOCK - 46 - 9, seed), max_tokens=10)
            exactly(engine, plain, request)
        full = ask([system, tokens(40, 50)], tokens(51 - 4, 7), max_tokens=5)
        parted = ask([system, tokens(40, 51)], tokens(51 - 4, 7), max_tokens=5)
        exactly(engine, plain, full, parted, full)

    def test_a_request_that_fills_the_pool_evicts_nodes_in_other_blocks(self, make: Make, plain: Any) -> None:
        """Both compute the same document in one step; the nodes are those of the first, which ends soon."""
        engine = make(device_tokens=6 * BLOCK)
        documents = [tokens(5, 1), tokens(20, 2)]
        short = ask(documents, tokens(4, 3), max_tokens=2)
        long = ask(documents, tokens(4, 4), max_tokens=6 * BLOCK - 29 + 1)
        assert [completion.finish_reason for completion in exactly(engine, plain, short, long)] == ["length"] * 2
        assert used_blocks(engine) == 0
        # What it gave up is computed again.
        exactly(engine, plain, short)

    def test_counts(self, make: Make) -> None:
        engine = make()
        document = tokens(40, 1)
        engine.generate([ask([document], tokens(5, 2), max_tokens=3)])
        [completion] = engine.generate([ask([document], tokens(7, 3))])
        stats = engine.stats()
        assert stats.finished == {"length": 2}
        assert (stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens) == (45 + 47, 4, 45 + 2 + 7)
        assert stats.cached == (40, 0, 0)
        assert (stats.running, stats.waiting, stats.refused, stats.failed_steps) == (0, 0, 0, 0)
        assert stats.ttft_count == 2
        assert completion.ttft_s is not None
        assert 0 < completion.ttft_s <= completion.total_s
        assert stats.ttft_s_sum >= completion.ttft_s
        assert completion.prompt_tokens == 47


class TestAbort:
    def test_in_every_state_all_is_given_back(self, make: Make, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make(device_tokens=16 * BLOCK, host_bytes=64 * block_bytes(model), max_batch_tokens=24, max_requests=3)
        cached = ask([tokens(90, 1)], tokens(9, 3))
        engine.generate([cached])
        crowd(engine)
        gate = hold_loads(engine, monkeypatch)
        decoding = engine.add(ask([], tokens(4, 5), max_tokens=50))
        engine.step()
        loading = engine.add(cached)
        prefilling = engine.add(ask([tokens(30, 6)], tokens(20, 7), max_tokens=50))
        waiting = engine.add(ask([tokens(30, 8)], tokens(9, 9)))
        engine.step()
        assert (engine.stats().running, engine.stats().waiting) == (2, 2)
        for request_id in (loading, decoding, waiting, prefilling):
            assert engine.abort(request_id)
            assert not engine.abort(request_id)
        assert not engine.abort(12345)
        gate.set()
        ended = {update.request_id: update.completion for update in engine.step()}
        assert {completion.finish_reason for completion in ended.values() if completion} == {"abort"}
        assert len(ended) == 4
        assert len(ended[decoding].token_ids) >= 1
        assert not engine.has_unfinished
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert used_blocks(engine) == 0
        assert engine.generate([cached])[0].finish_reason == "length"

    def test_what_an_aborted_request_had_computed_stays_cached(self, make: Make, plain: Any) -> None:
        engine = make(max_batch_tokens=32)
        document = tokens(40, 1)
        request_id = engine.add(ask([document], tokens(60, 2)))
        engine.step()
        engine.step()
        engine.abort(request_id)
        request = ask([document], tokens(8, 3))
        [completion] = exactly(engine, plain, request)
        assert completion.cached.device == 40

    def test_if_one_of_several_cannot_be_added_none_is_left(self, make: Make) -> None:
        engine = make()

        def requests() -> Iterator[Request]:
            yield ask([], tokens(20, 1))
            raise OSError("the file has ended")

        with pytest.raises(OSError, match="has ended"):
            engine.generate(requests())
        assert not engine.has_unfinished
        assert engine.stats().finished == {"abort": 1}

    def test_leaving_a_stream_aborts_it(self, make: Make) -> None:
        engine = make()
        for update in engine.stream(ask([], tokens(20, 1), max_tokens=100)):
            assert len(update.token_ids) == 1
            break
        assert not engine.has_unfinished
        assert engine.stats().finished == {"abort": 1}
        assert used_blocks(engine) == 0


class TestSampling:
    def test_the_same_seed_draws_the_same_in_any_company(self, make: Make) -> None:
        engine = make()
        request = ask([], tokens(20, 1), max_tokens=20, temperature=1.0, seed=7)
        [alone] = engine.generate([request])
        others = [ask([], tokens(10 + seed, seed), max_tokens=9, temperature=1.5, seed=seed) for seed in range(5)]
        in_company = engine.generate([*others, request])[-1]
        assert in_company.token_ids == alone.token_ids
        [other_seed] = engine.generate([ask([], tokens(20, 1), max_tokens=20, temperature=1.0, seed=8)])
        assert other_seed.token_ids != alone.token_ids

    def test_a_preempted_request_goes_on_with_its_draws(self, make: Make) -> None:
        requests = [ask([], tokens(25, seed), max_tokens=60, temperature=1.0, seed=seed) for seed in range(3)]
        roomy, tight = make(), make(device_tokens=10 * BLOCK)
        expected = [completion.token_ids for completion in roomy.generate(requests)]
        assert [completion.token_ids for completion in tight.generate(requests)] == expected
        assert tight.stats().preemptions > 0

    @pytest.mark.parametrize(
        ("sampling", "expected"),
        [
            ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
            ({"temperature": 2.0}, None),
            ({"temperature": 1.0, "top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
            ({"temperature": 1.0, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
            ({"temperature": 1.0, "top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
            ({"temperature": 1.0, "top_p": 1e-9}, [1, 0, 0, 0]),
            ({"temperature": 1e-6}, [1, 0, 0, 0]),
        ],
    )
    def test_tokens_come_as_often_as_they_are_probable(self, sampling: dict[str, Any], expected: Any) -> None:
        probabilities = [0.4, 0.3, 0.2, 0.1]
        if expected is None:
            roots = [math.sqrt(each) for each in probabilities]
            expected = [root / sum(roots) for root in roots]
        logits = torch.tensor(probabilities, dtype=torch.float64).log().float().repeat(4000, 1)
        random = Random(3)
        choices = choose(logits, [Sampling(**sampling)] * 4000, [random.random() for _ in range(4000)])
        seen = Counter(choice.token_id for choice in choices)
        for token, probability in enumerate(expected):
            # Five standard deviations.
            assert abs(seen[token] / 4000 - probability) <= 5 * math.sqrt(probability * (1 - probability) / 4000)

    def test_logprobs_are_those_of_the_model(self, make: Make, plain: Any) -> None:
        engine = make()
        request = ask([], tokens(20, 1), max_tokens=3, logprobs=4, temperature=0.7, seed=3)
        other = ask([], tokens(20, 1), max_tokens=3, logprobs=0)
        completion, chosen_only = engine.generate([request, other])
        assert completion.logprobs is not None
        assert [each.token_id for each in completion.logprobs] == list(completion.token_ids)
        prompt = [*request.token_ids, *completion.token_ids]
        with torch.no_grad():
            expected = plain(torch.tensor([prompt])).logits[0, 19:-1].log_softmax(-1)
        for row, told in zip(expected, completion.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[told.token_id]), abs=1e-4)
            best = row.topk(4)
            assert [token for token, _ in told.top] == best.indices.tolist()
            assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [each.top for each in chosen_only.logprobs or ()] == [(), (), ()]
        assert engine.generate([ask([], tokens(20, 1))])[0].logprobs is None

    @pytest.mark.parametrize("ends", ["one", "several"])
    def test_end_tokens_of_model_and_request_end_an_answer(self, make: Make, plain: Any, model: Any, ends: str) -> None:
        answer = greedy(plain, ask([], tokens(20, 1), max_tokens=8))
        end = answer[3]
        ending = copy.deepcopy(model)
        ending.generation_config.eos_token_id = end if ends == "one" else [VOCABULARY - 1, end]
        engine = make(of=ending)
        ways = {}, {"ignore_eos": True}, {"ignore_eos": True, "stop": [answer[2]]}
        stopped, ignoring, own = engine.generate([ask([], tokens(20, 1), max_tokens=8, **way) for way in ways])
        assert (list(stopped.token_ids), stopped.finish_reason) == (answer[: answer.index(end) + 1], "stop")
        assert (list(ignoring.token_ids), ignoring.finish_reason) == (answer, "length")
        assert (list(own.token_ids), own.finish_reason) == (answer[: answer.index(answer[2]) + 1], "stop")


TEXTS = [
    "The cat sleeps, doesn't it ?  Two  spaces .",
    "naïve café — „Grüße“ 你好，世界 🙂👩‍👩‍👧‍👦 ok",
    "tabs\tand\nnewlines\n\n  indented",
    "مرحبا بالعالم",
]


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Byte-level BPE as of GPT-2, Llama 3 and Qwen; words that begin with a space and single bytes, as of Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if request.param == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(TEXTS[:1], trainer)
    else:
        single = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
        single += sorted(set(TEXTS[0].replace(" ", "▁")) - set(single))
        merges = [("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("▁", "s"), ("▁", "▁")]
        words = [*single, *(first + second for first, second in merges)]
        made = Tokenizer(
            models.BPE({word: place for place, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)  # noqa: S106
        )
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")  # noqa: S106


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class TestText:
    @pytest.mark.parametrize("text", TEXTS)
    def test_pieces_are_whole_characters_wherever_the_prompt_ends(self, tokenizer: Any, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert decoded(tokenizer, ids) == text
        for cut in range(len(ids)):
            prompt = decoded(tokenizer, ids[:cut])
            if prompt.endswith("\ufffd"):
                continue
            stream = TextStream(tokenizer, ids[:cut])
            pieces = [stream.push(token) for token in ids[cut:]]
            assert not any("\ufffd" in piece for piece in pieces)
            pieces.append(stream.finish())
            assert prompt + "".join(pieces) == prompt + stream.text == text

    def test_bytes_that_are_no_character_do_not_hold_the_text_up(self, tokenizer: Any) -> None:
        random = Random(1)
        stream = TextStream(tokenizer, [])
        silent = longest = 0
        for _ in range(500):
            silent = 0 if stream.push(random.randrange(2, 258)) else silent + 1
            longest = max(longest, silent)
        assert longest <= 12
        assert len(stream.text) > 100

    @pytest.mark.parametrize(
        ("stops", "text"),
        [
            (["sleeps"], "The cat "),
            (["s, do", "zzz"], "The cat sleep"),
            (["zzz", "spaces", "Two  "], "The cat sleeps, doesn't it ?  "),
            (["The"], ""),
            (["zzz", "spaces .!"], "The cat sleeps, doesn't it ?  Two  spaces ."),
        ],
    )
    def test_no_part_of_a_stop_string_is_returned(self, tokenizer: Any, stops: list[str], text: str) -> None:
        ids = tokenizer.encode(TEXTS[0], add_special_tokens=False)
        stream = TextStream(tokenizer, [], stops)
        told = ""
        for token in ids:
            told += stream.push(token)
            assert text.startswith(told)
            if stream.stopped:
                break
        told += stream.finish()
        assert told == stream.text == text
        assert stream.stopped == (text != TEXTS[0])

    def test_a_stream_tells_what_the_completion_has(self, make: Make, tokenizer: Any) -> None:
        engine = make(tokenizer)
        prompt = tokenizer.encode("The cat", add_special_tokens=False)
        request = Request(prompt, sampling=Sampling(max_tokens=60, temperature=3.0, seed=2, logprobs=1))
        updates = list(engine.stream(request))
        completion = updates[-1].completion
        assert completion is not None
        assert all(update.completion is None for update in updates[:-1])
        assert "".join(update.text for update in updates) == completion.text
        assert [token for update in updates for token in update.token_ids] == list(completion.token_ids)
        assert tuple(told for update in updates for told in update.logprobs) == completion.logprobs
        assert engine.generate([request])[0].token_ids == completion.token_ids

    def test_a_stop_string_ends_an_answer_before_it(self, make: Make, tokenizer: Any) -> None:
        engine = make(tokenizer)
        prompt = tokenizer.encode("The cat", add_special_tokens=False)
        sampling: dict[str, Any] = {"max_tokens": 40, "temperature": 3.0, "seed": 2}
        [whole] = engine.generate([Request(prompt, sampling=Sampling(**sampling))])
        stop = next(whole.text[at : at + 3] for at in range(5, 99) if "\ufffd" not in whole.text[at : at + 3])
        [stopped] = engine.generate([Request(prompt, sampling=Sampling(**sampling, stop=[stop]))])
        assert stopped.finish_reason == "stop"
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]

    def test_streams_and_steps_do_not_take_each_others_updates(self, make: Make, plain: Any) -> None:
        engine = make()
        requests = [ask([], tokens(20, seed), max_tokens=6) for seed in range(4)]
        plain_id = engine.add(requests[0])
        first, second = engine.stream(requests[1]), engine.stream(requests[2])
        told: list[list[int]] = [[], []]
        for one, other in zip(first, second, strict=True):
            told[0] += one.token_ids
            told[1] += other.token_ids
        [generated] = engine.generate([requests[3]])
        updates = []
        while engine.has_unfinished:
            updates += engine.step()
        assert {update.request_id for update in updates} == {plain_id}
        mine = [token for update in updates for token in update.token_ids]
        assert [mine, *told, list(generated.token_ids)] == [greedy(plain, request) for request in requests]

    def test_threads_may_share_an_engine(self, make: Make, plain: Any) -> None:
        engine = make()
        requests = [ask([tokens(30, seed % 3)], tokens(5, seed), max_tokens=8) for seed in range(6)]
        told: dict[int, list[int]] = {}

        def consume(place: int) -> None:
            told[place] = [token for update in engine.stream(requests[place]) for token in update.token_ids]

        threads = [threading.Thread(target=consume, args=(place,)) for place in range(len(requests))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert [told[place] for place in range(6)] == [greedy(plain, request) for request in requests]


class TestFailures:
    def test_an_error_that_would_come_again_fails_only_its_requests(
        self, make: Make, plain: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make(max_requests=2)
        shared = tokens(40, 1)
        failing = [engine.add(ask([shared], tokens(9, seed), max_tokens=3)) for seed in range(2)]
        waiting = engine.add(ask([shared], tokens(9, 5), max_tokens=3))

        def broken(_: Any) -> Any:
            raise ValueError("SECRET OF A PROMPT")

        with spoiled(engine, broken), caplog.at_level(logging.DEBUG, "ragorder"):
            updates = engine.step()
        assert [update.request_id for update in updates] == failing
        for update in updates:
            assert update.completion is not None
            assert update.completion.finish_reason == "error"
            assert "ValueError in test_tiered_engine.py" in (update.completion.error or "")
            assert "SECRET" not in (update.completion.error or "")
        assert "SECRET" not in caplog.text
        done = run(engine)
        # What the failed step was to compute is not in the cache.
        assert done[waiting].cached.total == 0
        request = ask([shared], tokens(9, 5), max_tokens=3)
        assert list(done[waiting].token_ids) == greedy(plain, request)
        assert engine.stats().failed_steps == 1
        assert engine.stats().finished == {"error": 2, "length": 1}
        assert used_blocks(engine) == 0

    def test_a_failed_plan_fails_present_requests_and_the_engine_goes_on(
        self, make: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make()
        running = engine.add(ask([tokens(40, 1)], tokens(9, 2), max_tokens=9))
        engine.step()
        new = engine.add(ask([tokens(40, 1)], tokens(9, 3)))

        def no_memory(*_: Any) -> None:
            raise MemoryError("SECRET")

        with monkeypatch.context() as patched:
            patched.setattr(cache_of(engine), "extend", no_memory)
            done = run(engine)
        assert {request_id: each.finish_reason for request_id, each in done.items()} == {running: "error", new: "error"}
        assert all("could not be planned (MemoryError" in (each.error or "") for each in done.values())
        request = ask([tokens(40, 1)], tokens(9, 2), max_tokens=3)
        exactly(engine, plain, request)
        assert used_blocks(engine) == 0

    def test_an_interrupt_leaves_an_engine_that_works(self, make: Make, plain: Any) -> None:
        engine = make()
        request = ask([tokens(40, 1)], tokens(9, 2), max_tokens=3)

        def interrupted(_: Any) -> Any:
            raise KeyboardInterrupt

        with spoiled(engine, interrupted), pytest.raises(KeyboardInterrupt):
            engine.generate([request])
        assert not engine.has_unfinished
        [completion] = exactly(engine, plain, request)
        assert completion.cached.total == 0

    def test_logits_that_are_no_numbers_end_the_request_and_poison_nothing(self, make: Make, plain: Any) -> None:
        engine = make()
        bad, good = ask([tokens(40, 1)], tokens(9, 2)), ask([tokens(41, 3)], tokens(9, 4))
        with spoiled(engine, lambda logits: logits.index_fill(0, torch.tensor([0]), math.nan)):
            failed, served = engine.generate([bad, good])
        assert failed.finish_reason == "error"
        assert "NaN or inf" in (failed.error or "")
        assert difference(served, plain, good) <= 1e-4
        [again] = exactly(engine, plain, bad)
        assert again.cached.total == 0

    def test_logits_that_are_no_numbers_leave_nothing_of_earlier_steps(self, make: Make, plain: Any) -> None:
        """What another request had computed stays, and what others computed after its documents goes."""
        engine = make(max_batch_tokens=64)
        known, first, second, other = (tokens(length, seed) for length, seed in ((40, 1), (30, 2), (100, 3), (10, 4)))
        engine.generate([ask([known], [1, 2])])
        answered = False

        def poisoned(logits: Any) -> Any:
            nonlocal answered
            if len(logits) and not answered:
                answered = True
                logits[0] = math.nan
            return logits

        bad, after = ask([known, first, second], tokens(9, 5)), ask([known, first, other], tokens(9, 6))
        with spoiled(engine, poisoned):
            numbers = [engine.add(bad)]
            engine.step()
            numbers.append(engine.add(after))
            done = run(engine)
        failed, served = (done[number] for number in numbers)
        assert "NaN or inf" in (failed.error or "")
        # In the step of the bad logits it was computed after a document of theirs.
        assert served.cached.total == len(known) + len(first)
        assert engine.stats().cache.device.nodes == 1
        for request in (bad, after):
            [again] = exactly(engine, plain, request)
            assert again.cached.total >= len(known)
        assert engine.stats().cache.device.nodes == 4

    def test_logits_that_are_no_numbers_leave_nothing_from_before_a_preemption(self, make: Make) -> None:
        engine = make(max_batch_tokens=16)
        request = ask([tokens(30, 1), tokens(30, 2)], tokens(9, 3))
        engine.add(request)
        for _ in range(3):
            engine.step()
        scheduler = scheduler_of(engine)
        preempt(scheduler, scheduler.running[0])
        assert engine.stats().cache.device.nodes == 1
        with spoiled(engine, lambda logits: torch.full_like(logits, math.nan)):
            [failed] = run(engine).values()
        assert failed.cached.total == 0 and "NaN or inf" in (failed.error or "")
        assert engine.stats().cache.device.nodes == 0

    @pytest.mark.parametrize("tokenizer", ["bytes"], indirect=True)
    def test_an_unknown_token_fails_only_its_request(
        self, make: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make(tokenizer)
        fails, works = ask([], tokens(20, 1), max_tokens=9, temperature=1.0, seed=1), ask([], tokens(20, 2))
        [expected] = engine.generate([fails])
        decode = type(tokenizer).decode

        def knows_fewer(self: Any, ids: Sequence[int], **options: Any) -> Any:
            if expected.token_ids[4] in ids:
                raise TypeError("sequence item 0: expected str instance, NoneType found")
            return decode(self, ids, **options)

        monkeypatch.setattr(type(tokenizer), "decode", knows_fewer)
        failed, served = engine.generate([fails, works])
        assert (failed.finish_reason, served.finish_reason) == ("error", "length")
        assert "decode the answer (TypeError)" in (failed.error or "")
        assert expected.text.startswith(failed.text)
        assert used_blocks(engine) == 0

    @pytest.mark.parametrize(
        ("request_", "named"),
        [
            (Request([]), "empty"),
            (Request([1, VOCABULARY]), f"vocabulary of {VOCABULARY}"),
            (Request([1, -1]), f"vocabulary of {VOCABULARY}"),
            (Request([1, "a"]), "not all integers"),  # type: ignore[list-item]
            (Request([1, 2.5]), "not all integers"),  # type: ignore[list-item]
            (Request([1] * 1024), "1040, more than the model's context of 1024"),
            (Request([1] * 90, sampling=Sampling(max_tokens=600)), "pool holds 512"),
            (Request([1], sampling=Sampling(stop=["x"])), "tokenizer"),
            (Request([1], deadline_s=0), "deadline_s"),
            (Request([1], deadline_s=math.nan), "deadline_s"),
        ],
    )
    def test_a_request_that_can_never_be_served_is_refused_alone(
        self, make: Make, plain: Any, request_: Request, named: str
    ) -> None:
        engine = make(device_tokens=512)
        with pytest.raises(RequestRefusedError, match=named):
            engine.add(request_)
        good = ask([tokens(40, 1)], tokens(9, 2))
        refused, completion = engine.generate([request_, good])
        assert refused.finish_reason == "error"
        assert named in (refused.error or "")
        assert difference(completion, plain, good) <= 1e-4
        assert engine.stats().refused == 2

    def test_bad_document_ends_cost_nothing_but_the_cache(self, make: Make, plain: Any) -> None:
        engine = make()
        prompt = tokens(60, 1)
        for ends in ([50, 20], [-3], [0, 0], [999], [60]):
            request = Request(prompt, ends, keep_logits=True)
            exactly(engine, plain, request)

    def test_after_close_nothing_is_served(self, make: Make, model: Any) -> None:
        engine = make()
        engine.add(ask([], tokens(9, 1), max_tokens=9))
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.add(ask([], tokens(9, 1)))
        assert [update.completion.finish_reason for update in engine.step() if update.completion] == ["abort"]


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


LOST = ("0.mlp.up_proj", "1.mlp.down_proj", "1.mlp.gate_proj", "1.mlp.up_proj")
LOST_NAMES = ", ".join(re.escape(f"model.layers.{name}.weight") for name in LOST[:3])


def lacks_weights(*names: str) -> Callable[[Path], None]:
    """transformers would fill in random numbers."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        for name in names:
            del weights[f"model.layers.{name}.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def has(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def lacks(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


class TestLoading:
    def test_a_folder_is_loaded_as_it_was_saved(self, folder: Path, plain: Any) -> None:
        with TieredEngine.load(folder, EngineSettings(device_tokens=512, host_bytes=0)) as engine:
            assert engine.tokenizer is None
            assert engine.model_name == str(folder)
            assert (engine.max_model_len, engine.block_size, engine.device_tokens) == (1024, 16, 512)
            request = ask([tokens(40, 1)], tokens(9, 2))
            [completion] = exactly(engine, plain, request)
            assert completion.text == ""

    @pytest.mark.parametrize("tokenizer", ["bytes"], indirect=True)
    def test_a_tokenizer_comes_with_its_model(self, folder: Path, tokenizer: Any) -> None:
        tokenizer.save_pretrained(folder)
        with TieredEngine.load(folder, EngineSettings(device_tokens=512, host_bytes=0)) as engine:
            assert engine.tokenizer.encode("The cat") == tokenizer.encode("The cat")

    @pytest.mark.parametrize(
        ("spoil", "settings", "error", "said"),
        [
            (lacks("config.json"), {}, ModelLoadError, r"no config\.json"),
            (has("config.json", "{"), {}, ModelLoadError, "configuration"),
            (has("config.json", '{"model_type": "vit"}'), {}, UnsupportedModelError, "vit"),
            (lacks("model.safetensors"), {}, ModelLoadError, r"weights cannot be read.*model\.safetensors"),
            (lambda folder: os.truncate(folder / "model.safetensors", 5000), {}, ModelLoadError, "cannot be"),
            (lacks_weights(*LOST[:3]), {}, ModelLoadError, rf"lacks 3 of its weights: {LOST_NAMES}$"),
            (lacks_weights(*LOST), {}, ModelLoadError, rf"lacks 4 of its weights: {LOST_NAMES}, …$"),
            (has("tokenizer.json", "{"), {}, ModelLoadError, "tokenizer"),
            *((lambda _: None, {"device": device}, ValueError, device) for device in ("cuda:77", "meta", "toaster")),
            (lambda _: None, {"max_model_len": 2000}, ValueError, "exact only up to 1024"),
        ],
    )
    def test_what_cannot_be_loaded_is_refused(
        self, folder: Path, spoil: Callable[[Path], object], settings: dict[str, Any], error: type[Exception], said: str
    ) -> None:
        spoil(folder)
        with pytest.raises(error, match=said):
            TieredEngine.load(folder, EngineSettings(device_tokens=512, host_bytes=0, **settings))

    def test_a_name_that_is_nowhere_is_refused(self) -> None:
        with pytest.raises(ModelLoadError, match="nobody/has-this"):
            TieredEngine.load("nobody/has-this")

    def test_a_dtype_that_is_not_served_is_refused(self, model: Any) -> None:
        with pytest.raises(UnsupportedModelError, match=r"KV of torch\.float64; load it as float32"):
            TieredEngine(copy.deepcopy(model).double(), settings=EngineSettings(device_tokens=512, host_bytes=0))

    @pytest.mark.parametrize(
        ("make_settings", "wrong", "named"),
        [
            (EngineSettings, {"dtype": "int8"}, "float32, bfloat16, float16"),
            (EngineSettings, {"policy": "fifo"}, "pgdsf"),
            (EngineSettings, {"device_tokens": 8}, "block_size 16"),
            (EngineSettings, {"block_size": 0}, "block_size"),
            (EngineSettings, {"max_batch_token": 5}, "max_batch_token"),
            (Sampling, {"max_tokens": 0}, "max_tokens"),
            *((Sampling, {"temperature": wrong}, "temperature") for wrong in (-1, math.nan)),
            *((Sampling, {"top_p": wrong}, "top_p") for wrong in (0, 1.5)),
            (Sampling, {"stop": [""]}, "stop"),
            (Sampling, {"logprobs": -1}, "logprobs"),
        ],
    )
    def test_impossible_settings_are_refused(self, make_settings: Any, wrong: dict[str, Any], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            make_settings(**wrong)

    def test_the_dtype_is_the_stored_one_or_that_of_the_settings(self, folder: Path, model: Any) -> None:
        shutil.rmtree(folder)
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32)):
            with TieredEngine.load(folder, EngineSettings(device_tokens=512, host_bytes=0, dtype=dtype)) as engine:
                assert cache_of(engine).pool.kv.dtype is expected
                assert engine.generate([ask([tokens(40, 1)], tokens(9, 2))])[0].finish_reason == "length"

    def test_without_device_tokens_the_pool_holds_four_prompts_on_a_cpu(self, make: Make) -> None:
        assert make(device_tokens=None).device_tokens == 4 * 1024
