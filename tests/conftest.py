"""Shared fixtures: fresh tiny models per test; tests marked `gpu` skip without a CUDA device."""

import gc
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import fast_interpreter
import pytest
from tiny import random_codebooks, tiny_pipe, tiny_unet, two_level_pipe

from avq_diffusers.attention.limits import faults
from avq_diffusers.hosts.core import routing
from avq_diffusers.hosts.measuring import kept_profiles

FORKING = "test_distill.py", "test_coco.py", "test_kills.py", "test_parallel.py"
# They begin, or one process would wait at the end for the other's.
LONGEST = *FORKING, "test_compiled.py", "test_contract.py", "test_cli.py", "test_offline.py"


def pytest_configure() -> None:
    torch.set_num_threads(1)  # on tiny tensors, threads that wait for each other are 100x slower
    torch.backends.mkldnn.set_flags(_enabled=False)  # tiny convolutions cost a quarter less
    if not torch.cuda.is_available():
        fast_interpreter.speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.name.endswith(LONGEST))
    for item in items:  # for the JUnit file that `eval features` reads
        device = "cuda" if "gpu" in item.keywords else "cpu"
        item.user_properties += [(device, mark.args[0]) for mark in item.iter_markers("feature")]
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # the libraries' half a million objects, else searched again in every collection
    gc.set_threshold(10_000, 10, 30)  # a full search takes 0.1 s


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """One file, one process: what its tests share is made once. Files that fork share a server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return "files that fork" if scope.endswith(FORKING) else scope

    config.option.loadscopereorder = False  # by the number of tests, which tells no length
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def profiles_of_tests(tmp_path_factory):
    """Tests neither find the user's measurements of tiny models, nor leave theirs."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for module in (kept_profiles, routing):
            patch.setattr(module, "user_cache_path", lambda name: folder / name)
        yield


@pytest.fixture(autouse=True)
def kernels_without_faults():
    """With a kernel that does not compile, calls run PyTorch and tests of kernels would pass."""
    yield
    assert not faults


@pytest.fixture(scope="session", autouse=True)
def no_routes_of_cpus():
    """AVQ runs on a CPU of any speed; `test_routing.py` tests what measurements change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "MEASURED", ("cuda",))
        yield


@pytest.fixture
def unet():
    return tiny_unet()


@pytest.fixture
def pipe(unet):
    return tiny_pipe(unet)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The folder of a saved pipeline, which no test changes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    two_level_pipe().save_pretrained(folder)
    return folder


@pytest.fixture
def codebooks(unet):
    """Random codebooks for levels 0 and 1 of `unet`, that of `pipe`."""
    return random_codebooks(unet)


@pytest.fixture
def uninitialized_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
