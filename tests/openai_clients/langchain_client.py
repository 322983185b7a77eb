"""Asks a server through LangChain: `langchain_client.py URL`; prints the answers as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


class Report(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """Returns the weather in a city."""
    return f"sunny in {city}"


def main(url: str) -> None:
    """Prints the answers to chats, whole, streamed, in a batch and asynchronous, and vectors."""
    chat = ChatOpenAI(model="letters", base_url=url, api_key="any", max_retries=0)
    # Without this check, token ids are made with a vocabulary from the internet.
    vectors = OpenAIEmbeddings(
        model="embed", base_url=url, api_key="any", check_embedding_ctx_length=False
    )
    talker = ChatOpenAI(model="talker", base_url=url, api_key="any", max_retries=0)
    answer = chat.invoke("Hel|lo")
    (call,) = talker.bind_tools([weather]).invoke(CALL).tool_calls
    report = talker.with_structured_output(Report, method="json_schema")
    print(
        json.dumps(
            {
                "whole": answer.content,
                "usage": answer.usage_metadata["total_tokens"],
                "streamed": [chunk.content for chunk in chat.stream("Hel|lo") if chunk.content],
                "batch": [each.content for each in chat.batch(["a|b", "c|d"])],
                "async": asyncio.run(chat.ainvoke("x|y")).content,
                "documents": vectors.embed_documents(["a", "bb"]),
                "call": [call["name"], call["args"], weather(**call["args"])],
                "structured": report.invoke('{"city": "Oslo", |"degrees": 3}').model_dump(),
                "query": vectors.embed_query("ccc"),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
