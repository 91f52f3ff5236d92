"""The page of `mctf playground`: a photograph through a model, unfused and fused by two methods, side by side.

gradio serves it (extra `playground`). The page needs no network: fonts are the system's, nothing is reported anywhere.
Its address holds the settings.
"""

import base64
import html
import inspect
import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from torch import nn

from .._utils import optional_import
from ..core.budget import parse_flops
from ..data import ReadLimits
from ..errors import MctfError, did_you_mean, shown
from ..evaluation.environment import pick_device
from .demo import Photograph, photographs
from .inspection import Fusion, Inspection, Inspector, training_free

BUDGET = 0.56
BATCHES = (1, 8)
LOWEST = 0.2
_METHODS = ("ward", "mctf")
_LIMITS = ReadLimits(max_bytes=2**25, max_pixels=50_000_000)
_KEPT_SECONDS = 3600  # that an uploaded file stays on the disk

_ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DISABLE_TELEMETRY": "1"}

# Client-side: the address follows the settings, and the block slider only swaps pictures.
_ADDRESS = """(photo, model, first, second, flops, batch, block) => {
    const address = new URL(window.location);
    const settings = {photo, model, first, second, flops, batch, block};
    for (const [name, value] of Object.entries(settings))
        if (value === null || value === "") address.searchParams.delete(name);
        else address.searchParams.set(name, value);
    window.history.replaceState(window.history.state, "", address);
    document.querySelectorAll(".mctf [data-block]").forEach(each => { each.hidden = each.dataset.block != block; });
}"""


@dataclass(frozen=True)
class Settings:
    """What the address of the page holds. photo: None for an uploaded one. block: None for the last."""

    model: str
    photo: str | None = None
    first: str = _METHODS[0]
    second: str = _METHODS[1]
    flops: float = BUDGET
    batch: int = BATCHES[-1]
    block: int | None = None

    @classmethod
    def from_query(
        cls, query: Mapping[str, str], *, models: Sequence[str], photos: Sequence[str], methods: Sequence[str]
    ) -> "Settings":
        """Settings from the parameters of an address; raises MctfError for a value that is none of the choices."""
        values: dict[str, Any] = {"model": models[0], "photo": photos[0] if photos else None}
        choices = {"model": models, "photo": photos, "first": methods, "second": methods}
        for name, names in choices.items():
            if name in query:
                if query[name] not in names:
                    raise MctfError(f"the address has {name}={shown(query[name])}: {did_you_mean(query[name], names)}")
                values[name] = query[name]
        if "flops" in query:
            values["flops"] = parse_flops(query["flops"])
            if values["flops"] < LOWEST:
                raise MctfError(f"the address has flops={values['flops']}: choose a share from {LOWEST} to 1")
        for name, most in (("batch", BATCHES[-1]), ("block", 1000)):
            if name in query:
                text = query[name]
                if not (text.isascii() and text.isdigit() and len(text) < 5 and int(text) <= most):
                    raise MctfError(f"the address has {name}={shown(text)}: expected a number from 0 to {most}")
                values[name] = int(text)
        if values.get("batch", BATCHES[0]) not in BATCHES:
            raise MctfError(f"the address has batch={values['batch']}: choose from {', '.join(map(str, BATCHES))}")
        return cls(**values)


def build(
    models: Mapping[str, nn.Module | Callable[[], nn.Module]],
    *,
    device: torch.device | None = None,
    samples: Sequence[Path] | None = None,
    rounds: int | None = None,
) -> Any:
    """The page as a gradio.Blocks, for `serve` or a Hugging Face Space.

    models: by the name that the page shows; functions that load them keep its times low, see `Inspector`. samples:
    photographs to pick from; by default those of `mctf demo`, where their packages are installed. rounds: timed passes
    per model.
    """
    gradio = _gradio()
    options = {} if rounds is None else {"rounds": rounds}
    inspector = Inspector(models, device=pick_device(None) if device is None else device, **options)
    listed = _demo_photographs() if samples is None else [Photograph(path.stem, path) for path in samples]
    files = {each.name: each for each in listed}
    names, methods = list(inspector.models), training_free()

    def show(
        upload: str | None, photo: str | None, model: str, first: str, second: str, flops: float, batch: int, block: int
    ) -> tuple[str, Any]:
        try:
            depth = inspector.depth(model)
            block = min(int(block), depth - 1)
            chosen = Photograph("own", Path(upload)) if upload else files.get(photo or "")
            if chosen is None:
                raise MctfError("there is no photograph yet: drop one into the box on the left")
            try:
                image = chosen.open(_LIMITS)
            except MctfError as failure:
                raise MctfError(str(failure).replace(str(chosen.path), chosen.path.name)) from None
            fusions = [Fusion(method, float(flops)) for method in (first, second)]
            inspection = inspector.inspect(image, model=model, fusions=fusions, batch=int(batch))
        except MctfError as failure:
            return _error(failure), gradio.skip()
        except Exception as failure:  # what nobody foresaw is a line in the page as well
            logging.getLogger(__name__).exception("the playground failed")
            return _error(
                f"unexpected {type(failure).__name__}: this is a defect of mctf, please report it"
            ), gradio.skip()
        return render(inspection, block=block), gradio.update(maximum=depth - 1, value=block)

    def restore(request: Any) -> list[Any]:
        """The components' values as the address has them, and the index of the photograph in the gallery."""
        error = ""
        try:
            query = dict(request.query_params) if request else {}
            settings = Settings.from_query(query, models=names, photos=list(files), methods=methods)
        except MctfError as failure:
            settings = Settings.from_query({}, models=names, photos=list(files), methods=methods)
            error = _error(failure)
        last = inspector.depth(settings.model) - 1
        block = last if settings.block is None else min(settings.block, last)
        index = list(files).index(settings.photo) if settings.photo else None
        return [
            settings.photo or "",
            gradio.update(selected_index=index),
            settings.model,
            settings.first,
            settings.second,
            settings.flops,
            settings.batch,
            gradio.update(maximum=last, value=block),
            gradio.update(value=error, visible=bool(error)),
        ]

    def pick(event: Any) -> tuple[str, None]:
        return list(files)[event.index], None

    restore.__annotations__["request"] = gradio.Request  # by which gradio knows what to pass
    pick.__annotations__["event"] = gradio.SelectData

    with gradio.Blocks(
        title="mctf playground", fill_width=True, analytics_enabled=False, delete_cache=(_KEPT_SECONDS, _KEPT_SECONDS)
    ) as page:
        gradio.HTML(
            "<h1>mctf playground</h1><p>A Vision Transformer answers faster when its tokens are fused. "
            "Patches fused into one token share their mean color and a border.</p>",
            elem_classes="mctf-head",
        )
        with gradio.Row():
            with gradio.Column(scale=1, min_width=230):
                upload = gradio.File(
                    label="Your photograph", show_label=False, file_count="single", type="filepath", height=132
                )
                gallery = gradio.Gallery(
                    value=[_thumbnail(each) for each in files.values()],
                    label="Photographs to pick from",
                    show_label=False,
                    columns=4,
                    height=None,
                    object_fit="cover",
                    allow_preview=False,
                    interactive=False,
                    buttons=[],
                    visible=bool(files),
                    elem_id="photographs",
                )
                model = gradio.Dropdown(names, value=names[0], label="Model")
                with gradio.Row():
                    first = gradio.Dropdown(methods, value=_METHODS[0], label="Method", min_width=130)
                    second = gradio.Dropdown(methods, value=_METHODS[1], label="Second method", min_width=130)
                flops = gradio.Slider(LOWEST, 1, BUDGET, step=0.01, label="Budget: FLOPs to keep", buttons=[])
                batch = gradio.Radio(list(BATCHES), value=BATCHES[-1], label="Images per timed pass")
            with gradio.Column(scale=3, min_width=440):
                last = inspector.depth(names[0]) - 1
                block = gradio.Slider(0, last, last, step=1, label="Patches after block", buttons=[])
                notice = gradio.HTML(visible=False, apply_default_css=False)
                result = gradio.HTML(min_height=320, apply_default_css=False)
        photo = gradio.Textbox(next(iter(files), ""), visible="hidden", label="photograph")

        settings = [photo, model, first, second, flops, batch]
        quiet: dict[str, Any] = {"api_visibility": "private"}
        inspecting: dict[str, Any] = {
            **quiet,
            "fn": show,
            "inputs": [upload, *settings, block],
            "outputs": [result, block],
            "trigger_mode": "always_last",
            "show_progress_on": result,
        }
        address: dict[str, Any] = {**quiet, "fn": None, "inputs": [*settings, block], "js": _ADDRESS}

        restored = [photo, gallery, model, first, second, flops, batch, block, notice]
        page.load(restore, None, restored, **quiet).then(**inspecting)
        changed = [each.input for each in (model, first, second, flops, batch)]
        gradio.on(changed, lambda: gradio.update(visible=False), None, notice, **quiet)
        gradio.on(changed, **inspecting).then(**address)
        gallery.select(pick, None, [photo, upload], **quiet).then(**inspecting).then(**address)
        unnamed = upload.upload(lambda: ("", gradio.update(selected_index=None)), None, [photo, gallery], **quiet)
        unnamed.then(**inspecting).then(**address)
        block.input(**address)
    return page


def serve(
    page: Any, *, host: str | None = None, port: int | None = None, wait: bool = True, browser: bool = False
) -> str:
    """Serve a page of `build` and return its address; the settings keep gradio from using the network.

    host: 127.0.0.1 by default, or GRADIO_SERVER_NAME. port: the first free one from 7860 on by default.
    wait: until a signal ends the program.
    """
    gradio = _gradio()
    theme = gradio.themes.Default(
        primary_hue="teal", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    # from gradio 6.24 on, browsers keep what was shown unless told not to
    private = {"run_history": False} if "run_history" in inspect.signature(page.launch).parameters else {}
    try:
        _, local, _ = page.launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=not wait,
            inbrowser=browser,
            share=False,
            quiet=True,
            footer_links=[],
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            max_file_size=_LIMITS.max_bytes,
            theme=theme,
            css=(Path(__file__).parent / "templates" / "playground.css").read_text(encoding="utf-8"),
            **private,
        )
    except OSError as failure:
        raise MctfError(f"port {port or 7860} cannot be served ({failure}): choose another one with --port") from None
    return local


def render(inspection: Inspection, *, block: int) -> str:
    """The inspection as HTML: one card per model; the pictures of all blocks are inside, one is visible."""
    results = (inspection.baseline, *inspection.fused)
    sources = {id(frame): frame for each in results for frame in each.frames}  # blocks that fuse nothing share one
    encoded = {key: _data_address(frame) for key, frame in sources.items()}
    frames = [[encoded[id(frame)] for frame in each.frames] for each in results]
    return _template().render(inspection=inspection, results=results, frames=frames, block=block)


def _data_address(picture: Image.Image) -> str:
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _error(message: object) -> str:
    return f'<p class="mctf-error" role="alert">{html.escape(str(message))}</p>'


def _thumbnail(photograph: Photograph) -> tuple[Image.Image, str]:
    image = photograph.open(_LIMITS)
    image.thumbnail((240, 240))
    return image, photograph.name


def _demo_photographs() -> list[Photograph]:
    try:
        return photographs()
    except MctfError:  # their packages lack them, and the playground does without
        return []


def _gradio() -> ModuleType:
    for name, value in _ENVIRONMENT.items():  # read when gradio is imported
        os.environ.setdefault(name, value)
    return optional_import("gradio", extra="playground", purpose="playgrounds")


@cache
def _template() -> Any:
    jinja2 = optional_import("jinja2", extra="playground", purpose="playgrounds")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mctf", "viz/templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("playground.html.j2")
