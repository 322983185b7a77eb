"""Mistakes that type checkers must find, one for each line marked WRONG."""

import numpy as np

import triton_python_backend_utils as pb_utils

pb_utils.Tensor("x", [1.0])  # WRONG
pb_utils.Tensor(None, np.zeros(1))  # WRONG
pb_utils.InferenceResponse(error="boom")  # WRONG
pb_utils.InferenceResponse([None])  # WRONG
pb_utils.InferenceResponse(parameters={"a": 1.5})  # WRONG
pb_utils.InferenceRequest(inputs=[], model_name="m")  # WRONG
pb_utils.Logger.log("m", 1)  # WRONG
pb_utils.TritonError("m", 1)  # WRONG
pb_utils.PreferredMemory(1)  # WRONG
pb_utils.Tensor("x", np.zeros(1)).shape  # fine: a method
pb_utils.get_input_tensor_by_name  # fine
pb_utils.NoSuchName  # WRONG
