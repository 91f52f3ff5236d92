"""mctf makes Vision Transformers faster by fusing tokens.

    model = timm.create_model("deit_small_patch16_224", pretrained=True).eval()
    mctf.fuse(model, r=16)          # in place and reversible: mctf.unfuse(model)
    logits = model(images)

Names are imported when first used: `import mctf` and `mctf --help` need no torch. `import mctf.models` registers
T2T-ViT, LV-ViT and `embedded` with timm.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import fuse, set_r, unfuse
    from .deploy.export import export
    from .deploy.exported import load_exported
    from .embedding.embedder import Embedder
    from .errors import MctfError
    from .hosts import register_host
    from .methods import methods, register_method
    from .planning import Plan, plan
    from .quantization import Quantization, quantize, unquantize
    from .saving import load, save
    from .schedule_file import schedules
    from .tracing import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Embedder",
    "MctfError",
    "Plan",
    "Quantization",
    "Trace",
    "export",
    "fuse",
    "load",
    "load_exported",
    "methods",
    "plan",
    "quantize",
    "register_host",
    "register_method",
    "save",
    "schedules",
    "set_r",
    "trace",
    "unfuse",
    "unquantize",
]

_HOMES = {
    "Embedder": "embedding.embedder",
    "MctfError": "errors",
    "Plan": "planning",
    "Quantization": "quantization",
    "Trace": "tracing",
    "export": "deploy.export",
    "fuse": "api",
    "load": "saving",
    "load_exported": "deploy.exported",
    "plan": "planning",
    "quantize": "quantization",
    "register_host": "hosts",
    "register_method": "methods",
    "save": "saving",
    "schedules": "schedule_file",
    "set_r": "api",
    "trace": "tracing",
    "unfuse": "api",
    "unquantize": "quantization",
}


def __getattr__(name: str) -> object:
    if name == "methods":
        return import_module(".methods", __name__)  # a package that can be called, see there
    if name not in _HOMES:
        raise AttributeError(f"module 'mctf' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
