"""Fine-tune a fused model with token reduction consistency, in a training loop of one's own.

    python examples/finetune.py

A classifier for two classes, cats and cups, learns from crops of two photographs.
"""

import skimage.data
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import mctf
import mctf.models  # lists the model "embedded" with timm
from mctf.train.consistency import Consistency

STEPS, CROPS = 4, 3

torch.manual_seed(0)
model = timm.create_model("embedded", pretrained=True, num_classes=2)
mctf.fuse(model, r=16)
config = resolve_model_data_config(model)
augment = create_transform(**config, is_training=True)
photographs = [Image.fromarray(skimage.data.chelsea()), Image.fromarray(skimage.data.coffee())]
labels = torch.arange(2).repeat(CROPS)

objective = Consistency(weight=1.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train()
for step in range(STEPS):
    images = torch.stack([augment(photographs[label]) for label in labels])
    losses = objective(model, images, labels)
    assert losses.total.isfinite()
    losses.total.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {losses.total:.3f}, cross-entropy fused {losses.cross_entropy:.3f}")

model.eval()
transform = create_transform(**config)
images = torch.stack([transform(photograph) for photograph in photographs])
with torch.inference_mode():
    fused = model(images).argmax(dim=1).tolist()
    unfused = mctf.unfuse(model)(images).argmax(dim=1).tolist()
print(f"classes 0 and 1 are answered {fused} fused and {unfused} unfused")
