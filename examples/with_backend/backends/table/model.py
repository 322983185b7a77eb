"""The backend `table`: looks up rows of a model's table.csv, one for each element of the input.

The model's configuration has one input, the column to search, and outputs, the columns to return
with their data types. Column names are compared without case.
"""

import csv
import json
import os

import numpy as np

import triton_python_backend_utils as pb_utils


def read(path):
    """Reads the columns of a table by name, as text."""
    with open(path, newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    columns = zip(*rows, strict=True)
    return {name.upper(): column for name, column in zip(names, columns, strict=True)}


def typed(column, data_type):
    """Converts the text of a column to an array of a Triton data type."""
    dtype = pb_utils.triton_string_to_numpy(data_type)
    if dtype == np.object_:
        column = [text.encode() for text in column]
    return np.array(column, dtype=dtype)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        path = os.path.join(pb_utils.get_model_dir(), "table.csv")
        table = read(path)
        wanted = config["input"] + config["output"]
        missing = [tensor["name"] for tensor in wanted if tensor["name"].upper() not in table]
        if missing:
            raise pb_utils.TritonModelException(f"{path} has no column for {', '.join(missing)}")
        columns = {t["name"]: typed(table[t["name"].upper()], t["data_type"]) for t in wanted}
        (key,) = config["input"]
        self.key = key["name"]
        self.rows = {value: row for row, value in enumerate(columns.pop(self.key))}
        self.columns = columns

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        keys = pb_utils.get_input_tensor_by_name(request, self.key).as_numpy()
        unknown = [key for key in keys if key not in self.rows]
        if unknown:
            error = pb_utils.TritonError(
                f"the table has no row {unknown[0]!r}", pb_utils.TritonError.NOT_FOUND
            )
            return pb_utils.InferenceResponse(error=error)
        rows = [self.rows[key] for key in keys]
        outputs = [pb_utils.Tensor(name, column[rows]) for name, column in self.columns.items()]
        return pb_utils.InferenceResponse(outputs)
