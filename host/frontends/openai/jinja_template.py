"""Renders Jinja chat templates in a sandbox, with limits of time and size.

Templates get what `apply_chat_template` of transformers gives them.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from host.frontends.openai.errors import OpenAIError, model_failure

if TYPE_CHECKING:
    from jinja2 import Template

Render = Callable[[Mapping[str, Any]], str]
"""Renders a template with its variables. Blocks. Raises OpenAIError."""


def compile_template(text: str, model: str, max_size: int) -> Render:
    """Compiles a template whose prompts have at most `max_size` characters.

    Raises ValueError for a syntax error, with its line.
    """
    from jinja2 import TemplateSyntaxError

    environment = _make_environment()
    try:
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

    def render(variables: Mapping[str, Any]) -> str:
        return _render(template, variables, model, max_size)

    return render


def _render(template: Template, variables: Mapping[str, Any], model: str, max_size: int) -> str:
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(variables):
            size += len(part)
            if size > max_size:
                raise OpenAIError(
                    f"the prompt has more than {max_size} characters; --http-max-input-size sets"
                    " the limit",
                    "content_too_large",
                    "messages",
                    413,
                )
            parts.append(part)
    except (OpenAIError, MemoryError):
        raise
    except Exception as error:  # a template can raise anything
        reason = f"{_line(error)}{type(error).__name__}: {error}"
        raise model_failure(f"the chat template of model '{model}' failed: {reason}") from None
    return "".join(parts)


def _line(error: Exception) -> str:
    """Returns the line of a template that raised, in the form `line 3: `; "" if it is unknown."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [number for frame, number in frames if frame.f_code.co_filename == "<template>"]
    return f"line {lines[-1]}: " if lines else ""


def _make_environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols

    from host.frontends.openai.jinja_sandbox import Sandbox

    class Generation(Extension):
        """Ignores the tag `generation`, which marks the texts of assistants for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without escapes of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(text: str) -> None:
    """Refuses the messages: templates call this."""
    raise OpenAIError(str(text), "invalid_value", "messages")
