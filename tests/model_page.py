"""Writes docs/models.md from the test matrix: `python tests/model_page.py`. A test keeps the page as it should be."""

from pathlib import Path

from families import FAMILIES, Family
from mctf.hosts.refused import FAMILIES as REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"

TOP = """\
# Models

This page is made from the test matrix by `python tests/model_page.py`; what is not in the matrix is not on it.

Every configuration below is a tiny model with random LayerScale, norms, biases, registers and positions. For each one
the tests ask that r = 0 is the plain model bit for bit, that fusing agrees with a slow reference (one image at a time,
an explicit attention map) to 1e-5, that images do not disturb each other, that equal tokens fuse for free, that
`unfuse`, copies, state_dicts and gradients are right, that one compiled graph equals eager for each family, and that
fvcore counts what `mctf.plan` says.

| library and class | known as | configurations in the matrix |
|---|---|---|
"""

POSITIONS = """
## Positions that enter every block

Rotary tables (EVA-02, DINOv3, …) and relative position biases (BEiT, …) belong to places of the image, not to tokens.
A fused token takes the mean over the places it covers, weighted as its content was. Attention logits are linear in
both, so its logits are the mean over those that its content would have at each of these places.

## What every model gives

Class scores as ever. Feature maps (`forward_intermediates`, `features_only`) have one value per patch, whatever was
fused. NaFlexVit takes batches of images of one size; padded batches need a mask, and masks are refused.

## Refused, with the reason

| because | classes |
|---|---|
"""


def row(family: Family) -> str:
    return f"| {family.title} | {family.known_as} | {', '.join(family.builders)} |\n"


def page() -> str:
    refused = "".join(f"| {reason} | {', '.join(names)} |\n" for reason, names in REFUSED.items())
    return TOP + "".join(row(family) for family in FAMILIES) + POSITIONS + refused


if __name__ == "__main__":
    PAGE.write_text(page())
