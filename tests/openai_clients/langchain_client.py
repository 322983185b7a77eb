"""Asks a server through LangChain: `langchain_client.py URL`; prints the answers as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def main(url: str) -> None:
    """Prints the answers to chats, whole, streamed, in a batch and asynchronous, and vectors."""
    chat = ChatOpenAI(model="letters", base_url=url, api_key="any", max_retries=0)
    # Without this check, token ids are made with a vocabulary from the internet.
    vectors = OpenAIEmbeddings(
        model="embed", base_url=url, api_key="any", check_embedding_ctx_length=False
    )
    answer = chat.invoke("Hel|lo")
    print(
        json.dumps(
            {
                "whole": answer.content,
                "usage": answer.usage_metadata["total_tokens"],
                "streamed": [chunk.content for chunk in chat.stream("Hel|lo") if chunk.content],
                "batch": [each.content for each in chat.batch(["a|b", "c|d"])],
                "async": asyncio.run(chat.ainvoke("x|y")).content,
                "documents": vectors.embed_documents(["a", "bb"]),
                "query": vectors.embed_query("ccc"),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
