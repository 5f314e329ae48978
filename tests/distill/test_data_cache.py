"""The encoder, and the cache of what it encodes."""

import json
import os
from dataclasses import replace

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from safetensors.torch import load_file, save_file
from tiny import tiny_pipe
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

from distill.data import cache
from distill.data.encoder import Encoder
from distill.data.images import crop
from distill.data.sources import open_samples
from distill.data.stream import sample_order
from distill.exceptions import DataError

pytestmark = pytest.mark.usefixtures("no_traces")


def test_encoder_is_the_pipeline():
    """Catches other pixel ranges, scaled latents, another layer of the text encoder."""
    pipe = tiny_pipe()
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
    shards = sorted(path.name for path in (tmp_path / "cache").glob("*.safetensors"))
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


@pytest.mark.parametrize("key", ["vae", "text_encoder", "tokenizer"])
def test_a_cache_of_another_encoder_is_refused(key, tmp_path):
    """Fails also where only keys that both fingerprints have are compared."""
    config = replace(SCENES, cache=str(tmp_path / "cache"), num_samples=4)
    make_stream(config)
    parts = encoder()
    parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])  # leaves padding behind
    make_stream(config, parts)
    change_encoder(parts, key)
    message = f"differs in {key}: delete it or choose another folder"
    with pytest.raises(ValueError, match=message):
        make_stream(config, parts)
    path = tmp_path / "cache" / "fingerprint.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({name: said[name] for name in said if name != key}))
    with pytest.raises(ValueError, match=message):
        make_stream(config)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"is damaged \(it holds list, not a mapping\); delete"):
        make_stream(config)


@pytest.mark.parametrize(
    ("kind", "file"), [("huggingface", "train.parquet"), ("folder", "e.txt"), ("folder", "e.png")]
)
def test_a_cache_of_other_data_is_refused(kind, file, tmp_path):
    """Catches a fingerprint of the path alone, and images of an older file of the same name."""
    config = replace(source(kind, tmp_path), cache=str(tmp_path / "cache"))
    make_stream(config)
    make_stream(replace(config, workers=1))
    if kind == "huggingface":
        others = {"preprocessing": "linfusion", "num_samples": 4, "caption_column": "unused"}
        for name, other in others.items():
            with pytest.raises(ValueError, match=f"differs in .*{name}.*: delete"):
                make_stream(replace(config, **{name: other}))
    if file == "e.txt":
        (tmp_path / "data" / file).write_text("another caption")
    else:
        os.utime(tmp_path / "data" / file, (1, 1))  # as of another download
    with pytest.raises(ValueError, match="differs in content: delete"):
        make_stream(config)
    with pytest.raises(ValueError, match=r"differs in .*image_size: delete"):
        make_stream(config, size=128)


def test_a_cache_of_another_format_is_refused(tmp_path, monkeypatch):
    """Catches shards of an older version, whose numbers mean something else."""
    make_stream(replace(SCENES, cache=str(tmp_path)))
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    with pytest.raises(ValueError, match="differs in format: delete"):
        make_stream(replace(SCENES, cache=str(tmp_path)))


@pytest.mark.parametrize("name", ["moments", "text_states"])
def test_a_cached_number_that_changed_is_found(name, tmp_path):
    """Catches a checksum of only the last of a sample's tensors."""
    config = replace(SCENES, cache=str(tmp_path), num_samples=4)
    make_stream(config)
    path = tmp_path / "shard-000000.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    tensors[name][2, 0] += 1
    save_file(tensors, path)
    with pytest.raises(DataError, match="sample 2 is not the one that was saved"):
        take(make_stream(config), 2)


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not a cache, but is not empty; choose another"):
        make_stream(replace(SCENES, cache=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


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


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def fill(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    config = replace(SCENES, cache=str(tmp_path / "cache"))
    with monkeypatch.context() as full:
        full.setattr(cache, "save_file", fill)
        with pytest.raises(
            OSError, match=r"shard-000000.* could not be written .* Free disk space"
        ):
            make_stream(config)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fingerprint.json"]
    take(make_stream(config), 1)


def test_an_interrupted_build_continues(tmp_path):
    """Catches complete shards that are built again, and half a shard that is taken for one."""
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    with pytest.raises(KeyboardInterrupt):
        make_stream(config, Interrupted(parts))
    (tmp_path / "cache" / ".writing-shard-000002.safetensors-1").write_text("half")
    kept = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("shard-*")}
    assert len(kept) == 2
    found = take(make_stream(config, parts), 6)
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    assert not list((tmp_path / "cache").glob(".writing-*"))
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
