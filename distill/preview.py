"""Sample sheets: the teacher's images next to the student's."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from tqdm import tqdm

from avq_diffusers import apply_avq, remove_avq
from avq_diffusers.files import atomic_write
from avq_diffusers.images import image_sheet
from distill.checkpointing.export import make_codebooks
from distill.config import DistillConfig
from distill.objective import Objective


@torch.no_grad()
def save_sheet(
    path: Path, objective: Objective, config: DistillConfig, pipe: StableDiffusionPipeline
) -> None:
    """Generate the config's prompts with teacher and student, and save the sheet as a PNG.

    The student is what the run would export now, with the options of `config.avq`.
    """
    half = pipe.unet.dtype != torch.float32  # VAE and text encoder are float32
    # A compiled teacher would recompile for every shape and processor.
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(pipe.device.type, pipe.unet.dtype, enabled=half),
        tqdm(desc="sample images", total=2 * len(config.samples.prompts), unit="image") as bar,
    ):
        teacher = generate(pipe, config, bar)
        with student_in(pipe, objective, config):
            student = generate(pipe, config, bar)
    name = str(config.avq) if config.attention == "avq" else config.attention
    sheet = image_sheet(
        list(zip(teacher, student, strict=True)),
        ["teacher", name],
        row_titles=config.samples.prompts,
    )
    with atomic_write(path) as temporary:
        sheet.save(temporary)


def generate(pipe: StableDiffusionPipeline, config: DistillConfig, bar: tqdm) -> list[Image.Image]:
    """Generate one image per prompt, each with its own seed."""
    samples, images = config.samples, []
    for index, prompt in enumerate(samples.prompts):
        images += pipe(
            prompt,
            height=config.image_size,
            width=config.image_size,
            num_inference_steps=samples.num_inference_steps,
            guidance_scale=samples.guidance_scale,
            generator=torch.Generator().manual_seed(config.seed + index),
        ).images
        bar.update()
    return images


@contextlib.contextmanager
def student_in(
    pipe: StableDiffusionPipeline, objective: Objective, config: DistillConfig
) -> Iterator[None]:
    """Make the pipeline generate with the student while the block runs."""
    teacher = pipe.unet
    if config.attention == "avq":
        apply_avq(pipe, make_codebooks(objective, config).to(pipe.device), route="always")
    else:
        pipe.unet = objective.student
    try:
        yield
    finally:
        pipe.unet = remove_avq(teacher)
