"""Tables on stdout: the column of r, and the two speed-ups of a benchmark."""

from dataclasses import replace

import pytest

from helpers.comparisons import make_result
from mctf.cli.tables import print_comparison
from mctf.evaluation.compare import Comparison


def printed(capsys: pytest.CaptureFixture[str], *reductions: object) -> list[str]:
    results = [make_result("mctf", 0.1), *(make_result("tome", 0.2) for _ in reductions[1:])]
    results = [replace(each, row=replace(each.row, r=r)) for each, r in zip(results, reductions, strict=True)]
    baseline = replace(results[0].row, method="baseline", r=0)
    print_comparison(Comparison(2, baseline, tuple(results), ()), title="a title", notes=["a note"])
    return capsys.readouterr().out.splitlines()


def test_a_mean_over_blocks_is_marked_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, (0, 13, 12, 12, 12), 16)
    cells = {line.split()[0]: line.split()[1] for line in lines if line.startswith((" mctf", " tome", " baseline"))}
    assert cells == {"baseline": "0", "mctf": "12.25*", "tome": "16"}
    assert lines[lines.index("a note") - 1].startswith("*: r differs between blocks; this is the mean over the blocks")


@pytest.mark.parametrize("r", [16, 0.35, "fast"])
def test_r_that_is_the_same_in_all_blocks_is_printed_as_given(capsys: pytest.CaptureFixture[str], r: object) -> None:
    lines = printed(capsys, r)
    assert next(line.split()[1] for line in lines if line.startswith(" mctf")) == str(r)
    assert "*" not in "".join(lines)
