"""`python -m eval keys`: attention methods on the queries, keys and values of real models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from avq_diffusers.mini import model_path, usual_prompts
from avq_diffusers.options import device_of, numbers_of
from eval.commands.options import Device, Download, Dtype, Output, names_of, usual_dtype
from eval.store.report import RESULTS, publish

if TYPE_CHECKING:
    import torch

    from eval.keys.subjects import Model

SMALLEST = 64
VIT = "vit"
VIT_FOLDER = RESULTS / VIT
METHODS = (
    "exact,value-projection,M192/stored,M384/stored,M64P16C8/stored,M128P32C8/stored,M192/means,"
    "M384/means,M64P16C8/means,M128P32C8/means,M192,M384,M768,M64P16C8,M64P32C8,M128P32C8,"
    "M256P64C8,M64C8T5e-4,M64C8T2e-4,M64C8T1e-4,M64C8T5e-5"
)

app = typer.Typer()


@app.command("keys")
def keys_command(
    methods: Annotated[
        str | None,
        typer.Option(
            show_default="some 20",
            help="Comma-separated: configurations with a threshold (M64C8T1e-4) or the paper's "
            "sizes (M64P16C8, M192), stored codewords (M64P16C8/stored) or a codebook's cells with "
            "mean keys (M64P16C8/means; neither for diffusers transformers); "
            "exact, value-projection; on a GPU also peers with their own kernels, pisa@.15 and "
            "sol@1.3.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            callback=model_path,
            help="vit, mini-sd, or folder or Hub id of a diffusers pipeline or of a "
            "transformers vision model.",
        ),
    ] = VIT,
    download: Download = False,
    sizes: Annotated[
        str | None, typer.Option(help="Sides of the images; by default the model's own.")
    ] = None,
    images: Annotated[
        int, typer.Option(min=1, max=3, help="Photographs, or prompts, to measure on.")
    ] = 2,
    frames: Annotated[
        int,
        typer.Option(
            min=1,
            help="Turn each photograph into a camera pan of this many frames, a stand-in for a "
            "video whose tokens all attend to each other.",
        ),
    ] = 1,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = RESULTS,
) -> None:
    """Error of attention layers on real queries, keys and values, by columns and by time.

    Times are measured on a GPU only. vit is a pretrained vision transformer, fetched once by
    --download to runs/vit, a folder that --model also accepts. Sizes of 518, 1036 and 1554 pixels
    give it 1370, 5477 and 12322 tokens.

    Example: python -m eval keys --download --sizes 518,1036
    """
    from eval.keys.measuring import dial_panels, key_method, keys_table, measure
    from eval.keys.subjects import own_size, subject_of, takes_stored
    from eval.methods.avq import Stored
    from eval.store.plots import panel_plot

    names = names_of(methods or METHODS)
    methods_by_name = {name: key_method(name) for name in names}
    sides = None if sizes is None else sides_of(sizes)
    place = device_of(device)
    loaded = load(model, download, place, dtype)
    if methods is None and not takes_stored(loaded):
        names = [name for name in names if not isinstance(methods_by_name[name], Stored)]
    prompts = usual_prompts(model)
    rows = []
    for size in sides or (own_size(loaded),):
        rows += measure(subject_of(loaded, size, images, prompts, frames), names)
    video = [f"{frames}_frames"] if frames > 1 else []
    path = result_path(output, "keys", model, *video, place.type, *([dtype] if dtype else []))
    publish(
        path,
        keys_table(rows),
        device=place,
        num_images=images,
        frames=frames,
        dtype=str(loaded.dtype),
        rows=rows,
    )
    panel_plot(path.with_name(f"{path.stem}_dial.png"), dial_panels(rows))


def sides_of(sizes: str) -> tuple[int, ...]:
    """The image sides in `--sizes`.

    Raises:
        ValueError: one is not a number, or too small.
    """
    sides = numbers_of("--sizes", sizes)
    if min(sides) < SMALLEST:
        raise ValueError(f"--sizes must be at least {SMALLEST}, but got {min(sides)}.")
    return sides


def folder_of(model: str) -> Path:
    """The folder or Hub id of a model."""
    return VIT_FOLDER if model == VIT else Path(model)


def load(model: str, download: bool, device: "torch.device", dtype: str | None = None) -> "Model":
    """Load a model; by default in float16 on a GPU and float32 elsewhere.

    Raises:
        ValueError: there is no such model.
    """
    from eval.keys.subjects import load_model
    from eval.keys.vit import download_vit

    if download:
        download_vit(VIT_FOLDER)
    if model == VIT and not VIT_FOLDER.is_dir():
        raise ValueError(f"there is no {VIT_FOLDER}; --download fetches it.")
    return load_model(str(folder_of(model)), device, dtype or usual_dtype(device))


def result_path(output: Path, kind: str, model: str, *facts: str) -> Path:
    """The path of a result file."""
    name = Path(model).name.replace("-", "_")
    return output / f"{'_'.join([kind, name, *facts])}.json"
