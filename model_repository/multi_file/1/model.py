"""Imports a module beside model.py relatively, and a package in the model's folder absolutely."""

import json

import thermometer

import triton_python_backend_utils as pb_utils

from .rounding import round_to


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.decimals = int(parameters["decimals"]["string_value"])

    def execute(self, requests):
        responses = []
        for request in requests:
            celsius = pb_utils.get_input_tensor_by_name(request, "CELSIUS").as_numpy()
            fahrenheit = round_to(thermometer.fahrenheit(celsius), self.decimals)
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("FAHRENHEIT", fahrenheit)])
            )
        return responses
