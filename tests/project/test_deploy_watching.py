"""deploy/prometheus and deploy/grafana: every metric is exported, and every alert fires when it should."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.deployment import DEPLOY, ROOT, documents, tool

from ragorder import Document, Orderer

PROMETHEUS = DEPLOY / "prometheus"
GRAFANA = DEPLOY / "grafana"
# Prometheus adds them to every sample.
TARGET = {"job", "instance"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "ragorder.json").read_text("utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [each for each in dashboard()["panels"] if each["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    (content,) = documents(PROMETHEUS / "alerts.yml")
    (group,) = content["groups"]
    return list(group["rules"])


def questions() -> Iterator[tuple[str, str]]:
    """All expressions in PromQL, by what asks them."""
    yield from ((each["alert"], each["expr"]) for each in alerts())
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def plain(expression: str) -> str:
    """Without Grafana's variables."""
    return expression.replace("$__rate_interval", "5m").replace("$instance", ".*")


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """Samples of a proxy that has a queue, replicas, and served requests of each kind: names, labels, values."""
    for package in ("prometheus_client", "starlette", "httpx2"):
        pytest.importorskip(package)
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from ragorder.adapters.observing import Metrics, ObservedOrderer
    from ragorder.adapters.proxy import AdmissionQueue, Fleet, ReplicaAddress, make_app

    metrics = Metrics()
    observed = ObservedOrderer(Orderer(capacity_tokens=10_000), [metrics])
    texts = [Document(id=name, text=f"{name} " * 100) for name in "abc"]
    observed.order(texts).confirm(cached_tokens=0, prompt_tokens=400)
    observed.order(texts).discard()
    metrics.token_times(0.01)
    for reason in ("no_documents", "one_document", "other_route", "too_many_values", "compressed", "unreadable"):
        metrics.passed(reason)
    AdmissionQueue(1, registry=metrics.registry)
    addresses = [ReplicaAddress(f"http://127.0.0.1:{port}", Orderer()) for port in (1, 2)]
    make_app(Orderer(), upstream=Fleet(addresses, registry=metrics.registry))
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, defaultdict(set))
            for name, value in sample.labels.items():
                labels[name].add(value)
    return found


class TestQuestions:
    def test_every_metric_of_ragorder_is_exported(self, exported: dict[str, dict[str, set[str]]]) -> None:
        asked = {name for _, each in questions() for name in re.findall(r"\bragorder_\w+", each)}
        assert len(asked) >= 25
        assert asked - set(exported) == set()

    def test_every_label_and_value_is_one_that_the_metric_has(self, exported: dict[str, dict[str, set[str]]]) -> None:
        seen = 0
        for asker, expression in questions():
            for name, inside in re.findall(r"\b(ragorder_\w+)\{([^}]*)\}", expression):
                for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', inside):
                    if label not in TARGET:
                        assert operator == "=" and value in exported[name][label], (asker, label, value)
                        seen += 1
            names = re.findall(r"\b(ragorder_\w+)", expression)
            for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
                known = TARGET.union(*(exported[name] for name in names), {"le"})
                assert {label.strip() for label in grouped.split(",")} <= known, asker
        assert seen >= 8

    def test_every_metric_of_the_engine_is_one_of_vllms(self) -> None:
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            pytest.skip("vLLM is not installed")
        folder = Path(spec.origin).parent / "v1" / "metrics"
        known = set(re.findall(r'"(vllm:\w+)"', "".join(path.read_text("utf-8") for path in folder.glob("*.py"))))
        asked = {name for _, each in questions() for name in re.findall(r"\bvllm:\w+", each)}
        assert asked
        assert {name for name in asked if re.sub(r"_(total|bucket|sum|count)$", "", name) not in known} == set()

    def test_counters_are_asked_for_their_rate(self) -> None:
        for asker, expression in questions():
            for before in re.findall(r"(\w*\(?)\w*[:_]\w+_(?:total|bucket|sum|count)\b", expression):
                assert before in ("rate(", "increase("), asker

    def test_prometheus_can_parse_them(self, tmp_path: Path) -> None:
        rules = [{"record": f"question:{number}", "expr": plain(each)} for number, (_, each) in enumerate(questions())]
        path = tmp_path / "rules.yml"
        path.write_text(json.dumps({"groups": [{"name": "questions", "rules": rules}]}), "utf-8")
        promtool("check", "rules", path)


@pytest.mark.slow
class TestPrometheus:
    def test_the_configuration_is_valid(self) -> None:
        promtool("check", "config", PROMETHEUS / "prometheus.yml")

    def test_the_alerts_fire_when_they_should(self) -> None:
        promtool("test", "rules", PROMETHEUS / "alerts_test.yml")

    def test_each_alert_is_seen_to_fire(self) -> None:
        (tests,) = documents(PROMETHEUS / "alerts_test.yml")
        fired = {
            name
            for each in tests["tests"]
            for asked in each["promql_expr_test"]
            for sample in asked["exp_samples"]
            for name in re.findall(r'alertname="(\w+)"', sample["labels"])
        }
        assert fired == {each["alert"] for each in alerts()}
        assert tests["tests"][0]["promql_expr_test"][0]["exp_samples"] == []

    def test_options_and_routes_in_actions_exist(self) -> None:
        known = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
        for each in alerts():
            for word in re.findall(r"--[a-z-]+|docs/\w+\.md|/ragorder/\w+", each["annotations"]["action"]):
                assert (ROOT / word).exists() if word.startswith("docs/") else word in known, word


class TestDashboard:
    def test_each_panel_asks_the_chosen_source(self) -> None:
        chosen = {"type": "prometheus", "uid": "${datasource}"}
        for panel in panels():
            assert panel["datasource"] == chosen
            assert [target["datasource"] for target in panel["targets"]] == [chosen] * len(panel["targets"])
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert panel["fieldConfig"]["defaults"]["unit"]

    def test_each_panel_of_the_proxy_asks_the_chosen_proxies(self) -> None:
        for asker, expression in questions():
            if "$" in expression:
                for inside in re.findall(r"\bragorder_\w+\{([^}]*)\}", expression):
                    assert 'instance=~"$instance"' in inside, asker
        names = {each["name"] for each in dashboard()["templating"]["list"]}
        used = {name for _, each in questions() for name in re.findall(r"\$(\w+)", each)} - {"__rate_interval"}
        # In the alerts `$labels` and `$value` stand in words, not in expressions.
        assert used | {"datasource"} == names

    def test_every_metric_is_documented(self) -> None:
        known = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
        asked = {name for _, each in questions() for name in re.findall(r"\bragorder_\w+", each)}
        assert [name for name in sorted(asked) if re.sub(r"_(bucket|sum|count)$", "", name) not in known] == []

    def test_grafana_finds_it(self) -> None:
        (compose,) = documents(DEPLOY / "compose.yaml")
        mounted = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
        (provider,) = documents(GRAFANA / "provisioning" / "dashboards" / "ragorder.yml")
        assert provider["providers"][0]["options"]["path"] == mounted["./grafana/dashboards"]
        assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
        (sources,) = documents(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")
        (source,) = sources["datasources"]
        assert source["type"] == "prometheus"
        assert source["url"] == "http://prometheus:9090"


def promtool(*arguments: str | Path) -> None:
    command = [tool("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
