"""The `mctf` command: one file per subcommand, each of them thin (parse, call, print).

A subcommand is imported when it is used, so that `mctf --help` needs no torch.
"""

import errno
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import PurePath
from typing import Any

import click

_COMMANDS = {
    "plan": "Token counts and GFLOPs of a model, without running it.",
    "eval": "Accuracy, fidelity and speed of a model over several r.",
    "compare": "Which method stays closest to the baseline at equal cost.",
    "tune": "How many tokens each block should fuse, on your own images.",
    "finetune": "Fine-tune a model for token fusion.",
    "bench": "Speed of unfused, fused and free-drop models, in one run.",
    "reproduce": "Reproduce the paper's tables and figures, as one page.",
    "visualize": "Draw which patches were fused.",
    "demo": "Try it on this machine, without downloads.",
}
_PATIENCE = 2.0  # seconds: one Ctrl-C may come as several signals, from the terminal and from torchrun


class _Stopped(BaseException):
    """A signal that ends the command. Unlike KeyboardInterrupt, nobody catches it on the way."""


class _ReaderGone(Exception):  # noqa: N818
    """Nobody reads the output any more, as in `mctf eval … | head -1`."""


@contextmanager
def _readers_may_leave() -> Iterator[None]:
    """Turns a broken pipe into _ReaderGone: click and rich would exit with code 1."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as stop:
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        raise _ReaderGone from None


class _LazyGroup(click.Group):
    """Lists the subcommands without importing them; suggests the closest one for a typo."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _readers_may_leave():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _readers_may_leave():
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
    _open_closed_streams()
    os.environ["MPLBACKEND"] = "agg"  # a command opens no window, and a backend that is missing stops matplotlib
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    with _stopped_by_signals() as received:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                code = group(standalone_mode=False)
                sys.stdout.flush()
        except click.exceptions.Exit as stop:
            code = stop.exit_code
        except (_ReaderGone, BrokenPipeError):
            _discard(sys.stdout)
            _discard(sys.stderr)
            code = 0
        except (Exception, KeyboardInterrupt, _Stopped) as error:
            if received or isinstance(error, (click.Abort, KeyboardInterrupt)):  # an import fails in ways of its own
                number = received[0] if received else signal.SIGINT
                if number == signal.SIGINT and sys.stderr.isatty():
                    click.echo(err=True)  # after ^C
                _say("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
                code = 128 + number
            else:
                code = _report(error)
    if code:
        sys.exit(code)


@contextmanager
def _stopped_by_signals() -> Iterator[list[int]]:
    """While open, signals that end a program raise _Stopped, so that files and the terminal are left in order.

    Yields the number of the one that came first; later ones end a program that does not end by itself. A signal that is
    ignored, as under nohup, stays ignored.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    owner, patience = os.getpid(), 0.0

    def stop(number: int, _: object) -> None:
        nonlocal patience
        if os.getpid() != owner:  # a process that was forked
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not received:
            received.append(number)
            patience = time.monotonic() + _PATIENCE
            raise _Stopped
        if time.monotonic() > patience:
            os._exit(128 + number)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    previous = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _open_closed_streams() -> None:
    """Open the null device in place of a standard stream that is closed, as by `>&-`: no file takes its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


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
        _discard(sys.stdout)
        where = "" if error.filename is None else f" for {error.filename}"
        _say(f"there is no space left on the device{where}: make room, or write elsewhere")
    else:
        _say(
            f"unexpected {type(error).__name__} ({error}): this is a defect of mctf, please report it "
            "with the output of MCTF_TRACEBACK=1"
        )
        return 1
    return 2


def _discard(stream: Any) -> None:
    """Drop what could not be printed, so that Python does not try again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """One line on stderr, without control characters."""
    from ..errors import one_line

    try:
        click.echo(f"mctf: {one_line(' '.join(text.split()))}", err=True)
    except OSError:  # a full disk, or a pipe that nobody reads
        _discard(sys.stderr)


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
