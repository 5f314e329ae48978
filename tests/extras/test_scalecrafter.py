"""Re-dilated convolutions against their definition, when they run, and what they run beside."""

import copy
import json
import math
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from checks import differ, kinds
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    UNet2DConditionModel,
)
from peft import LoraConfig
from tiny import (
    draw,
    random_codebooks,
    sdxl_unet,
    tiny_pipe,
    tiny_unet,
    traced_unet,
)
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from avq_diffusers import apply_avq, avq_disabled, remove_avq
from avq_diffusers.extras.scalecrafter.apply import scalecrafter
from avq_diffusers.extras.scalecrafter.convolution import join_sub_grids, sub_grids
from avq_diffusers.extras.scalecrafter.settings import (
    SD15_1024,
    SD15_1280,
    SD15_2048,
    ScaleCrafterConfig,
)
from avq_diffusers.hosts.core.timesteps import TIMESTEP, Timesteps
from avq_diffusers.mini import MINI_SD

DILATED, PLAIN = 981, 1  # timesteps
CONVOLUTIONS = re.compile(r"(conv[12]|(down|up)samplers\.0\.conv)$")


class Redilated(nn.Module):
    """The definition of a re-dilated convolution."""

    def __init__(self, convolution, factor):
        super().__init__()
        self.convolution, self.factor = convolution, factor

    def forward(self, x):
        convolution, (height, width) = self.convolution, x.shape[2:]
        dilation = math.ceil(self.factor)
        scale = dilation / self.factor
        x = resize(x, (round(height * scale), round(width * scale)))
        x = functional.conv2d(
            x, convolution.weight, convolution.bias, convolution.stride, dilation, dilation
        )
        stride = convolution.stride[0]
        return resize(x, (math.ceil(height / stride), math.ceil(width / stride)))


def resize(x, size):
    return functional.interpolate(x, size, mode="bilinear", align_corners=False)


def redilate(unet, factors, convolutions=CONVOLUTIONS):
    """Put the definition in place of the convolutions in blocks whose path starts with a key."""
    for name, module in list(unet.named_modules()):
        for prefix, factor in factors.items():
            if name.startswith(prefix) and convolutions.search(name) and factor > 1:
                parent, attribute = name.rsplit(".", 1)
                setattr(unet.get_submodule(parent), attribute, Redilated(module, factor))
    return unet


def by_level(level1, level2, level3):
    """Factors of SD1.5's blocks."""
    levels = {"down_blocks.1": level1, "down_blocks.2": level2, "down_blocks.3": level3}
    levels |= {"up_blocks.2": level1, "up_blocks.1": level2, "up_blocks.0": level3}
    return levels | {"mid_block": level3}


def small_unet(**overrides):
    """Trained, by its config, on latents of 8 x 8: images of 64 x 64."""
    return tiny_unet(sample_size=8, **overrides)


def small_pipe():
    return tiny_pipe(small_unet())


def predict(unet, timestep=DILATED, height=16, width=16, batch=1, **arguments):
    generator = torch.Generator().manual_seed(2)
    dtype = next(unet.parameters()).dtype
    sample = torch.randn(batch, 4, height, width, generator=generator).to(dtype)
    text = torch.randn(batch, 5, 32, generator=generator).to(dtype)
    with torch.no_grad():
        return unet(sample, timestep, text, **arguments).sample


@pytest.fixture
def dilated():
    """Run ScaleCrafter on a pipeline or UNet until the test ends, and return it."""
    with ExitStack() as stack:

        def enter(pipe, *size, **config):
            stack.enter_context(scalecrafter(pipe, *size, **config))
            return pipe

        yield enter


def assert_equal_to_rounding(result, expected):
    torch.testing.assert_close(
        result, expected, rtol=0, atol=1e-10 * float(expected.detach().abs().max())
    )


class TestConvolution:
    @pytest.mark.parametrize("stride", [1, 2])
    @pytest.mark.parametrize("dilation", [1, 2, 3, 4])
    @pytest.mark.parametrize("size", [(12, 20), (13, 9), (3, 2)])
    def test_sub_grids(self, stride, dilation, size):
        """Catches a wrong border, or phase, at sizes that the dilation divides and others."""
        convolution = nn.Conv2d(3, 5, 3, stride, 1, dtype=torch.float64)
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        expected = functional.conv2d(
            x, convolution.weight, convolution.bias, stride, dilation, dilation
        )
        result = convolution(sub_grids(x, dilation, stride))
        result = join_sub_grids(result, dilation, stride, tuple(expected.shape[2:]))
        assert_equal_to_rounding(result, expected)

    @pytest.mark.parametrize(
        ("height", "width", "factors", "config"),
        [
            (128, 128, (2, 2, 2), None),
            (160, 160, (2.5, 2.5, 2.5), None),
            (256, 128, (2, 3, 4), None),
            (144, 160, (1.5, 1.5, 1.5), ScaleCrafterConfig((1, 1.5), num_dilated_steps=30)),
            (64, 128, (2, 2, 2), ScaleCrafterConfig((1, 2), num_dilated_steps=30)),
        ],
    )
    def test_unet(self, height, width, factors, config):
        """Catches a level or a kind of convolution that is forgotten, added or mixed up, one whose
        size is not that of the plain UNet, 18, 9, 5, 3, and an image that is refused unless both
        sides are larger than in training."""
        factors, unet = by_level(*factors), small_unet().double()
        latents = {"height": height // 8, "width": width // 8}
        expected = predict(redilate(copy.deepcopy(unet), factors), **latents)
        plain, late = predict(unet, **latents), predict(unet, PLAIN, **latents)
        with scalecrafter(unet, height, width, config=config):
            assert_equal_to_rounding(predict(unet, **latents), expected)
            assert torch.equal(predict(unet, PLAIN, **latents), late)
        assert differ(expected, plain)
        assert torch.equal(predict(unet, **latents), plain)

    @pytest.mark.parametrize("padding", [1, 0])
    def test_downsamplers_stay_as_they_are(self, padding):
        """Catches downsamplers dilated despite the setting or without padding of their own, and
        upsamplers left out with them."""
        unet = small_unet(downsample_padding=padding).double()
        dilated = redilate(copy.deepcopy(unet), by_level(2, 2, 2)) if padding else unet
        authors = predict(dilated)
        others = re.compile(r"(conv[12]|upsamplers\.0\.conv)$")
        expected = predict(redilate(copy.deepcopy(unet), by_level(2, 2, 2), others))
        config = ScaleCrafterConfig((1, 2), num_dilated_steps=30, downsamplers=padding == 0)
        with scalecrafter(unet, 128, 128, config=config):
            assert_equal_to_rounding(predict(unet), expected)
        assert differ(expected, authors)

    def test_three_levels(self):
        """Catches blocks of SD1.5 by name: mini-sd and SDXL have three levels."""
        config = json.loads((Path(MINI_SD) / "unet" / "config.json").read_text())
        with torch.device("meta"):
            mini = UNet2DConditionModel.from_config(config)
        for unet in (mini, sdxl_unet(layers_per_block=2)):
            size = 16 * unet.config.sample_size
            levels = {}
            with scalecrafter(unet, size, size):
                for convolution in unet._scalecrafter.convolutions:
                    levels.setdefault(convolution.level, []).append(convolution)
            # A resnet has two: 2 down, 3 up and a sampler each; 2 down, 2 in the middle, 3 up.
            assert {level: len(found) for level, found in levels.items()} == {1: 12, 2: 15}


class TestTimesteps:
    @pytest.mark.parametrize(
        "spacing", [{"steps_offset": 1}, {"steps_offset": 0}, {"timestep_spacing": "trailing"}]
    )
    def test_steps_of_the_authors(self, spacing):
        """Catches a window or a progression that is one step off, in any usual spacing."""
        scheduler = DDIMScheduler(**spacing)
        scheduler.set_timesteps(50)
        lengths = [(ScaleCrafterConfig((1, 2), steps), steps) for steps in range(1, 51)]
        for config, steps in (*lengths, (SD15_1024, 30), (SD15_1280, 35), (SD15_2048, 35)):
            found = [config.dilations_at(float(t)) for t in scheduler.timesteps]
            assert [dilations is not None for dilations in found] == [True] * steps + [False] * (
                50 - steps
            )
        expected = [4] * 9 + [3] * 9 + [2] * 17
        assert [dilations[3] for dilations in found[:35]] == expected
        assert [dilations[2] for dilations in found[:35]] == [3] * 12 + [2] * 23
        assert {dilations[:2] for dilations in found[:35]} == {(1, 2)}

    def test_kinds(self):
        """Catches a timestep that is read wrongly: a number, a tensor, an entry of a table that
        was changed in place, and one known by its address, where the next image's may lie."""
        timesteps = Timesteps(UNet2DConditionModel, TIMESTEP)

        def read(timestep):
            return timesteps.read((None, timestep), {})

        assert read(981) == read(torch.tensor(981)) == read(torch.tensor([981])) == 981
        assert read(torch.tensor([981.0]).expand(4)) == 981
        assert read(torch.tensor([[0, 981], [981, 0]])) == 981  # each image has a given frame
        table = torch.tensor([999, DILATED, 0, PLAIN, 0])
        for view in (table, table[1:], table[1::2].data):
            assert [read(entry) for entry in view] == view.tolist()
            assert [read(entry.expand(2, 3)) for entry in view] == view.tolist()
        table[1] = 5
        assert read(table[1]) == 5
        table.numpy()[1] = 7  # leaves no trace
        assert read(table[1]) == 7
        with torch.inference_mode():
            changed = torch.tensor([999, DILATED])  # nor does this in inference mode
            assert read(changed[1]) == DILATED
            changed[1] = PLAIN
            assert read(changed[1]) == PLAIN
            last = torch.tensor([999.0, 0.4])[1]  # by Karras's noise levels
            assert read(last) == pytest.approx(0.4)
        addresses = []
        for timestep in 10 * (DILATED, PLAIN):
            table = torch.full((2**12,), timestep)  # in the memory of the one before
            addresses.append(table.data_ptr())
            assert read(table[1]) == timestep
            del table
        assert len(set(addresses)) < 20

    def test_no_read_per_step(self, dilated):
        """Catches a wait for the device in every step of an image."""

        class Reads(TorchDispatchMode):
            count = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                self.count += function is torch.ops.aten._local_scalar_dense.default
                return function(*args, **(kwargs or {}))

        unet = dilated(small_unet(), 128, 128)
        with Reads() as reads:
            torch.tensor(3).item()
            assert reads.count == 1
            for timestep in torch.tensor([981, 961, 941, 1]):
                predict(unet, timestep)
        assert reads.count == 1


class TestInTheBlock:
    def test_comes_back(self):
        """Catches convolutions that never change, and anything that stays behind, also after an
        error."""
        pipe = small_pipe()
        plain = draw(pipe)
        attributes = {name: set(vars(module)) for name, module in pipe.unet.named_modules()}

        def fail():
            with scalecrafter(pipe, 128, 128):
                assert differ(draw(pipe), plain)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert torch.equal(draw(pipe), plain)
        for name, module in pipe.unet.named_modules():
            assert set(vars(module)) == attributes[name]
            assert not module._forward_pre_hooks
            assert not module._forward_hooks

    def test_nested(self, dilated):
        """Catches an earlier ScaleCrafter that is lost, or dilates a second time."""
        pipe, size = small_pipe(), {"height": 160, "width": 160}
        with scalecrafter(pipe, 160, 160):
            expected = draw(pipe, **size)
        outer = draw(dilated(pipe, 128, 128))
        with scalecrafter(pipe, 160, 160):
            assert torch.equal(draw(pipe, **size), expected)
        assert torch.equal(draw(pipe), outer)

    def test_errors_change_nothing(self, dilated):
        pipe = dilated(small_pipe(), 128, 128)
        before = draw(pipe)
        flat = ScaleCrafterConfig((1, 2), num_dilated_steps=30)
        circular = small_pipe().unet
        circular.up_blocks[0].resnets[0].conv1.padding_mode = "circular"  # for tileable textures
        for error, message, arguments in (
            (ValueError, "larger than the training size, 64, but got 64 x 32", (pipe, 64, 32)),
            (ValueError, "settings for 128 x 128, .*but got 128 x 64", (pipe, 128, 64)),
            (ValueError, r"settings for 128 x 128, 160 x 160, .*but got 96 x 128", (pipe, 96, 128)),
            (ValueError, r"no 3x3 convolution at a level that dilations=\(1, 2\)",
             (traced_unet(), 256, 256, flat)),
            (TypeError, "config must be a ScaleCrafterConfig, but got dict", (pipe, 128, 128, {})),
            (TypeError, "height must be an int, but got 256.5", (pipe, 256.5, 256)),
            (ValueError, "width must be a multiple of 8, but got 300", (pipe, 256, 300, flat)),
            (ValueError, r"sample_size=\(8, 8\) in .* is not a training size",
             (tiny_unet(sample_size=(8, 8)), 128, 128)),
            (ValueError, "pads with zeros, but this UNet's convolutions have padding_mode='circul",
             (circular, 128, 128)),
            (TypeError, "expected a pipeline with a unet, or a UNet with down_blocks, but got str",
             ("sd", 128, 128)),
            (TypeError, "or a UNet with down_blocks, but got AutoencoderKL",
             (pipe.vae, 128, 128)),
            (TypeError, "expected a UNet with up_blocks, but got ControlNetModel",
             (ControlNetModel.from_unet(pipe.unet), 128, 128)),
        ):  # fmt: skip
            pipe_or_unet, height, width, config = (*arguments, None)[:4]
            with pytest.raises(error, match=message):
                dilated(pipe_or_unet, height, width, config=config)
        assert torch.equal(draw(pipe), before)
        with pytest.raises(
            ValueError, match=r"applied for images of 128 x 128, .* latents of \(8, 16"
        ):
            draw(pipe, height=64)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"dilations": ()}, "dilations must hold numbers from 1 to 16"),
            ({"dilations": (1, 0.5)}, "dilations must hold numbers from 1 to 16"),
            ({"dilations": 2}, "dilations must hold numbers from 1 to 16"),
            ({"dilations": ("1", "2")}, "dilations must hold numbers from 1 to 16"),
            ({"dilations": (1, 1)}, "dilations must be above 1 at some level"),
            ({"num_dilated_steps": 51}, "num_dilated_steps must be at most 50, but got 51"),
            ({"num_dilated_steps": 3.5}, r"num_dilated_steps must be an int, but got 3\.5"),
        ],
    )
    def test_config(self, fields, message):
        with pytest.raises((TypeError, ValueError), match=message):
            ScaleCrafterConfig(**{"dilations": (1, 2), "num_dilated_steps": 30} | fields)


class TestBeside:
    """One UNet with the definition and one with ScaleCrafter; the same is done to both."""

    @pytest.mark.parametrize("scalecrafter_first", [True, False])
    def test_avq(self, scalecrafter_first):
        """Catches one that undoes, or hides, the other."""
        codebooks = random_codebooks(small_unet())
        unet, expected = small_unet(), redilate(small_unet(), by_level(2, 2, 2))
        exact = predict(unet, PLAIN)
        expected = predict(apply_avq(expected, codebooks))
        if not scalecrafter_first:
            apply_avq(unet, codebooks)
        with scalecrafter(unet, 128, 128):
            if scalecrafter_first:
                apply_avq(unet, codebooks)
            plain, result = predict(unet, PLAIN), predict(unet)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-4 * float(expected.max()))
            assert {"AVQ"} <= kinds(unet)
            with avq_disabled(unet):
                assert differ(predict(unet), result)
            if scalecrafter_first:
                remove_avq(unet)
                assert torch.equal(predict(unet, PLAIN), exact)
        if not scalecrafter_first:
            assert torch.equal(predict(unet, PLAIN), plain)
            assert differ(predict(unet), result)
        assert torch.equal(predict(remove_avq(unet), PLAIN), exact)

    @pytest.mark.parametrize("lora_first", [True, False])
    def test_lora(self, lora_first):
        """Catches a LoRA of a convolution that stays undilated, whenever it is loaded."""
        pipe, reference = small_pipe(), small_pipe()
        targets = ["conv1", "conv2", "conv", "to_q"]
        lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)

        def load(pipe):
            torch.manual_seed(3)
            pipe.unet.add_adapter(lora)

        with scalecrafter(pipe, 128, 128):
            plain = predict(pipe.unet)
        if lora_first:
            load(pipe)
        with scalecrafter(pipe, 128, 128):
            if not lora_first:
                load(pipe)
            result = predict(pipe.unet)
            load(reference)
            reference.fuse_lora()
            reference.unload_lora_weights()
            expected = predict(redilate(reference.unet, by_level(2, 2, 2)))
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-4 * float(expected.max()))
            assert differ(result, plain)
            pipe.unload_lora_weights()
            assert torch.equal(predict(pipe.unet), plain)
        assert not any(module._forward_hooks for module in pipe.unet.modules())

    def test_sequential_offload(self, dilated):
        """Catches weights that are read while they lie on the meta device."""
        expected, unet = predict(dilated(small_unet(), 128, 128)), dilated(small_unet(), 128, 128)
        cpu_offload(unet, execution_device=torch.device("cpu"))
        assert torch.equal(predict(unet), expected)

    def test_compile(self, dilated):
        """Catches graphs that multiply with the timesteps, or do not switch."""
        unet = small_unet(
            block_out_channels=(16,),
            down_block_types=("DownBlock2D",),
            mid_block_type=None,
            up_block_types=("UpBlock2D",),
        )
        config = ScaleCrafterConfig((2,), num_dilated_steps=30)
        expected = dilated(copy.deepcopy(unet), 128, 128, config=config)
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        unet = torch.compile(unet, backend=backend, fullgraph=True)
        with scalecrafter(unet, 128, 128, config=config):
            for timestep in torch.tensor([981, 941, 421, 381, 1, 961, 21]):
                assert torch.equal(predict(unet, timestep), predict(expected, timestep))
            assert len(graphs) == 2
        assert differ(predict(unet), predict(expected))
