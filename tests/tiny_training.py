"""Distillation at tiny size: settings of the command, batches and objectives."""

from pathlib import Path

import torch
from tiny import CONFIG, two_level_unet

from distill.config import ObjectiveConfig
from distill.objective import Objective
from distill.stored import start_codebooks

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
RUN_CONFIG = CONFIGS / "mini_m64p16c8.yaml"
# Images of 64 x 64 have 64 tokens at level 0 and 16 at level 1.
TINY_RUN = {
    "image_size": 64,
    "avq.num_parents": 4,
    "avq.num_children": 2,
    "avq.num_refined": 2,
    "avq.query_tile": 16,
    "avq.levels": "[0,1]",
    "data.num_samples": 6,
    "data.workers": 0,
    "data.cache": "null",
    "objective.commitment_weight": 1e-3,
    "codebooks.start_images": 4,
    "codebooks.decay_warmup_steps": 2,
    "codebooks.dead_threshold": 20,
    "codebooks.dead_every": 2,
    "steps": 4,
    "batch_size": 4,
    "micro_batch_size": 2,
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "warmup_steps": 1,
    "precision": "fp32",
    "compile": "false",
    "log_every": 1,
    "checkpoint_every": 2,
    "samples.every": "null",
    "samples.prompts": "[a red fox]",
    "samples.num_inference_steps": 1,
    "tracker": "null",
}


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "noisy_latents": torch.randn(4, 4, 8, 8, generator=generator),
        "timesteps": torch.randint(1000, (4,), generator=generator),
        "text_states": torch.randn(4, 5, 32, generator=generator),
        "target": torch.randn(4, 4, 8, 8, generator=generator),
    }


def new_objective(
    teacher,
    config,
    *,
    attention="avq",
    teacher_dtype=None,
    alphas_cumprod=None,
    empty_text_states=None,
    **settings,
):
    """An objective with the paper's settings but for these."""
    weights = {"noise": 1.0, "output": 0.5, "guided": 0.0, "feature": 0.5, "commitment": 0.25}
    paper = {f"{name}_weight": weight for name, weight in weights.items()}
    chosen = ObjectiveConfig(**{**paper, **settings})
    return Objective(
        teacher,
        config,
        chosen,
        attention=attention,
        teacher_dtype=teacher_dtype,
        alphas_cumprod=alphas_cumprod,
        empty_text_states=empty_text_states,
    )


def make_objective(config=CONFIG, teacher=None, **arguments):
    """An objective whose codebooks have started."""
    objective = new_objective(two_level_unet() if teacher is None else teacher, config, **arguments)
    start(objective, [make_batch(seed=7)])
    return objective


def start(objective, batches, *, keys_per_layer=32768, seed=0):
    """Start the codebooks from the images of these batches."""
    start_codebooks(
        objective.stored,
        objective.teacher_keys(batches),
        num_images=sum(len(batch["timesteps"]) for batch in batches),
        images_per_step=4,
        keys_per_layer=keys_per_layer,
        seed=seed,
    )


def update(objective, decay):
    for quantizer in objective.quantizers.values():
        quantizer.update(decay)


def reassign_dead(objective, threshold, seed=0):
    for quantizer in objective.quantizers.values():
        quantizer.reassign_dead(threshold=threshold, seed=seed)


def perturb(objective):
    """Move the student away from the teacher, so that no loss is zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return objective


def unet_output(unet, batch):
    inputs = (batch["noisy_latents"], batch["timesteps"], batch["text_states"])
    with torch.no_grad():
        return unet(*inputs, return_dict=False)[0]
