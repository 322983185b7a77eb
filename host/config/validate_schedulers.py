"""Validates the settings of the dynamic batcher and of the sequence batcher."""

from __future__ import annotations

from collections.abc import Sequence

from host.config.findings import Finding, Findings
from host.config.schema import ConfigPart, ModelConfig, pb

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
    for field, policy in policies:
        delays = policy.timeout_action == pb.ModelQueuePolicy.DELAY
        if delays and policy.default_timeout_microseconds:
            yield Finding(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' "
                f"is true for {model}",
                f"dynamic_batching.{field}",
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
