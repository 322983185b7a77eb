"""Says that models of TensorFlow are not served yet."""

from typing import Mapping

import pb_utils
from stub.backends.settings import configuration, not_served
from stub.user_model import ModelFailure

_INSTEAD = (
    "convert the model to ONNX (python -m tf2onnx.convert) and serve it with the backend"
    " 'onnxruntime'"
)


class TritonPythonModel:
    """Refuses to load any model."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Raise ModelFailure."""
        raise _refusal(config.as_dict()["name"])

    def initialize(self, args: Mapping[str, str]) -> None:
        """Raise ModelFailure."""
        raise _refusal(configuration(args)["name"])


def _refusal(model: str) -> ModelFailure:
    return not_served(model, "tensorflow", _INSTEAD)
