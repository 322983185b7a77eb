"""What the names of tensors mean on the OpenAI routes: sources of inputs, meanings of outputs.

The rules are in docs/how-to/openai.md, How a model says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from host.frontends.openai.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    SPEECH,
    TRANSCRIPTIONS,
)

SOURCES = {
    "prompt": "prompt",
    "text_input": "prompt",
    "messages": "messages",
    "openai_request": "request",
    "input_ids": "tokens",
    "token_ids": "tokens",
    "input": "input",
    "text": "input",
    "texts": "input",
    "sampling_parameters": "sampling",
    "stream": "stream",
    "streaming": "stream",
    "exclude_input_in_output": "no_echo",
    "sampling_param_exclude_input_from_output": "no_echo",
    "return_finish_reason": "yes",
    "return_num_input_tokens": "yes",
    "return_num_output_tokens": "yes",
    "return_logprobs": "wants_logprobs",
    "return_cumulative_logprob": "nothing",
    "max_new_tokens": "max_tokens",
    "request_output_len": "max_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
    "bad_words": "nothing",
    "image": "images",
    "images": "images",
    "guided_decoding_guide_type": "guide_type",
    "guided_decoding_guide": "schema",
}
"""What fills an input, by its name in lowercase; other inputs take the field of their name."""

_GENERATION = (CHAT, COMPLETIONS)
ROUTES_OF_SOURCE: Mapping[str, Sequence[str]] = {
    "prompt": (CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, SPEECH),
    "messages": (CHAT,),
    "request": _GENERATION,
    "tokens": (COMPLETIONS,),
    "input": (EMBEDDINGS, SPEECH),
    "embedding_request": (EMBEDDINGS,),
    "images": (CHAT,),
    "audio": (CHAT, TRANSCRIPTIONS),
    "schema": (CHAT,),
    "guide_type": (CHAT,),
    "nothing": (),
    "stream": (*_GENERATION, TRANSCRIPTIONS),
    **dict.fromkeys(["sampling", "no_echo", "yes", "wants_logprobs"], _GENERATION),
}
"""The routes whose requests can fill an input, by source; for other sources, `KNOWN_FIELDS`."""

TEXT_SOURCES = ("prompt", "messages", "request", "sampling", "embedding_request")
"""The sources whose values are texts."""

MEANINGS = {
    **dict.fromkeys(
        ["text_output", "text", "generated_text", "output_text", "token", "completion"], "text"
    ),
    "openai_response": "response",
    "embedding": "embedding",
    "embeddings": "embedding",
    "sentence_embedding": "embedding",
    "finish_reason": "finish_reason",
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
    "logprobs": "logprobs",
    "tool_calls": "tool_calls",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
}
"""What an output means, by its name in lowercase."""

MEANINGS_OF_ROUTES = {
    TRANSCRIPTIONS: {name: name for name in ("segments", "words", "language", "duration")},
    IMAGES: dict.fromkeys(["image", "images"], "image"),
    SPEECH: dict.fromkeys(["audio", "speech"], "audio"),
}
"""Further meanings of outputs, by name, of models whose `OPENAI` lists a route."""
FILE_MEANINGS = {IMAGES: "image", SPEECH: "audio"}
"""The meaning of the output of a route whose answers are files."""
