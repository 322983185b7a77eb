"""The base of the models of frameworks: completes their configurations, and runs their batches."""

import importlib
import sys
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import pb_utils
from stub.backends.batch import Array, run_requests
from stub.backends.model_contract import ModelContract, ModelTensor, complete_config, is_complete
from stub.backends.model_settings import Settings
from stub.user_model import ModelFailure


class FrameworkModel:
    """One model of a framework. `backend_config` holds the command line's settings for it.

    A subclass sets `_contract` in `initialize`.
    """

    backend_config: Dict[str, str] = {}
    _contract: ModelContract

    @classmethod
    def auto_complete_config(cls, config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Completes the configuration with the tensors of the file, if that is necessary."""
        given = config.as_dict()
        if not is_complete(given):
            inputs, outputs = cls._read_tensors(given)
            settings = Settings(given["name"], cls.backend_config)
            default = settings.get_int("default-max-batch-size", 4)
            complete_config(given, inputs, outputs, default)
        return config

    @classmethod
    def _read_tensors(
        cls, config: Dict[str, Any]
    ) -> Tuple[Sequence[ModelTensor], Sequence[ModelTensor]]:
        """Returns the inputs and the outputs of the file. Raises ModelFailure."""
        raise NotImplementedError

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> List[pb_utils.InferenceResponse]:
        """Runs all requests as one batch."""
        return run_requests(requests, self._contract, self._run)

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        """Runs the model: a `RunFunction`."""
        raise NotImplementedError


def import_library(model: str, backend: str, module: str, package: str, extra: str = "") -> Any:
    """Imports a module of a framework, or one of ours that needs the framework.

    `extra` is the pip requirement to install, if that is not `package`. Raises ModelFailure if it
    cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        raise ModelFailure(
            f"model '{model}' cannot be loaded: its backend '{backend}' needs the Python package"
            f" {package}, which {how} ({error}); to install it: {sys.executable} -m pip install"
            f" {repr(extra) if extra else package}"
        ) from error
