"""Write a fused model as an ONNX file, checked against the model, and run it without torch.

python examples/export.py [FILE]
"""

import sys

import numpy as np
import onnxruntime
import timm

import mctf
import mctf.models  # lists the model "embedded" with timm

path = sys.argv[1] if len(sys.argv) > 1 else "embedded.onnx"
model = timm.create_model("embedded", pretrained=True).eval()
mctf.fuse(model, "mctf_exact", r="fast")  # fuses in three blocks: a small graph
report = mctf.export(model, path, name="embedded")
print(f"{report.path.name}: {report.bytes / 1e6:.1f} MB, method {report.metadata.method}")
for batch, parity in report.parity.items():
    print(f"batch {batch}: KL to the model {parity.kl:.0e}")

height, width = report.metadata.preprocessing.image_size
session = onnxruntime.InferenceSession(path)
images = np.zeros((3, 3, height, width), dtype=np.float32)
(logits,) = session.run(None, {session.get_inputs()[0].name: images})
print("logits of three images:", logits.shape)
