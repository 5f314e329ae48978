"""`AVQCodebooks`: which layers it covers, what a saved folder holds, and what loading refuses."""

import json
import math
import pickle
import re
import warnings
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from tiny import (
    CONFIG,
    LAYER,
    own_codebooks,
    predict,
    random_changes,
    random_codebooks,
    sdxl_unet,
    tiny_unet,
    tuned_codebooks,
)
from torch import nn

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    gather_codebooks,
    select_layers,
    summary,
)
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.hosts.codebooks import PROJECTION_PARAMETERS

CHILDREN = f"codebooks.{LAYER.replace('.', '__')}.child_codewords"
WEIGHTS = "diffusion_pytorch_model.safetensors"
OTHER_SIZE = Codebook(torch.zeros(2, 3, 8), torch.zeros(2, 3, 2, 8))
MEANS = replace(CONFIG, codewords="means")
KEY_NORM = replace(CONFIG, key_norm=True)


class WithCodebooks(DiffusionPipeline):
    """A pipeline that holds codebooks among its models."""

    def __init__(self, codebooks):
        super().__init__()
        self.register_modules(codebooks=codebooks)


@pytest.fixture
def folder(codebooks, tmp_path):
    codebooks.save_pretrained(tmp_path / "codebooks")
    return tmp_path / "codebooks"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def warned_of(action) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in found]


class TestSelectLayers:
    def test_sd15(self):
        """Catches levels of up blocks counted forwards, and head dim read as head count."""
        unet = tiny_unet(layers_per_block=2)
        layers = select_layers(unet)
        found = {layer.name.split(".transformer_blocks")[0]: layer.level for layer in layers}
        down = {f"down_blocks.{i}.attentions.{j}": i for i in range(3) for j in range(2)}
        up = {f"up_blocks.{i}.attentions.{j}": 3 - i for i in (1, 2, 3) for j in range(3)}
        assert found == down | up | {"mid_block.attentions.0": 3}
        assert {(layer.level, layer.num_heads, layer.head_dim) for layer in layers} == {
            *((0, 2, 8), (1, 2, 16), (2, 2, 32), (3, 2, 32)),
        }
        assert all(unet.get_submodule(layer.name) is layer.attn for layer in layers)

    def test_sdxl(self):
        """Catches a rule that stops at the first transformer block, or assumes level 0."""
        layers = select_layers(sdxl_unet())
        count = {level: sum(layer.level == level for layer in layers) for level in range(3)}
        assert count == {0: 0, 1: 5 * 2, 2: 5 * 3 + 3}
        assert len({layer.name for layer in layers}) == len(layers)

    def test_exact_and_overrides(self, unet):
        """Catches a part of a name that matches, and other levels' layers."""
        names = [layer.name for layer in select_layers(unet, (0, 1))]
        expected = [name for name in names[1:] if not name.startswith("up_blocks.")]
        some = (names[0], "up_blocks")
        assert [layer.name for layer in select_layers(unet, (0, 1), some)] == expected
        good = ("0", "1", "up_blocks", "up_blocks.3.attentions.1", names[0])
        assert [layer.name for layer in select_layers(unet, (0, 1), (), good)] == names

    @pytest.mark.parametrize(
        ("exact", "overrides", "message"),
        [
            *(
                ((name,), (), f"at the levels 0, 1, but got '{name}'; one of")
                for name in ("down_blocks.0.attention", "up_blocks.1.attentions.9", "", "mid_block")
            ),
            (("down_blocks", "up_blocks"), (), "exact leaves no layer of this model at"),
            *(
                (("down_blocks.0",), ("0", key), f"but got '{key}'; one of them is down_blocks.1")
                for key in ("up_block.3", "7", "2", "01", "mid_block", "", "down_blocks.0")
            ),
        ],
    )
    def test_names_without_effect(self, unet, exact, overrides, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            select_layers(unet, (0, 1), exact, overrides)

    def test_cross_attention_in_attn1_is_left_out(self):
        """Catches `attn1` taken for self-attention where the block attends to text only."""
        unet = tiny_unet(only_cross_attention=(True, False, False, False))
        assert {layer.level for layer in select_layers(unet)} == {1, 2, 3}

    def test_other_things(self):
        unet = tiny_unet()
        pair = nn.ModuleDict({"student": tiny_unet(), "teacher": unet})
        strange = tiny_unet()
        strange.extra = strange.down_blocks[0].attentions[0]
        del strange.down_blocks[0]
        for thing, message in (
            (nn.Linear(2, 2), "AVQ does not know the attention of Linear; it knows"),
            ("unet", "expected a model, but got str"),
            (pair, "expected one UNet, but ModuleDict holds student, teacher"),
            (strange, r"but UNet2DConditionModel has extra\.transformer_blocks"),
        ):
            with pytest.raises(TypeError, match=message):
                select_layers(thing)


class TestRoundTrip:
    @pytest.mark.parametrize(
        ("make", "config", "facts"),
        [
            (
                random_codebooks,
                replace(KEY_NORM, overrides={"1": {"num_children": 3}}),
                {"base_model": "tiny", "calibration": {"seed": 3, "layers": {LAYER: 0.5}}},
            ),
            (random_codebooks, replace(CONFIG, num_children=0, num_refined=0), {}),
            (tuned_codebooks, CONFIG, {"training": {"steps": 7}}),
            (own_codebooks, replace(MEANS, num_updates=1, exact_keys=8), {}),
        ],
        ids=["overrides", "flat", "tuned", "own"],
    )
    def test_same_tensors_and_config(self, unet, tmp_path, make, config, facts):
        """Catches names mangled on one side only, and anything that is lost or left as zeros."""
        codebooks = make(unet, config, **facts)
        if config.key_norm:
            nn.init.normal_(codebooks.key_norm(LAYER).weight)
        codebooks.save_pretrained(tmp_path)
        assert contents(tmp_path).keys() == {"config.json", WEIGHTS}
        written = json.loads((tmp_path / "config.json").read_text())
        assert (written["format_version"], written["tuned"]) == (2, make is not random_codebooks)
        assert written["layers"][0] == {"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 8}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = AVQCodebooks.from_pretrained(str(tmp_path))
        assert loaded.avq_config == config
        assert loaded.layer_specs == codebooks.layer_specs
        for name in ("base_model", "calibration", "training"):
            assert loaded.config[name] == facts.get(name)
        found = loaded.state_dict()
        assert found.keys() == codebooks.state_dict().keys()
        for name, tensor in codebooks.state_dict().items():
            assert torch.equal(found[name], tensor)
        trained = {name for name, tensor in loaded.named_parameters() if tensor.requires_grad}
        assert all("key_norm" in name for name in trained)
        assert (loaded.codebook(LAYER) is None) == (make is own_codebooks)
        changes = loaded.projection_changes(LAYER)
        assert list(changes or PROJECTION_PARAMETERS) == list(PROJECTION_PARAMETERS)
        assert (changes is None) == (make is random_codebooks)
        assert loaded.project() is loaded

    def test_the_image(self, unet, tmp_path):
        """Catches anything that matters to the image and is not in the file."""
        config = AVQConfig(4, 2, 2, query_tile=16, query_order="random", levels=(0, 1),
                           exact=("down_blocks.1", "up_blocks.3"), key_norm=True,
                           overrides={"1": {"num_refined": 1}})  # fmt: skip
        codebooks = tuned_codebooks(unet, config)
        for name in codebooks.layer_specs:
            nn.init.normal_(codebooks.key_norm(name).weight)
        expected = predict(apply_avq(unet, codebooks))
        codebooks.save_pretrained(tmp_path)
        loaded = AVQCodebooks.from_pretrained(tmp_path)
        assert torch.equal(predict(apply_avq(tiny_unet(), loaded)), expected)
        ran = [row.name for row in summary(unet).rows if row.calls]
        assert [name[:13] for name in ran] == ["down_blocks.0", "up_blocks.2.a", "up_blocks.2.a"]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_parameters_are_single_precision(self, tmp_path, dtype):
        """Catches parameters rounded to the half precision that a script has made the default, or
        to the `dtype=` that users pass to every diffusers model."""
        codebooks = tuned_codebooks(tiny_unet(), KEY_NORM)
        codebooks.save_pretrained(tmp_path)
        codeword = codebooks.codebook(LAYER).parents
        assert dtype == torch.float64 or not torch.equal(codeword, codeword.to(dtype).float())
        torch.set_default_dtype(dtype)
        try:
            loaded = AVQCodebooks.from_pretrained(tmp_path, dtype=dtype).state_dict()
        finally:
            torch.set_default_dtype(torch.float32)
        for name, tensor in codebooks.state_dict().items():
            assert loaded[name].dtype == torch.float32, name
            assert torch.equal(loaded[name], tensor), name

    def test_arguments(self, folder, codebooks, tmp_path):
        """Catches those of the Hub refused for a folder, which scripts pass for either; those that
        diffusers passes to every model of a pipeline; and their usual values when saving."""
        arguments = {"revision": "main", "token": None, "local_files_only": True}
        loaded = AVQCodebooks.from_pretrained(
            folder.parent, subfolder=folder.name, force_download=False, **arguments
        )
        assert loaded.layer_specs == codebooks.layer_specs
        WithCodebooks(codebooks).save_pretrained(tmp_path / "pipe")
        loaded = WithCodebooks.from_pretrained(tmp_path / "pipe").codebooks
        assert torch.equal(loaded.codebook(LAYER).parents, codebooks.codebook(LAYER).parents)
        codebooks.save_pretrained(tmp_path / "a", True, safe_serialization=True, variant=None)
        assert contents(tmp_path / "a") == contents(folder)

    def test_moving_keeps_the_parameters(self, codebooks):
        """Catches buffers: `.to()` replaces those, and a UNet that uses them would not notice."""
        before = codebooks.codebook(LAYER).children
        place = before.data_ptr()
        codebooks.to(memory_format=torch.channels_last)  # a copy, as on another device
        assert codebooks.codebook(LAYER).children is before
        assert before.data_ptr() != place
        assert not before.requires_grad

    def test_casts_leave_float32(self, unet):
        """Catches digits lost to half precision and back, and a cast that also does not move."""
        codebooks = random_codebooks(unet, KEY_NORM)
        before = {name: tensor.clone() for name, tensor in codebooks.state_dict().items()}
        nn.Sequential(codebooks.half()).to("cpu", torch.bfloat16)
        for name, tensor in codebooks.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before[name])
        predict(apply_avq(unet, codebooks))
        codebooks.to("meta", torch.float16)
        assert {(x.device.type, x.dtype) for x in codebooks.parameters()} == {
            ("meta", torch.float32)
        }

    def test_a_config_that_does_not_speak_of_changes(self, folder):
        config = json.loads((folder / "config.json").read_text())
        assert (config.pop("tuned"), config.pop("training")) == (False, None)
        (folder / "config.json").write_text(json.dumps(config))
        assert AVQCodebooks.from_pretrained(folder).projection_changes(LAYER) is None


class TestPlaces:
    def test_other_processes_write_nothing(self, codebooks, folder, tmp_path):
        """Catches one that removes the config.json, which only the main process writes."""
        before = contents(folder)
        codebooks.codebook(LAYER).parents.add_(1)
        for place in (folder, tmp_path / "new"):
            codebooks.save_pretrained(place, is_main_process=False)
        assert contents(folder) == before
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("name", "value"),
        [("safe_serialization", False), ("variant", "fp16"), ("max_shard_size", "1KB"),
         ("use_flashpack", True)],
    )  # fmt: skip
    def test_files_that_loading_does_not_read(self, codebooks, folder, tmp_path, name, value):
        """Catches a folder that is saved without an error and cannot be loaded."""
        before = contents(folder)
        message = rf"codebooks are saved with {name}=.* only, but got {value!r}\."
        for place in (folder, tmp_path / "new"):
            with pytest.raises(ValueError, match=message):
                codebooks.save_pretrained(place, **{name: value})
        assert contents(folder) == before
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("variant", "fp16", ValueError, "one safetensors file without a variant.*variant"),
            ("use_safetensors", False, ValueError, "one safetensors .*use_safetensors"),
            ("subfoldr", None, TypeError, "takes subfolder, dtype, revision.*, but got 'subfoldr'"),
            ("repo_type", None, TypeError, "takes subfolder, .*, but got 'repo_type'"),
        ],
    )
    def test_loading_with(self, folder, name, value, error, message):
        """Catches a request that is dropped without a word where there is a local folder."""
        with pytest.raises(error, match=message):
            AVQCodebooks.from_pretrained(folder, **{name: value})

    @pytest.mark.parametrize("name", ["/no/such/folder", "./codebooks", "runs/m64/codebooks"])
    def test_missing_folder(self, name):
        """Catches a path that is looked for on the Hub, whose errors speak of connections."""
        with pytest.raises(FileNotFoundError, match=f"there is no folder {name}"):
            AVQCodebooks.from_pretrained(name)

    @pytest.mark.parametrize("name", ["", "a b", "x/", "user/na me", "user/..", "-x", "a" * 200])
    def test_bad_hub_id(self, name):
        with pytest.raises((ValueError, FileNotFoundError), match=r"^codebooks: ") as caught:
            AVQCodebooks.from_pretrained(name)
        assert str(caught.value).count(". ") == 0

    def test_home(self, codebooks, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        codebooks.save_pretrained("~/mine")
        assert (tmp_path / "mine" / "config.json").is_file()
        assert AVQCodebooks.from_pretrained("~/mine").layer_specs == codebooks.layer_specs
        with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path}/other"):
            AVQCodebooks.from_pretrained("~/other")

    def test_saving_into_the_working_directory(self, codebooks, tmp_path, monkeypatch):
        """An empty name is an argument that went missing; a dot is meant."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"^save_directory must name a folder, but got ''"):
            codebooks.save_pretrained("")
        assert not contents(tmp_path)
        codebooks.save_pretrained(".")
        assert len(contents(tmp_path)) == 2


# What is wrong with a folder


def config(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def tensors(change):
    def change_file(folder):
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return change_file


def written(file, change):
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def without(file):
    return lambda folder: (folder / file).unlink()


def others(make, **values):
    """The codebooks of `make`, with other values in their config."""

    def change(folder):
        make(tiny_unet()).save_pretrained(folder)
        config(**values)(folder)

    return change


def exchanged(folder):
    weights = folder / WEIGHTS
    content = (folder / "config.json").read_bytes()
    random_codebooks(tiny_unet(), seed=7).save_pretrained(folder)
    assert weights.is_file()
    (folder / "config.json").write_bytes(content)


def of_dtype(dtype):
    """Its header is as many bytes longer or shorter as the name of the dtype."""

    def change(content):
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].replace(b'"F32"', f'"{dtype}"'.encode())
        return len(header).to_bytes(8, "little") + header + content[8 + length :]

    return written(WEIGHTS, change)


LARGE = {"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 10**30}
DAMAGES = [
    (config(format_version=1), "format version 2 are supported, but got version 1"),
    (config(_class_name="UNet2DConditionModel"), "of AVQCodebooks, but got one of UNet2DCond"),
    (config(avq={"num_parents": 4, "parents": 4}), "unknown AVQConfig keys: parents"),
    (config(avq={"num_parents": 10**30}), "num_parents must be at most 2147483647, but got 1"),
    (config(layers=[LARGE]), "json: head_dim of a layer must be at most 2147483647, but got 1"),
    (config(avq={"num_parents": 5}), r"must have shape \(2, 5, .*but got \(2, 4, "),
    (config(calibration=[3]), r"calibration must be a mapping or None, but got \[3\]"),
    (written("config.json", lambda _: b"{"), r"config\.json is not a JSON file"),
    *(
        (tensors(lambda x, value=value: x[CHILDREN].view(-1)[5:6].fill_(value)), "NaN or infinity")
        for value in (math.nan, math.inf)
    ),
    (tensors(lambda x: x.update({CHILDREN: x[CHILDREN].int()})), "of 16 bits or more, but got tor"),
    (tensors(lambda x: (x.popitem(), x.popitem())), r"_codewords is missing \(2 missing in all\)"),
    (tensors(lambda x: x.update(extra=torch.zeros(1))), r"extra is unexpected \(1 unexpected in"),
    # Read as far as it goes, or as long as names, shapes and numbers are plausible.
    (written(WEIGHTS, lambda x: x[: len(x) // 2]), "is not a complete safetensors file"),
    (written(WEIGHTS, lambda x: x[:-1] + bytes([x[-1] ^ 1])), "the tensors that its config"),
    (exchanged, "does not hold the tensors that its config"),
    *((of_dtype(x), rf"{WEIGHTS}.{{0,200}}$") for x in ("F7", "F4", "F8_E8M0", "C64", "BOOL")),
    # A student without its changes, with those of nobody, and stored codewords that are dropped.
    (others(random_codebooks, tuned=True), r"projection_changes\.to_\w+ is missing \(30 missing"),
    (others(tuned_codebooks, tuned=False), r"is unexpected \(30 unexpected in all\)"),
    (
        others(
            tuned_codebooks,
            own_codewords=True,
            avq={"num_parents": 4, "levels": [0, 1], "codewords": "means"},
        ),
        "codewords is unexpected",
    ),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_damages(folder, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message):
        AVQCodebooks.from_pretrained(folder)


@pytest.mark.parametrize("file", ["config.json", WEIGHTS])
def test_only_safetensors_are_read(folder, file):
    """Catches diffusers' loader, which falls back to torch.load and follows a shard index."""
    marker = folder / "was-unpickled"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    name = "diffusion_pytorch_model.bin"
    (folder / name).write_bytes(pickle.dumps(Payload()))
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / WEIGHTS), name)}
    (folder / (WEIGHTS + ".index.json")).write_text(json.dumps(index))
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no file .*{file}"):
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
        assert not warned_of(lambda: AVQCodebooks.from_pretrained(tmp_path))
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
        found = warned_of(lambda: AVQCodebooks.from_pretrained(tmp_path))
        assert [f"by up to {error:.2g} of" in one for one in found] == [True] * warned

    def test_children_equal_to_their_parent(self, unet, tmp_path):
        """Catches 0 / 0 in a layer that has not moved yet, and that NaN hiding another layer."""
        codebooks = random_codebooks(unet)
        for name in codebooks.layer_specs:
            codebook = codebooks.codebook(name)
            codebook.children.copy_(codebook.parents[:, :, None].expand_as(codebook.children))
        codebooks.save_pretrained(tmp_path)
        assert not warned_of(lambda: AVQCodebooks.from_pretrained(tmp_path))
        codebook.children[0, 0, 0] += 1  # of the last layer
        codebooks.save_pretrained(tmp_path)
        (found,) = warned_of(lambda: AVQCodebooks.from_pretrained(tmp_path))
        assert "children do not average to their parent" in found


class TestGathering:
    def test_copies(self, unet, codebooks):
        """Catches codebooks that share memory with what they were built from, such as the UNet that
        training goes on with; and parameters of mixed dtypes, which one file must not hold."""
        parts = {name: codebooks.codebook(name) for name in codebooks.layer_specs}
        changes = random_changes(unet)
        half = changes[LAYER]["to_q.weight"] = changes[LAYER]["to_q.weight"].half()
        expected = half.float()
        built = gather_codebooks(unet, CONFIG, parts, projection_changes=changes)
        codebooks.codebook(LAYER).parents.zero_()
        half.zero_()
        assert built.codebook(LAYER).parents.any()
        found = built.projection_changes(LAYER)["to_q.weight"]
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        ("change", "overrides", "message"),
        [
            (lambda parts: parts.pop(LAYER), {}, f"codebooks: {LAYER} is missing"),
            (lambda parts: parts.update(mid=OTHER_SIZE), {}, "codebooks: mid is unexpected"),
            (lambda parts: parts.update({LAYER: OTHER_SIZE}), {}, r"shape \(2, 4, 8\), but got"),
            (lambda parts: None, {"up_block.3": {"num_refined": 1}}, r"but got 'up_block\.3'"),
        ],
    )
    def test_codebooks(self, unet, codebooks, change, overrides, message):
        """Catches layers left out in silence, and overrides by a misspelt name without effect."""
        parts = {name: codebooks.codebook(name) for name in codebooks.layer_specs}
        change(parts)
        with pytest.raises(ValueError, match=message):
            gather_codebooks(unet, replace(CONFIG, overrides=overrides), parts)

    @pytest.mark.parametrize(
        ("config", "changes", "message"),
        [
            (CONFIG, {}, "own codewords: codewords='stored' needs codebooks"),
            (replace(MEANS, key_norm=True), {}, "own codewords: key_norm needs codebooks"),
            (MEANS, None, "own codewords: without codebooks there must be projection changes"),
            (MEANS, {}, r"projection_changes: .* is missing \(6 missing in all\)"),
        ],
    )
    def test_own_codewords(self, unet, config, changes, message):
        with pytest.raises(ValueError, match=message):
            gather_codebooks(unet, config, None, projection_changes=changes)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x: x.pop(LAYER), rf"projection_changes: {LAYER} is missing \(1 missing"),
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
    def test_changes(self, unet, change, message):
        """Catches a run that saves what loading refuses."""
        changes = random_changes(unet)
        change(changes)
        with pytest.raises(ValueError, match=message):
            random_codebooks(unet, projection_changes=changes)


class TestOtherModel:
    @pytest.mark.parametrize(
        ("model", "made_for", "message"),
        [
            # Another head dim hides behind the same number of heads.
            ({"attention_head_dim": 4}, {}, f"{LAYER} has 4 heads of dim 4, but its codebook has"),
            ({"block_out_channels": (32, 32, 64, 64)}, {}, r"2 heads of dim 16, .* 2 of dim 8\."),
            ({"layers_per_block": 2}, {}, r"attn1 is missing"),
            ({}, {"layers_per_block": 2}, r"attn1 is unexpected"),
        ],
    )
    def test_layers(self, model, made_for, message):
        codebooks = random_codebooks(tiny_unet(**made_for))
        with pytest.raises(ValueError, match=f"codebooks of another model: .*{message}"):
            apply_avq(tiny_unet(**model), codebooks)

    def test_not_codewords(self, unet, codebooks):
        codebooks.codebook(LAYER).parents[0, 0, 0] = math.nan
        with pytest.raises(ValueError, match=r"parents .*finite"):
            apply_avq(unet, codebooks)

    @pytest.mark.parametrize(
        ("made_for", "model", "warns"),
        [
            ("runwayml/stable-diffusion-v1-5", "other/stable-diffusion-v1-5", False),
            ("runwayml/stable-diffusion-v1-5", "stabilityai/stable-diffusion-2-1", True),
            ("runwayml/stable-diffusion-v1-5", None, False),
            ("my-folder", "stabilityai/stable-diffusion-2-1", False),
            ("./my-folder", "stabilityai/stable-diffusion-2-1", False),
        ],
    )
    def test_names(self, pipe, made_for, model, warns):
        """Where shapes are equal, only names tell models apart."""
        codebooks = random_codebooks(pipe.unet, base_model=made_for)
        pipe.register_to_config(_name_or_path=model)
        said = [x for x in warned_of(lambda: apply_avq(pipe, codebooks)) if "were made for" in x]
        assert len(said) == warns
        assert not warns or (made_for in said[0] and model in said[0])
