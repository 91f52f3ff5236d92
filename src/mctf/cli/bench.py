"""`mctf bench`: plain, fused and free-drop models against the clock, in one run."""

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.schedule import ReductionSpec
from ..errors import MctfError
from .options import (
    device_option,
    dtype_option,
    image_size_option,
    json_option,
    output_option,
    parse_image_size,
    parse_names,
    parse_numbers,
    parse_reductions,
    threads_option,
)
from .output import check_writable, give_json
from .progress import progress

if TYPE_CHECKING:
    from torch import device as Device

    from ..evaluation.benchmark import Contest, Result


@click.command(
    "bench",
    epilog="""\b
Examples:
  mctf bench deit_small_patch16_224
  mctf bench deit_small_patch16_224 deit_base_patch16_224 -r 16,fast --batch 256 --dtype bfloat16 --compile
  mctf bench deit_base_patch16_384 -r fast --batch 1 --dtype bfloat16 --compile --mode reduce-overhead
  mctf bench deit_small_patch16_224 --batch 256 --dtype bfloat16 --compile --training
""",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option("-r", "reductions", default="16", show_default=True, help="Tokens to fuse a block: 16, 0.35 or fast.")
@click.option("--method", "-m", "methods", default="mctf,mctf_exact,tome", show_default=True, help="Methods to time.")
@click.option("--batch", "batches", default="8", show_default=True, help="Batch sizes, as in 1,8,64.")
@image_size_option
@dtype_option
@click.option("--compile", "compiled", is_flag=True, help="Compile every contender with torch.compile.")
@click.option("--training", is_flag=True, help="Time forward and backward; --dtype is then that of autocast.")
@click.option("--mode", default="default", show_default=True, help="Mode of torch.compile, as reduce-overhead.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Timings of each contender.")
@device_option
@threads_option
@output_option
@json_option
def command(output: Path | None, as_json: bool, **options: Any) -> None:
    """Images per second of MODEL… (timm names, or hf:NAME): plain, fused by each method, tokens dropped for nothing.

    Weights are random: speed does not depend on them. Every fused model is first checked against plain operations
    in float32. Contenders are timed in turn, round after round; medians are given, for the speed-up
    that of the ratio within a round.
    """
    if output is not None:
        check_writable(output)
    asked = _Benchmarking(**options)
    tables = asked.run()
    give_json(asked.facts(tables), file=output, as_json=as_json)
    if as_json:
        return
    from .tables import print_benchmark

    for table in tables:
        print_benchmark(table.rows, title=table.title, notes=table.notes)


@dataclass(frozen=True)
class _Table:
    """One contest: what it was, a row for each contender, and what is to be said of them."""

    title: str
    rows: tuple["Result", ...]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _Benchmarking:
    """What the user asked for; the fields are options of the command."""

    models: tuple[str, ...]
    reductions: str
    methods: str
    batches: str
    image_size: str | None
    dtype: str
    compiled: bool
    training: bool
    mode: str
    rounds: int
    device_name: str | None
    threads: int | None

    @property
    def device(self) -> "Device":
        from ..evaluation.environment import pick_device

        return pick_device(self.device_name)

    def run(self) -> list[_Table]:
        """Every model with every r and batch size."""
        import torch

        from ..hosts import find_host
        from ..models.loading import create

        if self.mode != "default" and not self.compiled:
            raise MctfError(f"--mode {self.mode} is of torch.compile: add --compile")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device, size = self.device, parse_image_size(self.image_size)
        cases = list(product(parse_reductions(self.reductions), parse_numbers(self.batches, "--batch")))
        tables = []
        for name in self.models:
            model: Any = create(name, image_size=size)
            model = model.to(device, torch.float32 if self.training else getattr(torch, self.dtype))
            own_size = size or find_host(model).image_size
            for r, batch in cases:
                tables.append(self._table(name, model, self._contest(r, batch, own_size)))
        return tables

    def _contest(self, r: ReductionSpec, batch: int, image_size: tuple[int, int]) -> "Contest":
        import torch

        from ..evaluation.benchmark import Contest

        return Contest(
            methods=tuple(parse_names(self.methods)),
            r=r,
            batch=batch,
            image_size=image_size,
            compiled=self.mode if self.compiled else None,
            rounds=self.rounds,
            training=getattr(torch, self.dtype) if self.training else None,
        )

    def _table(self, name: str, model: Any, contest: "Contest") -> _Table:
        from ..evaluation.benchmark import verdicts
        from ..evaluation.environment import describe_device

        device = describe_device(next(model.parameters()).device)
        size = "x".join(map(str, contest.image_size))
        title = f"{name}, r={contest.r}, batch {contest.batch}, {size}, {device}, {self.dtype}"
        title += ", forward and backward" if self.training else ""
        rows = _run(model, contest, title)
        return _Table(title, rows, verdicts(rows))

    def facts(self, tables: list[_Table]) -> dict[str, Any]:
        """The JSON object."""
        from ..evaluation.environment import command_line, commit, describe_device, versions

        return {
            "command": command_line(),
            "device": describe_device(self.device),
            "dtype": self.dtype,
            "compiled": self.mode if self.compiled else None,
            "training": self.training,
            "rounds": self.rounds,
            "versions": versions(),
            "commit": commit(),
            "tables": [asdict(table) for table in tables],
        }


def _run(model: Any, contest: "Contest", title: str) -> tuple["Result", ...]:
    import torch

    from ..evaluation.benchmark import benchmark

    contenders = len(contest.methods) + 3
    with progress(title, total=contenders + contest.rounds + 2) as tick:
        try:
            return benchmark(model, contest, tick=tick)
        except torch.OutOfMemoryError:
            raise MctfError(f"too little memory for a batch of {contest.batch}: lower --batch") from None
