"""The measured models as MLServer runtimes, run in MLServer's environment."""

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Identity(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        array = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("OUTPUT0", array)
        return InferenceResponse(model_name=self.name, outputs=[output])


class Network(MLModel):
    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self.settings.parameters.uri
        self.session = onnxruntime.InferenceSession(path, options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0])
        (y,) = self.session.run(["Y"], {"X": x})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("Y", y)])
