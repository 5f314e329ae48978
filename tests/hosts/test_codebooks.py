"""`AVQCodebooks`: which layers it covers, what a saved folder holds, and what loading refuses."""

import json
import math
import re
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    CONFIG,
    LAYER,
    SD15_BLOCKS,
    own_codebooks,
    predict,
    random_changes,
    random_codebooks,
    sdxl_unet,
    tiny_unet,
    tuned_codebooks,
)
from torch import nn

from avq_diffusers import AVQCodebooks, AVQConfig, apply_avq, gather_codebooks, select_layers
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.hosts.codebooks import PROJECTION_PARAMETERS

CHILDREN = f"codebooks.{LAYER.replace('.', '__')}.child_codewords"
WEIGHTS = "diffusion_pytorch_model.safetensors"
OTHER_SIZE = Codebook(torch.zeros(2, 3, 8), torch.zeros(2, 3, 2, 8))
MEANS = replace(CONFIG, codewords="means")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codebooks")
    random_codebooks(tiny_unet()).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "codebooks")


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
        unet = tiny_unet(**SD15_BLOCKS, layers_per_block=2)
        layers = select_layers(unet)
        found = {layer.name.split(".transformer_blocks")[0]: layer.level for layer in layers}
        down = {f"down_blocks.{i}.attentions.{j}": i for i in range(3) for j in range(2)}
        up = {f"up_blocks.{i}.attentions.{j}": 3 - i for i in (1, 2, 3) for j in range(3)}
        assert found == down | up | {"mid_block.attentions.0": 3}
        assert {(layer.level, layer.num_heads, layer.head_dim) for layer in layers} == {
            *((0, 2, 8), (1, 2, 16), (2, 2, 32), (3, 2, 32))
        }
        assert all(unet.get_submodule(layer.name) is layer.attn for layer in layers)

    def test_sdxl(self):
        """Catches a rule that stops at the first transformer block, or assumes level 0."""
        layers = select_layers(sdxl_unet())
        count = {level: sum(layer.level == level for layer in layers) for level in range(3)}
        assert count == {0: 0, 1: 3 * 2, 2: 3 * 3 + 3}
        assert len({layer.name for layer in layers}) == len(layers)

    def test_exact_and_overrides(self, unet):
        """Catches a part of a name that matches, and other levels' layers."""
        names = [layer.name for layer in select_layers(unet, (0, 1))]
        expected = [name for name in names[1:] if not name.startswith("up_blocks.")]
        some = (names[0], "up_blocks")
        assert [layer.name for layer in select_layers(unet, (0, 1), some)] == expected
        good = ("0", "1", "up_blocks", "up_blocks.3.attentions.1", names[0])
        assert [layer.name for layer in select_layers(unet, (0, 1), (), good)] == names

    def test_names_without_effect(self, unet):
        for name in ("down_blocks.0.attention", "up_blocks.1.attentions.9", "", "mid_block"):
            with pytest.raises(ValueError, match=f"at the levels 0, 1, but got '{name}'; one of"):
                select_layers(unet, (0, 1), (name,))
        with pytest.raises(ValueError, match="exact leaves no layer of this model at"):
            select_layers(unet, (0, 1), ("down_blocks", "up_blocks"))
        for key in ("up_block.3", "7", "2", "01", "mid_block", "", "down_blocks.0"):
            message = rf"overrides must .* but got '{key}'; one of them is down_blocks\.1.* level 1"
            with pytest.raises(ValueError, match=message):
                select_layers(unet, (0, 1), ("down_blocks.0",), ["0", key])

    def test_cross_attention_in_attn1_is_left_out(self):
        """Catches `attn1` taken for self-attention where the block attends to text only."""
        unet = tiny_unet(only_cross_attention=(True, False, False, False))
        assert {layer.level for layer in select_layers(unet)} == {1, 3}

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
                tuned_codebooks,
                AVQConfig.parse(
                    "M4P2C2",
                    query_tile=16,
                    query_order="random",
                    levels=(0, 1),
                    exact=("up_blocks.3",),
                    key_norm=True,
                    overrides={"1": {"num_children": 3}},
                ),
                {"base_model": "tiny", "calibration": {"seed": 3, "layers": {LAYER: 0.5}}},
            ),
            (random_codebooks, replace(CONFIG, num_children=0, num_refined=0), {}),
            (own_codebooks, MEANS.changed(threshold=0.1), {"training": {"a": 7}}),
        ],
        ids=["tuned", "flat", "own"],
    )  # fmt: skip
    def test_everything_is_there_in_single_precision(self, unet, tmp_path, make, config, facts):
        """Catches names mangled on one side only, anything that is lost or left as zeros, and
        parameters rounded to the half precision that a script has made the default, or to the
        `dtype=` that users pass to every diffusers model."""
        codebooks = make(unet, config, **facts).project()
        if config.key_norm:
            nn.init.normal_(codebooks.key_norm(LAYER).weight)
        codebooks.save_pretrained(tmp_path)
        assert contents(tmp_path).keys() == {"config.json", WEIGHTS}
        written = json.loads((tmp_path / "config.json").read_text())
        assert (written["format_version"], written["tuned"]) == (2, make is not random_codebooks)
        assert written["layers"][0] == {"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 8}
        torch.set_default_dtype(torch.float16)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loaded = AVQCodebooks.from_pretrained(str(tmp_path), dtype=torch.float16)
        finally:
            torch.set_default_dtype(torch.float32)
        assert loaded.avq_config == codebooks.avq_config
        assert loaded.layer_specs == codebooks.layer_specs
        for name in ("base_model", "calibration", "training"):
            assert loaded.config[name] == facts.get(name)
        found = loaded.state_dict()
        assert found.keys() == codebooks.state_dict().keys()
        for name, tensor in codebooks.state_dict().items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], tensor)
        trained = {name for name, tensor in loaded.named_parameters() if tensor.requires_grad}
        assert all("key_norm" in name for name in trained)
        changes = loaded.projection_changes(LAYER)
        assert (loaded.codebook(LAYER) is None) == (make is own_codebooks)
        assert (changes is None) == (make is random_codebooks)
        assert list(changes or PROJECTION_PARAMETERS) == list(PROJECTION_PARAMETERS)
        expected = predict(apply_avq(unet, codebooks))
        assert torch.equal(predict(apply_avq(tiny_unet(), loaded)), expected)

    def test_arguments(self, folder, codebooks, tmp_path):
        """Catches those of the Hub refused for a folder, which scripts pass for either; those that
        diffusers passes to every model of a pipeline; and their usual values when saving."""
        arguments = {"revision": "main", "token": None, "force_download": False}
        loaded = AVQCodebooks.from_pretrained(
            folder.parent, subfolder=folder.name, local_files_only=True, **arguments
        )
        assert loaded.layer_specs == codebooks.layer_specs
        codebooks.save_pretrained(tmp_path / "a", True, safe_serialization=True, variant=None)
        assert contents(tmp_path / "a") == contents(folder)

    def test_moves_and_casts(self, unet):
        """Catches buffers, which `.to()` replaces under a UNet that uses them; digits lost to half
        precision and back; and a cast that also does not move."""
        codebooks = random_codebooks(unet, replace(CONFIG, key_norm=True))
        before = {name: tensor.clone() for name, tensor in codebooks.state_dict().items()}
        children = codebooks.codebook(LAYER).children
        place = children.data_ptr()
        nn.Sequential(codebooks.half()).to("cpu", torch.bfloat16)
        codebooks.to(memory_format=torch.channels_last)  # a copy, as on another device
        assert codebooks.codebook(LAYER).children is children
        assert children.data_ptr() != place
        for name, tensor in codebooks.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, before[name])
        codebooks.to("meta", torch.float16)
        assert {(x.device.type, x.dtype) for x in codebooks.parameters()} == {
            ("meta", torch.float32)
        }


def test_what_is_not_saved(codebooks, folder, tmp_path):
    """Catches a process that removes the config.json, which only the main one writes, and a folder
    that is saved without an error and cannot be loaded."""
    before = contents(folder)
    codebooks.codebook(LAYER).parents.add_(1)
    others = {"safe_serialization": False, "variant": "fp16", "max_shard_size": "1KB"}
    for place in (folder, tmp_path / "new"):
        codebooks.save_pretrained(place, is_main_process=False)
        for name, value in {**others, "use_flashpack": True}.items():
            with pytest.raises(ValueError, match=rf"saved with {name}=.* only, but got {value!r}"):
                codebooks.save_pretrained(place, **{name: value})
    assert contents(folder) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "fp16"}, "takes subfolder, dtype, revision.*, but got 'variant'"),
        ({"subfoldr": None}, "takes subfolder, dtype, revision.*, but got 'subfoldr'"),
        ({"subfolder": "other"}, r"there is no file .*other/config\.json"),
    ],
)
def test_loading_with(folder, arguments, message):
    """Catches a request that is dropped without a word where there is a local folder."""
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        AVQCodebooks.from_pretrained(folder, **arguments)


NO_FOLDERS = (
    "/no/such",
    "./codebooks",
    "runs/m64/codebooks",
    "",
    "a b",
    "x/",
    "user/..",
    "a" * 200,
)


@pytest.mark.parametrize("name", NO_FOLDERS)
def test_missing_folder(name):
    """Catches a path that is looked for on the Hub, whose errors speak of connections."""
    message = "^codebooks: (there is no folder|expected a folder or a Hub id)"
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        AVQCodebooks.from_pretrained(name)
    assert name in str(caught.value)


def test_home_and_working_directory(codebooks, tmp_path, monkeypatch):
    """An empty name is an argument that went missing; a dot is meant."""
    monkeypatch.setenv("HOME", str(tmp_path))
    codebooks.save_pretrained("~/mine")
    assert AVQCodebooks.from_pretrained("~/mine").layer_specs == codebooks.layer_specs
    monkeypatch.chdir(tmp_path / "mine")
    before = contents(tmp_path / "mine")
    codebooks.codebook(LAYER).parents.zero_()
    with pytest.raises(ValueError, match=r"^save_directory must name a folder, but got ''"):
        codebooks.save_pretrained("")
    assert contents(tmp_path / "mine") == before
    codebooks.save_pretrained(".")
    assert contents(tmp_path / "mine") != before


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


def other(make, **values):
    """The codebooks of `make`, with other values in their config."""

    def change(folder):
        make(tiny_unet()).save_pretrained(folder)
        config(**values)(folder)

    return change


def of_dtype(dtype):
    def change(content):
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].replace(b'"F32"', f'"{dtype}"'.encode())
        return len(header).to_bytes(8, "little") + header + content[8 + length :]

    return written(WEIGHTS, change)


LARGE = {"name": LAYER, "level": 0, "num_heads": 2, "head_dim": 10**30}
OWN = {"own_codewords": True, "avq": {"codewords": "means", "levels": [0, 1]}}
DAMAGES = [
    (config(format_version=1), "format version 2 are supported, but got version 1"),
    (config(_class_name="UNet2DConditionModel"), "of AVQCodebooks, but got one of UNet2DCond"),
    (config(avq={"num_parents": 4, "parents": 4}), "unknown AVQConfig keys: parents"),
    (config(avq={"num_parents": 10**30}), "num_parents must be at most 2147483647, but got 1"),
    (config(layers=[LARGE]), "json: head_dim of a layer must be at most 2147483647, but got 1"),
    (
        config(avq={"num_parents": 50, "num_refined": 2}),
        r"must have shape \(2, 50, .*but got \(2, 4, ",
    ),
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
    (written(WEIGHTS, lambda x: x[:-1] + bytes([x[-1] ^ 1])), "does not hold the tensors that its"),
    *((of_dtype(x), rf"{WEIGHTS}.{{0,200}}$") for x in ("F7", "F4", "F8_E8M0", "C64", "BOOL")),
    # A student without its changes, with those of nobody, and stored codewords that are dropped.
    (other(random_codebooks, tuned=True), r"projection_changes\.to_\w+ is missing \(30 missing"),
    (other(tuned_codebooks, tuned=False), r"is unexpected \(30 unexpected in all\)"),
    (other(tuned_codebooks, **OWN), "codewords is unexpected"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_damages(folder, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message):
        AVQCodebooks.from_pretrained(folder)


@pytest.mark.parametrize(("error", "warned"), [(0.5e-3, False), (1.5e-3, True), (0.3, True)])
def test_children_that_do_not_average_to_their_parent(codebooks, tmp_path, error, warned):
    """Catches another tolerance, an error of one parent that is averaged away, and a projection
    that moves the wrong tensor."""
    codebook = codebooks.codebook(LAYER)
    parents, children = codebook.parents.clone(), codebook.children[0, 1]
    offset = children[0] - children[1]
    distances = codebook.children[0] - codebook.parents[0, :, None]
    children[:, 0] += error * distances.square().sum(-1).mean().sqrt()
    codebooks.save_pretrained(tmp_path)
    found = warned_of(lambda: AVQCodebooks.from_pretrained(tmp_path))
    message = rf"by up to {error:.2g} of .*AVQCodebooks.project\(\)"
    assert [bool(re.search(message, one)) for one in found] == [True] * warned
    codebooks.project().save_pretrained(tmp_path)
    assert not warned_of(lambda: AVQCodebooks.from_pretrained(tmp_path))
    assert torch.equal(codebook.parents, parents)
    torch.testing.assert_close(codebook.children.mean(2), parents)
    torch.testing.assert_close(children[0] - children[1], offset)


def test_children_equal_to_their_parent(codebooks, tmp_path):
    """Catches 0 / 0 in a layer that has not moved yet, and that NaN hiding another layer."""
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
        ("change", "message"),
        [
            (lambda x, _: x.pop(LAYER), f"codebooks: {LAYER} is missing"),
            (lambda x, _: x.update(mid=OTHER_SIZE), "codebooks: mid is unexpected"),
            (lambda x, _: x.update({LAYER: OTHER_SIZE}), r"have shape \(2, 4, 8\), but got"),
            (lambda _, x: x.pop(LAYER), rf"projection_changes: {LAYER} is missing \(1 missing"),
            (
                lambda _, x: x[LAYER].update({"to_v.weight": torch.zeros(16, 1)}),  # broadcasts
                r"to_v\.weight must have shape \(16, 16\), but got \(16, 1\)",
            ),
            (
                lambda _, x: x[LAYER]["to_k.weight"][0].fill_(math.nan),
                rf"{LAYER}: to_k\.weight holds NaN or infinity",
            ),
        ],
    )
    def test_layers(self, unet, codebooks, change, message):
        """Catches layers left out in silence, and a run that saves what loading refuses."""
        parts = {name: codebooks.codebook(name) for name in codebooks.layer_specs}
        changes = random_changes(unet)
        change(parts, changes)
        with pytest.raises(ValueError, match=message):
            gather_codebooks(unet, CONFIG, parts, projection_changes=changes)

    @pytest.mark.parametrize(
        ("config", "changes", "message"),
        [
            (CONFIG, {}, "own codewords: codewords='stored' needs codebooks"),
            (replace(MEANS, key_norm=True), {}, "own codewords: key_norm needs codebooks"),
            (MEANS, None, "own codewords: without codebooks there must be projection changes"),
            (MEANS, {}, r"projection_changes: .* is missing \(6 missing in all\)"),
            (replace(MEANS, overrides={"up_block.3": {}}), {}, r"but got 'up_block\.3'"),
        ],
    )
    def test_own_codewords(self, unet, config, changes, message):
        with pytest.raises(ValueError, match=message):
            gather_codebooks(unet, config, None, projection_changes=changes)


@pytest.mark.parametrize(
    ("made_for", "model", "warns"),
    [
        ("runwayml/sd15", "other/sd15", False),
        ("runwayml/sd15", "stabilityai/sd21", True),
        ("runwayml/sd15", None, False),
        ("my-folder", "stabilityai/sd21", False),
        ("./my-folder", "stabilityai/sd21", False),
    ],
)
def test_names_of_another_model(pipe, made_for, model, warns):
    """Where shapes are equal, only names tell models apart."""
    codebooks = random_codebooks(pipe.unet, base_model=made_for)
    pipe.register_to_config(_name_or_path=model)
    said = [x for x in warned_of(lambda: apply_avq(pipe, codebooks)) if "were made for" in x]
    assert len(said) == warns
    assert not warns or (made_for in said[0] and model in said[0])
