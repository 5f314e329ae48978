"""A fresh process: importing changes nothing; the core needs no network and unpickles nothing."""

import os
import subprocess
import sys

import numpy as np
import torch
from PIL import Image
from tiny import random_codebooks, two_level_pipe
from tiny_training import ROOT, RUN_CONFIG
from torch import nn

from avq_diffusers import AVQCodebooks, AVQConfig, ErrorProfile, apply_avq
from avq_diffusers.hosts import LayerSpec
from avq_diffusers.hosts.measuring.profile import LayerEffects, Measured, Part
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.config_file import load_config

ARGUMENTS = ("a red fox", "--steps", "1", "--seed", "3", "--device", "cpu")

# Audit hooks see what Python and its libraries do, and cannot be taken back.
CORE = """
import pickle, socket, sys, warnings
from pathlib import Path
for name in ("triton", "torchvision", "matplotlib"):
    sys.modules[name] = None

import torch, torch._dynamo, transformers  # torch fills tables by pickle
from diffusers import StableDiffusionPipeline  # transformers says here that it lacks torchvision
from diffusers.models import attention_dispatch

def refuse(event, arguments):
    if event in ("socket.__new__", "socket.getaddrinfo", "pickle.find_class"):
        raise RuntimeError(f"{event} {arguments}")

def flags():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.initial_seed(),
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch._dynamo.config.get_config_copy(), list(warnings.filters), list(sys.path),
        attention_dispatch._AttentionBackendRegistry.list_backends(),
    )

def mark():
    for stream in (sys.stdout, sys.stderr):
        print("-----", file=stream, flush=True)

sys.addaudithook(refuse)
before = flags()
mark()
import avq_diffusers
for name in avq_diffusers.__all__:
    getattr(avq_diffusers, name)
import avq_diffusers.hosts.verbs
mark()
assert flags() == before
assert not torch.cuda.is_initialized()
assert "avq" not in transformers.AttentionInterface().valid_keys()

from avq_diffusers import ErrorProfile
from avq_diffusers.cli import images
from avq_diffusers.cli.main import main
from distill.checkpointing import checkpoint
from distill.data.cache import open_cache

images.TIMED_PAIRS = 2
place = Path(sys.argv.pop(1))
try:
    main()
except SystemExit as exit_:
    assert not exit_.code, exit_.code

found = checkpoint.newest(place / "run")
assert found.tensors("model")["weight"].shape == (2, 2)
assert ErrorProfile.load(place / "profile.json").within(0.5)

def encode(batches):
    for batch in batches:
        yield {"moments": torch.ones(len(batch), 2)}

sizes = {"num_samples": 4, "batch_size": 2, "process_index": 0, "num_processes": 1}
for _ in range(2):  # built, then read
    assert open_cache(place / "cache", {}, encode, **sizes)[3]["moments"].tolist() == [1, 1]

for forbidden in (socket.socket, lambda: pickle.loads(pickle.dumps(Path()))):
    try:
        forbidden()
    except RuntimeError:
        continue
    raise AssertionError("the hook is deaf")
print("all of it")
"""


def test_the_core_needs_no_network_and_unpickles_nothing(tmp_path):
    """Catches prints, global flags, CUDA contexts and hard needs for extras when importing; then a
    download, a telemetry call, a hub look-up of a local folder, and `torch.load`; and an image that
    depends on the process it is made in."""
    pipe = two_level_pipe()
    pipe.save_pretrained(tmp_path / "model")
    random_codebooks(pipe.unet).save_pretrained(tmp_path / "codebooks")
    measured = Measured([0.125, 0.25], [32.0, 8.0], [0.5, 0.25])
    layer = LayerEffects(LayerSpec("layer", 0, 2, 8), 64, 1.0, {1000: measured})
    profile = ErrorProfile(AVQConfig(), (layer,), {1000: Part(1.0)}, (1e-4, 4e-4))
    profile.save(tmp_path / "profile.json")
    config = load_config(RUN_CONFIG, DistillConfig, [])
    states = {"model": nn.Linear(2, 2).state_dict()}
    checkpoint.save(tmp_path / "run", 1, states, config=config, keep=1)

    command = [sys.executable, "-c", CORE, str(tmp_path), "generate", *ARGUMENTS]
    command += ["--model", str(tmp_path / "model"), "--codebooks", str(tmp_path / "codebooks")]
    command += ["--output", str(tmp_path / "fox.png")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = kept | one_thread | {"XDG_CACHE_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of it\n")
    for stream in (done.stdout, done.stderr):
        assert stream.split("-----")[1].strip() == ""

    apply_avq(pipe, AVQCodebooks.from_pretrained(tmp_path / "codebooks"), route="always")
    generator = torch.Generator().manual_seed(3)
    with torch.backends.mkldnn.flags(enabled=True):  # as in the other process
        here = pipe(ARGUMENTS[0], num_inference_steps=1, generator=generator).images[0]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "fox.png")), np.asarray(here))
