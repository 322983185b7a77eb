"""Strict validation of manifests: unknown fields are errors, as with `fieldValidation=Strict`.

`kserve/` has the schemas of KServe's resources without their texts; of an InferenceService only the
predictor that names a runtime. That of a TrainedModel follows KServe's Python SDK 0.21.
`prometheus_operator/` has that of a ServiceMonitor of version 0.93.
KServe and the Prometheus operator publish the definitions under Apache-2.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.31"
"""The version of Kubernetes whose schemas are used."""
_CUSTOM = {
    path.stem: path
    for folder in ("kserve", "prometheus_operator")
    for path in (Path(__file__).parent / folder).glob("*.json")
}


def load_manifests(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [each for each in yaml.safe_load_all(text) if each]


def validate_kubernetes(manifest: dict[str, Any]) -> None:
    """Raises an error if a resource of Kubernetes is invalid."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def validate(manifest: dict[str, Any]) -> None:
    """Raises an error if a resource is invalid."""
    if manifest["kind"] in _CUSTOM:
        assert custom_errors(manifest) == []
    else:
        validate_kubernetes(manifest)


def custom_errors(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource: the place and the reason of each error."""
    schema = json.loads(_CUSTOM[manifest["kind"]].read_text())
    schema["properties"]["metadata"] = {"type": "object"}
    _forbid_unknown_fields(schema)
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def _forbid_unknown_fields(schema: Any) -> None:
    """Turns a schema of a CRD into a strict JSON schema, in place."""
    if isinstance(schema, list):
        for each in schema:
            _forbid_unknown_fields(each)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if schema.pop("x-kubernetes-int-or-string", None):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for each in list(schema.values()):
        _forbid_unknown_fields(each)
