"""Pretrained weights from cache or hub, and one quick error where neither has them."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from mctf.errors import MctfError
from mctf.models import loading
from mctf.models.loading import load_model


class _Refuses(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def refusing_hub(monkeypatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), _Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def silent_hub(monkeypatch) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


@pytest.fixture
def offline(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_any_answer_will_do(refusing_hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert loading.hub_answers()


def test_a_silent_hub_is_given_up_in_time(silent_hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    start = time.perf_counter()
    assert not loading.hub_answers(patience=0.3)
    assert time.perf_counter() - start < 2


def test_offline_mode_asks_nobody(refusing_hub, offline) -> None:
    assert not loading.hub_answers()


def test_weights_that_cannot_be_had_are_one_error(offline, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(loading.WeightsUnavailableError, match="pass a file with --weights"):
        load_model("test_vit")


def test_an_unknown_name_is_still_named(offline) -> None:
    with pytest.raises(MctfError, match="timm has no model"):
        load_model("no_such_model")


def test_weights_in_the_cache_need_no_hub(offline, monkeypatch, tmp_path) -> None:
    state = timm.create_model("test_vit").state_dict()
    state["head.bias"] = torch.full_like(state["head.bias"], 0.25)
    snapshot = tmp_path / "models--timm--test_vit.r160_in1k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file(state, snapshot / "model.safetensors")
    reference = snapshot.parents[1] / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = load_model("test_vit")
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
