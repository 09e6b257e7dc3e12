"""A headless Chromium and a simulated server for it; what is missing is named in the skip."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADMIN = "admin-key-for-tests"
_FETCHED = ROOT / ".cache" / "chromium"


def _chromium() -> str | None:
    if (_FETCHED / "chromium").exists():
        return str(_FETCHED / "chromium")
    return shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")  # its event loop occupies the main thread for as long as it is open
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed (.ci/browser installs it and runs these tests)")
    path = _chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (.ci/browser fetches one and runs these tests)")
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    libraries = _FETCHED / "lib"
    env: dict[str, str | float | bool] = {"LD_LIBRARY_PATH": str(libraries)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=flags, env=env if libraries.is_dir() else None
        )
        yield browser
        browser.close()


class Server:
    """The simulated server's process."""

    def __init__(self, root: Path, admin: str, api: str) -> None:
        self._root, self._admin, self._api = root, admin, api
        self._port = 0
        self._process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start, or start again on the same port."""
        command = [sys.executable, str(Path(__file__).with_name("sim_server.py")), str(self._root)]
        self._process = subprocess.Popen(
            [*command, str(self._port), self._admin, self._api],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready, port = self._process.stdout.readline().split()
        assert ready == "ready"
        self._port = int(port)

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., AbstractContextManager[Server]]:
    @contextmanager
    def run(admin: str = ADMIN, api: str = "") -> Iterator[Server]:
        server = Server(tmp_path, admin, api)
        server.start()
        try:
            yield server
        finally:
            server.kill()

    return run


class Screen:
    """A page, and everything that went wrong on it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: Any) -> None:
        # Refusals and lost connections are reported by the browser itself; they are no faults.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def give_key(self, key: str = ADMIN) -> None:
        self.page.locator("#key-dialog[open]").wait_for()
        self.page.fill("#key", key)
        self.page.keyboard.press("Enter")

    def adapter(self, name: str) -> Any:
        return self.page.locator("#adapters > li").filter(
            has=self.page.get_by_role("button", name=name, exact=True)
        )

    def slot(self, index: int) -> Any:
        return self.page.locator("#rack > li").nth(index)

    def done(self, words: str) -> None:
        """Wait until the activity says so."""
        self.page.locator("#activity > li:not(.busy)", has_text=words).first.wait_for()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Screen]]:
    """``look(url, **context) -> Screen``; at the end no script may have failed."""
    screens: list[Screen] = []

    def open_page(url: str, **options: Any) -> Screen:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        page = browser.new_context(**options).new_page()
        screen = Screen(page)
        screens.append(screen)
        page.goto(f"{url}/ui")
        page.locator("#link[data-kind]").wait_for()
        return screen

    yield open_page
    for screen in screens:
        screen.page.context.close()
        assert screen.faults == []
