"""The measured models in LitServe: `litserve_server.py PORT NETWORK`, run in its environment."""

import sys

import litserve
import numpy as np
import onnxruntime


class Identity(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return np.asarray(request["data"], dtype=np.float32)

    def predict(self, x):
        return x

    def encode_response(self, output):
        return {"data": output.tolist()}


class Network(Identity):
    def setup(self, device):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[2], options)

    def predict(self, x):
        return self.session.run(["Y"], {"X": x})[0]


if __name__ == "__main__":
    apis = [Identity(api_path="/identity_fp32"), Network(api_path="/mlp_onnx")]
    server = litserve.LitServer(apis, accelerator="cpu")
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False
    )
