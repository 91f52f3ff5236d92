"""`mctf playground` in a browser: upload, sliders, answers, settings by address, errors in the page, no network."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from helpers.images import encode, make_picture

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: install the system's package chromium"),
    pytest.mark.skipif(find_spec("gradio") is None, reason="gradio is not installed: pip install 'mctf[playground]'"),
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
SPACE = Path(__file__).resolve().parents[2] / "examples" / "space" / "app.py"
# The command, with every connection that leaves the machine written into a file. The Space's page is built before it.
SERVER = """
import runpy, sys
log, space = open(sys.argv.pop(1), "a", buffering=1), sys.argv.pop(1)

def watch(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    else:
        return
    if host not in ("127.0.0.1", "localhost", "::1", None):
        log.write(f"{event} {host}\\n")

sys.addaudithook(watch)
assert type(runpy.run_path(space)["page"]).__name__ == "Blocks"
from mctf.cli import main
main()
"""
# The contrast of every text of the page with what is behind it: colors are painted, so that the browser resolves them.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const painted = (color, below) => {
        canvas.fillStyle = `rgb(${below})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const behind = element =>
        element ? painted(getComputedStyle(element).backgroundColor, behind(element.parentElement)) : [255, 255, 255];
    const luminance = color => color
        .map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + [0.2126, 0.7152, 0.0722][index] * value, 0);
    const speaks = element => [...element.childNodes].some(node => node.nodeType == 3 && node.data.trim());
    return [...document.querySelectorAll(".mctf *, .mctf-head *")]
        .filter(each => each.checkVisibility() && speaks(each))
        .map(each => {
            const below = behind(each);
            const both = [painted(getComputedStyle(each).color, below), below].map(luminance);
            return [(Math.max(...both) + 0.05) / (Math.min(...both) + 0.05), each.textContent.trim().slice(0, 30)];
        });
}"""
PATIENCE = 60_000  # milliseconds: the machine may be busy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a running playground, and the file with its connections elsewhere. It ends by a signal."""
    folder = tmp_path_factory.mktemp("playground")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "connections"
    arguments = [sys.executable, "-c", SERVER, log, SPACE, "playground", "--port", port, "--threads", 1]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            list(map(str, arguments)), cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            line = process.stdout.readline()
            assert f"http://127.0.0.1:{port}" in line, (folder / "stderr").read_text()
            yield f"http://127.0.0.1:{port}/", log
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
    said = (folder / "stderr").read_text()
    assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, headless=True, args=ARGUMENTS)
        yield launched
        launched.close()


class Visit:
    """An open page with its requests and complaints."""

    def __init__(self, browser: Any, address: str, *, width: int = 1200, colors: str = "light") -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colors)
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def cards(self) -> list[str]:
        """The text of every card, once there are some."""
        self.page.locator(".mctf .card").first.wait_for()
        return self.page.locator(".mctf .card").all_inner_texts()

    def until(self, found: Any, wanted: Any) -> None:
        """Wait until a function of the page returns what is wanted."""
        deadline = time.monotonic() + PATIENCE / 1000
        while (last := found()) != wanted:
            assert time.monotonic() < deadline, (last, wanted)
            self.page.wait_for_timeout(50)

    def address(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).query).items()}

    def slider(self, label: str) -> Any:
        return self.page.get_by_role("slider", name=re.compile(label))

    def error(self) -> str:
        self.page.get_by_role("alert").first.wait_for()
        return self.page.get_by_role("alert").first.inner_text()

    def left_the_machine(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]


def test_a_photograph_is_dropped_and_the_settings_are_shared(server, browser, tmp_path) -> None:
    address, log = server
    seen = Visit(browser, f"{address}?batch=1")
    unfused, ward, paper = seen.cards()
    assert (unfused.split()[0], ward.split()[0], paper.split()[0]) == ("unfused", "ward", "mctf")
    assert "56 %" in ward
    times = [re.search(r"Time\s+([\d.]+) ms\s+([\d.]+)\u00d7", card).groups() for card in (unfused, ward, paper)]
    for milliseconds, speedup in times:  # all are rounded
        assert float(speedup) == pytest.approx(float(times[0][0]) / float(milliseconds), rel=0.03)
    assert re.search(r"KL\s+\d+\.\d{4}\s+(same|other) answer", ward)
    assert len(re.findall(r"\d\.\d %", ward)) == 5, "the five likeliest classes"

    picture = seen.page.locator(".card[data-method=ward] figure:not([hidden]) img")
    before = picture.get_attribute("src")
    (tmp_path / "own.png").write_bytes(encode(make_picture(3, width=300, height=260)))
    seen.page.locator("input[type=file]").first.set_input_files(tmp_path / "own.png")
    seen.until(lambda: picture.get_attribute("src") != before, True)
    seen.until(lambda: "photo" in seen.address(), False)

    last = int(seen.slider("block").get_attribute("max"))
    seen.slider("block").focus()
    seen.page.keyboard.press("ArrowLeft")
    seen.until(lambda: seen.address().get("block"), str(last - 1))
    figures = seen.page.locator(".mctf figure:not([hidden])")
    assert {each.get_attribute("data-block") for each in figures.all()} == {str(last - 1)}

    seen.slider("Budget").focus()
    for _ in range(4):
        seen.page.keyboard.press("ArrowRight")
    seen.until(lambda: "60 %" in seen.cards()[1], True)
    seen.until(lambda: seen.address().get("flops"), "0.6")

    seen.page.locator("#photographs button.thumbnail-item").nth(2).click()
    seen.until(lambda: seen.address().get("photo"), "lion")
    assert seen.address() == {
        **{"model": "embedded", "photo": "lion", "first": "ward", "second": "mctf"},
        **{"flops": "0.6", "batch": "1", "block": str(last - 1)},
    }

    other = Visit(browser, seen.page.url.replace("second=mctf", "second=tome"), width=800)
    assert [card.split()[0] for card in other.cards()] == ["unfused", "ward", "tome"]
    assert "60 %" in other.cards()[1]
    assert float(other.slider("Budget").input_value()) == 0.6
    assert other.slider("block").input_value() == str(last - 1)
    assert other.page.get_by_label("Second method").input_value() == "tome"
    shown = other.page.locator(".mctf figure:not([hidden])").first
    assert shown.get_attribute("data-block") == str(last - 1)
    assert other.page.evaluate("document.documentElement.scrollWidth") <= 800

    assert len(seen.requests) > 10
    assert seen.left_the_machine() + other.left_the_machine() == []
    assert seen.complaints + other.complaints == []
    assert log.read_text() == "", "the server connects to nothing"
    with urllib.request.urlopen(f"{address}gradio_api/info") as answer:  # nor does it serve other programs
        assert answer.read() == b'{"named_endpoints":{},"unnamed_endpoints":{}}'


def test_every_text_can_be_read(server, browser) -> None:
    """A contrast of 4.5 is what WCAG 2.2 asks of text (1.4.3, AA)."""
    for colors in ("light", "dark"):
        seen = Visit(browser, f"{server[0]}?batch=1", colors=colors)
        seen.cards()
        background = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (min(map(int, re.findall(r"\d+", background)[:3])) < 128) is (colors == "dark")
        contrasts = seen.page.evaluate(CONTRAST)
        assert len(contrasts) > 30
        assert [each for each in contrasts if each[0] < 4.5] == []
    seen.page.evaluate("document.querySelector('.mctf').style.setProperty('--soft', '#808080')")  # between both
    assert min(seen.page.evaluate(CONTRAST))[0] < 4.5


@pytest.mark.nightly
def test_errors_are_lines_in_the_page(server, browser, tmp_path) -> None:
    address, _ = server
    seen = Visit(browser, f"{address}?batch=1&first=wrad")
    assert "did you mean 'ward'?" in seen.error()
    seen.cards()
    (tmp_path / "notes.png").write_text("no picture")
    seen.page.locator("input[type=file]").first.set_input_files(tmp_path / "notes.png")
    seen.until(lambda: "notes.png is not a readable image (unknown image format)" in seen.page.inner_text("body"), True)
    impossible = Visit(browser, f"{address}?batch=1&flops=0.2")
    assert "cannot keep as little as 0.2 of this model's FLOPs" in impossible.error()
    for each in (seen, impossible):
        assert "Traceback" not in each.page.inner_text("body")
        assert str(tmp_path) not in each.page.inner_text("body")
        assert each.complaints == []
