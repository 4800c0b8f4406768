"""The embedded engine's answers: OpenAI's API on a real engine with a small model."""

from __future__ import annotations

import json
import threading
from copy import deepcopy
from typing import Any

import pytest
from support.bodies import Bodies
from support.embedded_app import (
    CHAT,
    COMPLETIONS,
    LONGEST,
    SYSTEM,
    TEXTS,
    Client,
    Load,
    chat,
    complete,
    facts,
    reaching,
    refusal,
    streamed,
)

from ragorder.adapters.embedded import EngineWorker, make_engine_app
from ragorder.adapters.observing.tier_stats import TierStats

pytestmark = pytest.mark.merge


def expected(worker: EngineWorker, prompt: str, tokens: int = 8, **options: Any) -> str:
    """What transformers' own greedy decoding gives for a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = worker.engine.tokenizer
    plain = AutoModelForCausalLM.from_pretrained(worker.engine.model_name, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt, **options)])
    made = plain.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


class TestCompletions:
    async def test_are_those_of_the_model(self, client: Client, worker: EngineWorker) -> None:
        answer = await complete(client)
        assert answer["choices"] == [
            {"index": 0, "text": expected(worker, "a is a document"), "logprobs": None, "finish_reason": "length"}
        ]
        assert (answer["object"], answer["model"]) == ("text_completion", worker.engine.model_name)
        assert answer["id"].startswith("cmpl-")
        tokens = len(worker.engine.tokenizer.encode("a is a document"))
        assert answer["usage"] == {
            "prompt_tokens": tokens,
            "completion_tokens": 8,
            "total_tokens": tokens + 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    async def test_take_several_prompts_as_texts_or_tokens(self, client: Client, worker: EngineWorker) -> None:
        prompts = ["a is", "b is a document about", "c"]
        tokens = [worker.engine.tokenizer.encode(each) for each in prompts]
        answer = await complete(client, prompts)
        assert (await complete(client, tokens))["choices"] == answer["choices"]
        alone = [(await complete(client, each)) for each in (*prompts[:2], tokens[2])]
        texts = [each["choices"][0]["text"] for each in alone]
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
        assert answer["usage"]["completion_tokens"] == 24

    # A hot model also draws parts of characters, whose text is held back.
    @pytest.mark.parametrize("drawn", [{}, {"temperature": 5, "seed": 1, "max_tokens": 32, "ignore_eos": True}])
    @pytest.mark.parametrize("fields", [{}, {"logprobs": 1, "stream_options": {"include_usage": True}}])
    async def test_stream_the_same(self, client: Client, fields: dict[str, Any], drawn: dict[str, Any]) -> None:
        whole = await complete(client, ["a is", "b is"], logprobs=fields.get("logprobs"), **drawn)
        events = await streamed(client, COMPLETIONS, {"prompt": ["a is", "b is"], **fields, **drawn})
        if fields:
            last = events.pop()
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all("usage" not in event for event in events)
        assert len({event["id"] for event in events}) == 1
        for choice in whole["choices"]:
            pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            assert len(pieces) > 1
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]
            for field in ("tokens", "token_logprobs", "text_offset") if fields else ():
                told = [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"][field]]
                assert told == pytest.approx(choice["logprobs"][field])

    async def test_stop_before_a_text(self, client: Client) -> None:
        whole = (await complete(client, max_tokens=32))["choices"][0]["text"]
        stop = whole[len(whole) // 2 :][:3]
        assert stop
        choice = (await complete(client, max_tokens=32, stop=[stop]))["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"
        events = await streamed(client, COMPLETIONS, {"prompt": "a is a document", "max_tokens": 32, "stop": stop})
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]

    async def test_are_16_drawn_tokens_by_default_and_the_same_with_the_same_seed(self, client: Client) -> None:
        answers = [
            await complete(client, temperature=None, max_tokens=None, seed=seed, ignore_eos=True)
            for seed in (1, 1, None, None, None)
        ]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [16] * 5
        drawn = [answer["choices"][0]["text"] for answer in answers]
        assert drawn[0] == drawn[1]
        assert len(set(drawn[2:])) > 1

    async def test_tell_logprobs(self, client: Client) -> None:
        choice = (await complete(client, logprobs=2, ignore_eos=True))["choices"][0]
        logprobs = choice["logprobs"]
        tokens, tops = logprobs["tokens"], logprobs["top_logprobs"]
        assert "".join(tokens) == choice["text"]
        assert logprobs["text_offset"][0] == 0
        assert [len(top) for top in tops] == [2] * 8
        for token, logprob, top in zip(tokens, logprobs["token_logprobs"], tops, strict=True):
            assert logprob <= 0
            assert max(top, key=top.__getitem__) == token, "greedy takes the likeliest"
            assert top[token] == pytest.approx(logprob, abs=1e-5)

    async def test_tell_the_spaces_of_tokens_that_decoders_strip_at_the_start_of_a_text(self, load: Load) -> None:
        """As those of Llama 2 and Mistral do."""
        from tokenizers import decoders

        worker = load()
        parts = [decoders.Replace("Ġ", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        worker.engine.tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
        async with reaching(make_engine_app(worker)) as client:
            choice = (await complete(client, logprobs=1, ignore_eos=True))["choices"][0]
        assert " " in choice["text"]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]

    async def test_texts_of_tokens_are_not_decoded_in_the_event_loop(self, load: Load) -> None:
        """An answer with logprobs has up to 21 a token."""
        worker = load()
        tokenizer = worker.engine.tokenizer
        decode, threads = tokenizer.decode, set()

        def noted(*arguments: Any, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return decode(*arguments, **options)

        tokenizer.decode = noted
        async with reaching(make_engine_app(worker)) as client:
            threads.clear()
            assert (await complete(client, logprobs=1))["choices"][0]["logprobs"]
            assert (await chat(client, logprobs=True))["choices"][0]["logprobs"]
        assert threads and threading.get_ident() not in threads


class TestChats:
    async def test_are_rendered_by_the_models_template(self, client: Client, worker: EngineWorker) -> None:
        answer = await chat(client)
        messages = [SYSTEM, {"role": "user", "content": "Which document?"}]
        prompt = worker.engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = expected(worker, prompt, add_special_tokens=False)
        message = {"role": "assistant", "content": text, "refusal": None}
        assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        assert answer["usage"]["prompt_tokens"] == len(worker.engine.tokenizer.encode(prompt, add_special_tokens=False))

    async def test_take_texts_in_parts(self, client: Client) -> None:
        parts = [{"type": "text", "text": "Which"}, {"type": "text", "text": "document?"}]
        answer, plain = await chat(client, parts), await chat(client, "Which\ndocument?")
        assert (answer["choices"], answer["usage"]) == (plain["choices"], plain["usage"])

    async def test_have_as_many_tokens_as_asked_for_or_the_whole_context(self, load: Load) -> None:
        async with reaching(make_engine_app(load(max_model_len=64))) as client:
            for limits, end in (({"max_tokens": 3}, 3), ({"max_completion_tokens": 3}, 3), ({}, None)):
                usage = (await chat(client, **{"max_tokens": None, **limits}, ignore_eos=True))["usage"]
                assert usage["completion_tokens"] == (end or 64 - usage["prompt_tokens"])

    async def test_tell_logprobs(self, client: Client) -> None:
        for options, number in (({"top_logprobs": 2}, 2), ({}, 0)):
            content = (await chat(client, logprobs=True, **options))["choices"][0]["logprobs"]["content"]
            assert len(content) == 8
            for each in content:
                likeliest = [other["token"] for other in each["top_logprobs"]]
                assert bytes(each["bytes"]).decode() == each["token"]
                assert len(likeliest) == number
                assert likeliest[:1] == [each["token"]][:number]

    async def test_tell_no_bytes_of_tokens_that_are_parts_of_characters(self, client: Client) -> None:
        drawn = {"temperature": 5, "seed": 1, "max_tokens": 64, "ignore_eos": True}
        content = (await chat(client, logprobs=True, **drawn))["choices"][0]["logprobs"]["content"]
        parts = ["\ufffd" in each["token"] for each in content]
        assert [each["bytes"] is None for each in content] == parts
        assert any(parts) and not all(parts)

    async def test_special_tokens_are_what_the_tokenizer_makes_of_them(
        self, client: Client, worker: EngineWorker
    ) -> None:
        """The proxy breaks them up in documents; what else is in a message is the client's own, as in vLLM."""
        plain, special = await chat(client, "x"), await chat(client, "x<|im_end|>")
        assert special["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 1

    async def test_options_of_the_template_reach_it(self, load: Load) -> None:
        worker = load()
        template = worker.engine.tokenizer.chat_template
        worker.engine.tokenizer.chat_template = template + "{% if thinking %}thinking {% endif %}"
        async with reaching(make_engine_app(worker)) as client:
            plain = await chat(client)
            more = await chat(client, chat_template_kwargs={"thinking": True})
            own = {"messages": [SYSTEM], "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}
            error = await refusal(client, CHAT, own)
        assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        assert error["param"] == "chat_template_kwargs.chat_template"

    async def test_show_the_calls_and_the_reasoning_of_earlier_turns(self, load: Load) -> None:
        """As templates expect them: reasoning under either name, arguments as an object. So the proxy counts them."""
        worker = load()
        tokenizer = worker.engine.tokenizer
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }}"
            "{% for c in m.tool_calls %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
            " {{ m.tool_call_id }}\n{% endfor %}"
        )
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, "x"]}'}}
        broken = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{at"}}
        found = "".join(f"<doc>{TEXTS[name]}</doc>" for name in "ab")
        turn = [
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, broken]},
            {"role": "tool", "tool_call_id": "c1", "content": "a"},
            {"role": "assistant", "reasoning": "so", "content": "a", "tool_calls": None, "refusal": None},
            {"role": "user", "content": f"{found} And then?"},
        ]
        lines = [
            "user  Which? ",
            'assistant hm  look {"at": [1, "x"]} look "{at" ',
            "tool  a c1",
            "assistant so a ",
            f"user  {found} And then? ",
            "",
        ]
        bodies = Bodies("<doc>{text}</doc>", tokenizer=deepcopy(tokenizer))
        parsed = bodies.parse("chat", json.dumps({"messages": turn}).encode())
        async with reaching(make_engine_app(worker)) as client:
            answer = (await client.post("/tokenize", json={"messages": turn})).json()
            assert tokenizer.decode(answer["tokens"]) == "\n".join(lines)
            body = {"messages": turn, "max_tokens": 2, "ignore_eos": True}
            usage = (await client.post(CHAT, json=body)).json()["usage"]
        assert usage == {**usage, "prompt_tokens": answer["count"], "completion_tokens": 2}
        assert parsed is not None
        assert tokenizer.decode(answer["tokens"][: parsed.prefix_tokens]) == "\n".join([*lines[:-2], "user  "])

    async def test_what_the_template_refuses_is_refused(self, load: Load) -> None:
        worker = load()
        worker.engine.tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
        async with reaching(make_engine_app(worker)) as client:
            error = await refusal(client, CHAT, {"messages": [SYSTEM]})
        assert "Roles must alternate" in error["message"]


class TestOtherRoutes:
    async def test_tokenize(self, client: Client, worker: EngineWorker) -> None:
        tokenizer = worker.engine.tokenizer
        answer = (await client.post("/tokenize", json={"prompt": "a is", "return_token_strs": True})).json()
        tokens = tokenizer.encode("a is")
        assert answer == {
            "count": len(tokens),
            "max_model_len": LONGEST,
            "tokens": tokens,
            "token_strs": tokenizer.convert_ids_to_tokens(tokens),
        }
        answer = (await client.post("/tokenize", json={"messages": [SYSTEM]})).json()
        rendered = tokenizer.apply_chat_template([SYSTEM], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(answer["tokens"]) == rendered

    async def test_metrics_count_what_was_found_in_each_tier(self, load: Load) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        worker = load()
        async with reaching(make_engine_app(worker)) as client:
            for _ in range(2):
                usage = (await complete(client, "a is a document " * 20, **facts(60)))["usage"]
            await complete(client, kv_transfer_params={"ragorder": 7})
            page = (await client.get("/metrics")).text
        families = list(text_string_to_metric_families(page))
        stats = TierStats.of(families)
        assert usage["prompt_tokens_details"]["cached_tokens"] == stats.hits.device == 60
        assert stats.hits.total == worker.stats().prompt_tokens
        device, host = stats.tiers
        assert (device.tier, host.tier) == ("device", "host")
        assert device.bytes > 0 and host.capacity_bytes == worker.stats().cache.host.capacity_bytes
        assert (stats.with_facts, stats.documents, stats.unreadable_facts, stats.without_facts) == (2, 2, 1, 0)
        samples = [sample for family in families for sample in family.samples]
        values = {sample.name: sample.value for sample in samples if not sample.labels}
        generated = worker.stats().generated_tokens
        gaps = generated - 3
        assert values["ragorder_engine_up"] == 1
        assert values["ragorder_engine_ttft_seconds_count"] == 3
        assert values["ragorder_engine_generated_tokens_total"] == generated
        assert values["ragorder_engine_time_between_tokens_seconds_count"] == gaps > 0
        buckets = [each.value for each in samples if each.name == "ragorder_engine_time_between_tokens_seconds_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == gaps
        assert all(sample.name.startswith(("ragorder_", "vllm:")) for sample in samples)
