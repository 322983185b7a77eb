"""Asks two questions: one with OpenAI's client, and one over gRPC, with the passages found."""

from openai import OpenAI

import pbhost

with OpenAI(base_url="http://localhost:8000/v1", api_key="any") as client:
    messages = [{"role": "user", "content": "When does the library open on Saturdays?"}]
    stream = client.chat.completions.create(model="answers", messages=messages, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="")
print()

with pbhost.Client("localhost:8001") as client:
    for part in client.stream("answers", prompt="What does it cost when a book is late?"):
        print(part["text"][0].decode(), end="")
print("\n\nfrom:")
print(part["source"][0].decode())
