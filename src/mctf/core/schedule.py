"""Per-block reduction schedules: parsing r, checking it against a model, and counting tokens per block."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real
from typing import Protocol, TypeVar

from ..errors import MctfError, did_you_mean, shown

Amount = int | float  # tokens to remove in one block: a count, or below 1 a ratio of the unprotected tokens
T = TypeVar("T")
ReductionSpec = Amount | Sequence[Amount] | str

_MOST_BLOCKS = 10_000
_MOST_TOKENS = 2**31 - 1
FAST_RATIO = 0.35  # the authors' "Fast" preset: this ratio at a quarter, half and three quarters of the depth


def fast_blocks(depth: int) -> tuple[int, ...]:
    """Blocks at a quarter, half and three quarters of the depth: 3, 6, 9 of the authors' twelve."""
    return tuple(sorted({round(depth * part / 4) for part in (1, 2, 3)} - {depth}))


def parse_r(value: object) -> ReductionSpec:
    """r as typed in a shell, a config file or Python: 16, 0.35, "1e-1", "fast", or one amount per block ("0,8,8").

    Raises MctfError where no model could take it; `make_schedule` checks it against a model.
    """
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        spec: object = _parse_word(parts[0]) if len(parts) == 1 else tuple(_parse_word(part) for part in parts)
    else:
        spec = tuple(_parse_word(part) for part in value) if isinstance(value, (list, tuple)) else value
    depth = len(spec) if isinstance(spec, tuple) else 1
    make_schedule(spec, depth=depth, blocks=None, default_blocks=())  # type: ignore[arg-type]
    return spec  # type: ignore[return-value]


def parse_blocks(value: object) -> tuple[int, ...]:
    """Block numbers from "3,6,9" or a list; raises MctfError for anything else."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, Iterable):
        numbers = [_parse_word(part) for part in _take(parts)]
        if numbers and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return tuple(numbers)  # type: ignore[arg-type]
    raise MctfError(f"blocks {shown(value)} is not a list of block numbers: write 3,6,9")


def _parse_word(word: object) -> object:
    """A number where the text is one; anything else as it is."""
    if isinstance(word, str):
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                continue
    return word


def read_blocks(blocks: Iterable[int] | None) -> tuple[int, ...] | None:
    """The user's choice of blocks as a tuple: an iterator could be read only once."""
    if blocks is None:
        return None
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        word = blocks if isinstance(blocks, str) else shown(blocks)
        raise MctfError(f"blocks={shown(blocks)} is not a list of block numbers: write blocks=[{word[:80]}]")
    return _take(blocks)


def _take(blocks: Iterable[T]) -> tuple[T, ...]:
    """All entries of an iterable that need not end; raises MctfError where it is too long or fails."""
    try:
        taken = tuple(islice(blocks, _MOST_BLOCKS + 1))
    except Exception:  # a tensor without axes, or another's iterator
        raise MctfError(f"blocks {shown(blocks)} is not a list of block numbers: write 3,6,9") from None
    if len(taken) > _MOST_BLOCKS:
        raise MctfError(f"blocks names more than {_MOST_BLOCKS:,} blocks: list each block once")
    return taken


def make_schedule(
    r: ReductionSpec, *, depth: int, blocks: Iterable[int] | None, default_blocks: Iterable[int]
) -> tuple[Amount, ...]:
    """One amount per block from the user's `r` and `blocks`; raises MctfError where they make no sense."""
    if isinstance(r, str):
        if r != "fast":
            raise MctfError(_preset_error(r))
        chosen = fast_blocks(depth) if blocks is None else _check_blocks(blocks, depth)
        return tuple(FAST_RATIO if block in chosen else 0 for block in range(depth))
    if isinstance(r, Sequence) and not isinstance(r, (bytes, bytearray, memoryview)):
        if blocks is not None:
            raise MctfError(
                "r is a list with one entry per block: leave out blocks= and write 0 where nothing is fused"
            )
        if len(r) != depth:
            raise MctfError(f"r has {len(r)} entries but the model has {depth} blocks: give one entry per block")
        return tuple(_check_amount(amount) for amount in r)
    amount = _check_amount(r)
    chosen = tuple(default_blocks) if blocks is None else _check_blocks(blocks, depth)
    return tuple(amount if block in chosen else 0 for block in range(depth))


def plain_r(r: ReductionSpec) -> ReductionSpec:
    """A checked r in Python's own numbers, and a list as one of its own: it is printed, saved and compared."""
    if isinstance(r, str):
        return r
    if isinstance(r, Sequence):
        amounts = [_check_amount(amount) for amount in r]
        return amounts if isinstance(r, list) else tuple(amounts)
    return _check_amount(r)


def _preset_error(r: str) -> str:
    try:
        float(r)
    except ValueError:
        return f"r={shown(r)} is not a preset: {did_you_mean(r, ['fast'])}"
    return f"r={shown(r)} is text: write r={r.strip()[:80]}, without quotes"


def _check_amount(amount: object) -> Amount:
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise MctfError(f"r must be a number, a list of numbers or 'fast', not {shown(amount)}")
    if isinstance(amount, Integral):
        if amount < 0:
            raise MctfError(f"r={shown(amount)} is negative: give the number of tokens to remove per block, 0 for none")
        if int(amount) > _MOST_TOKENS:
            raise MctfError(f"r={shown(amount)} is more tokens than a model can have: write 16 or 0.35")
        return int(amount)
    try:
        value = float(amount)
    except OverflowError:  # a fraction of large numbers
        value = math.inf
    if not 0 <= value < 1:
        raise MctfError(
            f"r={shown(amount)} is neither a whole number of tokens nor a ratio in [0, 1): write 16 or 0.35"
        )
    return value


def _check_blocks(blocks: Iterable[int], depth: int) -> tuple[int, ...]:
    chosen: list[int] = []
    for block in blocks:
        if isinstance(block, bool) or not isinstance(block, Integral) or not -depth <= block < depth:
            raise MctfError(f"blocks names {shown(block)}, but the model has blocks 0 to {depth - 1}")
        chosen.append(int(block) % depth)
    return tuple(chosen)


def requested_tokens(amount: Amount, unprotected: int) -> int:
    """The count itself, or that ratio of the unprotected tokens, rounded down."""
    # 0.29 * 100 is 28.999…: a ratio that means a whole number gives it
    return amount if isinstance(amount, int) else math.floor(amount * unprotected + 1e-9)


@dataclass(frozen=True)
class Reduction:
    """Tokens of one block: how many enter, how many the schedule removes, how many are removed, how many remain."""

    tokens: int
    num_requested: int
    num_reduced: int
    num_remaining: int


class ReductionCounts(Protocol):
    """The counting part of a method; see `mctf.methods.base.Method`."""

    def num_requested(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int: ...
    def num_reduced(self, amount: Amount, tokens: int, *, protected: int, initial: int, stage: int) -> int: ...
    def num_remaining(self, tokens: int, r: int) -> int: ...


def reductions(schedule: Sequence[Amount], tokens: int, *, protected: int, method: ReductionCounts) -> list[Reduction]:
    """The reduction of every block of a model that starts with `tokens` tokens."""
    initial, result = tokens, []
    for index, amount in enumerate(schedule):
        stage = stage_of(schedule, index)
        requested = method.num_requested(amount, tokens, protected=protected, initial=initial, stage=stage)
        reduced = method.num_reduced(amount, tokens, protected=protected, initial=initial, stage=stage)
        result.append(Reduction(tokens, requested, reduced, method.num_remaining(tokens, reduced)))
        tokens = result[-1].num_remaining
    return result


def stage_of(schedule: Sequence[Amount], index: int) -> int:
    """Number of reducing blocks before this one."""
    return sum(1 for amount in schedule[:index] if amount)
