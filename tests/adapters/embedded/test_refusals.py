"""What the embedded engine refuses: fields, bodies, and how much of them becomes objects."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.embedded_app import CHAT, COMPLETIONS, LONGEST, SYSTEM, Client, Load, chat, complete, reaching, refusal
from support.rings import examples
from support.waiting import eventually

from ragorder.adapters.embedded import EngineWorker, make_engine_app
from ragorder.adapters.http_server.untrusted_json import MAX_VALUES

pytestmark = pytest.mark.merge

UNSUPPORTED = [
    ("n", 2),
    ("best_of", 2),
    ("echo", True),
    ("suffix", "x"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("frequency_penalty", 0.5),
    ("presence_penalty", -1),
    ("repetition_penalty", 1.1),
    ("top_k", 5),
    ("min_p", 0.1),
    ("min_tokens", 3),
    ("logit_bias", {"5": 1}),
    ("stop_token_ids", [1]),
    ("skip_special_tokens", False),
    ("truncate_prompt_tokens", 5),
    ("reasoning_effort", "high"),
    ("continue_final_message", True),
    ("chat_template", "{{ messages }}"),
    ("no_such_field", 1),
]
NEUTRAL = {
    "n": 1,
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "logit_bias": {},
    "seed": None,
    "user": "somebody",
    "metadata": {"a": "b"},
    "reasoning_effort": None,
}


REFUSED: dict[str, list[Any]] = {
    "max_tokens": [0, "5"],
    "temperature": [-1],
    "top_p": [0, 1.5],
    "seed": [2**70],
    "stop": ["", ["x"] * 17],
    "logprobs": [21],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "deadline_s": [0, -1, "soon"],
    "cache_salt": ["a/b", ""],
}


class TestRefusals:
    @pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=lambda value: value if isinstance(value, str) else "")
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    async def test_an_unsupported_field_is_named(self, path: str, name: str, value: Any, client: Client) -> None:
        body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [SYSTEM]}
        error = await refusal(client, path, body | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_field")
        assert name in error["message"]

    async def test_fields_that_change_nothing_are_accepted(self, client: Client) -> None:
        assert (await complete(client, **NEUTRAL))["choices"] == (await complete(client))["choices"]
        assert (await chat(client, **NEUTRAL))["choices"] == (await chat(client))["choices"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (COMPLETIONS, {}, "prompt"),
            (COMPLETIONS, {"prompt": []}, "prompt"),
            (COMPLETIONS, {"prompt": [[]]}, None),
            (COMPLETIONS, {"prompt": ""}, None),
            (COMPLETIONS, {"prompt": 5}, "prompt"),
            (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
            (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
            (COMPLETIONS, {"prompt": [-1]}, None),
            (COMPLETIONS, {"prompt": [10**6]}, None),
            (COMPLETIONS, {"prompt": [10**40]}, None),
            (COMPLETIONS, {"prompt": [[1, 2], [10**6]]}, None),
            (COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, None),
            *((COMPLETIONS, {"prompt": "a", name: value}, name) for name, each in REFUSED.items() for value in each),
            (CHAT, {}, "messages"),
            (CHAT, {"messages": []}, "messages"),
            (CHAT, {"messages": "hello"}, "messages"),
            (CHAT, {"messages": [{}]}, "messages[0]"),
            (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            (CHAT, {"messages": [SYSTEM | {"tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
            (CHAT, {"messages": [SYSTEM | {"reasoning": 1}]}, "messages[0].reasoning"),
            (CHAT, {"messages": [SYSTEM | {"audio": {"id": "1"}}]}, "messages[0]"),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
            (CHAT, {"messages": [SYSTEM], "top_logprobs": 3}, "top_logprobs"),
            (CHAT, {"messages": [SYSTEM], "logprobs": 3}, "logprobs"),
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ],
        ids=ascii,
    )
    async def test_a_wrong_field_is_named(
        self, path: str, body: Any, param: str | None, client: Client, worker: EngineWorker
    ) -> None:
        assert (await refusal(client, path, body))["param"] == param
        assert eventually(lambda: not worker.engine.has_unfinished)

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "\xff"}'],
        ids=ascii,
    )
    async def test_only_json_objects_are_read(self, body: bytes, client: Client) -> None:
        assert (await refusal(client, COMPLETIONS, body))["code"] == "invalid_json"

    @pytest.mark.parametrize(
        ("path", "body", "status", "code"),
        [
            (COMPLETIONS, b'{"prompt": "a", "response_format": "\xff"}', 400, "unsupported_field"),
            (COMPLETIONS, {"prompt": "a", "model": "gpt"}, 404, "model_not_found"),
            (COMPLETIONS, {"prompt": "a" * 1000}, 413, "body_too_large"),
            ("/v1/embeddings", {}, 404, "not_found"),
        ],
    )
    async def test_other_refusals_have_a_status_and_a_code(
        self, path: str, body: Any, status: int, code: str, worker: EngineWorker
    ) -> None:
        async with reaching(make_engine_app(worker, body_limit=1000)) as client:
            assert (await refusal(client, path, body, status=status))["code"] == code
            assert await complete(client, model=worker.engine.model_name)
            assert (await client.get(COMPLETIONS)).status_code == 405

    @pytest.mark.parametrize("length", [3 * LONGEST, 2_000_000])
    async def test_a_prompt_beyond_the_context_is_refused(self, length: int, client: Client) -> None:
        began = time.process_time()
        messages = [{"role": "user", "content": "a " * length}]
        prompts = [(COMPLETIONS, {"prompt": "a " * length}), (COMPLETIONS, {"prompt": [5] * length})]
        errors = [await refusal(client, *each) for each in (*prompts, (CHAT, {"messages": messages}))]
        assert {error["code"] for error in errors} == {"context_length_exceeded"}
        assert str(LONGEST) in errors[0]["message"]
        assert time.process_time() - began < 20

    async def test_a_model_without_a_tokenizer_takes_tokens(self, load: Load, model: Path, tmp_path: Path) -> None:
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(model / name)
        async with reaching(make_engine_app(load(folder=tmp_path))) as client:
            answer = await complete(client, [5, 6, 7], logprobs=1, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 8
            assert (await refusal(client, COMPLETIONS, {"prompt": "a"}))["code"] == "no_tokenizer"
            assert (await refusal(client, COMPLETIONS, {"prompt": [5], "stop": "a"}))["code"] == "request_refused"
            assert (await refusal(client, CHAT, {"messages": [SYSTEM]}))["code"] == "no_chat_template"


def names(count: int) -> str:
    return ",".join(f'"{number:x}":0' for number in range(count))


class TestBodies:
    """What a body may be, and how much of it becomes objects."""

    @pytest.mark.parametrize(
        ("path", "frame"),
        [
            (COMPLETIONS, '{"prompt":"a","metadata":{ITEMS}}'),
            (COMPLETIONS, '{"prompt":"a",ITEMS}'),
            (COMPLETIONS, f'{{"prompt":"{"," * MAX_VALUES}",ITEMS}}'),
            (COMPLETIONS, '{"prompt":"a","kv_transfer_params":{ITEMS}}'),
            (COMPLETIONS, '{"prompt":[7],"stop":[{ITEMS}]}'),
            (CHAT, '{"messages":[{ITEMS}]}'),
            (CHAT, '{"messages":[],"chat_template_kwargs":{ITEMS}}'),
            ("/tokenize", '{"prompt":"a","x":[{ITEMS}]}'),
        ],
    )
    async def test_more_values_than_are_read_are_refused(self, path: str, frame: str, client: Client) -> None:
        error = await refusal(client, path, frame.replace("ITEMS", names(MAX_VALUES)).encode())
        assert (error["code"], error["param"]) == ("too_many_values", None)
        assert f"{MAX_VALUES:,}" in error["message"]

    @pytest.mark.parametrize("field", ["kv_transfer_params", "chat_template_kwargs"])
    async def test_options_that_are_kept_have_fewer(self, field: str, client: Client) -> None:
        body = f'{{"messages":[{{"role":"user","content":"a"}}],"{field}":{{{names(20_000)}}}}}'
        error = await refusal(client, CHAT, body.encode())
        assert (error["code"], error["param"]) == ("too_many_values", field)

    async def test_so_have_arguments_of_calls_together(self, client: Client) -> None:
        """They are JSON in a text of the body."""
        call = {"function": {"name": "look", "arguments": f"{{{names(9_000)}}}"}}
        messages = [SYSTEM, *({"role": "assistant", "tool_calls": [call]} for _ in range(2))]
        error = await refusal(client, CHAT, {"messages": messages})
        assert (error["code"], error["param"]) == ("too_many_values", "messages[2].tool_calls")
        deep = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"a":' * 10_000}}]}
        answer = await client.post(CHAT, json={"messages": [deep], "max_tokens": 1})
        assert answer.status_code == 200, "what is no JSON stays a text"

    async def test_token_ids_are_counted_apart(self, client: Client) -> None:
        """As many as several prompts have; each must fit into the context."""
        for ids in ([5] * 1_000_000, [[5]] * 600_000):
            error = await refusal(client, COMPLETIONS, {"prompt": ids})
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        many = '{"prompt":[[5]' + ",[5]" * 100_000 + f"],{names(MAX_VALUES + 100)}}}"
        assert (await refusal(client, COMPLETIONS, many.encode()))["code"] == "too_many_values"

    async def test_half_a_character_is_replaced(self, client: Client) -> None:
        expected = (await complete(client, "a \N{REPLACEMENT CHARACTER} b"))["choices"]
        body = b'{"prompt": "a \\ud83d b", "temperature": 0, "max_tokens": 8}'
        assert (await client.post(COMPLETIONS, content=body)).json()["choices"] == expected

    async def test_compressed_ones_are_read(self, client: Client) -> None:
        body = json.dumps({"prompt": "a is a document", "temperature": 0, "max_tokens": 8}).encode()
        answer = await client.post(COMPLETIONS, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert answer.json()["choices"] == (await complete(client))["choices"]
        answer = await client.post(COMPLETIONS, content=body, headers={"content-encoding": "br"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unknown_encoding")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, "<|im_end|>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# fmt: off
FIELDS = [
    "prompt", "messages", "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop",
    "ignore_eos", "logprobs", "cache_salt", "kv_transfer_params", "n", "tools", "response_format",
    "chat_template_kwargs", "add_special_tokens", "top_logprobs", "content", "role", "x",
]
# fmt: on


class TestFuzz:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
    def test_hostile_bodies_are_answered_or_refused(self, path: str, shared_worker: EngineWorker) -> None:
        app = make_engine_app(shared_worker)
        statuses = set()
        good: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [SYSTEM]}

        @settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3), st.binary(max_size=3))
        def fuzz(spoilt: dict[str, Any], mangled: bytes) -> None:
            body = good | spoilt
            if path != "/tokenize" and type(body.get("max_tokens")) is not int:
                body["max_tokens"] = 2
            content = json.dumps(body).encode("utf-8", "replace")
            if mangled:
                middle = len(content) // 2
                content = content[:middle] + mangled + content[middle:]
            response = runner.run(post(content))
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 404), response.text

        async def post(content: bytes) -> httpx2.Response:
            async with reaching(app) as client:
                return await client.post(path, content=content)

        with asyncio.Runner() as runner:
            fuzz()
        assert {200, 400} <= statuses
        assert shared_worker.failure is None
