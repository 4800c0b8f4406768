"""An engine in a process that may have less memory than it asks for: it serves, slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.families import make_model
from support.streamed import saved

SCRIPT = """
import json, os, resource, sys
import torch, transformers
torch.set_num_threads(1)
from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
folder, device_bytes, more, ballast = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "ballast"
transformers.LlamaForCausalLM
prompts = [[(7 * place + seed) % 300 for place in range(300)] for seed in range(3)]
requests = [Request(prompt, [100, 200], Sampling(max_tokens=5)) for prompt in prompts]
# What the process takes before it has a model, and what torch takes with its first product.
torch.ones(512, 512) @ torch.ones(512, 512)
taken = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
if more:
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
settings = EngineSettings(
    device_bytes=device_bytes, host_bytes=0, device_tokens=1024, max_batch_tokens=512, verify=False
)
engine = TieredEngine.load(folder, settings)
first = engine.generate(requests)
held = []
if ballast:
    # Someone else takes the rest, but for a megabyte.
    size = 64 << 20
    while size >= 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
second = engine.generate([Request(prompt[50:], [100], Sampling(max_tokens=5)) for prompt in prompts])
stream = engine.stats().stream
del held
print(json.dumps({
    "tokens": [[*each.token_ids] for each in (*first, *second)],
    "errors": [each.error for each in (*first, *second) if each.error],
    "layers": [stream.device_layers, stream.disk_layers, stream.slots],
    "failed_steps": engine.stats().failed_steps,
}))
engine.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
class TestLessMemoryThanAsked:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """160 MB of weights in 16 layers."""
        sizes = {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 16, "num_attention_heads": 8}
        model = make_model("Llama", max_position_embeddings=1024, **sizes)
        return saved(model, tmp_path_factory.mktemp("models") / "llama")

    def run(self, folder: Path, more: int, ballast: str = "") -> dict[str, Any]:
        # Each arena of the allocator reserves 64 MB of addresses, which count although nothing is there.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), str(1 << 30), str(more), ballast],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def test_it_serves_with_the_layers_that_fit(self, folder: Path) -> None:
        whole = self.run(folder, 0)
        assert whole["layers"] == [16, 0, 0]
        less = self.run(folder, 160 << 20)
        assert less["errors"] == []
        assert less["tokens"] == whole["tokens"]
        device, disk, slots = less["layers"]
        assert 0 < disk <= 16 and device + disk == 16 and slots >= 1

    def test_it_goes_on_when_others_take_the_rest(self, folder: Path) -> None:
        whole = self.run(folder, 0)
        less = self.run(folder, 320 << 20, "ballast")
        assert less["errors"] == []
        assert less["tokens"] == whole["tokens"]
        assert less["failed_steps"] > 0
