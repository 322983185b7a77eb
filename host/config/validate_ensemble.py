"""Validates the configuration of an ensemble without its models: settings and tensor flow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from host.config.findings import Finding, Findings
from host.config.schema import ENSEMBLE, ModelConfig


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
    """Checks `ensemble_scheduling` (docs/reference/configuration-and-scheduling.md, "Checks of the
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
