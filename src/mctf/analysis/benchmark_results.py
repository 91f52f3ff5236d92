"""What a benchmark found, and what is to be said of it in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..core.schedule import ReductionSpec
from .comparison import DISTURBED, STEADY

PLAIN = "plain"
CEILING = "free_drop"
_BOUND = 0.9  # a device that has been given its work so late in a pass has waited for it


@dataclass(frozen=True)
class Result:
    """One contender: medians over rounds, spread as a share of the median, memory in MiB where known.

    launch_milliseconds: what the host takes to queue a pass on a device that works meanwhile; None on a CPU.
    """

    name: str
    r: ReductionSpec
    batch: int
    milliseconds: float
    spread: float
    images_per_second: float
    speedup: float
    gflops: float
    peak_mib: float | None
    launch_milliseconds: float | None
    difference: float | None

    @property
    def bound_by_launches(self) -> bool:
        """Whether the device waits for the host rather than the host for the device."""
        return self.launch_milliseconds is not None and self.launch_milliseconds > _BOUND * self.milliseconds


def verdicts(results: Sequence[Result]) -> list[str]:
    """For every fused contender that it does not pay, or its distance to the ceiling; and whether to trust all this."""
    ceiling = next((each for each in results if each.name == CEILING), None)
    fused = [each for each in results if each.name != PLAIN and not each.name.startswith(CEILING)]
    lines = [_gain(each, ceiling) for each in fused]
    bound = [each.name for each in fused if each.bound_by_launches]
    if bound:
        lines.append(
            f"bound by the host, which launches more slowly than the GPU computes: {', '.join(bound)}; "
            "--compile --mode reduce-overhead, or a larger batch, shows what the GPU gains"
        )
    if any(each.spread > STEADY for each in results):
        lines.append(DISTURBED)
    return lines


def _gain(fused: Result, ceiling: Result | None) -> str:
    if fused.speedup < 1:
        return f"{fused.name} r={fused.r} does not pay here: {fused.speedup:.2f} times the plain model's speed"
    gain = f"{fused.name} r={fused.r}: {fused.speedup:.2f}x"
    if ceiling is None:
        return gain
    behind = fused.milliseconds / ceiling.milliseconds - 1
    side = "slower" if behind >= 0 else "faster"  # ToMe also fuses in the first block
    return f"{gain}, {abs(behind):.0%} {side} than dropping for nothing"
