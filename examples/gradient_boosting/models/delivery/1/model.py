"""Predicts the minutes of a delivery, and what each column contributes to them."""

from pathlib import Path

import lightgbm
import numpy as np

import triton_python_backend_utils as pb_utils

VEHICLES = {b"bicycle": 0, b"car": 1, b"van": 2}


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"], args["model_version"])
        self.booster = lightgbm.Booster(model_file=folder / "delivery.txt")

    def execute(self, requests):
        tables = [self.table(request) for request in requests]
        minutes = self.booster.predict(np.concatenate(tables), num_threads=1)
        ends = np.cumsum([len(table) for table in tables])[:-1]
        return [
            self.respond(request, table, part)
            for request, table, part in zip(requests, tables, np.split(minutes, ends), strict=True)
        ]

    def table(self, request):
        """Return the rows of a request; a vehicle that is unknown is a missing value."""
        distance, hour, vehicle = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[:, 0]
            for name in ("DISTANCE", "HOUR", "VEHICLE")
        )
        codes = [VEHICLES.get(name, np.nan) for name in vehicle]
        return np.column_stack([distance, hour, codes])

    def respond(self, request, table, minutes):
        tensors = [pb_utils.Tensor("MINUTES", minutes.astype(np.float32).reshape(-1, 1))]
        if "CONTRIBUTIONS" in request.requested_output_names():  # takes longer than the prediction
            shares = self.booster.predict(table, pred_contrib=True, num_threads=1)
            without_mean = shares[:, :-1].astype(np.float32)
            tensors.append(pb_utils.Tensor("CONTRIBUTIONS", without_mean))
        return pb_utils.InferenceResponse(tensors)
