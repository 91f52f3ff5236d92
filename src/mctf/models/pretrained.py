"""Pretrained weights without a long wait: from the local cache, else from a hub that answers at once."""

import ssl
import threading
import urllib.error
import urllib.request

from ..errors import MctfError

PATIENCE = 2.0  # seconds for the hub's first answer; its own client retries for most of a minute


class WeightsUnavailableError(MctfError):
    """Pretrained weights that can be neither found nor fetched: weights from a file, or random ones, will do."""


def pretrained_options(name: str) -> dict[str, object]:
    """Options that make timm create this model with pretrained weights; raises an error where there are none."""
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id or config.custom_load == "hf":
        return {"pretrained": True}
    cached = _cached_file(config.hf_hub_id, config.hf_hub_filename)
    if cached is not None:
        # custom_load speaks of files in their authors' format; those on the hub have timm's
        return {"pretrained": True, "pretrained_cfg_overlay": {"file": cached, "custom_load": False}}
    if not hub_answers():
        raise WeightsUnavailableError(
            f"the pretrained weights of {name} are not in the cache and the model hub does not answer: "
            "pass a file with --weights"
        )
    return {"pretrained": True}


def hub_answers(*, patience: float = PATIENCE) -> bool:
    """Whether the model hub sends any response within so many seconds. In a thread: name look-up knows no timeout."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []
    probe = threading.Thread(target=lambda: answers.append(_responds(constants.ENDPOINT, patience)), daemon=True)
    probe.start()
    probe.join(patience)
    return bool(answers) and answers[0]


def _responds(address: str, patience: float) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=patience):
            return True
    except urllib.error.HTTPError:
        return True  # it refuses this address, but it is there
    except urllib.error.URLError as failure:
        return isinstance(failure.reason, ssl.SSLError)  # the hub's client may trust other certificates
    except (OSError, ValueError):
        return False


def _cached_file(hub_id: str, file_name: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = hub_id.partition("@")
    for candidate in (file_name,) if file_name else ("model.safetensors", "pytorch_model.bin"):
        found = try_to_load_from_cache(repository, candidate, revision=revision or None)
        if isinstance(found, str):
            return found
    return None
