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
from diffusers import (
    BitsAndBytesConfig,
    StableDiffusionPipeline,
    TorchAoConfig,
    UNet2DConditionModel,
)
from diffusers.models import modeling_utils
from diffusers.models.attention_processor import XFormersAttnProcessor
from diffusers.pipelines import pipeline_utils
from diffusers.utils import hub_utils
from huggingface_hub import ModelCard
from tiny import draw, predict, quiet, tiny_unet

from avq_diffusers import (
    AVQCodebooks,
    apply_avq,
    avq_disabled,
    remove_avq,
    set_num_refined,
    summary,
)

feature = pytest.mark.feature


class TestOtherTools:
    @pytest.mark.parametrize(
        "processor",
        [
            pytest.param("Sliced", marks=feature("attention slicing (replaces AVQ: reported)")),
            pytest.param("XFormers", marks=feature("xFormers (replaces AVQ: reported)")),
        ],
    )
    @pytest.mark.filterwarnings("ignore:AVQ does not run")
    def test_replaced_processors(self, pipe, codebooks, processor):
        """Catches AVQ that is silently gone: both tools replace every processor."""
        avq = draw(apply_avq(pipe, codebooks))
        if processor == "Sliced":
            pipe.enable_attention_slicing()
            assert differ(draw(pipe), avq)
        else:  # `enable_xformers_...` needs a GPU
            pipe.unet.set_attn_processor(XFormersAttnProcessor())
        assert runs(pipe) == {f"exact: replaced by {processor}AttnProcessor"}
        if processor == "XFormers":  # cannot serve what AVQ hands over here
            pipe.unet.set_default_attn_processor()
        torch.testing.assert_close(draw(apply_avq(pipe, codebooks)), avq, rtol=1e-4, atol=1e-4)
        assert kinds(pipe) == {"AVQ"}

    @pytest.mark.parametrize("removed", [False, True])
    def test_fused_projections(self, pipe, codebooks, removed):
        """Catches AVQ that does not come back, or comes back removed and calls itself."""
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, codebooks))
        pipe.fuse_qkv_projections(vae=False)
        assert runs(pipe) == {"exact: replaced by FusedAttnProcessor2_0"}
        if removed:
            remove_avq(pipe)
        else:
            with pytest.warns(UserWarning, match="layers that keep FusedAttnProcessor2_0: down"):
                draw(pipe)
        pipe.unfuse_qkv_projections(vae=False)
        if removed:
            assert torch.equal(draw(pipe), exact)
            apply_avq(pipe, codebooks)
        assert torch.equal(draw(pipe), avq)
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)

    @feature("FreeU")
    def test_freeu(self, pipe, codebooks):
        plain = draw(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        _, avq = check_on_and_off(pipe, codebooks)
        assert differ(avq, plain)

    @feature("callbacks")
    def test_callback(self, pipe, codebooks):
        """Catches a setting that is only read when AVQ is applied."""
        avq = draw(apply_avq(pipe, codebooks))
        coarse = draw(set_num_refined(pipe, 0))
        set_num_refined(pipe, 2)

        def refine_less(pipe, step, timestep, tensors):
            set_num_refined(pipe, 0)
            return tensors

        mixed = draw(pipe, callback_on_step_end=refine_less)
        assert not torch.equal(mixed, avq)
        assert differ(mixed, coarse)

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
        check_on_and_off(pipe, codebooks)

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
    @pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
    def test_group_offload(self, codebooks, offload_type):
        unet = apply_avq(tiny_unet(), codebooks)
        expected = predict(unet)
        unet.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
        )
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
        assert summary(unet).rows[0].runs == "AVQ (torch backend)"

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

    def test_channels_last(self, pipe, codebooks):
        avq = draw(apply_avq(pipe, codebooks))
        pipe.unet.to(memory_format=torch.channels_last)
        torch.testing.assert_close(draw(pipe), avq, rtol=1e-3, atol=1e-3)

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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the Hub: uploads are copied to it, and downloads read from it."""
    root = tmp_path / "hub"

    def create_repo(repo_id, **_):
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"someone/{repo_id}")

    def upload_folder(*, repo_id, folder_path, **_):
        shutil.copytree(folder_path, root / repo_id)

    for module in (hub_utils, modeling_utils, pipeline_utils):
        monkeypatch.setattr(module, "create_repo", create_repo)
        monkeypatch.setattr(
            module, "load_or_create_model_card", lambda *_, **__: ModelCard("---\n---\n")
        )
    monkeypatch.setattr(hub_utils, "upload_folder", upload_folder)
    monkeypatch.setattr(
        "avq_diffusers.hosts.codebooks.hf_hub_download",
        lambda repo, file, **_: str(root / repo / file),
    )
    return root / "someone"


@feature("push_to_hub")
def test_push_to_hub(pipe, codebooks, hub, tmp_path):
    """Catches anything that is uploaded and not needed, or needed and not uploaded."""
    avq = draw(apply_avq(pipe, codebooks))
    pipe.push_to_hub("someone/pipe")
    codebooks.push_to_hub("someone/codebooks")
    codebooks.save_pretrained(tmp_path / "saved", push_to_hub=True)
    files = {"README.md", "config.json", "diffusion_pytorch_model.safetensors"}
    for repo in ("codebooks", "saved"):
        assert {path.name for path in (hub / repo).iterdir()} == files
    uploaded = [path for path in (hub / "pipe").rglob("*") if path.is_file()]
    assert not any(b"avq" in path.read_bytes().lower() for path in uploaded)
    loaded = quiet(StableDiffusionPipeline.from_pretrained(hub / "pipe"))
    apply_avq(loaded, AVQCodebooks.from_pretrained("someone/codebooks"))
    torch.testing.assert_close(draw(loaded), avq, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
class TestOnAGPU:
    @feature("text to image")
    def test_image(self, pipe, codebooks):
        """Catches kernels that are not what runs, and anything that stays behind."""
        check_on_and_off(pipe.to("cuda"), codebooks)
        draw(apply_avq(pipe, codebooks, route="always"))
        assert runs(pipe) == {"AVQ (triton backend)"}

    @pytest.mark.parametrize(
        "offload",
        [
            pytest.param("enable_model_cpu_offload", marks=feature("model offload")),
            pytest.param("enable_sequential_cpu_offload", marks=feature("sequential offload")),
        ],
    )
    @pytest.mark.parametrize("avq_first", [True, False])
    def test_offload(self, pipe, codebooks, offload, avq_first):
        """Catches codewords or orders left behind when weights come to the GPU and go again."""
        if avq_first:
            apply_avq(pipe, codebooks, route="always")
        getattr(pipe, offload)()
        if avq_first:
            draw(pipe)
            assert kinds(pipe) == {"AVQ"}
            remove_avq(pipe)
        check_on_and_off(pipe, codebooks)

    @feature("group offload")
    def test_group_offload(self, pipe, codebooks):
        pipe.to("cuda")
        pipe.unet.enable_group_offload(
            onload_device=torch.device("cuda"),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=True,
        )
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

    @pytest.mark.parametrize(
        "method",
        [
            pytest.param("compile", marks=feature("torch.compile of the UNet (inductor)")),
            pytest.param(
                "compile_repeated_blocks", marks=feature("torch.compile of its blocks (inductor)")
            ),
        ],
    )
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
