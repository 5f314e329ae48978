"""Errors of layers: `python -m eval errors`."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from eval_helpers import SETTINGS_2X, prepare, run_command, watched
from tiny import random_codebooks, tiny_pipe, tiny_unet

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    remove_avq,
    select_layers,
    set_num_refined,
)
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    capture,
    commitment_loss,
    leaf_counts,
    quantization_error,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.mini import TEST_SEEDS, render, sample_scene
from eval.codebooks import layer_errors
from eval.methods import Method, attention_method
from eval.names import EXACT, NO_ATTENTION
from eval.quality.generation import Sampling, dilation

PROJECTIONS = ("to_q.weight", "to_k.weight")
LAYERS_OF_BOTH_LEVELS = [layer.name for layer in select_layers(tiny_unet(), (0, 1))]


def relative(errors, expected) -> float:
    """Sum of squared differences over sum of squares, of lists of tensors."""
    pairs = list(zip(errors, expected, strict=True))
    return float(
        sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    )


def test_errors_by_hand(distilled):
    """Fails for timesteps that are averaged and not pooled, a teacher that is not exact, forced
    errors of the student's own input, keys without the projection's change, or P that stays."""
    pipe = tiny_pipe()
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    methods = layer_errors.elastic(prepare(pipe, str(distilled)), (0, 3, 9))
    assert [method.num_refined for method in methods] == [0, 3]
    with pytest.raises(ValueError, match="refines at most 4 parents, but --refined asks for 8, 9"):
        layer_errors.elastic(prepare(pipe, str(distilled)), (8, 9))
    rows = layer_errors.measure_errors(pipe, methods, shown, num_timesteps=2)

    batches = list(layer_errors.noised_scenes(pipe, shown, 2))
    codebooks = AVQCodebooks.from_pretrained(distilled)
    teacher = [watched(pipe, inputs) for inputs in batches]
    for row, num_refined in zip(rows, (0, 3), strict=True):
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, num_refined)
        student = [watched(pipe, inputs) for inputs in batches]
        outputs, expected = [x for x, _ in student], [x for x, _ in teacher]
        assert row["output_error"] == pytest.approx(relative(outputs, expected) ** 0.5, rel=1e-4)
        at = [relative([x], [y]) ** 0.5 for x, y in zip(outputs, expected, strict=True)]
        assert row["output_error_at"] == pytest.approx({"250": at[0], "750": at[1]}, rel=1e-4)
        assert list(row["layers"]) == LAYERS_OF_BOTH_LEVELS
        for index, layer in enumerate(select_layers(pipe.unet, (0, 1))):
            figures = row["layers"][layer.name]
            expected = [calls[layer.name][1] for _, calls in teacher]
            own = [calls[layer.name] for _, calls in student]
            value = relative([output for _, output in own], expected)
            assert figures["feature_relative_mse"] == pytest.approx(value, rel=1e-4)
            mse = torch.stack([x for _, x in own]).sub(torch.stack(expected)).square().mean()
            assert figures["feature_mse"] == pytest.approx(float(mse), rel=1e-4)
            # The first layer has no errors before it, the last one all.
            forced = figures["forced_relative_mse"]
            assert (forced == pytest.approx(value, rel=1e-4)) == (index == 0)
            changes = codebooks.projection_changes(layer.name)
            query, key = (
                (torch.stack([x for x, _ in own]) @ (weight + changes[name]).T)
                .unflatten(-1, (layer.num_heads, -1))
                .transpose(2, 3)
                for name, weight in layer.attn.state_dict().items()
                if name in PROJECTIONS
            )
            keys = key.flatten(0, 1)
            error = quantization_error(
                keys, codebooks.codebook(layer.name), codewords="stored"
            ).mean()
            assert figures["quantization_error"] == pytest.approx(float(error), rel=1e-4)
            counts = leaf_counts(keys, codebooks.codebook(layer.name))
            assert figures["active_ratio"] == pytest.approx(float(active_ratio(counts).mean()))
            side = 16 >> layer.level
            captured = capture(
                query[:, 0],  # of the first image of both timesteps
                key[:, 0],
                codebooks.codebook(layer.name),
                num_refined,
                codewords="stored",
                query_tile=16,
                query_order=query_order(side, side),
            )
            assert figures["capture"] == pytest.approx(float(captured.mean()), rel=1e-4)
        for name in ("feature_relative_mse", "forced_relative_mse", "capture"):
            layers = [figures[name] for figures in row["layers"].values()]
            assert row[name] == pytest.approx(np.mean(layers))
        remove_avq(pipe)


@torch.no_grad()
def test_noised_scenes_are_what_the_model_sees_in_training():
    """Catches latents or pixels of another scale, one noise for all steps, and others' captions."""
    pipe = tiny_pipe()
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    pixels = np.stack([render(scene, 128) for scene in shown]).transpose(0, 3, 1, 2) / 255
    pixels = torch.from_numpy(2 * pixels - 1).float()
    clean = pipe.vae.encode(pixels).latent_dist.mode() * pipe.vae.config.scaling_factor
    text_states = [pipe.encode_prompt(x.caption, "cpu", 1, False)[0] for x in shown]
    batches = list(layer_errors.noised_scenes(pipe, shown, 2))
    for index, (latents, steps, states) in enumerate(batches):
        step = (250, 750)[index]
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(index))
        share = pipe.scheduler.alphas_cumprod[step]
        torch.testing.assert_close(latents, share.sqrt() * clean + (1 - share).sqrt() * noise)
        assert steps.tolist() == [step, step]
        torch.testing.assert_close(states, torch.cat(text_states))


def test_codebook_figures_are_of_keys_after_their_norm():
    pipe, rows = tiny_pipe(), []
    codebooks = random_codebooks(pipe.unet, AVQConfig.parse("M4P2C2", key_norm=True))
    for weight in (1.0, 0.0):  # 0 makes all keys one
        for name in codebooks.layer_specs:
            torch.nn.init.constant_(codebooks.key_norm(name).weight, weight)
        method = Method("m", (0,), codebooks)
        scene = sample_scene(TEST_SEEDS[0])
        rows += layer_errors.measure_errors(pipe, [method], [scene], num_timesteps=1)
    assert rows[0]["perplexity"] > 1.01
    assert rows[1]["perplexity"] == pytest.approx(1)


def test_forced_errors_are_those_of_a_layer_alone(distilled):
    """Where AVQ replaces one layer only, forced and own input are one, in every layer."""
    pipe = tiny_pipe()
    shown = [sample_scene(TEST_SEEDS[0])]
    (method,) = prepare(pipe, f"{distilled}@P3")
    (row,) = layer_errors.measure_errors(pipe, [method], shown, num_timesteps=1)
    (inputs,) = layer_errors.noised_scenes(pipe, shown, 1)
    _, teacher = watched(pipe, inputs)
    for name in LAYERS_OF_BOTH_LEVELS[1::4]:
        with attention_method(pipe, method):
            set_num_refined(pipe, "exact")
            set_num_refined(pipe, 3, layer=name)
            _, alone = watched(pipe, inputs)
        expected = relative([alone[name][1]], [teacher[name][1]])
        forced = row["layers"][name]["forced_relative_mse"]
        assert forced == pytest.approx(expected, rel=1e-3)


def test_errors_are_those_of_layers_that_are_not_exact():
    """Fails where layers that stay exact get figures, or where a row does not name them."""
    pipe = tiny_pipe()
    names = [layer.name for layer in select_layers(pipe.unet, (0, 1))]
    config = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0, 1), exact=("up_blocks",))
    method = Method("x", (0, 1), random_codebooks(pipe.unet, config))
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    (row,) = layer_errors.measure_errors(pipe, [method], shown, num_timesteps=1)
    assert list(row["layers"]) == [name for name in names if not name.startswith("up_blocks.")]
    assert row["config"] == "M4P2C2, up_blocks exact"


def test_errors_of_own_codewords_by_hand():
    """Fails for figures of stored codewords, keys of all steps or images together, another order,
    or layers that stay exact; elastic numbers and other fields apply to own codewords too."""
    pipe = tiny_pipe()
    config = AVQConfig.parse("M6P2C2", query_tile=16, exact=("up_blocks",), num_updates=1)
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    own = Method("x", (0,), own=replace(config, query_order="raster"))
    _, three = layer_errors.elastic([own.with_fields(query_order="gilbert")], (1, 3))
    (row,) = layer_errors.measure_errors(pipe, [three], shown, num_timesteps=2)
    assert (row["config"], row["is_flat"]) == ("M6P3C2/own1, up_blocks exact", False)
    (layer, *_), names = zip(*[(x, x.name) for x in select_layers(pipe.unet, (0,))], strict=True)
    assert list(row["layers"]) == [name for name in names if not name.startswith("up_blocks.")]

    batches = list(layer_errors.noised_scenes(pipe, shown, 2))
    apply_avq(pipe, replace(config, num_refined=3), route="always")
    options = {"num_parents": 6, "num_children": 2, "num_updates": 1, "query_tile": 16}
    options["query_order"] = query_order(16, 16)
    found = {"capture": [], "quantization_error": [], "active_ratio": [], "commitment_loss": []}
    for inputs in batches:
        _, calls = watched(pipe, inputs)
        query, key = (
            project(calls[layer.name][0]).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
            for project in (layer.attn.to_q, layer.attn.to_k)
        )
        found["capture"].append(capture(query[:1], key[:1], None, 3, **options).mean())
        found["quantization_error"].append(quantization_error(key, None, **options).mean())
        found["commitment_loss"].append(commitment_loss(key, None, **options).mean())
        for image in key.split(1):
            ratio = active_ratio(leaf_counts(image, None, **options))
            found["active_ratio"].append(ratio.mean())
    for name, values in found.items():
        expected = float(torch.stack(values).mean())
        assert row["layers"][layer.name][name] == pytest.approx(expected, rel=1e-4)


def test_errors_of_methods_without_codebooks(linfusion):
    """Exact has none, the controls have; all figures of codebooks are missing."""
    pipe = tiny_pipe()
    names = [EXACT, NO_ATTENTION, "M4", str(linfusion)]
    methods = layer_errors.elastic(prepare(pipe, *names), (0, 1))
    assert [method.name for method in methods] == names
    shown = [sample_scene(TEST_SEEDS[0])]
    exact, control, flat_vq, linear = layer_errors.measure_errors(
        pipe, methods, shown, num_timesteps=1
    )
    for name in ("output_error", "feature_mse", "feature_relative_mse", "forced_relative_mse"):
        assert exact[name] == 0 < flat_vq[name] < control[name]
        assert linear[name] > 0
    assert exact["quantization_error"] is control["capture"] is linear["active_ratio"] is None
    assert linear["layers"].keys() == {x.name for x in select_layers(pipe.unet, (1,))}
    table = layer_errors.errors_table([exact, control, flat_vq, linear]).splitlines()
    assert table[2] == "| exact | - | 0 | 0 | 0 | 0 | - | - | - |"
    assert table[5].startswith(f"| {linfusion} (LinFusion) | - | ")


def test_error_panels_have_a_line_for_each_codebook():
    """Fails for a flat codebook that is joined to a two-level one, or points out of order."""

    def row(method, config, effective, origin):
        figures = dict.fromkeys([*layer_errors.PLOTTED, "capture", "num_refined"], 1 / effective)
        facts = {"method": method, "config": config, "origin": origin}
        facts["is_flat"] = config in ("M9", "M4")
        return {**facts, "effective_codewords": effective, **figures}

    rows = [
        row("M8P4C2", "M8P4C2", 16, "calibrated"),
        row("M8P4C2", "M8P0C2", 8, "calibrated"),
        row("run", "M8P4C2", 16, "distilled"),
        row("M9", "M9", 9, "calibrated"),
        row("M4", "M4", 4, "calibrated"),
        {"method": EXACT, "effective_codewords": None},
    ]
    panel = layer_errors.error_panels(rows)[0][0]
    lines = {line.label: (line.x, line.y) for line in panel.lines}
    assert lines == {
        "M8P4C2, calibrated": ([8, 16], [1 / 8, 1 / 16]),
        "run, distilled": ([16], [1 / 16]),
        "flat VQ, calibrated": ([4, 9], [1 / 4, 1 / 9]),
    }


def test_errors_at_twice_the_size(model, tmp_path, monkeypatch, distilled):
    """Against a pass by hand; catches images of the usual size, and convolutions as they were."""
    pipe = tiny_pipe()
    places = ["--methods", distilled, "--model", model, "--output", tmp_path]
    options = ["--images", 2, "--timesteps", 1, "--refined", 2, "--size", 256, "--scalecrafter"]
    run_command(monkeypatch, "errors", *places, *options)
    document = json.loads((tmp_path / "errors_levels0_256_scalecrafter.json").read_text())
    assert (document["size"], document["scalecrafter"]) == (256, SETTINGS_2X)
    (row,) = document["rows"]

    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    ((latents, step, text_states),) = layer_errors.noised_scenes(pipe, shown, 1, 256)
    assert latents.shape[-2:] == (32, 32)
    (method,) = prepare(pipe, f"{distilled}@P2")
    found = []
    for dilates in (True, False):
        with dilation(pipe, Sampling(size=256, is_dilated=dilates)), torch.no_grad():
            expected = pipe.unet(latents, step, text_states).sample
            with attention_method(pipe, method):
                output = pipe.unet(latents, step, text_states).sample
        found.append(float((output - expected).norm() / expected.norm()))
    assert row["output_error"] == pytest.approx(found[0], rel=1e-4)
    assert row["output_error"] != pytest.approx(found[1], rel=1e-3)
