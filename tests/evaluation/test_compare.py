"""Candidates at equal cost, how they are ranked, and the sentences about them."""

import pytest
import timm
import torch
from torch import nn

import mctf
from helpers.comparisons import make_result
from helpers.models import make_images
from mctf.evaluation.compare import (
    CONTROL,
    LEARNED,
    PARAMETER_FREE,
    find_candidates,
    kind_of,
    verdicts,
)
from mctf.methods import make_method
from mctf.methods._layers import full_state_dict, stash_layers

OWN_COST = {"a_vit", "ia_red2"}
TARGET = 0.024  # GFLOPs; test_vit has 0.038
LOW = 0.0175  # out of reach of EViT, which acts in three of its six blocks


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=3).eval()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(4, 3, 160, 160, generator=torch.Generator().manual_seed(1))


def copy_of(model: nn.Module) -> nn.Module:
    copy = timm.create_model("test_vit", num_classes=3).eval()
    copy.load_state_dict(model.state_dict())
    return copy


class TestCandidates:
    @pytest.mark.slow
    def test_every_method_is_brought_to_the_target_or_keeps_its_cost(
        self, tiny: nn.Module, images: torch.Tensor
    ) -> None:
        ticks: list[int] = []
        candidates, refusals = find_candidates(
            tiny, list(mctf.methods()), [TARGET], images=images, tick=lambda: ticks.append(1)
        )
        assert refusals == []
        assert [each.setting.method for each in candidates] == list(mctf.methods())
        assert len(ticks) == len(candidates)
        for each in candidates:
            own = each.setting.method in OWN_COST
            assert each.target == (None if own else TARGET)
            if own:
                assert each.setting.r == make_method(each.setting.method, {}).default_r

    def test_learned_layers_are_untrained_until_they_are_loaded(self, tiny: nn.Module, images: torch.Tensor) -> None:
        (candidate,), _ = find_candidates(tiny, ["dynamic_vit"], [TARGET], images=images)
        assert (candidate.kind, candidate.untrained) == (LEARNED, True)
        with pytest.warns(UserWarning, match="untrained"):
            trained = mctf.fuse(copy_of(tiny), "dynamic_vit")
        loaded = copy_of(tiny)
        layers = {key: value for key, value in full_state_dict(trained).items() if key not in loaded.state_dict()}
        stash_layers(loaded, layers)
        (candidate,), _ = find_candidates(loaded, ["dynamic_vit"], [TARGET], images=images)
        assert (candidate.kind, candidate.untrained) == (LEARNED, False)
        candidates, refusals = find_candidates(loaded, ["spvit", "mctf"], [TARGET], images=images)
        assert [each.setting.method for each in candidates] == ["mctf"]
        assert "layers of another method than spvit" in refusals[0].reason

    def test_kinds(self) -> None:
        kinds = {name: kind_of(make_method(name, {})) for name in mctf.methods()}
        assert {name for name, kind in kinds.items() if kind == CONTROL} == {"random", "free_drop"}
        assert {"mctf", "tome", "evit", "bat", "ats"} <= {
            name for name, kind in kinds.items() if kind == PARAMETER_FREE
        }
        assert {"dynamic_vit", "spvit", "a_vit", "ia_red2"} <= {n for n, kind in kinds.items() if kind == LEARNED}

    def test_methods_that_read_the_class_token_refuse_models_without_one(self) -> None:
        model = timm.create_model("test_vit", num_classes=3, class_token=False, global_pool="avg").eval()
        pixels = make_images(model, 2)
        base = mctf.plan(model, r=0).gflops
        candidates, refusals = find_candidates(model, ["evit", "mctf", "tome"], [0.7 * base], images=pixels)
        assert [each.setting.method for each in candidates] == ["mctf", "tome"]
        assert [each.method for each in refusals] == ["evit"]
        assert refusals[0].target is None
        assert "class token" in refusals[0].reason

    def test_targets_out_of_reach_are_listed_one_by_one(self, tiny: nn.Module, images: torch.Tensor) -> None:
        candidates, refusals = find_candidates(tiny, ["mctf", "evit"], [LOW, TARGET, 9], images=images)
        assert [(each.setting.method, each.target) for each in candidates] == [
            ("mctf", LOW),
            ("mctf", TARGET),
            ("evit", TARGET),
        ]
        assert [(each.method, each.target) for each in refusals] == [("mctf", 9), ("evit", LOW), ("evit", 9)]
        assert "use a target from" in refusals[1].reason


class TestVerdicts:
    def test_mctf_has_the_lowest_kl(self) -> None:
        found = verdicts([make_result("tome", 0.2), make_result("mctf", 0.1), make_result("evit", 0.3)])
        assert found == [
            "at 0.7 GFLOPs mctf is closest to the baseline: KL 0.1",
            "mctf has the lowest KL of the parameter-free methods: KL 0.1; tome is next with KL 0.2",
        ]

    def test_a_method_that_is_better_and_by_how_much(self) -> None:
        found = verdicts([make_result("mctf", 0.2), make_result("evit", 0.15), make_result("mctf_exact", 0.1)])
        assert found[0] == "at 0.7 GFLOPs mctf_exact is closest to the baseline: KL 0.1"
        assert "mctf does not have the lowest KL" in found[1]
        assert "evit has KL 0.15, 25% less than mctf with KL 0.2" in found[1]
        assert "its variant mctf_exact has KL 0.1" in found[1]

    def test_differences_within_the_noise_are_not_ranked(self) -> None:
        close = [make_result("mctf", 0.2), make_result("evit", 0.15, spread=0.03), make_result("tome", 0.9)]
        assert verdicts(close)[1] == (
            "mctf and evit, the best other parameter-free method, are too close to call on these images: "
            "KL 0.2 and KL 0.15, difference 0.0500 ± 0.0300"
        )
        clear = [make_result("mctf", 0.2), make_result("evit", 0.15, spread=0.02), make_result("tome", 0.9)]
        assert "evit has KL 0.15" in verdicts(clear)[1]
        same_images = [make_result("mctf", 0.2, spread=0.1), make_result("evit", 0.15, spread=0.09)]
        assert "evit has KL 0.15" in verdicts(same_images)[1]  # the second image is harder for both by as much

    def test_learned_methods_controls_and_methods_without_target_are_no_rivals(self) -> None:
        rows = [
            make_result("mctf", 0.2),
            make_result("tome", 0.3),
            make_result("dynamic_vit", 0.1, kind=LEARNED),
            make_result("random", 0.15, kind=CONTROL),
            make_result("a_vit", 0.0, kind=LEARNED, target=None),
        ]
        found = verdicts(rows)
        assert found[0] == "at 0.7 GFLOPs dynamic_vit is closest to the baseline: KL 0.1"
        assert "mctf has the lowest KL" in found[1]

    def test_every_target_is_judged(self) -> None:
        found = verdicts([make_result("mctf", 0.2, target=0.9), make_result("mctf", 0.3, target=0.5)])
        assert found == [
            "at 0.5 GFLOPs mctf is closest to the baseline: KL 0.3",
            "at 0.9 GFLOPs mctf is closest to the baseline: KL 0.2",
        ]

    def test_without_classes_the_cosine_decides(self) -> None:
        rows = [make_result("mctf", None, class_cosine=0.9), make_result("tome", None, class_cosine=0.8)]
        assert verdicts(rows)[0] == "at 0.7 GFLOPs mctf is closest to the baseline: cosine 0.9000"
        assert "lowest distance" in verdicts(rows)[1]
