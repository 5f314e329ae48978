"""`python -m eval`: benchmarks, quality tables and tests of reliability, written to a folder."""

import sys

import typer

from eval.commands import bench, coco, codebooks, quality, reliability
from eval.report import ProcessFailed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure AVQ attention: speed, likeness to exact attention, quality, reliability.",
)
for commands in (quality, codebooks, reliability):
    app.add_typer(commands.app)
app.add_typer(bench.app, name="bench")
app.add_typer(coco.app, name="coco")


def main() -> None:
    """Run the command."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command; a mistake of the user's is one sentence and exit code 2."""
    try:
        app()
    except (ImportError, OSError, ValueError, TypeError, ProcessFailed) as error:
        print(f"eval: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
