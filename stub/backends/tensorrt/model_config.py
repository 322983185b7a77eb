"""Checks a configuration against a plan, and completes it from the plan."""

from typing import Any, Dict, List, Mapping, Sequence

from stub.backends.contract import ModelContract
from stub.backends.tensorrt.plan import Plan, PlanTensor, model_tensor
from stub.user_model import ModelFailure


def check_config(
    contract: ModelContract, max_batch_size: int, plan: Plan, profiles: Sequence[int]
) -> None:
    """Checks that the plan has what the configuration declares. Raises ModelFailure.

    `max_batch_size` is the configuration's max_batch_size.
    """
    largest = plan.max_batch(profiles)
    if max_batch_size > 0 and max_batch_size > largest:
        engine = f"takes at most {largest}" if largest else "has no dynamic batch dimension"
        raise ModelFailure(
            f"unable to load model '{contract.model}', configuration specifies max_batch_size"
            f" {max_batch_size}, and the engine {engine} with the optimization profiles"
            f" {', '.join(map(str, profiles))}"
        )
    if plan.implicit_max_batch and not max_batch_size:
        raise ModelFailure(
            f"unable to load model '{contract.model}', configuration specifies max_batch_size 0,"
            f" and the engine has an implicit batch dimension: set it, to at most"
            f" {plan.implicit_max_batch}"
        )
    for kind, expected, tensors in (
        ("input", contract.inputs, plan.inputs),
        ("output", contract.outputs, plan.outputs),
    ):
        for tensor in tensors:
            if tensor.name not in expected:
                continue
            wanted = expected[tensor.name]
            _check_flag(
                *(contract.model, kind, tensor, "is_shape_tensor", wanted.is_shape_tensor),
                *(tensor.is_shape_tensor, "a shape tensor"),
            )
            _check_flag(
                *(contract.model, kind, tensor, "is_non_linear_format_io", wanted.is_non_linear),
                *(
                    not tensor.layout.linear,
                    f"of a non-linear format ({tensor.layout.description})",
                ),
            )
    contract.check_model(
        [model_tensor(plan, tensor) for tensor in plan.inputs],
        [model_tensor(plan, tensor) for tensor in plan.outputs],
    )


def _check_flag(
    model: str, kind: str, tensor: PlanTensor, flag: str, configured: bool, needed: bool, what: str
) -> None:
    if configured == needed:
        return
    said = "sets" if configured else "does not set"
    has = "is" if needed else "is not"
    raise ModelFailure(
        f"unable to load model '{model}', configuration {said} {flag} for {kind} '{tensor.name}',"
        f" which {has} {what} in the engine"
    )


def complete_config(config: Dict[str, Any], plan: Plan, profiles: Sequence[int]) -> None:
    """Adds tensors, batch size and scheduler to `config`, in place. Raises ModelFailure.

    See docs/reference/configuration-and-scheduling.md, "From the directory to a served model".
    """
    model, size = config["name"], config.get("max_batch_size", 0)
    largest = plan.max_batch(profiles)
    if size > largest:
        raise ModelFailure(
            f"autofill failed for model '{model}': configuration specified max-batch {size} but"
            f" TensorRT engine only supports max-batch {largest}"
        )
    if not size and largest and not _has_full_shapes(config, plan):
        size = config["max_batch_size"] = largest
    scheduled = "dynamic_batching" in config or "sequence_batching" in config
    if size > 1 and not scheduled:
        config["dynamic_batching"] = {}
    if not (config.get("input") or config.get("batch_input")):
        config["input"] = [_config_entry(plan, tensor, size > 0) for tensor in plan.inputs]
    if not config.get("output"):
        config["output"] = [_config_entry(plan, tensor, size > 0) for tensor in plan.outputs]


def _has_full_shapes(config: Mapping[str, Any], plan: Plan) -> bool:
    """Returns whether configured tensors include the batch dimension in their dims."""
    ranks = {tensor.name: len(model_tensor(plan, tensor).shape or ()) for tensor in plan.tensors}
    entries: List[Mapping[str, Any]] = [*config.get("input", ()), *config.get("output", ())]
    marked = [each for each in entries if each.get("is_shape_tensor")]
    plain = [each for each in entries if each not in marked and each["name"] in ranks]
    return any(len(_dims(each)) == ranks[each["name"]] for each in plain)


def _dims(entry: Mapping[str, Any]) -> List[int]:
    reshape = entry.get("reshape")
    return list(entry["dims"] if reshape is None else reshape.get("shape", ()))


def _config_entry(plan: Plan, tensor: PlanTensor, batches: bool) -> Dict[str, Any]:
    dims = list(model_tensor(plan, tensor).shape or ())
    entry: Dict[str, Any] = {"name": tensor.name, "data_type": tensor.data_type}
    if tensor.is_shape_tensor:
        entry["is_shape_tensor"] = True
        if batches and dims and dims[0] > 0:
            dims[0] -= 1  # the first value is the batch size
    elif batches:
        dims = dims[1:]
    entry["dims"] = dims or [1]
    if batches and not dims and not tensor.is_shape_tensor:
        entry["reshape"] = {"shape": []}
    if not tensor.layout.linear:
        entry["is_non_linear_format_io"] = True
    return entry
