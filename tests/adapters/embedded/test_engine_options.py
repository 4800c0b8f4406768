"""The options of `ragorder engine`: what reaches engine and orderer, and what is refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_server import Handler, LocalServer
from support.serve_process import Served

from ragorder.adapters.embedded import EngineWorker
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.models import loading
from ragorder.trie.profile import PrefillProfile

pytestmark = pytest.mark.merge

COMMAND = ("-c", "from ragorder.cli import main; main()")
Serving = Callable[..., Served]


class TestOptions:
    @pytest.fixture(scope="class")
    def profiles(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("cache")

    @pytest.fixture
    def unhelpful_hub(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """A model hub that answers every request with an error; the requested paths."""
        asked: list[str] = []

        class Unhelpful(Handler):
            def do_HEAD(self) -> None:
                asked.append(self.path)
                self.answer(503)

            do_GET = do_HEAD

        with LocalServer(Unhelpful) as hub:
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.base_url)
            monkeypatch.setattr(
                "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                f"{hub.base_url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            )
            yield asked

    @pytest.fixture
    def workers(self, monkeypatch: pytest.MonkeyPatch) -> list[EngineWorker]:
        """Those that the commands have made."""
        made, make_worker = list[EngineWorker](), EngineWorker.__init__

        def make(worker: EngineWorker, engine: Any, **options: Any) -> None:
            made.append(worker)
            make_worker(worker, engine, **options)

        monkeypatch.setattr(EngineWorker, "__init__", make)
        return made

    @pytest.fixture
    def serving(self, model: Path, profiles: Path, run_serve: Any, monkeypatch: pytest.MonkeyPatch) -> Serving:
        """Runs the command up to the moment from which it would serve."""
        monkeypatch.setattr("ragorder.kernels.profile_cache.cache_folder", lambda: profiles)

        def serving(*options: str, model: str | None = str(model), **environment: str) -> Served:
            chosen = [] if model is None else ["--model", model]
            served: Served = run_serve(*chosen, *options, command="engine", **environment)
            assert "Traceback" not in served.said
            return served

        return serving

    def test_without_options_the_engine_has_its_defaults(self, serving: Serving, workers: list[EngineWorker]) -> None:
        command = serving()
        assert command.exit_code == 0, command.said
        (worker,) = workers
        assert worker.engine.settings == EngineSettings(profile="auto")
        assert worker.max_unfinished == worker.engine.settings.max_requests + 1000

    def test_a_profile_is_measured_at_the_first_start_unless_it_is_declined(
        self, serving: Serving, profiles: Path, tmp_path: Path
    ) -> None:
        def measured(*options: str) -> bool:
            command = serving("--device-tokens", "512", *options)
            assert command.exit_code == 0, command.said
            return "measuring prefill times" in command.said

        (tmp_path / "damaged.json").write_text("{")
        assert not measured("--profile", "none")
        assert [measured(*options) for options in ((), (), ("--profile", "auto"))] == [True, False, False]
        command = serving("--device-tokens", "512")
        assert "cached prefixes are compared in seconds" in command.said
        path = command.orderer.settings.profile
        assert path is not None and path.parent == profiles / "profiles"
        assert set(PrefillProfile.from_file(path).loads) == {"host"}
        plain = serving("--device-tokens", "512", "--profile", "none")
        assert plain.orderer.settings.profile is None and "compared in seconds" not in plain.said
        refused = serving("--profile", str(tmp_path / "damaged.json"))
        assert (refused.exit_code, "this is not JSON: measure one" in refused.said) == (2, True)

    def test_all_options_reach_the_engine(self, serving: Serving, workers: list[EngineWorker], tmp_path: Path) -> None:
        profile = tmp_path / "profile.json"
        PrefillProfile((0, 100), (100, 200), ((1.0, 2.0), (1.5, 3.0))).to_file(profile)
        options: dict[str, tuple[Any, Any]] = {
            "--device-tokens": (2048, 2048),
            "--host-bytes": ("2MiB", 2 << 20),
            "--disk-path": (tmp_path / "kv", tmp_path / "kv"),
            "--disk-bytes": ("64MB", 64_000_000),
            "--policy": ("lru", "lru"),
            "--profile": (profile, profile),
            "--block-size": (32, 32),
            "--max-model-len": (512, 512),
            "--max-requests": (4, 4),
            "--max-batch-tokens": (256, 256),
            "--schedule": ("fcfs", "fcfs"),
            "--deadline": ("2m", 120.0),
            "--reuse": ("fused", "fused"),
            "--recompute": (0.2, 0.2),
            "--select": ("deviation", "deviation"),
            "--select-rounds": (2, 2),
            "--dtype": ("float32", "float32"),
            "--device": ("cpu", "cpu"),
        }
        given = [part for option, (text, _) in options.items() for part in (option, str(text))]
        command = serving(*given, "--max-waiting", "7")
        assert command.exit_code == 0, command.said
        values = {option[2:].replace("-", "_"): value for option, (_, value) in options.items()}
        values["deadline_s"] = values.pop("deadline")
        assert (workers[0].engine.settings, workers[0].max_unfinished) == (EngineSettings(**values), 4 + 7)

    @pytest.mark.parametrize(
        ("options", "environment", "expected"),
        [
            # Two layers of keys and values of one head with 64 numbers, four bytes each.
            ([], {}, {"block_size": 16, "capacity_tokens": 2048, "host_tokens": (2 << 20) // (2 * 2 * 64 * 4)}),
            ([], {}, {"reuse": "exact", "copies": "served"}),
            ([], {"RAGORDER_CAPACITY_TOKENS": "999"}, {"capacity_tokens": 999}),
            ([], {"RAGORDER_BLOCK_SIZE": "64"}, {"block_size": 64}),
            (
                ["--reuse", "fused", "--recompute", "0.3", "--copies", "all"],
                {},
                {"reuse": "fused", "recompute": 0.3, "copies": "all", "invest": True},
            ),
            (["--reuse", "fused"], {"RAGORDER_INVEST": "false"}, {"invest": False}),
        ],
    )
    def test_the_orderer_has_the_engines_sizes_and_reuse_unless_the_settings_say_otherwise(
        self, serving: Serving, options: list[str], environment: dict[str, str], expected: dict[str, Any]
    ) -> None:
        sizes = ["--device-tokens", "2048", "--host-bytes", "2MiB", "--dtype", "float32"]
        settings = serving(*sizes, *options, **environment).orderer.settings
        assert {name: getattr(settings, name) for name in expected} == expected

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ("--upstream http://x", "No such option '--upstream'"),
            ("--disk-bytes 1GiB", "--disk-bytes requires --disk-path"),
            ("--recompute 0.1", "--recompute requires --reuse fused"),
            ("--reuse exact --select deviation", "--select requires --reuse fused"),
            ("--reuse fused --recompute 1.5", "--recompute"),
            ("--reuse fused --select qurey", "Did you mean 'query'?"),
            ("--host-bytes many", "'many' is not a size"),
            ("--device-bytes -6GiB", "'-6GiB' is not a size"),
            ("--device-bytes 64KiB", "bytes are missing: the weights outside the layers take"),
            ("--device-bytes 64KiB", "Give --device-bytes"),
            ("--policy fifo", "'--policy': 'fifo' is not one of 'forecast', 'gdsf', 'lfu', 'lru', 'pgdsf'"),
            ("--dtype int3", "choose one of float32, bfloat16, float16"),
            ("--device abacus", "abacus"),
            ("--device-tokens 3", "less than a block"),
            ("--profile nowhere.json", "'nowhere.json' does not exist"),
            ("--block-size 2000", "--block-size"),
            ("--max-model-len 99999", "is exact only up to 2048 tokens"),
            ("--document-template {id}", "--document-template must contain {text}"),
            ("--host no.such.host.invalid", "no.such.host.invalid"),
            ("--model /does/not/exist", "there is no folder /does/not/exist: give the"),
            ("--model some/where/else", "there is no folder some/where/else: give the"),
            ("--model ./tiny", "there is no folder ./tiny: give the folder of a model"),
            ("--model a/name", "There is no folder a/name: it is looked for on the"),
        ],
    )
    def test_a_wrong_option_is_named(self, options: str, words: str, serving: Serving) -> None:
        command = serving(*options.split())
        assert command.exit_code != 0
        assert words in command.said

    def test_a_model_is_required(self, serving: Serving) -> None:
        command = serving(model=None)
        assert command.exit_code != 0 and "Missing option '--model'" in command.said

    @pytest.mark.parametrize(
        ("options", "kept"), [(["--device-bytes", "64KiB"], "128"), (["--device-tokens", "3"], None)]
    )
    def test_a_budget_bounds_what_torch_and_onednn_keep_compiled(
        self, options: list[str], kept: str | None, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
        for name in names:
            # So that it is removed after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        assert serving(*options).exit_code != 0
        assert [os.environ.get(name) for name in names] == [kept, kept]

    @pytest.mark.parametrize(
        ("name", "words", "asked"),
        [
            ("tiny", "--model tiny: there is no folder tiny: give the folder of a model", []),
            (
                "org/tiny",
                "there is no folder org/tiny, and it cannot be downloaded from the Hub: ",
                ["/org/tiny/resolve/main/config.json"],
            ),
        ],
    )
    def test_a_name_with_an_organisation_is_looked_up_on_the_hub_once(
        self, serving: Serving, unhelpful_hub: list[str], name: str, words: str, asked: list[str]
    ) -> None:
        command = serving(model=name)
        assert command.exit_code == 1
        assert words in command.said
        assert unhelpful_hub == asked

    def test_an_old_name_that_was_downloaded_is_taken(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(loading, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda name: pytest.fail(name, pytrace=False))
        with pytest.raises(pytest.fail.Exception, match="old-name"):
            loading.load_model("old-name", EngineSettings())

    def test_a_random_model_is_made_on_the_spot(
        self, serving: Serving, workers: list[EngineWorker], model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.kernels.random_model.random_model", lambda: model)
        monkeypatch.setattr("ragorder.kernels.random_model.has_fast_bfloat16", lambda: False)
        command = serving(model="random")
        assert command.exit_code == 0, command.said
        assert workers[0].engine.settings == EngineSettings(dtype="float32", profile="auto")
        assert command.orderer.settings.capacity_tokens > 0
        serving("--dtype", "bfloat16", model="random")
        assert workers[1].engine.settings == EngineSettings(dtype="bfloat16", profile="auto")

    def test_a_folder_without_weights(self, serving: Serving, model: Path, tmp_path: Path) -> None:
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        command = serving(model=str(tmp_path))
        assert command.exit_code == 1
        assert f"--model {tmp_path}: " in command.said
        assert "weights" in command.said

    def test_a_used_port_is_named_before_a_model_is_loaded(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TieredEngine, "load", lambda *_: pytest.fail("loaded"))
        with socket.create_server(("127.0.0.1", 0)) as used:
            command = serving("--port", str(used.getsockname()[1]))
        assert "Address already in use" in command.said

    @pytest.mark.slow
    @pytest.mark.parametrize("module", ["torch", "transformers"])
    def test_a_missing_package_is_named_with_the_extra(self, module: str, python: Any) -> None:
        done = python(*COMMAND, "engine", "--model", "x", "--port", "0", blocked=(module,))
        assert done.returncode == 1
        assert f"needs {module}: in a clone of ragorder, pip install '.[torch,proxy]'" in done.stderr
        assert "Traceback" not in done.stderr
