"""The OpenAPI paths and schemas of one model version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from urllib.parse import quote

from host.config.schema import ModelConfig
from host.frontends.http import api_schemas as tensors
from host.frontends.http.api_schemas import (
    BINARY,
    EVENTS,
    JSON,
    STRING,
    Operations,
    Schema,
    array_schema,
    json_body,
    object_schema,
    reference,
)
from host.inference.metadata import ModelMetadata, TensorMetadata

_INFERENCE_ERRORS = (400, 404, 500, 501, 503)
_METADATA_ERRORS = (404, 503)
_JSON_LENGTH: Schema = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Length of the JSON part in bytes. Without this header, the whole body is JSON.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 2147483647},
}
_SEQUENCE_PARAMETERS = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A loaded model version. `latest`: requests without a version go to this one."""

    metadata: ModelMetadata
    config: ModelConfig
    version: str
    latest: bool

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.metadata.name

    @property
    def tag(self) -> str:
        """The OpenAPI tag of its operations."""
        return f"model {self.name}"

    @property
    def decoupled(self) -> bool:
        """Whether the model is decoupled: it can send any number of responses."""
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def path(self) -> str:
        """The path with the version number."""
        return f"/v2/models/{quote(self.name, safe='')}/versions/{self.version}"

    @property
    def paths(self) -> list[str]:
        """All paths of this version."""
        found = [self.path]
        if self.latest:
            found.insert(0, f"/v2/models/{quote(self.name, safe='')}")
        return found

    @property
    def required(self) -> list[TensorMetadata]:
        """The inputs that every request needs."""
        names = {entry.name for entry in self.config.input if not entry.optional}
        return [entry for entry in self.metadata.inputs if entry.name in names]

    @property
    def optional(self) -> list[TensorMetadata]:
        """The optional inputs."""
        return [entry for entry in self.metadata.inputs if entry not in self.required]

    @property
    def has_json_form(self) -> bool:
        """Whether all required inputs have a JSON form."""
        return all(map(tensors.has_json_form, self.required))

    @property
    def sequential(self) -> bool:
        """Whether the model uses sequence batching."""
        return bool(self.config.HasField("sequence_batching"))

    def parameters(self) -> dict[str, object]:
        """Returns the parameters that a request needs: a new sequence for a sequence model."""
        return dict(_SEQUENCE_PARAMETERS) if self.sequential else {}

    def summary(self) -> Schema:
        """Returns the entry of `x-models` that the page shows."""
        optional = self.optional
        return {
            "name": self.name,
            "version": self.version,
            "latest": self.latest,
            "path": self.paths[0],
            "platform": self.metadata.platform,
            "decoupled": self.decoupled,
            "max_batch_size": self.config.max_batch_size,
            "parameters": self.parameters(),
            "inputs": [
                {**asdict(entry), "optional": entry in optional} for entry in self.metadata.inputs
            ],
            "outputs": [asdict(entry) for entry in self.metadata.outputs],
        }


def model_paths(model: DescribedModel, operations: Operations) -> dict[str, Schema]:
    """Returns the path items of a model version by path."""
    tag = model.tag
    title = f"{model.name} version {model.version}"

    def get(
        category: str, what: str, answer: Schema | None, errors: Iterable[int] = _METADATA_ERRORS
    ) -> Schema:
        made = operations.operation(
            category, tag, f"Get the {what} of {title}", answer, errors=errors
        )
        return {"get": made}

    statistics = reference("Statistics")
    items = {
        "": get("metadata", "inputs and outputs", reference("ModelMetadata")),
        "/ready": get("health", "readiness", None, (400, 404, 503)),
        "/config": get("model-config", "configuration", {"type": "object"}),
        "/stats": get("statistics", "statistics", statistics, (400, 503)),
    }
    if not model.decoupled:
        items["/infer"] = {"post": _infer(model, operations, title)}
    if model.has_json_form and not model.sequential:  # generate does not support sequences
        items["/generate_stream"] = {"post": _generate(model, operations, title, stream=True)}
        if not model.decoupled:
            items["/generate"] = {"post": _generate(model, operations, title, stream=False)}
    return {f"{path}{end}": item for path in model.paths for end, item in items.items()}


def _infer(model: DescribedModel, operations: Operations, title: str) -> Schema:
    parameters: list[Schema] = []
    if model.has_json_form:
        body = json_body(_infer_schema(model), True, _infer_example(model))
        details = "Binary tensor data can follow the JSON part."
    else:
        body = {"required": True, "content": {BINARY: {"schema": {"contentMediaType": BINARY}}}}
        details = "FP16 and BF16 have no JSON form: binary tensor data must follow the JSON part."
        parameters.append(_JSON_LENGTH)
    answer = {
        JSON: {"schema": _response_schema(model.metadata)},
        BINARY: {"schema": {"contentMediaType": BINARY}},
    }
    return operations.operation(
        "inference", model.tag, f"Send an inference request to {title}", answer,
        errors=_INFERENCE_ERRORS, body=body, parameters=parameters, details=details,
    )  # fmt: skip


def _infer_schema(model: DescribedModel) -> Schema:
    most = model.config.max_batch_size
    first = [tensors.input_schema(entry, most) for entry in model.required]
    others = [tensors.input_schema(e, most) for e in model.optional if tensors.has_json_form(e)]
    inputs: Schema = {"type": "array", "minItems": len(first), "maxItems": len(first) + len(others)}
    if first:
        inputs["prefixItems"] = first
    if others:
        inputs["items"] = {"anyOf": others}
    outputs = array_schema(_requested_output(model.metadata.outputs))
    outputs["description"] = "The requested outputs; all outputs if the array is empty."
    parameters = reference("RequestParameters")
    return object_schema(
        {"id": STRING, "parameters": parameters, "inputs": inputs, "outputs": outputs}, ["inputs"]
    )


def _infer_example(model: DescribedModel) -> Schema | None:
    inputs = []
    for entry in model.required:
        values = tensors.example_values(entry)
        if values is None:
            return None
        shape = tensors.example_shape(entry.shape)
        inputs.append(
            {"name": entry.name, "datatype": entry.datatype, "shape": shape, "data": values}
        )
    example: Schema = {"inputs": inputs}
    if parameters := model.parameters():
        example["parameters"] = parameters
    return example


def _requested_output(outputs: list[TensorMetadata]) -> Schema:
    name = {"enum": [entry.name for entry in outputs]} if outputs else STRING
    return object_schema({"name": name, "parameters": reference("OutputParameters")}, ["name"])


def _response_schema(metadata: ModelMetadata) -> Schema:
    outputs: Schema = {"type": "array"}
    if metadata.outputs:
        outputs["items"] = {"anyOf": [tensors.output_schema(entry) for entry in metadata.outputs]}
    members = {
        "id": STRING,
        "model_name": {"const": metadata.name},
        "model_version": STRING,
        "parameters": {"type": "object"},
        "outputs": outputs,
    }
    return object_schema(members, ["model_name", "model_version", "outputs"])


def _generate(model: DescribedModel, operations: Operations, title: str, stream: bool) -> Schema:
    members: Schema = {"id": STRING, "parameters": reference("CustomParameters")}
    for entry in model.metadata.inputs:
        if tensors.has_json_form(entry):
            element = reference(f"{entry.datatype}-element")
            members[entry.name] = {
                "description": f"{entry.datatype} {entry.shape}",
                "anyOf": [element, tensors.values_schema(entry)],
            }
    schema = object_schema(members, [entry.name for entry in model.required])
    schema["additionalProperties"] = reference("CustomParameter")
    answer: Schema = {JSON: {"schema": {"type": "object"}}}
    summary = f"Send a request in flat JSON to {title}"
    if stream:
        answer = {EVENTS: {}}
        summary += ", and receive each response as a server-sent event"
    return operations.operation(
        "inference", model.tag, summary, answer,
        errors=_INFERENCE_ERRORS, body=json_body(schema, True, _generate_example(model)),
    )  # fmt: skip


def _generate_example(model: DescribedModel) -> Schema | None:
    example: Schema = {}
    for entry in model.required:
        values = tensors.example_values(entry)
        if values is None:
            return None
        example[entry.name] = values[0] if len(values) == 1 else values
    return example
