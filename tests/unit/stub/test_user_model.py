"""The texts that describe exceptions of models."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import pb_utils
from stub.user_model import describe_exception


def description(obj: Any, name: str) -> str:
    """The first line of the text about an attribute that an object does not have."""
    with pytest.raises(AttributeError) as caught:
        getattr(obj, name)
    return describe_exception(caught.value).splitlines()[0]


@pytest.mark.skipif(sys.version_info < (3, 10), reason="errors do not have the object")
def test_a_misspelt_attribute_of_an_object_is_followed_by_the_one_that_was_meant() -> None:
    tensor = pb_utils.Tensor("X", np.zeros(1))
    problem = "AttributeError: 'Tensor' object has no attribute 'as_nunpy'"
    assert description(tensor, "as_nunpy") == f"{problem}, did you mean 'as_numpy'?"
    assert description(tensor, "volume") == problem.replace("as_nunpy", "volume")
    missing = "AttributeError: 'NoneType' object has no attribute"
    assert description(None, "as_numpy") == (
        f"{missing} 'as_numpy'; if it is from get_input_tensor_by_name, the request has no such"
        " input"
    )
    for name in ("append", "shape"):  # arrays of many libraries have a shape
        assert description(None, name) == f"{missing} '{name}'"
    assert description([], "apend") == "AttributeError: 'list' object has no attribute 'apend'"


def test_a_misspelt_attribute_of_a_class_has_one_suggestion() -> None:
    assert description(pb_utils.Logger, "log_eror") == (
        "AttributeError: type object 'Logger' has no attribute 'log_eror',"
        " did you mean 'log_error'?"
    )
