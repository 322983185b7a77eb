"""Streams a chat, asks an adapter for a text, and embeds a text."""

import argparse

from openai import OpenAI

QUESTION = [{"role": "user", "content": "Who are you?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000")
    client = OpenAI(base_url=f"http://{parser.parse_args().url}/v1", api_key="any")
    *chunks, counts = client.chat.completions.create(
        model="tiny_llama",
        messages=QUESTION,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    print("chat:", counts.usage.completion_tokens, "tokens")
    other = client.chat.completions.create(
        model="tiny_llama-loud", messages=QUESTION, max_tokens=40, temperature=0
    )
    print("the adapter writes another text:", other.choices[0].message.content != text)
    vector = client.embeddings.create(model="tiny_embed", input="Who are you?").data[0].embedding
    print("embedding:", len(vector), "numbers")


if __name__ == "__main__":
    main()
