"""Counts the tokens of requests whose models count none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from host.frontends.openai.model_files import TokenCounter
from host.frontends.openai.outputs import usage_object

_MAX_INLINE_CHARACTERS = 2048
"""Characters that are counted in the event loop; this takes about a millisecond."""


class UsageCounter:
    """Counts the prompts and the texts of one request by the tokenizer of its model.

    `rendered`: a chat template made the prompt, with its special tokens. `texts` has the pieces of
    each call; calls of one prompt follow each other.
    """

    def __init__(
        self,
        counter: TokenCounter,
        prompts: Sequence[str | list[int] | None],
        rendered: bool,
        calls: int,
    ) -> None:
        self.texts: list[list[str]] = [[] for _ in range(calls)]
        self._counter = counter
        self._prompts = prompts
        self._rendered = rendered

    async def count(self, free_threads: asyncio.Semaphore) -> dict[str, Any] | None:
        """Returns the usage; None if a text is too long. Counts long texts in a thread."""
        prompts = sum(len(prompt) for prompt in self._prompts if prompt is not None)
        if prompts + sum(len(piece) for text in self.texts for piece in text) <= (
            _MAX_INLINE_CHARACTERS
        ):
            return self._count()
        async with free_threads:
            return await asyncio.to_thread(self._count)

    def _count(self) -> dict[str, Any] | None:
        prompt = [
            len(prompt)
            if isinstance(prompt, list)
            else self._counter.count(prompt or "", special_tokens=not self._rendered)
            for prompt in self._prompts
        ]
        texts = [self._counter.count("".join(text), special_tokens=False) for text in self.texts]
        counts = [count for count in prompt + texts if count is not None]
        if len(counts) < len(prompt) + len(texts):
            return None
        return usage_object(sum(counts[: len(prompt)]), sum(counts[len(prompt) :]))
