"""`python -m eval vision`: vision models of transformers."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from avq_diffusers.mini import model_path
from avq_diffusers.options import device_of, tolerances_of
from eval.commands.keys import SMALLEST, VIT, folder_of, load, result_path, sides_of
from eval.commands.options import Device, Download, Methods, Output, Tolerances, names_of
from eval.store.report import RESULTS, publish, save_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

FEATURE_METHODS = (
    "exact,value-projection,M192,M384,M32P8C8,M64P16C8,M128P32C8,"
    "M64C8T5e-4,M64C8T2e-4,M64C8T1e-4,M64C8T5e-5,"
    "M64P0C8,M64P4C8,M64P8C8,M64P32C8,M64P64C8,"
    "M192/stored,M64P16C8/stored,M192/means,M64P16C8/means"
)

Model = Annotated[
    str,
    typer.Option(
        callback=model_path, help="vit, or folder or Hub id of a transformers vision model."
    ),
]

app = typer.Typer(no_args_is_help=True, help="Vision transformers: features and tolerances.")


@app.command()
def features(
    methods: Methods = FEATURE_METHODS,
    model: Model = VIT,
    download: Download = False,
    sizes: Annotated[str, typer.Option(help="Sides of the images.")] = "518,1036,1554",
    images: Annotated[
        int, typer.Option(min=1, max=8, help="Photographs to measure on; others calibrate.")
    ] = 3,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """Features and salient pixels with AVQ in all layers, without training.

    On a GPU also the time of the forward pass, in float16. The file is written after each method.

    Example: python -m eval vision features --download --sizes 518,1036,1554
    """
    from eval.keys.measuring import measured_method
    from eval.keys.vit import load_decoder
    from eval.vision.features import WORDS, features_table, measure_features

    names = names_of(methods)
    for name in names:
        measured_method(name, WORDS)
    sides = sides_of(sizes)
    loaded = load_vision(model, download, device_of(device))
    decoder = load_decoder(folder_of(model))
    decoder = decoder and decoder.to(loaded.device)
    path = result_path(output, "vision_features", model, loaded.device.type)
    facts = {"device": loaded.device, "num_images": images, "dtype": str(loaded.dtype)}
    rows = []
    for size in sides:
        for row in measure_features(loaded, size, images, names, decoder):
            rows.append(row)
            save_json(path, **facts, rows=rows)
    print(features_table(rows))


@app.command()
def tolerance(
    tolerances: Tolerances = "0.01,0.02,0.05",
    model: Model = VIT,
    download: Download = False,
    size: Annotated[int, typer.Option(min=SMALLEST, help="Side of the images.")] = 518,
    probed: Annotated[int, typer.Option(min=1, max=4, help="Photographs to probe.")] = 4,
    images: Annotated[int, typer.Option(min=1, max=7, help="Others, to measure on.")] = 7,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """Thresholds by their effect on the features against one, on photographs not probed.

    Example: python -m eval vision tolerance --download
    """
    from eval.quality.tolerance import measure_vision_tolerances, tolerance_table

    limits = tolerances_of("--tolerances", tolerances)
    loaded = load_vision(model, download, device_of(device))
    profile, rows = measure_vision_tolerances(loaded, limits, size, probed, images)
    path = result_path(output, "vision_tolerance", model, str(size), loaded.device.type)
    publish(
        path,
        tolerance_table(rows),
        device=loaded.device,
        size=size,
        num_probed=probed,
        num_images=images,
        profile=asdict(profile),
        rows=rows,
    )
    profile.plot(path.with_suffix(".png"))


def load_vision(model: str, download: bool, device: "torch.device") -> "PreTrainedModel":
    """Load a vision model, in float16 on a GPU.

    Raises:
        ValueError: there is no such model, or it is not a vision model.
    """
    from torch import nn

    loaded = load(model, download, device)
    if not isinstance(loaded, nn.Module):
        raise ValueError(f"--model must be a transformers vision model, but {model} is not.")
    return loaded
