"""The Helm chart in deploy/helm: valid, and by default the objects that kustomize builds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from host.release import RELEASE
from tests.conftest import DEADLINE, ROOT
from tests.deploy.schemas import load_manifests, validate
from tests.deploy.test_manifests import build, check_container, options_of

CHART = ROOT / "deploy" / "helm" / "pbhost"
OWN_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/component")
"""Labels that the chart has and the other manifests need not have."""
EVERYTHING = {
    "args": ["--model-control-mode=explicit", "--load-model=*"],
    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    "imagePullSecrets": [{"name": "secret"}],
    "models": {"volume": {"nfs": {"server": "a", "path": "/b"}}},
    "exitDelaySeconds": 10,
    "exitTimeoutSeconds": 60,
    "podAnnotations": {"a/b": "c"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    folders = [str(ROOT / ".venv-helm" / "helm"), os.environ["PATH"]]
    program = shutil.which("helm", path=os.pathsep.join(folders))
    if program is None:
        pytest.skip("needs the program helm (make helm)")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=DEADLINE)


def render(folder: Path, values: dict[str, Any], release: str = "pbhost") -> dict[Any, Any]:
    """What Helm would send, by kind and name."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm("template", release, str(CHART), f"--values={file}")
    assert done.returncode == 0, done.stderr
    manifests = load_manifests(done.stdout)
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def without_own(part: Any) -> Any:
    """A manifest without what only the chart has."""
    if isinstance(part, list):
        return [without_own(each) for each in part]
    if isinstance(part, dict):
        return {
            key: without_own(value)
            for key, value in part.items()
            if key not in (*OWN_LABELS, "image", "imagePullPolicy")
        }
    return part


def test_the_chart_has_no_complaint_of_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_the_default_objects_are_those_of_kustomize(tmp_path: Path) -> None:
    charted = render(tmp_path, {})
    others = build("base")
    assert charted.keys() == others.keys()
    for key, manifest in charted.items():
        validate(manifest)
        assert without_own(manifest["spec"]) == without_own(others[key]["spec"])
    (container,) = charted["Deployment", "pbhost"]["spec"]["template"]["spec"]["containers"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == RELEASE
    assert container["image"] == f"registry.example/pbhost:{RELEASE}"


def test_every_value_gives_valid_objects(tmp_path: Path) -> None:
    given = yaml.safe_load((CHART / "values.yaml").read_text())
    assert EVERYTHING.keys() <= given.keys()
    objects = render(tmp_path, EVERYTHING, "other")
    for manifest in objects.values():
        validate(manifest)
    deployment = objects["Deployment", "other"]["spec"]
    assert "replicas" not in deployment
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    check_container(container, pod["terminationGracePeriodSeconds"])
    assert options_of(container).model_control_mode == "explicit"
    for field in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"):
        assert pod[field] == EVERYTHING[field]
    monitor = objects["ServiceMonitor", "other"]["spec"]
    selected = monitor["selector"]["matchLabels"].items()
    found = [
        name
        for (kind, name), each in objects.items()
        if kind == "Service" and selected <= each["metadata"]["labels"].items()
    ]
    assert found == ["other"]
    scaler = objects["HorizontalPodAutoscaler", "other"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == "other"
    bare = render(
        tmp_path, {"podDisruptionBudget": {"enabled": False}, "networkPolicy": {"enabled": False}}
    )
    assert {kind for kind, _ in bare} == {"Deployment", "Service"}


def test_models_of_a_url_have_a_cache_instead_of_a_volume(tmp_path: Path) -> None:
    values = {
        "models": {"url": "s3://models/production", "cacheSize": "5Gi"},
        "envFrom": [{"secretRef": {"name": "object-store"}}],
        "serviceAccountName": "reader",
    }
    deployment = render(tmp_path, values)["Deployment", "pbhost"]
    validate(deployment)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_container(container, pod["terminationGracePeriodSeconds"])
    assert options_of(container).repository_cache_directory == "/cache"
    assert options_of(container).repository_cache_byte_size == (5 << 30) * 9 // 10
    cache = {"name": "cache", "emptyDir": {"sizeLimit": "5Gi"}}
    assert [volume["name"] for volume in pod["volumes"]] == ["cache", "tmp"]
    assert pod["volumes"][0] == cache and pod["serviceAccountName"] == "reader"
    assert container["envFrom"] == values["envFrom"]


@pytest.mark.parametrize(
    "values",
    [
        {"replicsa": 3},
        {"exitDelaySeconds": 1},
        {"args": ["model-repository=x"]},
        {"models": {"claim": "x"}},
        {"models": {"url": "http://bucket"}},
    ],
    ids=["name", "delay", "flag", "volume", "url"],
)
def test_wrong_values_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm("template", "pbhost", str(CHART), f"--values={file}")
    assert done.returncode != 0
    assert next(iter(values)) in done.stderr
