"""The tensors of a model's configuration: checks against the model's file, and their completion.

See docs/reference/configuration-and-scheduling.md, "From the directory to a served model".
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import pb_utils
from pb_utils._model_code import declared_shape
from stub.user_model import ModelFailure

Shape = List[int]


class ConfiguredTensor:
    """One tensor of the configuration, as the model sees it.

    `shape` includes the batch dimension, as -1, if there is one. `is_batch_tensor`: one tensor for
    all requests of a batch, of any shape. `is_control`: a control input of a sequence.
    `is_shape_tensor`: the values are sizes; the first is the batch size if the model supports
    batching (docs/reference/configuration-and-scheduling.md, "Shape tensors, non-linear formats,
    format"). `is_non_linear`: the layout of the bytes is specific to the model.
    """

    def __init__(
        self,
        entry: Mapping[str, Any],
        batches: bool,
        of_batch: bool = False,
        control: bool = False,
    ) -> None:
        self.name: str = entry["name"]
        self.data_type: str = entry["data_type"]
        self.dims: Shape = declared_shape(entry, 0)
        self.shape: Shape = [-1, *self.dims] if batches else self.dims
        self.is_shape_tensor = bool(entry.get("is_shape_tensor"))
        if self.is_shape_tensor and batches and self.dims:
            self.shape = [self.dims[0] + 1, *self.dims[1:]]
        self.is_non_linear = bool(entry.get("is_non_linear_format_io"))
        self.optional = bool(entry.get("optional"))
        self.ragged = bool(entry.get("allow_ragged_batch"))
        self.is_batch_tensor = of_batch
        self.is_control = control


class ModelTensor(NamedTuple):
    """One tensor as the model's file describes it; size -1 is any size, `shape` None any shape."""

    name: str
    data_type: str
    shape: Optional[Shape]
    optional: bool = False


class ModelContract:
    """The tensors that a configuration declares.

    `supports_batching`: whether they have a batch dimension. `has_only_plain_tensors`: whether none
    needs special treatment, so that a single request takes the fast path. The inputs include batch
    inputs (docs/reference/scheduling.md, "batch_input and batch_output") and
    sequence controls.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.model: str = config["name"]
        self.supports_batching: bool = config.get("max_batch_size", 0) > 0
        scattered = {
            name for each in config.get("batch_output", ()) for name in each["target_name"]
        }
        inputs = [
            ConfiguredTensor(entry, self.supports_batching) for entry in config.get("input", ())
        ]
        for each in config.get("batch_input", ()):
            for name in each["target_name"]:
                entry = {"name": name, "data_type": each["data_type"], "dims": ()}
                inputs.append(ConfiguredTensor(entry, self.supports_batching, of_batch=True))
        sequences = config.get("sequence_batching", {})
        controls, states = sequences.get("control_input", ()), sequences.get("state", ())
        inputs += [
            ConfiguredTensor(_control_entry(each), self.supports_batching, control=True)
            for each in controls
        ]
        outputs = [
            ConfiguredTensor(entry, self.supports_batching, of_batch=entry["name"] in scattered)
            for entry in config.get("output", ())
        ]
        # The host keeps states: the output of one request becomes an input of the next.
        for each in states:
            inputs.append(
                ConfiguredTensor({**each, "name": each["input_name"]}, self.supports_batching)
            )
            outputs.append(
                ConfiguredTensor({**each, "name": each["output_name"]}, self.supports_batching)
            )
        self.inputs = {tensor.name: tensor for tensor in inputs}
        self.outputs = {tensor.name: tensor for tensor in outputs}
        self.has_only_plain_tensors = not any(
            tensor.is_batch_tensor
            or tensor.is_shape_tensor
            or tensor.is_non_linear
            or tensor.ragged
            for tensor in (*inputs, *outputs)
        )

    def check_model(self, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> None:
        """Compares the configuration with the tensors of the model.

        See docs/reference/configuration-and-scheduling.md, "Checks of tensors". A configuration may
        omit outputs and optional inputs. Raises ModelFailure.
        """
        provided = [tensor.name for tensor in inputs]
        for wanted in self.inputs.values():
            if wanted.is_control and wanted.name not in provided:
                raise ModelFailure(
                    f"configuration specified sequence control '{wanted.name}', but model does not"
                    " provide that input"
                )
        required = [tensor for tensor in inputs if not tensor.optional]
        if not len(required) <= len(self.inputs) <= len(inputs):
            raise ModelFailure(
                f"unable to load model '{self.model}', configuration expects {len(self.inputs)}"
                f" inputs, model provides {len(inputs)}"
            )
        self._check_tensors("input", self.inputs, inputs)
        self._check_tensors("output", self.outputs, outputs)

    def _check_tensors(
        self, kind: str, expected: Mapping[str, ConfiguredTensor], provided: Sequence[ModelTensor]
    ) -> None:
        known = {tensor.name: tensor for tensor in provided}
        for name, wanted in expected.items():
            if name not in known:
                allowed = ", ".join(sorted(known))
                raise ModelFailure(
                    f"unexpected inference {kind} '{name}', allowed {kind}s are: {allowed}"
                )
            tensor = known[name]
            if wanted.data_type != tensor.data_type:
                raise ModelFailure(
                    f"unable to load model '{self.model}', configuration expects datatype"
                    f" {wanted.data_type} for {kind} '{name}', model provides {tensor.data_type}"
                )
            if wanted.optional and not tensor.optional:
                raise ModelFailure(
                    f"'optional' is set to true for input '{name}' while the backend model doesn't"
                    " support optional input"
                )
            self._check_shape(wanted, tensor)

    def _check_shape(self, wanted: ConfiguredTensor, tensor: ModelTensor) -> None:
        have, want = tensor.shape, [-1] if wanted.ragged else wanted.shape
        if have is None or have == want or wanted.is_batch_tensor:
            return
        # A scalar is served as one element, because a configuration cannot declare zero dimensions.
        if not have and wanted.shape == [1]:
            return
        if len(have) == len(want) and all(theirs in (-1, ours) for theirs, ours in zip(have, want)):
            return
        said = f"(shape {format_shape(wanted.shape)})"
        if self.supports_batching:
            said = (
                "(an initial batch dimension because max_batch_size > 0 followed by the explicit"
                f" tensor shape, making complete shape {format_shape(wanted.shape)})"
            )
        raise ModelFailure(
            f"model '{self.model}', tensor '{wanted.name}': the model expects {len(have)}"
            f" dimensions (shape {format_shape(have)}) but the model configuration specifies"
            f" {len(wanted.shape)} dimensions {said}"
        )

    def check_data_types(self, backend: str, known: Sequence[str]) -> None:
        """Checks that the framework supports all configured data types. Raises ModelFailure."""
        for kind, tensors in (("input", self.inputs), ("output", self.outputs)):
            for tensor in tensors.values():
                if tensor.data_type not in known:
                    raise ModelFailure(
                        f"unsupported datatype {tensor.data_type} for {kind} '{tensor.name}' for"
                        f" model '{self.model}': the backend {backend} has {', '.join(known)}"
                    )


def format_shape(shape: Sequence[int]) -> str:
    """Returns a shape as error texts show it: `[1,-1,3]`."""
    return "[" + ",".join(map(str, shape)) + "]"


_CONTROL_TYPES = {
    "int32_false_true": "TYPE_INT32",
    "fp32_false_true": "TYPE_FP32",
    "bool_false_true": "TYPE_BOOL",
}


def _control_entry(each: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the input entry of a sequence control, with the data type of its first control."""
    control = each["control"][0]
    types = [kind for values, kind in _CONTROL_TYPES.items() if control.get(values)]
    return {
        "name": each["name"],
        "data_type": types[0] if types else control["data_type"],
        "dims": [1],
    }


def is_complete(config: Dict[str, Any]) -> bool:
    """Returns whether the configuration has inputs and outputs, so that the file is not needed."""
    inputs = config.get("input") or config.get("batch_input")
    return bool(inputs and config.get("output"))


def complete_config(
    config: Dict[str, Any],
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
    default_max_batch_size: int,
) -> None:
    """Adds tensors, batch size and scheduler to `config`, in place. Raises ModelFailure."""
    model = config["name"]
    required = [tensor for tensor in inputs if not tensor.optional]
    batchable = all(
        tensor.shape and tensor.shape[0] == -1 for tensor in (*required, *outputs)
    ) and len(required) == len(inputs)
    size = config.get("max_batch_size", 0)
    if not batchable and size:
        raise ModelFailure(
            f"autofill failed for model '{model}': model does not support batching while non-zero"
            " max_batch_size is specified"
        )
    if batchable and not size:
        size = config["max_batch_size"] = default_max_batch_size
        if size > 1:
            pb_utils.Logger.log_info(
                f"model '{model}' supports batches and does not say how large they may be:"
                f" max_batch_size becomes {size}"
            )
    add_tensors(
        config,
        [config_entry(tensor, size > 0) for tensor in inputs],
        [config_entry(tensor, size > 0) for tensor in outputs],
    )


def add_tensors(
    config: Dict[str, Any], inputs: List[Dict[str, Any]], outputs: List[Dict[str, Any]]
) -> None:
    """Adds tensors to `config`, in place, and a scheduler for batches, if there are none."""
    scheduled = "dynamic_batching" in config or "sequence_batching" in config
    if config.get("max_batch_size", 0) > 1 and not scheduled:
        config["dynamic_batching"] = {}
    if not (config.get("input") or config.get("batch_input")):
        config["input"] = inputs
    if not config.get("output"):
        config["output"] = outputs


def config_entry(tensor: ModelTensor, batches: bool) -> Dict[str, Any]:
    """Returns the entry of a configuration for a tensor with or without a batch dimension."""
    dims: List[int] = list(tensor.shape or ())[1 if batches else 0 :]
    entry: Dict[str, Any] = {
        "name": tensor.name,
        "data_type": tensor.data_type,
        "dims": dims or [1],
    }
    if batches and not dims:
        entry["reshape"] = {"shape": []}
    if tensor.optional:
        entry["optional"] = True
    return entry
