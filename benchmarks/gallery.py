"""Pictures of the first page and of docs/gallery.md: `python benchmarks/gallery.py [MODEL] [--weights FILE]`.

The picture of the first page is by `embedded`; `--first` writes it alone.

The photographs come with scikit-image and are CC0 or in the public domain. Axes: 3 H W.
"""

import argparse
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--first", action="store_true", help="only the picture of the first page")
    arguments = parser.parse_args()
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
