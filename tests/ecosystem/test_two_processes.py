"""Two processes that train one fused model: DistributedDataParallel, and FSDP2 with `fully_shard` per block."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


CASES = ["plain/mctf/ddp", "plain/mctf/iterate", "eva02/ward/index", "cait/tome/children", "eva02/tome/checkpoint"]
REFUSED = "plain/mctf/before"
HF_CASES = ["hf_vit/mctf_exact/iterate"] if find_spec("transformers") else []


def two_ranks() -> dict[str, dict[str, Any]]:
    """What `helpers.two_ranks` prints, all cases in one start of two processes."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [*launcher, "-m", "helpers.two_ranks", *CASES, *HF_CASES, REFUSED]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_two_processes_train_as_one_and_a_model_sharded_first_is_refused() -> None:
    found = two_ranks()
    for case in (*CASES, *HF_CASES):
        assert found[case].keys() == {"gradient", "fused", "unfused"}, case
        assert all(value < 1e-9 for value in found[case].values()), (case, found[case])
    cure = "run mctf.fuse first, then fully_shard on the blocks"
    assert found[REFUSED] == {"refused": f"blocks.0 is sharded by FSDP2: {cure}"}
