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
    resampling = Image.Resampling[preprocessing["interpolation"].upper()]
    image = Image.open(path).convert("RGB")
    if preprocessing["crop_mode"] == "squash":
        scaled = [int(side / preprocessing["crop_pct"]) for side in (width, height)]
    else:  # the shorter side so that the crop takes its share of it
        factor = max(width / image.width, height / image.height) / preprocessing["crop_pct"]
        scaled = [max(round(image.width * factor), width), max(round(image.height * factor), height)]
    image = image.resize(scaled, resampling)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32) / 255
    return ((pixels - preprocessing["mean"]) / preprocessing["std"]).astype(np.float32).transpose(2, 0, 1)


def main() -> None:
    model, *paths = sys.argv[1:]
    session = onnxruntime.InferenceSession(model)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["mctf"])
    if facts["preprocessing"] is None:
        sys.exit(f"{model} does not say how its images are prepared: export it with preprocessing=…")
    images = np.stack([prepare(path, facts["preprocessing"]) for path in paths])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images})
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    for path, row in zip(paths, odds / odds.sum(axis=1, keepdims=True), strict=True):
        best = int(row.argmax())
        print(f"{path}: {facts['class_names'][best]} {row[best]:.0%}")


if __name__ == "__main__":
    main()
