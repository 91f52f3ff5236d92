"""The `mctf` command: one file per subcommand, each of them thin (parse, call, print).

A subcommand is imported when it is used, so that `mctf --help` needs no torch.
"""

import errno
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import PurePath
from typing import Any

import click

from .process import ReaderGone, Stopped, discard, open_closed_streams, readers_may_leave, stopped_by_signals

_COMMANDS = {
    "plan": "Token counts and GFLOPs of a model, without running it.",
    "eval": "Accuracy, fidelity and speed of a model over several r.",
    "compare": "Which method stays closest to the baseline at equal cost.",
    "tune": "How many tokens each block should fuse, on your own images.",
    "finetune": "Fine-tune a model for token fusion.",
    "bench": "Speed of unfused, fused and free-drop models, in one run.",
    "export": "Write a fused model for ONNX Runtime, OpenVINO or AOTInductor.",
    "embed": "Vectors of millions of images, resumable, by a fused model.",
    "reproduce": "Reproduce the paper's tables and figures, as one page.",
    "visualize": "Draw which patches were fused.",
    "demo": "Try it on this machine, without downloads.",
}


class _LazyGroup(click.Group):
    """Lists the subcommands without importing them; suggests the closest one for a typo."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with readers_may_leave():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with readers_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return import_module(f".{cmd_name}", __name__).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from ..errors import MctfError, did_you_mean

        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            raise MctfError(f"there is no command {args[0]!r}: {did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mctf")
@click.pass_context
def group(ctx: click.Context) -> None:
    """Make Vision Transformers faster by fusing tokens, and measure the effect."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point: errors become one line on stderr and exit code 2, warnings one line each.

    An error that mctf did not foresee is one line, too, with exit code 1; MCTF_TRACEBACK=1 shows where it was raised.
    """
    open_closed_streams()
    os.environ["MPLBACKEND"] = "agg"  # a command opens no window, and a backend that is missing stops matplotlib
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    code, received = 0, list[int]()
    with suppress(Stopped), stopped_by_signals(received):
        with suppress(Stopped):  # also raised while an error is reported
            code = _run(received)
        if received:
            if received[0] == signal.SIGINT and sys.stderr.isatty():
                click.echo(err=True)  # after ^C
            name = signal.Signals(received[0]).name
            _say("interrupted" if name == "SIGINT" else f"stopped by {name}")
    if received:
        code = 128 + received[0]
    if code:
        sys.exit(code)


def _run(received: list[int]) -> int:
    """Run the command and report its error; returns the exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = group(standalone_mode=False)
            sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (ReaderGone, BrokenPipeError):
        discard(sys.stdout)
        discard(sys.stderr)
        return 0
    except (click.Abort, KeyboardInterrupt):
        received.append(signal.SIGINT)
        return 0
    except Exception as error:
        return 0 if received else _report(error)  # a signal fails an import in ways of its own
    return code or 0


def _report(error: BaseException) -> int:
    """Print an error in one line; returns the exit code."""
    from ..errors import MctfError, is_out_of_memory

    if os.environ.get("MCTF_TRACEBACK", "0") != "0":
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        _say(error.format_message())
    elif isinstance(error, MctfError):
        _say(str(error))
    elif is_out_of_memory(error):
        _say("there is too little memory: use smaller batches, smaller images or a smaller model")
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        discard(sys.stdout)
        where = "" if error.filename is None else f" for {error.filename}"
        _say(f"there is no space left on the device{where}: make room, or write elsewhere")
    else:
        _say(
            f"unexpected {type(error).__name__} ({error}): this is a defect of mctf, please report it "
            "with the output of MCTF_TRACEBACK=1"
        )
        return 1
    return 2


def _say(text: str) -> None:
    """One line on stderr, without control characters."""
    from ..errors import one_line

    try:
        click.echo(f"mctf: {one_line(' '.join(text.split()))}", err=True)
    except OSError:  # a full disk, or a pipe that nobody reads
        discard(sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    """A `warnings.showwarning` that prints one line, with the package that warns unless it is mctf."""
    own = category.__module__.partition(".")[0] == "mctf"
    origin = "" if own else f" from {_package_of(filename)}"
    _say(f"warning{origin}: {message}")


def _package_of(filename: str) -> str:
    """The package that a source file belongs to, by the name of its folder in site-packages."""
    parts = PurePath(filename).parts
    if "site-packages" in parts[:-1]:
        return parts[parts.index("site-packages") + 1].removesuffix(".py")
    return PurePath(filename).stem
