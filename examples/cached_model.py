"""Client of `cached_model`: sends the same request three times; only the first is computed."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def counted(client: grpcclient.InferenceServerClient) -> "tuple[int, int]":
    seen = client.get_inference_statistics("cached_model").model_stats[0]
    return seen.execution_count, seen.inference_stats.cache_hit.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    number = np.array([600_851_475_143], dtype=np.int64)
    tensor = grpcclient.InferInput("N", number.shape, "INT64").set_data_from_numpy(number)
    with grpcclient.InferenceServerClient(parser.parse_args().url) as client:
        computed, kept = counted(client)
        for _ in range(3):
            factor = client.infer("cached_model", [tensor]).as_numpy("LARGEST_FACTOR")
        print(f"the largest prime factor of {number[0]} is {factor[0]}")
        now_computed, now_kept = counted(client)
    print(f"computed: {now_computed - computed}, from the cache: {now_kept - kept}")


if __name__ == "__main__":
    main()
