from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.subjects import make_subject, make_task
from mctf.reproduce import costs, paper
from mctf.reproduce.catalogue import EXPERIMENTS
from mctf.reproduce.costs import FUSIBLE, Counted
from mctf.reproduce.records import Record, Records
from mctf.reproduce.runner import Subject, arrange, measure
from mctf.reproduce.write import publish


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return make_subject(tmp_path)


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record]]:
    """Every experiment on a tiny model, and the folder of all; costs are taken from the paper, which is fast."""
    folder = tmp_path_factory.mktemp("report")
    subject = make_subject(tmp_path_factory.mktemp("subject"))
    records = Records(folder, {"model": "plain"})
    work = arrange(EXPERIMENTS, EXPERIMENTS, records, subject=subject, again=False)
    task, _ = make_task(folder, subject)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "count", lambda row: Counted(row.r, row.gflops, row.params_m))
        patch.setattr(costs, "create_empty", {name: name for name in FUSIBLE.values()}.get)
        patch.setattr(costs, "plan", published_plan)
        return folder, measure(work, records, task)


def published_plan(name: str, r: int) -> SimpleNamespace:
    """What the paper says in the place of a plan."""
    (gflops,) = {each.gflops for each in paper.by_r() if FUSIBLE[each.backbone] == name}
    return SimpleNamespace(gflops=gflops[r])


@pytest.fixture(scope="session")
def report(known: tuple[Path, dict[str, Record]]) -> Path:
    """The folder with the page, Markdown and JSON."""
    folder, records = known
    publish(folder, records, facts={"Model": "plain <tiny>", "Command": "mctf reproduce"}, left_out={})
    return folder
