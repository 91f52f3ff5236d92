"""Pretrained weights from the cache or the model hub, and one quick error where neither has them."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from mctf.errors import MctfError
from mctf.models import loading
from mctf.models.loading import WeightsUnavailableError, cached_file, load_model


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def use_hub(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


class _Hub(BaseHTTPRequestHandler):
    """Has the repository timm/there without any file, and no other repository."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        code = "EntryNotFound" if self.path.startswith("/timm/there/") else "RepoNotFound"
        self.send_header("X-Error-Code", code)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    use_hub(monkeypatch, server.server_port)
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_that_answers_is_left_to_timm(hub: None) -> None:
    assert cached_file("timm/there", ("model.safetensors", "pytorch_model.bin")) is None


def test_a_repository_that_the_hub_lacks_is_refused(hub: None) -> None:
    with pytest.raises(WeightsUnavailableError, match=r"^timm/elsewhere is not in the cache and .* \(.*404"):
        cached_file("timm/elsewhere", ("model.safetensors",))


def test_a_silent_hub_costs_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "HUB_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        use_hub(monkeypatch, listener.getsockname()[1])
        start = time.perf_counter()
        with pytest.raises(WeightsUnavailableError, match="pass a file with --weights") as caught:
            load_model("test_vit")
    assert time.perf_counter() - start < 3  # hf_hub_download would retry for 23 s
    assert "\n" not in str(caught.value)


def test_offline_mode_is_one_error(offline: None) -> None:
    with pytest.raises(
        WeightsUnavailableError, match=r"weights of test_vit are unavailable: .*pass a file with --weights"
    ):
        load_model("test_vit")


def test_an_unknown_name_is_refused_first(offline: None) -> None:
    with pytest.raises(MctfError, match="timm has no model"):
        load_model("no_such_model")


def test_weights_in_the_cache_need_no_hub(offline: None, tmp_path: Path) -> None:
    state = timm.create_model("test_vit").state_dict()
    state["head.bias"] = torch.full_like(state["head.bias"], 0.25)
    snapshot = tmp_path / "models--timm--test_vit.r160_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file(state, snapshot / "model.safetensors")
    reference = snapshot.parents[1] / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    model = load_model("test_vit")
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


def test_random_weights_are_offered_and_the_same_every_time(offline: None) -> None:
    with pytest.raises(WeightsUnavailableError, match=r"or run with --random-weights$"):
        loading.load_described("test_vit", weights=None, random=False)
    one, description = loading.load_or_random("test_vit", weights=None)
    other, _ = loading.load_described("test_vit", weights=None, random=True)
    assert description == "random"
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
