"""Serves a saved model or a frozen graph of TensorFlow."""

from typing import Any, Dict, List, Mapping, Sequence

import pb_utils
from stub.backends.batch import Array, answer
from stub.backends.completion import complete, is_complete
from stub.backends.contract import Contract
from stub.backends.settings import Placement, Settings, configuration, missing, model_path
from stub.user_model import ModelFailure

_FROZEN = "tensorflow_graphdef"


class TritonPythonModel:
    """One function. `backend_config` are the settings of the command line for this backend."""

    backend_config: Dict[str, str] = {}

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """The signature of a saved model says what it takes and gives."""
        given = config.as_dict()
        if is_complete(given):
            return config
        model = given["name"]
        library = _library(model)
        if given["platform"] == _FROZEN:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its configuration must have inputs and"
                " outputs, as a frozen graph does not say which of its tensors they are"
            )
        path = model_path(given, pb_utils.get_model_dir())
        graph = library.load_saved(model, path, Settings.of(given))
        default = Settings(model, cls.backend_config).number("default-max-batch-size", 4)
        complete(given, graph.inputs, graph.outputs, default)
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the function, and check that the configuration and it agree."""
        config, placement = configuration(args), Placement(args)
        contract = self._contract = Contract(config)
        library, settings = _library(contract.model), Settings.of(config)
        library.set_up(contract.model, settings, placement)
        path = model_path(config, pb_utils.get_model_dir())
        if config["platform"] == _FROZEN:
            graph = library.load_frozen(
                contract.model, path, list(contract.inputs), list(contract.outputs)
            )
        else:
            graph = library.load_saved(contract.model, path, settings)
        contract.check(graph.inputs, graph.outputs)
        self._scalars = [tensor.name for tensor in graph.inputs if tensor.shape == []]
        self._library, self._graph = library, graph

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> List[pb_utils.InferenceResponse]:
        """Run all requests at once."""
        return answer(requests, self._contract, self._run)

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        results: Mapping[str, Array] = self._graph.call(
            self._library.as_given(inputs, self._scalars)
        )
        return results


def _library(model: str) -> Any:
    """The module that needs the library. Raises ModelFailure if the library is missing."""
    try:
        import stub.backends.tensorflow.graph as graph
    except ImportError as error:
        raise missing(model, "tensorflow", "tensorflow", error) from error
    return graph
