"""Checks whether an ensemble and its step models fit together.

Source: docs/reference/ensembles.md, "Checks against the composing models".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from host.config.findings import Finding, Findings, raise_first
from host.config.schema import ModelConfig, pb
from host.errors import invalid_argument


@dataclass(frozen=True, slots=True)
class _TensorType:
    """The type of a tensor, and the model that says so. `full` includes the batch dimension."""

    model: str
    data_type: int
    dims: list[int]
    full: list[int]


def check_step_models(config: ModelConfig, members: Sequence[ModelConfig]) -> bool:
    """Returns whether the ensemble is decoupled; `members` are the configurations of its step
    models.

    Raises HostError INVALID_ARG with the first mismatch.
    """
    raise_first(iterate_misfits(config, members), None)
    return _check_streams(config, members)


def iterate_misfits(config: ModelConfig, members: Sequence[ModelConfig | None]) -> Findings:
    """Yields every mismatch; a step model that is None is unknown and is not compared."""
    tensors: dict[str, _TensorType] = {}
    for entry in (*config.input, *config.output):
        tensors[entry.name] = _kind(config, entry, reshaped=True)
    for index, (step, member) in enumerate(
        zip(config.ensemble_scheduling.step, members, strict=True)
    ):
        if member is None:
            continue
        path = f"ensemble_scheduling.step[{index}]"
        yield from _check_batch_size(config, member, path)
        yield from _check_inputs(config, step, member, tensors, path)
        yield from _check_outputs(config, step, member, tensors, path)


def _kind(config: ModelConfig, entry: Any, reshaped: bool = False) -> _TensorType:
    dims = entry.reshape.shape if reshaped and entry.HasField("reshape") else entry.dims
    lead = [-1] if config.max_batch_size > 0 else []
    return _TensorType(config.name, entry.data_type, list(dims), lead + list(dims))


def _check_batch_size(config: ModelConfig, member: ModelConfig, path: str) -> Findings:
    allowed, largest = config.max_batch_size, member.max_batch_size
    if 0 < largest < allowed:
        yield Finding(
            f"ensemble {config.name} allows maximum batch size {allowed}, but it contains model"
            f" {member.name} which only allows maximum batch size to be {largest}",
            f"{path}.model_name",
        )


def _check_inputs(
    config: ModelConfig, step: Any, member: ModelConfig, tensors: dict[str, _TensorType], path: str
) -> Findings:
    known = {entry.name: entry for entry in member.input}
    for name, tensor in sorted(step.input_map.items()):
        if name not in known:
            yield _mismatch_error(
                config,
                f"ensemble tensor {tensor} is mapping to non-existing input {name}"
                f" in model {member.name}",
                f"{path}.input_map[{name}]",
            )
    for name, entry in known.items():
        if name in step.input_map:
            place = f"{path}.input_map[{name}]"
            yield from _match(config, step.input_map[name], _kind(member, entry), tensors, place)
        elif not entry.optional:
            yield _mismatch_error(
                config,
                f"input {name} in model {member.name} is not mapped to any ensemble tensors",
                f"{path}.input_map",
            )


def _check_outputs(
    config: ModelConfig, step: Any, member: ModelConfig, tensors: dict[str, _TensorType], path: str
) -> Findings:
    known = {entry.name: entry for entry in member.output}
    for name, tensor in sorted(step.output_map.items()):
        place = f"{path}.output_map[{name}]"
        if name in known:
            yield from _match(config, tensor, _kind(member, known[name]), tensors, place)
        else:
            yield _mismatch_error(
                config,
                f"ensemble tensor {tensor} is mapped from non-existing output {name}"
                f" in model {member.name}",
                place,
            )


def _match(
    config: ModelConfig, name: str, kind: _TensorType, tensors: dict[str, _TensorType], path: str
) -> Findings:
    """Compares with what another model says about the same tensor."""
    other = tensors.setdefault(name, kind)
    if other.data_type != kind.data_type:
        names = pb.DataType.Name
        yield _mismatch_error(
            config,
            f"ensemble tensor {name}: inconsistent data type: {names(other.data_type)} is inferred"
            f" from model {other.model} while {names(kind.data_type)} is inferred from model"
            f" {kind.model}",
            path,
        )
    if not (_equal(other.dims, kind.dims) or _equal(other.full, kind.full)):
        yield _mismatch_error(
            config,
            f"ensemble tensor {name}: inconsistent shape: {_text(other.full)} is inferred from"
            f" model {other.model} while {_text(kind.full)} is inferred from model {kind.model}",
            path,
        )


def _equal(dims: Sequence[int], others: Sequence[int]) -> bool:
    return len(dims) == len(others) and all(
        dim == other or -1 in (dim, other) for dim, other in zip(dims, others, strict=True)
    )


def _check_streams(config: ModelConfig, members: Sequence[ModelConfig]) -> bool:
    """Checks that a step takes only tensors of the same response stream.

    A tensor belongs to the stream of the decoupled step that it comes from; 0: no such step.
    """
    streams = {entry.name: 0 for entry in config.input}
    left = list(zip(config.ensemble_scheduling.step, members, strict=True))
    number = 0
    while left:
        waiting = []
        for step, member in left:
            if not all(name in streams for name in step.input_map.values()):
                waiting.append((step, member))
                continue
            stream = _common(config, member.name, step.input_map.values(), streams)
            if member.model_transaction_policy.decoupled:
                number = stream = number + 1
            streams.update((name, stream) for name in step.output_map.values())
        if len(waiting) == len(left):
            break  # these steps can never start, which `check_ensemble` reports
        left = waiting
    return _common(config, config.name, [entry.name for entry in config.output], streams) != 0


def _common(config: ModelConfig, model: str, names: Any, streams: dict[str, int]) -> int:
    """The stream that all these tensors belong to, apart from those that no step can write."""
    found = {streams[name] for name in names if name in streams}
    if len(found) > 1:
        raise invalid_argument(
            f"in ensemble {config.name}, step of model '{model}' receives inputs originated from"
            " different decoupled models"
        )
    return found.pop() if found else 0


def _mismatch_error(config: ModelConfig, text: str, path: str) -> Finding:
    return Finding(f"in ensemble {config.name}, {text}", path)


def _text(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
