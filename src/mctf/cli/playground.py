"""`mctf playground`: a local web page that compares two methods on photographs."""

from functools import partial
from pathlib import Path

import click

from .._utils import optional_import
from ..errors import MctfError
from .options import FILE, device_option, threads_option
from .output import echo
from .progress import Command, progress

EMBEDDED = "embedded"


@click.command(
    "playground",
    cls=Command,
    epilog="""\b
Examples:
  mctf playground
  mctf playground --model deit_small_patch16_224 --open
  mctf playground --model deit_tiny_patch16_224 \\
      --weights tiny.safetensors --port 8000
""",
)
@click.option("--model", "models", multiple=True, help="A timm name or hf:NAME beside embedded; repeatable.")
@click.option("--weights", type=FILE, help="Weights file of the model; timm's pretrained weights by default.")
@click.option("--port", type=click.IntRange(1, 65535), help="The first free one from 7860 on by default.")
@click.option("--open", "browser", is_flag=True, help="Open the page in the browser.")
@device_option
@threads_option
def command(
    models: tuple[str, ...],
    weights: Path | None,
    port: int | None,
    browser: bool,
    device_name: str | None,
    threads: int | None,
) -> None:
    """Serve a page on which photographs go through a model, unfused and fused by two methods.

    It shows the fused patches block by block, the answers, FLOPs, measured time and KL. Only this machine can open the
    page, and nothing is sent anywhere. The address of the page holds the settings.
    """
    others = [name for name in dict.fromkeys(models) if name != EMBEDDED]
    if weights is not None and len(models) != 1:
        raise MctfError("--weights is the file of one model: name it with one --model")
    optional_import("gradio", extra="playground", purpose="playgrounds")  # before a download

    from ..evaluation.environment import pick_device, set_threads
    from ..models.loading import load_model
    from ..viz.playground import build, serve

    set_threads(threads)
    device = pick_device(device_name)
    names = [*others, EMBEDDED] if models else [EMBEDDED]
    loading = {name: partial(load_model, name, weights=weights if name in models else None) for name in names}
    with progress(f"loading {', '.join(names)}"):
        page = build(loading, device=device)
    address = serve(page, host="127.0.0.1", port=port, wait=False, browser=browser)
    echo(f"mctf playground: {address} (Ctrl-C ends it)")
    page.block_thread()
