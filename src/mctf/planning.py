"""Token counts and FLOPs of a fused model, computed from shapes: nothing runs and nothing changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from typing import Any, cast

import torch
from torch import nn

from ._utils import format_blocks, format_counts, parse_image_size
from .core.budget import ReductionSweep, check_flops, reduction_steps
from .core.flops import Cost
from .core.schedule import Amount, Reduction, ReductionSpec, plain_r, read_blocks, reductions
from .errors import MctfError, shown
from .hosts import Architecture, find_host
from .hosts.base import Host
from .methods import make_method
from .methods._layers import split_state_dict
from .methods.base import Adaptive, Method, check_bool
from .models.loading import create_empty
from .schedule_file import Schedule, read_schedule

ScheduleSource = Schedule | Mapping[str, Any] | str | PathLike[str]
DEFAULT_METHOD = "mctf"
TRIMMED = "the last block computes queries, projection and MLP for the tokens that the head reads, no others"
DEPENDS = "the number of kept tokens depends on the image: token counts and GFLOPs are upper bounds"


@dataclass(frozen=True)
class Plan:
    """Tokens and multiply-adds of every block of one model under one setting.

    gflops, gflops_base: of the fused model and of the baseline by the paper's accounting (fvcore's convention, one FLOP
    per multiply-add). gflops_run: what this implementation executes. With r = 0 it is fvcore's count of the baseline,
    and differs from gflops_base for LV-ViT alone, whose second classifier the paper leaves out.
    adaptive: each image decides how many tokens remain; the counts are then upper bounds, and
    `mctf.evaluation.adaptive_flops` measures real images.
    trimmed: the last block computes only what the head reads.
    parameters: of the model with the layers of a learned method. learned_parameters: of these layers alone.
    """

    model: str
    method: str
    r: ReductionSpec
    image_tokens: int
    reductions: tuple[Reduction, ...]
    block_gflops: tuple[float, ...]
    gflops: float
    gflops_base: float
    gflops_run: float
    adaptive: bool = False
    trimmed: bool = False
    parameters: int = 0
    learned_parameters: int = 0

    @property
    def token_counts(self) -> list[int]:
        """Tokens after each block."""
        return [step.num_remaining for step in self.reductions]

    @property
    def removed(self) -> list[int]:
        """Tokens fewer after each block: the r by which `free_drop` drops as many."""
        return [step.tokens - step.num_remaining for step in self.reductions]

    @property
    def saved(self) -> float:
        """Share of the baseline's FLOPs that is saved, by the paper's accounting."""
        return 1 - self.gflops / self.gflops_base

    @property
    def capped(self) -> list[int]:
        """Blocks that remove fewer tokens than requested."""
        return [block for block, step in enumerate(self.reductions) if step.num_reduced < step.num_requested]

    @property
    def notes(self) -> list[str]:
        """A line where r was capped in some blocks, and one where token counts depend on the image."""
        notes = [DEPENDS] if self.adaptive else []
        if self.trimmed:
            notes.append(TRIMMED)
        if capped := self.capped:
            requested = format_counts([self.reductions[block].num_requested for block in capped])
            reduced = format_counts([self.reductions[block].num_reduced for block in capped])
            notes.insert(0, f"{format_blocks(capped)}: r={requested} capped to {reduced} (too few tokens left)")
        return notes

    def as_dict(self) -> dict[str, object]:
        """Numbers and strings for JSON."""
        costs = ("gflops", "gflops_base", "gflops_run", "saved", "parameters", "learned_parameters")
        return {name: getattr(self, name) for name in ("model", "method", "r", "token_counts", *costs, "notes")}

    def __str__(self) -> str:
        headings = ["block", "tokens in", "fused", "tokens out", "GFLOPs"]
        cells = [
            [str(index), str(step.tokens), str(step.num_reduced), str(step.num_remaining), f"{cost:.3f}"]
            for index, (step, cost) in enumerate(zip(self.reductions, self.block_gflops, strict=True))
        ]
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        rows = [f"{self.model}, {self.method} r={self.r}"]
        for row in (headings, *cells):
            rows.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        change = f"{self.saved:.0%} saved" if self.saved >= 0 else f"{-self.saved:.0%} more"
        rows.append(f"{self.gflops:.2f} GFLOPs of {self.gflops_base:.2f} ({change})")
        if self.learned_parameters:
            rows.append(
                f"{self.parameters / 1e6:.1f} M parameters, {self.learned_parameters / 1e6:.2f} M of them learned"
            )
        return "\n".join(rows + [f"note: {note}" for note in self.notes])


@dataclass(frozen=True)
class FusionSetting:
    """How to fuse one model. amounts: one per block, as r and blocks give them."""

    method: Method
    r: ReductionSpec
    blocks: tuple[int, ...] | None
    amounts: tuple[Amount, ...]


@dataclass(frozen=True)
class FusionRequest:
    """How to fuse any model, checked as far as possible without one: by r, by a budget, or by a schedule.

    r: None for the method's default. flops: share of the baseline's FLOPs to keep, None where r or a schedule is given.
    """

    method: Method
    r: ReductionSpec | None
    flops: float | None
    blocks: tuple[int, ...] | None
    schedule: Schedule | None

    @classmethod
    def of(
        cls,
        method: str | None,
        *,
        r: ReductionSpec | None,
        flops: float | None,
        blocks: Iterable[int] | None,
        schedule: ScheduleSource | None,
        options: Mapping[str, object],
    ) -> "FusionRequest":
        """The arguments of `mctf.fuse`; raises MctfError where they contradict each other."""
        if r is not None and flops is not None:
            raise MctfError(f"r={shown(r)} and flops={shown(flops)} both say how much to fuse: give one of them")
        budget = None if flops is None else check_flops(flops)
        numbers = read_blocks(blocks)
        if schedule is not None:
            for name, given in (("r", r), ("flops", flops), ("blocks", numbers)):
                if given is not None:
                    raise MctfError(f"a schedule says how much each block fuses: leave out {name}={shown(given)}")
            saved = read_schedule(schedule)
            saved.check_method(method, options)
            return cls(make_method(saved.method, dict(saved.options)), saved.r, None, None, saved)
        chosen = make_method(DEFAULT_METHOD if method is None else method, dict(options))
        if budget is not None and chosen.adaptive:
            raise MctfError(
                f"{chosen.name} keeps as many tokens as each image needs, so a budget needs images: "
                "mctf compare --flops measures them"
            )
        return cls(chosen, r, budget, numbers, None)

    def resolve(
        self,
        host: Host,
        architecture: Architecture | None = None,
        *,
        dense: bool = False,
        trim_last: bool | None = None,
    ) -> FusionSetting:
        """The setting for one model; raises MctfError where they do not fit. architecture: of its own size by default.

        A budget is solved by bisection over plans: nothing runs.
        """
        method, depth = self.method.resolve(class_token=host.class_token), host.depth
        own = cache(lambda: host.architecture(None) if architecture is None else architecture)
        method = method.fit(lambda: own().blocks, lambda: own().tokens)

        def amounts(r: ReductionSpec) -> tuple[Amount, ...]:
            per_block = isinstance(r, tuple) and self.flops is not None  # a solved r names every block itself
            schedule = method.make_schedule(r, depth=depth, blocks=None if per_block else self.blocks)
            method.check_schedule(schedule)
            return schedule

        r = method.default_r if self.r is None else self.r
        if self.schedule is not None or self.flops is not None:
            architecture = own()
        if self.schedule is not None and architecture is not None:
            self.schedule.check_model(architecture)
        if self.flops is not None and architecture is not None:
            shapes = replace(architecture, reads_every_token=architecture.reads_every_token or dense)
            plans = cache(lambda r: plan_architecture(shapes, method, amounts(r), r, trim_last=trim_last))
            chosen = [block for block, amount in enumerate(amounts(1)) if amount]
            steps = reduction_steps(r, blocks=chosen, depth=depth, tokens=shapes.tokens)
            sweep = ReductionSweep(method.name, steps, lambda r: plans(r).gflops)
            r = sweep.closest_share(self.flops, baseline=plans(0).gflops_base)
        return FusionSetting(method, r, self.blocks, amounts(r))


def plan(
    model: nn.Module | str,
    *,
    r: ReductionSpec | None = None,
    flops: float | None = None,
    blocks: Iterable[int] | None = None,
    method: str | None = None,
    schedule: ScheduleSource | None = None,
    image_size: int | tuple[int, int] | None = None,
    dense: bool = False,
    trim_last: bool | None = None,
    architecture: Architecture | None = None,
    **options: object,
) -> Plan:
    """Token counts and GFLOPs of a model (or its name: timm's, or hf:NAME) under a setting, without running it.

    flops, schedule: as for `mctf.fuse`.
    architecture: of this model at this image size, to plan many settings without working it out for each.
    """
    check_bool(dense=dense)
    if trim_last is not None:
        check_bool(trim_last=trim_last)
    size = None if image_size is None else parse_image_size(image_size)
    request = FusionRequest.of(method, r=r, flops=flops, blocks=blocks, schedule=schedule, options=options)
    module = create_empty(model, image_size=size) if isinstance(model, str) else model
    host = find_host(module)
    if architecture is None:
        architecture = host.architecture(size)
    elif not isinstance(architecture, Architecture):
        raise MctfError(f"architecture={shown(architecture)} is no Architecture: leave it out")
    setting = request.resolve(host, architecture, dense=dense, trim_last=trim_last)
    with torch.device("meta"):
        layers = setting.method.make_layers(architecture.blocks, setting.amounts)
    learned = 0 if layers is None else sum(value.numel() for value in layers.parameters())
    own, _ = split_state_dict(dict(module.named_parameters()))
    parameters = learned + sum(value.numel() for value in own.values())
    architecture = replace(architecture, reads_every_token=architecture.reads_every_token or dense)
    planned = plan_architecture(architecture, setting.method, setting.amounts, plain_r(setting.r), trim_last=trim_last)
    return replace(planned, parameters=parameters, learned_parameters=learned)


def plan_architecture(
    architecture: Architecture, method: Method, schedule: Sequence[Amount], r: ReductionSpec, *, trim_last: bool | None
) -> Plan:
    """The plan of a schedule on these shapes. r: what the schedule was made from. trim_last: as for `mctf.fuse`."""
    per_block = reductions(schedule, architecture.tokens, protected=architecture.protected, method=method)
    costs = block_costs(architecture, method, schedule, per_block)
    every = architecture.tokens
    left = every if architecture.reads_every_token else per_block[-1].num_remaining
    trimmed = trims(architecture, method, schedule, trim_last)
    if trimmed:
        left = architecture.protected
        macs = architecture.blocks[-1].first(per_block[-1].tokens, left)
        costs[-1] = Cost(paper=macs, run=macs)
    whole = whole_cost(architecture, costs, left)
    plain = [Cost(paper=shape.plain(every), run=shape.plain(every)) for shape in architecture.blocks]
    return Plan(
        model=architecture.name,
        method=method.name,
        r=r,
        image_tokens=every,
        reductions=tuple(per_block),
        block_gflops=tuple(cost.paper / 1e9 for cost in costs),
        gflops=whole.paper / 1e9,
        gflops_base=whole_cost(architecture, plain, every).paper / 1e9,
        gflops_run=whole.run / 1e9,
        adaptive=method.adaptive,
        trimmed=trimmed,
    )


def trims(architecture: Architecture, method: Method, schedule: Sequence[Amount], trim_last: bool | None) -> bool:
    """Whether the last block runs for protected tokens alone; see `FusedStack`."""
    read = architecture.reads_protected_only and not architecture.reads_every_token and architecture.protected > 0
    return read and method.trims(schedule, trim_last)


def block_costs(
    architecture: Architecture, method: Method, schedule: Sequence[Amount], per_block: Sequence[Reduction]
) -> list[Cost]:
    """Multiply-adds of every block under this schedule."""
    costs = []
    for shape, amount, step in zip(architecture.blocks, schedule, per_block, strict=True):
        if method.adaptive and amount:
            cost = cast(Adaptive, method).cost_of(
                shape, step.tokens, step.num_remaining, protected=architecture.protected
            )
        else:
            cost = method.cost(shape, step.tokens, step.num_reduced, protected=architecture.protected)
        costs.append(cost)
    return costs


def whole_cost(architecture: Architecture, blocks: Sequence[Cost], left: int) -> Cost:
    """Multiply-adds of the whole model with `left` tokens after its last block."""
    around = architecture.stem + architecture.head + architecture.head_per_token * left
    second_head = architecture.second_head * (left - architecture.protected)
    paper, run = sum(cost.paper for cost in blocks), sum(cost.run for cost in blocks)
    return Cost(paper=around + paper, run=around + second_head + run)
