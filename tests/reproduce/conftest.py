from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from helpers.subjects import make_subject, make_task
from mctf.reproduce import costs, paper, pictures
from mctf.reproduce.costs import FUSIBLE, Counted
from mctf.reproduce.records import Record, Records
from mctf.reproduce.runner import Subject, arrange, experiments, measure
from mctf.reproduce.write import write_report


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return make_subject(tmp_path)


@pytest.fixture(scope="session")
def measured(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str, testrun_uid: str
) -> tuple[Path, dict[str, Record]]:
    """The folder and the records of all experiments on a tiny model; the counted costs are the paper's, which is fast.

    One worker measures; the others read its records.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / f"report-{testrun_uid}"
    records = Records(folder, {"model": "plain"})
    with FileLock(f"{folder}.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "count", lambda row: Counted(row.r, row.gflops, row.params_m))
        patch.setattr(costs, "create_empty", {name: name for name in FUSIBLE.values()}.get)
        patch.setattr(costs, "plan", published_plan)
        patch.setattr(pictures, "_SIDE", 64)
        subject = make_subject(tmp_path_factory.mktemp("subject"))
        work = arrange(experiments(), experiments(), records, subject=subject, again=False)
        task, _ = make_task(folder, subject)
        return folder, measure(work, records, task)


def published_plan(name: str, r: int) -> SimpleNamespace:
    """The paper's GFLOPs instead of a plan."""
    (gflops,) = {each.gflops for each in paper.by_r() if FUSIBLE[each.backbone] == name}
    return SimpleNamespace(gflops=gflops[r])


@pytest.fixture(scope="session")
def report(measured: tuple[Path, dict[str, Record]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page, Markdown and JSON."""
    source, records = measured
    folder = tmp_path_factory.mktemp("report")
    (folder / "pictures").symlink_to(source / "pictures")
    write_report(folder, records, facts={"Model": "plain <tiny>", "Command": "mctf reproduce"}, skipped={})
    return folder
