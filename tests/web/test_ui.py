"""``/ui`` without a browser: its files, their policy, its state, keys and bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rota.errors import CommandError, RequestError
from rota.sched.sim.engine import sim_content, sim_text
from rota.sched.web.pulse import SECONDS, Pulse

pytestmark = pytest.mark.anyio
ADMIN = "admin-key-for-tests"
API = "api-key-for-tests"
A, B = b"tensors of a", b"tensors of b"


async def test_the_page_and_its_files_allow_nothing_from_elsewhere(serving: Any) -> None:
    async with serving() as face:
        page = await face.http.get("/ui")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        names = [w.split('"')[0] for w in page.text.split('"ui/')[1:]]
        assert {"app.js", "style.css", "mark.svg"} <= set(names)
        assert "://" not in page.text and " style=" not in page.text and "onclick" not in page.text
        for name in [*names, "dom.js", "view.js", "acts.js", "link.js", "chart.js"]:
            got = await face.http.get(f"/ui/{name}")
            assert got.status_code == 200, name
            policy = got.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'") and "unsafe" not in policy
            assert got.headers["x-content-type-options"] == "nosniff"
            if name.endswith(".js"):
                assert got.headers["content-type"].startswith("text/javascript")
                assert "innerHTML" not in got.text and "://" not in got.text.replace(
                    "http://www.w3.org/2000/svg", ""
                )
        for name in ("nothing", "..%2fui.py", "%2e%2e/ui.py", "style.css/x"):
            got = await face.http.get(f"/ui/{name}")
            assert (got.status_code, got.json()["error"]["code"]) == (404, "not-found")
    async with serving(ui=False) as face:
        assert (await face.http.get("/ui")).status_code == 404
        assert (await face.http.get("/ui/state")).status_code == 404


@pytest.mark.parametrize("ipc", [False, True])
async def test_the_state_says_who_is_where(serving: Any, adapter: Any, ipc: bool) -> None:
    async with serving(ipc=ipc) as face:
        await face.engine.load("a", adapter("a", A), pin=True)
        await face.engine.prefetch("b", adapter("b", B))
        await face.engine.register("<b>&", adapter("c", b"c"))
        await face.engine.rotate("a")
        got = await face.http.get("/ui/state")
        assert got.headers["cache-control"] == "no-store"
        state = got.json()
        slot = state["slots"][0]
        assert (slot["name"], slot["state"], slot["pinned"]) == ("a", "READY", True)
        where = {a["name"]: a["level"] for a in state["adapters"]}
        assert where == {"a": "device", "b": "host", "<b>&": "cold"}
        assert state["default"] == "a" and state["admin"] is True
        assert state["levels"] == {"device": 1, "host": 1, "cold": 1}
        assert state["pulse"]["first"] + len(state["pulse"]["bins"]) > 0


async def test_the_state_asks_for_a_key_where_v1_does(serving: Any) -> None:
    async with serving(api_keys=(API,), admin_keys=()) as face:
        assert (await face.http.get("/ui")).status_code == 200
        refused = await face.http.get("/ui/state")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
        headers = {"Authorization": f"Bearer {API}"}
        got = await face.http.get("/ui/state", headers=headers)
        assert got.status_code == 200 and got.json()["admin"] is False
        bad = await face.http.get("/ui/state?since=x", headers=headers)
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "bad-since")


async def test_the_state_is_bounded_and_many_pages_cost_one_look(
    serving: Any, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(engine={"max_loras": 300}) as face:
        path = adapter("a", A)
        await face.engine.load("loaded", path)
        for i in range(400):
            await face.engine.register(f"n{i}", path)
        looks = 0
        stats = face.engine.stats

        def counted() -> Any:
            nonlocal looks
            looks += 1
            return stats()

        monkeypatch.setattr(face.engine, "stats", counted)
        monkeypatch.setattr("rota.sched.web.ui._KEEP_S", 1e9)
        for _ in range(5):
            state = (await face.http.get("/ui/state")).json()
        assert looks == 1
        assert len(state["slots"]) == len(state["adapters"]) == 256
        assert (state["slots_total"], state["adapters_total"]) == (300, 401)
        assert state["adapters"][0]["name"] == "loaded"


@pytest.mark.parametrize("ipc", [False, True])
async def test_a_known_name_is_swapped_into_a_slot(serving: Any, adapter: Any, ipc: bool) -> None:
    async with serving(ipc=ipc) as face:
        await face.engine.load("a", adapter("a", A))
        await face.engine.register("b", adapter("b", B))
        got = await face.post("/v1/lora/swap", {"name": "b", "slot": 0}, ADMIN)
        reply = got.json()
        assert (got.status_code, reply["object"], reply["slot"]) == (200, "lora.swapped", 0)
        assert reply["evicted"] == "a"
        body = {"model": "b", "prompt": "abc", "max_tokens": 6}
        text = (await face.post("/v1/completions", body)).json()["choices"][0]["text"]
        assert text == sim_text(sim_content(B, b"{}"), 3, 6)
        got = await face.post("/v1/lora/swap", {"name": "nobody", "slot": 0}, ADMIN)
        assert (got.status_code, got.json()["error"]["code"]) == (404, "unknown-adapter")
        got = await face.post("/v1/lora/swap", {"name": "b", "slot": 99}, ADMIN)
        assert (got.status_code, got.json()["error"]["code"]) == (400, "bad-slot")
        with pytest.raises((CommandError, RequestError)):
            await face.engine.swap(["b"], None, 0)


async def test_tokens_that_pass_are_on_the_pulse(serving: Any) -> None:
    async with serving() as face:
        await face.post("/v1/completions", {"prompt": "abc", "max_tokens": 40, "stream": True})
        metrics = face.app.user_middleware[0].kwargs["metrics"]
        later = metrics.pulse._clock() + 2
        metrics.pulse._clock = lambda: later
        bins = (await face.http.get("/ui/state")).json()["pulse"]["bins"]
        assert sum(row[0] for row in bins) == 40


def test_a_pulse_is_a_ring_of_seconds() -> None:
    now = [1000.0]
    pulse = Pulse(lambda: now[0])
    for _ in range(99):
        pulse.add(1, 0.010)
    pulse.add(1, 1.0)
    pulse.add(3, None)
    assert pulse.since(-1)["bins"] == [[0, None, None]] * (SECONDS - 1), "a second under way"
    now[0] = 1002.0
    found: Any = pulse.since(999)
    assert found["first"] == 1000
    (tokens, median, late), quiet = found["bins"]
    assert tokens == 103 and quiet == [0, None, None]
    assert median == pytest.approx(10, rel=0.13) and late == pytest.approx(10, rel=0.13)
    assert pulse.since(1001)["bins"] == []
    far: Any = pulse.since(10**15)
    assert len(far["bins"]) == SECONDS - 1, "another server's second is no reason for silence"
    now[0] = 1000.0 + SECONDS
    pulse.add(7, 100.0)
    now[0] += 1
    newest: Any = pulse.since(int(now[0]) - 2)
    assert newest["bins"][0][0] == 7, "an old second's numbers are gone"
    assert msgspec.json.encode(newest)
