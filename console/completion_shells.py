"""One completion script per shell from what can follow what."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cluster.run_dir import runs_home
from console.completion_spec import FILES, RUNS, CommandSpec, Option, Value


def bash_script(specs: Sequence[CommandSpec]) -> str:
    """For ``complete -F``: two cases, what follows an option and what stands elsewhere."""
    top = " ".join(spec.path[0] for spec in specs if len(spec.path) == 1)
    inner = [spec for spec in specs if len(spec.path) == 2]
    lines = [
        "# pdconsole completion for bash",
        "_pdconsole() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" path="" word',
        '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '        case "$path/$word" in',
        *(f"            /{spec.path[0]}) path={spec.path[0]} ;;" for spec in specs if len(spec.path) == 1),
        *(f"            {spec.path[0]}/{spec.path[1]}) path={'/'.join(spec.path)} ;;" for spec in inner),
        "        esac",
        "    done",
        "    COMPREPLY=()",
        '    if [[ -z "$path" ]]; then',
        f'        COMPREPLY=($(compgen -W "{top} --help --version" -- "$cur"))',
        "        return",
        "    fi",
        '    case "$path:$prev" in',
    ]
    for spec in specs:
        for option in spec.options:
            if option.value is not None:
                names = "|".join(f"{'/'.join(spec.path)}:{name}" for name in option.names)
                lines.append(f"        {names}) {_bash_values(option.value)} return ;;")
    lines += ["    esac", '    if [[ "$cur" == -* ]]; then', '        case "$path" in']
    lines += [
        f'            {"/".join(spec.path)}) COMPREPLY=($(compgen -W "{_all_names(spec)}" -- "$cur")) ;;'
        for spec in specs
    ]
    lines += ["        esac", "        return", "    fi", '    case "$path" in']
    lines += [f"        {'/'.join(spec.path)}) {_bash_values(spec.place)} ;;" for spec in specs]
    lines += [
        "    esac",
        "}",
        "_pdconsole_runs() {",
        f'    local home="{_runs_directory()}"',
        '    [[ -d "$home" ]] && ls "$home"',
        "}",
        "complete -F _pdconsole pdconsole",
    ]
    return "\n".join(lines) + "\n"


def _bash_values(value: Value) -> str:
    words = " ".join(value.words)
    if value.more == RUNS:
        return f'compopt -o default; COMPREPLY=($(compgen -W "{words} $(_pdconsole_runs)" -- "$cur"));'
    if value.more == FILES:
        return f'compopt -o default; COMPREPLY=($(compgen -W "{words}" -- "$cur"; compgen -f -- "$cur"));'
    return f'COMPREPLY=($(compgen -W "{words}" -- "$cur"));' if words else "COMPREPLY=();"


def zsh_script(specs: Sequence[CommandSpec]) -> str:
    """``_arguments`` per command."""
    top = [spec for spec in specs if len(spec.path) == 1]
    lines = ["#compdef pdconsole", "# pdconsole completion for zsh", ""]
    lines += [
        "_pdconsole_runs() {",
        f'    local home="{_runs_directory()}"',
        "    local -a runs",
        '    [[ -d "$home" ]] && runs=("$home"/*(N:t))',
        '    (( $#runs )) && compadd -a runs; (( $# )) && compadd -- "$@"; _files -/',
        "}",
        "",
        '_pdconsole_files() { (( $# )) && compadd -- "$@"; _files }',
        "",
        "_pdconsole() {",
        '    local curcontext="$curcontext" state line',
        "    local -a commands=(",
        *(f"        {_quoted(f'{spec.path[0]}:{_no_colon(spec.help)}')}" for spec in top),
        "    )",
        "    _arguments -C '--help[show help]' '--version[show the version]' \\",
        "        '1:command:->command' '*::argument:->rest'",
        '    case "$state" in',
        "        command) _describe -t commands command commands ;;",
        "        rest)",
        '            case "$words[1]" in',
    ]
    for spec in top:
        inner = [other for other in specs if other.path[:1] == spec.path and len(other.path) == 2]
        lines.append(f"                {spec.path[0]})")
        if inner:
            names = " ".join(other.path[1] for other in inner)
            lines += [
                f"                    _arguments -C '1:what:({names})' '*::argument:->inner'",
                '                    if [[ "$state" == inner ]]; then',
                '                        case "$words[1]" in',
                *(f"                            {o.path[1]}) {_zsh_arguments(o)} ;;" for o in inner),
                "                        esac",
                "                    fi",
            ]
        else:
            lines.append(f"                    {_zsh_arguments(spec)}")
        lines.append("                    ;;")
    lines += ["            esac", "            ;;", "    esac", "}", "", '_pdconsole "$@"']
    return "\n".join(lines) + "\n"


def _zsh_arguments(spec: CommandSpec) -> str:
    words = ["_arguments"]
    for option in spec.options:
        text = re.sub(r"([\[\]:\\])", r"\\\1", option.help)
        for name in option.names:
            value = "" if option.value is None else f":value:{_zsh_values(option.value)}"
            words.append(_quoted(f"*{name}[{text}]{value}"))
    words.append(_quoted(f"*:value:{_zsh_values(spec.place)}"))
    return " ".join(words)


def _zsh_values(value: Value) -> str:
    """An action of ``_arguments``; with a space before it a function gets its words and nothing else."""
    words = " ".join(word.replace(":", r"\:") for word in value.words)
    if value.more == RUNS:
        return f" _pdconsole_runs {words}"
    if value.more == FILES:
        return f" _pdconsole_files {words}"
    return f"({words})" if words else " "


def fish_script(specs: Sequence[CommandSpec]) -> str:
    """One ``complete`` line per word, option and place."""
    top = [spec.path[0] for spec in specs if len(spec.path) == 1]
    lines = [
        "# pdconsole completion for fish",
        "function __pdconsole_runs",
        "    set -l home $PDCONSOLE_HOME/runs",
        f"    set -q PDCONSOLE_HOME; or set home {_quoted(str(runs_home()))}",
        "    test -d $home; and command ls $home",
        "end",
        "complete -c pdconsole -f",
        f"set -l commands {' '.join(top)}",
        'complete -c pdconsole -n "not __fish_seen_subcommand_from $commands" -l help',
        'complete -c pdconsole -n "not __fish_seen_subcommand_from $commands" -l version',
    ]
    for spec in specs:
        if len(spec.path) == 1:
            here = '"not __fish_seen_subcommand_from $commands"'
            lines.append(f"complete -c pdconsole -n {here} -a {spec.path[0]} -d {_quoted(spec.help)}")
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in spec.path)
        for option in spec.options:
            lines.append(f'complete -c pdconsole -n "{seen}" {_fish_option(option)}')
        is_outer = any(other.path[:1] == spec.path and len(other.path) == 2 for other in specs)
        if is_outer:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(spec.place.words)}"
        arguments = _fish_values(spec.place)
        if arguments:
            lines.append(f'complete -c pdconsole -n "{seen}" {arguments}')
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    words = [*names, "-d", _quoted(option.help)]
    if option.value is not None:
        words += ["-r" if option.value.more else "-x", _fish_values(option.value)]
    return " ".join(words).rstrip()


def _fish_values(value: Value) -> str:
    found = " ".join(value.words)
    if value.more == RUNS:
        found = f"{found} (__pdconsole_runs)".strip()
    files = "-F" if value.more else ""
    return f"{files} -a {_quoted(found)}".strip() if found else files


def _runs_directory() -> str:
    """For a shell that knows ${A:-B}: where runs are when the shell asks."""
    return "${PDCONSOLE_HOME:-" + str(runs_home().parent) + "}/runs"


def _all_names(spec: CommandSpec) -> str:
    return " ".join(_flat(option.names for option in spec.options))


def _flat(rows: Iterable[Iterable[str]]) -> list[str]:
    return [item for row in rows for item in row]


def _no_colon(text: str) -> str:
    return text.replace(":", r"\:")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


WRITERS: Final[dict[str, Callable[[Sequence[CommandSpec]], str]]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
