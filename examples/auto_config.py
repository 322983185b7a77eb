"""Client of `auto_config`: reads the inputs of a model without config.pbtxt, then calls it."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    texts = np.array([["to be or not to be"], ["that is the question"]], dtype=np.object_)
    tensor = grpcclient.InferInput("TEXT", texts.shape, "BYTES").set_data_from_numpy(texts)
    with grpcclient.InferenceServerClient(url) as client:
        for found in client.get_model_metadata("auto_config").inputs:
            print(f"input {found.name}: {found.datatype} {list(found.shape)}")
        words = client.infer("auto_config", [tensor]).as_numpy("WORDS")
    for (text,), (count,) in zip(texts, words, strict=True):
        print(f"{count} words: {text}")


if __name__ == "__main__":
    main()
