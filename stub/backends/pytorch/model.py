"""Serves a PyTorch model: TorchScript, an exported program, or an AOTInductor package."""

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import pb_utils
from stub.backends.batch import Array, decode_texts
from stub.backends.framework_model import FrameworkModel, import_library
from stub.backends.model_contract import ModelContract, ModelTensor
from stub.backends.model_settings import Placement, Settings, model_path, parse_config
from stub.user_model import ModelFailure


class TritonPythonModel(FrameworkModel):
    """One program."""

    @classmethod
    def _read_tensors(
        cls, config: Dict[str, Any]
    ) -> Tuple[Sequence[ModelTensor], Sequence[ModelTensor]]:
        """Describes an exported program; other formats lack the data."""
        model = config["name"]
        path = model_path(config, pb_utils.get_model_dir())
        program = _load_library(model).load(model, path, "cpu")
        if program.inputs is None or program.outputs is None:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its configuration must have inputs and"
                " outputs, as its file does not say their data types and shapes"
            )
        return program.inputs, program.outputs

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the program, and maps inputs to arguments and outputs to results."""
        config, placement = parse_config(args), Placement(args)
        contract = self._contract = ModelContract(config)
        torch_program = _load_library(contract.model)
        torch = torch_program.torch
        contract.check_data_types("pytorch", torch_program.DATA_TYPES)
        if not contract.inputs or not contract.outputs:
            raise ModelFailure(
                f"model '{contract.model}' cannot be loaded: its configuration must have inputs"
                " and outputs"
            )
        device = _device(torch, contract.model, placement)
        path = model_path(config, pb_utils.get_model_dir(), placement.capability(torch))
        self._run_context = torch_program.RunContext(Settings.from_config(config), placement)
        self._program = torch_program.load(contract.model, path, device)
        self._argument_mapping = torch_program.map_inputs_to_arguments(
            contract.model, list(contract.inputs), self._program.arguments
        )
        self._result_positions = torch_program.map_outputs_to_results(
            contract.model, list(contract.outputs)
        )
        self._device = "" if device == "cpu" else device
        self._conversion = torch_program
        self._check_texts()
        self._check_described()

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        model = self._contract.model
        given = {name: self._argument(name, array) for name, array in inputs.items()}
        with self._run_context:
            returned = self._program.call(*self._argument_mapping.positional_arguments(given))
            positions = {name: self._result_positions[name] for name in wanted}
            results = self._conversion.results_by_name(returned, positions, model)
            return {
                name: self._conversion.to_array(results[name], self._contract.outputs[name], model)
                for name in wanted
            }

    def _argument(self, name: str, array: Array) -> Any:
        expected = self._contract.inputs[name]
        if expected.data_type == "TYPE_STRING":
            return decode_texts(name, array)
        return self._conversion.to_tensor(
            array, expected.data_type, self._program.modifies_inputs, self._device
        )

    def _check_texts(self) -> None:
        """Checks that TYPE_STRING tensors have one dimension, and match arguments for texts.

        Raises ModelFailure.
        """
        for name, expected in self._contract.inputs.items():
            kind = self._argument_mapping.argument_of(name).kind
            if (expected.data_type == "TYPE_STRING") != (kind == "texts"):
                provided = "a list of texts, TYPE_STRING" if kind == "texts" else "a tensor"
                raise ModelFailure(
                    f"unable to load model '{self._contract.model}', configuration expects datatype"
                    f" {expected.data_type} for input '{name}', model provides {provided}"
                )
        for kind, tensors in (("input", self._contract.inputs), ("output", self._contract.outputs)):
            for name, expected in tensors.items():
                if expected.data_type == "TYPE_STRING" and len(expected.dims) != 1:
                    raise ModelFailure(
                        f"model '{self._contract.model}' cannot be loaded: {kind} '{name}' of"
                        " TYPE_STRING must have one dimension, as PyTorch has lists of texts and"
                        f" no tensors of them, got {len(expected.dims)}"
                    )

    def _check_described(self) -> None:
        """Checks the configuration against the program's own description of its tensors, if any."""
        inputs, outputs = self._program.inputs, self._program.outputs
        if inputs is None or outputs is None:
            return
        named = [
            each if name is None else each._replace(name=name)
            for each, name in zip(
                inputs, self._argument_mapping.order or [each.name for each in inputs]
            )
        ]
        known = {each.name: each for each in outputs}
        given = [
            known.get(name) or outputs[place]._replace(name=name)
            for name, place in self._result_positions.items()
            if name in known or place < len(outputs)
        ]
        self._contract.check_model(named, given)


def _load_library(model: str) -> Any:
    return import_library(model, "pytorch", "stub.backends.pytorch.torch_program", "torch")


def _device(torch: Any, model: str, placement: Placement) -> str:
    """Returns the device of the weights and inputs; "" if the model itself decides."""
    if placement.kind == "MODEL":
        return ""
    if not placement.on_gpu:
        return "cpu"
    advice = "install a torch that is built for the machine's CUDA, or configure KIND_CPU"
    placement.check_gpu(model, torch, advice)
    return f"cuda:{placement.device}"
