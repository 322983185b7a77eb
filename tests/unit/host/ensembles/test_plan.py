"""Which steps some outputs need."""

from __future__ import annotations

import pytest

from host.config.pbtxt import parse_pbtxt
from host.ensembles.plan import EnsemblePlan, EnsembleTensor, SequencePosition
from host.errors import HostError
from host.inference.request import Parameter, Tensor

CONFIG = """
input [ { name: "I" }, { name: "J" } ]
output [ { name: "O" }, { name: "P" }, { name: "Q" } ]
ensemble_scheduling { step [
  { model_name: "a" model_version: -1 input_map { key: "x" value: "I" }
    output_map { key: "y" value: "t" } },
  { model_name: "b" model_version: 3 input_map { key: "x" value: "t" }
    input_map { key: "z" value: "t" } output_map { key: "y" value: "O" }
    output_map { key: "w" value: "Q" } },
  { model_name: "c" model_version: -1 input_map { key: "x" value: "t" }
    input_map { key: "z" value: "J" } output_map { key: "y" value: "P" } }
] }
"""


@pytest.fixture
def plan() -> EnsemblePlan:
    return EnsemblePlan(parse_pbtxt(CONFIG, "config.pbtxt"))


@pytest.mark.parametrize(
    ("requested", "steps", "inputs"),
    [
        ([], "abc", {"I", "J"}),
        (["O"], "ab", {"I"}),
        (["P"], "ac", {"I", "J"}),
        (["Q", "P"], "abc", {"I", "J"}),
    ],
)
def test_a_route_has_the_steps_that_its_outputs_need(
    plan: EnsemblePlan, requested: list[str], steps: str, inputs: set[str]
) -> None:
    route = plan.route(requested)
    assert [step.model for step in route.steps] == list(steps)
    assert set(route.inputs) == inputs


def test_outputs_have_the_order_of_the_configuration(plan: EnsemblePlan) -> None:
    assert plan.route(["Q", "O"]).outputs == ("O", "Q")
    assert plan.route([]).outputs == ("O", "P", "Q")


def test_a_tensor_is_used_once_by_each_step_and_once_if_it_is_requested(plan: EnsemblePlan) -> None:
    uses = plan.route([]).uses
    assert uses == {"I": 1, "J": 1, "t": 2, "O": 1, "P": 1, "Q": 1}
    assert plan.route(["O"]).uses == {"I": 1, "t": 1, "O": 1}


def test_a_tensor_may_be_several_inputs_of_one_step(plan: EnsemblePlan) -> None:
    step = plan.steps[1]
    assert step.inputs == (("x", "t"), ("z", "t"))
    assert step.sources == {"t"}
    assert step.version == 3


def test_routes_that_clients_make_up_are_not_all_kept() -> None:
    outputs = ", ".join(f'{{ name: "O{i}" }}' for i in range(20))
    made = " ".join(f'output_map {{ key: "o{i}" value: "O{i}" }}' for i in range(20))
    plan = EnsemblePlan(
        parse_pbtxt(
            f'input [ {{ name: "I" }} ] output [ {outputs} ] ensemble_scheduling {{ step [ {{'
            f' model_name: "a" input_map {{ key: "x" value: "I" }} {made} }} ] }}',
            "config.pbtxt",
        )
    )
    for number in range(1, 1000):
        plan.route([f"O{bit}" for bit in range(20) if number >> bit & 1])
    assert plan._route.cache_info().currsize <= 64


PLAIN = SequencePosition(0, 0)


def named(shape: list[int], made: int, dims: list[int], batches: bool) -> list[int]:
    tensor = Tensor("a", "FP32", shape, b"")
    found = EnsembleTensor(tensor, made, PLAIN, 1).to_step_input("b", dims, batches)
    assert found is not None
    assert found.name == "b"
    assert tensor.shape == shape, "the tensor itself may be on its way to others"
    return found.shape


@pytest.mark.parametrize(
    ("shape", "made", "dims", "batches", "expected"),
    [
        pytest.param([3, 16], 3, [16], True, [3, 16], id="both batch"),
        pytest.param([16], 0, [16], False, [16], id="neither batches"),
        pytest.param([16], 0, [16], True, [1, 16], id="a batch of one is made"),
        pytest.param([4, 16], 0, [16], True, [4, 16], id="it has a batch dimension already"),
        pytest.param([1, 16], 1, [16], False, [16], id="a batch of one is unmade"),
        pytest.param([1, 16], 1, [-1, 16], False, [1, 16], id="it fits with its batch dimension"),
        pytest.param([2, 16], 2, [16], False, [2, 16], id="a larger batch stays"),
    ],
)
def test_a_batch_dimension_of_one_comes_and_goes(
    shape: list[int], made: int, dims: list[int], batches: bool, expected: list[int]
) -> None:
    assert named(list(shape), made, dims, batches) == expected


def test_an_output_that_was_not_made_has_no_tensor() -> None:
    assert EnsembleTensor(None, 0, PLAIN, 1).to_step_input("b", [1], True) is None


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, SequencePosition(5, 1)),
        ({"other": 3}, SequencePosition(5, 1)),
        ({"sequence_id": 7}, SequencePosition(7, 1, True)),
        ({"sequence_id": "x"}, SequencePosition("x", 1, True)),
        ({"sequence_start": False}, SequencePosition(5, 0, True)),
        ({"sequence_end": True}, SequencePosition(5, 3, True)),
    ],
)
def test_a_members_response_may_change_the_sequence(
    parameters: dict[str, Parameter], expected: SequencePosition
) -> None:
    assert SequencePosition(5, 1).updated_by(parameters) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_id", 1.5), ("sequence_id", True), ("sequence_start", 1), ("sequence_end", "")],
)
def test_a_sequence_of_the_wrong_type_is_refused(name: str, value: Parameter) -> None:
    with pytest.raises(HostError, match=f"parameter '{name}' to be TRITONSERVER_PARAMETER_"):
        PLAIN.updated_by({name: value})
