"""`pbhost completion`: prints the completion of the command line for a shell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from host.cli.arguments import EXIT_USAGE, NoOptions, fail, parse_texts
from host.options.flags import Flag, Status, flags_of
from host.options.server_flags import FLAGS

_ABOUT = """Print the completion of commands, flags and values for a shell: bash, zsh or fish.

bash: source <(pbhost completion bash)
zsh:  source <(pbhost completion zsh), after compinit
fish: pbhost completion fish | source"""

_COMMANDS = (
    *("new", "run", "infer", "chat", "bench", "check", "config", "tune", "models", "wait"),
    *("crashes", "stacks", "top", "doctor", "record", "replay", "ray"),
)
_Commands = Mapping[str, Sequence[Flag]]


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints the script of a shell and exits."""
    (shell,), _ = parse_texts(arguments, "completion SHELL", _ABOUT, NoOptions)
    scripts = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in scripts:
        fail("completion", f"expected bash, zsh or fish, got '{shell}'", EXIT_USAGE)
    sys.stdout.write(scripts[shell](_commands()))
    sys.exit(0)


def _commands() -> dict[str, list[Flag]]:
    """The flags of each command, without those that have no effect or are refused."""
    return {
        "serve": [flag for flag in FLAGS if flag.status is Status.HONOURED],
        **{command: _flags(command) for command in _COMMANDS},
        "completion": [],
        "version": [],
    }


def _flags(command: str) -> list[Flag]:
    """The flags of a command: those of the class for its options in the module of its name."""
    module = import_module(f".{command}", __package__)
    return flags_of(getattr(module, f"{command.capitalize()}Options"))


def _words(flags: Sequence[Flag]) -> str:
    """The flags as a shell completes them: those with a value end with `=`."""
    return " ".join(
        ["--help", *(f"--{flag.name}{'=' if flag.kind.word else ''}" for flag in flags)]
    )


def _bash(commands: _Commands) -> str:
    flags = "\n".join(
        f"        {command}) flags='{_words(known)}' ;;" for command, known in commands.items()
    )
    values = "\n".join(
        f"        '{command} --{flag.name}') values='{' '.join(flag.choices)}' ;;"
        for command, known in commands.items()
        for flag in known
        if flag.choices
    )
    return f"""\
# Completion of pbhost for bash: source <(pbhost completion bash)
_pbhost() {{
    local command=${{COMP_WORDS[1]}} current=${{COMP_WORDS[COMP_CWORD]}} flag='' flags='' values=''
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W '{" ".join(commands)} --help' -- "$current"))
        return
    fi
    # bash takes "=" for a word of its own.
    if [[ $current == '=' ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-1]}} current=''
    elif [[ ${{COMP_WORDS[COMP_CWORD-1]}} == '=' ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ ${{COMP_WORDS[COMP_CWORD-1]}} == --* && $current != -* ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-1]}}
    fi
    case "$command $flag" in
{values}
    esac
    if [[ $command == completion ]]; then
        values='bash zsh fish'
    fi
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$current"))
        return
    fi
    if [[ $current != -* ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
    fi
    case "$command" in
{flags}
    esac
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
    if [[ ${{COMPREPLY[0]}} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete -F _pbhost pbhost
"""


def _zsh(commands: _Commands) -> str:
    cases = "\n".join(
        f"        {command})\n            _arguments -S {' '.join(map(_zsh_flag, known))}"
        f" '*:file:{'(bash zsh fish)' if command == 'completion' else '_files'}' ;;"
        for command, known in commands.items()
    )
    return f"""\
#compdef pbhost
# Completion of pbhost for zsh: source <(pbhost completion zsh)
_pbhost() {{
    if (( CURRENT == 2 )); then
        compadd -- {" ".join(commands)}
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
compdef _pbhost pbhost
"""


def _zsh_flag(flag: Flag) -> str:
    """A specification of `_arguments`."""
    help = _first_sentence(flag)
    for character in "\\[]:":
        help = help.replace(character, f"\\{character}")
    repeated = "*" if flag.kind.add is not None else ""
    value = ""
    if flag.kind.word:
        choices = f"({' '.join(flag.choices)})" if flag.choices else "_files"
        value = f":{flag.kind.word}:{choices}"
    equals = "=" if flag.kind.word else ""
    return shlex.quote(f"{repeated}--{flag.name}{equals}[{help}]{value}")


def _fish(commands: _Commands) -> str:
    lines = [
        "# Completion of pbhost for fish: pbhost completion fish | source",
        f"complete -c pbhost -f -n __fish_use_subcommand -a '{' '.join(commands)}'",
        "complete -c pbhost -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'",
    ]
    for command, known in commands.items():
        for flag in known:
            line = f"complete -c pbhost -n '__fish_seen_subcommand_from {command}' -l {flag.name}"
            if flag.choices:
                line += f" -x -a '{' '.join(flag.choices)}'"
            elif flag.kind.word:
                line += " -r"
            lines.append(f"{line} -d {shlex.quote(_first_sentence(flag))}")
    return "\n".join(lines) + "\n"


def _first_sentence(flag: Flag) -> str:
    return flag.help.partition(". ")[0].rstrip(".").replace("'", "")
