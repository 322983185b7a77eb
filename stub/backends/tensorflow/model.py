"""Serves a TensorFlow saved model or frozen graph."""

from typing import Any, Dict, List, Mapping, Sequence, Tuple

import pb_utils
from stub.backends.batch import Array, restore_scalars
from stub.backends.framework_model import FrameworkModel, import_library
from stub.backends.model_contract import ModelContract, ModelTensor
from stub.backends.model_settings import Placement, Settings, model_path, parse_config
from stub.user_model import ModelFailure

_FROZEN = "tensorflow_graphdef"


class TritonPythonModel(FrameworkModel):
    """One function."""

    @classmethod
    def _read_tensors(
        cls, config: Dict[str, Any]
    ) -> Tuple[Sequence[ModelTensor], Sequence[ModelTensor]]:
        """Reads the signature of a saved model."""
        model = config["name"]
        library = _load_library(model)
        if config["platform"] == _FROZEN:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its configuration must have inputs and"
                " outputs, as a frozen graph does not say which of its tensors they are"
            )
        path = model_path(config, pb_utils.get_model_dir())
        graph = library.load_saved_model(model, path, Settings.from_config(config))
        return graph.inputs, graph.outputs

    def initialize(self, args: Mapping[str, str]) -> None:
        """Loads the function and checks the configuration against it."""
        config, placement = parse_config(args), Placement(args)
        contract = self._contract = ModelContract(config)
        library, settings = _load_library(contract.model), Settings.from_config(config)
        library.configure_tensorflow(contract.model, settings, placement)
        path = model_path(config, pb_utils.get_model_dir())
        if config["platform"] == _FROZEN:
            graph = library.load_frozen_graph(
                contract.model, path, list(contract.inputs), list(contract.outputs)
            )
        else:
            graph = library.load_saved_model(contract.model, path, settings)
        contract.check_model(graph.inputs, graph.outputs)
        self._scalars = [tensor.name for tensor in graph.inputs if tensor.shape == []]
        self._graph = graph

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        restore_scalars(inputs, self._scalars)
        results: Mapping[str, Array] = self._graph.call(inputs)
        return results


def _load_library(model: str) -> Any:
    return import_library(model, "tensorflow", "stub.backends.tensorflow.graph", "tensorflow")
