"""Which models a load plan has, in which order, without a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.config.model_config import ConfigSettings
from host.model_control.load_planner import LoadPlanner, LoadRequest, PlannedModel
from host.model_control.load_records import LoadRecords
from host.models.loaders import LoadSettings, RepositoryReadError
from host.models.registry import Registry
from host.repository.fingerprint import compute_fingerprint
from host.repository.override import Override, UploadedDirectories
from host.repository.repository import Repository
from tests.conftest import RepositoryBuilder

MODEL = 'backend: "python" output { name: "O" data_type: TYPE_INT32 dims: [ 1 ] }'


def ensemble(*steps: str) -> str:
    """A configuration whose steps each compute one output of the ensemble from its input."""
    one_step = (
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "I" value: "I" }}'
        f' output_map {{ key: "O" value: "O{number}" }} }}'
        for number, name in enumerate(steps)
    )
    outputs = (
        f'output {{ name: "O{number}" data_type: TYPE_INT32 dims: [ 1 ] }}'
        for number, _ in enumerate(steps)
    )
    return (
        'platform: "ensemble" input { name: "I" data_type: TYPE_INT32 dims: [ 1 ] }'
        f" {' '.join(outputs)} ensemble_scheduling {{ step [ {', '.join(one_step)} ] }}"
    )


class Planning:
    """A planner of one repository, whose models are not loaded."""

    def __init__(self, path: Path) -> None:
        self.uploads = UploadedDirectories()
        self.planner = LoadPlanner(
            Registry(),
            Repository([path]),
            LoadRecords(),
            LoadSettings(ConfigSettings(), threads=1, retries=0, grace=0, finalize=1),
            self.uploads,
            lambda name, path: compute_fingerprint(path),
            None,
        )

    def plan(
        self,
        names: Iterable[str] | Mapping[str, str],
        override: Override | None = None,
        known: Collection[str] = (),
    ) -> list[PlannedModel]:
        reasons = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
        return asyncio.run(
            self.planner.plan_load(reasons, LoadRequest(override), lambda name: (), known)
        )


@pytest.fixture
def planning(repository: RepositoryBuilder) -> Iterable[Planning]:
    made = Planning(repository.path)
    yield made
    made.uploads.close()


def names_of(plan: list[PlannedModel]) -> list[str]:
    return [one.name for one in plan]


def find(plan: list[PlannedModel], name: str) -> PlannedModel:
    return next(one for one in plan if one.name == name)


def test_step_models_precede_their_ensembles_and_each_is_planned_once(
    repository: RepositoryBuilder, planning: Planning
) -> None:
    repository.add("outer", config=ensemble("inner", "two"))
    repository.add("inner", config=ensemble("one", "two"))
    for name in ("one", "two"):
        repository.add(name, "x = 1", MODEL)
    plan = planning.plan(["outer", "two"])
    assert names_of(plan) == ["one", "two", "inner", "outer"]
    assert find(plan, "two").reason == "" and find(plan, "one").reason == "step of 'inner'"
    assert list(map(str, plan)) == [
        "one (step of 'inner')",
        "two",
        "inner (step of 'outer') after one, two",
        "outer after inner, two",
    ]


def test_a_model_that_cannot_be_read_is_planned_with_its_error(
    repository: RepositoryBuilder, planning: Planning
) -> None:
    repository.add("broken", "x = 1", "max_batch_size: -1")
    repository.add("both", config=ensemble("broken", "missing"))
    plan = planning.plan(["both"])
    assert names_of(plan) == ["broken", "missing", "both"]
    for name in ("broken", "missing"):
        assert isinstance(find(plan, name).error, RepositoryReadError)
    assert find(plan, "both").error is None
    assert "max_batch_size" in str(plan[0])


def test_ensembles_of_each_other_are_planned_once_each(
    repository: RepositoryBuilder, planning: Planning
) -> None:
    repository.add("hen", config=ensemble("egg"))
    repository.add("egg", config=ensemble("hen"))
    assert names_of(planning.plan(["hen"])) == ["egg", "hen"]


def test_models_of_an_earlier_plan_are_left_out(
    repository: RepositoryBuilder, planning: Planning
) -> None:
    repository.add("user", config=ensemble("done", "new"))
    for name in ("done", "new"):
        repository.add(name, "x = 1", MODEL)
    plan = planning.plan({"user": "uses 'done'"}, known=["done"])
    assert names_of(plan) == ["new", "user"]
    assert str(find(plan, "user")) == "user (uses 'done') after done, new"


def test_an_override_is_that_of_the_named_model_alone(
    repository: RepositoryBuilder, planning: Planning
) -> None:
    repository.add("both", config=ensemble("one", "one"))
    repository.add("one", "x = 1", MODEL)
    repository.add("two", "x = 1", MODEL)
    given_config = Override(
        '{"platform": "ensemble", "input": [{"name": "I", "data_type": "TYPE_INT32", "dims": [1]}],'
        ' "output": [{"name": "O", "data_type": "TYPE_INT32", "dims": [1]}],'
        ' "ensemble_scheduling": {"step": [{"model_name": "two", "input_map": {"I": "I"},'
        ' "output_map": {"O": "O"}}]}}'
    )
    plan = planning.plan(["both"], given_config)
    assert names_of(plan) == ["two", "both"]
    assert (
        find(plan, "both").request.override is given_config
        and find(plan, "two").request.override is None
    )


@settings(max_examples=30)
@given(
    steps=st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3)
    ),
    asked=st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True),
)
def test_any_graph_is_planned_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: dict[str, list[str]], asked: list[str]
) -> None:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("graph"))
    for name in "abcdefg":  # h is missing
        if name in steps:
            repository.add(name, config=ensemble(*steps[name]))
        else:
            repository.add(name, "x = 1", MODEL)
    planning = Planning(repository.path)
    order = names_of(planning.plan(asked))
    planning.uploads.close()
    assert len(order) == len(set(order))
    assert set(order) == reachable(asked, lambda name: steps.get(name, ()))
    for position, name in enumerate(order):
        for step in steps.get(name, ()):
            leads_back = name in reachable([step], lambda one: steps.get(one, ()))
            assert leads_back or order.index(step) < position


def reachable(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    """The names that can be reached, those at the start included."""
    seen: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += following(name)
    return seen
