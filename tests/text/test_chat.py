"""Chat templates: conventions, sandbox, limits, refusals by name."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rota.errors import ModelError, RequestError
from rota.sched.text import ChatTemplate

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def refusal(template: ChatTemplate, messages: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        template.render(messages, **options)
    return caught.value


def test_blocks_are_trimmed_and_the_last_newline_is_dropped() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'user' %}\n"
        "U: {{ m.content }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}\nA:\n{% endif %}\n"
    )
    template = ChatTemplate(source)
    assert template.render(HI) == "U: hi\nA:\n"
    assert template.render(HI, add_generation_prompt=False) == "U: hi\n"


def test_loop_controls_special_tokens_and_extra_variables() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content }}{% endfor %}{{ eos_token }}{{ '+' if enable_thinking }}{{ tools }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(HI * 2, extra={"enable_thinking": True}) == "<s>hi</s>+None"


def test_tojson_keeps_text_as_it_is() -> None:
    template = ChatTemplate("{{ tools | tojson }}|{{ tools | tojson(indent=1) }}")
    tools = [{"name": "é<&'", "x": 1}]
    expected = f"{json.dumps(tools, ensure_ascii=False)}|"
    expected += json.dumps(tools, ensure_ascii=False, indent=1)
    assert template.render(HI, tools=tools) == expected


def test_generation_blocks_render_as_their_body() -> None:
    template = ChatTemplate("a{% generation %}{{ messages[0].content }}{% endgeneration %}b")
    assert template.render(HI) == "ahib"


def test_strftime_now_reads_the_clock_it_was_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 7, 26))
    assert template.render(HI) == "26 Jul 2024"


def test_text_parts_are_joined_and_tool_calls_may_stand_without_content() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert template.render([{"role": "user", "content": parts}, call]) == "[a\nb][None]"


def test_messages_are_not_changed_by_rendering() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    ChatTemplate("{{ messages[0].content }}").render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "subject"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (HI * 10_001, "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"content": "x"}], "messages[1].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "u" * 65, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0]"),
        ([{"role": "user", "content": "x", 3: "y"}], "messages[0]"),
        ([{"role": "user", "content": "x", "extra": nested(30)}], "messages[0]"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, subject: str) -> None:
    error = refusal(ChatTemplate("{{ messages | length }}"), messages)
    assert (error.code, error.subject) == ("bad-messages", subject)


def test_template_variables_cannot_take_the_names_of_others() -> None:
    error = refusal(ChatTemplate("x"), HI, extra={"messages": []})
    assert (error.code, error.subject) == ("bad-messages", "messages")


def test_a_model_without_a_template_refuses_chats_only_when_asked(tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(tmp_path)
    assert template.source is None
    assert refusal(template, HI).code == "no-chat-template"


def test_a_template_can_refuse_a_conversation() -> None:
    error = refusal(ChatTemplate("{{ raise_exception('roles must alternate') }}"), HI)
    assert error.code == "bad-messages"
    assert "roles must alternate" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_named(source: str) -> None:
    error = refusal(ChatTemplate(source), HI)
    assert error.code == "template-failed"
    assert error.found


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "x" * ((1 << 20) + 1)])
def test_a_template_that_does_not_compile_refuses_the_model(source: str) -> None:
    with pytest.raises(ModelError) as error:
        ChatTemplate(source)
    assert error.value.code == "template-failed"


def test_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    assert len(ChatTemplate(source, max_output_chars=2000).render(HI)) == 2000
    error = refusal(ChatTemplate(source, max_output_chars=1999), HI)
    assert error.code == "prompt-too-long"


def test_template_comes_from_the_jinja_file_then_the_tokenizer_config(model_dir: Path) -> None:
    assert ChatTemplate.from_dir(model_dir).render(HI) == "<|user|>hi"
    (model_dir / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert ChatTemplate.from_dir(model_dir).render(HI) == "J<|end|>"


def test_named_templates_and_the_old_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert ChatTemplate.from_dir(tmp_path).render(HI) == "old"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_dir(tmp_path).render(HI) == "d"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ModelError) as error:
        ChatTemplate.from_dir(tmp_path)
    assert error.value.code == "template-failed"
