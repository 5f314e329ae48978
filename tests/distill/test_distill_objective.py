import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler
from peft import LoraConfig
from tiny import CONFIG, small_unet, three_level_unet, two_level_unet
from tiny_training import (
    make_batch,
    make_objective,
    new_objective,
    perturb,
    reassign_dead,
    start,
    unet_output,
    update,
)
from torch import nn

from avq_diffusers import AVQConfig, AVQProcessor, select_layers
from avq_diffusers.attention.diagnostics import capture, commitment_loss
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.assignment import assign
from avq_diffusers.codebook.codebook import Codebook, constraint_error
from avq_diffusers.codebook.ema import batch_statistics, derive_codebook, ema_update
from distill.checkpointing.export import make_codebooks
from distill.objective import SAMPLING_STEPS, timestep_weights
from distill.quantizer import KEPT_KEYS, Quantizer

STORED = partial(AVQConfig, codewords="stored", levels=(0,))
FLAT = STORED(num_parents=4, num_children=0, num_refined=0, query_tile=16)
ALPHAS_CUMPROD = torch.linspace(1.0, 0.05, 1000) ** 2
EMPTY = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(11))
OWN = replace(CONFIG, codewords="means")
PROJECTIONS = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "to_out.0.bias")


def learnable_batch(objective):
    """A batch whose target the teacher predicts well, as a trained one does."""
    batch = make_batch()
    return {**batch, "target": unet_output(objective.teacher, batch)}


def gradients(objective):
    return {name: p.grad.clone() for name, p in objective.named_parameters()}


def statistics(objective):
    return {name: found.statistics for name, found in objective.quantizers.items()}


def assert_close(got, expected, tolerance=1e-4):
    """Relative to the largest entry of each tensor."""
    assert got.keys() == expected.keys()
    for name in expected:
        error = (got[name] - expected[name]).abs().max()
        assert error <= tolerance * expected[name].abs().max() + 1e-12, name


def watch(modules):
    seen = []
    for module in modules:
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    return seen


def outputs_and_features(objective, batch):
    """Of teacher and student: a pair of outputs, and a pair of attention outputs for each layer."""
    unets = (objective.teacher, objective.student)
    features = [
        watch(unet.get_submodule(name).to_out[1] for name in objective.names) for unet in unets
    ]
    outputs = [unet_output(unet, batch) for unet in unets]
    return outputs, list(zip(*features, strict=True))


def heads_of(projected):
    return projected.unflatten(-1, (2, -1)).transpose(1, 2)


def export(objective, config):
    """What a run exports."""
    codebooks = None if config.codewords == "means" else "some"
    return make_codebooks(
        objective, SimpleNamespace(avq=config, codebooks=codebooks, base_model_name="tiny")
    )


# Losses


@pytest.mark.parametrize(
    ("scheme", "guided"),
    [("none", False), ("inverse_alpha", True)],
)
def test_losses_by_hand(scheme, guided):
    """Catches a loss on the wrong pair, features before to_out or of other layers, wrong means;
    weights that are not normalized, of alpha squared or of another image's timestep, and weights
    of other losses or in the state; and a guided prediction of swapped or unscaled passes."""
    names = {"noise": 0.9, "output": 0.3, "feature": 0.7, "commitment": 0.11}
    settings = {f"{name}_weight": weight for name, weight in names.items()}
    plain = perturb(make_objective(**settings))
    chosen = {"weighting_scheme": scheme, "alphas_cumprod": ALPHAS_CUMPROD}
    if guided:
        names["guided"] = 0.2
        chosen |= {"guided_weight": 0.2, "guidance_scale": 4.0, "empty_text_states": EMPTY}
    objective = perturb(make_objective(**settings, **chosen))
    batch = make_batch() | {"timesteps": torch.tensor([999, 40, 700, 300])}
    weights = torch.ones(4).double()
    if scheme == "inverse_alpha":
        weights = 1 / ALPHAS_CUMPROD.double().sqrt()
        weights = weights[batch["timesteps"]] / weights.mean()
        assert 0.3 < weights.min() < 1 < 3 < weights.max()

    def distance(a, b, weights=weights):
        return (a.double() - b.double()).square().flatten(1).mean(dim=1) @ weights / 4

    keys = watch(attn.to_k for attn in plain.layers)
    (teacher, student), features = outputs_and_features(plain, batch)
    expected = {
        "noise": distance(student, batch["target"], torch.ones(4).double()),
        "output": distance(student, teacher),
    }
    if guided:
        empty = batch | {"text_states": EMPTY.expand(4, -1, -1)}
        (teacher_empty, student_empty), more = outputs_and_features(plain, empty)
        features += more
        by_scale = (4 * student - 3 * student_empty, 4 * teacher - 3 * teacher_empty)
        expected["guided"] = distance(*by_scale)
        assert expected["guided"] > 1.5 * expected["output"]
    expected["feature"] = sum(distance(*pair) for pair in features) / len(features)
    # The UNet is called down, middle, up, so level 0 and 1 of both come in module order here.
    commitments = []
    for index, key in enumerate(keys):
        key = heads_of(key)
        codebook = list(plain.quantizers.values())[index % 4].codebook()
        parent, child = assign(key, codebook)
        nearest = codebook.parents[torch.arange(2)[:, None], parent]
        children = codebook.children[torch.arange(2)[:, None], parent, child.clamp(min=0)]
        nearest = torch.where((child < 0)[..., None], nearest, children)
        commitments.append((key - nearest).square().mean())
    assert len(features) == len(commitments) == (8 if guided else 4)
    expected["commitment"] = sum(commitments) / len(commitments)
    expected["loss"] = sum(weight * expected[name] for name, weight in names.items())
    assert all(value > 1e-5 for value in expected.values())
    losses = objective(**batch)
    assert_close(losses, expected)
    assert {value.dtype for value in losses.values()} == {torch.float32}
    for kept in (nn.Module.state_dict, nn.Module.named_parameters, nn.Module.named_buffers):
        assert dict(kept(objective)).keys() == dict(kept(plain)).keys()


def test_sampling_weights_are_those_of_ddim():
    """Catches the step to another timestep, noise of the wrong scale, and a last step that does not
    reach the image."""
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = DDIMScheduler(**settings, timestep_spacing="trailing", clip_sample=False)
    scheduler.set_timesteps(SAMPLING_STEPS)
    signal = scheduler.alphas_cumprod.double()
    weights = timestep_weights("sampling", signal)
    torch.testing.assert_close(weights.mean(), torch.tensor(1.0).double())

    latents = torch.ones(1).double()
    ratios = []
    for step, t in enumerate(scheduler.timesteps):
        one, other = (
            scheduler.step(noise * latents, t, latents).prev_sample for noise in (0.0, 1.0)
        )
        after = scheduler.timesteps[step + 1] if step + 1 < SAMPLING_STEPS else None
        scale = 1.0 if after is None else signal[after].sqrt()
        kept = signal[t]  # 1 / (1 + sigma^2)
        ratios.append(weights[t] / (((one - other) / scale) ** 2 * kept))
    torch.testing.assert_close(
        torch.cat(ratios), ratios[0].expand(SAMPLING_STEPS), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("attention", ["avq", "linfusion"])
def test_half_precision_teacher(attention):
    """Catches trained weights that lost digits, a second copy of the frozen ones, and gradients
    that are worse than those of autocast around float32 weights."""
    # With much commitment, whose gradients rounding disturbs least.
    arguments = {"attention": attention, "commitment_weight": 2.0}
    exact = perturb(make_objective(**arguments))
    half = new_objective(two_level_unet(), CONFIG, teacher_dtype=torch.bfloat16, **arguments)
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert {p.dtype for p in half.teacher.parameters()} == {torch.bfloat16}
    trained = {id(parameter) for parameter in half.parameters()}
    frozen = {p.data_ptr() for p in half.student.parameters() if id(p) not in trained}
    assert frozen < {p.data_ptr() for p in half.teacher.parameters()}

    half.load_state_dict(exact.state_dict())
    runs = {"exact": (exact, False), "autocast": (exact, True), "half": (half, False)}
    losses, gradient = {}, {}
    for run, (objective, enabled) in runs.items():
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses[run] = objective(**make_batch())
        objective.zero_grad()
        losses[run]["loss"].backward()
        gradient[run] = torch.cat([p.grad.flatten() for p in objective.parameters()])
    for name, value in losses["half"].items():
        assert value.dtype == losses["autocast"][name].dtype == torch.float32
        torch.testing.assert_close(value, losses["exact"][name], rtol=0.1, atol=1e-3)
    for key_sums, counts in statistics(half).values():
        assert key_sums.dtype == counts.dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert_close(half(**make_batch()), losses["half"], tolerance=0)
    error = {run: (found - gradient["exact"]).norm() for run, found in gradient.items()}
    assert 0 < error["half"] < 1.3 * error["autocast"] < 0.6 * gradient["exact"].norm()


# Codebooks


def test_statistics_are_those_of_the_keys():
    """Catches statistics of other keys (before the norm, of the teacher) or of one batch only."""
    config = STORED(num_parents=4, num_children=2, num_refined=2, levels=(0,), key_norm=True)
    objective = perturb(make_objective(config))
    seen = watch(attn.to_k for attn in objective.layers)
    batches = [make_batch(seed=1), make_batch(seed=2)]
    for batch in batches:
        objective(**batch)
    for index, quantizer in enumerate(objective.quantizers.values()):
        expected = []
        for keys in (seen[index], seen[index + 3]):
            keys = heads_of(keys)
            norm = objective.stored[objective.names[index]].key_norm
            keys = F.layer_norm(keys, (8,), norm.weight, norm.bias)
            # Batch by batch, because products of other shapes round otherwise.
            expected.append(batch_statistics(keys, quantizer.codebook()))
        key_sums, counts = map(sum, zip(*expected, strict=True))
        assert torch.equal(quantizer.statistics[1], counts)
        torch.testing.assert_close(quantizer.statistics[0], key_sums, rtol=1e-4, atol=1e-4)
        assert counts[:, :, 0].sum() == 2 * 8 * 64


def test_update_is_one_ema_step():
    """Catches a wrong decay, statistics that stay, and a codebook that does not follow."""
    objective = make_objective()
    objective(**make_batch())
    quantizer = objective.quantizers[objective.names[-1]]
    before = quantizer.ema_key_sums, quantizer.ema_counts
    key_sums, counts = map(ema_update, before, quantizer.statistics, (0.7, 0.7))
    expected = derive_codebook(key_sums, counts, quantizer.codebook())
    update(objective, 0.7)
    torch.testing.assert_close(quantizer.ema_key_sums, key_sums)
    torch.testing.assert_close(quantizer.ema_counts, counts)
    torch.testing.assert_close(quantizer.codebook().parents, expected.parents)
    torch.testing.assert_close(quantizer.codebook().children, expected.children)
    assert quantizer.statistics is None


def test_batches_share_the_sample():
    """Catches a sample that grows with the batches, falls short of `keys_per_layer`, takes the
    first keys of a batch, or always the same: as many parents as keys are the keys."""
    batches = [make_batch(seed=seed) for seed in range(3)]
    objective = new_objective(two_level_unet(), replace(FLAT, num_parents=12))
    found = watch(attn.to_k for attn in map(objective.teacher.get_submodule, objective.names))
    start(objective, batches, keys_per_layer=11)
    *_, quantizer = objective.quantizers.values()
    first = quantizer.parent_codewords.clone()
    for index, quantizer in enumerate(objective.quantizers.values()):
        keys = torch.stack(found[index :: len(objective.names)]).flatten(1, 2)
        keys = keys.unflatten(-1, (2, -1)).movedim(2, 0).flatten(1, 2)
        distances = torch.cdist(
            quantizer.parent_codewords, keys, compute_mode="donot_use_mm_for_euclid_dist"
        )
        nearest = distances.argmin(dim=-1)
        assert distances.amin(dim=-1).max() < 1e-3 * quantizer.parent_codewords.abs().max()
        for chosen in nearest:
            assert (chosen // 256).bincount().tolist() == [4, 4, 4]
            assert len((chosen % 256 // 64).unique()) > 1
    seeded = []
    for seed in (0, 1):
        start(objective, batches, keys_per_layer=11, seed=seed)
        seeded.append(quantizer.parent_codewords.clone())
    assert torch.equal(seeded[0], first)
    assert not torch.equal(*seeded)


def test_codebooks_start_from_keys_after_the_norm():
    """Catches codebooks of raw keys for a layer that normalizes them."""
    norm = make_objective(STORED(num_parents=8, num_children=2, num_refined=2, key_norm=True))
    for processor in norm.quantizers.values():
        assert processor.parent_codewords.norm(dim=-1).max() <= math.sqrt(8) * (1 + 1e-4)
    raw = make_objective(STORED(num_parents=8, num_children=2, num_refined=2))
    largest = [p.parent_codewords.norm(dim=-1).max() for p in raw.quantizers.values()]
    assert max(largest) > math.sqrt(8)


@pytest.mark.parametrize("student", [False, True])
def test_what_is_compiled(student):
    """Catches a checkpointed student in a graph, and gradients in a graph's memory."""
    objective = make_objective()
    objective.compile_unets(student=student)
    unets = objective.teacher, objective.student
    assert [unet._compiled_call_impl is not None for unet in unets] == [True, student]
    assert all(x.requires_grad and not x.grad.any() for x in objective.parameters())


@pytest.mark.long
@pytest.mark.parametrize("codewords", ["stored", "means"])
def test_compiled_unets(codewords):
    """Catches features, keys or a grid of an earlier call."""
    config = AVQConfig.parse("M4P2C2", query_tile=16, codewords=codewords)
    plain, compiled = (perturb(new_objective(small_unet(), config)) for _ in range(2))
    for objective in (plain, compiled):
        start(objective, [make_batch(seed=7)])
    graphs = []
    compiled.teacher.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    compiled.student.compile(backend="aot_eager")
    for seed in range(2):
        losses = [objective(**make_batch(seed=seed)) for objective in (plain, compiled)]
        assert_close(losses[1], losses[0])
    for found in losses:
        found["loss"].backward()
    assert graphs
    assert_close(gradients(compiled), gradients(plain))
    for name, figures in plain.diagnostics().items():
        assert_close(compiled.diagnostics()[name], figures)


def test_eval_mode_adds_nothing():
    objective = new_objective(two_level_unet(), CONFIG)
    assert objective(**make_batch())["loss"].isnan()  # codebooks must be started
    objective = make_objective().eval()
    objective(**make_batch())
    assert set(statistics(objective).values()) == {None}
    objective.train()(**make_batch())
    assert not objective.teacher.training
    assert None not in statistics(objective).values()


def test_gradient_checkpointing_changes_nothing():
    """Catches statistics that are added again, and other noise, when the layers run again."""
    plain, checkpointed = (perturb(make_objective(diveq=True)) for _ in range(2))
    checkpointed.student.enable_gradient_checkpointing()
    runs = watch(attn.to_k for attn in checkpointed.layers)
    for objective in (plain, checkpointed):
        torch.manual_seed(0)
        objective(**make_batch())["loss"].backward()
    assert len(runs) == 8  # the layers did run twice
    assert_close(gradients(checkpointed), gradients(plain))
    for name, (key_sums, counts) in statistics(plain).items():
        assert torch.equal(statistics(checkpointed)[name][0], key_sums)
        assert torch.equal(statistics(checkpointed)[name][1], counts)


def test_dead_codewords_move_to_keys():
    """Catches a reassignment that is not written back, or that moves what is alive."""
    objective = make_objective()
    objective(**make_batch())
    update(objective, 0.9)
    name = objective.names[0]
    processor = objective.quantizers[name]
    processor.parent_codewords[0, 2] += 100
    processor.child_codewords[0, 2] += 100
    processor.ema_counts[0, 2] = 0
    processor.ema_key_sums[0, 2] = 0
    before = processor.parent_codewords.clone()
    reassign_dead(objective, threshold=1e-3, seed=0)
    moved = (processor.parent_codewords - before).norm(dim=-1) > 1e-4
    assert moved.nonzero().tolist() == [[0, 2]]
    assert processor.ema_counts[0, 2, 0] == pytest.approx(1e-3)
    distance = (processor.kept_keys[0] - processor.parent_codewords[0, 2]).norm(dim=-1)
    assert distance.min() < 1e-4
    found, state = [], {key: value.clone() for key, value in processor.state_dict().items()}
    for seed in (1, 1, 2):
        processor.load_state_dict(state)
        reassign_dead(objective, threshold=1e9, seed=seed)
        found.append(processor.parent_codewords.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_capture():
    """Catches capture of other queries or keys, of all parents, or of tiles in raster order."""
    objective = perturb(make_objective())
    seen = {name: watch(getattr(x, name) for x in objective.layers) for name in ("to_q", "to_k")}
    objective(**make_batch())
    figures = objective.diagnostics()
    for index, (name, quantizer) in enumerate(objective.quantizers.items()):
        query, key = (heads_of(seen[projection][index][:1]) for projection in ("to_q", "to_k"))
        side = math.isqrt(query.shape[2])
        options = {"codewords": "stored", "query_tile": 16}
        options["query_order"] = query_order(side, side, "gilbert", query.device)
        expected = capture(query, key, quantizer.codebook(), 2, **options)
        torch.testing.assert_close(figures[name]["capture"], expected)
    flat = make_objective(FLAT)
    flat(**make_batch())
    assert all("capture" not in figures for figures in flat.diagnostics().values())


def test_diagnostics():
    """Catches figures of an old codebook, and parents that are counted twice."""
    objective = make_objective(STORED(num_parents=64, num_children=2, num_refined=64))
    objective(**make_batch(seed=7))
    figures = objective.diagnostics()
    assert list(figures) == objective.names
    name = objective.names[0]
    processor = objective.quantizers[name]
    fine = figures[name]["quantization_error"]
    assert fine.shape == figures[name]["active_ratio"].shape == (2,)
    assert (fine < 0.2).all()
    processor.parent_codewords.zero_()
    processor.child_codewords.zero_()
    assert (objective.diagnostics()[name]["quantization_error"] > 3 * fine).all()
    # Half of the parents hold 1000 keys each, of which 2, just over 1 % of an even share, are with
    # one of the children and the rest with the other.
    processor.ema_counts.zero_()
    processor.ema_counts[:, :32] = torch.tensor([1000.0, 998, 2])
    assert objective.diagnostics()[name]["active_ratio"].tolist() == [0.5, 0.5]
    assert processor.kept_keys.shape == (2, 4 * 64, 8)


def test_kept_keys_are_bounded():
    """Catches a sample of one column of the grid, or of one image, and a clone with permuted
    strides, which NCCL refuses to broadcast and gloo does not."""
    processor = next(iter(make_objective().quantizers.values()))
    # As projections give them: heads beside head dims in memory.
    key = torch.zeros(4, 4096, 2, 8).transpose(1, 2)
    key[..., 0] = torch.arange(4096) % 64
    key[..., 1] = torch.arange(4)[:, None, None]
    processor.observe(processor(key))
    kept = processor.kept_keys
    assert 3000 < kept.shape[1] <= KEPT_KEYS
    assert (len(kept[0, :, 0].unique()), len(kept[0, :, 1].unique())) == (64, 4)
    processor.observe(processor(key[:1, :, :20]))
    for shared in (kept, processor.kept_keys, *processor.statistics):
        assert shared.is_contiguous()


# Gradients


def test_gradients_are_those_of_the_definition():
    """Catches keys, levels of a threshold or an order that the backward pass does not share, and
    gradients that stop, also in the layers around attention: along the gradient, the loss rises by
    its squared norm. Stored codewords: `test_vision_attention.py`."""
    trained, defined = (perturb(make_objective(OWN.changed(threshold=0.3))) for _ in range(2))
    for layer in select_layers(defined.student, (0, 1)):
        layer.avq_state.backend = "reference"  # which autograd differentiates
    losses = [objective(**make_batch()) for objective in (trained, defined)]
    assert_close(losses[0], losses[1])
    for found in losses:
        found["loss"].backward()
    expected = gradients(defined)
    assert_close(gradients(trained), expected, tolerance=1e-3)
    assert all(gradient.any() for gradient in expected.values())
    changed = []
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in defined.named_parameters():
                parameter.add_(expected[name], alpha=sign * 1e-2)
            changed.append(defined(**make_batch())["loss"].item())
    squared_norm = sum(gradient.square().sum().item() for gradient in expected.values())
    slope = (changed[0] - changed[1]) / 2e-2
    assert slope == pytest.approx(squared_norm, rel=2e-3)


# DiVeQ


def test_diveq_by_hand():
    """Catches gradients along the wrong direction, a parent that its children leave behind, and a
    common offset, which costs digits in half precision."""
    quantizer = Quantizer(1, 2, AVQConfig.parse("M2P2C2"), diveq=True).eval()
    parents = torch.tensor([[[0.0, 0], [10, 0]]])
    children = parents[:, :, None] + torch.tensor([[0.0, 1], [0, -1]])
    quantizer.start(Codebook(parents, children), torch.ones(1, 2, 3))
    key = torch.tensor([[[[0.0, 1.5], [10.3, 0.4]]]], requires_grad=True)  # child 0, parent 1
    leaves = quantizer(key)
    quantized = quantizer.quantized_key(leaves)
    codewords, centre = torch.stack([children[0, 0, 0], parents[0, 1]]), parents[0, 1]
    torch.testing.assert_close(quantized[0, 0], codewords - centre)
    quantized.backward(torch.tensor([[[[2.0, 3], [1, 1]]]]))
    # Error directions are (0, -1) and (-0.6, -0.8): the second codeword gets 1.4 of (0.6, 0.8).
    along = torch.tensor([1.4 * 0.6, 1.4 * 0.8])
    torch.testing.assert_close(key.grad[0, 0], torch.stack([torch.tensor([2.0, 0]), 1 - along]))
    expected = torch.stack([torch.tensor([0.0, 3]), along])
    torch.testing.assert_close(quantizer.parent_codewords.grad[0], expected)
    expected = torch.tensor([[[0, 1.5], [0, -1.5]], [[0, 0], [0, 0]]])
    torch.testing.assert_close(quantizer.child_codewords.grad[0], expected)

    torch.manual_seed(0)
    noisy = quantizer.train().quantized_key(leaves)
    distance = (leaves.codeword - key).norm(dim=-1)
    moved = noisy - quantized
    assert 0 < moved.norm(dim=-1).max() < 0.5 * distance.max()
    radius = (noisy - key - (quantized - leaves.codeword)).norm(dim=-1)
    torch.testing.assert_close(radius, distance)


def test_diveq_draws_noise_of_its_variance():
    """Catches a variance for a standard deviation: at unit error, noise is the angle's sine."""
    quantizer = Quantizer(1, 2, AVQConfig.parse("M1"), diveq=True)
    quantizer.start(Codebook(torch.zeros(1, 1, 2), torch.zeros(1, 1, 0, 2)), torch.ones(1, 1, 1))
    key = torch.tensor([0.0, 1.0]).expand(1, 1, 4000, 2)
    torch.manual_seed(0)
    sine = (quantizer.quantized_key(quantizer(key)) - key)[..., 0]
    assert sine.std().item() == pytest.approx(1e-3**0.5, rel=0.05)
    assert abs(sine.mean()) < 5 * (1e-3 / 4000) ** 0.5


def test_diveq_trains_the_codewords():
    """Catches codewords without gradient, EMA that moves them, and a constraint that is lost."""
    objective = make_objective(diveq=True, commitment_weight=0.0)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
    batch, losses = learnable_batch(objective), []
    for _ in range(6):
        torch.manual_seed(0)
        losses.append(objective(**batch))
        losses[-1]["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        functions = {name: found.codebook() for name, found in objective.quantizers.items()}
        update(objective, 0.9)
        for name, quantizer in objective.quantizers.items():
            torch.testing.assert_close(quantizer.child_codewords, functions[name].children)
            assert constraint_error(quantizer.codebook()).max() < 1e-4
            torch.testing.assert_close(
                quantizer.ema_key_sums[:, :, 0],
                quantizer.parent_codewords * quantizer.ema_counts[:, :, :1],
            )
    assert losses[-1]["feature"] < losses[0]["feature"]
    exported, name = export(objective, CONFIG), objective.names[0]
    reassign_dead(objective, threshold=50.0, seed=0)
    codewords = objective.quantizers[name].parent_codewords
    assert not torch.equal(exported.codebook(name).parents, codewords)


def test_commitment_moves_keys_to_codewords_and_not_the_reverse():
    """Catches a commitment loss that trains the codewords, which only DiVeQ can show."""
    quantizer = Quantizer(2, 4, CONFIG, diveq=True)
    parents = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    quantizer.start(Codebook(parents, parents[:, :, None].repeat(1, 1, 2, 1)), torch.ones(2, 4, 3))
    key = torch.ones(1, 2, 3, 4, requires_grad=True)
    loss = quantizer(key).commitment()
    torch.testing.assert_close(
        loss, commitment_loss(key, quantizer.codebook(), codewords="stored").mean() / 4
    )
    loss.backward()
    assert key.grad.any()
    assert quantizer.parent_codewords.grad is None
    assert quantizer.child_codewords.grad is None


# What is trained, and what is kept


def test_changes_are_those_of_the_base_model():
    """Catches changes of a teacher in half precision, which has lost digits of the base model."""
    objective = new_objective(two_level_unet(), CONFIG, teacher_dtype=torch.bfloat16)
    assert not any(
        x.any() for layer in objective.projection_changes().values() for x in layer.values()
    )
    tuned, changes = perturb(objective).projections(), objective.projection_changes()
    for name, layer in changes.items():
        base = two_level_unet().get_submodule(name)
        assert not torch.equal(objective.teacher.get_submodule(name).to_q.weight, base.to_q.weight)
        assert len(layer) == 5
        for key, change in layer.items():
            assert change.dtype == torch.float32
            assert torch.equal(change, tuned[name][key] - base.get_parameter(key))
        assert layer["to_q.weight"].any()


def test_teacher_with_lora():
    """Catches a student that starts without the teacher's LoRA, or that shares it."""
    teacher = two_level_unet()
    plain = unet_output(teacher, make_batch())
    teacher.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    expected = unet_output(teacher, make_batch())
    assert (expected - plain).abs().max() > 0.01
    objective = new_objective(teacher, CONFIG, attention="exact")
    for unet in (objective.student, objective.teacher):
        assert (unet_output(unet, make_batch()) - expected).abs().max() < 1e-4
    assert not any("lora_" in name for name, _ in objective.named_parameters())
    assert objective.projections()[objective.names[0]].keys() == set(PROJECTIONS)


@pytest.mark.parametrize("config", [replace(CONFIG, exact=("up_blocks",)), OWN])
def test_only_the_replaced_layers_are_trained(config):
    """Catches a frozen part that moves, is copied for nothing, or a teacher that is trained."""
    teacher = three_level_unet()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    objective = make_objective(config, teacher)
    replaced = [
        x.name for x in select_layers(teacher, (0, 1)) if not x.name.startswith(config.exact)
    ]
    assert objective.names == replaced
    expected = {f"{name}.{path}" for name in replaced for path in PROJECTIONS}
    student = dict(objective.student.named_parameters())
    assert {name for name, p in student.items() if p.requires_grad} == expected

    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    for seed in range(2):
        objective(**make_batch(seed=seed))["loss"].backward()
        assert {name for name, p in student.items() if p.grad is not None} == expected
        optimizer.step()
        optimizer.zero_grad()
        update(objective, 0.9)
    state = sum(value.numel() for value in objective.state_dict().values())
    assert state < sum(p.numel() for p in teacher.parameters()) / 2  # no frozen weight
    for name, value in objective.teacher.named_parameters():
        assert value.grad is None
        assert torch.equal(value, before[name])
        if name in expected:
            assert not torch.equal(student[name], before[name])
        else:
            assert student[name].data_ptr() == value.data_ptr()


@pytest.mark.parametrize(
    "config",
    [
        STORED(num_parents=8, num_children=2, num_refined=3, key_norm=True),
        STORED(
            num_parents=8,
            num_children=2,
            num_refined=3,
            query_order="random",
            overrides={"1": {"num_parents": 4}},
        ),
        replace(OWN, query_order="random", overrides={"1": {"num_refined": 1}}),
    ],
)
def test_export_is_the_student(config):
    """Catches another order, tile, size, norm or number of refined parents than the library's
    processor, and the transposed grid."""
    config = replace(config, query_tile=16, levels=(0, 1))
    objective = perturb(make_objective(config)).eval()
    exported, unet = export(objective, config), two_level_unet()
    unet.set_attn_processor(AVQProcessor(exported))
    batch = make_batch()
    batch |= {name: torch.cat([batch[name]] * 2, -1) for name in ("noisy_latents", "target")}
    got, expected = unet_output(unet, batch), unet_output(objective.student, batch)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (unet_output(objective.teacher, batch) - expected).abs().max() > 1e-2
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.zero_()
    assert exported.projection_changes(objective.names[0])["to_q.weight"].abs().max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weighting_scheme": "inverse_alpha"}, "inverse_alpha needs a noise schedule with"),
        (
            {"weighting_scheme": "inverse_alpha", "alphas_cumprod": torch.tensor([0.9, 0.0])},
            "a noise schedule with alphas_cumprod above 0",
        ),
        ({"weighting_scheme": "sampling"}, "sampling needs a noise schedule with"),
        ({"guided_weight": 0.1}, "guided_weight needs empty_text_states"),
        ({"diveq": True, "attention": "linfusion"}, 'diveq needs attention="avq"'),
        ({"config": replace(CONFIG, overrides={"up_block.3": {}})}, r"but got 'up_block\.3'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        new_objective(two_level_unet(), **{"config": CONFIG, **arguments})


@pytest.mark.parametrize(("attention", "config"), [("avq", OWN), ("linfusion", CONFIG)])
def test_students_without_codebooks_train(attention, config):
    """Catches a quantizer that is made, saved or observed, and a phi that starts elsewhere than at
    the teacher's projections or stays there."""
    objective = new_objective(two_level_unet(), config, attention=attention)
    assert objective.state_dict().keys() == dict(objective.named_parameters()).keys()
    assert objective.stored == objective.diagnostics() == {}
    phi = [p for name, p in objective.named_parameters() if "phi_q.3" in name]
    assert len(phi) == (8 if attention == "linfusion" else 0)
    assert all((p == 0).all() for p in phi)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-3, weight_decay=0)
    batch, losses = learnable_batch(objective), []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=attention == "linfusion"):
            losses.append(objective(**batch))
        losses[-1]["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0].keys() == {"noise", "output", "feature", "loss"}
    assert losses[-1]["feature"] < losses[0]["feature"]
    assert all((p != 0).any() for p in phi)
    assert ("processor.phi_k.0.weight" in objective.projections()[objective.names[0]]) == bool(phi)
