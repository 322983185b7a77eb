"""Which functions an answer may or must call, and the JSON schema that its text must follow."""

from __future__ import annotations

from typing import Any

from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import Fields


def wanted_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Returns the tools that the answer may call; None if it may call none."""
    return fields.get("tools") if fields.get("tool_choice") != "none" else None


def demanded_functions(contract: Contract, fields: Fields) -> list[dict[str, Any]]:
    """Returns the functions that the answer must choose from, as a schema says to the model.

    Returns none if the model takes tools itself, or cannot follow a schema.
    """
    follows_schema = contract.takes("sampling") or contract.takes("schema")
    if contract.takes("tools") or not follows_schema:
        return []
    return required_functions(fields)


def required_functions(fields: Fields) -> list[dict[str, Any]]:
    """Returns the functions that the answer must choose from; none if it may be a text."""
    functions = [tool["function"] for tool in wanted_tools(fields) or ()]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return [function for function in functions if function["name"] == name][:1]
    return functions if choice == "required" else []


def wanted_schema(fields: Fields) -> Any:
    """Returns the JSON schema of `response_format`; None if it has none."""
    form = fields.get("response_format", {})
    return form["json_schema"].get("schema") if form.get("type") == "json_schema" else None


def demanded_schema(contract: Contract, fields: Fields) -> Any:
    """Returns the JSON schema that the text of the answer must follow; None if there is none."""
    functions = demanded_functions(contract, fields)
    if not functions:
        return wanted_schema(fields)
    if len(functions) == 1:
        return _parameters(functions[0])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "parameters": _parameters(one)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    return {"anyOf": calls}


def _parameters(function: dict[str, Any]) -> Any:
    return function.get("parameters") or {"type": "object"}
