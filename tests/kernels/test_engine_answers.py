"""Answers of the embedded engine: sampling, text, and the models that it loads."""

from __future__ import annotations

import copy
import math
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import cache_of
from support.small_engine import VOCABULARY, Make, ask, exactly, greedy, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import (
    EngineSettings,
    ModelLoadError,
    Sampling,
    TieredEngine,
    UnsupportedModelError,
)
from ragorder.kernels.engine.detokenize import TextStream
from ragorder.kernels.engine.runner import choose


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

    @pytest.mark.parametrize("text", TEXTS)
    def test_special_tokens_anywhere_change_nothing(self, tokenizer: Any, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream(tokenizer, [])
        for token in ids:
            for each in (token, *[tokenizer.eos_token_id] * 12):
                stream.push(each)
        stream.finish()
        assert stream.text == text

    @pytest.mark.parametrize("before", ["The cat", "é"], ids=["after a word", "after parts of characters"])
    def test_a_run_of_special_tokens_is_not_decoded_again_and_again(self, tokenizer: Any, before: str) -> None:
        lengths = []

        def decode(ids: Sequence[int], **options: Any) -> str:
            lengths.append(len(ids))
            return str(tokenizer.decode(ids, **options))

        stream = TextStream(SimpleNamespace(decode=decode), [])
        for token in tokenizer.encode(before, add_special_tokens=False)[:-1] * 9:
            stream.push(token)
        for _ in range(200):
            stream.push(tokenizer.eos_token_id)
        assert max(lengths) < 40

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
        engine.clear_cache()
        assert cache_of(engine).pool.used_blocks == 0


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

    def test_the_dtype_is_the_stored_one_or_that_of_the_settings(self, folder: Path, model: Any) -> None:
        shutil.rmtree(folder)
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32)):
            with TieredEngine.load(folder, EngineSettings(device_tokens=512, host_bytes=0, dtype=dtype)) as engine:
                assert cache_of(engine).pool.kv.dtype is expected
                assert engine.generate([ask([tokens(40, 1)], tokens(9, 2))])[0].finish_reason == "length"

    def test_without_device_tokens_the_pool_holds_four_prompts_on_a_cpu(self, make: Make) -> None:
        assert make(device_tokens=None).device_tokens == 4 * 1024
