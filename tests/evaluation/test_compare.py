"""`mctf compare`: methods brought to one cost, ranked, drawn; what cannot take part is listed with the reason."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import mctf
from helpers.command_line import Command
from helpers.images import write_folder
from helpers.models import make_images
from mctf import MctfError
from mctf.cli.tables import print_outcome
from mctf.evaluation.adaptive_flops import mean_tokens
from mctf.evaluation.compare import CONTROL, FREE, LEARNED, Entrant, Outcome, Standing, enter, kind_of, verdicts
from mctf.evaluation.evaluate import Row, Setting
from mctf.evaluation.fidelity import Scores
from mctf.evaluation.match_flops import Ladder, find_ladder
from mctf.methods import make_method
from mctf.methods._layers import full_state_dict, stash_layers
from mctf.viz.plots import Line, Panel, draw, panels, separate_labels, write_plot

OWN_COST = {"a_vit", "ia_red2"}
FIXED = [name for name in mctf.methods() if not make_method(name, {}).adaptive]
WANTED = 0.024  # test_vit costs 0.038
LOW = 0.0175  # out of reach of EViT, which acts in three of its six blocks
TOLERANCE = 0.02  # a token of test_vit, which has a hundred, is about one percent of a block


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(4, 3, 160, 160, generator=torch.Generator().manual_seed(1))


class TestBudget:
    @pytest.mark.parametrize("method", FIXED)
    def test_a_plan_is_brought_to_the_cost(self, tiny: nn.Module, images: torch.Tensor, method: str) -> None:
        ladder = find_ladder(tiny, method, images=images)
        assert ladder is not None
        r = ladder.nearest(WANTED)
        assert mctf.plan(tiny, method=method, r=r).gflops == pytest.approx(WANTED, rel=TOLERANCE)
        assert isinstance(r, float) == isinstance(make_method(method, {}).default_r, float)

    @pytest.mark.parametrize("method", ["mctf", "tome", "evit"])
    def test_no_other_rung_is_nearer(self, tiny: nn.Module, images: torch.Tensor, method: str) -> None:
        ladder = find_ladder(tiny, method, images=images)
        assert ladder is not None
        best = min(abs(ladder.cost(rung) - WANTED) for rung in ladder.rungs)
        assert abs(ladder.cost(ladder.nearest(WANTED)) - WANTED) == best

    def test_counts_differ_by_one_and_keep_to_the_methods_blocks(self, tiny: nn.Module, images: torch.Tensor) -> None:
        ladder = find_ladder(tiny, "mctf", images=images)
        assert ladder is not None
        assert ladder.rungs[0] == (0, 1, 0, 0, 0, 0)
        assert ladder.rungs[4] == 1
        assert ladder.rungs[6] == (0, 2, 2, 1, 1, 1)
        assert all(before >= after for before, after in pairwise(map(ladder.cost, ladder.rungs[5:60])))

    def test_the_nearer_side_is_taken_be_it_above_or_below(self) -> None:
        ladder = Ladder("some", (1, 2, 3), {1: 3.0, 2: 2.0, 3: 1.0}.__getitem__)
        assert [ladder.nearest(cost) for cost in (3.0, 2.6, 2.4, 1.6, 1.4, 1.0)] == [1, 1, 2, 2, 3, 3]

    def test_costs_out_of_reach_are_refused_with_the_range(self) -> None:
        ladder = Ladder("some", (1, 2), {1: 3.0, 2: 2.0}.__getitem__)
        for cost in (1.9, 3.1):
            with pytest.raises(MctfError, match=rf"some cannot cost {cost} GFLOPs .* from 2\.000 to 3\.000"):
                ladder.nearest(cost)

    def test_where_images_decide_the_cost_is_measured(self, tiny: nn.Module, images: torch.Tensor) -> None:
        ladder = find_ladder(tiny, "ats", images=images)
        assert ladder is not None
        r = ladder.nearest(WANTED)
        fused = mctf.fuse(copy_of(tiny), "ats", r=r)
        measured = mean_tokens(fused, [images]).gflops
        assert measured == pytest.approx(WANTED, rel=TOLERANCE)
        assert measured == ladder.cost(r)
        assert measured < mctf.plan(tiny, method="ats", r=r).gflops

    @pytest.mark.parametrize("method", sorted(OWN_COST & set(mctf.methods())))
    def test_what_r_does_not_move_has_no_ladder(self, tiny: nn.Module, images: torch.Tensor, method: str) -> None:
        assert find_ladder(tiny, method, images=images) is None


def copy_of(model: nn.Module) -> nn.Module:
    copy = timm.create_model("test_vit", num_classes=3).eval()
    copy.load_state_dict(model.state_dict())
    return copy


class TestEnter:
    def test_every_method_takes_part_at_the_cost_or_at_its_own(self, tiny: nn.Module, images: torch.Tensor) -> None:
        ticks: list[int] = []
        entrants, refusals = enter(tiny, list(mctf.methods()), [WANTED], images=images, tick=lambda: ticks.append(1))
        assert refusals == []
        assert [each.setting.method for each in entrants] == list(mctf.methods())
        assert len(ticks) == len(entrants)
        for each in entrants:
            own = each.setting.method in OWN_COST
            assert each.target == (None if own else WANTED)
            if own:
                assert each.setting.r == make_method(each.setting.method, {}).default_r

    def test_learned_layers_are_untrained_until_they_are_loaded(self, tiny: nn.Module, images: torch.Tensor) -> None:
        (entrant,), _ = enter(tiny, ["dynamic_vit"], [WANTED], images=images)
        assert (entrant.kind, entrant.untrained) == (LEARNED, True)
        with pytest.warns(UserWarning, match="untrained"):
            trained = mctf.fuse(copy_of(tiny), "dynamic_vit")
        loaded = copy_of(tiny)
        layers = {key: value for key, value in full_state_dict(trained).items() if key not in loaded.state_dict()}
        stash_layers(loaded, layers)
        (entrant,), _ = enter(loaded, ["dynamic_vit"], [WANTED], images=images)
        assert (entrant.kind, entrant.untrained) == (LEARNED, False)
        entrants, refusals = enter(loaded, ["spvit", "mctf"], [WANTED], images=images)
        assert [each.setting.method for each in entrants] == ["mctf"]
        assert "layers of another method than spvit" in refusals[0].reason

    def test_kinds(self) -> None:
        kinds = {name: kind_of(make_method(name, {})) for name in mctf.methods()}
        assert {name for name, kind in kinds.items() if kind == CONTROL} == {"random", "free_drop"}
        assert {"mctf", "tome", "evit", "bat", "ats"} <= {name for name, kind in kinds.items() if kind == FREE}
        assert {"dynamic_vit", "spvit", "a_vit", "ia_red2"} <= {n for n, kind in kinds.items() if kind == LEARNED}

    def test_a_model_without_a_class_token_is_refused_by_those_who_read_it(self) -> None:
        model = timm.create_model("test_vit", num_classes=3, class_token=False, global_pool="avg").eval()
        pixels = make_images(model, 2)
        base = mctf.plan(model, r=0).gflops
        entrants, refusals = enter(model, ["evit", "mctf", "tome"], [0.7 * base], images=pixels)
        assert [each.setting.method for each in entrants] == ["mctf", "tome"]
        assert [each.method for each in refusals] == ["evit"]
        assert refusals[0].target is None
        assert "class token" in refusals[0].reason

    def test_targets_out_of_reach_are_listed_one_by_one(self, tiny: nn.Module, images: torch.Tensor) -> None:
        entrants, refusals = enter(tiny, ["mctf", "evit"], [LOW, WANTED, 9], images=images)
        assert [(each.setting.method, each.target) for each in entrants] == [
            ("mctf", LOW),
            ("mctf", WANTED),
            ("evit", WANTED),
        ]
        assert [(each.method, each.target) for each in refusals] == [("mctf", 9), ("evit", LOW), ("evit", 9)]
        assert "name a cost from" in refusals[1].reason


def standing(
    method: str, kl: float | None, *, kind: str = FREE, target: float | None = 0.7, apart: float = 0.0, **more: Any
) -> Standing:
    """apart: what the KL of two images lies above and below the mean."""
    measured = {"top1": 50.0, "top5": 90.0, "agreement": 90.0, "class_cosine": 0.9, "gflops": target or 1.0, **more}
    row = Row(r=16, method=method, kl=kl, kl_error=apart, images_per_second=1.0, **measured)
    each = None if kl is None else torch.tensor([kl - apart, kl + apart])
    scores = Scores(None, None, None, each, torch.full((2,), row.class_cosine))
    return Standing(Entrant(Setting(method), target, kind, untrained=False), row, scores)


class TestVerdicts:
    def test_mctf_keeps_the_lowest(self) -> None:
        found = verdicts([standing("tome", 0.2), standing("mctf", 0.1), standing("evit", 0.3)])
        assert found == [
            "at 0.7 GFLOPs mctf loses least: KL 0.1",
            "mctf keeps the lowest KL of the parameter-free methods: KL 0.1, and tome, the next, KL 0.2",
        ]

    def test_who_beats_it_and_by_how_much(self) -> None:
        found = verdicts([standing("mctf", 0.2), standing("evit", 0.15), standing("mctf_exact", 0.1)])
        assert found[0] == "at 0.7 GFLOPs mctf_exact loses least: KL 0.1"
        assert "mctf does not keep the lowest KL" in found[1]
        assert "evit has KL 0.15, 25% less than mctf with KL 0.2" in found[1]
        assert "mctf_exact, its variant, has KL 0.1" in found[1]

    def test_what_these_images_do_not_tell_apart_is_not_ranked(self) -> None:
        close = [standing("mctf", 0.2), standing("evit", 0.15, apart=0.03), standing("tome", 0.9)]
        assert verdicts(close)[1] == (
            "mctf and evit, the best other of the parameter-free methods, are too close to call on these images: "
            "KL 0.2 and KL 0.15, 0.0500 ± 0.0300 apart"
        )
        told = [standing("mctf", 0.2), standing("evit", 0.15, apart=0.02), standing("tome", 0.9)]
        assert "evit has KL 0.15" in verdicts(told)[1]
        same_images = [standing("mctf", 0.2, apart=0.1), standing("evit", 0.15, apart=0.09)]
        assert "evit has KL 0.15" in verdicts(same_images)[1]  # both find the second image as much harder

    def test_learned_ones_controls_and_own_costs_are_no_rivals(self) -> None:
        rows = [
            standing("mctf", 0.2),
            standing("tome", 0.3),
            standing("dynamic_vit", 0.1, kind=LEARNED),
            standing("random", 0.15, kind=CONTROL),
            standing("a_vit", 0.0, kind=LEARNED, target=None),
        ]
        found = verdicts(rows)
        assert found[0] == "at 0.7 GFLOPs dynamic_vit loses least: KL 0.1"
        assert "mctf keeps the lowest KL" in found[1]

    def test_every_target_is_judged(self) -> None:
        found = verdicts([standing("mctf", 0.2, target=0.9), standing("mctf", 0.3, target=0.5)])
        assert found == ["at 0.5 GFLOPs mctf loses least: KL 0.3", "at 0.9 GFLOPs mctf loses least: KL 0.2"]

    def test_without_classes_the_cosine_speaks(self) -> None:
        rows = [standing("mctf", None, class_cosine=0.9), standing("tome", None, class_cosine=0.8)]
        assert verdicts(rows)[0] == "at 0.7 GFLOPs mctf loses least: cosine 0.9000"
        assert "lowest distance" in verdicts(rows)[1]


class TestColumnOfR:
    def printed(self, capsys: pytest.CaptureFixture[str], *reductions: object) -> list[str]:
        rows = [standing("mctf", 0.1), *(standing("tome", 0.2) for _ in reductions[1:])]
        rows = [replace(each, row=replace(each.row, r=r)) for each, r in zip(rows, reductions, strict=True)]
        base = replace(rows[0].row, method="base", r=0)
        print_outcome(Outcome(2, base, tuple(rows), ()), title="a title", notes=["a note"])
        return capsys.readouterr().out.splitlines()

    def test_a_mean_over_blocks_is_marked_and_explained(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = self.printed(capsys, (0, 13, 12, 12, 12), 16)
        cells = {line.split()[0]: line.split()[1] for line in lines if line.startswith((" mctf", " tome", " base"))}
        assert cells == {"base": "0", "mctf": "12.25*", "tome": "16"}
        start = lines.index("a note") - 1
        assert lines[start].startswith("*: r differs from block to block, and this is the mean over the blocks that")

    @pytest.mark.parametrize("r", [16, 0.35, "fast"])
    def test_r_that_is_the_same_in_all_blocks_stands_as_it_is(self, capsys, r: object) -> None:
        lines = self.printed(capsys, r)
        assert next(line.split()[1] for line in lines if line.startswith(" mctf")) == str(r)
        assert "*" not in "".join(lines)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd, "compare")


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory, tiny: nn.Module) -> tuple[object, ...]:
    """Arguments that every call begins with."""
    folder = tmp_path_factory.mktemp("compare")
    write_folder(folder / "pictures", *(f"{name}/{index}.jpg" for name in ("cat", "dog", "emu") for index in range(2)))
    save_file(tiny.state_dict(), folder / "tiny.safetensors")
    words = ("test_vit", "--data", folder / "pictures", "--weights", folder / "tiny.safetensors")
    return (*words, "--batch-size", 4)


class TestCommand:
    def test_all_methods_as_json_in_a_file_and_a_plot(
        self, run: Command, basic: tuple[object, ...], tmp_path: Path
    ) -> None:
        files = ("--output", tmp_path / "found.json", "--plot", tmp_path / "found.svg")
        answer = run(*basic, "--gflops", f"{WANTED},9,0.03", "--json", *files)
        assert answer.code == 0, answer.err
        assert answer.err == ""
        found = json.loads(answer.out)
        assert found == json.loads((tmp_path / "found.json").read_text())
        assert found["images"] == 6
        assert found["targets"] == [WANTED, 9, 0.03]
        assert found["base"]["kl"] == 0
        assert {row["method"] for row in found["rows"]} == set(mctf.methods())
        ranked = [row for row in found["rows"] if row["target_gflops"] is not None]
        keys = [(row["target_gflops"], row["kl"]) for row in ranked]
        assert keys == sorted(keys)
        assert all(row["gflops"] == pytest.approx(row["target_gflops"], rel=TOLERANCE) for row in ranked)
        assert {row["method"] for row in found["rows"][len(ranked) :]} == OWN_COST
        assert {each["method"] for each in found["refusals"]} == {row["method"] for row in ranked}
        assert all(each["target"] == 9 for each in found["refusals"])
        assert sum("loses least" in line for line in found["verdicts"]) == 2
        drawing = (tmp_path / "found.svg").read_text()
        assert "mctf_exact" in drawing
        assert "dynamic_vit (untrained)" in drawing
        assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.svg"]

    def test_a_table_verdicts_refusals_and_notes(self, run: Command, basic: tuple[object, ...]) -> None:
        answer = run(*basic, "--gflops", LOW, "--methods", "tome,mctf,evit,dynamic_vit,a_vit,tome")
        assert answer.code == 0, answer.err
        lines = answer.out.splitlines()
        heading = next(line for line in lines if "agree" in line)
        assert all(word in heading for word in ("method", "KL", "GFLOPs", "images/s", "wanted", "remark"))
        table = [line.split() for line in lines if line.strip().endswith(("parameter-free", "untrained"))]
        assert sorted(row[0] for row in table) == ["dynamic_vit", "mctf", "tome"]
        assert [row[5] for row in table] == sorted(row[5] for row in table)
        assert next(line.split() for line in lines if line.startswith(" a_vit"))[-2:] == ["own", "learned"]
        remarks = {line[heading.index("remark") :].strip() for line in lines if line.startswith((" tome", " a_vit"))}
        assert remarks == {"parameter-free", "learned"}  # words begin below their heading
        assert "a_vit decides by itself what it costs" in answer.out
        assert f"at {LOW} GFLOPs " in answer.out
        assert "lowest KL of the parameter-free methods" in answer.out
        assert f"not taking part: evit: evit cannot cost {LOW} GFLOPs" in answer.out
        assert "note: images/s: median over full batches" in answer.out

    def test_runs_are_alike(self, run: Command, basic: tuple[object, ...]) -> None:
        words = (*basic, "--gflops", WANTED, "--methods", "dynamic_vit", "--limit", 3, "--json")
        losses = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            losses.append(json.loads(run(*words).out)["rows"][0]["kl"])
        assert losses[0] == losses[1] > 0

    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["--gflops", "much"], "--gflops 'much' is not a list of positive numbers"),
            (["--gflops", "0.02,-1"], "is not a list of positive numbers"),
            (["--gflops", "nan"], "is not a list of positive numbers"),
            (["--gflops", "0.02", "--methods", "mctv"], "unknown method 'mctv': did you mean 'mctf'?"),
            (["--gflops", "0.02", "--methods", ","], "there is nothing to compare"),
            (["--gflops", "0.02", "--plot", "found.pdf"], "found.pdf is neither .png nor .svg"),
            (["--gflops", "9", "--methods", "mctf"], "no method takes part: mctf cannot cost 9 GFLOPs"),
            ([], "--gflops"),
        ],
    )
    def test_refuses(self, run: Command, basic: tuple[object, ...], words: list[str], complaint: str) -> None:
        assert complaint in run.refusal(*basic, *words)


class TestPlots:
    def test_names_are_moved_apart_and_keep_their_order(self) -> None:
        moved = separate_labels([10.0, 11.0, 50.0, 10.5], 4)
        assert moved == pytest.approx([6.5, 14.5, 50.0, 10.5])
        assert separate_labels([], 4) == []

    def test_groups_that_grow_into_each_other_are_joined(self) -> None:
        moved = sorted(separate_labels([0.0, 0.0, 0.0, 5.0, 5.0], 4))
        assert all(after - before >= 4 - 1e-9 for before, after in pairwise(moved))
        assert sum(moved) == pytest.approx(10)

    def test_what_saves_or_loses_nothing_is_not_drawn(self) -> None:
        base = replace(standing("base", 0.0).row, gflops=1.3, top1=60.0)
        rows = (standing("mctf", 0.1), standing("tome", 0.0), standing("a_vit", 0.1, target=None, gflops=1.29))
        loss, accuracy = panels(Outcome(6, base, rows, ()))
        assert [line.name for line in loss.lines] == ["mctf"]
        assert loss.lines[0].strong
        assert [line.name for line in accuracy.lines] == ["mctf", "tome"]
        assert accuracy.level == (60.0, "baseline")

    @pytest.mark.parametrize("name", ["found.png", "found.SVG"])
    def test_the_same_figures_give_the_same_file(self, tmp_path: Path, name: str) -> None:
        line = Line("mctf", ((1.0, 2.0), (2.0, 1.0)))
        files = []
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            write_plot(draw([Panel((line,), "x", "y", logarithmic=True)], title="t"), tmp_path / folder / name)
            files.append((tmp_path / folder / name).read_bytes())
        assert files[0] == files[1]
        assert len(files[0]) > 1000

    def test_nothing_to_draw_and_nowhere_to_write(self, tmp_path: Path) -> None:
        with pytest.raises(MctfError, match="at least one panel"):
            draw([], title="t")
        figure = draw([Panel((Line("a", ((1.0, 1.0),)),), "x", "y")], title="t")
        with pytest.raises(MctfError, match="cannot be written"):
            write_plot(figure, tmp_path / "absent" / "found.png")
        with pytest.raises(MctfError, match=r"neither \.png nor \.svg"):
            write_plot(figure, tmp_path / "found.txt")
