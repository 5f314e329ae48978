"""UNets inside other modules: AVQ finds the model that owns the blocks, and names its layers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from checks import differ, kinds
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from hosts.kinds import KIND
from peft import get_peft_model
from tiny import CONFIG, LORA, own_codebooks, predict, random_codebooks, traced_unet
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_disabled,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)

feature = pytest.mark.feature


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


class Student(nn.Module):
    """A wrapper of the user's own."""

    def __init__(self, unet):
        super().__init__()
        self.student = unet
        self.head = nn.Linear(2, 2)

    def forward(self, *args, **kwargs):
        return self.student(*args, **kwargs)


def fsdp(unet):
    policy = ModuleWrapPolicy({BasicTransformerBlock, Attention})
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(unet, auto_wrap_policy=policy, **options)


def sharded(unet):
    for module in unet.modules():
        if isinstance(module, BasicTransformerBlock):
            fully_shard(module)
    return fully_shard(unet)


DDP = nn.parallel.DistributedDataParallel
WRAPPERS = [
    pytest.param(lambda x: get_peft_model(x, LORA), id="PEFT", marks=feature("PEFT model")),
    pytest.param(nn.DataParallel, id="DataParallel", marks=feature("nn.DataParallel")),
    pytest.param(DDP, id="DDP", marks=feature("DistributedDataParallel")),
    pytest.param(fsdp, id="FSDP", marks=feature("FSDP")),
    pytest.param(sharded, id="FSDP2", marks=feature("FSDP")),
    pytest.param(Student, id="own"),
    pytest.param(lambda x: DDP(get_peft_model(x, LORA)), id="DDP of PEFT"),
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers(wrap):
    unet = traced_unet()
    names = [layer.name for layer in select_layers(unet)]
    codebooks = random_codebooks(unet, AVQConfig.parse("M4P2C2", query_tile=16))
    wrapped = wrap(unet)
    assert [layer.name for layer in select_layers(wrapped)] == names
    exact = predict(wrapped)
    avq = predict(apply_avq(wrapped, codebooks))
    assert differ(avq, exact)
    assert differ(predict(set_num_refined(wrapped, {1000: 0, 5: 1})), avq)
    assert [row.name for row in summary(wrapped).rows] == names
    with avq_disabled(wrapped):
        assert torch.equal(predict(wrapped), exact)
    assert torch.equal(predict(remove_avq(wrapped)), exact)


def replicated(module):
    """A replica as `nn.DataParallel` makes one for each of several devices."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replicated(child))
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach().clone())
    return replica


@feature("nn.DataParallel")
def test_replicas(unet, codebooks):
    """Catches replicas that share a codebook, which each would move to its own device."""
    apply_avq(unet, replace(CONFIG, codewords="means"))
    first, second = replicated(unet), replicated(unet)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(predict, second, 24, 16)
        assert torch.equal(predict(first), predict(unet))
        assert torch.equal(other.result(), predict(unet, 24, 16))
    for stored in (codebooks, own_codebooks(unet)):
        apply_avq(unet, stored)
        with pytest.raises(NotImplementedError, match=r"^nn\.DataParallel runs one layer on seve"):
            predict(replicated(unet))


@feature("nn.DataParallel")
def test_replicas_off_the_dispatch():
    """Catches layers of a replica that run those of the original."""
    kind = KIND["PixArt"]
    model = apply_avq(kind.make(), kind.config(), route="always")
    avq, replica = kind.predict(model), replicated(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(kind.predict(replica), avq)
    assert kinds(model) == {"AVQ"}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
def test_onnx_is_refused(tmp_path, monkeypatch):
    """In one sentence, by both of PyTorch's exporters."""
    model = traced_unet()
    apply_avq(model, random_codebooks(model, AVQConfig.parse("M4P2C2", query_tile=16)))
    inputs = torch.ones(1, 4, 16, 16), torch.tensor(10), torch.ones(1, 5, 32)
    refused = pytest.raises(NotImplementedError, match=r"^ONNX has no operators for AVQ; call")
    with refused:
        torch.onnx.export(model, inputs, tmp_path / "unet.onnx", dynamo=False)
    monkeypatch.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)
    with refused:
        model(*inputs)
