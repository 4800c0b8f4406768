"""Hybrid models of `Orderer.for_vllm`: recognised by what the server publishes about its cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("prometheus_client")

from support.far_server import FarServer

from ragorder import Document, Orderer
from ragorder.common.degraded import DegradedWarning

BLOCK = 64
Publish = Callable[[str | None], str]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """The address of a server that publishes this mode of its Mamba cache."""
    with FarServer() as server:

        def publish(mode: str | None) -> str:
            labels = f'block_size="{BLOCK}",num_gpu_blocks="101",enable_prefix_caching="True",engine="0"'
            labels += f',mamba_cache_mode="{mode}"' if mode is not None else ""
            server.pages["/metrics"] = f"vllm:cache_config_info{{{labels}}} 1.0\n"
            return server.base_url

        yield publish


def predictions(orderer: Orderer) -> list[int]:
    """Of requests that share one document, and then part."""
    shared, found = Document("a", "a", tokens=4 * BLOCK), []
    for name in "bcd":
        ordering = orderer.order([shared, Document(name, name, tokens=4 * BLOCK)])
        found.append(ordering.cached_tokens)
        ordering.confirm()
    return found


def test_a_hybrid_model_resumes_where_requests_have_parted_before(publish: Publish) -> None:
    with Orderer.for_vllm(publish("align")) as orderer:
        ordering = orderer.order([Document("a", "a", tokens=640)])
        assert ordering.cloud is not None
        rules = ordering.cloud.model.rules
        assert (rules.resume, rules.interval_tokens) == ("junctions", BLOCK)
        assert orderer.settings.capacity_tokens == 100 * BLOCK
        assert orderer.degraded == ()
    with Orderer.for_vllm(publish("align")) as hybrid, Orderer.for_vllm(publish("none")) as ordinary:
        assert predictions(hybrid) == [0, 0, 4 * BLOCK]
        assert predictions(ordinary) == [0, 4 * BLOCK, 4 * BLOCK]


@pytest.mark.parametrize("mode", ["none", "all", None])
def test_any_other_model_resumes_at_every_block_and_an_unknown_mode_is_logged(
    publish: Publish, mode: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ragorder.vllm"), Orderer.for_vllm(publish(mode)) as orderer:
        assert orderer.order([Document("a", "a", tokens=640)]).cloud is None
        assert orderer.settings.block_size == BLOCK
        assert orderer.degraded == ()
    logged = [each.getMessage() for each in caplog.records if each.name == "ragorder.vllm"]
    assert ["hybrid_rules" in each for each in logged] == [True] * (mode is None)


def test_tiers_of_a_hybrid_model_are_not_followed_with_a_warning(publish: Publish) -> None:
    with (
        pytest.warns(DegradedWarning, match="hybrid model.*host_tokens"),
        Orderer.for_vllm(publish("align"), host_tokens=6400) as orderer,
    ):
        assert orderer.order([Document("a", "a", tokens=640)]).cloud is None
