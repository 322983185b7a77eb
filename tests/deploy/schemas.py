"""Strict validation of manifests: unknown fields are errors, as with `fieldValidation=Strict`.

`kserve/` has the schemas of KServe's resources without their texts; of an InferenceService only the
predictor that names a runtime. KServe publishes the definitions under Apache-2.0.
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
_KSERVE = Path(__file__).parent / "kserve"


def load_manifests(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [each for each in yaml.safe_load_all(text) if each]


def validate_kubernetes(manifest: dict[str, Any]) -> None:
    """Raises an error if a resource of Kubernetes is invalid."""
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def kserve_errors(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with a resource of KServe: the place and the reason of each error."""
    schema = json.loads((_KSERVE / f"{manifest['kind']}.json").read_text())
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
