"""`ragorder tiers`: the configuration that it prints, and what it says of servers and folders."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.http_server import PageServer

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.observing.tier_stats import fetch_hits, fetch_tier_stats
from ragorder.adapters.vllm_tiers import SUPPORTED_VLLM, TierSettings
from ragorder.cli import main
from ragorder.kernels.store import ChunkStore
from ragorder.trie.profile import LINEAR

GIB = 1 << 30
Serve = Callable[[str], str]

PLAIN = """\
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 900.0
# TYPE vllm:prompt_tokens_cached_by_source counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 100.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 200.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="p2p"} 30.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 300.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="external_unspecified"} 20.0
"""
IDLE = PLAIN + "# HELP vllm:ragorder_chunks Chunks of KV that a tier holds.\n# TYPE vllm:ragorder_chunks gauge\n"
TIERS = (
    IDLE
    + """\
vllm:ragorder_chunks{engine="0",model_name="m",tier="host"} 6.0
vllm:ragorder_chunks{engine="0",model_name="m",tier="disk"} 9.0
# TYPE vllm:ragorder_bytes gauge
vllm:ragorder_bytes{engine="0",model_name="m",tier="host"} 6144.0
vllm:ragorder_bytes{engine="0",model_name="m",tier="disk"} 9216.0
# TYPE vllm:ragorder_capacity_bytes gauge
vllm:ragorder_capacity_bytes{engine="0",model_name="m",tier="host"} 8192.0
vllm:ragorder_capacity_bytes{engine="0",model_name="m",tier="disk"} 1048576.0
# TYPE vllm:ragorder_oldest_chunk_seconds gauge
vllm:ragorder_oldest_chunk_seconds{engine="0",model_name="m",tier="host"} 90.0
# TYPE vllm:ragorder_stored_chunks counter
vllm:ragorder_stored_chunks_total{engine="0",model_name="m",tier="host"} 11.0
# TYPE vllm:ragorder_evicted_chunks counter
vllm:ragorder_evicted_chunks_total{engine="0",model_name="m",tier="host"} 5.0
# TYPE vllm:ragorder_refused_chunks counter
vllm:ragorder_refused_chunks_total{engine="0",model_name="m",reason="checksum",tier="disk"} 2.0
vllm:ragorder_refused_chunks_total{engine="0",model_name="m",reason="truncated",tier="disk"} 1.0
# TYPE vllm:ragorder_requests_with_facts counter
vllm:ragorder_requests_with_facts_total{engine="0",model_name="m"} 4.0
# TYPE vllm:ragorder_documents counter
vllm:ragorder_documents_total{engine="0",model_name="m"} 8.0
# TYPE vllm:ragorder_device_order gauge
vllm:ragorder_device_order{engine="0",model_name="m"} 0.0
# TYPE vllm:ragorder_profile gauge
vllm:ragorder_profile{engine="0",key="0123456789abcdef01234567",model_name="m"} 0.0
"""
)


config = partial(run_command, main, "tiers", "config", env={"COLUMNS": "100"})


stats = partial(run_command, main, "stats", env={"COLUMNS": "160"})


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a page as /metrics and says where: a server in a state that a real one is not in for long."""

    def start(page: str) -> str:
        served = PageServer(lambda path, _: (200, page) if path == "/metrics" else (404, ""))
        return stack.enter_context(served).base_url

    with ExitStack() as stack:
        yield start


class TestConfig:
    def test_is_what_the_settings_make_of_the_same_options(self, tmp_path: Path) -> None:
        profile = tmp_path / "profile.json"
        LINEAR.to_file(profile)
        options = ["--host-bytes", "8GiB", "--disk-path", tmp_path / "disk", "--disk-bytes", "500GB"]
        options += ["--policy", "lru", "--history", "10", "--profile", profile, "--no-device-order"]
        options += ["--blocks-per-chunk", "4", "--io-threads", "3", "--max-cached-documents", "9"]
        given: dict[str, Any] = {"disk_path": tmp_path / "disk", "disk_bytes": 500 * 10**9, "policy": "lru"}
        given |= {"profile": profile, "device_order": False, "blocks_per_chunk": 4, "io_threads": 3}
        settings = TierSettings(host_bytes=8 * GIB, max_cached_documents=9, history=10, **given)
        assert json.loads(config(*options).stdout) == settings.kv_transfer_config()

    def test_has_the_defaults_of_the_settings(self) -> None:
        printed = json.loads(config("--host-bytes", "1GiB").stdout)
        assert printed == TierSettings(host_bytes=GIB, profile="auto").kv_transfer_config()
        assert printed == json.loads(config("--host-bytes", "1GiB", "--device-order").stdout)
        pretty = config("--host-bytes", "1GiB", "--pretty").stdout
        assert printed == json.loads(pretty) and len(pretty.splitlines()) > 10

    @pytest.mark.parametrize(("given", "read"), [("auto", "auto"), ("none", None)])
    def test_has_a_profile_that_is_found_by_itself_or_none(self, given: str, read: str | None) -> None:
        printed = json.loads(config("--host-bytes", "1GiB", "--profile", given).stdout)
        extra = printed["kv_connector_extra_config"]
        assert extra["ragorder"]["profile"] == read
        assert TierSettings.from_extra_config(extra) == TierSettings(host_bytes=GIB, profile=read)

    @pytest.mark.parametrize("folder", ['/it\'s a "folder" with $HOME \\ and ünïcode', "kv"])
    def test_can_be_pasted_into_a_shell_whatever_the_folder_is_called(self, folder: str) -> None:
        """A relative folder is the one below this folder."""
        line = config("--host-bytes", "1GiB", "--disk-path", folder, "--disk-bytes", "1GB").stdout.rstrip("\n")
        assert "\n" not in line
        pasted = subprocess.run(["/bin/sh", "-c", f"printf %s '{line}'"], capture_output=True, text=True, check=True)
        (disk,) = json.loads(pasted.stdout)["kv_connector_extra_config"]["secondary_tiers"]
        assert disk["path"] == str(Path(folder).absolute())

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ([], "--host-bytes"),
            (["--host-bytes", "8 elephants"], "--host-bytes"),
            (["--host-bytes", "8G"], "--host-bytes"),
            (["--host-bytes", "0"], "--host-bytes"),
            (["--host-bytes", "1GiB", "--disk-path", "kv"], "--disk-bytes"),
            (["--host-bytes", "1GiB", "--disk-bytes", "1GB"], "--disk-path"),
            (["--host-bytes", "1GiB", "--disk-path", "kv", "--disk-bytes", "0"], "--disk-bytes"),
            (["--host-bytes", "1GiB", "--policy", "mru"], "--policy"),
            (["--host-bytes", "1GiB", "--history", "-1"], "--history"),
            (["--host-bytes", "1GiB", "--blocks-per-chunk", "0"], "--blocks-per-chunk"),
            (["--host-bytes", "1GiB", "--io-threads", "0"], "--io-threads"),
            (["--host-bytes", "1GiB", "--profile", "nowhere.json"], "--profile"),
            (["--host-bytes", "1GiB", "--profile", __file__], "--profile"),
        ],
    )
    def test_wrong_values_are_said_by_their_option(self, arguments: list[str], named: str) -> None:
        done = config(*arguments)
        assert done.exit_code == 2
        assert named in done.stderr
        assert done.stdout == ""

    def test_notes_say_which_vllm_it_is_for_and_what_a_disk_needs_where_there_is_one(self) -> None:
        said = config("--host-bytes", "1GiB").stderr
        assert all(f"{minor}.x" in said for minor in SUPPORTED_VLLM)
        assert "PYTHONHASHSEED" not in said
        said = config("--host-bytes", "1GiB", "--disk-path", "kv", "--disk-bytes", "1GB").stderr
        assert all(word in said for word in ("--prefix-caching-hash-algo", "PYTHONHASHSEED", "0700"))


class TestServerStats:
    def test_as_json_are_hits_by_source_and_what_is_where(self, serve: Serve) -> None:
        """Engines are counted together."""
        figures = json.loads(stats(serve(TIERS), "--json").output)["kv"]
        assert figures["hits"] == {"device": 100, "host": 200, "disk": 300, "elsewhere": 50, "computed": 350}
        host, disk = figures["tiers"]
        assert (host["tier"], host["chunks"], host["bytes"], host["capacity_bytes"]) == ("host", 6, 6144, 8192)
        assert (host["stored"], host["evicted"], host["oldest_s"], host["used_share"]) == (11, 5, 90.0, 0.75)
        assert disk["refused"] == {"checksum": 2, "truncated": 1}
        names = ("with_facts", "documents", "device_order", "profile")
        assert [figures[name] for name in names] == [4, 8, False, False]
        hits = fetch_hits(serve(PLAIN + PLAIN.replace('engine="0"', 'engine="1"')))
        assert hits.total == 2000

    def test_as_a_table(self, serve: Serve) -> None:
        shown = stats(serve(TIERS)).output
        for text in ("75.0 %", "6.0 KiB", "1.5 min", "2 checksum, 1 truncated", "35.0 %", "30.0 %"):
            assert text in shown
        assert "no longer evicts by the policy" in shown and "its prefill times are" in shown

    @pytest.mark.parametrize(
        ("before", "after", "known"), [("} 0.0", "} 1.0", True), ("vllm:ragorder_profile{", "other{", None)]
    )
    def test_no_warning_where_times_are_measured_or_not_awaited(
        self, serve: Serve, before: str, after: str, known: bool | None
    ) -> None:
        page, line = TIERS.rsplit("\n", 2)[:2]
        url = serve(f"{page}\n{line.replace(before, after)}\n")
        assert fetch_tier_stats(url).profile is known
        assert "prefill times" not in stats(url).output

    def test_watching_ends_with_its_server(self, python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        """Figures are shown until the server stops answering."""
        code = (
            "import itertools\n"
            "from support.http_server import PageServer\n"
            "asked = itertools.count()\n"
            f"server = PageServer(lambda *_: (200 if next(asked) < 4 else 500, {TIERS!r})).start()\n"
            "from ragorder.cli import main\n"
            "main(['stats', server.base_url, '--watch', '0.1', '--json'])"
        )
        done = python("-c", code, path=(Path(__file__).parents[1],))
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [line["kv"]["hits"]["disk"] for line in lines] == [300, 300]
        assert done.returncode == 1
        assert "HTTP 500" in done.stderr

    @pytest.mark.parametrize(
        ("page", "said"),
        [
            (PLAIN, "without ragorder's tiers"),
            (IDLE, "no request yet"),
            ("hello", "not from a vLLM server"),
            ("", "not from a vLLM server"),
        ],
    )
    def test_servers_without_tiers_are_reported(self, serve: Serve, page: str, said: str) -> None:
        with pytest.raises(ServerError, match=said):
            fetch_tier_stats(serve(page))

    def test_a_server_with_neither_metrics_is_told_both(self, serve: Serve) -> None:
        said = " ".join(stats(serve(PLAIN)).output.split())
        assert "has no ragorder metrics: give the address of `ragorder serve`" in said
        assert "is a vLLM server without ragorder's tiers" in said


class TestFolderStats:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        """A store with three chunks, closed."""
        store = ChunkStore(tmp_path / "disk", 1 << 20, "somebody")
        for number in range(3):
            assert store.write(b"key %d" % number, bytes(1000), None)
        store.close()
        yield tmp_path / "disk"

    def test_what_lies_there_without_a_server(self, folder: Path) -> None:
        found = json.loads(stats(folder, "--json").output)
        assert (found["chunks"], found["unfinished"], found["locked_by"]) == (3, 0, None)
        assert found["bytes"] >= 3000
        shown = stats(folder).output
        assert "chunks" in shown
        assert found["identity"] in shown
        # Nor does it matter that a process uses the folder.
        store = ChunkStore(folder, 1 << 20, "somebody")
        assert json.loads(stats(folder, "--json").output)["locked_by"]
        store.close()
        # Its note may be lost: each chunk has the identity, too.
        (folder / "identity").unlink()
        assert json.loads(stats(folder, "--json").output) == found | {"identity": None}

    def test_without_the_folder_of_chunks_it_is_no_tier(self, folder: Path) -> None:
        shutil.rmtree(folder / "chunks")
        assert "is neither a disk tier nor a build" in " ".join(stats(folder).output.split())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("http://127.0.0.1:9", "cannot be reached"),
        ("./nowhere", "No such file"),
        *((folder, "is neither a disk tier nor a build") for folder in (".", str(Path(__file__).parent))),
    ],
)
def test_what_has_no_figures_is_said(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = stats(source)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
