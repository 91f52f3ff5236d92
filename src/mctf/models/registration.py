"""timm's registry learns the models of this package on `import mctf`, which itself loads neither timm nor torch.

Where timm is loaded already, the models are registered at once. Otherwise a finder on `sys.meta_path` waits for
`timm.models` and registers them as soon as it has run: `import mctf` may come before or after `import timm`. The
finder stays on the list and claims no other module; taking it off could make another thread's import skip a finder.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_REGISTRY = "timm.models"
_FAMILIES = ("t2t_vit", "lv_vit", "embedded")


def register() -> None:
    """Add the models of this package to timm's registry; a second call does nothing."""
    for family in _FAMILIES:
        import_module(f".{family}", __package__)


def register_with_timm() -> None:
    """`register` at once if timm is loaded, else as soon as it is."""
    if _REGISTRY in sys.modules:
        register()
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """Finds `timm.models` where the finders behind it do, with a loader that registers afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisterAfterwards(spec.loader)
                return spec
        return None


class _RegisterAfterwards(Loader):
    """Runs a module by its own loader, leaves that loader on it, then registers the models."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        register()


_FINDER = _Finder()
