"""Runs a model in a test: in the process of the test, without a server.

    from pbhost import testing

    with testing.load("models/add_sub") as model:
        outputs = model.infer({"INPUT0": x, "INPUT1": y})
    assert (outputs["OUTPUT0"] == x + y).all()

Requests, responses and tensors behave as in a server: a model receives copies of what the test
sends, and error texts are the same.
"""

from pb_utils.testing import *  # noqa: F403
from pb_utils.testing import __all__ as __all__
