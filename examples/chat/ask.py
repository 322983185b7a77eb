"""Asks a model three questions at once, and counts the tokens of the answers."""

import argparse
import asyncio

from openai import AsyncOpenAI

QUESTIONS = ("Who are you?", "What is a token?", "Tell me more.")


async def ask(client: AsyncOpenAI, model: str, question: str, seed: int) -> str:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=30,
        seed=seed,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return f"{question} {len([piece for piece in pieces if piece])} tokens"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("--model", default="tiny_chat")
    arguments = parser.parse_args()
    async with AsyncOpenAI(base_url=f"http://{arguments.url}/v1", api_key="any") as client:
        answers = await asyncio.gather(
            *(
                ask(client, arguments.model, question, seed)
                for seed, question in enumerate(QUESTIONS)
            )
        )
        print("\n".join(answers))
        whole = await client.chat.completions.create(
            model=arguments.model,
            messages=[{"role": "user", "content": "Be brief."}],
            max_tokens=5,
            temperature=0,
        )
        print(whole.choices[0].finish_reason, whole.usage.completion_tokens)


if __name__ == "__main__":
    asyncio.run(main())
