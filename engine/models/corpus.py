"""Text to train on that every machine has: the running interpreter's own standard library.

Knows Python sources and docstrings; knows no tokens and no model. Everything is sorted, so one interpreter
version always yields the same corpus.
"""

import ast
import importlib
import inspect
import random
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END_OF_TURN = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN)
"""In the order of their ids, from 0."""
END_OF_TEXT_ID, END_OF_TURN_ID = 0, len(SPECIAL_TOKENS) - 1
END_IDS = (END_OF_TEXT_ID, END_OF_TURN_ID)
"""Tokens that end a sequence."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HELD_OUT = ("csv.py", "shlex.py", "statistics.py", "textwrap.py", "wave.py")
"""Modules only measured on, never trained on: small and large, prose-heavy and code-heavy."""

# Tests, other people's packages, generated character tables and icon folders teach a model nothing of Python.
EXCLUDED_DIRECTORIES = frozenset(
    ("test", "tests", "idle_test", "idlelib", "site-packages", "__pycache__", "encodings", "pydoc_data",
     "_bundled", "Icons", "config", "turtledemo")
)  # fmt: skip
EXCLUDED_FILES = frozenset(
    ("html/entities.py", "stringprep.py", "this.py", "antigravity.py", "tkinter/tix.py")
)
MAX_DIGIT_SHARE = 0.12  # above: a table, not prose or code
NATIVE_MODULES = (
    "builtins", "math", "cmath", "itertools", "operator", "time", "sys", "os", "errno", "zlib", "struct",
    "array", "binascii", "select", "socket", "_thread", "gc", "marshal", "hashlib", "_json", "collections",
)  # fmt: skip
"""Modules (partly) written in C, whose docstrings are in no source file."""

MIN_PIECE_CHARS, MAX_PIECE_CHARS = 80, 1600
MAX_ANSWER_CHARS = 1100
MAX_TOPIC_CHARS = 12_000


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its path below the library's root, and its text."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Chat:
    """One request and its answer."""

    user: str
    assistant: str

    def render(self) -> str:
        """The same text the chat template makes of these two messages."""
        return f"{USER}{self.user}{END_OF_TURN}{ASSISTANT}{self.assistant}{END_OF_TURN}"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents by kind. ``held_out`` shares no module with the other four."""

    modules: tuple[str, ...]  # whole files
    pieces: tuple[str, ...]  # single functions and classes: short documents, so that endings are common
    prose: tuple[str, ...]  # the language reference and the docstrings of native modules
    chats: tuple[str, ...]
    held_out: tuple[str, ...]


def read_modules(root: Path) -> list[Module]:
    """Every usable ``.py`` file below ``root``, sorted by name. Raises ValueError where there is none."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if EXCLUDED_DIRECTORIES.intersection(relative.parts[:-1]) or name in EXCLUDED_FILES:
            continue
        if any(part.startswith(("config-", "_sysconfigdata", "lib-dynload")) for part in relative.parts):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # deliberately broken samples exist in the library
        if source.strip() and sum(map(str.isdigit, source)) <= MAX_DIGIT_SHARE * len(source):
            modules.append(Module(name, source))
    if not modules:
        raise ValueError(f"corpus root {root} holds no usable Python source; expected a standard library")
    return modules


def longest_held_out(root: Path) -> str:
    """Source of the longest module that is never trained on. Raises OSError where it is missing."""
    texts = []
    for name in HELD_OUT:
        with tokenize.open(root / name) as file:
            texts.append(file.read())
    return max(texts, key=len)


def split_pieces(module: Module) -> list[str]:
    """Functions, methods and short classes of a module, each dedented to stand alone."""
    pieces = []
    for node in ast.walk(ast.parse(module.source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = _source_of(node, module.source)
            if MIN_PIECE_CHARS <= len(text) <= MAX_PIECE_CHARS:
                pieces.append(text)
    return pieces


def split_chats(module: Module, rng: random.Random) -> list[Chat]:
    """Requests in words with the function that answers them, from every documented function of a module."""
    chats = []
    dotted = module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(ast.parse(module.source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring, text = ast.get_docstring(node), _source_of(node, module.source)
        if not docstring or len(text) > MAX_ANSWER_CHARS:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        if len(summary) < 12:
            continue
        wish = summary[0].lower() + summary[1:].rstrip(".")
        arguments = ", ".join(argument.arg for argument in node.args.args if argument.arg != "self")
        requests = (
            summary,
            f"Write a Python function `{node.name}`: {wish}.",
            f"Write a function that does this: {wish}",
            f"Write `{node.name}({arguments})`. {summary}",
            f"Implement {node.name} in Python. {summary}",
        )
        chats.append(Chat(rng.choice(requests), text))
        if rng.random() < 0.25 and len(docstring) <= MAX_ANSWER_CHARS:
            chats.append(Chat(_question(f"{dotted}.{node.name}", rng), docstring))
    return chats


def reference_topics() -> dict[str, str]:
    """The language reference as ``help()`` shows it: topic name to text."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return {name: text.strip() for name, text in sorted(topics.items())}


def native_docstrings() -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of what native modules offer, which no source file shows."""
    for module_name in NATIVE_MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, member in sorted(vars(module).items()):
            docstring = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if docstring and len(docstring) > 40:
                yield prefix + name, docstring


def build_corpus(root: Path | None = None, seed: int = 0) -> Corpus:
    """The corpus below ``root`` (default: the running interpreter's library), the same for the same seed."""
    rng = random.Random(seed)
    everything = read_modules(root or Path(sysconfig.get_paths()["stdlib"]))
    trained = [module for module in everything if module.name not in HELD_OUT]
    prose: list[str] = []
    chats = [chat for module in trained for chat in split_chats(module, rng)]
    for name, text in reference_topics().items():
        prose.extend(_split_paragraphs(text, MAX_TOPIC_CHARS))
        answer = _split_paragraphs(text, MAX_ANSWER_CHARS)[0]
        chats.append(Chat(_question(f"the Python topic {name}", rng), answer))
    for name, docstring in native_docstrings():
        prose.append(f"{name}\n\n{docstring}")
        if len(docstring) <= MAX_ANSWER_CHARS:
            chats.append(Chat(_question(name, rng), docstring))
    return Corpus(
        modules=tuple(module.source for module in trained),
        pieces=tuple(dict.fromkeys(piece for module in trained for piece in split_pieces(module))),
        prose=tuple(dict.fromkeys(prose)),
        chats=tuple(dict.fromkeys(chat.render() for chat in chats)),
        held_out=tuple(module.source for module in everything if module.name in HELD_OUT),
    )


def _question(name: str, rng: random.Random) -> str:
    return rng.choice((f"What does {name} do?", f"Explain {name}.", f"What is {name}?", f"Describe {name}"))


def _source_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, source: str) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines(keepends=True)[first - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines)).rstrip() + "\n"


def _split_paragraphs(text: str, max_chars: int) -> list[str]:
    """Cut at blank lines into parts of at most ``max_chars`` (one longer paragraph stays whole)."""
    parts: list[str] = []
    for paragraph in text.split("\n\n"):
        if parts and len(parts[-1]) + len(paragraph) + 2 <= max_chars:
            parts[-1] += "\n\n" + paragraph
        else:
            parts.append(paragraph)
    return parts
