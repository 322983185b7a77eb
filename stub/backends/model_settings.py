"""The settings of a model beside its tensors: parameters, file name and device."""

import json
import os
from typing import Any, Dict, Mapping, Optional, Sequence

from pb_utils._model_config import parse_bool
from stub.user_model import ModelFailure


class Settings:
    """Named texts, converted on request. `fallback` holds settings of the command line.

    Each method returns the default if the name is not set, and raises ModelFailure if the text is
    invalid.
    """

    def __init__(
        self, model: str, texts: Mapping[str, str], fallback: Optional[Mapping[str, str]] = None
    ) -> None:
        self._model = model
        self.values: Dict[str, str] = {**(fallback or {}), **texts}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], fallback: Optional[Mapping[str, str]] = None
    ) -> "Settings":
        """Returns the `parameters` of a configuration."""
        parameters: Mapping[str, Mapping[str, str]] = config.get("parameters", {})
        texts = {key: value.get("string_value", "") for key, value in parameters.items()}
        return cls(config["name"], texts, fallback)

    def get_bool(self, name: str, default: bool) -> bool:
        """Returns a boolean."""
        text = self.values.get(name)
        if text is None:
            return default
        try:
            return parse_bool(text)
        except ValueError:
            raise self._invalid_parameter(name, "true or false") from None

    def get_int(self, name: str, default: int, minimum: int = 0) -> int:
        """Returns an integer."""
        text = self.values.get(name)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            raise self._invalid_parameter(name, "a whole number") from None
        if number < minimum:
            raise self._invalid_parameter(name, f"a whole number from {minimum}")
        return number

    def get_choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """Returns one of the allowed texts."""
        text = self.values.get(name, default)
        if text not in allowed:
            raise self._invalid_parameter(
                name, "one of " + ", ".join(f"'{word}'" for word in allowed)
            )
        return text

    def _invalid_parameter(self, name: str, expected: str) -> ModelFailure:
        return ModelFailure(
            f"model '{self._model}' cannot be loaded: parameter '{name}' must be {expected}, got"
            f" '{self.values[name]}'"
        )


class Placement:
    """The device of an instance: `kind` is CPU, GPU or MODEL, `device` the number of the GPU."""

    def __init__(self, args: Mapping[str, str]) -> None:
        self.instance = args["model_instance_name"]
        self.kind = args["model_instance_kind"]
        self.device = int(args["model_instance_device_id"])

    @property
    def on_gpu(self) -> bool:
        """Whether the instance runs on a GPU."""
        return self.kind == "GPU"

    def capability(self, torch: Any) -> str:
        """Returns the compute capability of the GPU, such as "8.6"; "" without a GPU."""
        if not self.on_gpu:
            return ""
        return ".".join(map(str, torch.cuda.get_device_capability(self.device)))

    def check_gpu(self, model: str, torch: Any, advice: str) -> None:
        """Raises ModelFailure, with `advice` at its end, unless PyTorch sees the instance's GPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device >= count:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its instance '{self.instance}' is to run on"
                f" GPU {self.device}, and torch {torch.__version__} sees {count} GPUs; {advice}"
            )


def parse_config(args: Mapping[str, str]) -> Dict[str, Any]:
    """Returns the parsed configuration from the arguments of `initialize`."""
    config: Dict[str, Any] = json.loads(args["model_config"])
    return config


def model_path(config: Mapping[str, Any], version_dir: str, capability: str = "") -> str:
    """Returns the path of the model's file or folder, which may be missing.

    `capability` is the compute capability of the instance's GPU, such as "8.6": a configuration may
    name a file for it (docs/reference/configuration-and-scheduling.md, "Files of a model").
    """
    name: str = config["default_model_filename"]
    name = config.get("cc_model_filenames", {}).get(capability, name)
    return os.path.normpath(os.path.join(version_dir, name))
