"""`espalier completion SHELL`: prints a script that completes commands, their options and files."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Sequence

from espalier_cli.__main__ import COMMANDS
from espalier_cli.__main__ import main as run

SHELLS = ("bash", "zsh", "fish")
BASH = """_espalier() {
  local word="${COMP_WORDS[COMP_CWORD]}" options=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "%(commands)s" -- "$word"))
    return
  fi
  case "${COMP_WORDS[1]}" in
%(cases)s
  esac
  if [[ "$word" == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$word")); else COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _espalier espalier
"""


def main(arguments: Sequence[str], prog: str) -> int:
    """Print the script of a shell. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description="Print a script for a shell: `source <(espalier completion bash)`.")
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(arguments).shell
    options = {name: options_of(name) for name in COMMANDS}
    if shell == "fish":
        print("complete -c espalier -f -n __fish_use_subcommand")
        for name, command in COMMANDS.items():
            print(f"complete -c espalier -f -n __fish_use_subcommand -a {name} -d '{command.about.replace(chr(39), '')}'")
            for option in options[name]:
                print(f"complete -c espalier -n '__fish_seen_subcommand_from {name}' -l {option.removeprefix('--')}")
        return 0
    cases = "\n".join(f'    {name}) options="{" ".join(names)}" ;;' for name, names in options.items())
    script = BASH % {"commands": " ".join(COMMANDS), "cases": cases}
    print(f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script, end="")
    return 0


def options_of(command: str) -> list[str]:
    """The long options in a command's help; none if its packages are not installed."""
    if command == "completion":
        return []
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        run([command, "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", help_text.getvalue())))
