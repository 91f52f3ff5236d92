"""Fuse a model in three lines, look at the effect, and take it back.

python examples/fuse.py
"""

import skimage.data
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import mctf
import mctf.models  # lists the model "embedded" with timm

model = timm.create_model("embedded", pretrained=True).eval()
transform = create_transform(**resolve_model_data_config(model))
photographs = [skimage.data.chelsea(), skimage.data.coffee()]
images = torch.stack([transform(Image.fromarray(pixels)) for pixels in photographs])

with torch.inference_mode():
    before = model(images).softmax(dim=1)
    mctf.fuse(model, "ward", flops=0.56)  # keep 56 % of the FLOPs
    after = model(images).softmax(dim=1)
    mctf.unfuse(model)
    again = model(images).softmax(dim=1)

names = list(model.pretrained_cfg["label_descriptions"].values())
for title, odds in {"unfused": before, "fused": after}.items():
    best = [f"{names[row.argmax()].split(',')[0]} {row.max():.0%}" for row in odds]
    print(f"{title}: {', '.join(best)}")
print("restored bit for bit:", torch.equal(before, again))
print(mctf.plan(model, method="ward", flops=0.56))
