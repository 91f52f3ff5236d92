"""The page in a browser: no errors, no requests, working sliders, readable on a phone."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: install the system's package chromium"),
]
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Visit:
    """An open page with its console messages and requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path) -> "Visit":
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        return self

    def fetched(self) -> list[str]:
        """Requested addresses other than files and data."""
        return [url for url in self.requests if not url.startswith(("data:", "file:"))]

    def width(self) -> tuple[int, int]:
        """Widths of the content and of the window."""
        return self.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, headless=True, args=ARGUMENTS)
        yield launched
        launched.close()


def visit(browser: Any, path: Path, *, width: int = 1200, scheme: str = "light") -> Visit:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    return Visit(context.new_page()).open(path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_errors_or_requests(browser, report: Path, scheme: str) -> None:
    seen = visit(browser, report / "index.html", scheme=scheme)
    seen.page.wait_for_load_state("networkidle")
    assert seen.messages == []
    assert seen.fetched() == []
    assert [url for url in seen.requests if url.startswith("file:")] == [(report / "index.html").as_uri()]
    shown = seen.page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert shown


def test_errors_and_requests_are_recorded(browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>nothing()</script>")
    seen = visit(browser, bad)
    seen.page.wait_for_load_state("networkidle")
    assert any("nothing is not defined" in message for message in seen.messages)
    assert seen.fetched() == ["http://127.0.0.1:9/x.png"]


def test_light_and_dark_differ(browser, report: Path) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(browser, report / "index.html", scheme=scheme) for scheme in ("light", "dark"))
    assert light.page.evaluate(color) != dark.page.evaluate(color)


def test_sliders_move_every_picture_by_keyboard(browser, report: Path) -> None:
    page = visit(browser, report / "index.html").page
    block, index = page.get_by_label("Block", exact=True), page.get_by_label("r, tokens fused per block")
    output, pictures = page.locator("figure.viewer output"), page.locator("img.fused")

    def shown() -> list[str | None]:
        return [picture.get_attribute("src") for picture in pictures.all()]

    first, text = shown(), output.inner_text()
    assert text.startswith("r = 16, after block 4: ")
    block.focus()
    page.keyboard.press("ArrowLeft")
    assert output.inner_text().startswith("r = 16, after block 3: ")
    assert block.get_attribute("aria-valuetext") == "block 3"
    assert all(before != after for before, after in zip(first, shown(), strict=True))
    page.keyboard.press("Tab")
    assert index.evaluate("slider => slider === document.activeElement")
    second = shown()
    page.keyboard.press("ArrowRight")
    assert output.inner_text().startswith("r = 20, after block 3: ")
    assert index.get_attribute("aria-valuetext") == "r = 20"
    assert all(before != after for before, after in zip(second, shown(), strict=True))
    assert pictures.first.get_attribute("alt").startswith("Image 1, r = 20, after block 3")
    block.focus()
    page.keyboard.press("Home")
    assert "after block 1: 65 tokens" in output.inner_text()


def test_a_phone_needs_no_horizontal_scrolling(browser, report: Path, tmp_path: Path) -> None:
    seen = visit(browser, report / "index.html", width=360)
    content, window = seen.width()
    assert content <= window == 360
    assert seen.page.screenshot(path=tmp_path / "phone.png", full_page=True)
    smallest = seen.page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.chart text')].map(text => text.getBoundingClientRect().height))"
    )
    assert smallest > 8  # pixels: text in charts stays readable


def test_a_wide_window_shows_whole_tables(browser, report: Path) -> None:
    page = visit(browser, report / "index.html", width=1200).page
    cut = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth).length"
    assert page.evaluate(cut) == 0
    page.set_viewport_size({"width": 360, "height": 900})
    assert page.evaluate(cut) > 0  # they scroll inside their frame


def test_a_page_that_is_too_wide_fails(browser, tmp_path: Path) -> None:
    wide = tmp_path / "wide.html"
    wide.write_text("<div style='width: 900px'>wide</div>")
    content, window = visit(browser, wide, width=360).width()
    assert content > window


def test_the_keyboard_reaches_links_tables_and_sliders(browser, report: Path) -> None:
    page = visit(browser, report / "index.html").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    unreachable = page.evaluate(
        "[...document.querySelectorAll('a, input, .scroll')].filter(each => each.tabIndex < 0).length"
    )
    assert unreachable == 0
