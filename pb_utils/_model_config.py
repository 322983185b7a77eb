"""The configuration of a model: its auto-completion, and functions that read it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Callable, TypeVar, cast, overload

from pb_utils._exceptions import SuggestingType, TritonModelException

_T = TypeVar("_T")
_D = TypeVar("_D")
_REQUIRED: Any = object()
_BOOLS = {"true": True, "1": True, "yes": True, "on": True}
_BOOLS.update({"false": False, "0": False, "no": False, "off": False})


class ModelConfig(metaclass=SuggestingType):
    """The configuration that ``auto_complete_config`` gets, completes and returns.

    The rules and the exact error texts are in docs/reference/model-module.md, "ModelConfig".

    Examples:
        >>> config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        >>> config.set_max_batch_size(8)
    """

    def __init__(self, model_config_json: str) -> None:
        """Parses a configuration in its JSON form.

        Raises:
            ValueError: ``model_config_json`` is not valid JSON.
        """
        self._model_config: dict[str, Any] = json.loads(model_config_json)

    def as_dict(self) -> dict[str, Any]:
        """Returns the parsed configuration itself, not a copy. Changes to it take effect."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Sets the maximum batch size; 0 means that the model does not batch.

        Raises:
            ValueError: the configuration has a larger value.
        """
        specified = self._model_config.get("max_batch_size", 0)
        if specified > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {specified}, but in auto-complete-config "
                f"function for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Selects the dynamic batcher, unless the configuration already has one.

        Raises:
            ValueError: the configuration has another scheduler.
        """
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config and "dynamic_batching" not in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"auto-complete-config function for model '{self._name}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Adds an input, or completes the configured input with the same name.

        Args:
            input: a dict with ``name``, ``data_type`` (for example ``TYPE_FP32``), ``dims`` (a list
                of int, without the batch dimension; -1 for any size) and, if wanted, ``optional``
                (a bool).

        Raises:
            ValueError: a key is missing or unknown, or a value contradicts the configuration.
            KeyError: a key is unknown and ``name`` is missing.
        """
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Adds an output, or completes the configured output with the same name.

        Args:
            output: a dict with ``name``, ``data_type`` (for example ``TYPE_FP32``) and ``dims`` (a
                list of int, without the batch dimension; -1 for any size).

        Raises:
            ValueError: a key is missing or unknown, or a value contradicts the configuration.
            KeyError: a key is unknown and ``name`` is missing.
        """
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Sets whether the model is decoupled.

        Args:
            transaction_policy_dict: ``{"decoupled": True}`` or ``{"decoupled": False}``.

        Raises:
            ValueError: the dict has another key, or the configuration has another value.
        """
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._name}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    @property
    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _add(self, kind: str, tensor: Mapping[str, Any], allowed: Sequence[str]) -> None:
        where = f"in auto-complete-config function for model '{self._name}'"
        if any(key not in allowed for key in tensor):
            listed = ", ".join(f"'{key}'" for key in allowed[:-1]) + f" and '{allowed[-1]}'"
            raise ValueError(
                f"{kind} '{tensor['name']}' {where} contains property other than {listed}."
            )
        if "name" not in tensor:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for key in ("data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{kind} '{tensor['name']}' {where} is missing '{key}' property.")
        tensors = self._model_config.setdefault(kind, [])
        for specified in tensors:
            if specified["name"] == tensor["name"]:
                self._check_consistent(kind, specified, tensor)
                specified.update(tensor)
                return
        tensors.append(tensor)

    def _check_consistent(
        self, kind: str, specified: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        name = given["name"]
        if specified["data_type"] not in ("TYPE_INVALID", given["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype "
                f"{specified['data_type']} for {kind} '{name}', model provides "
                f"{given['data_type']}"
            )
        for key in ("dims", "optional"):
            if key not in specified or key not in given or specified[key] == given[key]:
                continue
            if key == "optional" or specified[key]:
                raise ValueError(
                    f"model '{self._name}', tensor '{name}': the model expects {key} "
                    f"{given[key]} but the model configuration specifies {key} {specified[key]}"
                )


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the configuration of the input with a name.

    Args:
        model_config: the configuration as a parsed dict, ``json.loads(args["model_config"])``.
        name: name of the input.

    Returns:
        The entry of ``model_config["input"]`` with this name, or None.
    """
    return _find_by_name(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the configuration of the output with a name.

    Args:
        model_config: the configuration as a parsed dict, ``json.loads(args["model_config"])``.
        name: name of the output.

    Returns:
        The entry of ``model_config["output"]`` with this name, or None.
    """
    return _find_by_name(model_config, "output", name)


@overload
def get_parameter(model_config: Mapping[str, Any], name: str) -> str: ...


@overload
def get_parameter(model_config: Mapping[str, Any], name: str, *, default: _D) -> str | _D: ...


@overload
def get_parameter(model_config: Mapping[str, Any], name: str, type: Callable[[str], _T]) -> _T: ...


@overload
def get_parameter(
    model_config: Mapping[str, Any], name: str, type: Callable[[str], _T], default: _D
) -> _T | _D: ...


def get_parameter(
    model_config: Mapping[str, Any],
    name: str,
    type: Callable[[str], Any] = str,
    default: Any = _REQUIRED,
) -> Any:
    """Returns a value from ``parameters`` of the configuration. Triton does not have this function.

    Args:
        model_config: the configuration as a parsed dict, ``json.loads(args["model_config"])``.
        name: name of the parameter.
        type: function that converts the text: ``str``, ``int``, ``float``, ``bool`` or another one
            that raises ValueError. ``bool`` accepts true, false, yes, no, on, off, 1 and 0, in any
            case.
        default: result if there is no such parameter. Without it, the parameter is required.

    Returns:
        The converted ``string_value``, or the default.

    Raises:
        TritonModelException: the parameter is missing and there is no default, or its text cannot
            be converted. The message names the model and the parameter.

    Examples:
        >>> limit = pb_utils.get_parameter(config, "LIMIT", int, default=10)
    """
    model = model_config.get("name", "")
    parameters: Mapping[str, Mapping[str, str]] = model_config.get("parameters", {})
    if name not in parameters:
        if default is _REQUIRED:
            raise TritonModelException(f"Model '{model}' has no parameter '{name}'.")
        return default
    text = parameters[name].get("string_value", "")
    convert = parse_bool if cast("Any", type) is bool else type
    try:
        return convert(text)
    except ValueError as error:
        expected = getattr(type, "__name__", "another value")
        raise TritonModelException(
            f"Parameter '{name}' of model '{model}' is '{text}', expected {expected}."
        ) from error


def parse_bool(text: str) -> bool:
    """Returns the boolean that a parameter's text means. Raises ValueError."""
    try:
        return _BOOLS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Returns whether the model is decoupled: it may send any number of responses to a request.

    Args:
        model_config: the configuration as a parsed dict, ``json.loads(args["model_config"])``.
    """
    if "model_transaction_policy" not in model_config:
        return False
    decoupled: bool = model_config["model_transaction_policy"]["decoupled"]
    return decoupled


def _find_by_name(model_config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    entries: Sequence[dict[str, Any]] = model_config.get(kind, ())
    for entry in entries:
        if entry["name"] == name:
            return entry
    return None
