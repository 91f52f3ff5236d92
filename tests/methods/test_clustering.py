"""Density-peak clustering where the answer is plain to see; `methods/test_bat.py` compares it with a slow reference."""

import torch

from mctf.methods.bat import density_peaks


def clouds(*, at: list[float], sizes: list[int]) -> torch.Tensor:
    """Tight clouds of points on a line in eight dimensions: 1 N 8."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        place + 0.1 * torch.randn(1, count, 8, generator=generator) for place, count in zip(at, sizes, strict=True)
    ]
    return torch.cat(parts, dim=1)


def groups(labels: torch.Tensor) -> list[list[int]]:
    return [(labels == label).nonzero().flatten().tolist() for label in labels.unique()]


def test_clouds_are_found() -> None:
    labels = density_peaks(clouds(at=[0, 3, -4], sizes=[9, 6, 7]), 3, neighbours=4)
    assert sorted(groups(labels[0])) == [list(range(9)), list(range(9, 15)), list(range(15, 22))]


def test_what_all_tokens_share_changes_nothing() -> None:
    near = clouds(at=[0, 3, -4], sizes=[9, 6, 7])
    assert torch.equal(density_peaks(near + 1000, 3, neighbours=4), density_peaks(near, 3, neighbours=4))


def test_rho_that_underflows_is_still_compared() -> None:
    """So far apart exp(-d^2) is 0 for every token, and the density alone decides: all centres are in the last cloud."""
    x = 200 * clouds(at=[0, 3, -4], sizes=[9, 6, 7])
    x[:, 15:] = (x[:, 15:] + x[:, 15:].mean(dim=1, keepdim=True)) / 2
    labels = density_peaks(x, 3, neighbours=4)
    assert labels[0, 15:].unique().tolist() == [0, 1, 2]


def test_images_do_not_meet() -> None:
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    together = density_peaks(x, 5, neighbours=3)
    for image in range(3):
        assert torch.equal(density_peaks(x[image : image + 1], 5, neighbours=3)[0], together[image])


def test_every_cluster_has_a_token() -> None:
    for x in (torch.zeros(2, 12, 4), torch.randn(2, 3, 4).repeat(1, 4, 1), torch.randn(2, 12, 4)):
        for clusters in range(1, 15):
            labels = density_peaks(x, clusters, neighbours=5)
            for image in labels:
                assert image.unique().tolist() == list(range(min(clusters, 12)))


def test_one_token_is_one_cluster() -> None:
    assert density_peaks(torch.randn(2, 1, 4), 1, neighbours=5).tolist() == [[0], [0]]
