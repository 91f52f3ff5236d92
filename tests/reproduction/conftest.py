from pathlib import Path

import pytest

from mctf.analysis.reproduction import paper
from mctf.analysis.reproduction.experiment import Experiment, Subject
from mctf.analysis.reproduction.records import Record, Records
from mctf.analysis.reproduction.running import arrange, measure
from mctf.report.reproduction.catalogue import EXPERIMENTS
from mctf.report.reproduction.publishing import publish

from .subjects import make_subject, make_task


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return make_subject(tmp_path)


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record]]:
    """Every experiment on a tiny model, costs with as many rows as show each kind of them, and the folder of all."""
    folder = tmp_path_factory.mktemp("report")
    subject = make_subject(tmp_path_factory.mktemp("subject"))
    records = Records(folder, {"model": "plain"})
    work = arrange(EXPERIMENTS, EXPERIMENTS, records, subject=subject, again=False)
    task, _ = make_task(folder, subject)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "methods", few_rows(paper.methods))
        return folder, measure(work, records, task)


def few_rows(methods):
    """Rows of DeiT-T in Table 1; a model that timm lacks, one it has and LV-ViT in Table 2."""
    shown = ("deit_tiny", "pvt_small", "poolformer_s36", "lv_vit_s")
    return lambda table: tuple(row for row in methods(table) if row.backbone in shown)


@pytest.fixture(scope="session")
def report(known: tuple[Path, dict[str, Record]]) -> Path:
    """The folder with the page, Markdown and JSON."""
    folder, records = known
    publish(folder, records, facts={"Model": "plain <tiny>", "Command": "mctf reproduce"}, left_out={})
    return folder


def by_name(name: str) -> Experiment:
    return next(each for each in EXPERIMENTS if each.name == name)
