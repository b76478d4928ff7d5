"""Completion of the command line for a shell, made from the commands' own options.

bash:  pdconsole completion bash > ~/.local/share/bash-completion/completions/pdconsole
zsh:   pdconsole completion zsh  > a file _pdconsole in a directory of $fpath
fish:  pdconsole completion fish > ~/.config/fish/completions/pdconsole.fish
"""

import argparse

from console.completion_shells import WRITERS
from console.completion_spec import command_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(WRITERS), metavar="SHELL", help=", ".join(WRITERS))


def run(args: argparse.Namespace) -> int:
    """Print the script. Exit code 0."""
    print(WRITERS[args.shell](command_specs()), end="")
    return 0
