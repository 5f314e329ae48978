"""Errors of layers: `python -m eval errors`."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from eval_helpers import SETTINGS_2X, prepare, run_command, watched
from tiny import random_codebooks, three_level_pipe

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    capture,
    leaf_counts,
    quantization_error,
)
from avq_diffusers.attention.orders import query_order
from distill.scenes import TEST_SEEDS, render, sample_scene
from eval.codebooks import layer_errors
from eval.methods.prepared import Method, attention_method
from eval.methods.registry import EXACT, NO_ATTENTION
from eval.quality.generation import Sampling, dilation

SCENES = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
NORMED = AVQConfig.parse(
    "M6P2C1", codewords="stored", query_order="random", query_tile=32, key_norm=True
)
OWN = AVQConfig.parse("M6P2C2", levels=(0,), query_tile=16, exact=("up_blocks",), num_updates=1)


def relative(found, expected) -> float:
    """Sum of squared differences over sum of squares, of lists of tensors."""
    found, expected = (torch.cat([x.flatten() for x in tensors]) for tensors in (found, expected))
    return float((found - expected).square().sum() / expected.square().sum())


def method_of(kind, pipe, distilled) -> Method:
    if kind == "changed projections":
        (method,) = prepare(pipe, f"{distilled}@P3")
    elif kind == "own":
        method = Method(kind, (0,), own=replace(OWN, num_refined=3))
    else:
        codebooks = random_codebooks(pipe.unet, NORMED)
        for name in codebooks.layer_specs:
            torch.nn.init.constant_(codebooks.key_norm(name).weight, 3.0)
        method = Method(kind, NORMED.levels, codebooks)
    return method


@torch.no_grad()
@pytest.mark.parametrize("kind", ["changed projections", "own", "key norm"])
def test_errors_by_hand(kind, distilled):
    """Fails for timesteps that are averaged and not pooled, a teacher that is not exact, keys
    without the projection's change or norm, of another image or step, another order or tile, and
    layers that stay exact."""
    pipe = three_level_pipe()
    method = method_of(kind, pipe, distilled)
    (row,) = layer_errors.measure_errors(pipe, [method], SCENES, num_timesteps=2)
    batches = list(layer_errors.noised_scenes(pipe, SCENES, 2))
    teacher = [watched(pipe, inputs) for inputs in batches]
    with attention_method(pipe, method):
        student = [watched(pipe, inputs) for inputs in batches]

    outputs = [[x for x, _ in calls] for calls in (student, teacher)]
    assert row["output_error"] == pytest.approx(relative(*outputs) ** 0.5, rel=1e-4)
    config = method.own or method.codebooks.avq_config
    layers = select_layers(pipe.unet, config.levels, config.exact)
    assert list(row["layers"]) == [layer.name for layer in layers]
    for layer in layers[:: max(1, len(layers) - 1)]:
        found = row["layers"][layer.name]
        features = [[x[layer.name][1] for _, x in calls] for calls in (student, teacher)]
        assert found["feature_relative_mse"] == pytest.approx(relative(*features), rel=1e-4)
        expected = codeword_figures(layer, method, [x[layer.name][0] for _, x in student])
        for name, values in expected.items():
            assert found[name] == pytest.approx(float(values.mean()), rel=1e-4), name
    for name in ("feature_relative_mse", "capture", "active_ratio"):
        assert row[name] == pytest.approx(np.mean([x[name] for x in row["layers"].values()]))


def codeword_figures(layer, method, hidden_states):
    """The figures (H,) of a layer's codewords, from its inputs at all timesteps."""
    config, codebook, changes = method.layer_configs[0], None, {}
    if method.codebooks is not None:
        codebook = method.codebooks.codebook(layer.name)
        changes = method.codebooks.projection_changes(layer.name) or {}
    side = 16 >> layer.level
    options = {
        "num_parents": config.num_parents,
        "num_children": config.num_children,
        "codewords": config.codewords,
        "num_updates": config.num_updates,
        "query_tile": config.query_tile,
        "query_order": query_order(side, side, config.query_order),
    }
    steps, counts = [], []
    for tokens in hidden_states:
        query, key = (
            (tokens @ (weight + changes.get(f"{name}.weight", 0)).T)
            .unflatten(-1, (layer.num_heads, -1))
            .transpose(1, 2)
            for name, weight in (
                ("to_q", layer.attn.to_q.weight),
                ("to_k", layer.attn.to_k.weight),
            )
        )
        if config.key_norm:
            key = method.codebooks.key_norm(layer.name)(key)
        counts += [leaf_counts(image, codebook, **options) for image in key.split(1)]
        first = query[:1], key[:1], codebook
        steps.append(
            {
                "quantization_error": quantization_error(key, codebook, **options),
                "capture": capture(*first, config.num_refined, **options),
            }
        )
    counts = torch.stack(counts) if codebook is None else torch.stack(counts).sum(0)[None]
    figures = {name: torch.stack([x[name] for x in steps]).mean(0) for name in steps[0]}
    return figures | {"active_ratio": active_ratio(counts).mean(dim=0)}


@torch.no_grad()
def test_noised_scenes_are_what_the_model_sees_in_training():
    """Catches latents or pixels of another scale, one noise for all steps, and others' captions."""
    pipe = three_level_pipe()
    pixels = np.stack([render(scene, 128) for scene in SCENES]).transpose(0, 3, 1, 2) / 255
    pixels = torch.from_numpy(2 * pixels - 1).float()
    clean = pipe.vae.encode(pixels).latent_dist.mode() * pipe.vae.config.scaling_factor
    text_states = [pipe.encode_prompt(x.caption, "cpu", 1, False)[0] for x in SCENES]
    batches = list(layer_errors.noised_scenes(pipe, SCENES, 2))
    for index, (latents, steps, states) in enumerate(batches):
        step = (250, 750)[index]
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(index))
        share = pipe.scheduler.alphas_cumprod[step]
        torch.testing.assert_close(latents, share.sqrt() * clean + (1 - share).sqrt() * noise)
        assert steps.tolist() == [step, step]
        torch.testing.assert_close(states, torch.cat(text_states))


def test_errors_of_methods_with_other_codewords_or_none(linfusion):
    """Exact has no error, the controls have; all figures of codebooks are missing."""
    pipe = three_level_pipe()
    methods = prepare(pipe, EXACT, NO_ATTENTION, "M4", str(linfusion))
    rows = layer_errors.measure_errors(pipe, methods, SCENES[:1], num_timesteps=1)
    exact, control, flat_vq, linear = rows
    for name in ("output_error", "feature_relative_mse"):
        assert exact[name] == 0 < flat_vq[name] < control[name]
        assert linear[name] > 0
    assert exact["quantization_error"] is control["capture"] is linear["active_ratio"] is None
    assert linear["layers"].keys() == {x.name for x in select_layers(pipe.unet, (1,))}
    table = layer_errors.errors_table(rows).splitlines()
    assert table[2] == "| exact | - | 0 | 0 | - | - | - |"
    assert table[5].startswith(f"| {linfusion} (LinFusion) | - | ")


def test_the_command_at_twice_the_size(model, tmp_path, monkeypatch, distilled, capsys):
    """Against a pass by hand; catches images of the usual size, and convolutions as they were."""
    places = ["--methods", f"{distilled}@P0,{distilled}@P2", "--model", model, "--output", tmp_path]
    options = ["--images", 2, "--timesteps", 1, "--size", 256, "--scalecrafter"]
    run_command(monkeypatch, "errors", *places, *options)
    path = tmp_path / "errors_levels0_256_scalecrafter.json"
    document = json.loads(path.read_text())
    assert (document["size"], document["scalecrafter"]) == (256, SETTINGS_2X)
    rows = document["rows"]
    assert [row["config"] for row in rows] == ["M4P0C2", "M4P2C2"]
    assert layer_errors.errors_table(rows) in capsys.readouterr().out

    pipe = three_level_pipe()
    ((latents, step, text_states),) = layer_errors.noised_scenes(pipe, SCENES, 1, 256)
    assert latents.shape[-2:] == (32, 32)
    (method,) = prepare(pipe, f"{distilled}@P2")
    with dilation(pipe, Sampling(size=256, is_dilated=True)), torch.no_grad():
        expected = pipe.unet(latents, step, text_states).sample
        with attention_method(pipe, method):
            output = pipe.unet(latents, step, text_states).sample
    error = float((output - expected).norm() / expected.norm())
    assert rows[1]["output_error"] == pytest.approx(error, rel=1e-4)
