"""The configuration of a model: completed by the model itself, and read from its parsed form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class ModelConfig:
    """The configuration handed to ``auto_complete_config``, to be completed and returned."""

    def __init__(self, model_config_json: str) -> None:
        """Parse a configuration.

        Raises:
            ValueError: it is not JSON.
        """
        self._model_config: dict[str, Any] = json.loads(model_config_json)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration itself, not a copy."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch that the model takes.

        Raises:
            ValueError: the configuration specifies a larger one.
        """
        specified = self._model_config.get("max_batch_size", 0)
        if specified > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {specified}, but in auto-complete-config "
                f"function for model '{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Choose the dynamic batcher, if it is not chosen yet.

        Raises:
            ValueError: the configuration specifies another scheduler.
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
        """Add an input, or complete the one of that name.

        Args:
            input: ``name``, ``data_type`` (``TYPE_FP32``, ...), ``dims`` and maybe ``optional``.

        Raises:
            ValueError: a property is missing or unknown, or contradicts the configuration.
            KeyError: a property is unknown and ``name`` is missing.
        """
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output, or complete the one of that name.

        Args:
            output: ``name``, ``data_type`` (``TYPE_FP32``, ...) and ``dims``.

        Raises:
            ValueError: a property is missing or unknown, or contradicts the configuration.
            KeyError: a property is unknown and ``name`` is missing.
        """
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Say whether the model is decoupled, by ``{"decoupled": bool}``.

        Raises:
            ValueError: there is another property, or the configuration specifies otherwise.
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
                self._check_agreement(kind, specified, tensor)
                specified.update(tensor)
                return
        tensors.append(tensor)

    def _check_agreement(
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
    """Return the entry of that name in the parsed configuration's ``input``, or None."""
    return _by_name(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the entry of that name in the parsed configuration's ``output``, or None."""
    return _by_name(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the parsed configuration lets the model send any number of responses."""
    if "model_transaction_policy" not in model_config:
        return False
    decoupled: bool = model_config["model_transaction_policy"]["decoupled"]
    return decoupled


def _by_name(model_config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    entries: Sequence[dict[str, Any]] = model_config.get(kind, ())
    for entry in entries:
        if entry["name"] == name:
            return entry
    return None
