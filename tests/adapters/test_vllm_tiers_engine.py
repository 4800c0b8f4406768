"""Host and disk below the device of a real vLLM engine, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ENGINE = '''
import json, random, sys, time
from pathlib import Path

SYSTEM, DOCUMENT, QUESTION, DOCUMENTS, BLOCK = 64, 256, 20, 12, 32
RUBBISH = ["rubbish", 7, [], {"documents": [3, 1]}, {"documents": "all"}, {"tenant": 1}, {"cost": "dear"}, {"cost": -1}]


def main(model, disk, run):
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from ragorder.adapters.vllm_tiers import TierSettings
    from ragorder.eval.engines.vllm import has_fast_bfloat16

    bfloat16 = has_fast_bfloat16()
    # Two layers, keys and values, of two heads with 64 numbers.
    chunk = BLOCK * 2 * 2 * 2 * 64 * (2 if bfloat16 else 4)
    # The second engine has the same disk, and leaves its device to vLLM.
    settings = TierSettings(
        host_bytes=48 * chunk, disk_path=Path(disk), disk_bytes=1 << 27, device_order=run == "first"
    )
    llm = LLM(
        model=model,
        dtype="bfloat16" if bfloat16 else "float32",
        enforce_eager=True,
        block_size=BLOCK,
        num_gpu_blocks_override=24 + 1,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=384,
        max_num_batched_tokens=384,
        max_num_seqs=4,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=settings.kv_transfer_config(),
    )
    sampling = {"max_tokens": 4, "temperature": 0.0, "logprobs": 5, "ignore_eos": True}
    draw = random.Random(0)

    def tokens(count):
        return [draw.randrange(300, 2000) for _ in range(count)]

    system = tokens(SYSTEM)
    prompts = [system + tokens(DOCUMENT + QUESTION) for _ in range(DOCUMENTS)]

    def answers(prompts, params=None, salt=None):
        extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
        requests = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        outputs = llm.generate(requests, SamplingParams(**sampling, **extra), use_tqdm=False)
        return [
            {
                "cached": output.num_cached_tokens,
                "logprobs": [
                    sorted([token, entry.logprob] for token, entry in step.items())
                    for step in output.outputs[0].logprobs
                ],
            }
            for output in outputs
        ]

    def serve(prompt, **options):
        return answers([prompt], **options)[0]

    def counted():
        """Counters and gauges by name and labels."""
        values = {}
        for metric in llm.get_metrics():
            wanted = ("vllm:ragorder_", "vllm:kv_offload_store_bytes", "vllm:prompt_tokens_cached_by_source")
            if metric.name.startswith(wanted) and hasattr(metric, "value"):
                labels = [f"{k}={v}" for k, v in sorted(metric.labels.items()) if k not in ("engine", "model_name")]
                values["|".join([metric.name.removesuffix("_total").removeprefix("vllm:"), *labels])] = metric.value
        return values

    def settle():
        """Let what is under way come to its end: copies to the host, and from there to the disk."""
        core = llm.llm_engine.engine_core.engine_core
        deadline = time.monotonic() + 20
        while core.scheduler.has_requests() and time.monotonic() < deadline:
            llm.llm_engine.step()
            time.sleep(0.002)
        assert not core.scheduler.has_requests(), "copies that never end"

    said = {"tokens": SYSTEM + DOCUMENT, "documents": DOCUMENTS, "device_tokens": 24 * BLOCK}
    engine_id = llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    said["names"] = [path.name for path in Path("/dev/shm").glob(f"*{engine_id}*")]
    if run == "again":
        said["start"] = counted()
        said["answers"] = [serve(prompt) for prompt in prompts[:4]]
        said["end"] = counted()
        print(json.dumps(said))
        llm.llm_engine.engine_core.shutdown()
        return

    said["cold"] = [serve(prompt, salt=f"cold {place}") for place, prompt in enumerate(prompts)]
    # Once more at once, from the device: what a tier brings back later is to be the same KV.
    both = [(serve(prompt), serve(prompt)) for prompt in prompts]
    said["first"], said["warm"] = map(list, zip(*both))
    settle()
    said["before"] = counted()
    # The last ones first, or each would be gone just before its turn, as in any loop over more than fits.
    said["second"] = [serve(prompt) for prompt in reversed(prompts)][::-1]
    settle()
    said["after"] = counted()

    # The device forgets all. A new document after the system prompt, which every request has used.
    llm.reset_prefix_cache()
    said["upper"] = serve(system + tokens(DOCUMENT))
    said["after_upper"] = counted()

    documents = {"documents": [SYSTEM + DOCUMENT], "tenant": "t", "cost": 0.001}
    said["facts"] = [serve(prompts[0], params={"ragorder": facts}) for facts in [documents, *RUBBISH]]
    settle()
    said["after_facts"] = counted()

    worker = get_kv_transfer_group().connector_worker.worker
    copy = worker.copy

    def broken(places, parts, to_host):
        if to_host is bad:
            raise OSError("broken")
        return copy(places, parts, to_host)

    worker.copy, bad = broken, False
    llm.reset_prefix_cache()
    said["failed_load"] = serve(prompts[0])
    worker.copy = copy
    llm.reset_prefix_cache()
    said["load_after"] = serve(prompts[0])

    new = system + tokens(DOCUMENT + QUESTION)
    worker.copy, bad = broken, True
    said["failed_store"] = serve(new)
    settle()
    worker.copy = copy
    llm.reset_prefix_cache()
    said["store_after"] = serve(new)
    llm.reset_prefix_cache()
    said["stored_again"] = serve(new)
    settle()
    said["after_failures"] = counted()

    said["together"] = answers(prompts)
    settle()
    said["end"] = counted()

    # What is used most, then a scan of what is used once: in the order of the policy, and in vLLM's own.
    for name in ("policy", "own"):
        llm.reset_prefix_cache()
        for _ in range(8):
            serve(prompts[0])
        for _ in range(6):
            serve(tokens(DOCUMENT))
        said["before_" + name] = counted()
        said[name] = serve(prompts[0])
        said["after_" + name] = counted()
        # As after an error: there is no way back.
        llm.llm_engine.engine_core.engine_core.scheduler.connector.device_order.failures = 1
    print(json.dumps(said))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
'''


@pytest.fixture(scope="module")
def engine(python: Any, vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the engine in a process of its own, over the same disk again and again, and gives what it said."""
    script = tmp_path_factory.mktemp("tiers") / "in_process.py"
    script.write_text(ENGINE, "utf-8")
    quiet = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }

    def run(what: str) -> dict[str, Any]:
        root = Path(__file__).parents[2]
        done = python(script, vllm_model, script.parent / "disk", what, timeout=240, path=[root], **quiet)
        assert done.returncode == 0, done.stderr[-6000:]
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    return run


@pytest.fixture(scope="module")
def served(engine: Any) -> dict[str, Any]:
    return engine("first")


def grown(said: dict[str, Any], since: str, until: str, name: str) -> float:
    return said[until].get(name, 0) - said[since].get(name, 0)


def by_source(said: dict[str, Any], since: str, until: str) -> dict[str, float]:
    names = {source: f"prompt_tokens_cached_by_source|source={source}" for source in ("device", "host", "disk")}
    return {source: grown(said, since, until, name) for source, name in names.items()}


def alike(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """The same tokens, and logprobs that differ by rounding alone: some processors multiply a whole prompt and its last
    block in different orders."""

    def flat(answers: list[dict[str, Any]]) -> list[Any]:
        return [number for answer in answers for step in answer["logprobs"] for pair in step for number in pair]

    return flat(answers) == pytest.approx(flat(others), rel=0, abs=1e-5)


@pytest.mark.vllm
class TestARealEngine:
    """On a CPU, in its process: 24 blocks of 32 tokens on the device, 48 in host memory, and a disk for all."""

    def test_whole_documents_come_back_from_host_and_disk_and_are_copied_once(self, served: dict[str, Any]) -> None:
        assert [answer["cached"] for answer in served["second"]] == [served["tokens"]] * served["documents"]
        sources = by_source(served, "before", "after")
        assert sources["host"] > 0
        assert sources["disk"] > 0
        assert sum(sources.values()) == served["tokens"] * served["documents"]
        assert grown(served, "before", "after", "ragorder_evicted_chunks|tier=device") > 0
        assert grown(served, "before", "after", "kv_offload_store_bytes") == 0

    def test_answers_are_those_of_a_cold_engine_and_of_the_device(self, served: dict[str, Any]) -> None:
        assert all(answer["cached"] == 0 for answer in served["cold"])
        assert alike(served["second"], served["cold"])
        assert served["second"] == served["warm"]

    def test_upper_nodes_are_in_the_host_when_the_device_has_lost_all(self, served: dict[str, Any]) -> None:
        assert served["upper"]["cached"] == 64
        assert by_source(served, "after", "after_upper") == {"device": 0, "host": 64, "disk": 0}

    def test_rubbish_in_place_of_facts_changes_nothing(self, served: dict[str, Any]) -> None:
        assert served["facts"] == served["warm"][:1] * len(served["facts"])
        assert all(answer["cached"] == served["tokens"] for answer in served["facts"])
        expected = {
            "requests_with_facts": 1,
            "requests_with_unreadable_facts": len(served["facts"]) - 1,
            "requests_without_facts": 0,
            "documents": 1,
        }
        assert {name: grown(served, "after_upper", "after_facts", f"ragorder_{name}") for name in expected} == expected

    def test_a_load_that_fails_is_computed(self, served: dict[str, Any]) -> None:
        assert served["failed_load"]["cached"] < served["tokens"]
        assert served["load_after"]["cached"] == served["tokens"]
        assert alike([served["failed_load"]], served["cold"][:1])
        assert served["load_after"] == served["warm"][0]

    def test_a_store_that_fails_stores_nothing(self, served: dict[str, Any]) -> None:
        assert served["failed_store"]["cached"] == served["store_after"]["cached"] == 64
        assert served["stored_again"]["cached"] == served["tokens"]
        assert served["store_after"] == served["failed_store"]
        assert alike([served["stored_again"]], [served["failed_store"]])
        assert grown(served, "after_facts", "after_failures", "ragorder_failed_transfers|tier=host") == 2

    def test_requests_side_by_side_find_what_there_is_room_to_bring(self, served: dict[str, Any]) -> None:
        """All twelve wait at once, and want 98 chunks in the 48 places of host memory: not each can have its own."""
        cached = [answer["cached"] for answer in served["together"]]
        assert all(tokens % 32 == 0 and 64 <= tokens <= served["tokens"] for tokens in cached)
        assert sum(cached) >= served["documents"] * served["tokens"] / 2
        assert [len(answer["logprobs"]) for answer in served["together"]] == [4] * served["documents"]

    def test_the_device_keeps_what_is_used_most(self, served: dict[str, Any]) -> None:
        """Host or disk would bring it back: what tells is where it was found."""
        assert by_source(served, "before_policy", "after_policy") == {"device": served["tokens"], "host": 0, "disk": 0}
        assert by_source(served, "before_own", "after_own")["device"] == 0
        assert [served[name]["logprobs"] for name in ("policy", "own")] == [served["warm"][0]["logprobs"]] * 2
        assert served["after_policy"]["ragorder_device_order"] == 1

    def test_says_what_is_where_and_a_killed_engine_would_leave_no_named_memory(self, served: dict[str, Any]) -> None:
        assert served["names"] == []
        end = served["end"]
        for tier in ("device", "host", "disk"):
            assert end[f"ragorder_chunks|tier={tier}"] > 0
            assert 0 < end[f"ragorder_bytes|tier={tier}"] <= end[f"ragorder_capacity_bytes|tier={tier}"]
            assert end[f"ragorder_oldest_chunk_seconds|tier={tier}"] > 0
        assert end["ragorder_chunks|tier=host"] <= 48
        assert end["ragorder_evicted_chunks|tier=host"] > 0

    @pytest.mark.slow
    def test_a_new_engine_finds_what_the_disk_keeps(self, served: dict[str, Any], engine: Any) -> None:
        again = engine("again")
        assert [answer["cached"] for answer in again["answers"]] == [served["tokens"]] * 4
        assert again["answers"] == served["warm"][:4]
        sources = by_source(again, "start", "end")
        assert sources["disk"] >= 64 + 4 * (served["tokens"] - 64)
