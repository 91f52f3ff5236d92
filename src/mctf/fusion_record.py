"""The fusion of a model as data: what `mctf.fuse` and `mctf.set_r` need to do it again, under one key of a config file.

    "mctf": {"version": 1, "mctf": "0.1.0", "method": "mctf", "options": {every option}, "r": 16, "blocks": null,
             "dense": false, "trim_last": null, "restore": "residual", "depth": 12, "fused_r": 16}

`save_pretrained` of a fused model of transformers writes it into config.json, `mctf.save` into the file beside the
weights. Readers without mctf ignore the key and get the unfused model.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .core.schedule import ReductionSpec, plain_r
from .errors import MctfError, shown
from .methods import make_method
from .stack import FusedStack

KEY, VERSION = "mctf", 1
_CURE = "save the fused model again"


@dataclass(frozen=True, kw_only=True)
class FusionRecord:
    """How a model with `depth` blocks is fused; see `mctf.fuse`.

    options: every option of the method, so that later defaults do not matter.
    r: of the next pass. fused_r: what the model was fused with, which decides the blocks with learned layers.
    """

    method: str
    options: Mapping[str, Any]
    r: ReductionSpec
    fused_r: ReductionSpec
    blocks: tuple[int, ...] | None
    dense: bool
    trim_last: bool | None
    restore: str
    depth: int

    @classmethod
    def of(cls, stack: FusedStack) -> "FusionRecord":
        """The record of a fused stack; raises MctfError for a method that JSON or its name cannot bring back."""
        method = stack.method
        options = {each.name: getattr(method, each.name) for each in fields(method) if each.init}  # type: ignore[arg-type]
        try:
            again: Any = make_method(method.name, json.loads(json.dumps(options)))
        except (TypeError, ValueError) as failure:
            again = failure
        if again != method:
            raise MctfError(
                f"method {method.name!r} cannot be saved ({shown(again)} comes back for {shown(method)}): register it "
                "by mctf.register_method, with options that are numbers or text"
            )
        return cls(
            method=method.name,
            options=options,
            r=stack.r,
            fused_r=stack.fused_r,
            blocks=stack.blocks,
            dense=stack.dense,
            trim_last=stack.trim_last,
            restore=stack.restore,
            depth=len(stack),
        )

    def as_dict(self) -> dict[str, Any]:
        """Numbers, text and lists for JSON."""
        return json.loads(json.dumps({"version": VERSION, "mctf": sys.modules["mctf"].__version__, **asdict(self)}))


def read_record(content: object, name: str) -> FusionRecord:
    """The record in the content of a config file; raises MctfError where it has none. name: of the file."""
    facts = content.get(KEY) if isinstance(content, Mapping) else None
    if facts is None:
        raise MctfError(f"{name} holds no fusion: load the model with its own library and run mctf.fuse")
    if not isinstance(facts, Mapping):
        raise MctfError(f"{name} is damaged, its fusion is {shown(facts)}: {_CURE}")
    if type(facts.get("version")) is not int or facts["version"] != VERSION:
        raise MctfError(
            f"the fusion in {name} has version {shown(facts.get('version'))}, and this mctf reads version {VERSION}: "
            "update mctf, or save the fused model again"
        )
    facts = {each.name: facts.get(each.name) for each in fields(FusionRecord)}
    blocks, options = facts["blocks"], facts["options"]
    valid = {
        "method": isinstance(facts["method"], str),
        "options": isinstance(options, Mapping) and all(isinstance(option, str) for option in options),
        "blocks": blocks is None or (isinstance(blocks, list) and all(type(block) is int for block in blocks)),
        "dense": isinstance(facts["dense"], bool),
        "trim_last": facts["trim_last"] is None or isinstance(facts["trim_last"], bool),
        "depth": type(facts["depth"]) is int,
        "restore": isinstance(facts["restore"], str),
    }
    for key, whether in valid.items():
        if not whether:
            raise MctfError(f"the fusion in {name} is damaged, its {key} is {shown(facts[key])}: {_CURE}")
    try:
        amounts = {key: plain_r(facts[key]) for key in ("r", "fused_r")}
    except MctfError as refusal:
        raise MctfError(f"the fusion in {name} is damaged: {refusal}") from None
    return FusionRecord(**facts | amounts | {"blocks": None if blocks is None else tuple(blocks)})
