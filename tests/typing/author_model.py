"""A model as an author writes it. Type checkers read this file; it is never run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type, reveal_type

import triton_python_backend_utils as pb_utils
from c_python_backend_utils import (
    InferenceResponseSender,
    InferenceTrace,
    MemoryType,
    Metric,
    MetricKind,
    ResponseIterator,
)


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "optional": True})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        assert_type(config.as_dict(), dict[str, Any])
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        assert_type(pb_utils.using_decoupled_model_transaction_policy(config), bool)
        output = pb_utils.get_output_config_by_name(config, "Y")
        assert output is not None
        self.kept: dict[int | str, list[float]] = {}
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        assert_type(self.dtype, type[np.generic | bool])
        assert_type(pb_utils.get_model_dir(), str)
        pb_utils.Logger.log("ready", pb_utils.Logger.VERBOSE)
        pb_utils.Logger.log_info(b"ready")
        pb_utils.Logger.log_warning("ready")
        assert_type(pb_utils.get_parameter(config, "TEXT"), str)
        assert_type(pb_utils.get_parameter(config, "COUNT", int), int)
        assert_type(pb_utils.get_parameter(config, "RATE", float, default=None), float | None)
        self.family = pb_utils.MetricFamily("n", "help", pb_utils.MetricFamily.HISTOGRAM)
        self.metric = self.family.Metric(labels={"model": args["model_name"]}, buckets=[0.1, 1])
        reveal_type(self.metric)
        assert_type(self.metric, Metric)
        assert_type(self.metric.value(), float)
        assert_type(pb_utils.MetricFamily.COUNTER, MetricKind)
        pb_utils.load_model("other", config="{}", files={"file:1/model.py": b""})
        pb_utils.unload_model("other", unload_dependents=True)
        assert_type(pb_utils.is_model_ready("other", model_version="1"), bool)

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        responses: list[pb_utils.InferenceResponse] = []
        stacked, split = pb_utils.stack_inputs(requests, "X")
        assert_type(split(stacked), list[npt.NDArray[Any]])
        pb_utils.Tensor.from_strings("T", ["a"]).as_strings().tolist()
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "X")
            assert_type(tensor, pb_utils.Tensor | None)
            if tensor is None:
                error = pb_utils.TritonError("X is missing", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                continue
            y = tensor.as_numpy().astype(self.dtype)
            reveal_type(request.parameters())
            reveal_type(request.requested_output_names())
            reveal_type(tensor.shape())
            outputs = [
                pb_utils.Tensor("Y", y),
                pb_utils.Tensor.from_dlpack("Z", tensor),
                pb_utils.Tensor(b"W", tensor.as_numpy(copy=False)),
            ]
            responses.append(pb_utils.InferenceResponse(outputs, parameters={"rows": len(y)}))
        return responses

    def ask(self, x: pb_utils.Tensor) -> pb_utils.Tensor | None:
        request = pb_utils.InferenceRequest(
            model_name="other",
            requested_output_names=["Y"],
            inputs=[x],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        )
        pb_utils.InferenceRequest("id", 1, [x], ["Y"], "other")
        response = request.exec()
        reveal_type(response)
        failure = response.error()
        if failure is not None:
            raise pb_utils.TritonModelException(failure.message())
        return pb_utils.get_output_tensor_by_name(response, "Y")

    async def ask_all(self, requests: list[pb_utils.InferenceRequest]) -> list[str]:
        pending = [request.async_exec() for request in requests]
        responses = [await future for future in pending]
        reveal_type(responses)
        return [response.parameters() for response in responses]

    def ask_for_many(self, request: pb_utils.InferenceRequest) -> list[str]:
        responses = request.exec(decoupled=True, execution_timeout=1.5)
        reveal_type(responses)
        assert_type(responses, ResponseIterator)
        assert_type(next(responses), pb_utils.InferenceResponse)
        responses.cancel()
        assert_type(request.exec(execution_timeout=2), pb_utils.InferenceResponse)
        assert_type(request.exec(False), pb_utils.InferenceResponse)
        assert_type(request.exec(decoupled=bool(1)), pb_utils.InferenceResponse | ResponseIterator)
        return [response.parameters() for response in responses]

    async def ask_for_many_on_a_loop(self, request: pb_utils.InferenceRequest) -> list[str]:
        responses = await request.async_exec(decoupled=True)
        reveal_type(responses)
        assert_type(await request.async_exec(execution_timeout=2), pb_utils.InferenceResponse)
        return [response.parameters() async for response in responses]

    def answer_later(self, request: pb_utils.InferenceRequest) -> None:
        sender = request.get_response_sender()
        reveal_type(sender)
        assert_type(sender, InferenceResponseSender)
        if sender.is_cancelled() or request.is_cancelled():
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        sender.send(pb_utils.InferenceResponse([]))
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        assert_type(request.trace(), InferenceTrace)
        assert_type(request.trace().get_context(), str | None)
        memory: MemoryType = pb_utils.TRITONSERVER_MEMORY_GPU
        pb_utils.PreferredMemory(memory, preferred_device_id=0)

    def sequences_expired(self, correlation_ids: list[int | str]) -> None:
        for id in correlation_ids:
            self.kept.pop(id, None)

    def finalize(self) -> None:
        pb_utils.Logger.log_info("done")
