"""Vectors of images by a fused model, and the nearest neighbor of each.

    python examples/embed.py

The vector of an image is its class token. Crops of one photograph should be each other's neighbors.
"""

import skimage.data
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import mctf
import mctf.models  # lists the model "embedded" with timm

model = timm.create_model("embedded", pretrained=True, num_classes=0).eval()  # no classifier: vectors come out
transform = create_transform(**resolve_model_data_config(model))
photographs = {"cat": skimage.data.chelsea(), "cup": skimage.data.coffee(), "astronaut": skimage.data.astronaut()}
crops = {
    f"{name} {side}": Image.fromarray(pixels[:, start : start + 300])
    for name, pixels in photographs.items()
    for side, start in {"left": 20, "right": 120}.items()
}
images = torch.stack([transform(crop) for crop in crops.values()])

with torch.inference_mode():
    baseline = F.normalize(model(images), dim=1)
    mctf.fuse(model, "ward", flops=0.56)
    vectors = F.normalize(model(images), dim=1)

names = list(crops)
nearest = (vectors @ vectors.T).fill_diagonal_(-1).argmax(dim=1)
for name, index in zip(names, nearest.tolist(), strict=True):
    print(f"{name:16} nearest: {names[index]}")
print(f"{vectors.shape[1]} channels, cosine to the unfused vectors {(vectors * baseline).sum(dim=1).mean():.4f}")
