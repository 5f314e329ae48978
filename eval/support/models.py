"""Which image and video models of diffusers run AVQ: `python -m eval models`.

A class is served if an adapter names it; the contract's tests run a real model of each at tiny
size. What the installed diffusers has is kept in `models.json`. A class that is neither served nor
in `NOT_SERVED` is an error, for someone to decide.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import diffusers
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.pipelines import auto_pipeline

from avq_diffusers.files import write_text
from avq_diffusers.hosts import FAMILIES
from eval.store.markdown import markdown_table
from eval.store.report import save_json

# What `apply_avq` finds in a pipeline.
COMPONENTS = ("unet", "transformer", "transformer_2", "unconditional_transformer")
# Arguments of pipelines that do not start from a text alone.
IMAGES = re.compile(r"(^|_)(image|images|video|controls|reference)$")
# Classes that make no image or video, or are a part of one that does.
OTHERS = re.compile(
    r"Audio|Music|1D|Protein|AceStep|Prior|Controlnet|ControlNet|Multi|Vae|Temporal"
)
PARTS = ("Transformer2DModel", "DreamLiteTransformer2DModel", "SanaWMLTX2RefinerTransformer3DModel")

CONTROLNETS = {"FluxControlNetModel", "QwenImageControlNetModel", "SD3ControlNetModel"}
SERVED = {
    *({name for family in FAMILIES for name in family.models} - CONTROLNETS),
    *("UNet2DConditionModel", "UNetMotionModel", "UNet3DConditionModel"),
    *("UNetSpatioTemporalConditionModel", "I2VGenXLUNet"),
}
REFERENCES = "calls with reference images run exact"
BUT_FOR = {
    **dict.fromkeys(
        (
            *("FluxTransformer2DModel", "Flux2Transformer2DModel", "Flux3Transformer2DModel"),
            *("QwenImageTransformer2DModel", "ZImageTransformer2DModel"),
        ),
        REFERENCES,
    ),
    "QwenImage21Transformer2DModel": "the first step of a prompt runs exact",
    "Lumina2Transformer2DModel": "batches with texts of several lengths run exact",
    "LTXVideoTransformer3DModel": "calls by coordinates (LTXCondition) run exact",
    "LTX2VideoTransformer3DModel": "calls with frames beside the video run exact",
    "MotifVideoTransformer3DModel": "its decoder layers, if it has any, run exact",
    "Kandinsky5Transformer3DModel": "calls with its own sparse attention run exact",
}
NOT_SERVED = {
    "ChromaTransformer2DModel": "its pipelines' masks are biases",
    "AnyFlowFARTransformer3DModel": "attends causally, with kept keys",
    "BriaFibo2Transformer2DModel": "text before or after the image",
    "Cosmos3OmniTransformer": "causal text, other queries than keys",
    "DiTTransformer2DModel": "square images of 256 tokens",
    "DreamLiteUNetModel": "grouped keys in its own layers",
    "HunyuanVideoFramepackTransformer3DModel": "the video between history and text",
    "JoyImageEditTransformer3DModel": "images of several sizes, packed",
    "JoyImageEditPlusTransformer3DModel": "images of several sizes, packed",
    "Kandinsky3UNet": "its own blocks, few tokens",
    "Kandinsky6SRTransformer3DModel": "attends in windows",
    "OmniGenTransformer2DModel": "a causal mask over the text",
    "SanaTransformer2DModel": "its own linear attention",
    "SanaVideoTransformer3DModel": "its own linear attention",
    "SanaWMTransformer3DModel": "its own linear attention",
    "StableCascadeUNet": "its own blocks, few tokens",
    "UNet2DModel": "its own blocks, few tokens",
    "UVit2DModel": "tokens of a codebook, few",
    "WanAnimateTransformer3DModel": "not tried",
    "WanAnimate2Transformer3DModel": "not tried",
}


def found() -> dict[str, Any]:
    """What the installed diffusers has: pipelines by class of model, and those from a text alone.

    Raises:
        ValueError: a class is not listed here.
    """
    models: dict[str, list[str]] = {
        name: []
        for name in sorted(dir(diffusers))
        if re.search("Transformer|UNet|UVit|DiT", name)
        and not OTHERS.search(name)
        and name not in PARTS
        and inspect.isclass(cls := getattr(diffusers, name))
        and issubclass(cls, ModelMixin)
    }
    unknown = models.keys() - SERVED - NOT_SERVED.keys()
    if unknown:
        raise ValueError(f"models must be served or have a reason, but {sorted(unknown)} have none")
    named = {
        pipe
        for kind in ("TEXT2IMAGE", "TEXT2VIDEO")
        for pipe in getattr(auto_pipeline, f"AUTO_{kind}_PIPELINES_MAPPING").values()
    }
    from_text = {}
    for name in sorted(x for x in dir(diffusers) if x.endswith("Pipeline")):
        pipe = getattr(diffusers, name)
        if not issubclass(pipe, DiffusionPipeline) or ".deprecated" in pipe.__module__:
            continue
        takes = inspect.signature(pipe.__call__).parameters
        components = {
            cls: component
            for component, parameter in inspect.signature(pipe).parameters.items()
            for cls in re.findall(r"\w+", str(parameter.annotation))
            if cls in models
        }
        for cls in components:
            models[cls].append(name)
        has_text = "prompt" in takes and not any(map(IMAGES.search, takes))
        if components and (has_text or (pipe in named and "prompt" in takes)):
            from_text[name] = [cls for cls, part in components.items() if part in COMPONENTS]
    return {"diffusers": diffusers.__version__, "models": models, "from_text": from_text}


def models_table(found: dict[str, Any]) -> str:
    """A sentence with the share of pipelines from a text alone, and a line per class."""
    pipelines = found["from_text"]
    served = [
        name for name, models in pipelines.items() if (SERVED - NOT_SERVED.keys()) & {*models}
    ]
    rows = []
    for name, pipeline_names in found["models"].items():
        state = f"yes; {BUT_FOR[name]}" if name in BUT_FOR else "yes"
        if name in NOT_SERVED:
            state = f"no: {NOT_SERVED[name]}"
        short = ", ".join(pipe.removesuffix("Pipeline") for pipe in pipeline_names)
        rows.append([name, state, short or "-"])
    not_served = ", ".join(name for name in pipelines if name not in served)
    share = f"{len(served) / len(pipelines):.0%}"
    return (
        f"# Models\n\n"
        f"Of the {len(pipelines)} pipelines of diffusers {found['diffusers']} that make images or "
        f"videos from a text alone, AVQ runs in {len(served)}, {share}. Not in: {not_served}.\n\n"
        "A row is a model and the pipelines that use it. Calls that *run exact* work, with exact "
        "attention. Models with *no* are refused by `apply_avq`, for the reason given.\n\n"
        + markdown_table(["model", "runs AVQ", "pipelines"], rows)
    )


def write_models(results: Path) -> None:
    """Write what the installed diffusers has, and the table.

    Raises:
        ValueError: it has a class of which nothing is known.
    """
    content = found()
    save_json(results / "models.json", device="cpu", **content)
    write_text(results / "models.md", models_table(content) + "\n")
