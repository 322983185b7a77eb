"""Serves a TensorFlow saved model or frozen graph."""

from typing import Any, Dict, List, Mapping, Sequence

import pb_utils
from stub.backends.batch import Array, run_requests
from stub.backends.model_contract import ModelContract, complete_config, is_complete
from stub.backends.model_settings import (
    Placement,
    Settings,
    missing_package_error,
    model_path,
    parse_config,
)
from stub.user_model import ModelFailure

_FROZEN = "tensorflow_graphdef"


class TritonPythonModel:
    """One function. `backend_config` holds the command line's settings for this backend."""

    backend_config: Dict[str, str] = {}

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Completes the configuration with the signature of a saved model."""
        given = config.as_dict()
        if is_complete(given):
            return config
        model = given["name"]
        library = _load_library(model)
        if given["platform"] == _FROZEN:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its configuration must have inputs and"
                " outputs, as a frozen graph does not say which of its tensors they are"
            )
        path = model_path(given, pb_utils.get_model_dir())
        graph = library.load_saved_model(model, path, Settings.from_config(given))
        default = Settings(model, cls.backend_config).get_int("default-max-batch-size", 4)
        complete_config(given, graph.inputs, graph.outputs, default)
        return config

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
        self._library, self._graph = library, graph

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> List[pb_utils.InferenceResponse]:
        """Runs all requests as one batch."""
        return run_requests(requests, self._contract, self._run)

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        results: Mapping[str, Array] = self._graph.call(
            self._library.restore_scalars(inputs, self._scalars)
        )
        return results


def _load_library(model: str) -> Any:
    """Imports the module that needs the library. Raises ModelFailure if the library is missing."""
    try:
        import stub.backends.tensorflow.graph as graph
    except ImportError as error:
        raise missing_package_error(model, "tensorflow", "tensorflow", error) from error
    return graph
