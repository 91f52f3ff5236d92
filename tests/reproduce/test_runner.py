"""Runs that are stopped go on, nothing is done twice, and results of other models are never mixed in."""

import json
from dataclasses import dataclass, field

import pytest

from helpers.subjects import make_task
from mctf.errors import MctfError
from mctf.reproduce.catalogue import EXPERIMENTS
from mctf.reproduce.records import Records
from mctf.reproduce.runner import Experiment, arrange, choose, measure


@dataclass
class Counting(Experiment):
    """Counts how often it is run; `fails` once where told to."""

    name: str
    sources: tuple[str, ...] = ()
    needs_images: bool = True
    fails: bool = False
    reason: str | None = None
    form: int = 1
    runs: list[int] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def steps(self, task) -> int:
        return 1

    def unsuited(self, subject) -> str | None:
        return self.reason

    def run(self, task):
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        self.runs.append(1)
        self.seen = sorted(task.results)
        return {"runs": len(self.runs)}


@dataclass
class Bench:
    """Three experiments and a folder."""

    folder: object
    subject: object
    experiments: tuple[Counting, ...]

    def run(self, *, wanted=None, again=False, conditions=None, subject=True):
        subject = self.subject if subject else None
        conditions = {"model": "a"} if conditions is None else conditions
        records = Records.at(self.folder, conditions if subject else None, self.experiments)
        wanted = self.experiments if wanted is None else [self.experiments[index] for index in wanted]
        work = arrange(self.experiments, wanted, records, subject=subject, again=again)
        return measure(work, records, make_task(self.folder, subject)[0]), work

    @property
    def runs(self) -> list[int]:
        return [len(each.runs) for each in self.experiments]


@pytest.fixture
def bench(tmp_path, subject) -> Bench:
    one, two, three = Counting("one", ("Table 1",), needs_images=False), Counting("two"), Counting("three")
    return Bench(tmp_path / "out", subject, (one, two, three))


def test_a_run_that_was_stopped_goes_on_where_it_was(bench) -> None:
    bench.experiments[1].fails = True
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert bench.runs == [1, 0, 0]
    found, work = bench.run()
    assert bench.runs == [1, 1, 1]
    assert list(work.known) == ["one"]
    assert sorted(found) == ["one", "three", "two"]
    bench.run()
    assert bench.runs == [1, 1, 1]


def test_experiments_see_what_others_found_but_not_when_all_is_measured_again(bench) -> None:
    bench.run(wanted=[1])
    bench.run()
    assert [each.seen for each in bench.experiments] == [["two"], [], ["one", "two"]]
    bench.run(wanted=[1, 2], again=True)
    assert [each.seen for each in bench.experiments[1:]] == [[], ["two"]]


def test_results_are_files_of_json(bench) -> None:
    bench.run()
    record = json.loads((bench.folder / "results" / "two.json").read_text())
    assert (record["experiment"], record["conditions"], record["result"]) == ("two", {"model": "a"}, {"runs": 1})
    assert sorted(path.name for path in (bench.folder / "results").iterdir()) == ["one.json", "three.json", "two.json"]


def test_again_measures_anew_what_is_wanted(bench) -> None:
    bench.run()
    found, _ = bench.run(wanted=[1], again=True)
    assert bench.runs == [1, 2, 1]
    assert found["two"].result == {"runs": 2}
    assert sorted(found) == ["one", "three", "two"]  # what was found before is taken along


def test_results_of_another_model_are_refused_and_never_mixed_in(bench) -> None:
    bench.run()
    with pytest.raises(MctfError, match=r"holds results for model 'a', not 'b': choose another folder"):
        bench.run(conditions={"model": "b"})
    assert bench.runs == [1, 1, 1]
    found, _ = bench.run(wanted=[1], again=True, conditions={"model": "b"})
    assert bench.runs == [1, 2, 1]
    assert sorted(found) == ["one", "two"]


def test_without_a_model_only_costs_are_worked_out_and_the_rest_is_taken_along(bench) -> None:
    found, work = bench.run(subject=False)
    assert (bench.runs, list(found)) == ([1, 0, 0], ["one"])
    assert list(work.left_out) == ["two", "three"]
    assert "MODEL and --data" in work.left_out["two"]
    bench.run()
    found, work = bench.run(subject=False)
    assert sorted(found) == ["one", "three", "two"]
    assert work.left_out == {}


def test_what_a_model_is_not_suited_for_is_left_out_with_the_reason(bench) -> None:
    bench.experiments[2].reason = "it is too small"
    found, work = bench.run()
    assert work.left_out == {"three": "it is too small"}
    assert sorted(found) == ["one", "two"]


def test_results_that_lack_what_is_read_are_refused_and_measured_again_on_demand(bench) -> None:
    bench.run()
    path = bench.folder / "results" / "two.json"
    record = json.loads(path.read_text())
    assert record.pop("form") == 1
    path.write_text(json.dumps(record))
    bench.run()  # a file that does not say has the first form
    assert bench.runs == [1, 1, 1]
    bench.experiments[1].form = 2
    for subject in (True, False):
        with pytest.raises(MctfError, match=r"results of another version of mctf \(two lacks .* anew with --again"):
            bench.run(subject=subject)
    found, _ = bench.run(wanted=[2], again=True)
    assert sorted(found) == ["one", "three"]
    bench.run(wanted=[1], again=True)
    assert bench.runs == [1, 2, 2]
    assert json.loads(path.read_text())["form"] == 2
    assert sorted(bench.run()[0]) == ["one", "three", "two"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"experiment": "one"}'])
def test_a_file_that_is_no_result_is_refused(bench, text: str) -> None:
    bench.run()
    (bench.folder / "results" / "one.json").write_text(text)
    with pytest.raises(MctfError, match=r"one\.json is no result of an experiment"):
        bench.run()


def test_experiments_are_chosen_by_name_and_by_table() -> None:
    assert choose(EXPERIMENTS) == EXPERIMENTS
    assert [each.name for each in choose(EXPERIMENTS, names=["design", "criteria"])] == ["criteria", "design"]
    assert [each.name for each in choose(EXPERIMENTS, tables=["1", "B"])] == ["costs_methods", "class_token"]
    both = choose(EXPERIMENTS, names=["design"], tables=["D"])
    assert [each.name for each in both] == ["costs_by_r", "design"]
    with pytest.raises(MctfError, match=r"there is no experiment 'criterion': choose from .*criteria"):
        choose(EXPERIMENTS, names=["criterion"])
    with pytest.raises(MctfError, match="nothing is measured for Table 9: choose from Table 1, Table 2"):
        choose(EXPERIMENTS, tables=["9"])


def test_every_table_of_the_paper_has_an_experiment() -> None:
    tables = {source for each in EXPERIMENTS for source in each.sources if source.startswith("Table ")}
    assert tables == {f"Table {name}" for name in "1234ABCDE"}
    assert len({each.name for each in EXPERIMENTS}) == len(EXPERIMENTS)
