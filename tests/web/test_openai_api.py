"""OpenAI's API: shapes checked by OpenAI's own types, and by its own client over a real socket."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import rota
from rota.sched.sim.engine import sim_content, sim_text
from rota.sched.web.schemas import ChatRequest, CompletionRequest, sampling_of

pytestmark = pytest.mark.anyio
A = b"tensors of a"
HI = [{"role": "user", "content": "hi"}]
HI_TOKENS = len("<user>hi<assistant>")


def text(tensors: bytes | None, prompt: int, n: int) -> str:
    return sim_text("base" if tensors is None else sim_content(tensors, b"{}"), prompt, n)


def events(body: str) -> list[Any]:
    lines = [line for line in body.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("ipc", [False, True])
async def test_chat_whole(serving: Any, ipc: bool) -> None:
    async with serving(ipc=ipc) as face:
        await face.engine.load("a", (A, b"{}"))
        for model, tensors in (("a", A), ("base", None), (None, None)):
            body = {"messages": HI, "max_completion_tokens": 9, "temperature": 0}
            body |= {} if model is None else {"model": model}
            got = await face.post("/v1/chat/completions", body)
            assert got.status_code == 200, got.text
            answer = ChatCompletion.model_validate(got.json(), strict=True)
            assert answer.choices[0].message.content == text(tensors, HI_TOKENS, 9)
            assert answer.choices[0].finish_reason == "length"
            assert answer.model == (model or "base")
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (HI_TOKENS, 9)


@pytest.mark.parametrize("ipc", [False, True])
async def test_chat_streamed_with_usage_n_and_logprobs(serving: Any, ipc: bool) -> None:
    async with serving(ipc=ipc) as face:
        got = await face.post(
            "/v1/chat/completions",
            {
                "model": "base",
                "messages": HI,
                "max_tokens": 7,
                "n": 3,
                "seed": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
                "logprobs": True,
                "top_logprobs": 2,
            },
        )
        assert got.headers["content-type"].startswith("text/event-stream")
        chunks = [ChatCompletionChunk.model_validate(c, strict=True) for c in events(got.text)]
        assert len({c.id for c in chunks}) == 1
        for index in range(3):
            mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
            assert mine[0].delta.role == "assistant"
            assert "".join(c.delta.content or "" for c in mine) == text(None, HI_TOKENS, 7)
            assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
            shown = [t for c in mine if c.logprobs for t in c.logprobs.content or []]
            assert "".join(t.token for t in shown) == text(None, HI_TOKENS, 7)
            assert all(len(t.top_logprobs) == 2 and t.logprob == -0.5 for t in shown)
            assert all(bytes(t.bytes or []).decode() == t.token for t in shown)
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 21
        assert all(c.usage is None for c in chunks[:-1])


async def test_completions_text_ids_lists_and_logprobs(serving: Any) -> None:
    async with serving() as face:
        for prompt, sizes in (
            ("abc", [3]),
            ([1, 2], [2]),
            (["abc", "de"], [3, 2]),
            ([[1], [1, 2]], [1, 2]),
        ):
            body = {"model": "base", "prompt": prompt, "max_tokens": 5, "logprobs": 1}
            got = await face.post("/v1/completions", body)
            answer = Completion.model_validate(got.json(), strict=True)
            assert [c.text for c in answer.choices] == [text(None, s, 5) for s in sizes]
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.text_offset == [0, 1, 2, 3, 4]
            assert "".join(logprobs.tokens or []) == answer.choices[0].text
        got = await face.post("/v1/completions", {"prompt": "abc", "stream": True})
        # OpenAI's own stream says null until the end, which its published type leaves out.
        parts = [c["choices"][0] for c in events(got.text)]
        assert "".join(p["text"] for p in parts) == text(None, 3, 16)
        reasons = [p["finish_reason"] for p in parts]
        assert reasons == [None] * (len(parts) - 1) + ["length"]
        Completion.model_validate(events(got.text)[-1], strict=True)


async def test_stop_strings_end_the_text(serving: Any) -> None:
    async with serving() as face:
        whole = text(None, 3, 40)
        stop = whole[10:12]
        body = {"prompt": "abc", "max_tokens": 40, "stop": [stop]}
        got = (await face.post("/v1/completions", body)).json()
        assert got["choices"][0]["text"] == whole[: whole.index(stop)]
        assert got["choices"][0]["finish_reason"] == "stop"
        streamed = await face.post("/v1/completions", body | {"stream": True})
        parts = [c["choices"][0]["text"] for c in events(streamed.text)]
        assert "".join(parts) == whole[: whole.index(stop)]


async def test_adapter_field_goes_before_model(serving: Any) -> None:
    async with serving() as face:
        await face.engine.load("a", (A, b"{}"))
        await face.engine.rotate("a")
        for body, tensors in (
            ({"model": "base", "adapter": "a"}, A),
            ({"model": "a", "adapter": None}, None),
            ({"model": "base"}, None),
            ({}, A),
        ):
            got = await face.post("/v1/completions", body | {"prompt": "abc"})
            assert got.json()["choices"][0]["text"] == text(tensors, 3, 16), body


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, "unknown-adapter", None),
        ({"model": "nobody", "prompt": "x", "stream": True}, 404, "unknown-adapter", None),
        ({"prompt": "x", "temperature": -1}, 400, "bad-temperature", "temperature"),
        ({"prompt": "x", "top_p": 7}, 400, "bad-top-p", "top_p"),
        ({"prompt": "x", "max_tokens": "5"}, 400, "bad-request", "max_tokens"),
        ({"prompt": "x", "tempersture": 1}, 400, "bad-request", "tempersture"),
        ({"prompt": "x", "n": 0}, 400, "bad-n", "n"),
        ({"prompt": "x", "n": 1000}, 400, "bad-n", "n"),
        ({"prompt": "x", "echo": True}, 400, "unsupported-parameter", "echo"),
        ({"prompt": "x", "suffix": "y"}, 400, "unsupported-parameter", "suffix"),
        ({"prompt": "x", "logit_bias": {"1": 2}}, 400, "unsupported-parameter", "logit_bias"),
        ({"prompt": "x", "logprobs": 99}, 400, "bad-logprobs", "logprobs"),
        ({"prompt": []}, 400, "bad-prompt", "prompt"),
        ({"prompt": [1, "x"]}, 400, "bad-prompt", "prompt"),
        ({"prompt": ""}, 400, "empty-prompt", None),
        ({"prompt": "x" * 3000}, 400, "prompt-too-long", None),
        ({}, 400, "bad-request", "prompt"),
        ([], 400, "bad-request", None),
    ],
)
async def test_refusals_come_before_anything_else_in_openai_shape(
    serving: Any, body: Any, status: int, code: str, param: str | None
) -> None:
    async with serving() as face:
        got = await face.post("/v1/completions", body)
        error = got.json()["error"]
        assert (got.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["message"] and error["type"] and error["rota"]["kind"]
        await face.settled()


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"tools": [{"type": "function"}]}, "unsupported-parameter"),
        ({"response_format": {"type": "json_object"}}, "unsupported-parameter"),
        ({"top_logprobs": 3}, "bad-logprobs"),
        ({"messages": []}, "bad-messages"),
        ({"messages": [{"role": "user"}]}, "bad-messages"),
    ],
)
async def test_chat_refusals(serving: Any, more: Any, code: str) -> None:
    async with serving() as face:
        got = await face.post("/v1/chat/completions", {"messages": HI} | more)
        assert (got.status_code, got.json()["error"]["code"]) == (400, code)


def test_every_sampling_field_reaches_the_sampler() -> None:
    body: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [4, 5],
        "stop": ["a", "b"],
        "seed": -1,
    }
    want = rota.SamplingParams(
        **body | {"stop": ("a", "b"), "stop_token_ids": (4, 5), "seed": 2**64 - 1}, n=3, logprobs=2
    )
    chat = body | {"messages": HI, "logprobs": True, "top_logprobs": 2}
    assert sampling_of(msgspec.convert(chat, ChatRequest), 3, 100) == want
    plain = body | {"prompt": "x", "logprobs": 2}
    assert sampling_of(msgspec.convert(plain, CompletionRequest), 3, 100) == want
    newer = chat | {"max_completion_tokens": 5}
    assert sampling_of(msgspec.convert(newer, ChatRequest), 3, 100).max_tokens == 5
    room = msgspec.convert({"messages": HI}, ChatRequest)
    assert sampling_of(room, 1, 100).max_tokens == 100, "a chat may use all the room"
    assert sampling_of(room, 1, 100).temperature == 1.0


async def test_neutral_fields_change_nothing(serving: Any) -> None:
    async with serving() as face:
        neutral = {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "none",
            "logit_bias": {},
            "temperature": None,
            "stop": None,
        }
        got = await face.post("/v1/chat/completions", {"messages": HI, "max_tokens": 4} | neutral)
        assert got.json()["choices"][0]["message"]["content"] == text(None, HI_TOKENS, 4)


@pytest.mark.parametrize("ipc", [False, True])
async def test_the_official_client_over_a_real_socket(serving: Any, ipc: bool) -> None:
    async with serving(socket=True, ipc=ipc, engine={"step_s": 0.001}) as face:
        await face.engine.load("a", (A, b"{}"))
        async with openai.AsyncOpenAI(
            base_url=f"{face.base_url}/v1", api_key="any", max_retries=0
        ) as client:
            models = [m async for m in client.models.list()]
            assert [m.id for m in models] == ["base", "a"]
            assert (await client.models.retrieve("a")).id == "a"
            chat = await client.chat.completions.create(
                model="a", messages=[{"role": "user", "content": "hi"}], max_tokens=6
            )
            assert chat.choices[0].message.content == text(A, HI_TOKENS, 6)
            stream = await client.completions.create(
                model="base", prompt="abc", max_tokens=6, stream=True
            )
            assert "".join([c.choices[0].text async for c in stream]) == text(None, 3, 6)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.completions.create(model="nobody", prompt="abc")
            assert caught.value.code == "unknown-adapter"
            # cancelled mid-stream
            long = await client.completions.create(
                model="a", prompt="abc", max_tokens=1500, stream=True
            )
            async for _ in long:
                break
            await long.close()
            with anyio.fail_after(10):
                await face.settled()


async def test_a_disconnect_cancels_a_whole_answer_too(serving: Any) -> None:
    async with serving(socket=True, engine={"step_s": 0.001}) as face:
        with anyio.move_on_after(0.1) as scope:
            await face.post("/v1/completions", {"prompt": "abc", "max_tokens": 2000, "n": 4})
        assert scope.cancelled_caught
        with anyio.fail_after(10):
            await face.settled()
        assert face.engine.stats().tokens < 8000


async def test_a_thousand_connections_come_and_go_and_leave_nothing(serving: Any) -> None:
    # The log of stories is bounded; a short one has filled before anything is counted.
    async with serving(socket=True, engine={"log_size": 64}) as face:
        host, port = face.base_url.removeprefix("http://").split(":")
        body = b'{"prompt": "abc", "max_tokens": 2000, "stream": true}'
        post = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

        async def cycle(times: int) -> None:
            for i in range(times):
                async with await anyio.connect_tcp(host, int(port)) as stream:
                    await stream.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" if i % 2 else post)
                    assert b" 200 " in await stream.receive()
            await face.settled()

        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        def blocks() -> int:
            gc.collect()
            return sys.getallocatedblocks()

        async def flat(count: Callable[[], int], limit: int) -> None:
            # A closed socket's last callbacks may still be on their way.
            with anyio.fail_after(20):
                while count() > limit:
                    await anyio.lowlevel.checkpoint()

        await cycle(20)
        gc.collect()
        before = descriptors()
        objects, tasks = len(gc.get_objects()), len(anyio.get_running_tasks())
        await cycle(500)
        await flat(descriptors, before)
        # By now caches of the first connections have filled: one object kept a connection shows.
        held = blocks()
        await cycle(500)
        await flat(descriptors, before)
        await flat(blocks, held + 125)
        assert len(anyio.get_running_tasks()) <= tasks
        assert len(gc.get_objects()) < objects + 1000


async def test_many_streams_while_adapters_are_replaced(serving: Any) -> None:
    names = [f"a{i}" for i in range(8)]
    async with serving(socket=True, engine={"max_loras": 10}) as face:
        for name in names:
            await face.engine.load(name, (name.encode(), b"{}"))
        versions = {n: {text(n.encode(), 3, 30), text(n.encode() + b"2", 3, 30)} for n in names}
        seen: list[tuple[str, str]] = []

        async def one(name: str) -> None:
            got = await face.post(
                "/v1/completions",
                {"model": name, "prompt": "abc", "max_tokens": 30, "stream": True},
            )
            seen.append((name, "".join(c["choices"][0]["text"] for c in events(got.text))))

        async def replace(name: str) -> None:
            for i in range(4):
                await face.engine.replace(name, (name.encode() + (b"2" if i % 2 else b""), b"{}"))

        async with anyio.create_task_group() as tasks:
            for i in range(100):
                tasks.start_soon(one, names[i % 8])
            for name in names:
                tasks.start_soon(replace, name)
        assert len(seen) == 100
        assert all(got in versions[name] for name, got in seen), "one answer, one version"


async def test_models_lists_base_resident_staged_and_cold(serving: Any, adapter: Any) -> None:
    async with serving() as face:
        await face.engine.load("org/a@v1", (A, b"{}"), pin=True)
        await face.engine.register("cold", adapter("cold", b"c"))
        await face.engine.prefetch("staged", adapter("staged", b"s"))
        listed = (await face.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        for entry in listed["data"]:
            Model.model_validate(entry, strict=True)
        by_id = {m["id"]: m for m in listed["data"]}
        states = {i: (m["state"], m["parent"]) for i, m in by_id.items()}
        assert states == {
            "base": ("base", None),
            "org/a@v1": ("resident", "base"),
            "cold": ("cold", "base"),
            "staged": ("staged", "base"),
        }
        assert by_id["org/a@v1"]["pinned"]
        got = await face.http.get("/v1/models/org/a@v1")
        assert got.json()["id"] == "org/a@v1"
        assert (await face.http.get("/v1/models/none")).status_code == 404
