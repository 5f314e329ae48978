"""AVQ beside what else users switch on: threads, offload, patches, quantized weights.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

import shutil
from types import SimpleNamespace

import pytest
import tomesd
import torch
from accelerate import cpu_offload
from checks import check_on_and_off, differ, kinds, runs
from diffusers import BitsAndBytesConfig, TorchAoConfig, UNet2DConditionModel
from diffusers.models.attention_processor import XFormersAttnProcessor
from tiny import draw, predict, tiny_unet

from avq_diffusers import AVQCodebooks, apply_avq, remove_avq, summary

feature = pytest.mark.feature


class TestOtherTools:
    @feature("attention slicing (replaces AVQ: reported)")
    @feature("xFormers (replaces AVQ: reported)")
    @pytest.mark.filterwarnings("ignore:AVQ does not run")
    def test_replaced_processors(self, pipe, codebooks):
        """Catches AVQ that is silently gone: both tools replace every processor."""
        avq = draw(apply_avq(pipe, codebooks))
        pipe.enable_attention_slicing()
        assert runs(pipe) == {"exact: replaced by SlicedAttnProcessor"}
        assert differ(draw(pipe), avq)
        pipe.unet.set_attn_processor(XFormersAttnProcessor())  # `enable_xformers_...` needs a GPU
        assert runs(pipe) == {"exact: replaced by XFormersAttnProcessor"}
        pipe.unet.set_default_attn_processor()  # xFormers cannot serve what AVQ hands over here
        torch.testing.assert_close(draw(apply_avq(pipe, codebooks)), avq, rtol=1e-4, atol=1e-4)
        assert kinds(pipe) == {"AVQ"}

    @pytest.mark.filterwarnings("ignore:AVQ does not run")
    def test_fused_projections(self, unet, codebooks):
        """Catches AVQ that does not come back, or comes back removed and calls itself."""
        exact = predict(unet)
        avq = predict(apply_avq(unet, codebooks))
        for change, expected in ((lambda unet: unet, avq), (remove_avq, exact)):
            unet.fuse_qkv_projections()
            assert runs(unet) == {"exact: replaced by FusedAttnProcessor2_0"}
            assert not differ(predict(unet), exact)
            change(unet).unfuse_qkv_projections()
            assert torch.equal(predict(unet), expected)

    @feature("FreeU")
    def test_freeu(self, pipe, codebooks):
        plain = draw(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        _, avq = check_on_and_off(pipe, codebooks)
        assert differ(avq, plain)

    @feature("ToMe (merged layers run exact)")
    def test_tomesd(self, pipe, codebooks):
        """Catches AVQ lost with ToMe's patched blocks, or left out where nothing is merged."""
        exact = draw(pipe)
        tomesd.apply_patch(pipe, ratio=0.5, use_rand=False)
        merged = draw(pipe)
        avq = draw(apply_avq(pipe, codebooks))
        assert {(row.level, *row.calls) for row in summary(pipe).rows if row.config} == {
            (0, "tokens are not the grid"),  # ToMe merges at the highest resolution
            (1, "AVQ"),
        }
        assert differ(avq, merged)
        assert torch.equal(draw(remove_avq(pipe)), merged)
        tomesd.remove_patch(pipe)
        assert torch.equal(draw(pipe), exact)

    @feature("DeepCache")
    def test_deepcache(self, pipe, codebooks):
        """Catches AVQ that runs in skipped blocks, or breaks what is cached between steps."""
        deepcache = pytest.importorskip("DeepCache")
        plain = draw(pipe, num_inference_steps=4)
        helper = deepcache.DeepCacheSDHelper(pipe=pipe)
        helper.set_params(cache_interval=2)
        helper.enable()
        exact = draw(pipe, num_inference_steps=4)
        assert differ(exact, plain)
        avq = draw(apply_avq(pipe, codebooks), num_inference_steps=4)
        assert differ(avq, exact)
        assert kinds(pipe) == {"AVQ"}
        assert summary(pipe).rows[1].calls["AVQ"] == 2  # every other step
        helper.disable()
        assert torch.equal(draw(remove_avq(pipe), num_inference_steps=4), plain)

    @feature("group offload")
    @pytest.mark.parametrize("kind", [{}, {"offload_type": "leaf_level"}])
    def test_group_offload(self, codebooks, kind):
        unet = apply_avq(tiny_unet(), codebooks)
        expected, cpu = predict(unet), torch.device("cpu")
        kind = kind or {"offload_type": "block_level", "num_blocks_per_group": 1}
        unet.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
        assert torch.equal(predict(unet), expected)
        assert torch.equal(predict(apply_avq(unet, codebooks)), expected)

    @feature("sequential offload")
    @pytest.mark.parametrize("avq_first", [True, False])
    def test_sequential_offload(self, unet, codebooks, avq_first):
        """Catches codewords moved to the meta device, where weights lie between calls."""
        expected = predict(apply_avq(unet, codebooks))
        if not avq_first:
            remove_avq(unet)
        cpu_offload(unet, execution_device=torch.device("cpu"))
        if not avq_first:
            apply_avq(unet, codebooks)
        assert next(unet.parameters()).is_meta
        assert torch.equal(predict(unet), expected)
        assert runs(unet) == {"AVQ (torch backend)"}

    @feature("layerwise casting")
    def test_layerwise_casting(self, unet, codebooks):
        """Catches raw weights, which are stored in eight bits, or codewords cast with them."""
        codeword = next(iter(codebooks.parameters())).clone()
        apply_avq(unet, codebooks)
        expected = predict(unet)
        unet.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        )
        assert (predict(unet) - expected).norm() < 0.2 * expected.norm()
        assert torch.equal(next(iter(codebooks.parameters())), codeword)

    @feature("torchao int8 weights")
    def test_torchao(self, unet, codebooks, tmp_path):
        """Catches weights read where a quantized tensor has no such operator, or dtype."""
        torchao = pytest.importorskip("torchao.quantization")
        unet.save_pretrained(tmp_path)
        config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
        quantized = UNet2DConditionModel.from_pretrained(
            tmp_path, quantization_config=config, torch_dtype=torch.float32
        )
        weight = quantized.get_submodule(next(iter(codebooks.layer_specs))).to_q.weight
        assert isinstance(weight, torchao.Int8Tensor)
        exact, avq = check_on_and_off(quantized, codebooks, predict)
        full = predict(apply_avq(unet, codebooks))
        assert 0 < (avq - full).norm() < 0.5 * (avq - exact).norm()


@feature("push_to_hub")
def test_push_to_hub(codebooks, tmp_path, monkeypatch):
    """Catches anything that is uploaded and not needed, or needed and not uploaded."""
    hub = tmp_path / "hub"

    def upload(self, folder, repo_id, **_):
        shutil.copytree(folder, hub / repo_id)

    def download(repo, file, **_):
        return str(hub / repo / file)

    made = SimpleNamespace(repo_id="someone/codebooks")
    monkeypatch.setattr(AVQCodebooks, "_upload_folder", upload)
    monkeypatch.setattr("diffusers.models.modeling_utils.create_repo", lambda *_, **__: made)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    codebooks.save_pretrained(tmp_path / "codebooks", push_to_hub=True)
    files = {path.name for path in (hub / "someone" / "codebooks").iterdir()}
    assert files == {"README.md", "config.json", "diffusion_pytorch_model.safetensors"}
    loaded = AVQCodebooks.from_pretrained("someone/codebooks")
    assert all(map(torch.equal, loaded.parameters(), codebooks.parameters()))


def stream_groups(pipe):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    options = {"offload_type": "leaf_level", "use_stream": True}
    pipe.to(cuda).unet.enable_group_offload(onload_device=cuda, offload_device=cpu, **options)


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize(
        "enable",
        [
            pytest.param(lambda x: x.to("cuda"), marks=feature("text to image")),
            pytest.param(lambda x: x.enable_model_cpu_offload(), marks=feature("model offload")),
            pytest.param(
                lambda x: x.enable_sequential_cpu_offload(), marks=feature("sequential offload")
            ),
            pytest.param(stream_groups, marks=feature("group offload")),
        ],
    )
    @pytest.mark.parametrize("avq_first", [True, False])
    def test_on_and_off(self, pipe, codebooks, enable, avq_first):
        """Catches kernels that are not what runs, anything that stays behind, and codewords or
        orders left behind when weights come to the GPU and go again."""
        if avq_first:
            apply_avq(pipe, codebooks, route="always")
        enable(pipe)
        if avq_first:
            draw(pipe)
            assert runs(pipe) == {"AVQ (triton backend)"}
            remove_avq(pipe)
        check_on_and_off(pipe, codebooks)

    @feature("xFormers (replaces AVQ: reported)")
    def test_xformers(self, pipe, codebooks):
        pytest.importorskip("xformers")
        pipe.to("cuda", torch.float16).enable_xformers_memory_efficient_attention()
        check_on_and_off(pipe, codebooks)
        apply_avq(pipe, codebooks, route="always")
        pipe.enable_xformers_memory_efficient_attention()
        assert runs(pipe) == {"exact: replaced by XFormersAttnProcessor"}

    @feature("bitsandbytes int8 weights")
    def test_bitsandbytes(self, unet, codebooks, tmp_path):
        bitsandbytes = pytest.importorskip("bitsandbytes")
        unet.save_pretrained(tmp_path)
        quantized = UNet2DConditionModel.from_pretrained(
            tmp_path,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            torch_dtype=torch.float16,
        )
        projection = quantized.get_submodule(next(iter(codebooks.layer_specs))).to_q
        assert isinstance(projection, bitsandbytes.nn.Linear8bitLt)
        sample = torch.randn(1, 4, 16, 16, device="cuda", dtype=torch.float16)
        text = torch.randn(1, 5, 32, device="cuda", dtype=torch.float16)
        with torch.no_grad():
            check_on_and_off(quantized, codebooks, lambda unet: unet(sample, 10, text).sample)

    @feature("torch.compile of the UNet (inductor)")
    @feature("torch.compile of its blocks (inductor)")
    @pytest.mark.parametrize("method", ["compile", "compile_repeated_blocks"])
    def test_compile(self, pipe, codebooks, method):
        pipe.to("cuda")
        exact, avq = draw(pipe), draw(apply_avq(pipe, codebooks, route="always"))
        getattr(pipe.unet, method)(fullgraph=True)
        compiled = draw(pipe)
        assert (compiled - avq).norm() < 0.1 * (avq - exact).norm()

    @feature("CUDA graphs")
    @torch.no_grad()
    def test_cuda_graph(self, unet, codebooks):
        """Catches an order, a table or a timing that is made anew on the host in every call."""
        apply_avq(unet, codebooks, route="always").to("cuda")
        sample, other = torch.randn(2, 1, 4, 16, 16, device="cuda")
        timestep = torch.full((), 10, device="cuda")
        text = torch.zeros(1, 5, 32, device="cuda")
        expected = [unet(x, timestep, text).sample for x in (other, sample)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = unet(sample, timestep, text).sample
        for x, want in zip((sample.clone(), other), reversed(expected), strict=True):
            sample.copy_(x)
            graph.replay()
            torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-4)
