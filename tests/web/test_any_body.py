"""Whatever a body says, the answer is a success or a named 4xx, and the engine is left idle."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx2
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rota.sched.sim.engine import SimEngine, sim_text
from rota.sched.web.app import create_app
from rota.sched.web.schemas import (
    ActiveBody,
    ChatRequest,
    CompletionRequest,
    LoadBody,
    LoadLoraAdapter,
    NameBody,
    UnloadBody,
)
from rota.sched.web.settings import HttpSettings

ADMIN = "admin-key-for-tests"
ROUTES: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/load_lora_adapter": LoadLoraAdapter,
    "/v1/lora/load": LoadBody,
    "/v1/lora/promote": NameBody,
    "/v1/lora/pin": NameBody,
    "/v1/lora/unload": UnloadBody,
    "/v1/lora/active": ActiveBody,
}
FIELDS = sorted({name for kind in ROUTES.values() for name in kind.__struct_fields__})

small = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, 2**64, 2**70, -(2**63)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
value = st.recursive(
    small,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
likely = {
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "x"]), "content": value}),
        max_size=3,
    ),
    "prompt": st.text(max_size=8)
    | st.lists(st.integers(-1, 300), max_size=6)
    | st.lists(st.text(max_size=4), max_size=4),
    "model": st.sampled_from(["base", "nobody", ""]),
    "max_tokens": st.integers(-1, 12),
    "n": st.integers(-1, 4),
    "stream": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=20),
    "path": st.sampled_from(["/", "/etc", "", "x", "/\0", "/" * 5000]),
    "name": st.text(max_size=5),
    "deadline_s": st.floats(-1, 1),
}
field = st.sampled_from(FIELDS).flatmap(
    lambda name: st.tuples(st.just(name), likely.get(name, value) | value)
)
body = value | st.lists(field, max_size=6).map(dict)


async def ask(route: str, content: Any) -> None:
    async with SimEngine() as engine:
        app = create_app(engine, HttpSettings(admin_keys=(ADMIN,), directories=("/nowhere",)))
        transport = httpx2.ASGITransport(app=app)
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://rota") as http:
            got = await http.post(route, content=json.dumps(content), headers=headers)
            assert got.status_code in (200, 400, 403, 404, 409), got.text
            if got.status_code != 200:
                assert got.json()["error"]["code"] not in ("error", "internal")
            with anyio.fail_after(20):
                while not engine.core.idle():
                    await anyio.lowlevel.checkpoint()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(ROUTES)), body)
@example("/v1/completions", {"prompt": [2**70]})
@example("/v1/completions", {"prompt": "x", "seed": -(2**70), "priority": 2**80})
@example("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]})
@example("/v1/lora/unload", {"name": "x", "deadline_s": -1e308})
def test_any_body_is_answered_or_refused_by_name(route: str, content: Any) -> None:
    anyio.run(ask, route, content)


def test_the_application_runs_on_trio_too() -> None:
    async def run() -> list[str]:
        async with SimEngine() as engine:
            transport = httpx2.ASGITransport(app=create_app(engine))
            async with httpx2.AsyncClient(transport=transport, base_url="http://rota") as http:
                body = {"prompt": "abc", "max_tokens": 5, "n": 2}
                whole = await http.post("/v1/completions", json=body)
                streamed = await http.post("/v1/completions", json=body | {"stream": True})
                lines = [line for line in streamed.text.split("\n\n") if line]
                assert lines.pop() == "data: [DONE]"
                parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
                for index, choice in enumerate(whole.json()["choices"]):
                    mine = "".join(p["text"] for p in parts if p["index"] == index)
                    assert mine == choice["text"]
                return [c["text"] for c in whole.json()["choices"]]

    assert anyio.run(run, backend="trio") == [sim_text("base", 3, 5)] * 2
