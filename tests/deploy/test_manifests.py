"""The manifests in deploy/: valid, consistent with each other, and with flags that exist."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from host.metrics.families import CATALOGUE
from host.options.command_line import parse
from host.options.options import Options
from host.repository.object_store.location import is_store_url
from tests.conftest import DEADLINE, ROOT
from tests.deploy.schemas import custom_errors, load_manifests, validate, validate_kubernetes

DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
RUNTIMES = sorted((DEPLOY / "kserve").glob("runtime*.yaml"))
MODELS = sorted((DEPLOY / "kserve").glob("trained-model*.yaml"))
SERVICES = sorted((DEPLOY / "kserve").glob("inference-service*.yaml"))
LABELS = {"app.kubernetes.io/name": "pbhost"}


def name_of(path: Path) -> str:
    return path.stem


def build(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl apply -k` would send, by kind and name."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(KUSTOMIZE / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    manifests = load_manifests(done.stdout)
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def options_of(container: dict[str, Any]) -> Options:
    """The options of a container, which starts the server by Triton's name of it."""
    return read_flags(container["args"], {each["mountPath"] for each in container["volumeMounts"]})


def read_flags(arguments: list[str], mounts: set[str]) -> Options:
    """The options of a command line; its repository is one of the mounts, or KServe's."""
    program, *flags = arguments
    assert program == "tritonserver"
    flag, repository = flags[0].split("=")
    assert flag in ("--model-repository", "--model-store")
    assert repository in mounts | {"/mnt/models"} or "/cache" in mounts and is_store_url(repository)
    return parse([f"{flag}={ROOT / 'model_repository'}", *flags[1:]])


def check_container(container: dict[str, Any], grace_seconds: int) -> None:
    """Checks ports, probes and grace period against the flags."""
    options = options_of(container)
    named = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        port = container[probe]["httpGet"]["port"]
        assert named.get(port, port) == options.http_port
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["startupProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert options.exit_delay_secs + options.exit_timeout_secs + 5 < grace_seconds
    assert options.exit_delay_secs >= container["readinessProbe"]["periodSeconds"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert "/tmp" in {each["mountPath"] for each in container["volumeMounts"]}


@pytest.mark.parametrize(
    "folder", ["base", "overlays/autoscaling", "overlays/monitoring", "overlays/object-store"]
)
def test_what_kustomize_builds_is_valid(folder: str) -> None:
    manifests = build(folder)
    assert len(manifests) >= 5
    for manifest in manifests.values():
        validate(manifest)


def test_the_overlay_of_object_stores_has_a_cache_instead_of_a_volume() -> None:
    pod = build("overlays/object-store")["Deployment", "pbhost"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_container(container, pod["terminationGracePeriodSeconds"])
    options = options_of(container)
    assert options.repository_cache_directory == "/cache"
    assert options.repository_cache_byte_size == 18 << 30
    assert [volume["name"] for volume in pod["volumes"]] == ["cache", "tmp"]


def test_unknown_fields_are_errors() -> None:
    """Of all validators: they would accept anything otherwise."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate_kubernetes(service | {"spec": {"prots": []}})
    (runtime,) = load_manifests(RUNTIMES[0].read_text())
    runtime["spec"]["containers"][0]["imgae"] = "pbhost"
    assert "imgae" in "".join(custom_errors(runtime))
    (monitor,) = load_manifests(
        (KUSTOMIZE / "overlays/monitoring/service-monitor.yaml").read_text()
    )
    monitor["spec"]["endpoints"][0] |= {"intervall": "15s", "interval": "often"}
    errors = "".join(custom_errors(monitor))
    assert "intervall" in errors and "often" in errors


def test_the_deployment_and_its_services_fit_together() -> None:
    manifests = build("base")
    pod = manifests["Deployment", "pbhost"]["spec"]["template"]
    assert pod["metadata"]["labels"] == LABELS
    (container,) = pod["spec"]["containers"]
    check_container(container, pod["spec"]["terminationGracePeriodSeconds"])
    options = options_of(container)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "http": options.http_port,
        "grpc": options.grpc_port,
        "metrics": options.metrics_port,
    }
    selected = [
        manifests["Deployment", "pbhost"]["spec"]["selector"]["matchLabels"],
        manifests["Service", "pbhost"]["spec"]["selector"],
        manifests["Service", "pbhost-grpc"]["spec"]["selector"],
        manifests["PodDisruptionBudget", "pbhost"]["spec"]["selector"]["matchLabels"],
        manifests["NetworkPolicy", "pbhost"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert selected == [LABELS] * 5
    headless = manifests["Service", "pbhost-grpc"]["spec"]
    assert headless["clusterIP"] == "None"
    assert options.grpc_max_connection_age > 0
    for service in (headless, manifests["Service", "pbhost"]["spec"]):
        for port in service["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    allowed = [
        port["port"]
        for rule in manifests["NetworkPolicy", "pbhost"]["spec"]["ingress"]
        for port in rule["ports"]
    ]
    assert sorted(allowed) == sorted(ports)


def test_the_autoscaler_follows_a_metric_of_the_server() -> None:
    manifests = build("overlays/autoscaling")
    scaler = manifests["HorizontalPodAutoscaler", "pbhost"]["spec"]
    target = scaler["scaleTargetRef"]
    assert "replicas" not in manifests[target["kind"], target["name"]]["spec"]
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] in CATALOGUE


def test_prometheus_finds_the_metrics_port() -> None:
    manifests = build("overlays/monitoring")
    monitor = manifests["ServiceMonitor", "pbhost"]["spec"]
    service = manifests["Service", "pbhost"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("path", [*RUNTIMES, *SERVICES, *MODELS], ids=name_of)
def test_manifests_for_kserve_are_valid(path: Path) -> None:
    for manifest in load_manifests(path.read_text()):
        assert custom_errors(manifest) == []


@pytest.mark.parametrize("path", RUNTIMES, ids=name_of)
def test_runtimes_start_a_server_where_kserve_expects_it(path: Path) -> None:
    (runtime,) = load_manifests(path.read_text())
    (container,) = runtime["spec"]["containers"]
    options = options_of(container)
    assert container["name"] == "kserve-container"
    assert (options.http_port, options.grpc_port) == (8080, 9000)
    annotations = runtime["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == str(options.metrics_port)
    explicit = path.name == "runtime-explicit.yaml"
    assert options.model_control_mode == ("explicit" if explicit else "none")
    check_container(container, 45)


def test_the_arguments_of_runtimes_and_charts_for_triton_are_read() -> None:
    """As KServe's own runtime and Triton's chart have them."""
    kserve = ["--grpc-port=9000", "--http-port=8080", "--allow-grpc=true", "--allow-http=true"]
    chart = ["--model-control-mode=poll", "--repository-poll-secs=5"]
    mounts = {"/mnt/models", "/models"}
    options = read_flags(["tritonserver", "--model-store=/mnt/models", *kserve], mounts)
    assert (options.http_port, options.grpc_port, options.warnings) == (8080, 9000, [])
    options = read_flags(["tritonserver", "--model-store=/models", *chart], mounts)
    assert (options.poll_interval, options.warnings) == (5, [])


@pytest.mark.parametrize("path", SERVICES, ids=name_of)
def test_services_name_a_runtime_and_a_protocol_of_it(path: Path) -> None:
    runtimes = {
        runtime["metadata"]["name"]: runtime["spec"]
        for each in RUNTIMES
        for runtime in load_manifests(each.read_text())
    }
    (service,) = load_manifests(path.read_text())
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    runtime = runtimes[model["runtime"]]
    assert model["protocolVersion"] in runtime["protocolVersions"]
    assert model["modelFormat"]["name"] in {f["name"] for f in runtime["supportedModelFormats"]}
    check_container(runtime["containers"][0], predictor["terminationGracePeriodSeconds"])
    for port in model.get("ports", []):
        assert port["containerPort"] == options_of(runtime["containers"][0]).grpc_port


@pytest.mark.parametrize("path", MODELS, ids=name_of)
def test_models_name_a_service_whose_server_loads_them_when_asked(path: Path) -> None:
    (model,) = load_manifests(path.read_text())
    services = [each for one in SERVICES for each in load_manifests(one.read_text())]
    (predictor,) = (
        service["spec"]["predictor"]
        for service in services
        if service["metadata"]["name"] == model["spec"]["inferenceService"]
    )
    assert "storageUri" not in predictor["model"]
    assert predictor["model"]["runtime"] == "kserve-pbhost-explicit"
    assert predictor["model"]["resources"]["limits"]["memory"]
    assert predictor["model"]["modelFormat"]["name"] == model["spec"]["model"]["framework"]


def test_compose_mounts_files_that_exist() -> None:
    folder = DEPLOY / "compose"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    services = compose["services"]
    assert (folder / services["pbhost"]["build"]["context"] / "Containerfile").is_file()
    options = read_flags(services["pbhost"]["command"], {"/models"})
    named = set(compose["volumes"])
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.replace("${MODELS:-../../model_repository}", "../../model_repository")
            source = source.split(":")[0]
            assert source in named or (folder / source).exists(), volume
    prometheus = yaml.safe_load((folder / "prometheus.yaml").read_text())
    ((targets,),) = [each["static_configs"] for each in prometheus["scrape_configs"]]
    assert targets["targets"] == [f"pbhost:{options.metrics_port}"]
    for rule in prometheus["rule_files"]:
        mounted = Path(rule).relative_to("/etc/prometheus/pbhost")
        assert (DEPLOY / "prometheus" / mounted).is_file()


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """The places whose values `kept` has not, or not as they were."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            each
            for key, value in given.items()
            for each in (
                lost(value, kept[key], f"{place}.{key}") if key in kept else [f"{place}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [each for n, (a, b) in pairs for each in lost(a, b, f"{place}[{n}]")]
    return [] if given == kept else [place]


def through_grafana(dashboard: dict[str, Any]) -> Any:
    """What is left of a dashboard in Grafana's own classes, which drop unknown fields."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's classes need Python 3.11")
    dashboard = json.loads((DEPLOY / "grafana" / "pbhost.json").read_text())
    assert lost(dashboard, through_grafana(dashboard)) == []
    dashboard["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    dashboard["panels"][2]["targets"][0]["exrp"] = "up"
    assert lost(dashboard, through_grafana(dashboard)) == [
        ".panels[1].fieldConfig.defaults.unti",
        ".panels[2].targets[0].exrp",
    ]
