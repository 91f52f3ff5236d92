"""Models by name, weights from files, and three families that timm does not have: T2T-ViT, LV-ViT and `embedded`.

Importing this package registers these families with timm. `timm.create_model("embedded")` works from then on.
"""

from . import embedded, lv_vit, t2t_vit

__all__ = ["embedded", "lv_vit", "t2t_vit"]
