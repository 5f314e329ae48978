"""LinFusion's attention: its formula by loops, its folder, and a UNet that it leaves as it was."""

import copy
import json
import math
import os

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from safetensors.torch import load_file, save_file
from tiny import CONFIG, LAYER, predict, random_codebooks, sdxl_unet, tiny_pipe, two_level_unet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    calibrate,
    measure_error,
    remove_avq,
    select_layers,
    summary,
)
from avq_diffusers.extras.linfusion import (
    LinFusionProcessor,
    linear_attention,
    load_linfusion,
    remove_linfusion,
    save_linfusion,
)

LEVELS = (0, 1)


def random_layers(unet, levels=LEVELS):
    """For each layer, the UNet's own projections and a zero phi, with noise on all of them."""
    generator = torch.Generator().manual_seed(5)
    layers = {}
    for layer in select_layers(unet, levels):
        state = LinFusionProcessor(layer.attn.query_dim).state_dict() | layer.attn.state_dict()
        layers[layer.name] = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in state.items()
        }
    return layers


@pytest.fixture
def unet():
    return two_level_unet()


@pytest.fixture
def pipe(unet):
    return tiny_pipe(unet)


@pytest.fixture
def layers(unet):
    return random_layers(unet)


@pytest.fixture
def folder(unet, layers, tmp_path):
    path = tmp_path / "linfusion"
    save_linfusion(unet, layers, path, base_model="tiny", training={"steps": 7})
    return path


def test_a_layer_knows_who_changed_it(unet, folder, layers):
    """Catches one that is taken for LinFusion's, or restored, when another tool sets a processor
    over LinFusion's."""

    def changed():
        found = select_layers(unet)
        avq = {layer.name for layer in found if layer.avq_state is not None}
        return avq, {row.name for row in summary(unet).rows if row.runs == "LinFusion"}

    assert changed() == (set(), set())
    load_linfusion(unet, folder)
    assert changed() == (set(), set(layers))
    other = AttnProcessor2_0()
    unet.set_attn_processor(other)
    remove_linfusion(unet)
    assert changed() == (set(), set())
    assert all(processor is other for processor in unet.attn_processors.values())
    apply_avq(unet, random_codebooks(unet))
    assert changed() == ({layer.name for layer in select_layers(unet, CONFIG.levels)}, set())
    remove_avq(unet)
    assert changed() == (set(), set())


def tokens(count=12, dtype=torch.float32):
    return torch.randn(2, count, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def heads(count, head_dim=3, scale=1.0):
    """Query, key and value of 2 images and 3 heads."""
    generator = torch.Generator().manual_seed(count)
    return [scale * torch.randn(2, 3, count, head_dim, generator=generator) for _ in range(3)]


class TestFormula:
    @pytest.mark.parametrize("count", [1, 7])
    def test_by_loops(self, count):
        """Catches a causal sum, softmax's scale, heads or images that mix, a lost epsilon."""

        def feature(x):
            return x + 1 if x > 0 else math.exp(x)

        inputs = heads(count, scale=2.0)
        query, key, value = (x.tolist() for x in inputs)
        expected = torch.zeros(inputs[0].shape, dtype=torch.float64)
        for b, h, i in torch.cartesian_prod(*map(torch.arange, (2, 3, count))).tolist():
            weights = [
                sum(
                    feature(q) * feature(k)
                    for q, k in zip(query[b][h][i], key[b][h][j], strict=True)
                )
                for j in range(count)
            ]
            for d in range(3):
                total = sum(weights[j] * value[b][h][j][d] for j in range(count))
                expected[b, h, i, d] = total / (sum(weights) + count * 1e-4)  # the authors'
        output = linear_attention(*inputs)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("dtype", "autocast"), [(torch.float16, False), (torch.bfloat16, True)]
    )
    def test_half_precision(self, dtype, autocast):
        """Catches sums over 4096 tokens in half precision, or unscaled, which overflow float16."""
        query, key, value = (x.to(dtype) for x in heads(4096, scale=16.0))
        query, value = query.abs(), value + 200  # a feature of almost 0 has no digits left
        expected = linear_attention(query.double(), key.double(), value.double())
        with torch.autocast("cpu", dtype, enabled=autocast):
            output = linear_attention(query, key, value)
        assert output.dtype == dtype
        error = (output.double() - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(dtype).eps

    def test_no_tensor_grows_with_the_square_of_the_tokens(self):
        """Catches attention weights, forward or backward; a softmax by hand is the control."""

        class Largest(TorchDispatchMode):
            size = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                output = func(*args, **kwargs or {})
                sizes = [x.numel() for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
                self.size = max(self.size, *sizes, 0)
                return output

        def largest(attend):
            with Largest() as mode:
                attend(*(x.requires_grad_() for x in heads(256))).sum().backward()
            return mode.size

        def softmax_attention(query, key, value):
            return (query @ key.mT).softmax(-1) @ value

        assert largest(linear_attention) == heads(256)[0].numel()
        assert largest(softmax_attention) == 2 * 3 * 256**2


class TestProcessor:
    @pytest.mark.parametrize("tuned", [False, True])
    def test_by_hand(self, unet, layers, tuned):
        """Catches shared or swapped phi, phi on values, another activation than the authors',
        projections of the wrong owner, and a lost factor or dropout after them."""
        attn, state = unet.get_submodule(LAYER), layers[LAYER]
        processor = LinFusionProcessor(16, tuned=tuned)
        processor.load_state_dict(state, strict=tuned)
        projections = state if tuned else attn.state_dict()

        def phi(name):
            weights = {key.removeprefix(name): x for key, x in state.items() if name in key}
            x = tokens() @ weights["0.weight"].T + weights["0.bias"]
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt()
            x = x * weights["1.weight"] + weights["1.bias"]
            return x.where(x > 0, 0.01 * x) @ weights["3.weight"].T + weights["3.bias"]

        heads = (
            ((tokens() + added).double() @ projections[f"{name}.weight"].double().T)
            .unflatten(-1, (2, 8))
            .transpose(1, 2)
            for name, added in {"to_q": phi("phi_q."), "to_k": phi("phi_k."), "to_v": 0}.items()
        )
        output = linear_attention(*heads)
        expected = output.transpose(1, 2).flatten(2) @ projections["to_out.0.weight"].double().T
        expected += projections["to_out.0.bias"]
        attn.set_processor(processor)
        attn.rescale_output_factor = 2.0
        torch.testing.assert_close(attn(tokens()).double(), expected / 2, rtol=1e-4, atol=1e-5)
        attn.to_out[1] = torch.nn.Dropout(1.0)
        assert not attn.train()(tokens()).any()

    def test_phi_starts_at_zero(self, unet):
        """Catches a start elsewhere than at the layer's own queries and keys."""
        attn = unet.get_submodule(LAYER)
        query, key, value = (
            project(tokens()).unflatten(-1, (2, 8)).transpose(1, 2)
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        expected = attn.to_out[0](linear_attention(query, key, value).transpose(1, 2).flatten(2))
        attn.set_processor(LinFusionProcessor(16))
        assert torch.equal(attn(tokens()), expected)

    def test_compiles(self, unet, layers):
        """Catches a graph break, and a layout of elu's gradient that compiled code refuses."""
        attn = unet.get_submodule(LAYER)
        attn.set_processor(LinFusionProcessor(16, tuned=True))
        attn.processor.load_state_dict(layers[LAYER])
        weight = attn.processor.to_q.weight
        expected = torch.autograd.grad(attn(tokens()).square().sum(), weight)[0]
        attn.compile(backend="aot_eager", fullgraph=True)
        got = torch.autograd.grad(attn(tokens()).square().sum(), weight)[0]
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("condition", ["encoder_hidden_states", "attention_mask"])
    def test_other_calls_are_refused(self, unet, condition):
        """Catches a mask or a text that is passed over in silence."""
        attn = unet.get_submodule(LAYER)
        with pytest.raises(NotImplementedError, match="is self-attention without a mask"):
            LinFusionProcessor(16)(attn, tokens(), **{condition: tokens()})


class TestLoading:
    def test_round_trip(self, unet, layers, folder):
        """Catches layers or parameters exchanged, and projections that stay the UNet's own."""
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
        config = json.loads((folder / "config.json").read_text())
        assert config["format_version"] == 1
        assert (config["base_model"], config["training"]) == ("tiny", {"steps": 7})
        assert config["layers"][0] == {"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 8}
        student = copy.deepcopy(unet)
        for name, state in layers.items():
            attn = student.get_submodule(name)
            attn.load_state_dict(state, strict=False)
            attn.set_processor(LinFusionProcessor(attn.query_dim))
            attn.processor.load_state_dict(state, strict=False)
        assert load_linfusion(unet, folder) is unet
        assert torch.equal(predict(unet), predict(student))
        for layer in select_layers(unet):
            assert isinstance(layer.attn.processor, LinFusionProcessor) == (layer.level in LEVELS)
        assert not any(p.requires_grad for p in unet.get_submodule(LAYER).processor.parameters())

    @pytest.mark.parametrize("given", [AttnProcessor, lambda: LinFusionProcessor(16)])
    def test_removal_is_exact(self, pipe, folder, given):
        """Catches weights that are written into the UNet, and processors of another object, which
        may be modules themselves."""
        unet = pipe.unet
        unet.get_submodule(LAYER).set_processor(given())
        processors, state = unet.attn_processors, copy.deepcopy(unet.state_dict())
        attributes = {name: set(vars(module)) for name, module in unet.named_modules()}
        before = predict(unet)
        for _ in range(2):  # the second load takes the first one's place
            assert load_linfusion(pipe, str(folder)) is pipe
        assert (predict(unet) - before).abs().max() > 1e-2
        assert remove_linfusion(pipe) is pipe
        after = unet.attn_processors
        assert all(after[name] is processor for name, processor in processors.items())
        assert list(unet.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in unet.state_dict().items())
        assert {name: set(vars(module)) for name, module in unet.named_modules()} == attributes
        assert torch.equal(predict(remove_linfusion(unet)), before)

    def test_half_precision(self, unet, folder):
        """Catches float32 layers in a half-precision UNet, and rounding that goes into the file."""
        exact = predict(load_linfusion(copy.deepcopy(unet), folder))
        load_linfusion(unet.bfloat16(), folder)
        assert {p.dtype for p in unet.parameters()} == {torch.bfloat16}
        inputs = torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16)
        text = torch.zeros(1, 5, 32, dtype=torch.bfloat16)
        with torch.no_grad():
            assert unet(inputs, 10, text, return_dict=False)[0].isfinite().all()
        assert torch.equal(predict(load_linfusion(two_level_unet(), folder)), exact)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_gpu(self, unet, folder, dtype):
        """Catches layers left on the CPU, and compiled code that computes something else."""
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(2, 4, 16, 16, generator=generator)
        text = torch.randn(2, 5, 32, generator=generator)

        def run(unet, dtype, device="cuda"):
            with torch.no_grad():
                return unet(inputs.to(device, dtype), 10, text.to(device, dtype)).sample.cpu()

        expected = run(load_linfusion(copy.deepcopy(unet), folder), torch.float32, "cpu")
        load_linfusion(unet.to("cuda", dtype), folder)
        eager = run(unet, dtype)
        compiled = run(torch.compile(unet), dtype)
        for output in (eager, compiled):
            assert (output.float() - expected).norm() < 0.05 * expected.norm()
        exact = run(remove_linfusion(unet), dtype).float()
        assert (exact - expected).norm() > 0.05 * expected.norm()


class TestRefusals:
    @pytest.fixture
    def loaded(self, folder):
        """A UNet with LinFusion layers; what is refused must leave them."""
        unet = load_linfusion(two_level_unet(), folder)
        before = unet.attn_processors
        yield unet
        after = unet.attn_processors
        assert all(after[name] is processor for name, processor in before.items())

    def test_avq(self, folder, loaded, unet):
        """Catches one that takes the other's processor for the layer's own."""
        codebooks, config = random_codebooks(unet), AVQConfig.parse("M4C2T1e-4")
        for refused in (
            lambda: apply_avq(loaded, codebooks),
            lambda: calibrate(tiny_pipe(loaded), ["a hen"], config, num_inference_steps=1),
            lambda: measure_error(tiny_pipe(loaded), ["a hen"], config, num_inference_steps=1),
        ):
            with pytest.raises(ValueError, match=r"LinFusion layers; call remove_linfusion\(unet"):
                refused()
        processors = dict(apply_avq(unet, codebooks).attn_processors)
        with pytest.raises(ValueError, match=r"has AVQ; call remove_avq\(unet\)"):
            load_linfusion(unet, folder)
        assert unet.attn_processors == processors

    def test_sequential_offload(self, folder, loaded):
        """Catches layers whose weights are lost as they are loaded."""
        cpu_offload(loaded)
        with pytest.raises(ValueError, match="load_linfusion before enable_sequential_cpu_offload"):
            load_linfusion(loaded, folder)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"_class_name": "AVQCodebooks"}, r"of LinFusionProcessor, but got one of AVQCodebook"),
            ({"layers": [{"name": "x"}]}, "must list layers with name, level, num_heads, head_dim"),
            ({"layers": []}, "must list layers with name, level, num_heads, head_dim"),
        ],
    )
    def test_config(self, folder, loaded, content, message):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
        with pytest.raises(ValueError, match=message):
            load_linfusion(loaded, folder)

    def test_files(self, folder, loaded):
        """Catches a loader without the checks that `AVQCodebooks` are tested with."""
        path = folder / "model.safetensors"
        save_file({name: 0 * x for name, x in load_file(path).items()}, path)
        with pytest.raises(ValueError, match="does not hold the tensors that its"):
            load_linfusion(loaded, folder)
        for missing in (path, folder / "config.json"):
            missing.unlink()
            with pytest.raises(FileNotFoundError, match=f"there is no file {missing}"):
                load_linfusion(loaded, folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x: x.update(mid={}), "LinFusion layers: mid is unexpected"),
            (lambda x: x[LAYER]["to_out.0.bias"].fill_(math.inf), r"to_out\.0\.bias holds NaN or"),
        ],
    )
    def test_saving(self, unet, layers, tmp_path, change, message):
        """Catches a folder that loading refuses."""
        change(layers)
        with pytest.raises(ValueError, match=message):
            save_linfusion(unet, layers, tmp_path / "new")
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("make_unet", "message"),
        [
            (sdxl_unet, r"config\.json of another model: .* is unexpected"),
            (
                lambda: two_level_unet(attention_head_dim=4),
                f"another model: {LAYER} has 4 heads of dim 4, but the file has 2 of dim 8",
            ),
        ],
    )
    def test_other_model(self, folder, make_unet, message):
        unet = make_unet()
        with pytest.raises(ValueError, match=message):
            load_linfusion(unet, folder)
        assert LinFusionProcessor not in {type(x) for x in unet.attn_processors.values()}

    def test_no_unet(self, folder):
        for call in (lambda: save_linfusion("pipe", {}, folder), lambda: remove_linfusion(None)):
            with pytest.raises(TypeError, match="expected a pipeline with a unet, or a UNet with"):
                call()
