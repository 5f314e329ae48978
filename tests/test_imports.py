"""Importing changes nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

FRESH_IMPORT = """
import socket, sys, warnings
for name in ("triton", "torchvision", "matplotlib"):
    sys.modules[name] = None

import torch, torch._dynamo, transformers
from diffusers import StableDiffusionPipeline  # transformers says here that it lacks torchvision
from diffusers.models import attention_dispatch

def refuse(*args, **kwargs):
    raise RuntimeError("the import opened a connection")

def flags():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.initial_seed(),
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch._dynamo.config.get_config_copy(), list(warnings.filters), list(sys.path),
    )

def mark():
    for stream in (sys.stdout, sys.stderr):
        print("-----", file=stream, flush=True)

socket.socket.connect = refuse
before = flags()
backends = attention_dispatch._AttentionBackendRegistry.list_backends()
mark()
import avq_diffusers
for name in avq_diffusers.__all__:
    getattr(avq_diffusers, name)
import avq_diffusers.vision
mark()
assert flags() == before
assert not torch.cuda.is_initialized()
assert attention_dispatch._AttentionBackendRegistry.list_backends() == backends
assert "avq" not in transformers.AttentionInterface().valid_keys()
"""


def test_importing_changes_nothing():
    """Catches prints, downloads, global flags, CUDA contexts and hard needs for extras."""
    result = subprocess.run(
        [sys.executable, "-c", FRESH_IMPORT],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for stream in (result.stdout, result.stderr):
        assert stream.split("-----")[1].strip() == ""
