"""deploy/kubernetes and deploy/routers, as kubectl renders them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.deployment import DEPLOY, OVERLAYS, arguments, containers, documents, of_kind, render, tool, variables

from ragorder.adapters.proxy.app import PROBES
from ragorder.cli.proxy import ROUTED, ServerSettings
from ragorder.topic import checked_header

yaml = pytest.importorskip("yaml")

BASE = DEPLOY / "kubernetes" / "base"
ROUTERS = DEPLOY / "routers"
COMPONENTS = ("kv-events", "keyless", "monitoring")
PORT = ServerSettings.model_fields["port"].default
SECRET = {"api-key", "engine-key", "topic-secret"}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kubectl")]


@pytest.fixture(scope="module")
def kubectl() -> str:
    return tool("kubectl")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    """The base with each component."""
    # In the repository's neighbourhood: kustomize takes relative paths.
    folder = tmp_path_factory.mktemp("overlay")
    up = Path(*[".."] * len(folder.parts[1:])) / Path(*DEPLOY.parts[1:]) / "kubernetes"
    lines = ["kind: Kustomization", f"resources: [{up / 'base'}]", "components:"]
    lines += [f"  - {up / name}" for name in COMPONENTS]
    (folder / "kustomization.yaml").write_text("\n".join(lines) + "\n", "utf-8")
    return render(folder)


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> tuple[dict[str, Any], ...]:
    return render(DEPLOY / request.param)


def pods(manifests: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in of_kind(manifests, "Deployment")]


class TestEveryOverlay:
    def test_is_valid_for_kubernetes(self, manifests: tuple[dict[str, Any], ...]) -> None:
        kubernetes_validate = pytest.importorskip("kubernetes_validate")
        for each in manifests:
            kubernetes_validate.validate(each, "1.31", strict=True)

    def test_proxies_have_no_rights(self, manifests: tuple[dict[str, Any], ...]) -> None:
        proxies = list(containers(manifests, "ragorder"))
        assert proxies
        for proxy in proxies:
            security = proxy["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] == security["runAsGroup"] == 10001
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert [each["mountPath"] for each in proxy["volumeMounts"]] == ["/tmp"]  # noqa: S108
            assert proxy["resources"]["limits"]["memory"]
        for pod in pods(manifests):
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}

    def test_probes_and_services_use_ports_and_paths_that_are_there(
        self, manifests: tuple[dict[str, Any], ...]
    ) -> None:
        for proxy in containers(manifests, "ragorder"):
            assert proxy["ports"] == [{"name": "http", "containerPort": PORT}]
            probes = {name: proxy[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
            assert {each["path"] for each in probes.values()} == PROBES
            assert probes["readinessProbe"]["path"] == "/ragorder/ready"
            assert probes["livenessProbe"]["path"] == "/ragorder/health"
            assert {each["port"] for each in probes.values()} == {"http"}
        for service in of_kind(manifests, "Service"):
            assert service["spec"]["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]

    def test_selectors_select(self, manifests: tuple[dict[str, Any], ...]) -> None:
        labels = [pod["metadata"]["labels"] for pod in pods(manifests)]
        for each in of_kind(manifests, "Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"):
            spec = each["spec"]
            selector = spec.get("podSelector", spec.get("selector"))
            wanted = selector.get("matchLabels", selector)
            assert wanted
            assert len([found for found in labels if wanted.items() <= found.items()]) == 1, each["metadata"]["name"]

    def test_secrets_are_those_that_the_readme_makes(self, manifests: tuple[dict[str, Any], ...]) -> None:
        text = (DEPLOY / "README.md").read_text("utf-8")
        assert set(re.findall(r"--from-literal=([\w-]+)=", text)) == SECRET
        for pod in pods(manifests):
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                for each in container["env"]:
                    secret = each.get("valueFrom", {}).get("secretKeyRef")
                    if secret and not secret.get("optional"):
                        assert secret["name"] == "ragorder"
                        assert secret["key"] in SECRET

    def test_requests_in_flight_can_end_before_the_pod_is_killed(self, manifests: tuple[dict[str, Any], ...]) -> None:
        grace_s = ServerSettings.model_fields["grace_s"].default
        for pod in pods(manifests):
            (proxy,) = [each for each in pod["spec"]["containers"] if each["name"] == "ragorder"]
            (waits_s,) = re.findall(r"sleep\((\d+)\)", " ".join(proxy["lifecycle"]["preStop"]["exec"]["command"]))
            assert pod["spec"]["terminationGracePeriodSeconds"] > int(waits_s) + grace_s

    def test_images_are_pinned(self, manifests: tuple[dict[str, Any], ...]) -> None:
        for name in ("ragorder", "vllm"):
            for container in containers(manifests, name):
                assert re.search(r":v?\d+\.\d+\.\d+$", container["image"]), container["image"]

    def test_keys_meet(self, manifests: tuple[dict[str, Any], ...]) -> None:
        """What a proxy sends upstream is what stands there."""
        for proxy in containers(manifests, "ragorder"):
            sent = variables(proxy, manifests)["RAGORDER_UPSTREAM_API_KEY"]
            beside = "http://127.0.0.1:8000" in arguments(proxy, manifests)
            assert sent == ("engine-key" if beside else "api-key")
        for engine in containers(manifests, "vllm"):
            assert variables(engine, manifests)["VLLM_API_KEY"] == "engine-key"


class TestBase:
    def test_the_proxy_starts_when_the_engine_answers(self) -> None:
        (pod,) = pods(render(BASE))
        (engine,) = pod["spec"]["initContainers"]
        assert engine["restartPolicy"] == "Always"
        assert engine["startupProbe"]["httpGet"] == {"path": "/health", "port": "engine"}
        assert [each["name"] for each in pod["spec"]["containers"]] == ["ragorder"]

    def test_the_proxy_asks_the_engine_beside_it(self) -> None:
        manifests = render(BASE)
        (engine,), (proxy,) = containers(manifests, "vllm"), containers(manifests, "ragorder")
        port = engine["ports"][0]["containerPort"]
        given = arguments(proxy, manifests)
        assert given[given.index("--upstream") + 1] == f"http://127.0.0.1:{port}"
        given = arguments(engine, manifests)
        assert given[given.index("--port") + 1] == str(port)

    def test_the_engine_is_for_the_proxy_and_for_monitoring(self) -> None:
        (policy,) = of_kind(render(BASE), "NetworkPolicy")
        inside, monitoring = policy["spec"]["ingress"]
        assert inside == {"from": [{"podSelector": {}}], "ports": [{"port": "http"}]}
        assert monitoring["ports"] == [{"port": "http"}, {"port": "engine"}]
        assert policy["spec"]["policyTypes"] == ["Ingress"]

    @pytest.mark.merge
    def test_the_engine_takes_its_arguments(self, everything: tuple[dict[str, Any], ...]) -> None:
        pytest.importorskip("vllm")
        flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
        parser = importlib.import_module("vllm.entrypoints.cli.serve").make_arg_parser(flexible())
        for manifests in (render(BASE), render(ROUTERS / "aibrix"), everything):
            (engine,) = containers(manifests, "vllm")
            known = parser.parse_args(arguments(engine, manifests))
            assert known.enable_prefix_caching is True
            assert known.enable_prompt_tokens_details is True


class TestComponents:
    def test_kv_events_are_published_on_sockets_that_both_containers_reach(
        self, everything: tuple[dict[str, Any], ...]
    ) -> None:
        (pod,) = pods(everything)
        (engine,), (proxy,) = containers(everything, "vllm"), containers(everything, "ragorder")
        given = arguments(engine, everything)
        config = json.loads(given[given.index("--kv-events-config") + 1])
        assert config["enable_kv_cache_events"] is True
        mounts = [{each["name"]: each["mountPath"] for each in one["volumeMounts"]} for one in (engine, proxy)]
        assert mounts[0]["kv-events"] == mounts[1]["kv-events"]
        for endpoint in (config["endpoint"], config["replay_endpoint"]):
            assert Path(endpoint.removeprefix("ipc://")).parent == Path(mounts[0]["kv-events"])
            assert endpoint in (DEPLOY / "README.md").read_text("utf-8")
        # The socket's group is the folder's, which is the proxy's.
        assert pod["spec"]["securityContext"]["fsGroup"] == proxy["securityContext"]["runAsGroup"]
        assert "umask 007" in " ".join(engine["command"])

    def test_keyless_takes_the_clients_key_and_no_other(self, everything: tuple[dict[str, Any], ...]) -> None:
        (before,), (after,) = containers(render(BASE), "ragorder"), containers(everything, "ragorder")
        left = {each["name"] for each in before["env"]} - {each["name"] for each in after["env"]}
        assert left == {"RAGORDER_PROXY_API_KEY"}

    def test_the_operator_scrapes_the_proxy_as_the_job_of_the_alerts(
        self, everything: tuple[dict[str, Any], ...]
    ) -> None:
        (monitor,), (pod,) = of_kind(everything, "PodMonitor"), pods(everything)
        assert pod["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "ragorder"
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
        assert endpoint["authorization"]["credentials"] == {"name": "ragorder", "key": "api-key"}

    def test_the_operators_alerts_are_the_others(self, everything: tuple[dict[str, Any], ...]) -> None:
        (rules,) = of_kind(everything, "PrometheusRule")
        (alerts,) = documents(DEPLOY / "prometheus" / "alerts.yml")
        assert rules["spec"] == alerts


class TestRouters:
    def front(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Arguments and variables of the proxy before the router."""
        manifests = render(ROUTERS / name)
        (front,) = [each for each in containers(manifests, "ragorder") if "--topic-header" in each["args"]]
        return arguments(front, manifests), variables(front, manifests)

    def header(self, name: str) -> str:
        given, _ = self.front(name)
        return checked_header(given[given.index("--topic-header") + 1])

    def llm_d(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Its values, the picker's configuration in them, and the parameters of its plugins."""
        (values,) = documents(ROUTERS / "llm-d" / "values.yaml")
        picker = values["router"]["epp"]
        config = yaml.safe_load(picker["pluginsCustomConfig"][picker["pluginsConfigFile"]])
        return values, config, {each["type"]: each.get("parameters", {}) for each in config["plugins"]}

    def test_llm_d_keeps_the_topics_header_together(self) -> None:
        values, config, plugins = self.llm_d()
        affinity = plugins["session-affinity-filter"]
        assert affinity["strategy"] == "session_id"
        assert affinity["sessionIdConfig"]["sources"] == [{"header": self.header("llm-d")}] == [{"header": ROUTED}]
        (profile,) = config["schedulingProfiles"]
        assert {each["pluginRef"] for each in profile["plugins"]} <= set(plugins)
        servers = values["router"]["modelServers"]
        assert servers["targetPorts"] == [{"number": PORT}]
        self.assert_selects("llm-d", servers["matchLabels"])

    def test_llm_d_scrapes_without_a_key(self) -> None:
        _, _, plugins = self.llm_d()
        # test_deploy.py asks for this path through each proxy.
        assert plugins["metrics-data-source"]["path"] == "/metrics/"
        manifests = render(ROUTERS / "llm-d")
        front, beside = sorted(containers(manifests, "ragorder"), key=lambda each: each["args"][0])
        assert "RAGORDER_PROXY_API_KEY" not in variables(beside, manifests)
        assert "RAGORDER_PROXY_API_KEY" in variables(front, manifests)

    def test_production_stack_keeps_the_topics_header_together(self) -> None:
        (values,) = documents(ROUTERS / "production-stack" / "values.yaml")
        router = values["routerSpec"]
        assert router["routingLogic"] == "session"
        assert router["sessionKey"] == self.header("production-stack") == ROUTED
        extra = dict(zip(router["extraArgs"][::2], router["extraArgs"][1::2], strict=True))
        assert extra["--k8s-port"] == str(PORT)
        name, _, value = extra["--k8s-label-selector"].partition("=")
        self.assert_selects("production-stack", {name: value})
        assert router["vllmApiKey"] == {"secretName": "ragorder", "secretKey": "api-key"}

    def test_aibrix_gets_topics_in_the_one_header_that_it_does_not_own(self) -> None:
        assert self.header("aibrix") == "x-aibrix-session-key" != ROUTED
        manifests = render(ROUTERS / "aibrix")
        (deployment,) = [each for each in of_kind(manifests, "Deployment") if each["metadata"]["name"] == "ragorder"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        model = labels["model.aibrix.ai/name"]
        assert labels["model.aibrix.ai/port"] == deployment["metadata"]["labels"]["model.aibrix.ai/port"] == str(PORT)
        (engine,) = containers(manifests, "vllm")
        assert labels["model.aibrix.ai/metric-port"] == str(engine["ports"][0]["containerPort"])
        given = arguments(engine, manifests)
        assert given[given.index("--served-model-name") + 1] == model
        assert model in {each["metadata"]["name"] for each in of_kind(manifests, "Service")}

    def test_dynamo_gets_ordered_requests_with_topics(self) -> None:
        assert self.front("dynamo")[0][0] == "serve"
        assert self.header("dynamo") == "X-Dynamo-Session-ID"
        manifests = render(ROUTERS / "dynamo")
        (deployment,) = of_kind(manifests, "Deployment")
        assert deployment["spec"]["replicas"] == 1
        assert of_kind(manifests, "PodDisruptionBudget") == []
        text = (ROUTERS / "dynamo" / "frontend.env").read_text("utf-8")
        settings = dict(line.split("=") for line in text.splitlines() if not line.startswith("#"))
        assert int(settings["DYN_ROUTER_SESSION_AFFINITY_TTL_SECS"]) > 0

    def test_fronts_agree_on_topics(self) -> None:
        for name in ("llm-d", "production-stack", "aibrix", "dynamo"):
            assert self.front(name)[1]["RAGORDER_TOPIC_SECRET"] == "topic-secret"  # noqa: S105

    def assert_selects(self, name: str, labels: dict[str, str]) -> None:
        selected = [pod for pod in pods(render(ROUTERS / name)) if labels.items() <= pod["metadata"]["labels"].items()]
        assert len(selected) == 1
        assert "vllm" in {each["name"] for each in selected[0]["spec"]["initContainers"]}
