"""`AVQCodebooks`: which layers it covers, what a saved folder holds, and what loading refuses."""

import json
import math
import os
import pickle
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline, UNetMotionModel
from safetensors.torch import load_file, save_file
from tiny import (
    CONFIG,
    LAYER,
    motion_adapter,
    own_codebooks,
    predict,
    random_changes,
    random_codebooks,
    sd2_unet,
    sdxl_unet,
    tiny_unet,
    tuned_codebooks,
)

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq
from avq_diffusers.plugin.codebooks import PROJECTION_PARAMETERS, AVQCodebooks
from avq_diffusers.plugin.layers import select_layers
from avq_diffusers.plugin.refinement import set_num_refined
from avq_diffusers.plugin.report import summary

CHILDREN = f"codebooks.{LAYER.replace('.', '__')}.child_codewords"
WEIGHTS = "diffusion_pytorch_model.safetensors"


class WithCodebooks(DiffusionPipeline):
    """A pipeline that holds codebooks among its models."""

    def __init__(self, codebooks):
        super().__init__()
        self.register_modules(codebooks=codebooks)


OTHER_SIZE = Codebook(torch.zeros(2, 3, 8), torch.zeros(2, 3, 2, 8))


@pytest.fixture
def folder(codebooks, tmp_path):
    codebooks.save_pretrained(tmp_path / "codebooks")
    return tmp_path / "codebooks"


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_are_single_precision_whatever_the_default(tmp_path, dtype):
    """Catches codewords rounded to the half precision that a script has made the default."""
    unet, config = tiny_unet(), replace(CONFIG, key_norm=True)
    codebooks = tuned_codebooks(unet, config)
    codebooks.save_pretrained(tmp_path)
    torch.set_default_dtype(dtype)
    try:
        loaded = AVQCodebooks.from_pretrained(tmp_path).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in codebooks.state_dict().items():
        assert loaded[name].dtype == torch.float32, name
        assert torch.equal(loaded[name], tensor), name


class TestSelectLayers:
    def test_sd15(self):
        """Catches levels of up blocks counted forwards, and head dim read as head count."""
        unet = tiny_unet(layers_per_block=2)
        layers = select_layers(unet)
        found = {layer.name.split(".transformer_blocks")[0]: layer.level for layer in layers}
        assert found == {
            "down_blocks.0.attentions.0": 0,
            "down_blocks.0.attentions.1": 0,
            "down_blocks.1.attentions.0": 1,
            "down_blocks.1.attentions.1": 1,
            "down_blocks.2.attentions.0": 2,
            "down_blocks.2.attentions.1": 2,
            "up_blocks.1.attentions.0": 2,
            "up_blocks.1.attentions.1": 2,
            "up_blocks.1.attentions.2": 2,
            "up_blocks.2.attentions.0": 1,
            "up_blocks.2.attentions.1": 1,
            "up_blocks.2.attentions.2": 1,
            "up_blocks.3.attentions.0": 0,
            "up_blocks.3.attentions.1": 0,
            "up_blocks.3.attentions.2": 0,
            "mid_block.attentions.0": 3,
        }
        assert {(layer.level, layer.num_heads, layer.head_dim) for layer in layers} == {
            (0, 2, 8),
            (1, 2, 16),
            (2, 2, 32),
            (3, 2, 32),
        }
        for layer in layers:
            assert unet.get_submodule(layer.name) is layer.attn

    def test_sdxl(self):
        """Catches a rule that stops at the first transformer block, or assumes level 0."""
        layers = select_layers(sdxl_unet())
        count = {level: sum(layer.level == level for layer in layers) for level in range(3)}
        assert count == {0: 0, 1: 5 * 2, 2: 5 * 3 + 3}
        assert len({layer.name for layer in layers}) == len(layers)
        with pytest.raises(ValueError, match="no self-attention at level 0, only at levels 1, 2"):
            select_layers(sdxl_unet(), (0, 1))

    def test_layers_that_stay_exact(self, unet):
        """Catches a part of a name that matches, other levels' layers, a name without effect."""
        names = [layer.name for layer in select_layers(unet, (0, 1))]
        some = (names[0], "up_blocks")
        expected = [name for name in names[1:] if not name.startswith("up_blocks.")]
        assert [layer.name for layer in select_layers(unet, (0, 1), some)] == expected
        for name in ("down_blocks.0.attention", "up_blocks.1.attentions.9", "", "mid_block"):
            with pytest.raises(ValueError, match=f"at the levels 0, 1, but got '{name}'; one of"):
                select_layers(unet, (0, 1), (name,))
        with pytest.raises(ValueError, match="exact leaves no layer of this UNet at"):
            select_layers(unet, (0, 1), ("down_blocks", "up_blocks"))

    def test_overrides(self, unet):
        """Catches keys that match no layer, another level's, or one that stays exact."""
        names = [layer.name for layer in select_layers(unet, (0, 1))]
        good = ("0", "1", "up_blocks", "up_blocks.3.attentions.1", names[0])
        found = select_layers(unet, (0, 1), (), good)
        assert [layer.name for layer in found] == names
        bad = ("up_block.3", "7", "2", "01", "mid_block", "up_blocks.3.attentions.9", "")
        for key in (*bad, "down_blocks.0"):
            message = rf"overrides must .* but got '{key}'; one of them is down_blocks\.1.* level 1"
            with pytest.raises(ValueError, match=message):
                select_layers(unet, (0, 1), ("down_blocks.0",), ["0", key])

    def test_sd2(self):
        """Catches one head count taken for all levels."""
        layers = select_layers(sd2_unet(), (0, 1))
        shapes = {(layer.level, layer.num_heads, layer.head_dim) for layer in layers}
        assert shapes == {(0, 1, 16), (1, 2, 16)}

    def test_temporal_layers_are_left_out(self, unet):
        """Catches a rule by `attn1` alone: motion modules have an attn1 over frames."""
        motion = UNetMotionModel.from_unet2d(unet, motion_adapter())
        names = [layer.name for layer in select_layers(motion)]
        assert names == [layer.name for layer in select_layers(unet)]
        assert any("motion_modules" in name for name in motion.attn_processors)

    def test_cross_attention_in_attn1_is_left_out(self):
        """Catches `attn1` taken for self-attention where the block attends to text only."""
        unet = tiny_unet(only_cross_attention=(True, False, False, False))
        assert {layer.level for layer in select_layers(unet)} == {1, 2, 3}

    def test_not_a_unet(self):
        with pytest.raises(TypeError, match="expected a UNet with down_blocks, but got Linear"):
            select_layers(torch.nn.Linear(2, 2))
        with pytest.raises(TypeError, match="expected a UNet with down_blocks, but got str"):
            select_layers("unet")


class TestRoundTrip:
    def test_same_tensors_and_config(self, unet, tmp_path):
        """Catches names mangled on one side only, lost overrides and lost key norms."""
        config = AVQConfig(
            4,
            2,
            2,
            levels=(0, 1),
            codewords="stored",
            key_norm=True,
            overrides={"1": {"num_children": 3}},
        )
        codebooks = random_codebooks(
            unet, config, base_model="tiny", calibration={"seed": 3, "layers": {LAYER: 0.5}}
        )
        torch.nn.init.normal_(codebooks.key_norm(LAYER).weight)
        codebooks.save_pretrained(tmp_path)
        loaded = AVQCodebooks.from_pretrained(tmp_path)
        assert loaded.avq_config == config
        assert loaded.layer_specs == codebooks.layer_specs
        assert loaded.config["base_model"] == "tiny"
        assert loaded.config["calibration"] == {"seed": 3, "layers": {LAYER: 0.5}}
        for name in codebooks.layer_specs:
            assert torch.equal(loaded.codebook(name).parents, codebooks.codebook(name).parents)
            assert torch.equal(loaded.codebook(name).children, codebooks.codebook(name).children)
        assert torch.equal(loaded.key_norm(LAYER).weight, codebooks.key_norm(LAYER).weight)
        assert (
            loaded.codebook("up_blocks.2.attentions.0.transformer_blocks.0.attn1").children.shape[2]
            == 3
        )

    def test_folder(self, folder):
        """Catches a second weights file and a config that does not say what it is."""
        assert sorted(os.listdir(folder)) == ["config.json", WEIGHTS]
        config = json.loads((folder / "config.json").read_text())
        assert config["format_version"] == 2
        assert config["layers"][0] == {"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 8}
        assert config["avq"]["num_parents"] == CONFIG.num_parents

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_dtype_does_not_degrade_codewords(self, folder, codebooks, dtype):
        """Catches codewords rounded by the `dtype=` that users pass to every diffusers model."""
        codeword = codebooks.codebook(LAYER).parents
        assert not torch.equal(codeword, codeword.to(dtype).float())
        loaded = AVQCodebooks.from_pretrained(folder, dtype=dtype).codebook(LAYER).parents
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, codeword)

    def test_flat_codebook(self, unet, tmp_path):
        """Catches empty children lost in the file or divided by."""
        random_codebooks(unet, AVQConfig.parse("M4")).save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = AVQCodebooks.from_pretrained(str(tmp_path)).project()
        assert loaded.codebook(LAYER).children.shape == (2, 4, 0, 8)

    def test_subfolder(self, codebooks, tmp_path):
        codebooks.save_pretrained(tmp_path / "inner")
        loaded = AVQCodebooks.from_pretrained(tmp_path, subfolder="inner")
        assert loaded.layer_specs == codebooks.layer_specs

    def test_arguments_of_a_download(self, folder, codebooks):
        """Catches those of the Hub refused for a folder, which scripts pass for either."""
        arguments = {"revision": "main", "token": None, "local_files_only": True}
        loaded = AVQCodebooks.from_pretrained(folder, force_download=False, **arguments)
        assert loaded.layer_specs == codebooks.layer_specs

    def test_as_a_part_of_a_pipeline(self, codebooks, tmp_path):
        """Catches an argument refused that diffusers passes to every model of a pipeline."""
        WithCodebooks(codebooks).save_pretrained(tmp_path)
        loaded = WithCodebooks.from_pretrained(tmp_path).codebooks
        assert torch.equal(loaded.codebook(LAYER).parents, codebooks.codebook(LAYER).parents)

    def test_moving_keeps_the_parameters(self, codebooks):
        """Catches buffers: `.to()` replaces those, and a UNet that uses them would not notice."""
        before = codebooks.codebook(LAYER).children
        place = before.data_ptr()
        codebooks.to(memory_format=torch.channels_last)  # a copy, as on another device
        assert codebooks.codebook(LAYER).children is before
        assert before.data_ptr() != place
        assert not before.requires_grad

    @pytest.mark.parametrize(
        "cast",
        [
            torch.nn.Module.half,
            torch.nn.Module.bfloat16,
            lambda module: module.to("cpu", torch.float16),
            lambda module: torch.nn.Sequential(module).to(torch.float16),
        ],
    )
    def test_casts_leave_float32(self, unet, cast):
        """Catches digits lost to half precision and back, and a cast that also does not move."""
        codebooks = random_codebooks(unet, replace(CONFIG, key_norm=True))
        before = {name: tensor.clone() for name, tensor in codebooks.state_dict().items()}
        cast(codebooks)
        for name, tensor in codebooks.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before[name])
        predict(apply_avq(unet, codebooks))
        codebooks.to("meta", torch.float16)
        assert {(x.device.type, x.dtype) for x in codebooks.parameters()} == {
            ("meta", torch.float32)
        }


class TestSaving:
    def contents(self, folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def test_other_processes_write_nothing(self, codebooks, folder, tmp_path):
        """Catches one that removes the config.json, which only the main process writes."""
        before = self.contents(folder)
        codebooks.codebook(LAYER).parents.add_(1)
        codebooks.save_pretrained(folder, is_main_process=False)
        codebooks.save_pretrained(tmp_path / "new", is_main_process=False)
        assert self.contents(folder) == before
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(("name", "value"), [("variant", "fp16"), ("use_safetensors", False)])
    def test_files_that_are_not_there(self, folder, name, value):
        """Catches a request that is dropped without a word."""
        with pytest.raises(ValueError, match=f"one safetensors file without a variant.*{name}"):
            AVQCodebooks.from_pretrained(folder, **{name: value})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("safe_serialization", False),
            ("variant", "fp16"),
            ("max_shard_size", "1KB"),
            ("use_flashpack", True),
        ],
    )
    def test_files_that_loading_does_not_read(self, codebooks, folder, tmp_path, name, value):
        """Catches a folder that is saved without an error and cannot be loaded."""
        before = self.contents(folder)
        message = rf"codebooks are saved with {name}=.* only, but got {value!r}\."
        for place in (folder, tmp_path / "new"):
            with pytest.raises(ValueError, match=message):
                codebooks.save_pretrained(place, **{name: value})
        assert self.contents(folder) == before
        assert not (tmp_path / "new").exists()

    def test_as_every_model(self, codebooks, tmp_path):
        """Catches the usual values of those arguments refused, as `push_to_hub` passes them."""
        codebooks.save_pretrained(tmp_path, True, safe_serialization=True, variant=None)
        assert AVQCodebooks.from_pretrained(tmp_path).layer_specs == codebooks.layer_specs


class TestRefusals:
    @pytest.mark.parametrize("name", ["subfoldr", "torch_type", "repo_type"])
    def test_unknown_argument(self, folder, name):
        """Catches a misspelt argument that is dropped where the codebooks are a local folder."""
        with pytest.raises(
            TypeError, match=f"takes subfolder, dtype, revision.*, but got '{name}'"
        ):
            AVQCodebooks.from_pretrained(folder, **{name: None})

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"format_version": 1}, "format version 2 are supported, but got version 1"),
            ({"_class_name": "UNet2DConditionModel"}, "of AVQCodebooks, but got one of UNet2DCond"),
            ({"avq": {"num_parents": 4, "parents": 4}}, "unknown AVQConfig keys: parents"),
            (
                {"avq": {"num_parents": 10**30}},
                r"num_parents must be at most 2147483647, but got 1",
            ),
            (
                {"layers": [{"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 10**30}]},
                r"json: head_dim of a layer must be at most 2147483647, but got 1",
            ),
            (
                {"avq": {"num_parents": 5, "num_children": 2, "num_refined": 2}},
                r"must have shape \(2, 5, .*but got \(2, 4, ",
            ),
            ({"calibration": [3]}, r"calibration must be a mapping or None, but got \[3\]"),
        ],
    )
    def test_config(self, folder, values, message):
        edit_config(folder, **values)
        with pytest.raises(ValueError, match=message):
            AVQCodebooks.from_pretrained(folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x: x[CHILDREN].view(-1)[5:6].fill_(math.nan), "child_codewords holds NaN or"),
            (lambda x: x[CHILDREN].view(-1)[5:6].fill_(math.inf), "child_codewords holds NaN or"),
            (
                lambda x: x.update({CHILDREN: x[CHILDREN].int()}),
                "of 16 bits or more, but got torch",
            ),
            (lambda x: (x.popitem(), x.popitem()), r"_codewords is missing \(2 missing in all\)"),
            (lambda x: x.update(extra=torch.zeros(1)), r"extra is unexpected \(1 unexpected in"),
        ],
    )
    def test_weights(self, folder, change, message):
        edit_weights(folder, change)
        with pytest.raises(ValueError, match=message):
            AVQCodebooks.from_pretrained(folder)

    def test_config_is_not_json(self, folder):
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json is not a JSON file"):
            AVQCodebooks.from_pretrained(folder)

    @pytest.mark.parametrize("name", ["/no/such/folder", "./codebooks", "runs/m64/codebooks"])
    def test_missing_folder(self, name):
        """Catches a path that is looked for on the Hub, whose errors speak of connections."""
        with pytest.raises(FileNotFoundError, match=f"there is no folder {name}"):
            AVQCodebooks.from_pretrained(name)

    @pytest.mark.parametrize("file", ["config.json", WEIGHTS])
    def test_missing_file(self, folder, file):
        (folder / file).unlink()
        with pytest.raises(FileNotFoundError, match=f"there is no file .*{file}"):
            AVQCodebooks.from_pretrained(folder)

    @pytest.mark.parametrize("content", [b"", b"version https://git-lfs", None])
    def test_damaged_weights(self, folder, content):
        """Catches a truncated file read as far as it goes (None: the first half of a real one)."""
        whole = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2] if content is None else content)
        with pytest.raises(ValueError, match="is not a complete safetensors file"):
            AVQCodebooks.from_pretrained(folder)

    @pytest.mark.parametrize("changed", ["one-bit", "exchanged"])
    def test_other_tensors_of_the_same_shapes(self, folder, tmp_path, changed):
        """Catches weights that are taken as long as names, shapes and numbers are plausible."""
        if changed == "one-bit":
            content = bytearray((folder / WEIGHTS).read_bytes())
            content[-1] ^= 1
            (folder / WEIGHTS).write_bytes(content)
        else:
            other = random_codebooks(tiny_unet(), seed=7)
            other.save_pretrained(tmp_path / "other")
            shutil.copy(tmp_path / "other" / WEIGHTS, folder / WEIGHTS)
        with pytest.raises(ValueError, match="does not hold the tensors that its config"):
            AVQCodebooks.from_pretrained(folder)

    def test_nothing_is_unpickled(self, folder):
        """Catches diffusers' loader, which falls back to torch.load and follows a shard index."""
        marker = folder / "was-unpickled"

        class Payload:
            def __reduce__(self):
                return (open, (str(marker), "w"))

        name = "diffusion_pytorch_model.bin"
        (folder / name).write_bytes(pickle.dumps(Payload()))
        keys = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(keys, name)}
        (folder / (WEIGHTS + ".index.json")).write_text(json.dumps(index))
        with pytest.raises(FileNotFoundError):
            AVQCodebooks.from_pretrained(folder)
        assert not marker.exists()


class TestParentChildConstraint:
    def test_warning_and_projection(self, codebooks, tmp_path):
        """Catches a check that never fires, or a projection that moves the wrong tensor."""
        codebook = codebooks.codebook(LAYER)
        parents = codebook.parents.clone()
        offset = codebook.children[0, 1, 0] - codebook.children[0, 1, 1]
        codebook.children[0, 1] += 0.3
        codebooks.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match=r"by up to 0\.\d+ of .*AVQCodebooks.project\(\)"):
            loaded = AVQCodebooks.from_pretrained(tmp_path)
        loaded.project().save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            projected = AVQCodebooks.from_pretrained(tmp_path).codebook(LAYER)
        assert torch.equal(projected.parents, parents)
        torch.testing.assert_close(projected.children.mean(2), parents)
        torch.testing.assert_close(
            projected.children[0, 1, 0] - projected.children[0, 1, 1], offset
        )

    @pytest.mark.parametrize(("error", "warned"), [(0.5e-3, False), (1.5e-3, True)])
    def test_tolerance(self, codebooks, tmp_path, error, warned):
        """Catches another tolerance, and an error of one parent that is averaged away."""
        codebook = codebooks.codebook(LAYER)
        offsets = codebook.children[0] - codebook.parents[0, :, None]
        codebook.children[0, 1, :, 0] += error * offsets.square().sum(-1).mean().sqrt()
        codebooks.save_pretrained(tmp_path)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            AVQCodebooks.from_pretrained(tmp_path)
        assert [f"by up to {error:.2g} of" in str(one.message) for one in found] == [True] * warned

    def test_children_equal_to_their_parent(self, unet, tmp_path):
        """Catches 0 / 0 in a layer that has not moved yet, and that NaN hiding another layer."""
        codebooks = random_codebooks(unet)
        names = list(codebooks.layer_specs)
        for name in names:
            codebook = codebooks.codebook(name)
            codebook.children.copy_(codebook.parents[:, :, None].expand_as(codebook.children))
        codebooks.save_pretrained(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            AVQCodebooks.from_pretrained(tmp_path)
        codebooks.codebook(names[-1]).children[0, 0, 0] += 1
        codebooks.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match="children do not average to their parent"):
            AVQCodebooks.from_pretrained(tmp_path)


class TestFromCodebooks:
    def parts(self, codebooks):
        return {name: codebooks.codebook(name) for name in codebooks.layer_specs}

    def test_copies(self, unet, codebooks):
        """Catches codebooks that share memory with the tensors they were built from."""
        built = AVQCodebooks.from_codebooks(CONFIG, self.parts(codebooks), unet)
        codebooks.codebook(LAYER).parents.zero_()
        assert built.codebook(LAYER).parents.any()

    @pytest.mark.parametrize(
        ("change", "overrides", "message"),
        [
            (lambda parts: parts.pop(LAYER), {}, f"codebooks: {LAYER} is missing"),
            (lambda parts: parts.update(mid=parts[LAYER]), {}, "codebooks: mid is unexpected"),
            (
                lambda parts: parts.update({LAYER: OTHER_SIZE}),
                {},
                r"attn1: parents must have shape \(2, 4, 8\), but got",
            ),
            (lambda parts: None, {"up_block.3": {"num_refined": 1}}, r"but got 'up_block\.3'"),
        ],
    )
    def test_refuses(self, unet, codebooks, change, overrides, message):
        """Catches layers left out in silence, and overrides by a misspelt name without effect."""
        parts = self.parts(codebooks)
        change(parts)
        with pytest.raises(ValueError, match=message):
            AVQCodebooks.from_codebooks(replace(CONFIG, overrides=overrides), parts, unet)


class TestOwnCodewords:
    """Distilled with codewords of each call: changes of projections and no codebook."""

    config = replace(CONFIG, codewords="means", num_updates=1, exact_keys=8)

    @pytest.fixture
    def tuned(self, unet):
        return own_codebooks(unet, self.config)

    def test_round_trip(self, tuned, tmp_path):
        """Catches codewords in the file, changes or sizes that are lost, and codewords of zeros."""
        tuned.save_pretrained(tmp_path)
        assert all("projection_changes" in name for name in load_file(tmp_path / WEIGHTS))
        loaded = AVQCodebooks.from_pretrained(tmp_path)
        assert loaded.own_codewords
        assert loaded.avq_config == self.config
        assert loaded.codebook(LAYER) is None
        assert loaded.project().state_dict().keys() == tuned.state_dict().keys()
        for name, tensor in tuned.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)

    def test_equal_projections_changed_by_hand(self, unet, tuned):
        """Catches changes that are dropped where there is no codebook, and other sizes."""
        by_hand = tiny_unet()
        with torch.no_grad():
            for name in tuned.layer_specs:
                for path, change in tuned.projection_changes(name).items():
                    by_hand.get_submodule(name).get_parameter(path).add_(change)
        apply_avq(by_hand, self.config, route="always")
        apply_avq(unet, tuned, route="always")
        torch.testing.assert_close(predict(unet), predict(by_hand), rtol=1e-4, atol=1e-5)
        assert "tuned" in str(summary(unet))
        set_num_refined(unet, 0)
        set_num_refined(by_hand, 0)
        torch.testing.assert_close(predict(unet), predict(by_hand), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("config", "changes", "message"),
        [
            (CONFIG, {}, "own codewords: codewords='stored' needs codebooks"),
            (replace(config, key_norm=True), {}, "own codewords: key_norm needs codebooks"),
            (config, None, "own codewords: without codebooks there must be projection changes"),
            (config, {}, r"projection_changes: .* is missing \(6 missing in all\)"),
        ],
    )
    def test_refuses(self, unet, config, changes, message):
        with pytest.raises(ValueError, match=message):
            AVQCodebooks.from_codebooks(config, None, unet, projection_changes=changes)

    def test_refuses_a_file_with_codewords(self, tmp_path, unet):
        """Catches stored codewords that a changed config.json would silently drop."""
        random_codebooks(unet, projection_changes=random_changes(unet)).save_pretrained(tmp_path)
        avq = json.loads((tmp_path / "config.json").read_text())["avq"]
        edit_config(tmp_path, own_codewords=True, avq={**avq, "codewords": "means"})
        with pytest.raises(ValueError, match="codewords is unexpected"):
            AVQCodebooks.from_pretrained(tmp_path)


class TestProjectionChanges:
    @pytest.fixture
    def changes(self, unet):
        return random_changes(unet)

    @pytest.fixture
    def tuned_folder(self, unet, changes, tmp_path):
        codebooks = random_codebooks(unet, projection_changes=changes, training={"steps": 7})
        codebooks.save_pretrained(tmp_path)
        return tmp_path

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_round_trip(self, changes, tuned_folder, dtype):
        """Catches layers or parameters exchanged, and digits lost to the `dtype=` of loading."""
        assert sorted(os.listdir(tuned_folder)) == ["config.json", WEIGHTS]
        loaded = AVQCodebooks.from_pretrained(tuned_folder, dtype=dtype)
        assert loaded.config["training"] == {"steps": 7}
        assert loaded.config["calibration"] is None
        for layer, tensors in changes.items():
            found = loaded.projection_changes(layer)
            assert list(found) == list(PROJECTION_PARAMETERS)
            for name, tensor in tensors.items():
                assert found[name].dtype == torch.float32
                assert not found[name].requires_grad
                assert torch.equal(found[name], tensor)

    def test_half_precision_given(self, unet, changes):
        """Catches parameters of mixed dtypes, which one file for all UNet dtypes must not hold."""
        halves = {
            layer: {name: tensor.half() for name, tensor in tensors.items()}
            for layer, tensors in changes.items()
        }
        found = random_codebooks(unet, projection_changes=halves).projection_changes(LAYER)[
            "to_q.weight"
        ]
        assert found.dtype == torch.float32
        assert torch.equal(found, halves[LAYER]["to_q.weight"].float())

    def test_copies(self, unet, changes):
        """Catches changes that share memory with the UNet that training goes on with."""
        built = random_codebooks(unet, projection_changes=changes).projection_changes(LAYER)
        changes[LAYER]["to_q.weight"].zero_()
        assert built["to_q.weight"].any()
        before = random_codebooks(unet, projection_changes=changes)
        before.to("meta")
        assert before.projection_changes(LAYER)["to_q.weight"].is_meta

    def test_codebooks_without(self, folder):
        """Catches empty changes in every file, and a config that must say that there are none."""
        assert not [name for name in load_file(folder / WEIGHTS) if "changes" in name]
        config = json.loads((folder / "config.json").read_text())
        assert config.pop("tuned") is False
        assert config.pop("training") is None
        (folder / "config.json").write_text(json.dumps(config))
        loaded = AVQCodebooks.from_pretrained(folder)
        assert loaded.projection_changes(LAYER) is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x: x.pop(LAYER), rf"projection_changes: {LAYER} is missing \(1 missing"),
            (lambda x: x.clear(), r"is missing \(6 missing in all\)"),
            (lambda x: x.update(mid={}), "projection_changes: mid is unexpected"),
            (lambda x: x[LAYER].pop("to_out.0.bias"), rf"{LAYER}: to_out\.0\.bias is missing"),
            (
                lambda x: x[LAYER].update({"to_q.bias": torch.zeros(16)}),
                rf"projection_changes of {LAYER}: to_q\.bias is unexpected",
            ),
            (
                lambda x: x[LAYER].update({"to_v.weight": torch.zeros(16, 1)}),  # broadcasts
                r"to_v\.weight must have shape \(16, 16\), but got \(16, 1\)",
            ),
            (
                lambda x: x[LAYER]["to_k.weight"][0].fill_(math.nan),
                rf"{LAYER}: to_k\.weight holds NaN or infinity",
            ),
        ],
    )
    def test_refuses(self, unet, changes, change, message):
        """Catches a run that saves what loading refuses."""
        change(changes)
        with pytest.raises(ValueError, match=message):
            random_codebooks(unet, projection_changes=changes)

    def test_file_and_config_disagree(self, folder, tuned_folder):
        """Catches a student loaded without its changes, or with those of nobody."""
        edit_config(folder, tuned=True)
        with pytest.raises(ValueError, match=r"projection_changes\.to_\w+ is missing \(30 missing"):
            AVQCodebooks.from_pretrained(folder)
        edit_config(tuned_folder, tuned=False)
        with pytest.raises(ValueError, match=r"is unexpected \(30 unexpected in all\)"):
            AVQCodebooks.from_pretrained(tuned_folder)


class TestOtherModel:
    @pytest.mark.parametrize(
        ("difference", "shape"),
        [
            ({"attention_head_dim": 4}, "4 heads of dim 4"),
            ({"block_out_channels": (32, 32, 64, 64)}, "2 heads of dim 16"),
        ],
    )
    def test_head_shape(self, codebooks, difference, shape):
        """Catches another head dim that hides behind the same number of heads."""
        message = f"another model: {LAYER} has {shape}, but its codebook has 2 of dim 8"
        with pytest.raises(ValueError, match=message):
            codebooks.layers_of(tiny_unet(**difference))

    def test_layer_names(self, codebooks):
        other = tiny_unet(layers_per_block=2)
        with pytest.raises(ValueError, match=r"another model: .*attn1 is missing"):
            codebooks.layers_of(other)
        with pytest.raises(ValueError, match=r"another model: .*attn1 is unexpected"):
            random_codebooks(other).layers_of(tiny_unet())
