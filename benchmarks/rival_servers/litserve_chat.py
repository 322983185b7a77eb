"""A model with LitServe's OpenAISpec that sends as many words as the last message says."""

import sys

import litserve


class Repeat(litserve.LitAPI):
    def setup(self, device):
        pass

    def predict(self, request):
        for _ in range(int(request.messages[-1].content)):
            yield " word"


if __name__ == "__main__":
    server = litserve.LitServer(Repeat(spec=litserve.OpenAISpec()), accelerator="cpu")
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False
    )
