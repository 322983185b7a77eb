"""Asks a server through LlamaIndex: `llama_index_client.py URL`; prints the answers as JSON."""

from __future__ import annotations

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def main(url: str) -> None:
    """Prints the answers to a chat, a completion, both streamed, and vectors."""
    model = OpenAILike(
        model="letters", api_base=url, api_key="any", is_chat_model=True, max_retries=0
    )
    plain = OpenAILike(
        model="letters", api_base=url, api_key="any", is_chat_model=False, max_retries=0
    )
    vectors = OpenAILikeEmbedding(model_name="embed", api_base=url, api_key="any")
    messages = [ChatMessage(role="user", content="Hel|lo")]
    print(
        json.dumps(
            {
                "chat": model.chat(messages).message.content,
                "streamed": [part.delta for part in model.stream_chat(messages) if part.delta],
                "completion": plain.complete("a|b").text,
                "pieces": [part.delta for part in plain.stream_complete("a|b") if part.delta],
                "vectors": vectors.get_text_embedding_batch(["a", "bb"]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
