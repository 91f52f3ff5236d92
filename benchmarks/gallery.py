"""Pictures of the first page and of docs/gallery.md: `python benchmarks/gallery.py [MODEL] [--weights FILE]`.

The picture of the first page is by `embedded`; `--first` writes it alone. `--screens` takes the pictures of the
playground and of the site's first page, in Chromium by playwright. The playground shows times: stop other programs
before.

The photographs come with scikit-image and are CC0 or in the public domain. Axes: 3 H W.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import skimage.data
from PIL import Image

import mctf
from mctf.data import Preprocessing
from mctf.models.loading import load_model
from mctf.viz.contact_sheet import choose_blocks, contact_sheet, write_png

FOLDER = Path(__file__).resolve().parents[1] / "docs/images"
PHOTOGRAPHS = ("chelsea", "coffee", "rocket", "astronaut")
METHODS = ("ward", "mctf", "tome", "evit")
BUDGETS = (0.8, 0.65, 0.5, 0.4)
FIRST_PAGE_BLOCKS = (3, 7, 11)
WIDTH = 880  # pixels of a picture
QUALITY = 78  # of JPEG
TRIALS = 20  # of a picture with times
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--first", action="store_true", help="only the picture of the first page")
    parser.add_argument("--screens", action="store_true", help="only the pictures of the playground and of the site")
    arguments = parser.parse_args()
    if arguments.screens:
        take_screens()
        return
    first_page()
    if arguments.first:
        return
    model = load_model(arguments.model, weights=arguments.weights).eval()
    preprocessing = Preprocessing.of(model)
    transform = preprocessing.transform()
    inputs = [transform(Image.fromarray(getattr(skimage.data, name)())) for name in PHOTOGRAPHS]
    blocks = choose_blocks(None, len(model.blocks))

    def sheet(rows: list, method: str, flops: float) -> Image.Image:
        mctf.fuse(model, method, flops=flops)
        picture = contact_sheet(model, rows, preprocessing, blocks=blocks)
        mctf.unfuse(model)
        return picture

    save(sheet(inputs, "ward", 0.56), "gallery-photographs")
    save(stack([sheet([inputs[0]], method, 0.56) for method in METHODS]), "gallery-methods")
    save(stack([sheet([inputs[1]], "ward", share) for share in BUDGETS]), "gallery-budgets")


def first_page() -> None:
    """fused.png: the cup by `ward` at 56 % of the FLOPs."""
    model = load_model("embedded").eval()
    preprocessing = Preprocessing.of(model)
    image = preprocessing.transform()(Image.fromarray(skimage.data.coffee()))
    mctf.fuse(model, "ward", flops=0.56)
    picture = contact_sheet(model, [image], preprocessing, blocks=FIRST_PAGE_BLOCKS, scale=2)
    path = FOLDER / "fused.png"
    write_png(picture, path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take_screens() -> None:
    """playground.png and site.png."""
    from playwright.sync_api import sync_playwright

    from mctf.viz.playground import build, serve

    page = build({"embedded": partial(load_model, "embedded")})
    with tempfile.TemporaryDirectory() as site, sync_playwright() as playwright:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
        subprocess.run(command, cwd=FOLDER.parents[1], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), headless=True, args=CHROMIUM)
        take_screen(browser, f"{serve(page, wait=False)}?block=7", "playground", shows=".mctf .card", height=870)
        handler = partial(SimpleHTTPRequestHandler, directory=site)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/"
            take_screen(browser, address, "site", shows="article table", height=1100)
            server.shutdown()
        browser.close()
    page.close()


def take_screen(browser: Any, address: str, name: str, *, shows: str, height: int) -> None:
    """One screen of a page, once an element is there and times are those of a quiet machine. height: in pixels."""
    page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="light")
    for _ in range(TRIALS):
        page.goto(address)
        page.locator(shows).first.wait_for()
        if not page.locator(".mctf .notice").count():
            break
    else:
        raise SystemExit("the machine is busy: stop other programs and take the picture again")
    page.wait_for_timeout(1000)  # fonts and transitions
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def stack(sheets: list[Image.Image]) -> Image.Image:
    """Sheets below each other."""
    whole = Image.new("RGB", (max(each.width for each in sheets), sum(each.height for each in sheets)), "white")
    top = 0
    for each in sheets:
        whole.paste(each, (0, top))
        top += each.height
    return whole


def save(picture: Image.Image, name: str) -> None:
    picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    path = FOLDER / f"{name}.jpg"
    picture.save(path, quality=QUALITY, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
