"""Write docs/models.md from the test matrix: `make docs`. A test compares the page with the matrix."""

from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import mctf
from helpers.families import FAMILIES, Family
from helpers.model_features import FEATURES, features_of
from helpers.models import NAMES, family_of, make, make_images, run
from hosts.test_timm import REAL
from mctf.hosts.hf_towers import FAMILIES as TOWERS
from mctf.hosts.hf_towers import TowerFamily
from mctf.hosts.unsupported import FAMILIES as REFUSED
from mctf.models.loading import create_empty

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PUBLISHED = ("deit_small_patch16_224", "embedded", "t2t_vit_t_14", "t2t_vit_t_19", "lvvit_t", "lvvit_s", "lvvit_m")

TOP = """\
# Models

`make docs` writes this page from the test matrix.

Every configuration below is a tiny model with random LayerScale, norms, biases, registers and positions. The tests
check for each of them:

- r = 0 gives the outputs of the baseline bit for bit, and so does the model after `unfuse`;
- the pieces of its blocks agree with the block itself and with an explicit attention map;
- fusion agrees with a slow reference (one image at a time) to 1e-5;
- images of a batch do not influence each other, and fusing equal tokens changes nothing;
- copies, state_dicts and gradients are right, and the measured cost is that of `mctf.plan`.

| library and class | models | features in the tests | configurations in the matrix |
|---|---|---|---|
"""

NAMES_TOP = """
Tested names of `mctf plan NAME`; other models of these classes have the same host:

| class | names |
|---|---|
"""

INSIDE = """
A model of transformers is supported if it holds one of these towers; text towers, language models, heads and decoders
are unchanged. Every family has a tiny model in the tests: r = 0 is the baseline bit for bit, the pieces of a layer
agree with the layer, and all tokens are restored.

| models | tower | its layers |
|---|---|---|
"""

METHODS_TOP = """
## Methods

Each method runs on each configuration when this page is written:

| method | summary | works with |
|---|---|---|
"""

OUTPUTS = """
## Positions that enter every block

Rotary tables (EVA-02, DINOv3, …) and relative position biases (BEiT, …) belong to positions of the image, not to
tokens. A fused token takes the mean over the positions it covers, weighted like its content. Attention logits are
linear in both, so its logits are the mean of the logits of its content at each of these positions.

## Outputs

- Logits have the shape of the baseline's.
- Feature maps (`forward_intermediates`, `features_only`, backbones and hidden states of transformers) have one value
  per patch.
- `forward_features` has one token per input token, except for timm's `VisionTransformer` with class token pooling: its
  tokens stay fused. Use `mctf.fuse(model, dense=True)` for heads of your own on its tokens.
- Where every token is read, fused tokens are restored: see [dense.md](dense.md).

## Vision-language models

`mctf.fuse(model)` finds the vision tower. The projector and the language model read one restored token per patch, so
prompts, shapes and caches stay as they are.

```python
import mctf
from transformers import AutoModelForImageTextToText

model = AutoModelForImageTextToText.from_pretrained("HuggingFaceTB/SmolVLM-256M-Instruct")
mctf.fuse(model, "ward", flops=0.7)  # then model.generate(...) as before
```

- The tests run InternVL, Idefics3, SmolVLM, LLaVA with Pixtral, Qwen2-VL, Qwen3-VL, BLIP and BLIP-2: with r = 0 logits
  and generated words are the baseline's, with r = 6 shapes are.
- `flops` is the share of the vision tower's cost. The language model costs what it did.
- A tower that runs inside windows (Qwen2.5-VL) or over tiles (Mllama) is refused by name.

## Padded and packed images

SigLIP 2, Idefics3, SmolVLM and NaFlexVit take images of several sizes with a mask of padding. Pixtral and Qwen take
them one behind the other. Images with equally many patches are fused as one batch, so each image is fused as it would
be alone, and r is of its own patches.

- Nothing attends to padding or is fused with it. Padding attends to the tokens of its image, and keeps its place. With
  rotary positions (NaFlexVit) padding is returned as it entered.
- Many different numbers of patches in one batch mean many small batches. Sort images by size where speed matters.
- With r = 0, the model's own mask is used: bit for bit the baseline.
- `mctf.trace` records images with equally many patches. `torch.compile` breaks its graph there;
  `torch.jit.trace` and `torch.export` of such a batch are refused.
- A mask that differs between patches of an image is refused.

## Saving models of transformers

`save_pretrained` and `push_to_hub` of a fused model write the fusion into config.json, and `mctf.load` brings it back;
`from_pretrained` gives the unfused model ([ecosystem.md](ecosystem.md)). If you fuse a tower inside a larger model,
`mctf.fuse(model.vision_model)`, the larger model's `save_pretrained` writes all weights, but the loaded model is not
fused.

## Unsupported models

| reason | classes |
|---|---|
"""

BOTTOM = """
[architecture.md](architecture.md#rules-that-hold-everywhere) lists what else is refused: hooks, masks, unsupported
blocks. For a model of your own, [add a host](adding_a_host.md).
"""


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def family_row(family: Family) -> str:
    present = {feature for name in family.builders for feature in features_of(make(name))}
    features = [feature for feature in FEATURES if feature in present]
    return row(family.title, family.models, ", ".join(features), ", ".join(family.builders))


def tower_row(family: TowerFamily) -> str:
    return row(family.title, ", ".join(family.towers), ", ".join(family.layers))


def name_rows() -> str:
    """Model names by family; each of them is planned."""
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
        raise AssertionError(f"{method} on a {type(model).__name__} gives non-finite outputs")
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
    towers = INSIDE + "".join(map(tower_row, TOWERS))
    methods = METHODS_TOP + method_rows(mctf.methods())
    refused = "".join(row(reason, ", ".join(names)) for reason, names in REFUSED.items())
    return TOP + families + towers + methods + OUTPUTS + refused + BOTTOM


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
