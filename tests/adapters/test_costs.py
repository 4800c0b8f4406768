"""What prompts cost at clouds: as metrics, as figures, and as `ragorder stats` shows them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support.http_server import PageServer

from ragorder import Document, Orderer
from ragorder.adapters.observing import Metrics, ObservedOrderer, Stats
from ragorder.adapters.observing.costs import CostStats
from ragorder.cli import main
from ragorder.clouds import Prices

prometheus_client = pytest.importorskip("prometheus_client")

DOCUMENTS = [Document(f"d{number}", f"secret {number} " * 300, tokens=600) for number in range(8)]
PRICES = Prices("2027-01-01", "EUR", {"claude-opus-5": 4.0})


def observed(metrics: Metrics, prices: Prices = PRICES, **options: bool) -> ObservedOrderer:
    orderer = Orderer.for_cloud(
        "anthropic", model="claude-opus-5", prices=prices, prefix_tokens=600, suffix_tokens=60, strict=True
    )
    return ObservedOrderer(orderer, [metrics], **options)


def serve(orderer: ObservedOrderer, times: int = 12) -> tuple[float, float]:
    """Tokens of the prompts, and what they cost by their reports."""
    plain = cost = 0.0
    for number in range(times):
        ordering = orderer.order(DOCUMENTS[:5][:: (-1) ** number])
        prompt, cached, written = 3660, ordering.cached_tokens, 50 if number else 3600
        ordering.confirm(cached, prompt_tokens=prompt, written_tokens=written)
        plain += prompt
        cost += prompt - 0.9 * cached + 0.25 * written
    return plain, cost


def read(metrics: Metrics) -> Stats:
    return Stats.of(metrics.registry.collect())


def costs(prices: Prices = PRICES, **options: bool) -> tuple[CostStats, float, float]:
    """The figures of requests, and what `serve` returns of them."""
    metrics = Metrics()
    # The metrics know of shadow mode while the orderer exists.
    orderer = observed(metrics, prices, **options)
    plain, paid = serve(orderer)
    cost = read(metrics).cost
    assert cost is not None
    return cost, plain, paid


class TestCosts:
    def test_are_what_the_provider_reports_in_tokens_and_in_money(self) -> None:
        cost, plain, paid = costs()
        assert (cost.uncached_tokens, cost.tokens) == pytest.approx((plain, paid))
        assert cost.share == pytest.approx(paid / plain)
        assert (cost.money, cost.uncached_money) == pytest.approx((paid * 4 / 1e6, plain * 4 / 1e6))
        assert cost.saved_money == pytest.approx((plain - paid) * 4 / 1e6)
        assert (cost.currency, cost.prices_date) == ("EUR", "2027-01-01")
        # Those of retrieval order are predicted.
        assert cost.other_tokens is not None and cost.other_money is not None
        assert cost.tokens < cost.other_tokens < 1.3 * cost.uncached_tokens

    def test_in_shadow_mode_are_those_of_retrieval_order(self) -> None:
        cost, _, paid = costs(shadow=True)
        assert cost.tokens == pytest.approx(paid)
        assert cost.other_tokens is not None and cost.other_tokens < cost.tokens

    def test_of_engines_and_of_discarded_requests_there_are_none(self) -> None:
        metrics = Metrics()
        ObservedOrderer(Orderer(), [metrics]).order(DOCUMENTS).confirm(0)
        observed(metrics).order(DOCUMENTS).discard()
        assert read(metrics).cost is None
        assert read(metrics).as_json()["cost"] is None

    def test_of_a_model_without_a_price_are_tokens_alone(self) -> None:
        cost, *_ = costs(Prices("2027-01-01", "EUR", {}))
        assert cost.share < 1
        assert (cost.money, cost.saved_money, cost.currency) == (None, None, "")

    def test_of_tables_that_differ_are_not_added_up(self) -> None:
        metrics = Metrics()
        serve(observed(metrics))
        serve(observed(metrics, Prices("2028-01-01", "USD", {"claude-opus-5": 4.0})))
        cost = read(metrics).cost
        assert cost is not None and cost.share < 1 and cost.money is None

    def test_labels_show_no_document(self) -> None:
        metrics = Metrics()
        serve(observed(metrics))
        page = prometheus_client.generate_latest(metrics.registry).decode()
        assert 'ragorder_cost_tokens_total{order="uncached"}' in page and "secret" not in page

    def test_both_orders_know_what_others_may_read(self) -> None:
        for readable in (False, True):
            orderer = observed(Metrics())
            first = orderer.order(DOCUMENTS[:5])
            if readable:
                first.readable()
            second = orderer.order(DOCUMENTS[:5])
            assert [each.cached_tokens > 0 for each in (second, *second.twins)] == [readable] * 2
            second.confirm()
            first.confirm()


class TestStats:
    def test_command_shows_them_with_the_date_of_the_prices(self) -> None:
        metrics = Metrics()
        serve(observed(metrics))
        cost = read(metrics).cost
        assert cost is not None and cost.money is not None and cost.saved_money is not None
        with PageServer(lambda *_: (200, prometheus_client.generate_latest(metrics.registry))) as server:
            shown = CliRunner().invoke(main, ["stats", server.base_url], env={"COLUMNS": "200"})
            as_json = CliRunner().invoke(main, ["stats", server.base_url, "--json"])
        assert shown.exit_code == 0, shown.output
        assert f"{100 * cost.share:.1f} %" in shown.output and "of what they cost without a cache" in shown.output
        assert f"{cost.money:.2f} EUR" in shown.output
        assert f"{cost.saved_money:.2f} EUR less than without a cache; prices of 2027-01-01" in shown.output
        assert json.loads(as_json.stdout)["cost"]["saved_money"] == pytest.approx(cost.saved_money)

    @pytest.mark.parametrize(("price", "said"), [(4000.0, "3.60 EUR more than without"), (0.01, "as much as without")])
    def test_the_command_says_that_a_first_request_costs_more(self, price: float, said: str) -> None:
        metrics = Metrics()
        serve(observed(metrics, Prices("2027-01-01", "EUR", {"claude-opus-5": price})), times=1)
        with PageServer(lambda *_: (200, prometheus_client.generate_latest(metrics.registry))) as server:
            shown = CliRunner().invoke(main, ["stats", server.base_url], env={"COLUMNS": "200"})
        assert f"{said} a cache; prices of 2027-01-01" in shown.output
