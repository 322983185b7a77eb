"""Renders the messages of a chat as the prompt of a model, by Jinja in a sandbox with limits.

Templates get what `apply_chat_template` of transformers gives them.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from host.core import Core
from host.errors import HostError
from host.frontends.http.json_text import parse as parse_json
from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import Fields
from host.frontends.openai.model_files import BUILT_IN_TEMPLATES, ChatTemplate, OpenAIFiles, Render
from host.frontends.openai.openai_errors import (
    OpenAIError,
    invalid_value,
    model_failure,
    unsupported_route,
)
from host.frontends.openai.tool_calls import wanted_tools
from host.logs.formats import model_fields

if TYPE_CHECKING:
    from jinja2 import Template


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


_TIME_LIMIT = 5.0  # seconds of one rendering
_MAX_THREADS = 4
_MAX_TIMEOUTS = 3  # of one template
_MAX_PROBE_SIZE = 1 << 20

_log = logging.getLogger("pbhost")


class PromptRenderer:
    """Renders prompts by the templates of models, in threads. Belongs to the event loop.

    `max_size`: characters of a prompt. `on_refusal`: called when a version does not do chat any
    more, as its template ran for too long three times, for requests that are not large.
    """

    def __init__(self, core: Core, max_size: int, on_refusal: Callable[[], None]) -> None:
        self._core = core
        self._on_refusal = on_refusal
        self._max_size = max_size
        self._free_threads = asyncio.Semaphore(_MAX_THREADS)

    async def render(
        self, contract: Contract, fields: Fields, version: int, large: bool = False
    ) -> str:
        """Returns the prompt. Raises OpenAIError.

        `large`: the messages are many, so it is not the template's fault if they take long.
        """
        messages = fields["messages"]
        if contract.template in BUILT_IN_TEMPLATES:
            return render_built_in(contract.template, messages)
        files = self._core.extension(OpenAIFiles, contract.model, version)
        if files is None or files.template is None:
            raise unsupported_route(f"model '{contract.model}' has no chat template")
        if files.template.complaint:
            raise unsupported_route(files.template.complaint)
        async with self._free_threads:
            render = partial(self._render, contract.model, files, files.template, fields)
            try:
                return await run_with_time_limit(render, _TIME_LIMIT, contract.model)
            except TemplateTimeout:
                if not large:
                    self._record_timeout(contract.model, version, files)
                raise

    def _record_timeout(self, model: str, version: int, files: OpenAIFiles) -> None:
        """Takes chat from a model whose template ran for too long three times."""
        files.timeouts += 1
        if files.timeouts == _MAX_TIMEOUTS:
            files.chat_refusal = (
                f"model '{model}' does not do chat: its chat template ran for more than"
                f" {_TIME_LIMIT:g} s {files.timeouts} times; unload and load the model to try it"
                " again"
            )
            _log.error("%s", files.chat_refusal, extra=model_fields(model, max(version, 0)))
            self._on_refusal()

    def _render(
        self, model: str, files: OpenAIFiles, template: ChatTemplate, fields: Fields
    ) -> str:
        tools = wanted_tools(fields)
        text = template.tool_use_text if tools and template.tool_use_text else template.text
        render = files.renders.get(text)
        if render is None:
            try:
                render = files.renders[text] = compile_template(text, model, self._max_size)
            except ValueError as error:
                raise unsupported_route(f"the chat template of model '{model}': {error}") from None
        return render(_variables(template, text, fields))


def _variables(template: ChatTemplate, text: str, fields: Fields) -> dict[str, Any]:
    """Returns the variables of a template, whose text is `text`. Raises OpenAIError."""
    messages = [
        template_message(message, index, "developer" in text)
        for index, message in enumerate(fields["messages"])
    ]
    extra = fields.get("chat_template_kwargs")
    return {
        **template.special_tokens,
        **(extra if isinstance(extra, dict) else {}),
        "messages": messages,
        "tools": wanted_tools(fields),
        "tool_choice": fields.get("tool_choice"),
        "documents": fields.get("documents"),
        "add_generation_prompt": not (
            fields.get("continue_final_message") is True and messages[-1]["role"] == "assistant"
        ),
    }


async def probe_template(model: str, template: ChatTemplate) -> str:
    """Renders two messages; returns what is wrong with the template, with file and line.

    Returns "" if it renders, or if it refuses these messages by `raise_exception`.
    """
    system = {"role": "system", "content": "Be brief."}
    fields: Fields = {"messages": [system, {"role": "user", "content": "Hello"}]}
    tool = {"name": "probe", "parameters": {"type": "object", "properties": {}}}
    with_tools = {**fields, "tools": [{"type": "function", "function": tool}]}
    for text, probe in ((template.text, fields), (template.tool_use_text, with_tools)):
        try:
            render = partial(_render_once, text, model, _variables(template, text, probe))
            await run_with_time_limit(render, _TIME_LIMIT, model)
        except ValueError as error:
            return f"'{template.file}', {error}"
        except OpenAIError as error:
            if error.status >= 500:
                return f"'{template.file}': {error.message}"
    return ""


def _render_once(text: str, model: str, variables: dict[str, Any]) -> str:
    return compile_template(text, model, _MAX_PROBE_SIZE)(variables)


class TemplateTimeout(OpenAIError):
    """A template ran for too long."""


class _TimeLimitExceeded(SystemExit):
    """Ends the thread of a rendering; templates and Jinja do not catch it."""


async def run_with_time_limit(render: Callable[[], str], seconds: float, model: str) -> str:
    """Returns what `render` returns, run in a thread of its own, which the time limit ends.

    Raises OpenAIError if the time is over.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[str] = loop.create_future()

    def deliver(text: str | None, error: Exception | None) -> None:
        if result.done():  # the client has gone, or the time is over
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(text or "")

    def run() -> None:
        text: str | None = None
        error: Exception | None = None
        with suppress(RuntimeError, _TimeLimitExceeded):  # the loop is closed; the time is over
            try:
                text = render()
            except Exception as raised:  # raised again by the caller
                error = raised
            loop.call_soon_threadsafe(deliver, text, error)

    thread = threading.Thread(target=run, name="chat template", daemon=True)
    thread.start()
    try:
        return await asyncio.wait_for(result, seconds)
    except asyncio.TimeoutError:
        failure = model_failure(
            f"the chat template of model '{model}' ran for more than {seconds:g} s"
        )
        raise TemplateTimeout(
            failure.message, None, None, failure.status, failure.kind, failure.headers
        ) from None
    finally:
        if thread.is_alive() and thread.ident is not None and result.cancelled():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeLimitExceeded)
            )


def render_built_in(name: str, messages: list[dict[str, Any]]) -> str:
    """Renders messages by a built-in template."""
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
    """Returns the text of a message; the parts of an array are joined by newlines.

    Without content, the text is its refusal, or the transcript of its sound.
    """
    content = message.get("content")
    if not content:
        sound = message.get("audio") or {}
        return str(message.get("refusal") or sound.get("transcript") or "")
    if isinstance(content, str):
        return content
    return "\n".join(part[part["type"]] for part in content if part["type"] in ("text", "refusal"))


def _template_content(message: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Returns the text of a message; its parts, as vision templates take them, if it has images."""
    content = message.get("content")
    if not isinstance(content, list) or not any(part["type"] in _MEDIA for part in content):
        return message_text(message)
    return [
        {"type": _MEDIA[part["type"]]}
        if part["type"] in _MEDIA
        else {"type": "text", "text": str(part.get(part["type"], ""))}
        for part in content
    ]


_MEDIA = {"image_url": "image", "input_audio": "audio"}
"""The types of parts in templates, by those in messages."""


_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The reasoning of an assistant, as servers call it; templates know the first name."""


def template_message(message: dict[str, Any], index: int, knows_developer: bool) -> dict[str, Any]:
    """Returns a message as Jinja templates expect it: with no member that is null or empty.

    Raises OpenAIError.
    """
    changed = {name: value for name, value in message.items() if value is not None}
    changed["content"] = _template_content(message)
    if message["role"] == "developer" and not knows_developer:
        changed["role"] = "system"
    place = f"messages[{index}]"
    calls = [
        _template_call(call, f"{place}.tool_calls[{at}].function")
        for at, call in enumerate(changed.pop("tool_calls", ()))
    ]
    function = changed.pop("function_call", None)
    if function:
        calls.append(_template_call({"function": function}, f"{place}.function_call"))
    if calls:
        changed["tool_calls"] = calls
    if "tool_call_id" in changed:
        changed["tool_call_id"] = str(changed["tool_call_id"])
    for name in _REASONING:
        if isinstance(changed.get(name), str):
            changed.setdefault("reasoning_content", changed[name])
    return changed


def _template_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a call with its arguments as an object; `place` is that of its function."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        place = f"{place}.arguments"
        try:
            arguments = parse_json(arguments.encode())
        except HostError:
            raise invalid_value(f"'{place}' must be JSON", place) from None
    changed = {**call, "type": "function", "function": {**function, "arguments": arguments}}
    if call.get("id") is not None:
        changed["id"] = str(call["id"])
    return changed
