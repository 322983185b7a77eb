"""Auto-completion of configurations, and functions that read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pb_utils import (
    ModelConfig,
    TritonModelException,
    get_input_config_by_name,
    get_output_config_by_name,
    get_parameter,
    using_decoupled_model_transaction_policy,
)

X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}


def config(**changes: Any) -> ModelConfig:
    parsed = {"name": "m", "max_batch_size": 0, "input": [], "output": [], **changes}
    return ModelConfig(json.dumps(parsed))


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    return str(caught.value)


def test_as_dict_returns_the_configuration_itself() -> None:
    completed = config()
    completed.as_dict()["max_batch_size"] = 3
    assert completed.as_dict() is completed.as_dict() is completed._model_config
    assert completed.as_dict()["max_batch_size"] == 3


def test_the_batch_size_may_grow_but_not_shrink() -> None:
    completed = config(max_batch_size=4)
    completed.set_max_batch_size(8)
    assert completed.as_dict()["max_batch_size"] == 8
    assert refusal(completed.set_max_batch_size, 0) == (
        "configuration specified max_batch_size 8, but in auto-complete-config function for model "
        "'m' specified max_batch_size 0"
    )


def test_dynamic_batching_is_added_once() -> None:
    completed = config()
    completed.set_dynamic_batching()
    assert completed.as_dict()["dynamic_batching"] == {}
    present = config(dynamic_batching={"preferred_batch_size": [4]})
    present.set_dynamic_batching()
    assert present.as_dict()["dynamic_batching"] == {"preferred_batch_size": [4]}


@pytest.mark.parametrize("scheduler", ["sequence_batching", "ensemble_scheduling"])
def test_another_scheduler_is_not_replaced(scheduler: str) -> None:
    assert refusal(config(**{scheduler: {}}).set_dynamic_batching) == (
        f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config "
        "function for model 'm' tries to set scheduling_choice as 'dynamic_batching'"
    )


def test_transaction_policy_is_set_unless_configured_otherwise() -> None:
    completed = config()
    completed.set_model_transaction_policy({"decoupled": True})
    completed.set_model_transaction_policy({"decoupled": True})
    completed.set_model_transaction_policy({})
    assert completed.as_dict()["model_transaction_policy"] == {"decoupled": True}
    assert refusal(completed.set_model_transaction_policy, {"decoupled": False}) == (
        "trying to change decoupled property in auto-complete-config for model 'm', which is "
        "already set to 'True'."
    )
    assert refusal(completed.set_model_transaction_policy, {"other": 1}) == (
        "model transaction property in auto-complete-config function for model 'm' contains "
        "property other than 'decoupled'."
    )


@pytest.mark.parametrize("io", ["input", "output"])
class TestAdding:
    @staticmethod
    def add(completed: ModelConfig, io: str) -> Any:
        return completed.add_input if io == "input" else completed.add_output

    def test_a_new_tensor_is_appended(self, io: str) -> None:
        completed = config(**{io: [{**X, "name": "w"}]})
        self.add(completed, io)(X)
        assert [tensor["name"] for tensor in completed.as_dict()[io]] == ["w", "x"]
        assert completed.as_dict()[io][1] == X

    def test_configured_tensor_is_completed(self, io: str) -> None:
        known = {"name": "x", "data_type": "TYPE_INVALID", "dims": [], "label_filename": "l"}
        completed = config(**{io: [known]})
        self.add(completed, io)(X)
        self.add(completed, io)(X)
        assert completed.as_dict()[io] == [{**known, **X}]

    def test_an_unknown_property_is_refused_before_a_missing_one(self, io: str) -> None:
        allowed = {
            "input": "'name', 'data_type', 'dims' and 'optional'",
            "output": "'name', 'data_type' and 'dims'",
        }
        assert refusal(self.add(config(), io), {"name": "x", "shape": [1]}) == (
            f"{io} 'x' in auto-complete-config function for model 'm' contains property other "
            f"than {allowed[io]}."
        )
        with pytest.raises(KeyError):
            self.add(config(), io)({"shape": [1]})

    def test_missing_properties_are_named(self, io: str) -> None:
        where = "in auto-complete-config function for model 'm' is missing"
        add = self.add(config(), io)
        assert refusal(add, {}) == f"{io} {where} 'name' property."
        assert refusal(add, {"name": "x"}) == f"{io} 'x' {where} 'data_type' property."
        assert refusal(add, {"name": "x", "data_type": "T"}) == f"{io} 'x' {where} 'dims' property."

    def test_another_data_type_is_refused(self, io: str) -> None:
        add = self.add(config(**{io: [X]}), io)
        assert refusal(add, {**X, "data_type": "TYPE_INT8"}) == (
            f"unable to load model 'm', configuration expects datatype TYPE_FP32 for {io} 'x', "
            "model provides TYPE_INT8"
        )

    @pytest.mark.parametrize("dims", [[5], [4, 1], (4,)])
    def test_other_dims_are_refused(self, io: str, dims: Any) -> None:
        add = self.add(config(**{io: [X]}), io)
        assert refusal(add, {**X, "dims": dims}) == (
            f"model 'm', tensor 'x': the model expects dims {dims} but the model configuration "
            "specifies dims [4]"
        )


def test_optional_is_kept_unless_it_differs() -> None:
    completed = config(input=[{**X, "optional": False}])
    completed.add_input(X)
    assert completed.as_dict()["input"][0]["optional"] is False
    assert refusal(completed.add_input, {**X, "optional": True}) == (
        "model 'm', tensor 'x': the model expects optional True but the model configuration "
        "specifies optional False"
    )
    with_optional = config(input=[X])
    with_optional.add_input({**X, "optional": True})
    assert with_optional.as_dict()["input"] == [{**X, "optional": True}]


def test_outputs_have_no_optional() -> None:
    assert "contains property other than" in refusal(config().add_output, {**X, "optional": True})


def test_entries_are_found_by_name() -> None:
    parsed: dict[str, Any] = {"input": [X], "output": [{**X, "name": "y"}]}
    assert get_input_config_by_name(parsed, "x") is parsed["input"][0]
    assert get_output_config_by_name(parsed, "y") is parsed["output"][0]
    assert get_input_config_by_name(parsed, "y") is None
    assert get_output_config_by_name(parsed, "x") is None
    assert get_input_config_by_name({}, "x") is None


def test_a_model_is_decoupled_only_if_its_configuration_says_so() -> None:
    assert using_decoupled_model_transaction_policy({}) is False
    for decoupled in (True, False):
        parsed = {"model_transaction_policy": {"decoupled": decoupled}}
        assert using_decoupled_model_transaction_policy(parsed) is decoupled


PARAMETERS = {
    "name": "m",
    "parameters": {
        key: {"string_value": text}
        for key, text in {"text": "a", "count": " 3 ", "rate": "0.5", "on": "True"}.items()
    },
}


def test_parameters_are_converted() -> None:
    assert get_parameter(PARAMETERS, "text") == "a"
    assert get_parameter(PARAMETERS, "count", int) == 3
    assert get_parameter(PARAMETERS, "rate", float, default=1) == 0.5
    assert get_parameter(PARAMETERS, "on", bool) is True
    assert get_parameter(PARAMETERS, "off", bool, False) is False
    assert get_parameter({"name": "m"}, "text", default=None) is None
    assert get_parameter(PARAMETERS, "text", lambda text: [text]) == ["a"]


def test_a_missing_parameter_without_a_default_is_named() -> None:
    with pytest.raises(TritonModelException) as caught:
        get_parameter(PARAMETERS, "none", int)
    assert str(caught.value) == "Model 'm' has no parameter 'none'."


@pytest.mark.parametrize(("name", "kind"), [("text", int), ("count", bool), ("on", float)])
def test_a_parameter_that_cannot_be_converted_is_named(name: str, kind: type) -> None:
    with pytest.raises(TritonModelException) as caught:
        get_parameter(PARAMETERS, name, kind)
    text = PARAMETERS["parameters"][name]["string_value"]  # type: ignore[index]  # it is a dict
    assert str(caught.value) == (
        f"Parameter '{name}' of model 'm' is '{text}', expected {kind.__name__}."
    )
