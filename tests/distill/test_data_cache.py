"""The encoder, and the cache of what it encodes."""

import os
from dataclasses import replace
from io import BytesIO

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from tiny import three_level_pipe
from toy_data import (
    SCENES,
    SIZE,
    arguments,
    assert_same,
    encoder,
    make_stream,
    pictures,
    source,
    take,
)

from distill.data.encoder import Encoder
from distill.data.images import crop
from distill.data.sources import open_samples
from distill.data.stream import sample_order

pytestmark = pytest.mark.usefixtures("no_traces")


def test_encoder_is_the_pipeline():
    """Catches other pixel ranges, scaled latents, another layer of the text encoder."""
    pipe = three_level_pipe()
    parts = Encoder(pipe.vae, pipe.text_encoder, pipe.tokenizer)
    captions = ["a red fox", "", "a fox " * 40]  # 77 tokens hold less than 40 foxes
    images = [picture.resize((64, 64)) for picture in pictures()[:3]]
    pixels = torch.stack([crop(image, 64) for image in images])
    found = parts.encode(pixels, captions)
    with torch.no_grad():
        expected = pipe.vae.encode(pipe.image_processor.preprocess(images)).latent_dist
        states, _ = pipe.encode_prompt(captions, "cpu", 1, False)
    assert torch.allclose(found["text_states"], states, atol=1e-6)
    posterior = DiagonalGaussianDistribution(found["moments"])
    assert torch.allclose(posterior.mean, expected.mean, atol=1e-5)
    assert torch.allclose(posterior.std, expected.std, atol=1e-5)
    assert not any(value.requires_grad for value in found.values())
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_encoder_keeps_the_dtype_of_its_parts():
    parts = encoder()
    expected = parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])
    parts.vae.bfloat16()
    parts.text_encoder.bfloat16()
    found = parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])
    for name in found:
        assert not torch.equal(found[name], expected[name])
        assert torch.allclose(found[name], expected[name], rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_encoder_computes_in_half_precision_on_cuda():
    """Also catches pinned batches that are overwritten before they are copied."""
    samples, parts = open_samples(SCENES, SIZE), encoder()
    order = next(sample_order(20, **arguments(batch_size=60)))
    pixels = torch.stack([samples[index]["image"] for index in order])
    expected = parts.encode(pixels, [samples[index]["caption"] for index in order])
    parts.vae.cuda()
    parts.text_encoder.cuda()
    found = take(make_stream(replace(SCENES, workers=2), parts), 20)
    for name in found:
        assert found[name].device.type == "cuda"
        error = (found[name].cpu() - expected[name]).norm() / expected[name].norm()
        assert 1e-5 < error < 1e-2


def test_cache_equals_no_cache(tmp_path):
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    expected = take(make_stream(parts=parts), 9)
    found = take(make_stream(config, parts), 9)
    for name in found:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], found[name].half().float())
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-4)
    # 20 samples in shards of 8.
    shards = sorted(path.name for path in (tmp_path / "cache").rglob("*.safetensors"))
    assert shards == [f"shard-00000{number}.safetensors" for number in range(3)]

    parts.encode = None  # a complete cache needs no encoder
    resumed = take(make_stream(replace(config, workers=2), parts, first_sample=15), 4)
    assert_same(resumed, {name: value[15:] for name, value in found.items()})


def change_encoder(parts, key):
    if key == "vae":
        with torch.no_grad():
            parts.vae.encoder.conv_in.weight[0, 0, 0, 0] += 0.01
    elif key == "text_encoder":
        parts.text_encoder.config.hidden_act = "gelu"
    else:
        parts.tokenizer.add_tokens(["fox"])


def folders(root):
    return len([*root.iterdir()])


def test_another_encoder_gets_a_cache_of_its_own(tmp_path):
    """Catches a fingerprint without one of the three, and one of the state that a call leaves."""
    config = replace(SCENES, cache=str(tmp_path), num_samples=4)
    make_stream(config)
    parts = encoder()
    parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])  # leaves padding behind
    make_stream(config, parts)
    assert folders(tmp_path) == 1
    for count, key in enumerate(("vae", "text_encoder", "tokenizer"), 2):
        parts = encoder()
        change_encoder(parts, key)
        make_stream(config, parts)
        assert folders(tmp_path) == count


def same_size(path):
    """Another PNG of as many bytes."""
    other = BytesIO()
    Image.new("RGB", Image.open(path).size, "red").save(other, "png")
    return other.getvalue().ljust(path.stat().st_size, b"\0")


@pytest.mark.parametrize(
    ("kind", "file"), [("huggingface", "train.parquet"), ("folder", "e.txt"), ("folder", "e.png")]
)
def test_other_data_get_a_cache_of_their_own(kind, file, tmp_path):
    """Catches a fingerprint of the path alone, and images of an older file of the same name."""
    config = replace(source(kind, tmp_path), cache=str(tmp_path / "cache"))
    make_stream(config)
    make_stream(replace(config, workers=1))
    count = 1
    assert folders(tmp_path / "cache") == count
    if kind == "huggingface":
        for name, other in (("preprocessing", "linfusion"), ("num_samples", 4)):
            make_stream(replace(config, **{name: other}))
            count += 1
            assert folders(tmp_path / "cache") == count, name
    path = tmp_path / "data" / file
    state = path.stat()
    if kind == "huggingface":
        os.utime(path, (1, 1))  # as of another download
    else:
        path.write_bytes(path.read_bytes().upper() if file == "e.txt" else same_size(path))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    make_stream(config)
    make_stream(config, size=128)
    assert folders(tmp_path / "cache") == count + 2


def test_a_cache_that_lacks_a_process_share_is_refused(tmp_path):
    """As when each machine has a disk of its own."""
    with pytest.raises(ValueError, match=r"1 of 3 shards of the cache .* all processes share"):
        make_stream(replace(SCENES, cache=str(tmp_path / "cache")), num_processes=2)


def test_moments_beyond_half_precision_are_refused(tmp_path):
    parts = encoder()
    with torch.no_grad():
        parts.vae.quant_conv.bias += 1e6
    with pytest.raises(FloatingPointError, match="moments of samples 0 to 7 are not finite"):
        make_stream(replace(SCENES, cache=str(tmp_path / "cache")), parts)


def test_an_interrupted_build_continues(tmp_path):
    """Catches complete shards that are built again, and half a shard that is taken for one."""
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    with pytest.raises(KeyboardInterrupt):
        make_stream(config, Interrupted(parts))
    kept = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("shard-*")}
    assert len(kept) == 2
    next(iter(kept)).with_name(".writing-shard-000002.safetensors-1").write_text("half")
    found = take(make_stream(config, parts), 6)
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    assert not list((tmp_path / "cache").rglob(".writing-*"))
    other = replace(config, cache=str(tmp_path / "undisturbed"))
    assert_same(found, take(make_stream(other, parts), 6))


class Interrupted(Encoder):
    """An encoder that is interrupted in its third batch."""

    def __init__(self, parts):
        super().__init__(parts.vae, parts.text_encoder, parts.tokenizer)
        self.left = 2

    def encode(self, *batch):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().encode(*batch)
