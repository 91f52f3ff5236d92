"""Display names of methods, backbones, criteria, variants and verdicts."""

from .document import Verdict

METHODS = {
    "base": "baseline",
    "mctf": "MCTF",
    "tome": "ToMe",
    "evit": "EViT",
    "bat": "BAT",
    "ats": "ATS",
    "diffrate": "DiffRate",
    "pitome": "PiToMe",
    "atc": "ATC",
    "a_vit": "A-ViT",
    "spvit": "SPViT",
    "evo_vit": "Evo-ViT",
    "ia_red2": "IA-RED²",
    "dynamic_vit": "DynamicViT",
}
BACKBONES = {
    "deit_tiny": "DeiT-T",
    "deit_small": "DeiT-S",
    "t2t_vit_t_14": "T2T-ViT-14",
    "t2t_vit_t_19": "T2T-ViT-19",
    "lv_vit_s": "LV-ViT-S",
    "pvt_small": "PVT-Small",
    "pvt_medium": "PVT-Medium",
    "coat_mini": "CoaT Mini",
    "coat_lite_small": "CoaT-Lite Small",
    "swin_tiny": "Swin-T",
    "swin_small": "Swin-S",
    "poolformer_s36": "PoolFormer-S36",
    "poolformer_m48": "PoolFormer-M48",
}
CRITERIA = {"sim": "similarity", "info": "informativeness", "size": "size"}
ATTENTION = {"one_step_ahead": "one step ahead", "previous": "previous block"}
LABELS = {
    "one_way": "one-way",
    "bidirectional": "bidirectional",
    "average": "average",
    "size": "weighted by size",
    "max": "maximum",
    "weighted_average": "weighted by attention and size",
    "precise": "precise",
    "approximated": "approximated",
    "exact": "exact (not in the paper)",
    "off": "not proportional to size",
    "on": "proportional to size",
}
GROUPS = {
    "matching": "matching",
    "pooling": "pooling",
    "attention": "attention of fused tokens",
    "proportional": "attention logits",
    "tau_sim": "temperature of similarity",
    "tau_info": "temperature of informativeness",
    "tau_size": "temperature of size",
}
CASES = {"with_size": "with the size criterion", "without_size": "without it"}
TRAINING = {"finetuned": "fine-tuned", "off_the_shelf": "not trained"}
VERDICT_MARKS = {Verdict.AGREES: "✓", Verdict.DIFFERS: "≠", Verdict.CLOSE: "≈", Verdict.OPEN: "•"}
VERDICTS = {
    Verdict.AGREES: "as in the paper",
    Verdict.DIFFERS: "unlike the paper",
    Verdict.CLOSE: "too close to call on these images",
    Verdict.OPEN: "",
}


def criteria_label(criteria: str) -> str:
    """As in "similarity + size"."""
    return " + ".join(CRITERIA[name] for name in criteria.split("+"))
