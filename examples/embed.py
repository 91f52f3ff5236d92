"""Vectors of images by a fused model, and the nearest neighbor of each.

    python examples/embed.py

Crops of one photograph should be each other's neighbors.
"""

import skimage.data
import torch

import mctf

photographs = {"cat": skimage.data.chelsea(), "cup": skimage.data.coffee(), "astronaut": skimage.data.astronaut()}
crops = {
    f"{name} {side}": pixels[:, start : start + 300]  # arrays, H W 3; paths, bytes and PIL images will do as well
    for name, pixels in photographs.items()
    for side, start in {"left": 20, "right": 120}.items()
}

fused = mctf.Embedder("embedded", method="ward", flops=0.56, normalize=True)
unfused = mctf.Embedder("embedded", r=0, normalize=True)
vectors, baseline = (torch.as_tensor(embed(list(crops.values()))) for embed in (fused, unfused))

names = list(crops)
nearest = (vectors @ vectors.T).fill_diagonal_(-1).argmax(dim=1)
for name, index in zip(names, nearest.tolist(), strict=True):
    print(f"{name:16} nearest: {names[index]}")
print(f"{vectors.shape[1]} channels, cosine to the unfused vectors {(vectors * baseline).sum(dim=1).mean():.4f}")
