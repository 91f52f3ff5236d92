"""The `mctf` command: one file a verb, each of them thin (parse, call, print).

Verbs are imported when they are asked for, so that `mctf --help` answers at once.
"""

import sys
import warnings
from importlib import import_module
from typing import Any

import click

_VERBS = {
    "plan": "Token counts and GFLOPs of a model, without running it.",
    "eval": "Accuracy, fidelity and speed of a model over several r.",
    "compare": "Methods against each other at equal cost.",
    "finetune": "Train a model to lose nothing by fusing.",
    "bench": "Speed of plain, fused and free-drop models, in one run.",
    "reproduce": "The paper's tables and figures, measured again, as one page.",
    "visualize": "A picture of which patches were fused.",
    "demo": "See it work on this machine, with nothing to download.",
}


class _LazyGroup(click.Group):
    """Lists the verbs without importing them; suggests the nearest one for a typing error."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        return import_module(f".{cmd_name}", __name__).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from ..errors import MctfError, did_you_mean

        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            raise MctfError(f"there is no command {args[0]!r}: {did_you_mean(args[0], _VERBS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mctf")
def group() -> None:
    """Make Vision Transformers faster by fusing tokens, and see what that costs."""


def main() -> None:
    """Amount point: errors become one line on stderr and exit code 2, warnings of our own one line."""
    from ..errors import MctfError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _in_one_line(warnings.showwarning)
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


def _in_one_line(otherwise: Any) -> Any:
    """Shows a warning of mctf without the place in the code that gave it; those of others as they were shown before."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category.__module__.partition(".")[0] == __package__.partition(".")[0]:
            click.echo(f"mctf: warning: {message}", err=True)
        else:
            otherwise(message, category, *place, **more)

    return show
