"""Refuses the fields of requests that a model does not take."""

from __future__ import annotations

from typing import Any

from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import CHAT, Fields
from host.frontends.openai.inputs import SOURCE_OF_PART
from host.frontends.openai.openai_errors import invalid_value, unsupported_field
from host.frontends.openai.outputs import wants_logprobs
from host.frontends.openai.tool_calls import (
    demanded_functions,
    required_functions,
    wanted_schema,
    wanted_tools,
)

_NEED_AN_INPUT = ("logit_bias", "suffix", "audio", "prediction", "web_search_options")
"""Fields that change the kind of the answer: a model that does not take them is not asked."""


def prepare_fields(contract: Contract, fields: Fields, route: str) -> Fields:
    """Returns the fields with one name for each meaning. Raises OpenAIError.

    Refuses the fields that the model does not take, and that change the kind of its answer.
    """
    fields = dict(fields)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if contract.takes_whole_request:
        return fields
    for name in _NEED_AN_INPUT:
        # An input `audio` takes the sounds of messages, not the field.
        if name in fields and (name == "audio" or not contract.takes(name)):
            raise _not_taken(contract, name)
    _check_logprobs(contract, fields)
    if route == CHAT:
        _check_tools(contract, fields)
        if "response_format" in fields and not _takes_format(contract, fields["response_format"]):
            raise _not_taken(contract, "response_format")
    if "audio" in fields.get("modalities", ()) and not contract.takes("modalities"):
        raise _not_taken(contract, "modalities")
    if route == CHAT and not contract.takes("messages"):
        _check_parts(contract, fields["messages"])
        _check_sounds(fields["messages"])
    return fields


def _check_tools(contract: Contract, fields: Fields) -> None:
    """Refuses tools, and choices of tools, that the model does not take."""
    if not wanted_tools(fields):
        if not contract.takes("tool_choice"):
            fields.pop("tools", None)
        return
    if demanded_functions(contract, fields):
        return
    has_parser = contract.takes("prompt") and contract.template_takes_tools and contract.tool_parser
    if not contract.takes("tools") and not has_parser:
        raise _not_taken(contract, "tools")
    if required_functions(fields) and not (contract.takes("tool_choice") or has_parser):
        raise _not_taken(contract, "tool_choice")


def _check_logprobs(contract: Contract, fields: Fields) -> None:
    if not wants_logprobs(fields):
        return
    by_sampling = contract.takes("sampling") and contract.gives("logprobs")
    if not by_sampling and not contract.takes("logprobs"):
        raise _not_taken(contract, "logprobs")
    if fields.get("echo"):
        raise invalid_value("'logprobs' cannot be combined with 'echo'", "logprobs")


def _takes_format(contract: Contract, value: Any) -> bool:
    """Returns whether the answers of a model can have a format."""
    if value["type"] == "text" or contract.takes("response_format") or contract.takes("sampling"):
        return True
    return contract.takes("schema") and wanted_schema({"response_format": value}) is not None


def _not_taken(contract: Contract, name: str) -> Exception:
    return unsupported_field(
        f"model '{contract.model}' does not take '{name}': it has no input '{name}' or"
        " 'openai_request'",
        name,
    )


def _check_parts(contract: Contract, messages: list[Any]) -> None:
    for index, message in enumerate(messages):
        content = message.get("content")
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            source = SOURCE_OF_PART.get(part["type"])
            is_text = part["type"] in ("text", "refusal")
            if not is_text and (source is None or not contract.takes(source)):
                place = f"messages[{index}].content[{part_index}]"
                raise unsupported_field(
                    f"model '{contract.model}' does not take '{place}': it has no input for it",
                    place,
                )


def _check_sounds(messages: list[Any]) -> None:
    """Refuses sounds of assistants without a text, which are sent as the ids of stored ones."""
    for index, message in enumerate(messages):
        sound = message.get("audio")
        if sound and not isinstance(sound.get("transcript"), str):
            place = f"messages[{index}].audio"
            raise unsupported_field(
                f"'{place}' has no 'transcript': this server stores no sounds", place
            )
