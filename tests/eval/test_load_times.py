"""Load times of a server's tiers, on a stand-in for it: a cache of three tiers reached by HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.far_server import FarServer, TieredServer

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")

from ragorder.cli import main
from ragorder.eval.engines.base import EngineError
from ragorder.eval.suites.profiling.measuring import find_profiled, measure_loads
from ragorder.trie.profile import PrefillProfile

FREE = PrefillProfile((0,), (16,), ((0.0,),), {"engine": "far", "model": "far"})


@pytest.fixture
def serve() -> Iterator[Any]:
    def serve(host_blocks: int, **options: Any) -> TieredServer:
        return stack.enter_context(TieredServer(host_blocks, **options))

    with ExitStack() as stack:
        yield serve


def test_only_tiers_that_the_server_has_are_measured_with_prompts_that_share_nothing(serve: Any) -> None:
    far = serve(1 << 20, disk=False)
    profile = measure_loads(find_profiled(far.base_url), FREE, repeats=2, seed=5)
    assert set(profile.loads) == {"host"}
    salts = Counter(body["cache_salt"] for body in far.bodies)
    assert sorted(salts.values())[-3:] == [1, 2, 2], "only the probed prompts were sent twice"


def test_a_load_takes_at_least_as_long_as_its_tier(serve: Any) -> None:
    far = serve(400, disk=True, load_s={"host": 1e-4, "disk": 4e-4})
    # Nothing is subtracted from a sample, so that no slow spell of the machine can make one too short.
    loads = measure_loads(find_profiled(far.base_url), FREE, repeats=2).loads
    assert loads["host"] >= 1e-4
    assert loads["disk"] >= 4e-4


def test_a_server_without_tiers_is_refused(serve: Any) -> None:
    with FarServer() as far, pytest.raises(EngineError, match="not from a vLLM server"):
        measure_loads(find_profiled(far.base_url), FREE)


class TestTheCommand:
    def profile(self, far: FarServer, tmp_path: Path, *options: str) -> Any:
        command = ["profile", "--base-url", far.base_url, "--cached", "0", "--new", "16", "--repeats", "1"]
        return CliRunner().invoke(main, [*command, "-o", str(tmp_path / "p.json"), *options])

    def test_tells_the_tiers_of_a_server_apart(self, serve: Any, tmp_path: Path) -> None:
        far = serve(400, disk=True)
        done = self.profile(far, tmp_path, "--loads", "--repeats", "2")
        assert done.exit_code == 0, done.output
        assert "loading from host: " in done.output
        profile = PrefillProfile.from_file(tmp_path / "p.json")
        assert set(profile.loads) == {"host", "disk"}
        assert profile.facts["load_missing"] == []
        assert len(profile.facts["load_samples_s_per_token"]["host"]) >= 2

    def test_says_which_are_missing(self, serve: Any, tmp_path: Path) -> None:
        done = self.profile(serve(1 << 20, disk=True), tmp_path, "--loads", "--loads-limit", "200ms")
        assert done.exit_code == 0 and "raise --loads-limit" in done.output
        profile = PrefillProfile.from_file(tmp_path / "p.json")
        assert "disk" not in profile.loads and "disk" in profile.facts["load_missing"]

    def test_measures_none_unless_asked(self, serve: Any, tmp_path: Path) -> None:
        assert self.profile(serve(400, disk=True), tmp_path).exit_code == 0
        assert PrefillProfile.from_file(tmp_path / "p.json").loads == {}

    def test_needs_a_running_server(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(main, ["profile", "--loads", "-o", str(tmp_path / "p.json")])
        assert (done.exit_code, "give --base-url" in done.output) == (2, True)
