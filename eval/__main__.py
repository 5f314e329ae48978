"""`python -m eval`: benchmarks and quality tables, written to a folder."""

import typer

from avq_diffusers.options import hide_torchvision_notes, print_any_text, restore_threads
from eval.commands import bench, coco, keys, pages, quality, reproduce, vision
from eval.commands.options import run_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure AVQ attention: speed, similarity to exact attention, quality.",
)
for commands in (quality, keys, pages):
    app.add_typer(commands.app)
app.add_typer(bench.app, name="bench")
app.add_typer(coco.app, name="coco")
app.add_typer(vision.app, name="vision")
app.add_typer(reproduce.app, name="reproduce")


def main() -> None:
    """Run the command."""
    restore_threads()
    hide_torchvision_notes()
    print_any_text()
    run_app(app)


if __name__ == "__main__":
    main()
