"""Settings for every test: one thread a worker, the same random numbers each time, quiet libraries."""

import logging
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ["COLUMNS"] = "120"  # xdist sets the width of its own terminal
torch.set_num_threads(1)  # the suite runs in several processes: more threads would only wait for each other

# helpers that assert: a failure shows the values, as it does in a test
pytest.register_assert_rewrite("helpers")

# Models are slow to draw and examples share them, so neither is a health problem; the same examples every time.
settings.register_profile(
    "mctf",
    deadline=None,
    max_examples=10,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("mctf")

for noisy in ("fvcore", "torch._dynamo", "torch._inductor", "timm"):
    logging.getLogger(noisy).setLevel(logging.ERROR)


def pytest_configure(config: pytest.Config) -> None:
    for warning in (
        "ignore::torch.jit.TracerWarning",  # fvcore traces models whose token counts are Python numbers
        "ignore:.torch.jit.script. is deprecated:FutureWarning",  # fvcore again, when imported
        "ignore:Mismatch dtype between input and weight:UserWarning",  # RmsNorm under autocast
    ):
        config.addinivalue_line("filterwarnings", warning)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
