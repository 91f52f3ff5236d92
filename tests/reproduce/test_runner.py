"""Interrupted runs resume, finished experiments are reused, and results of other models are never mixed in."""

import json
from dataclasses import dataclass, field

import pytest

from helpers.subjects import make_task
from mctf.errors import MctfError
from mctf.reproduce.records import Records, Result
from mctf.reproduce.runner import Experiment, arrange, choose, experiments, measure
from mctf.reproduce.studies import StudyResult

TRUNCATED = json.dumps({"experiment": "one", "conditions": {}, "seconds": 1.0, "date": "", "result": {}})


@dataclass(frozen=True)
class RunCount(Result):
    runs: int


@dataclass
class Counting(Experiment):
    """Counts its runs; with `fails` the first one is interrupted."""

    name: str
    sources: tuple[str, ...] = ()
    needs_images: bool = True
    fails: bool = False
    reason: str | None = None
    form: int = 1
    result_type: type[Result] = RunCount
    runs: list[int] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def steps(self, task) -> int:
        return 1

    def unsupported(self, subject) -> str | None:
        return self.reason

    def run(self, task):
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        self.runs.append(1)
        self.given = sorted(task.results)
        return RunCount(len(self.runs))


@dataclass
class Bench:
    """Three experiments and a folder."""

    folder: object
    subject: object
    experiments: tuple[Counting, ...]

    def run(self, *, requested=None, again=False, conditions=None, subject=True):
        subject = self.subject if subject else None
        conditions = {"model": "a"} if conditions is None else conditions
        records = Records.at(self.folder, conditions if subject else None, self.experiments)
        requested = self.experiments if requested is None else [self.experiments[index] for index in requested]
        work = arrange(self.experiments, requested, records, subject=subject, again=again)
        return measure(work, records, make_task(self.folder, subject)[0]), work

    @property
    def runs(self) -> list[int]:
        return [len(each.runs) for each in self.experiments]


@pytest.fixture
def bench(tmp_path, subject) -> Bench:
    one, two, three = Counting("one", ("Table 1",), needs_images=False), Counting("two"), Counting("three")
    return Bench(tmp_path / "out", subject, (one, two, three))


def test_an_interrupted_run_resumes(bench) -> None:
    bench.experiments[1].fails = True
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert bench.runs == [1, 0, 0]
    finished, work = bench.run()
    assert bench.runs == [1, 1, 1]
    assert list(work.finished) == ["one"]
    assert sorted(finished) == ["one", "three", "two"]
    bench.run()
    assert bench.runs == [1, 1, 1]


def test_experiments_receive_other_results_except_with_again(bench) -> None:
    bench.run(requested=[1])
    bench.run()
    assert [each.given for each in bench.experiments] == [["two"], [], ["one", "two"]]
    bench.run(requested=[1, 2], again=True)
    assert [each.given for each in bench.experiments[1:]] == [[], ["two"]]


def test_results_are_json_files(bench) -> None:
    bench.run()
    record = json.loads((bench.folder / "results" / "two.json").read_text())
    assert (record["experiment"], record["conditions"], record["result"]) == ("two", {"model": "a"}, {"runs": 1})
    assert sorted(path.name for path in (bench.folder / "results").iterdir()) == ["one.json", "three.json", "two.json"]


def test_again_measures_requested_experiments_anew(bench) -> None:
    bench.run()
    finished, _ = bench.run(requested=[1], again=True)
    assert bench.runs == [1, 2, 1]
    assert finished["two"].result == RunCount(2)
    assert sorted(finished) == ["one", "three", "two"]


def test_results_of_another_model_are_refused_and_never_mixed_in(bench) -> None:
    bench.run()
    with pytest.raises(MctfError, match=r"holds results for model 'a', not 'b': choose another folder"):
        bench.run(conditions={"model": "b"})
    assert bench.runs == [1, 1, 1]
    finished, _ = bench.run(requested=[1], again=True, conditions={"model": "b"})
    assert bench.runs == [1, 2, 1]
    assert sorted(finished) == ["one", "two"]


def test_other_content_of_the_same_name_is_refused_where_the_record_has_a_checksum(bench) -> None:
    bench.run()
    bench.run(conditions={"model": "a", "images_checksum": "x"})  # of records without one nothing is known
    assert bench.runs == [1, 1, 1]
    bench.run(conditions={"model": "a", "images_checksum": "x"}, again=True)
    with pytest.raises(MctfError, match=r"holds results for images_checksum 'x', not 'y'"):
        bench.run(conditions={"model": "a", "images_checksum": "y"})


def test_without_a_model_only_costs_run_and_other_records_are_included(bench) -> None:
    finished, work = bench.run(subject=False)
    assert (bench.runs, list(finished)) == ([1, 0, 0], ["one"])
    assert list(work.skipped) == ["two", "three"]
    assert "MODEL and --data" in work.skipped["two"]
    bench.run()
    finished, work = bench.run(subject=False)
    assert sorted(finished) == ["one", "three", "two"]
    assert work.skipped == {}


def test_unsupported_experiments_are_skipped_with_the_reason(bench) -> None:
    bench.experiments[2].reason = "it is too small"
    finished, work = bench.run()
    assert work.skipped == {"three": "it is too small"}
    assert sorted(finished) == ["one", "two"]


def test_results_of_another_form_are_refused_and_measured_with_again(bench) -> None:
    bench.run()
    path = bench.folder / "results" / "two.json"
    record = json.loads(path.read_text())
    assert record.pop("form") == 1
    path.write_text(json.dumps(record))
    bench.run()  # without a form it is the first
    assert bench.runs == [1, 1, 1]
    bench.experiments[1].form = 2
    for subject in (True, False):
        with pytest.raises(MctfError, match=r"results of another version of mctf \(two lacks .* anew with --again"):
            bench.run(subject=subject)
    finished, _ = bench.run(requested=[2], again=True)
    assert sorted(finished) == ["one", "three"]
    bench.run(requested=[1], again=True)
    assert bench.runs == [1, 2, 2]
    assert json.loads(path.read_text())["form"] == 2
    assert sorted(bench.run()[0]) == ["one", "three", "two"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"experiment": "one"}', TRUNCATED])
def test_a_file_without_a_result_is_refused(bench, text: str) -> None:
    bench.run()
    (bench.folder / "results" / "one.json").write_text(text)
    with pytest.raises(MctfError, match=r"one\.json is not the result of an experiment"):
        bench.run()


def test_experiments_are_chosen_by_name_and_by_table() -> None:
    assert choose(experiments()) == experiments()
    assert [each.name for each in choose(experiments(), names=["design", "criteria"])] == ["criteria", "design"]
    assert [each.name for each in choose(experiments(), tables=["1", "B"])] == ["costs_methods", "class_token"]
    both = choose(experiments(), names=["design"], tables=["D"])
    assert [each.name for each in both] == ["costs_by_r", "design"]
    with pytest.raises(MctfError, match=r"there is no experiment 'criterion': choose from .*criteria"):
        choose(experiments(), names=["criterion"])
    with pytest.raises(MctfError, match="no experiment measures Table 9: choose from Table 1, Table 2"):
        choose(experiments(), tables=["9"])


def test_every_table_of_the_paper_has_an_experiment() -> None:
    tables = {source for each in experiments() for source in each.sources if source.startswith("Table ")}
    assert tables == {f"Table {name}" for name in "1234ABCDE"}
    assert len({each.name for each in experiments()}) == len(experiments())


def test_results_survive_json(measured) -> None:
    _, records = measured
    for experiment in experiments():
        result = records[experiment.name].result
        assert type(result) is experiment.result_type
        assert experiment.result_type.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_records_are_those_on_disk(measured) -> None:
    folder, finished = measured
    records = Records(folder, {"model": "plain"})
    assert {each.name: records.load(each) for each in experiments()} == finished


def test_unknown_keys_are_ignored_and_defaults_fill_in(measured) -> None:
    result = measured[1]["design"].result
    value = json.loads(json.dumps(result.to_json()))
    value["base"]["not_a_field"] = 1
    del value["base"]["group"], value["base"]["label"]
    assert StudyResult.from_json(value) == result
