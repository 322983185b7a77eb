"""`pbhost chat`: a conversation with a model of a running server."""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from host.cli.arguments import EXIT_FAILED, errors_end, parse_texts
from host.cli.server_client import ConnectionOptions, ServerClient, check_timeout
from host.errors import HostError, internal, unavailable
from host.logs.formats import escape_control_characters
from host.options.flags import FlagGroup, integer

_ABOUT = """\
Sends each line of the input to a model with a chat API, and prints its answer as it arrives. URL is
the address of the server's HTTP port, by default http://localhost:8000. Ctrl-C ends an answer, and
Ctrl-D the conversation.

examples:
  pbhost chat parrot
  echo 'Tell me a joke' | pbhost chat http://models.example:8000 llama --max-tokens=100

exit status: 0 all answers are complete; 1 the server does not answer, or a request has failed; 2
the command line is invalid"""


_group = FlagGroup("Chat")


@dataclass
class ChatOptions(ConnectionOptions):
    """The flags of `pbhost chat`."""

    system: str = _group("", "First message of the conversation, with the role system.")
    max_tokens: int = _group(0, "Tokens of an answer at most; 0: the model decides.", integer(0))
    temperature: float = _group(-1.0, "Temperature; -1: the model decides.")
    timeout: float = _group(
        60.0, "Seconds without a part of the answer, at most.", check=check_timeout
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """Talks until the end of the input and exits."""
    (url, model), options = parse_texts(arguments, "chat [URL] MODEL", _ABOUT, ChatOptions)
    with errors_end("chat"):
        client = ServerClient(url, options, options.timeout)
    messages: list[dict[str, str]] = []
    if options.system:
        messages.append({"role": "system", "content": options.system})
    at_terminal = sys.stdin.isatty()
    try:
        failed = _talk(client, model, messages, options, at_terminal)
    except KeyboardInterrupt:
        failed = True
    except BrokenPipeError:  # the reader has enough; nothing more can be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        failed = True
    sys.exit(EXIT_FAILED if failed else 0)


def _talk(
    client: ServerClient,
    model: str,
    messages: list[dict[str, str]],
    options: ChatOptions,
    at_terminal: bool,
) -> bool:
    """Sends each line; whether a request has failed. Raises KeyboardInterrupt without terminal."""
    failed = False
    for line in _read_lines(at_terminal):
        messages.append({"role": "user", "content": line})
        try:
            answer = _ask(client, model, messages, options, at_terminal)
        except HostError as error:
            sys.stdout.flush()
            sys.stderr.write(f"pbhost chat: {error.message}\n")
            failed = True
            if not at_terminal:
                break
            messages.pop()  # the next line may do better
            continue
        messages.append({"role": "assistant", "content": answer})
    return failed


def _read_lines(at_terminal: bool) -> Iterator[str]:
    """Yields the lines of the input that are not empty."""
    if at_terminal:
        import readline  # noqa: F401  # lets `input` edit lines
    while True:
        try:
            line = input("> " if at_terminal else "")
        except EOFError:
            if at_terminal:
                sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            sys.stdout.write("\n")
            return
        if line.strip():
            yield line


def _ask(
    client: ServerClient,
    model: str,
    messages: list[dict[str, str]],
    options: ChatOptions,
    at_terminal: bool,
) -> str:
    """Prints an answer as it arrives, and returns it. Raises HostError."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if options.max_tokens:
        body["max_tokens"] = options.max_tokens
    if options.temperature >= 0:
        body["temperature"] = options.temperature
    parts: list[str] = []
    try:
        with client.stream("/v1/chat/completions", json.dumps(body).encode()) as response:
            for part in _read_parts(response):
                parts.append(part)
                sys.stdout.write(escape_control_characters(part))
                sys.stdout.flush()
    except KeyboardInterrupt:  # the connection is closed, which cancels the request
        if not at_terminal:
            raise
    except BrokenPipeError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise unavailable(f"the answer has ended early: {error}") from error
    finally:
        if parts:
            sys.stdout.write("\n")
    return "".join(parts)


def _read_parts(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yields the parts of an answer. Raises HostError for an error, and for an early end."""
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[len(b"data: ") :].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise internal(str(event["error"]["message"]))
            choices = event["choices"]
            text = choices[0]["delta"].get("content") if choices else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise internal("unexpected answer: it is no stream of a chat API") from error
        if text:
            yield text
    raise unavailable("the answer has ended early: the server has closed the connection")
