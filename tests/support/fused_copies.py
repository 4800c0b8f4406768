"""Fused requests in two checkouts, one that copies documents and one that shares them, in turn.

`PYTHONPATH=tests python -m support.fused_copies COPIES SHARED SEEDS`; COPIES is at the commit before 5ef98f7e.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from statistics import mean, stdev

import click

POOLS, SHARES = (2048, 4096), (0.15, 0.05)
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}

# Runs in either checkout, which have the same engine interface.
_SERVE = """
import json, random, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from ragorder.kernels.engine import EngineSettings, Fusion, Request, Sampling, TieredEngine

torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096,
)).eval()
draw = random.Random(int(sys.argv[1]))
tokens = lambda count: draw.choices(range(2000), k=count)
system, documents = tokens(16), [tokens(96) for _ in range(10)]
asked = [(draw.sample(range(10), 10), tokens(16)) for _ in range(24)]

def request(order, question, answer, fusion):
    ids, ends = list(system), []
    for place in order:
        ids += documents[place]
        ends.append(len(ids))
    sampling = Sampling(max_tokens=answer, ignore_eos=True)
    return Request(ids + question, ends, sampling, prefix_tokens=16, fusion=fusion)

for pool, share in json.loads(sys.argv[2]):
    settings = EngineSettings(
        reuse="fused", device_tokens=pool, host_bytes=0, replicate_nodes=0, device="cpu", verify=False
    )
    with TieredEngine(model, settings=settings) as engine:
        engine.generate([request([place], [0], 1, "exact") for place in range(10)])
        for order, question in asked:
            engine.add(request(order, question, 16, Fusion(share)))
        began_s, steps, most, answers = time.process_time(), 0, 0, {}
        while engine.has_unfinished:
            ended = [update.completion for update in engine.step() if update.completion is not None]
            steps, most = steps + 1, max(most, engine.stats().running + len(ended))
            answers |= {each.request_id: each.token_ids for each in ended}
        print(json.dumps([most, steps, time.process_time() - began_s, sorted(answers.items())]))
"""


def main(copies: str, shared: str, seeds: int) -> None:
    cells = [(pool, share) for pool in POOLS for share in SHARES]
    found = defaultdict(list)
    for seed in range(seeds):
        # Each seed begins with the other checkout.
        for name, checkout in sorted({"copies": copies, "shared": shared}.items(), reverse=bool(seed % 2)):
            environment = os.environ | {"PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", _SERVE, str(seed), json.dumps(cells)]
            run = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
            for cell, line in zip(cells, run.stdout.splitlines()[-len(cells) :], strict=True):
                found[cell, name].append(json.loads(line))
    click.echo("24 waiting requests for 10 documents; processor seconds by seed; the ratio's mean and 95 % interval")
    click.echo(
        "pool | recomputed, % | copied: most, steps | shared: most, steps | copied, s | shared, s | times faster"
    )
    for pool, share in cells:
        before, after = found[(pool, share), "copies"], found[(pool, share), "shared"]
        assert [each[3] for each in before] == [each[3] for each in after], "answers differ"
        ratios = [math.log(one[2] / other[2]) for one, other in zip(before, after, strict=True)]
        half = _STUDENT[len(ratios)] * stdev(ratios) / math.sqrt(len(ratios))
        times = "{:.2f} ({:.2f} to {:.2f})".format(*(math.exp(mean(ratios) + each) for each in (0, -half, half)))
        counts = [f"{max(each[0] for each in runs)}, {max(each[1] for each in runs)}" for runs in (before, after)]
        seconds = [" ".join(f"{each[2]:.2f}" for each in runs) for runs in (before, after)]
        click.echo(" | ".join([str(pool), f"{100 * share:g}", *counts, *seconds, times]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
