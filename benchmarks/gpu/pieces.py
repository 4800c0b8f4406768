"""vLLM in pieces, for a GPU machine that has torch but no package index.

    python benchmarks/gpu/pieces.py cut -o .vllm                     # here: download, and cut .vllm/00, .vllm/01 ...
    python benchmarks/gpu/pieces.py join .vllm --into /tmp/vllm      # there, once a piece: the last one installs
    PYTHONPATH=/tmp/vllm/site python benchmarks/gpu/pieces.py check  # does it load, and does it answer?

There only the standard library is needed. Of vLLM's wheel the pieces leave out what a Llama or Qwen in bfloat16 does
not load on a Hopper GPU: 190 of 304 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

VLLM = "0.26.0"
"""The newest one that is built for torch 2.11 (0.27 for 2.13, 0.33 for 2.14)."""
PYTHON = "3.12"
"""Of the machine, as are the packages in `_THERE`."""
PIECE_BYTES = 60 << 20
_MANIFEST = "manifest.json"
_TAR = "wheels.tar"
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 26, 27, 28, 31, 34, 35)))

# FlashAttention 3 is what Hopper uses; the others serve MoE, MLA and quantised models, or are another server.
_UNUSED = (
    "vllm/vllm-rs",
    "vllm/_moe_C*.so",
    "vllm/_flashmla*.so",
    "vllm/_qutlass*.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C*.so",
    "vllm/third_party/deep_gemm/*.so",
    "vllm/third_party/*.hpp",
    "vllm/third_party/*.cuh",
    "vllm/third_party/*.h",
)

# What vLLM imports before it serves a dense model, and what this project's evaluation imports.
_NEEDED = (
    "cachetools", "blake3", "fastapi>=0.133,<0.137", "starlette", "uvicorn", "openai", "pydantic", "pydantic-settings",
    "prometheus-fastapi-instrumentator", "partial-json-parser", "jsonschema", "pyzmq", "msgspec", "watchfiles",
    "python-json-logger", "pybase64", "cbor2", "ijson", "setproctitle", "openai-harmony", "python-multipart",
    "llguidance<1.8", "outlines_core==0.2.14", "lark==1.2.2", "diskcache", "gguf", "mistral_common", "httpx2", "click",
    "rich", "orjson", "depyf==0.20.0", "opentelemetry-sdk", "cloudpickle", "apache-tvm-ffi==0.1.11",
)  # fmt: skip

# What these need is there or above, and pip would look at every torch to find out.
_ALONE = ("compressed-tensors==0.17.0", "xgrammar==0.2.8", "lm-format-enforcer==0.11.3", "interegular==0.3.3")

# These are there, with torch.
_THERE = (
    "torch", "torchvision", "torchaudio", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub",
    "numpy", "scipy", "pandas", "numba", "pillow", "regex", "requests", "aiohttp", "httpx", "httpcore", "anyio",
    "protobuf", "sentencepiece", "tiktoken", "sympy", "networkx", "filelock", "fsspec", "hf-xet", "psutil", "tqdm",
    "pyyaml", "six", "einops", "ninja", "setuptools", "opencv-python-headless", "uvloop",
)  # fmt: skip


def resolve(requirements: Iterable[str], python: str = PYTHON) -> list[str]:
    """Return NAME==VERSION of the wheels, with all that they need and the machine does not have."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--target", folder, "--report", str(report))
        _pip("install", *options, *_target(python), *requirements)
        found = [entry["metadata"] for entry in json.loads(report.read_text("utf-8"))["install"]]
    named = {_plain(each["name"]): f"{each['name']}=={each['version']}" for each in found}
    return sorted(
        wheel for name, wheel in named.items() if name not in _THERE and not name.startswith(("nvidia-", "cuda-"))
    )


def _target(python: str) -> list[str]:
    words = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    return [*words, *(word for each in _PLATFORMS for word in ("--platform", f"{each}_x86_64"))]


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)  # noqa: S603


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download(folder: Path, wheels: Iterable[str], python: str = PYTHON) -> None:
    """Bring the wheels that are not in the folder yet."""
    folder.mkdir(parents=True, exist_ok=True)
    here = {
        f"{_plain(name)}=={version}" for name, version in (path.name.split("-")[:2] for path in folder.glob("*.whl"))
    }
    for wheel in wheels:
        name, _, version = wheel.partition("==")
        if f"{_plain(name)}=={version}" not in here:
            _pip("download", "--no-deps", *_target(python), "-d", str(folder), wheel)


def cut(wheels: Path, output: Path, piece_bytes: int = PIECE_BYTES) -> dict[str, Any]:
    """Cut the folder's wheels, without what is unused, into folders of `output`. Return their manifest."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        whole = Path(scratch) / _TAR
        with tarfile.open(whole, "w") as tar:
            for wheel in sorted(wheels.glob("*.whl")):
                lean = _lean(wheel, Path(scratch) / wheel.name) if wheel.name.startswith("vllm-") else wheel
                tar.add(lean, wheel.name)
        pieces: list[dict[str, Any]] = []
        with whole.open("rb") as file:
            while block := file.read(piece_bytes):
                folder = output / f"{len(pieces):02}"
                folder.mkdir(exist_ok=True)
                (folder / "piece").write_bytes(block)
                pieces.append({"bytes": len(block), "sha256": hashlib.sha256(block).hexdigest()})
    for stale in sorted(output.glob("[0-9][0-9]"))[len(pieces) :]:
        shutil.rmtree(stale)
    manifest = {"wheels": sorted(path.name for path in wheels.glob("*.whl")), "pieces": pieces}
    for number in range(len(pieces)):
        (output / f"{number:02}" / _MANIFEST).write_text(json.dumps(manifest), "utf-8")
    return manifest


def _lean(wheel: Path, into: Path) -> Path:
    # Compiled code shrinks by a third more with LZMA.
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as lean:
        for member in full.infolist():
            if not any(fnmatch(member.filename, pattern) for pattern in _UNUSED):
                kind = zipfile.ZIP_LZMA if member.file_size > 1 << 20 else zipfile.ZIP_DEFLATED
                lean.writestr(member.filename, full.read(member), compress_type=kind)
    return into


def join(pieces: Path, into: Path) -> bool:
    """Keep the pieces in the folder; unpack all once the last is here. Raises ValueError for a damaged piece."""
    into.mkdir(parents=True, exist_ok=True)
    for folder in sorted(pieces.glob("[0-9][0-9]")):
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        block = (folder / "piece").read_bytes()
        if hashlib.sha256(block).hexdigest() != manifest["pieces"][int(folder.name)]["sha256"]:
            raise ValueError(f"{folder} is damaged: send it again")
        (into / folder.name).write_bytes(block)
        (into / _MANIFEST).write_text(json.dumps(manifest), "utf-8")
    manifest = json.loads((into / _MANIFEST).read_text("utf-8"))
    expected = [into / f"{number:02}" for number in range(len(manifest["pieces"]))]
    missing = [path.name for path in expected if not path.is_file()]
    site = into / "site"
    if missing:
        _say(f"{len(expected) - len(missing)} of {len(expected)} pieces are here, missing: {', '.join(missing)}")
        return False
    if not site.is_dir():
        _unpack(expected, into, site)
    _say(f"{len(manifest['wheels'])} wheels are in {site}")
    return True


def _unpack(pieces: list[Path], into: Path, site: Path) -> None:
    whole, made = into / _TAR, into / "unpacking"
    with whole.open("wb") as file:
        for path in pieces:
            with path.open("rb") as piece:
                shutil.copyfileobj(piece, file)
    shutil.rmtree(made, ignore_errors=True)
    with tarfile.open(whole) as tar:
        for member in tar:
            wheel = tar.extractfile(member)
            if wheel is None:
                raise ValueError(f"{member.name} is no file: cut the pieces again")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(made)  # noqa: S202
    # Where a wheel keeps what belongs elsewhere; scripts and headers are not needed.
    for data in made.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, made, dirs_exist_ok=True)
    whole.unlink()
    # A folder that is there is whole.
    made.rename(site)


_ANSWER = """
import sys, time
began = time.perf_counter()
def say(text):
    print(f"{time.perf_counter() - began:6.1f} s  {text}", flush=True)
import torch, vllm
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
say(f"vLLM {vllm.__version__} loads, with torch {torch.__version__} on {device}")
from vllm import LLM, SamplingParams
model = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512,
            block_size=32, kv_cache_memory_bytes=1 << 26, enforce_eager=True, max_num_seqs=4)
say("a model of two layers is loaded")
prompt, sampling = {"prompt_token_ids": [*range(3, 103)]}, SamplingParams(
    max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
first, second = (model.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2))
assert len(first.outputs[0].token_ids) == 8, first
assert list(first.outputs[0].token_ids) == list(second.outputs[0].token_ids), (first, second)
assert second.num_cached_tokens, second
say(f"it answers, and finds {second.num_cached_tokens} of 100 tokens cached")
"""
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def check(timeout_s: float | None = 180) -> int:
    """Load vLLM and a model of two layers, and answer; print each step as it is taken. Return 0, or what went wrong."""
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LLAMA), "utf-8")
        command = [sys.executable, "-c", _ANSWER, folder]
        try:
            code = subprocess.run(command, env=environment, timeout=timeout_s, check=False).returncode  # noqa: S603
        except subprocess.TimeoutExpired:
            code = 1
            _say(f"vLLM does not answer within {timeout_s} s")
    _say("vLLM works" if not code else "vLLM does not work here: the lines above say how far it came")
    return code


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="vLLM in pieces, for a GPU machine without a package index.")
    commands = parser.add_subparsers(dest="command", required=True)
    cutting = commands.add_parser("cut", help="Download the wheels and cut them, here.")
    cutting.add_argument("-o", "--output", type=Path, required=True, help="Folder of the pieces.")
    joining = commands.add_parser("join", help="Keep the pieces that came, and install them once all have, there.")
    joining.add_argument("pieces", type=Path, help="Folder of the pieces that came.")
    joining.add_argument("--into", type=Path, required=True, help="Folder that stays: INTO/site is for PYTHONPATH.")
    commands.add_parser("check", help="Load vLLM and a model of two layers, and answer.")
    return parser


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.command == "check":
        return check()
    if given.command == "join":
        join(given.pieces, given.into)
        return 0
    wheels = given.output / "wheels"
    download(wheels, [f"vllm=={VLLM}", *_ALONE, *resolve(_NEEDED)])
    manifest = cut(wheels, given.output)
    for number, piece in enumerate(manifest["pieces"]):
        _say(f"{given.output / f'{number:02}'}: {piece['bytes'] / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
