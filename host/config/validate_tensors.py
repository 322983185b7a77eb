"""Validates inputs, outputs and batch tensors. The caller adds ` for <model>` to the texts."""

from __future__ import annotations

from collections.abc import Sequence

from host.config.findings import Finding, Findings
from host.config.schema import ConfigPart, ModelConfig, pb

_MAX_ELEMENTS = 2**63 - 1
_BatchInput = pb.BatchInput
_DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def check_inputs(config: ModelConfig) -> Findings:
    """Checks each input."""
    for index, tensor in enumerate(config.input):
        path = f"input[{index}]"
        yield from _check_shape(tensor, "model input ", path, config.max_batch_size)
        if tensor.format != pb.ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            yield Finding("model input NHWC/NCHW require 3 dims", f"{path}.dims")
        yield from _check_special(tensor, "input", path, config.platform)


def check_outputs(config: ModelConfig) -> Findings:
    """Checks each output."""
    for index, tensor in enumerate(config.output):
        path = f"output[{index}]"
        yield from _check_shape(tensor, "model output ", path, config.max_batch_size)
        yield from _check_special(tensor, "output", path, config.platform)


def _check_shape(tensor: ConfigPart, what: str, path: str, max_batch_size: int) -> Findings:
    if not tensor.name:
        yield Finding(f"{what}must specify 'name'", f"{path}.name")
    subject = f"{what}'{tensor.name}' "
    if tensor.data_type == pb.TYPE_INVALID:
        yield Finding(f"{subject}must specify 'data_type'", f"{path}.data_type")
    if not tensor.dims:
        yield Finding(f"{subject}must specify 'dims'", f"{path}.dims")
    reshaped = tensor.HasField("reshape")
    if reshaped and not tensor.reshape.shape and max_batch_size == 0:
        yield Finding(
            f"{subject}cannot have empty reshape for non-batching model as scalar tensors "
            "are not supported",
            f"{path}.reshape",
        )
    for index, size in enumerate(tensor.dims):
        if size < 1 and size != -1:
            yield Finding(f"{subject}dimension {_DIMENSION}", f"{path}.dims[{index}]")
    for index, size in enumerate(tensor.reshape.shape):
        if size < 1 and size != -1:
            yield Finding(
                f"{subject}reshape dimensions {_DIMENSION}", f"{path}.reshape.shape[{index}]"
            )
    if reshaped:
        yield from _check_reshape(tensor, subject, f"{path}.reshape")


def _check_reshape(tensor: ConfigPart, subject: str, path: str) -> Findings:
    dims, shape = _contiguous_runs(tensor.dims), _contiguous_runs(tensor.reshape.shape)
    if len(dims) != len(shape) and len(dims) > 1 and len(shape) > 1:
        yield Finding(
            f"{subject}has different number of variable-size dimensions for dims and reshape",
            path,
        )
    # An empty reshape has one run with one element: it fits dims of one element.
    if dims != shape:
        yield Finding(f"{subject}has different size for dims and reshape", path)


def _contiguous_runs(shape: Sequence[int]) -> list[int]:
    """Element counts of the runs of fixed dimensions between variable dimensions."""
    runs = [1]
    for size in shape:
        if size == -1:
            runs.append(1)
        else:
            runs[-1] *= size
    return runs


def _check_special(tensor: ConfigPart, what: str, path: str, platform: str) -> Findings:
    """Checks settings that only TensorRT has, and the maximum number of elements."""
    if tensor.is_shape_tensor and platform != "tensorrt_plan":
        yield Finding(
            "shape tensors are only supported for TensorRT platform", f"{path}.is_shape_tensor"
        )
    if tensor.is_non_linear_format_io:
        field = f"{path}.is_non_linear_format_io"
        if platform != "tensorrt_plan":
            yield Finding("Non-linear IO format is only supported for the TensorRT platform", field)
        if len(tensor.dims) != 3:
            yield Finding(f"Non-linear IO format {what} requires 3 dims", field)
    if any(run > _MAX_ELEMENTS for run in _contiguous_runs(tensor.dims)):
        yield Finding(
            f"element count for tensor '{tensor.name} dims' exceeds maximum size of "
            f"{_MAX_ELEMENTS}",
            f"{path}.dims",
        )


def check_batch_tensors(config: ModelConfig) -> Findings:
    """Checks the batch inputs and outputs."""
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for index, batch in enumerate(config.batch_input):
        path = f"batch_input[{index}]"
        kind = _BatchInput.Kind.Name(batch.kind)
        yield from _check_sources(batch, f"batch input kind '{kind}'", path)
        if batch.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            yield Finding(
                "batch input data type must be TYPE_INT32 or TYPE_FP32", f"{path}.data_type"
            )
        yield from _check_known_sources(batch, inputs, path)
    for index, batch in enumerate(config.batch_output):
        targets: set[str] = set()
        path = f"batch_output[{index}]"
        kind = pb.BatchOutput.Kind.Name(batch.kind)
        yield from _check_sources(batch, f"batch output kind '{kind}'", path)
        yield from _check_known_sources(batch, inputs, path)
        for position, target in enumerate(batch.target_name):
            field = f"{path}.target_name[{position}]"
            if target not in outputs:
                yield Finding(f"unknown target output name '{target}'", field)
            if target in targets:
                yield Finding(f"target output name '{target}' can only be specified once", field)
            targets.add(target)


def _check_sources(batch: ConfigPart, what: str, path: str) -> Findings:
    count = len(batch.source_input)
    if count != 1:
        yield Finding(f"{what} expects 1 source input, got {count}", f"{path}.source_input")


def _check_known_sources(batch: ConfigPart, inputs: set[str], path: str) -> Findings:
    for index, name in enumerate(batch.source_input):
        if name not in inputs:
            yield Finding(f"unknown source input name '{name}'", f"{path}.source_input[{index}]")
