"""Runs a model in a test: in the process of the test, without a server.

    from pbhost import testing

    with testing.load("models/add_sub") as model:
        outputs = model.infer({"INPUT0": x, "INPUT1": y})
    assert (outputs["OUTPUT0"] == x + y).all()

Requests, responses and tensors behave as in a server: a model receives copies of what the test
sends, and error texts are the same.
"""

import warnings as _warnings

from pb_utils._api_modules import keep_api_modules as _keep_api_modules
from pb_utils._api_modules import report_to as _report_to
from pb_utils.testing._harness import Fake, ModelHarness, load
from pb_utils.testing._harness_runtime import LogRecord
from pb_utils.testing._metric_samples import MetricSample
from pb_utils.testing._other_models import ModelControl

__all__ = ["Fake", "LogRecord", "MetricSample", "ModelControl", "ModelHarness", "load"]

_report_to(_warnings.warn)
_keep_api_modules()  # now, as a test may import the model itself
