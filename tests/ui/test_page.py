"""The live page, looked at and clicked in a headless Chromium."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx2
import pytest

HOSTILE = '<img src=x onerror="document.title=1">'
ADMIN = "admin-key-for-tests"


def texts(locator: Any) -> list[str]:
    return [t.strip() for t in locator.all_inner_texts()]


def test_slots_and_adapters_are_shown_and_names_are_only_text(serve: Any, look: Any) -> None:
    with serve() as server:
        screen = look(server.url)
        page = screen.page
        assert page.title() == "rota · sim-model"
        assert page.inner_text("#link") == "live"
        assert [t.split()[0] for t in texts(page.locator("#rack .index"))] == ["0", "1", "2", "3"]
        assert texts(screen.slot(0).locator(".name")) == ["sql"]
        assert "idle" in screen.slot(0).inner_text() and "pinned" in screen.slot(0).inner_text()
        assert "empty" in screen.slot(3).inner_text()
        names = texts(page.locator("#adapters .name"))
        assert sorted(names) == sorted(["sql", "legal", "pirate", HOSTILE])
        assert page.locator("#adapters img, #rack img").count() == 0
        screen.adapter(HOSTILE).locator(".name").click()
        assert page.inner_text("#adapter-title") == HOSTILE
        assert page.title() == "rota · sim-model"


def test_buttons_ask_for_the_admin_key_and_act(serve: Any, look: Any) -> None:
    with serve() as server:
        screen = look(server.url)
        page = screen.page
        screen.adapter("pirate").get_by_role("button", name="Promote").click()
        screen.give_key("a-wrong-key-of-nobody")
        page.locator("#key-why", has_text="not an admin key").wait_for()
        screen.give_key()
        screen.done("pirate is on the device; slot 2, generation 1")
        screen.slot(2).locator(".name", has_text="pirate").wait_for()
        assert "slot 2" in screen.adapter("pirate").inner_text()
        pin = screen.slot(2).locator(".pin")
        assert pin.get_attribute("aria-pressed") == "false"
        pin.click()
        screen.slot(2).locator(".pin[aria-pressed=true]").wait_for()
        screen.adapter("legal").get_by_role("button", name="More about legal").click()
        unload = page.locator("#adapter-dialog [data-do=unload]")
        unload.click()
        assert unload.inner_text() == "Unload now", "one press does not unload"
        unload.click()
        screen.done("legal is unloaded")
        screen.slot(1).locator(".none").wait_for()
        assert screen.adapter("legal").count() == 0
        screen.adapter("pirate").locator(".name").click()
        page.locator("#adapter-dialog [data-do=default]").click()
        screen.done("pirate is the default")
        page.locator("#t-default", has_text="pirate").wait_for()
        page.click("#adapters li:has-text('sql') .name")
        page.click("#story summary")
        page.locator("#story-lines li", has_text="COMMITTING").wait_for()


def test_load_replace_and_a_refusal_with_its_code(serve: Any, look: Any, tmp_path: Any) -> None:
    with serve() as server:
        for name in ("fresh", "second"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text("{}")
            (tmp_path / name / "adapter_model.safetensors").write_text(f"content of {name}")
        screen = look(server.url)
        page = screen.page
        page.click("#key-button")
        screen.give_key()
        screen.slot(3).get_by_role("button", name="Load here").click()
        assert page.input_value("#load-slot") == "3"
        page.fill("#load-name", "new one")
        page.fill("#load-path", str(tmp_path / "fresh"))
        page.keyboard.press("Enter")
        screen.done("new one is loaded; slot 3, generation 1")
        screen.slot(3).locator(".name", has_text="new one").wait_for()
        screen.slot(3).locator(".name").click()
        page.fill("#adapter-path", str(tmp_path / "second"))
        page.keyboard.press("Enter")
        screen.done("new one has a new version")
        screen.adapter("new one").locator(".gen", has_text="g2").wait_for()
        screen.adapter("sql").locator(".name").click()
        page.fill("#adapter-path", "/etc")
        page.click("[data-do=replace]")
        screen.done("not in the allow-list")
        assert texts(page.locator("#activity code"))[0] == "path-not-allowed"
        toast = page.locator("#toasts .bad")
        assert "path-not-allowed" in toast.inner_text()
        toast.get_by_role("button", name="Dismiss").click()
        assert toast.count() == 0


def test_an_adapter_dragged_onto_a_slot_is_put_there(serve: Any, look: Any) -> None:
    with serve() as server:
        screen = look(server.url)
        page = screen.page
        page.click("#key-button")
        screen.give_key()
        screen.adapter("pirate").drag_to(screen.slot(1))
        screen.done("pirate is in its slot; slot 1, generation 1; legal left")
        screen.slot(1).locator(".name", has_text="pirate").wait_for()
        # And without a mouse.
        screen.adapter("legal").locator(".name").press("Enter")
        page.locator("#adapter-slot").select_option("3")
        page.locator("[data-do=swap]").press("Enter")
        screen.done("legal is in its slot; slot 3")


def test_staging_is_shown_while_it_goes_on(serve: Any, look: Any) -> None:
    with serve() as server:
        screen = look(server.url)
        page = screen.page
        server.tell("hold")
        screen.adapter("pirate").get_by_role("button", name="Promote").click()
        screen.give_key()
        steps = screen.adapter("pirate").locator(".steps")
        steps.wait_for()
        assert steps.get_attribute("aria-label") == "promote: reading and packing"
        assert page.locator("#activity li.busy", has_text="Promoting pirate").count() == 1
        server.tell("release")
        screen.done("pirate is on the device")
        steps.wait_for(state="hidden")


def test_a_lost_connection_is_shown_and_healed(serve: Any, look: Any) -> None:
    with serve() as server:
        screen = look(server.url)
        page = screen.page
        server.kill()
        page.locator("#banner", has_text="unreachable: the server cannot be reached").wait_for()
        assert page.inner_text("#link") == "lost"
        assert page.locator("body.stale").count() == 1
        server.start()
        page.locator("#link[data-kind=live]").wait_for()
        page.locator("#toasts", has_text="Connected again").wait_for()
        assert page.locator("#banner").is_hidden()
        assert page.locator("body.stale").count() == 0


def test_a_server_with_api_keys_is_looked_at_with_one(serve: Any, look: Any) -> None:
    with serve(admin="", api="api-key-for-tests") as server:
        screen = look(server.url)
        page = screen.page
        screen.give_key("not-the-right-key")
        page.locator("#key-why", has_text="not a key of this server").wait_for()
        screen.give_key("api-key-for-tests")
        screen.adapter("sql").wait_for()
        note = page.locator("#adapters-more", has_text="without an admin key")
        note.wait_for()
        assert page.get_by_role("button", name="Promote").count() == 0
        assert page.locator("#load-button").is_hidden()


def test_tokens_are_drawn(serve: Any, look: Any) -> None:
    with serve() as server:
        over = threading.Event()

        def traffic() -> None:
            body = {"prompt": "abc", "adapter": "sql", "max_tokens": 100, "stream": True}
            with httpx2.Client(base_url=server.url, timeout=30) as http:
                while not over.is_set():
                    http.post("/v1/completions", json=body).raise_for_status()

        thread = threading.Thread(target=traffic)
        thread.start()
        try:
            screen = look(server.url)
            page = screen.page
            page.locator("#rate[aria-label*='tokens per second']").wait_for()
            page.locator("#gap[aria-label*='99th percentile']").wait_for()
            page.locator("#t-gap", has_text="ms").wait_for()
            assert page.locator("#gap path.line").count() == 2
            page.locator("#rate").hover(position={"x": 300, "y": 50})
            assert "tokens per second" in page.locator("#rate .tip").text_content()
            page.locator("#rack li[data-state=IN_USE] .dots i").first.wait_for()
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(serve: Any, look: Any, width: int) -> None:
    with serve() as server:
        screen = look(server.url, viewport={"width": width, "height": 780})
        page = screen.page
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) == 0
        screen.adapter("sql").locator(".name").click()
        box = page.locator("#adapter-dialog").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        page.keyboard.press("Escape")
        assert page.locator("#adapter-dialog").is_hidden()
        assert page.evaluate("document.activeElement.textContent") == "sql", "focus comes back"


def luminance(colour: str) -> float:
    parts = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


_COLOURS = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const names = ["ink", "muted", "empty", "staging", "ready", "in-use", "draining", "bad", "good"];
  const of = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  return Object.fromEntries([...names, "panel", "ground", "accent", "on-accent", "bad-soft"].map((n) => [n, of(n)]));
}"""  # noqa: E501  # a script as the page gets it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_motion_can_be_turned_off(serve: Any, look: Any, scheme: str) -> None:
    with serve() as server:
        screen = look(server.url, color_scheme=scheme, reduced_motion="reduce")
        colours = screen.page.evaluate(_COLOURS)

        def contrast(a: str, b: str) -> float:
            low, high = sorted((luminance(colours[a]), luminance(colours[b])))
            return (high + 0.05) / (low + 0.05)

        for name in ("ink", "muted", "empty", "staging", "ready", "in-use", "draining", "bad"):
            assert contrast(name, "panel") >= 4.5, name
        for pair in (("muted", "ground"), ("on-accent", "accent"), ("bad", "bad-soft")):
            assert contrast(*pair) >= 4.5, pair
        moving = "document.getAnimations().length"
        assert screen.page.evaluate(moving) == 0
