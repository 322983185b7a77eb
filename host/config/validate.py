"""Validates configurations, with the checks in the order of the reference documentation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from host.config.defaults import PLATFORMS_OF_BACKEND
from host.config.findings import Finding, Findings
from host.config.parameters import (
    check_input_memory,
    check_load_parameters,
    check_max_concurrent_batches,
    check_openai_parameters,
    check_preserves_ordering,
    check_traffic_parameters,
)
from host.config.schema import ENSEMBLE, ConfigPart, ModelConfig, pb
from host.errors import ErrorCode

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


@dataclass(slots=True, eq=False)
class _Tensor:
    """A node of the data flow graph.

    `sources` are the inputs of the step that writes the tensor, `uses` the tensors that are made
    from it. `ready` says whether the tensor can be computed from the ensemble's inputs.
    """

    name: str
    sources: list[_Tensor] = field(default_factory=list)
    uses: list[_Tensor] = field(default_factory=list)
    ready: bool = False


def check_ensemble(config: ModelConfig) -> Findings:
    """Checks `ensemble_scheduling` (docs/reference/ensembles.md, "Checks of the
    configuration").
    """
    name = config.name
    if config.HasField("ensemble_scheduling"):
        yield from _check_settings(config)
        yield from _check_steps(config)
        tensors: dict[str, _Tensor] = {}
        yield from _build_graph(config, tensors)
        yield from _check_data_flow(config, tensors)
    elif config.platform == ENSEMBLE:
        yield Finding(
            f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble",
            "ensemble_scheduling",
        )


def _check_settings(config: ModelConfig) -> Findings:
    name = config.name
    if config.platform != ENSEMBLE:
        yield Finding(
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble",
            "ensemble_scheduling",
        )
    if config.instance_group:
        yield Finding(
            f"instance group should not be specified for ensemble '{name}'", "instance_group"
        )
    if config.HasField("optimization"):
        yield Finding(f"optimization should not be specified for ensemble '{name}'", "optimization")
    if config.model_warmup:
        yield Finding(f"model_warmup can not be specified for ensemble '{name}'", "model_warmup")


def _check_steps(config: ModelConfig) -> Findings:
    steps = config.ensemble_scheduling.step
    if not steps:
        yield Finding(
            f"must specify 'step' for ensemble '{config.name}'", "ensemble_scheduling.step"
        )
    for index, step in enumerate(steps):
        for part in ("model_name", "input_map", "output_map"):
            if not getattr(step, part):
                yield Finding(
                    f"must specify '{part}' in step {index} of ensemble '{config.name}'",
                    f"ensemble_scheduling.step[{index}].{part}",
                )


def _build_graph(config: ModelConfig, tensors: dict[str, _Tensor]) -> Findings:
    """Adds the nodes to `tensors`: every output of a step depends on all inputs of the step."""
    written: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        made = _nodes(step.output_map.values(), tensors)
        used = _nodes(step.input_map.values(), tensors)
        for tensor in made:
            if tensor.name in written:
                yield Finding(
                    f"ensemble tensor '{tensor.name}' can appear in an output map only once for "
                    f"ensemble '{config.name}' step {index}",
                    f"ensemble_scheduling.step[{index}].output_map",
                )
            written.add(tensor.name)
            tensor.sources += used
        for tensor in used:
            tensor.uses += made


def _nodes(names: Iterable[str], tensors: dict[str, _Tensor]) -> list[_Tensor]:
    return [tensors.setdefault(name, _Tensor(name)) for name in sorted(names)]


def _check_data_flow(config: ModelConfig, tensors: dict[str, _Tensor]) -> Findings:
    name = config.name
    for index, tensor in enumerate(config.input):
        if tensor.name not in tensors:
            # Triton's texts have the unbalanced quotes here and below.
            yield Finding(
                f"ensemble input '{tensor.name}' for ensemble {name}' is not used",
                f"input[{index}].name",
            )
    _mark_ready([tensors[tensor.name] for tensor in config.input if tensor.name in tensors])
    blamed = set()
    for index, tensor in enumerate(config.output):
        node = tensors.get(tensor.name)
        if node is None:
            yield Finding(
                f"ensemble output '{tensor.name}' for ensemble {name}' is not used",
                f"output[{index}].name",
            )
        elif not node.ready:
            cause = _find_cause(node)
            blamed.add(cause.name)
            yield Finding(_unwritten_text(node, cause, name), f"output[{index}].name")
    wanted = {tensor.name for tensor in config.output}
    for node in tensors.values():
        # The tensors that cannot be computed without this one are not reported as well.
        unused = not node.uses if node.ready else _find_cause(node) is node
        if unused and node.name not in wanted | blamed:
            yield Finding(
                f"ensemble tensor '{node.name}' is unused in ensemble '{name}'",
                "ensemble_scheduling",
            )


def _mark_ready(ready: list[_Tensor]) -> None:
    """Marks every tensor that can be computed from the given ones."""
    for tensor in ready:
        tensor.ready = True
    while ready:
        for user in ready.pop().uses:
            if not user.ready and all(source.ready for source in user.sources):
                user.ready = True
                ready.append(user)


def _find_cause(node: _Tensor) -> _Tensor:
    """The tensor that keeps this one from being computed.

    That is the nearest one that no step writes. If each of them is written, some depend on
    themselves: then it is the last tensor on the way to one that was passed before, or `node` if
    that is `node`.
    """
    queue = [node]
    reached = {node}
    for tensor in queue:
        if not tensor.sources:
            return tensor
        new = [source for source in tensor.sources if not source.ready and source not in reached]
        queue += new
        reached.update(new)
    way = {node: None}
    while (source := _first_missing(tensor := next(reversed(way)))) not in way:
        way[source] = None
    return node if source is node else tensor


def _first_missing(node: _Tensor) -> _Tensor:
    return next(source for source in node.sources if not source.ready)


def _unwritten_text(node: _Tensor, cause: _Tensor, model: str) -> str:
    text = f"output '{node.name}' for ensemble '{model}' is not written"
    if cause is node:
        return text
    return f"{text}: at least one of its depending tensors, '{cause.name}', is not connected"


_Control = pb.ModelSequenceBatching.Control
_LISTS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_LISTS_OR = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
_LISTS_AND = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
_CORRELATION_TYPES = (pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING)


def check_dynamic_batching(config: ModelConfig) -> Findings:
    """Checks preferred batch sizes, priority levels and `preserve_ordering`."""
    if not config.HasField("dynamic_batching"):
        return
    batcher = config.dynamic_batching
    yield from _check_preferred(
        batcher.preferred_batch_size, config, "dynamic batching preferred size", "dynamic_batching"
    )
    if batcher.priority_levels:
        yield from _check_priorities(batcher, config.name)
    if batcher.preserve_ordering:
        yield from _check_ordering(batcher, config.name)


def _check_preferred(sizes: Sequence[int], config: ModelConfig, what: str, path: str) -> Findings:
    for index, size in enumerate(sizes):
        field = f"{path}.preferred_batch_size[{index}]"
        if size <= 0:
            yield Finding(f"{what} must be positive for {config.name}", field)
        if size > config.max_batch_size:
            yield Finding(f"{what} must be <= max batch size for {config.name}", field)


def _check_priorities(batcher: ConfigPart, model: str) -> Findings:
    levels = batcher.priority_levels
    if not 1 <= batcher.default_priority_level <= levels:
        yield Finding(
            f"default priority level must be in range [1, {levels}] for {model}",
            "dynamic_batching.default_priority_level",
        )
    for level in sorted(batcher.priority_queue_policy):
        if not 1 <= level <= levels:
            yield Finding(
                f"priority queue policy must have priority level in range [1, {levels}] "
                f"for {model}",
                f"dynamic_batching.priority_queue_policy[{level}]",
            )


def _check_ordering(batcher: ConfigPart, model: str) -> Findings:
    if batcher.priority_levels > 1:
        yield Finding(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {model}",
            "dynamic_batching.priority_levels",
        )
    policies = [("default_queue_policy", batcher.default_queue_policy)]
    policies += [
        (f"priority_queue_policy[{level}]", batcher.priority_queue_policy[level])
        for level in sorted(batcher.priority_queue_policy)
    ]
    for place, policy in policies:
        delays = policy.timeout_action == pb.ModelQueuePolicy.DELAY
        if delays and policy.default_timeout_microseconds:
            yield Finding(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' "
                f"is true for {model}",
                f"dynamic_batching.{place}",
            )


def check_sequence_batching(config: ModelConfig) -> Findings:
    """Checks the control tensors and the settings of the strategy."""
    if not config.HasField("sequence_batching"):
        return
    batcher = config.sequence_batching
    if config.response_cache.enable:
        yield Finding(
            f"Response Cache does not currently support model {config.name} with sequence "
            "batching scheduler. Please disable the response cache.",
            "response_cache.enable",
        )
    for kind in (
        _Control.CONTROL_SEQUENCE_START,
        _Control.CONTROL_SEQUENCE_END,
        _Control.CONTROL_SEQUENCE_READY,
        _Control.CONTROL_SEQUENCE_CORRID,
    ):
        yield from _check_controls(batcher, kind, config.name)
    yield from _check_preferred(
        batcher.oldest.preferred_batch_size,
        config,
        "sequence batching preferred batch size",
        "sequence_batching.oldest",
    )
    if not 0 <= batcher.direct.minimum_slot_utilization <= 1:
        yield Finding(
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] "
            f"for {config.name}",
            "sequence_batching.direct.minimum_slot_utilization",
        )


def _check_controls(batcher: ConfigPart, kind: int, model: str) -> Findings:
    """Checks the control tensors for controls of one kind."""
    tensors: set[str] = set()
    found = False
    for i, tensor in enumerate(batcher.control_input):
        path = f"sequence_batching.control_input[{i}]"
        if not tensor.name:
            yield Finding(
                f"sequence batching control tensor must have a name for {model}", f"{path}.name"
            )
        if tensor.name in tensors:
            yield Finding(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple "
                f"control kinds for {model}",
                f"{path}.name",
            )
        tensors.add(tensor.name)
        for j, control in enumerate(tensor.control):
            if control.kind != kind:
                continue
            field = f"{path}.control[{j}]"
            if found:
                yield Finding(
                    f"sequence batching specifies multiple {_Control.Kind.Name(kind)} tensors "
                    f"for {model}",
                    f"{field}.kind",
                )
            found = True
            check = _check_typed if kind == _Control.CONTROL_SEQUENCE_CORRID else _check_boolean
            yield from check(control, field, model)


def _check_boolean(control: ConfigPart, field: str, model: str) -> Findings:
    kind = _Control.Kind.Name(control.kind)
    given = [name for name in _LISTS if getattr(control, name)]
    if not given:
        yield Finding(
            f"sequence batching must specify either {_LISTS_OR} for {kind} for {model}", field
        )
    if len(given) > 1:
        yield Finding(
            f"sequence batching specifies more than one from {_LISTS_AND} for {kind} for {model}",
            f"{field}.{given[1]}",
        )
    for name in given:
        if len(getattr(control, name)) != 2:
            yield Finding(
                f"sequence batching control '{name}' must have exactly 2 entries for {kind} "
                f"for {model}",
                f"{field}.{name}",
            )


def _check_typed(control: ConfigPart, field: str, model: str) -> Findings:
    kind = _Control.Kind.Name(control.kind)
    given = [name for name in _LISTS if getattr(control, name)]
    if given:
        yield Finding(
            f"sequence batching must not specify either {_LISTS_OR} for {kind} for {model}",
            f"{field}.{given[0]}",
        )
    if control.data_type not in _CORRELATION_TYPES:
        yield Finding(
            f"unexpected data type for control {kind} for {model}. Allowed data types are "
            "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            f"{field}.data_type",
        )


_log = logging.getLogger("pbhost")

_CUSTOMISABLE_FAMILY = "nv_inference_first_response_histogram_ms"


def check_config(config: ModelConfig) -> Findings:
    """Checks everything except the tensors (docs/reference/configuration-and-scheduling.md, "Checks
    of a configuration").
    """
    return chain(
        _check_identity(config),
        check_dynamic_batching(config),
        check_sequence_batching(config),
        check_ensemble(config),
        _check_response_cache(config),
        _check_metrics(config),
        check_max_concurrent_batches(config),
        check_preserves_ordering(config),
        check_load_parameters(config),
        check_traffic_parameters(config),
        check_openai_parameters(config),
    )


def check_tensors(config: ModelConfig) -> Findings:
    """Checks the inputs, outputs and batch tensors
    (docs/reference/configuration-and-scheduling.md, "Checks of tensors").
    """
    findings = chain(check_inputs(config), check_outputs(config), check_batch_tensors(config))
    suffix = f" for {config.name}"
    return (found._replace(text=found.text + suffix) for found in findings)


def _check_identity(config: ModelConfig) -> Findings:
    name, platform, backend = config.name, config.platform, config.backend
    if not name:
        yield Finding("model configuration must specify 'name'", "name")
    if not backend and platform != ENSEMBLE:
        advice = 'set the backend, for example backend: "python"'
        text = f"unexpected platform type '{platform}' for {name}"
        yield Finding(text, "platform", advice=advice)
    if backend and platform == ENSEMBLE:
        yield Finding(
            f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type",
            "backend",
        )
    if platform not in PLATFORMS_OF_BACKEND.get(backend, {platform}):
        yield Finding(
            f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}", "platform"
        )
    if config.max_batch_size < 0:
        yield Finding(f"'max_batch_size' must be non-negative value for {name}", "max_batch_size")


def _check_response_cache(config: ModelConfig) -> Findings:
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        yield Finding(
            f"Response Cache does not currently support model {config.name} with 'decoupled' "
            "transaction policy. Please disable the response cache.",
            "response_cache.enable",
        )


def _check_metrics(config: ModelConfig) -> Findings:
    for index, control in enumerate(config.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        identifier, family = f"{path}.metric_identifier", control.metric_identifier.family
        if not control.HasField("metric_identifier"):
            yield Finding("metric control must specify 'metric_identifier'", identifier)
        if not family:
            yield Finding(
                "metric identifier must specify non-empty 'family'", f"{identifier}.family"
            )
        if not control.HasField("histogram_options"):
            yield Finding(
                "metric control must specify 'histogram_options'", f"{path}.histogram_options"
            )
        if not control.histogram_options.buckets:
            yield Finding(
                "histogram options must specify non-empty 'buckets'",
                f"{path}.histogram_options.buckets",
            )
        if family != _CUSTOMISABLE_FAMILY:
            _log.warning(
                "Metric family '%s' in 'metric_identifier' is not a customizable metric in "
                "Triton core.",
                family,
            )


_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """An unsupported field. `requested` tells whether a configuration uses it."""

    field: str
    reason: str
    requested: Callable[[ModelConfig], bool]


_UNSUPPORTED = (
    _Unsupported(
        f"parameters[{_STRATEGY}]",
        "batching strategies from shared libraries are not supported",
        lambda config: _STRATEGY in config.parameters,
    ),
    _Unsupported(
        "batch_output",
        "the responses of a decoupled model do not form a batch",
        lambda config: bool(config.batch_output and config.model_transaction_policy.decoupled),
    ),
)


def check_supported(config: ModelConfig) -> Findings:
    """Checks that the configuration uses only supported features."""
    yield from check_input_memory(config)
    for unsupported in _UNSUPPORTED:
        if unsupported.requested(config):
            yield Finding(
                f"model '{config.name}' cannot be loaded: {unsupported.reason}, "
                f"remove '{unsupported.field}' from its configuration",
                unsupported.field,
                ErrorCode.UNSUPPORTED,
            )
