"""Writes docs/models.md from the test matrix: `make docs`. A test keeps the page as it should be."""

import textwrap
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import mctf
from helpers.families import FAMILIES, Family
from helpers.model_features import FEATURES, features_of
from helpers.models import NAMES, family_of, make, make_images, run
from hosts.test_timm import REAL
from mctf.hosts.hf import TOWERS
from mctf.hosts.unsupported import FAMILIES as REFUSED
from mctf.models.loading import create_empty

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PUBLISHED = ("deit_small_patch16_224", "embedded", "t2t_vit_t_14", "t2t_vit_t_19", "lvvit_t", "lvvit_s", "lvvit_m")

TOP = """\
# Models

`make docs` writes this page from the test matrix; what is not in the matrix is not on it.

Every configuration below is a tiny model with random LayerScale, norms, biases, registers and positions. For each one
the tests ask that r = 0 is the plain model bit for bit, that fusing agrees with a slow reference (one image at a time,
an explicit attention map) to 1e-5, that images do not disturb each other, that equal tokens fuse for free, that
`unfuse`, copies, state_dicts and gradients are right, that one compiled graph equals eager for each family, and that
fvcore counts what `mctf.plan` says.

| library and class | known as | with, in the tests | configurations in the matrix |
|---|---|---|---|
"""

NAMES_TOP = """
Names that `mctf plan NAME` was tried with; other models of these classes have the same host:

| class | names |
|---|---|
"""

INSIDE = """
Of transformers, whatever model holds one of these towers is fused there, text towers, heads and decoders left alone:
"""

METHODS_TOP = """
## Methods

Each method was run on each configuration when this page was made:

| method | | works with |
|---|---|---|
"""

OUTPUTS = """
## Positions that enter every block

Rotary tables (EVA-02, DINOv3, …) and relative position biases (BEiT, …) belong to places of the image, not to tokens.
A fused token takes the mean over the places it covers, weighted as its content was. Attention logits are linear in
both, so its logits are the mean over those that its content would have at each of these places.

## What every model gives

Class scores as ever. Feature maps (`forward_intermediates`, `features_only`, backbones and hidden states of
transformers) have one value per patch, whatever was fused. `forward_features` has too, but for timm's
`VisionTransformer` that reads its class token alone: its tokens stay fused, unless it was fused with
`mctf.fuse(model, dense=True)`, for heads of your own on top. NaFlexVit takes batches of images of one size; padded
batches need a mask, and masks are refused.

## Refused, with the reason

| because | classes |
|---|---|
"""

BOTTOM = """
[architecture.md](architecture.md#what-is-refused-and-why) lists what else is refused: hooks, masks, other blocks than a
host knows. A model of your own can have [a host of your own](adding_a_host.md).
"""


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def family_row(family: Family) -> str:
    found = {feature for name in family.builders for feature in features_of(make(name))}
    features = [feature for feature in FEATURES if feature in found]
    return row(family.title, family.known_as, ", ".join(features), ", ".join(family.builders))


def name_rows() -> str:
    """Model names by the family that knows them, each of them planned."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in (*PUBLISHED, *(name for name, _ in REAL)):
        model = create_empty(name)
        mctf.plan(model)
        names[family_of(model).title].append(f"`{name}`")
    return "".join(row(title, ", ".join(names[title])) for title in names)


@torch.no_grad()
def refusal(model: nn.Module, method: str) -> str | None:
    """Why a method does not work with a model of the matrix; None where it gives finite numbers."""
    try:
        output = run(mctf.fuse(model, method), make_images(model, 1))
    except mctf.MctfError as error:
        return str(error)
    mctf.unfuse(model)
    if not output.isfinite().all():
        raise AssertionError(f"{method} on a {type(model).__name__} gives numbers that are not finite")
    return None


def method_rows(methods: dict[str, str]) -> str:
    refused: dict[str, dict[str, list[str]]] = {method: defaultdict(list) for method in methods}
    for name in NAMES:
        model = make(name)
        for method in methods:
            reason = refusal(model, method)
            if reason is not None:
                refused[method][reason].append(name)
    return "".join(row(f"`{method}`", summary, _works_with(refused[method])) for method, summary in methods.items())


def _works_with(refused: dict[str, list[str]]) -> str:
    return "; ".join(f"not {', '.join(names)}: {reason}" for reason, names in refused.items()) or "every configuration"


def page() -> str:
    families = "".join(map(family_row, FAMILIES)) + NAMES_TOP + name_rows()
    towers = INSIDE + textwrap.fill(", ".join(sorted(TOWERS)), width=120) + ".\n"
    methods = METHODS_TOP + method_rows(mctf.methods())
    refused = "".join(row(reason, ", ".join(names)) for reason, names in REFUSED.items())
    return TOP + families + towers + methods + OUTPUTS + refused + BOTTOM


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
