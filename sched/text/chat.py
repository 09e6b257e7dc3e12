"""Chat messages to a prompt, by the model's own Jinja template.

Owns the sandboxed template environment and the checks on messages. Invariants: a template cannot
reach Python objects or change its arguments; messages are plain JSON data, bounded in number and
depth, before a template sees them; output is bounded; every failure has a code.

The environment follows the conventions of Hugging Face's documentation on writing chat templates:
``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a
``tojson`` that leaves non-ASCII text and HTML characters alone, and ``{% generation %}``, which
marks assistant text for training and renders as its body.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import ModelError, RequestError
from .files import read_json, read_text, token_text

MAX_TEMPLATE_CHARS = 1 << 20
MAX_MESSAGES = 10_000
MAX_OUTPUT_CHARS = 4_000_000
_MAX_DEPTH = 24
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", *_TOKENS})


class _Refused(Exception):
    """The template itself refused the conversation (``raise_exception``)."""


class _Generation(Extension):
    """``{% generation %} body {% endgeneration %}`` renders as its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _bad(message: str, subject: str, expected: object, found: object) -> RequestError:
    return RequestError(
        message, code="bad-messages", subject=subject, expected=expected, found=found
    )


def _plain(value: Any, subject: str, depth: int = 0) -> Any:
    """A copy made of JSON types only, so that a template meets no object with behaviour."""
    if depth > _MAX_DEPTH:
        raise _bad("the chat is nested too deeply", subject, f"depth {_MAX_DEPTH}", "deeper")
    # Exact types: a subclass could carry behaviour into the template.
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if type(key) is not str:
                raise _bad("a key is not a string", subject, "string", type(key).__name__)
            copy[key] = _plain(item, subject, depth + 1)
        return copy
    if isinstance(value, list | tuple):
        return [_plain(item, subject, depth + 1) for item in value]
    raise _bad("a value is not JSON data", subject, "JSON data", type(value).__name__)


def _content(value: Any, subject: str) -> Any:
    """Content as one string: text parts are joined, since most templates take strings only."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _bad("content is not text", subject, "string or text parts", type(value).__name__)
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            found = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _bad("a content part is not text", subject, 'type "text"', found)
        texts.append(text)
    return "\n".join(texts)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain data: each a role, a content (string or ``None``), other JSON values.

    Raises:
        RequestError: ``bad-messages``.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise _bad("messages are not a list", "messages", "a list", type(messages).__name__)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise _bad("number of messages", "messages", f"1 to {MAX_MESSAGES}", len(messages))
    checked = []
    for i, message in enumerate(messages):
        subject = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise _bad("a message is not an object", subject, "object", type(message).__name__)
        copy = _plain(message, subject)
        role = copy.get("role")
        if not isinstance(role, str) or not 1 <= len(role) <= 64:
            raise _bad(
                "a message has no role", f"{subject}.role", "a short string", repr(role)[:80]
            )
        copy["content"] = _content(copy.get("content"), f"{subject}.content")
        if copy["content"] is None and not copy.get("tool_calls"):
            raise _bad("a message has no content", f"{subject}.content", "text", None)
        checked.append(copy)
    return checked


class ChatTemplate:
    """A model's chat template; a model without one keeps ``source`` ``None`` and refuses chats.

    Args:
        source: the template's text, or ``None``.
        tokens: ``bos_token``, ``eos_token`` and the like, as text.
        max_output_chars: limit of one prompt, in characters.
        clock: what ``strftime_now`` of a template reads.

    Raises:
        ModelError: ``template-failed`` when the template does not compile or is too long.
    """

    def __init__(
        self,
        source: str | None,
        tokens: Mapping[str, str] | None = None,
        *,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = dict(tokens or {})
        self._max_output_chars = max_output_chars
        self._template: jinja2.Template | None = None
        if source is None:
            return
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                "the chat template is too long",
                code="template-failed",
                subject="chat_template",
                expected=f"at most {MAX_TEMPLATE_CHARS} characters",
                found=len(source),
            )
        try:
            self._template = _environment(clock).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                "the chat template does not compile",
                code="template-failed",
                subject="chat_template",
                found=str(error),
            ) from error

    @classmethod
    def from_dir(cls, model_dir: str | os.PathLike[str]) -> ChatTemplate:
        """The template of a model directory.

        From ``chat_template.jinja``, else ``tokenizer_config.json`` (a string, or a list of named
        templates, of which ``default`` is taken), else ``chat_template.json``.

        Raises:
            ModelError: ``template-failed``, ``bad-model-file``.
        """
        directory = Path(model_dir)
        config = read_json(directory / "tokenizer_config.json") or {}
        source: Any = read_text(directory / "chat_template.jinja")
        if source is None:
            source = config.get("chat_template")
        if source is None:
            source = (read_json(directory / "chat_template.json") or {}).get("chat_template")
        if isinstance(source, list):
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if source is not None and not isinstance(source, str):
            raise ModelError(
                "the chat template is not text",
                code="template-failed",
                subject=str(directory),
                expected="string",
                found=type(source).__name__,
            )
        texts = {name: token_text(config.get(name)) for name in _TOKENS}
        return cls(source, {name: text for name, text in texts.items() if text is not None})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; tokenize it with ``add_special_tokens=False``.

        Args:
            messages: role, content (a string, or a list of text parts) and other JSON values each.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.
            tools: JSON schemas of tools, for templates that take them.
            extra: further variables of the template (``enable_thinking`` and the like).

        Raises:
            RequestError: ``no-chat-template``; ``bad-messages`` for malformed messages or a
                conversation the template refuses; ``prompt-too-long``; ``template-failed``.
        """
        if self._template is None:
            raise RequestError(
                "the model has no chat template; send a prompt instead of messages",
                code="no-chat-template",
                subject="chat_template",
            )
        variables = _plain(extra or {}, "template variables")
        taken = _RESERVED & variables.keys()
        if taken:
            raise _bad("a template variable's name is taken", min(taken), "another name", "taken")
        variables.update(self._tokens)
        variables["messages"] = check_messages(messages)
        variables["add_generation_prompt"] = add_generation_prompt
        variables["tools"] = None if tools is None else _plain(list(tools), "tools")
        try:
            return self._bounded(self._template, variables)
        except RequestError:
            raise
        except _Refused as error:
            raise RequestError(
                f"the chat template refuses the conversation: {str(error)[:500]}",
                code="bad-messages",
                subject="messages",
            ) from error
        # A template is a program: any exception can come out of it, and none may go further.
        except Exception as error:
            raise RequestError(
                "the chat template failed on this conversation",
                code="template-failed",
                subject="messages",
                found=f"{type(error).__name__}: {error}"[:500],
            ) from error

    def _bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > self._max_output_chars:
                raise RequestError(
                    "the conversation's prompt is too long",
                    code="prompt-too-long",
                    subject="messages",
                    expected=f"at most {self._max_output_chars} characters",
                    found="more",
                )
            pieces.append(piece)
        return "".join(pieces)
