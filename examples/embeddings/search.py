"""Finds the sentence that is most similar to a question, by the embeddings of `letter_pairs`."""

import argparse

import numpy as np
from openai import OpenAI

SENTENCES = [
    "Bread is baked from flour and water.",
    "The train to York leaves at ten.",
    "Whales are the largest animals of the sea.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("question", nargs="?", default="When is the next train leaving for York?")
    arguments = parser.parse_args()
    with OpenAI(base_url=f"http://{arguments.url}/v1", api_key="any") as client:
        answer = client.embeddings.create(
            model="letter_pairs", input=[arguments.question, *SENTENCES]
        )
    question, *sentences = np.array([entry.embedding for entry in answer.data])
    print(SENTENCES[int(np.argmax(np.array(sentences) @ question))])


if __name__ == "__main__":
    main()
