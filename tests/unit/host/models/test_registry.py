"""The loaded models: look-up, the latest version, and the errors for all others."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from host.errors import ErrorCode, HostError
from host.models.registry import (
    LoadedModel,
    LoadFailure,
    ModelVersion,
    Registry,
    VersionState,
    parse_version,
)


class FakeModel:
    def __init__(self, name: str, version: int) -> None:
        self.name = name
        self.version = version


def version(
    number: int, state: VersionState = VersionState.READY, reason: str = ""
) -> ModelVersion:
    model = cast(LoadedModel, FakeModel("m", number)) if state is VersionState.READY else None
    return ModelVersion(number, state, reason, model)


def found(registry: Registry, number: int = -1) -> int:
    return registry.find("m", number).version


def refusal(registry: Registry, number: int = -1) -> tuple[ErrorCode, str]:
    with pytest.raises(HostError) as caught:
        registry.find("m", number)
    return caught.value.code, caught.value.message


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.mark.parametrize("number", [-1, 1])
def test_a_model_never_heard_of_is_not_found(registry: Registry, number: int) -> None:
    expected = (ErrorCode.NOT_FOUND, "Request for unknown model: 'm' is not found")
    assert refusal(registry, number) == expected


def test_a_model_without_a_ready_version_has_none_available(registry: Registry) -> None:
    expected = (
        ErrorCode.NOT_FOUND,
        "Request for unknown model: 'm' has no available versions",
    )
    registry.set_no_versions("m", "Invalid argument: no")
    assert refusal(registry) == expected
    for state in (VersionState.LOADING, VersionState.UNLOADING, VersionState.UNAVAILABLE):
        registry.set_version("m", version(1, state))
        assert refusal(registry) == expected


def test_an_unknown_version_is_not_found(registry: Registry) -> None:
    registry.set_version("m", version(1))
    expected = (ErrorCode.NOT_FOUND, "Request for unknown model: 'm' version 2 is not found")
    assert refusal(registry, 2) == expected


@pytest.mark.parametrize(
    "state", [VersionState.LOADING, VersionState.UNLOADING, VersionState.UNAVAILABLE]
)
def test_a_version_that_is_not_ready_is_unavailable(
    registry: Registry, state: VersionState
) -> None:
    registry.set_version("m", version(1))
    registry.set_version("m", version(2, state))
    expected = (
        ErrorCode.UNAVAILABLE,
        "Request for unknown model: 'm' version 2 is not at ready state",
    )
    assert refusal(registry, 2) == expected
    assert found(registry) == 1


@pytest.mark.parametrize("order", [[1, 2, 10], [10, 2, 1], [2, 10, 1]])
def test_the_latest_version_is_the_highest_number(registry: Registry, order: list[int]) -> None:
    for number in order:
        registry.set_version("m", version(number))
    assert found(registry) == 10
    assert [found(registry, number) for number in order] == order
    assert list(registry.versions("m")) == [1, 2, 10]


def test_the_latest_version_falls_back_when_one_leaves(registry: Registry) -> None:
    leaving = version(2)
    registry.set_version("m", version(1))
    registry.set_version("m", leaving)
    leaving.state = VersionState.UNLOADING
    registry.state_changed()
    assert found(registry) == 1
    leaving.state = VersionState.READY
    registry.state_changed()
    assert found(registry) == 2


def test_a_version_is_replaced_by_one_of_the_same_number(registry: Registry) -> None:
    before, after = version(1), version(1)
    registry.set_version("m", before)
    registry.set_version("m", after)
    assert registry.find("m") is after.model
    assert list(registry.versions("m").values()) == [after]


def test_models_do_not_see_each_others_versions(registry: Registry) -> None:
    registry.set_version("m", version(1))
    registry.set_version("n", version(2))
    assert found(registry) == 1
    assert refusal(registry, 2)[0] is ErrorCode.NOT_FOUND
    assert [name for name, _ in registry.list_entries()] == ["m", "n"]
    assert registry.versions("unheard of") == {}


def test_a_model_whose_load_failed_before_its_versions_is_not_known(registry: Registry) -> None:
    registry.set_failed("m", "Internal: broken", counts=False)
    assert not registry.has_versions("m")
    assert refusal(registry)[1] == "Request for unknown model: 'm' is not found"
    assert refusal(registry, 1)[1] == "Request for unknown model: 'm' is not found"
    assert registry.failures["m"] == LoadFailure("Internal: broken", counts=False)
    assert registry.names() == {"m"}
    registry.clear_failed("m")
    assert not registry.failures
    assert not registry.names()


def test_no_version_stays_the_reason_until_the_next_load_gets_further(registry: Registry) -> None:
    registry.set_no_versions("m", "Invalid argument: no")
    assert registry.has_versions("m")
    assert [entry.reason for _, entry in registry.list_entries()] == ["Invalid argument: no"]
    registry.clear_failed("m")
    assert not registry.has_versions("m")
    registry.set_version("m", version(1))
    registry.set_no_versions("m", "Invalid argument: no")
    registry.clear_failed("m")
    assert list(registry.versions("m")) == [1]


states = st.dictionaries(st.integers(1, 5), st.sampled_from(VersionState), min_size=1)


@given(st.lists(states, max_size=6))
def test_look_up_follows_every_change_of_state(
    changes: list[dict[int, VersionState]],
) -> None:
    registry = Registry()
    current: dict[int, ModelVersion] = {}
    for change in changes:
        for number, state in change.items():
            current[number] = version(number, state)
            registry.set_version("m", current[number])
        ready = [number for number, known in current.items() if known.state is VersionState.READY]
        for number in range(1, 6):
            if number in ready:
                assert found(registry, number) == number
            else:
                refusal(registry, number)
        if ready:
            assert found(registry) == max(ready)
        else:
            refusal(registry)


@given(st.integers(0, (1 << 63) - 1))
@example((1 << 63) - 1)
def test_a_version_number_is_read(number: int) -> None:
    assert parse_version(str(number)) == number


def test_no_version_means_the_latest() -> None:
    assert parse_version("") == -1


@pytest.mark.parametrize(
    "text", ["x", "1.5", "1x", " 1", "1 ", "+1", "--1", "1\n", "٣", "9" * 19, str(1 << 63), "1_0"]
)
def test_a_version_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(HostError) as caught:
        parse_version(text)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}'"
        " (details: stol), version should be an integral value > 0"
    )


@pytest.mark.parametrize("text", ["-1", str(-1 << 63)])
def test_a_negative_version_is_refused(text: str) -> None:
    with pytest.raises(HostError) as caught:
        parse_version(text)
    assert caught.value.message == (
        f"invalid model version specified '{text}' , version should be an integral value > 0"
    )


def test_forgotten_failures_leave_what_was_unloaded_and_what_serves(registry: Registry) -> None:
    registry.set_version("m", version(1))
    registry.set_version("m", version(2, VersionState.UNAVAILABLE, "Internal: broken"))
    registry.set_version("m", version(3, VersionState.UNAVAILABLE, "unloaded"))
    registry.forget_failures("m")
    assert list(registry.versions("m")) == [1, 3]
    registry.set_failed("n", "Internal: unreadable", counts=True)
    registry.set_no_versions("o", "Invalid argument: no")
    for name in ("n", "o", "missing"):
        registry.forget_failures(name)
    assert not registry.failures
    assert registry.names() == {"m"}
