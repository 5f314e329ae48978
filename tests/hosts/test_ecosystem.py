"""AVQ beside what else users switch on: adapters, offload, patches, quantized weights.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

import shutil
from types import SimpleNamespace

import pytest
import tomesd
import torch
from accelerate import cpu_offload
from checks import check_on_and_off, differ, draw_once, kinds, runs
from diffusers import (
    BitsAndBytesConfig,
    StableDiffusionPipeline,
    TorchAoConfig,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import XFormersAttnProcessor
from peft import get_peft_model_state_dict
from tiny import LORA, let_answer_calls_only, predict, tiny_pipe, tiny_unet, tuned_codebooks

from avq_diffusers import AVQCodebooks, AVQProcessor, apply_avq, remove_avq, summary

feature = pytest.mark.feature


@feature("LoRA (load/fuse/unfuse)")
class TestLoRA:
    """With changes of projections AVQ also reads weights, which a LoRA changes."""

    def test_is_seen(self, pipe):
        """Catches raw weights read instead of projections called, and AVQ that only lets go of the
        modules it was applied to."""
        exact, codebooks = draw_once(pipe), tuned_codebooks(pipe.unet)
        plain = draw_once(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(LORA)
        adapted = draw_once(pipe)
        assert differ(adapted, plain)
        assert kinds(pipe) == {"AVQ"}
        assert torch.equal(draw_once(apply_avq(pipe, codebooks)), adapted)
        hooked = apply_avq(tiny_pipe(), codebooks)
        let_answer_calls_only(hooked.unet)  # as a layer with a LoRA does
        assert torch.equal(
            draw_once(pipe, cross_attention_kwargs={"scale": 0.0}), draw_once(hooked)
        )
        torch.testing.assert_close(draw_once(hooked), plain, rtol=1e-3, atol=1e-3)
        assert differ(draw_once(pipe, cross_attention_kwargs={"scale": 0.5}), adapted)
        remove_avq(pipe).unload_lora_weights()
        assert torch.equal(draw_once(pipe), exact)

    def test_fuse(self, pipe):
        """Catches an adapter that AVQ loses when it is fused or taken out again, and weights of the
        base model in place of those that a LoRA was fused into."""
        codebooks = tuned_codebooks(pipe.unet)
        plain = draw_once(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(LORA)
        adapted = draw_once(pipe)
        assert differ(plain, adapted)
        for change in (pipe.fuse_lora, pipe.unfuse_lora, pipe.fuse_lora, pipe.unload_lora_weights):
            change()
            torch.testing.assert_close(draw_once(pipe), adapted, rtol=1e-2, atol=1e-2)
        assert kinds(pipe) == {"AVQ"}
        again = draw_once(apply_avq(remove_avq(pipe), codebooks))
        torch.testing.assert_close(again, adapted, rtol=1e-2, atol=1e-2)

    @feature("LoRA hot-swap")
    def test_hot_swap(self, pipe, tmp_path):
        """Catches AVQ that keeps the weights of the LoRA it met first."""
        codebooks = tuned_codebooks(pipe.unet)
        for seed in (1, 2):
            source = tiny_unet()
            torch.manual_seed(seed)
            source.add_adapter(LORA)
            StableDiffusionPipeline.save_lora_weights(
                tmp_path / str(seed), unet_lora_layers=get_peft_model_state_dict(source)
            )
        plain = draw_once(apply_avq(pipe, codebooks))
        pipe.load_lora_weights(tmp_path / "1", adapter_name="default_0")
        first = draw_once(pipe)
        pipe.load_lora_weights(tmp_path / "2", adapter_name="default_0", hotswap=True)
        second = draw_once(pipe)
        assert differ(first, plain)
        assert differ(second, first)
        assert kinds(pipe) == {"AVQ"}
        expected = tiny_pipe()
        expected.load_lora_weights(tmp_path / "2")
        assert torch.equal(second, draw_once(apply_avq(expected, codebooks)))
        pipe.unload_lora_weights()
        assert torch.equal(draw_once(pipe), plain)


@feature("textual inversion")
def test_textual_inversion(pipe, codebooks):
    generator = torch.Generator().manual_seed(8)
    vectors = {"<fox>": 3 * torch.randn(2, 32, generator=generator)}
    pipe.load_textual_inversion(vectors, token="<fox>")
    _, avq = check_on_and_off(pipe, codebooks, negative_prompt="<fox>")
    apply_avq(pipe, codebooks)
    pipe.unload_textual_inversion()
    assert differ(draw_once(pipe, negative_prompt="<fox>"), avq)


@feature("IP-Adapter")
class TestIPAdapter:
    """Layers of cross-attention hold IP-Adapter's processors and get (text, image) states."""

    def load(self, pipe):
        generator = torch.Generator().manual_seed(6)
        # Diffusers numbers the layers down, up, mid, with every self-attention in between.
        names = [n for n in pipe.unet.attn_processors if n.endswith("attn2.processor")]
        weights = {}
        for index, name in enumerate(names):
            width = pipe.unet.get_submodule(name.removesuffix(".processor")).inner_dim
            for part in ("to_k_ip", "to_v_ip"):
                key = f"{2 * index + 1}.{part}.weight"
                weights[key] = torch.randn(width, 32, generator=generator)
        image_proj = {
            "proj.weight": torch.randn(4 * 32, 24, generator=generator),  # four tokens
            "proj.bias": torch.zeros(4 * 32),
            "norm.weight": torch.ones(32),
            "norm.bias": torch.zeros(32),
        }
        pipe.unet._load_ip_adapter_weights([{"image_proj": image_proj, "ip_adapter": weights}])
        return pipe

    def draw(self, pipe):
        image = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(7))
        embeds = torch.cat([torch.zeros_like(image), image])
        return draw_once(pipe, ip_adapter_image_embeds=[embeds])

    def test_loaded_before(self, pipe, codebooks):
        """Catches IP-Adapter's processors replaced: the image would have no effect."""
        _, avq = check_on_and_off(self.load(pipe), codebooks, self.draw)
        pipe.set_ip_adapter_scale(0.3)
        assert differ(self.draw(apply_avq(pipe, codebooks)), avq)
        pipe.set_ip_adapter_scale(1.0)
        assert torch.equal(self.draw(pipe), avq)

    def test_loaded_over_a_processor(self, pipe):
        """Catches the default in place of other sizes, in silence."""
        pipe.unet.set_attn_processor(AVQProcessor("M4P2C2", query_tile=16))
        with pytest.warns(UserWarning, match=r"runs with its defaults.*call apply_avq"):
            self.draw(self.load(pipe))

    def test_loaded_afterwards(self, pipe, codebooks):
        """Catches codebooks lost when IP-Adapter rebuilds processors as `type(p)()`."""
        apply_avq(pipe, codebooks)
        without_adapter = draw_once(pipe)
        avq = self.draw(self.load(pipe))
        assert kinds(pipe) == {"AVQ"}
        expected = self.load(tiny_pipe())
        exact = self.draw(expected)
        assert torch.equal(avq, self.draw(apply_avq(expected, codebooks)))
        pipe.unload_ip_adapter()
        assert torch.equal(draw_once(pipe), without_adapter)
        assert torch.equal(self.draw(remove_avq(self.load(pipe))), exact)


class TestOtherTools:
    @feature("attention slicing (replaces AVQ: reported)")
    @feature("xFormers (replaces AVQ: reported)")
    @pytest.mark.filterwarnings("ignore:AVQ does not run")
    def test_replaced_processors(self, pipe, codebooks):
        """Catches AVQ that is silently gone: both tools replace every processor."""
        avq = draw_once(apply_avq(pipe, codebooks))
        pipe.enable_attention_slicing()
        assert runs(pipe) == {"exact: replaced by SlicedAttnProcessor"}
        assert differ(draw_once(pipe), avq)
        pipe.unet.set_attn_processor(XFormersAttnProcessor())  # `enable_xformers_...` needs a GPU
        assert runs(pipe) == {"exact: replaced by XFormersAttnProcessor"}
        pipe.unet.set_default_attn_processor()  # xFormers cannot serve what AVQ hands over here
        torch.testing.assert_close(draw_once(apply_avq(pipe, codebooks)), avq, rtol=1e-4, atol=1e-4)
        assert kinds(pipe) == {"AVQ"}

    @feature("FreeU")
    def test_freeu(self, pipe, codebooks):
        plain = draw_once(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        _, avq = check_on_and_off(pipe, codebooks)
        assert differ(avq, plain)

    @feature("ToMe (merged layers run exact)")
    def test_tomesd(self, pipe, codebooks):
        """Catches AVQ lost with ToMe's patched blocks, or left out where nothing is merged."""
        exact = draw_once(pipe)
        tomesd.apply_patch(pipe, ratio=0.5, use_rand=False)
        merged = draw_once(pipe)
        avq = draw_once(apply_avq(pipe, codebooks))
        assert {(row.level, *row.calls) for row in summary(pipe).rows if row.config} == {
            (0, "tokens are not the grid"),  # ToMe merges at the highest resolution
            (1, "AVQ"),
        }
        assert differ(avq, merged)
        assert torch.equal(draw_once(remove_avq(pipe)), merged)
        tomesd.remove_patch(pipe)
        assert torch.equal(draw_once(pipe), exact)

    @feature("DeepCache")
    def test_deepcache(self, pipe, codebooks):
        """Catches AVQ that runs in skipped blocks, or breaks what is cached between steps."""
        deepcache = pytest.importorskip("DeepCache")
        plain = draw_once(pipe, num_inference_steps=4)
        helper = deepcache.DeepCacheSDHelper(pipe=pipe)
        helper.set_params(cache_interval=2)
        helper.enable()
        exact = draw_once(pipe, num_inference_steps=4)
        assert differ(exact, plain)
        avq = draw_once(apply_avq(pipe, codebooks), num_inference_steps=4)
        assert differ(avq, exact)
        assert kinds(pipe) == {"AVQ"}
        assert summary(pipe).rows[1].calls["AVQ"] == 2  # every other step
        helper.disable()
        assert torch.equal(draw_once(remove_avq(pipe), num_inference_steps=4), plain)

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
            draw_once(pipe)
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
        exact, avq = draw_once(pipe), draw_once(apply_avq(pipe, codebooks, route="always"))
        getattr(pipe.unet, method)(fullgraph=True)
        compiled = draw_once(pipe)
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
