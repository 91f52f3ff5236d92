"""Exported files: what they compute, what they say about themselves, and what is refused before a file is left."""

import errno
import runpy
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mctf
from helpers.exporting import PREPROCESSING, fused, tiny
from helpers.images import make_picture
from helpers.models import CLASSES, make_images, run
from mctf.data import Preprocessing
from mctf.deploy import export as export_module
from mctf.deploy.export import ExportReport
from mctf.deploy.metadata import ExportMetadata
from mctf.deploy.parity import Parity, judge

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def same_outputs(path: Path, model: Any, *batches: int) -> None:
    """The file gives what the model does, tensors and arrays, at every batch size."""
    exported = mctf.load_exported(path)
    for batch in batches:
        images = make_images(model, batch, seed=batch)
        with torch.no_grad():
            expected = run(model, images)
        outputs = exported(images)
        torch.testing.assert_close(outputs, expected, **TOLERANCE)
        array = exported(images.numpy())
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, outputs.numpy())


def test_a_file_of_torch_export(pt2_file: Path) -> None:
    same_outputs(pt2_file, tiny(depth=1), 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mctf", "diffrate"])
def test_methods_keep_the_batch_free(method: str, tmp_path: Path) -> None:
    model = fused(method=method)
    mctf.export(model, tmp_path / "tiny.pt2", "pt2", check=False)
    same_outputs(tmp_path / "tiny.pt2", model, 1, 3)


@pytest.mark.slow
def test_onnx_runs_at_every_batch(onnx_file: ExportReport) -> None:
    same_outputs(onnx_file.path, fused(rounds=2), 1, 3)
    assert list(onnx_file.parity) == [1, 8]
    assert onnx_file.control is not None
    assert max(each.median for each in onnx_file.parity.values()) < 1e-4


@pytest.mark.slow
def test_onnx_holds_standard_operators_without_loops(onnx_file: ExportReport) -> None:
    import onnx

    model = onnx.load(onnx_file.path)
    assert {each.domain for each in model.opset_import} == {""}
    assert model.opset_import[0].version >= 20
    counts = Counter(node.op_type for node in model.graph.node)
    assert not {"Loop", "If", "Scan", "ScatterND"} & counts.keys()
    reductions = [each.s for node in model.graph.node for each in node.attribute if each.name == "reduction"]
    assert all(reduction == b"none" for reduction in reductions)
    assert counts.total() < 400
    assert counts["Shape"] <= 2  # a free batch works out no shapes at run time


@pytest.mark.slow
def test_metadata(onnx_file: ExportReport) -> None:
    facts = mctf.load_exported(onnx_file.path).metadata
    assert facts == onnx_file.metadata
    assert (facts.model, facts.method, facts.format, facts.batch) == ("tiny", "ward", "onnx", None)
    assert facts.schedule == (3, 0)
    assert facts.token_counts == (62, 62)
    assert facts.version == mctf.__version__
    assert len(facts.class_names) == CLASSES
    assert facts.gflops < facts.gflops_base


def test_a_schedule_is_read_as_it_was_written() -> None:
    model = mctf.fuse(tiny(), "tome", r=[3, 0])
    facts = ExportMetadata.of(model, format="onnx", dtype="float32", batch=None, preprocessing=PREPROCESSING)
    assert facts.r == facts.schedule == (3, 0)
    assert ExportMetadata.from_json(facts.to_json(), "tiny.onnx") == facts


@pytest.mark.nightly
@pytest.mark.slow
def test_a_compiled_file(tmp_path: Path) -> None:
    model = fused(method="tome")
    report = mctf.export(model, tmp_path / "tiny.pt2", "aoti", images=make_images(model, 4))
    assert mctf.load_exported(report.path).metadata == report.metadata
    assert report.metadata.format == "aoti"
    same_outputs(report.path, model, 1, 3)
    assert report.files == (report.path,)


@pytest.mark.slow
def test_the_example_needs_neither_torch_nor_mctf(onnx_file: ExportReport, tmp_path: Path) -> None:
    make_picture(1).save(tmp_path / "a.png")
    Image.new("L", (70, 30), 99).save(tmp_path / "b.png")
    block = "import sys; [sys.modules.__setitem__(name, None) for name in ('torch', 'timm', 'mctf', 'onnx')]"
    start = f"{block}; import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    words = [ROOT / "examples/onnx_classify.py", onnx_file.path, tmp_path / "a.png", tmp_path / "b.png"]
    result = subprocess.run([sys.executable, "-c", start, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("class ") == 2


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_the_example_prepares_images_as_mctf_does(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    prepare = runpy.run_path(str(ROOT / "examples/onnx_classify.py"))["prepare"]
    file = tmp_path / "picture.png"
    for size, crop, share in (((90, 61), (64, 64), 0.9), ((33, 97), (64, 64), 1.0), ((80, 60), (48, 64), 0.875)):
        make_picture(1).resize(size).save(file)
        preprocessing = Preprocessing(crop, share, mode, "bicubic", (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
        expected = preprocessing.transform()(Image.open(file).convert("RGB"))
        np.testing.assert_allclose(prepare(str(file), asdict(preprocessing)), expected.numpy(), atol=1e-5)


def test_openvino_is_imported_without_its_telemetry() -> None:
    """It forks a process that has threads, which then may never end."""
    if find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    lines = [
        "import sys",
        "from mctf.deploy.formats import find_format",
        "find_format('openvino').check_packages()",
        "import openvino.tools.ovc.telemetry_utils as utils",
        "print(utils.tm.__name__, 'openvino_telemetry' in sys.modules)",
    ]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "False"], result.stderr


def test_files_that_openvino_does_not_read(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    file = tmp_path / "tiny.xml"
    file.write_text("no model")
    with pytest.raises(mctf.MctfError, match=r"tiny.xml cannot be loaded as openvino \(it is no model of OpenVINO\)"):
        mctf.load_exported(file)
    file.write_text('<?xml version="1.0"?><net name="tiny" version="11"></net>')
    with pytest.raises(mctf.MctfError, match=r"\(there is no tiny.bin beside it\)"):
        mctf.load_exported(file)


@pytest.mark.slow
def test_openvino_writes_two_files(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    model = fused("registers", method="tome")
    report = mctf.export(model, tmp_path / "tiny.xml", "openvino", images=make_images(model, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.bin", "tiny.xml"]
    assert set(report.files) == set(tmp_path.iterdir())
    same_outputs(report.path, model, 1, 3)


@pytest.mark.slow
def test_a_fixed_batch_in_reduced_precision(tmp_path: Path) -> None:
    model = fused(method="tome")
    report = mctf.export(model, tmp_path / "tiny.pt2", "pt2", batch=2, dtype="bfloat16", images=make_images(model, 5))
    assert list(report.parity) == [2]
    exported = mctf.load_exported(report.path)
    assert exported(make_images(model, 2)).dtype == torch.float32
    with pytest.raises(mctf.MctfError, match="takes images of 2 x 3 x"):
        exported(make_images(model, 1))


@pytest.mark.slow
def test_a_tower_of_transformers_gives_embeddings(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = fused("hf_siglip", method="tome")
    report = mctf.export(model, tmp_path / "tower.pt2", "pt2", images=torch.randn(4, 3, 64, 64))
    assert report.metadata.output == "embeddings"
    assert report.metadata.class_names == ()
    assert report.parity[1].kl is None
    assert report.parity[1].cosine > 0.999


def test_a_file_that_differs_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_model(kind: Any, path: Path, threads: int | None = None) -> Any:
        return (lambda images: torch.zeros(len(images), CLASSES)), None

    monkeypatch.setattr(export_module, "open_file", other_model)
    with pytest.raises(mctf.MctfError, match=r"does not compute what the model does .* nothing was written"):
        mctf.export(tiny(depth=1), tmp_path / "tiny.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_gives_no_numbers_is_named(tmp_path: Path) -> None:
    model = tiny(depth=1)
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    with pytest.raises(mctf.MctfError, match="the model gives values that are not finite on the images of the check"):
        mctf.export(torch.compile(model), tmp_path / "tiny.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such operator") from KeyError("aten.sort")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(mctf.MctfError, match=r"cannot be written as pt2 \('aten.sort'\)"):
        mctf.export(tiny(depth=1), tmp_path / "tiny.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    model = tiny(depth=1).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mctf.export(model, tmp_path / "tiny.pt2", "pt2", batch=1, dtype="float16", check=False)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(mctf.MctfError, match=r"onnxscript, which is not installed: pip install 'mctf\[export\]'"):
        mctf.export(tiny(depth=1), tmp_path / "tiny.onnx")


def test_a_second_file_replaces_no_file_of_others(tmp_path: Path) -> None:
    model, target = tiny(depth=1), tmp_path / "tiny.xml"
    weights = target.with_suffix(".bin")
    weights.write_text("weights of a model")
    with pytest.raises(mctf.MctfError, match=r"tiny.bin would be overwritten, and belongs to no tiny.xml"):
        mctf.export(model, target, "openvino")
    assert weights.read_text() == "weights of a model"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(mctf.MctfError, match=r"tiny.bin is a folder"):
        mctf.export(model, target, "openvino")
    weights.rmdir()
    target.symlink_to(tmp_path / "other.xml")
    with pytest.raises(mctf.MctfError, match=r"tiny.xml is a link"):
        mctf.export(model, target, "openvino")


@pytest.mark.parametrize("step", ["writing pt2", "checking the file"])
def test_an_interrupted_export_leaves_nothing(step: str, tmp_path: Path) -> None:
    def interrupt(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mctf.export(tiny(depth=1), tmp_path / "tiny.pt2", "pt2", tick=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_fault_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(OSError, match="No space left"):  # the command says so in one line
        mctf.export(tiny(depth=1), tmp_path / "tiny.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_operator_of_mctf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mctf.MctfError, match=r"calls mctf.agglomerate.default, which other runtimes do not have"):
        mctf.export(fused(method="atc"), tmp_path / "tiny.pt2", "pt2")
    assert list(tmp_path.iterdir()) == []


def test_small_logits_hide_no_error() -> None:
    reference = 1e-4 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    control = Parity.of(reference * (1 + 1e-6), reference, classifies=True)
    wrong = Parity.of(reference.roll(1, 0), reference, classifies=True)
    judge("onnx", control, control, exact=True)
    with pytest.raises(mctf.MctfError, match="the median image differs by"):
        judge("onnx", wrong, control, exact=True)
    constant = Parity.of(torch.zeros(2, 5), torch.zeros(2, 5), classifies=True)
    assert constant.median == 0


def test_flips_are_told_from_rounding() -> None:
    reference = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    outputs = reference + 1e-6
    outputs[:4] += torch.tensor([0.3, 0, 0, 0, 0])
    parity = Parity.of(outputs, reference, classifies=True)
    assert parity.flipped == pytest.approx(4)
    assert parity.median < 1e-5
    assert parity.largest == pytest.approx(0.3, rel=1e-3)
    undefined = Parity.of(torch.full((2, 5), torch.nan), reference[:2], classifies=True)
    assert undefined.flipped == 100


@pytest.mark.slow
def test_threads_do_not_share_outputs_of_openvino(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    path = mctf.export(tiny(depth=1), tmp_path / "tiny.xml", "openvino", check=False).path
    exported = mctf.load_exported(path, threads=1)
    images = make_images(tiny(depth=1), 2).split(1)
    expected = [exported(image) for image in images]
    wrong = []

    def repeat(index: int) -> None:
        wrong.append(sum(not torch.equal(exported(images[index]), expected[index]) for _ in range(300)))

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]
