"""The code of a model: imports its file, calls its methods, and checks what ``execute`` returns."""

from __future__ import annotations

from pb_utils._model_code import defines


class Meta(type):
    def finalize(cls) -> None:
        """A method of the class only."""


class Model(metaclass=Meta):
    def execute(self, requests: object) -> None:
        """A method."""

    @property
    def is_ready(self) -> object:
        raise ImportError("a library is missing")

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


class Inner:
    """What a model wraps."""


class Wrapper:
    def __init__(self) -> None:
        self.inner = Inner()

    @property
    def initialize(self) -> object:
        return self.inner.initialize  # type: ignore[attr-defined]


def test_a_method_or_a_property_with_an_error_of_its_own_counts() -> None:
    assert defines(Model(), "execute")
    assert defines(Model(), "is_ready")


def test_a_property_without_the_attribute_and_a_method_of_the_metaclass_do_not_count() -> None:
    assert not defines(Wrapper(), "initialize")
    assert not defines(Model(), "finalize")
    assert not defines(Model(), "another")
