"""Chat messages to prompt text, by the model's own Jinja template. Templates run in a sandbox: they are not trusted."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.model_ids import ModelError, read_json

PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""For models without a template: the contents of the messages, one after the other."""


class ChatTemplateError(ValueError):
    """The template refused these messages, or is broken; the message is its own."""


class ChatTemplate:
    """A compiled template. ``special_tokens`` (``bos_token``, ...) are visible to it, as Hugging Face does.

    Raises ChatTemplateError if the source is not a valid template.
    """

    def __init__(self, source: str = PLAIN_TEMPLATE, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of ``messages`` (each with ``role`` and ``content``). Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error


def read_chat_template(path: Path) -> ChatTemplate:
    """The template of a Hugging Face directory: ``chat_template.jinja``, else the one in ``tokenizer_config.json``.

    A directory without either gets PLAIN_TEMPLATE. Raises ModelError for a file that cannot be used.
    """
    config_file = path / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    special_tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    template_file = path / "chat_template.jinja"
    source: Any = (
        template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    )
    if isinstance(source, list):  # several named ones
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    try:
        return ChatTemplate(PLAIN_TEMPLATE if source is None else source, special_tokens)
    except ChatTemplateError as error:
        raise ModelError(f"{path}: {error}") from error


def _token_text(value: Any) -> str:
    """A special token is stored as text or as an object with its text in ``content``; unset ones are null."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
