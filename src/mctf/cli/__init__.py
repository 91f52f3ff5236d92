"""The `mctf` command: one file per subcommand, each of them thin (parse, call, print).

A subcommand is imported when it is used, so that `mctf --help` needs no torch.
"""

import sys
import warnings
from importlib import import_module
from typing import Any

import click

_COMMANDS = {
    "plan": "Token counts and GFLOPs of a model, without running it.",
    "eval": "Accuracy, fidelity and speed of a model over several r.",
    "compare": "Which method stays closest to the baseline at equal cost.",
    "finetune": "Fine-tune a model for token fusion.",
    "bench": "Speed of unfused, fused and free-drop models, in one run.",
    "reproduce": "Reproduce the paper's tables and figures, as one page.",
    "visualize": "Draw which patches were fused.",
    "demo": "Try it on this machine, without downloads.",
}


class _LazyGroup(click.Group):
    """Lists the subcommands without importing them; suggests the closest one for a typo."""

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


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mctf")
def group() -> None:
    """Make Vision Transformers faster by fusing tokens, and measure the effect."""


def main() -> None:
    """Entry point: errors become one line on stderr and exit code 2, warnings of mctf one line."""
    from ..errors import MctfError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_in_one_line(warnings.showwarning)
            group(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("mctf: interrupted", err=True)
        sys.exit(130)
    except (click.ClickException, MctfError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"mctf: {' '.join(text.split())}", err=True)
        sys.exit(2)


def _show_in_one_line(default: Any) -> Any:
    """A `warnings.showwarning` that prints warnings of mctf without their place in the code, and others by default."""

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if category.__module__.partition(".")[0] == __package__.partition(".")[0]:
            click.echo(f"mctf: warning: {message}", err=True)
        else:
            default(message, category, *args, **kwargs)

    return show
