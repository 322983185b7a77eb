"""Converts the log probabilities of the vLLM backend to those of OpenAI."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LOWEST = -9999.0
"""What OpenAI gives for a probability of 0, whose logarithm JSON cannot have."""


class LogprobsWriter:
    """Writes the log probabilities of one choice, in the form of chats or of completions.

    `alternatives`: how many of the most likely tokens are listed for each token.
    """

    def __init__(self, is_chat: bool, alternatives: int) -> None:
        self._is_chat = is_chat
        self._alternatives = alternatives
        self._offset = 0  # characters of the tokens so far

    def write(self, tokens: list[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
        """Returns the log probabilities of the next tokens; None if there are none.

        Each token is an object of alternatives by token id, which have `decoded_token`, `logprob`
        and `rank`. The first alternative is the token of the text. Raises ValueError.
        """
        try:
            listed = [list(token.values()) for token in tokens if token]
            written = [self._chat(token) for token in listed] if self._is_chat else []
            if self._is_chat:
                return {"content": written, "refusal": None} if written else None
            return self._completion(listed) if listed else None
        except (AttributeError, TypeError) as error:
            raise ValueError(str(error)) from None

    def _chat(self, token: list[Mapping[str, Any]]) -> dict[str, Any]:
        top = [_entry(one) for one in self._most_likely(token)]
        return {**_entry(token[0]), "top_logprobs": top}

    def _completion(self, tokens: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(_text(token[0]))
        return {
            "tokens": [_text(token[0]) for token in tokens],
            "token_logprobs": [_logprob(token[0]) for token in tokens],
            "top_logprobs": [
                {_text(one): _logprob(one) for one in self._most_likely(token)} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _most_likely(self, token: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return sorted(token, key=_rank)[: self._alternatives]


def join_logprobs(first: Any, second: Any) -> Any:
    """Returns the log probabilities of two parts of one choice: their lists are joined."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first if second is None else second
    joined = {**first, **second}
    for name, values in first.items():
        if isinstance(values, list) and isinstance(second.get(name), list):
            joined[name] = values + second[name]
    return joined


def _entry(token: Mapping[str, Any]) -> dict[str, Any]:
    text = _text(token)
    return {"token": text, "logprob": _logprob(token), "bytes": list(text.encode())}


def _text(token: Mapping[str, Any]) -> str:
    return str(token.get("decoded_token") or "")


def _logprob(token: Mapping[str, Any]) -> float:
    value = float(token["logprob"] if token.get("logprob") is not None else _LOWEST)
    return value if math.isfinite(value) else _LOWEST


def _rank(token: Mapping[str, Any]) -> float:
    rank = token.get("rank")
    return rank if isinstance(rank, (int, float)) else math.inf


def wants_logprobs(fields: Mapping[str, Any]) -> bool:
    """Returns whether the client wants log probabilities; in completions, 0 means yes."""
    wanted = fields.get("logprobs")
    return wanted is not None and wanted is not False
