"""Classify images by a fused model in an ONNX file, with onnxruntime, numpy and pillow alone.

    mctf export deit_small_patch16_224 --method ward --flops 0.56 --output deit_small.onnx
    python examples/onnx_classify.py deit_small.onnx cat.jpg dog.jpg

The file says how images are prepared and what its classes are called. mctf and torch need not be installed.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image


def prepare(path: str, preprocessing: dict) -> np.ndarray:
    """An image as the model takes it, 3 H W: resized, cropped in the center and normalized."""
    height, width = preprocessing["image_size"]
    mode, mean = preprocessing["crop_mode"], preprocessing["mean"]
    image = Image.open(path).convert("RGB")
    goals = [int(side / preprocessing["crop_pct"]) for side in (width, height)]
    ratios = [side / goal for side, goal in zip(image.size, goals, strict=True)]
    if mode == "squash":
        scaled = goals
    elif mode == "center" and width == height:  # the shorter side is the goal, the longer one is rounded down
        scaled = [int(goals[0] * side / min(image.size)) for side in image.size]
    else:
        ratio = max(ratios) if mode == "border" else min(ratios)
        scaled = [round(side / ratio) for side in image.size]
    image = image.resize(scaled, Image.Resampling[preprocessing["interpolation"].upper()])
    size = (max(image.width, width), max(image.height, height))
    canvas = Image.new("RGB", size, tuple(round(255 * value) for value in mean))  # a border where the image is smaller
    canvas.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    pixels = np.asarray(canvas.crop((left, top, left + width, top + height)), dtype=np.float32) / 255
    return ((pixels - mean) / preprocessing["std"]).astype(np.float32).transpose(2, 0, 1)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: python onnx_classify.py MODEL.onnx IMAGE …")
    model, *paths = sys.argv[1:]
    session = onnxruntime.InferenceSession(model)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["mctf"])
    if facts["preprocessing"] is None:
        sys.exit(f"{model} does not say how its images are prepared: export it with preprocessing=…")
    if facts["output"] != "logits":
        sys.exit(f"{model} gives embeddings, not classes: export a model with a classifier")
    size = facts["batch"] or len(paths)  # a file of a fixed batch takes no other
    images = np.stack([prepare(path, facts["preprocessing"]) for path in paths])
    images = np.concatenate([images, np.repeat(images[-1:], -len(paths) % size, axis=0)])
    name = session.get_inputs()[0].name
    logits = np.concatenate(
        [session.run(None, {name: images[at : at + size]})[0] for at in range(0, len(images), size)]
    )
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    for path, row in zip(paths, odds / odds.sum(axis=1, keepdims=True), strict=False):
        best = int(row.argmax())
        print(f"{path}: {facts['class_names'][best]} {row[best]:.0%}")


if __name__ == "__main__":
    main()
