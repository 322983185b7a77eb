"""Renders the messages of a chat as the prompt of a model."""

from __future__ import annotations

from typing import Any

from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import Fields

BUILT_IN = ("chatml", "plain", "last")
"""The values of `OPENAI_CHAT_TEMPLATE` that name no file."""


def render_built_in(name: str, messages: list[dict[str, Any]]) -> str:
    """Render messages by a built-in template."""
    if name == "chatml":
        turns = [
            f"<|im_start|>{message['role']}\n{message_text(message)}<|im_end|>\n"
            for message in messages
        ]
        return "".join(turns) + "<|im_start|>assistant\n"
    if name == "plain":
        turns = [f"{message['role']}: {message_text(message)}\n" for message in messages]
        return "".join(turns) + "assistant:"
    users = [message for message in messages if message["role"] == "user"]
    return message_text(users[-1]) if users else ""


def message_text(message: dict[str, Any]) -> str:
    """Return the text of a message; the parts of an array are joined by newlines."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get(part["type"], "")) for part in content)


class PromptRenderer:
    """Renders the prompt of a chat by the template of its model."""

    async def render(self, contract: Contract, fields: Fields, version: int) -> str:
        """Return the prompt. Raises OpenAIError."""
        return render_built_in(contract.template, fields["messages"])
