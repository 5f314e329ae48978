"""`apply_avq` and its companions on real tiny pipelines."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import pytest
import torch
from checks import differ, runs
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from diffusers.models.attention_processor import (
    AttnProcessor2_0,
    CustomDiffusionAttnProcessor2_0,
)
from tiny import (
    CONFIG,
    LAYER,
    draw,
    predict,
    quiet,
    random_changes,
    random_codebooks,
    small_unet,
    tiny_pipe,
    tiny_unet,
    tuned_codebooks,
)
from torch._dynamo.testing import CompileCounter

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq, avq_disabled, remove_avq
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layers import select_layers
from avq_diffusers.plugin.pipeline import AVQStableDiffusionPipeline
from avq_diffusers.plugin.processor import AVQProcessor
from avq_diffusers.plugin.refinement import set_num_refined
from avq_diffusers.plugin.report import summary


class TestApplyAndRemove:
    @pytest.mark.feature("text to image")
    def test_image_changes_and_comes_back(self, pipe, codebooks):
        """Catches AVQ that never runs, and anything that stays behind."""
        exact = draw(pipe)
        attributes = {name: set(vars(module)) for name, module in pipe.unet.named_modules()}
        processors = pipe.unet.attn_processors
        keys = list(pipe.unet.state_dict())

        assert apply_avq(pipe, codebooks) is pipe
        avq = draw(pipe)
        assert differ(avq, exact)
        assert torch.equal(draw(pipe), avq)

        assert remove_avq(pipe) is pipe
        assert torch.equal(draw(pipe), exact)
        assert pipe.unet.attn_processors == processors
        assert list(pipe.unet.state_dict()) == keys
        for name, module in pipe.unet.named_modules():
            assert set(vars(module)) == attributes[name]
            assert not module._forward_pre_hooks

    def test_twice(self, pipe, codebooks):
        """Catches AVQ applied over AVQ: its previous processor would be itself."""
        exact, processors = draw(pipe), pipe.unet.attn_processors
        apply_avq(pipe, random_codebooks(pipe.unet, seed=1))
        avq = draw(apply_avq(pipe, codebooks))
        assert torch.equal(avq, draw(apply_avq(tiny_pipe(), codebooks)))
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)
        remove_avq(pipe)
        assert pipe.unet.attn_processors == processors

    def test_other_levels_afterwards(self, pipe, codebooks):
        """Catches layers of an earlier, larger set of levels that keep running AVQ."""
        apply_avq(pipe, codebooks)
        apply_avq(pipe, random_codebooks(pipe.unet, AVQConfig(4, 2, 2, levels=(2,))))
        draw(pipe)
        assert {row.level for row in summary(pipe).rows if row.calls} == {2}

    def test_layers_that_stay_exact(self, pipe, tmp_path):
        """Catches AVQ in all layers of a level, also after a round trip through a folder."""
        config = replace(CONFIG, exact=("down_blocks.1", "up_blocks"))
        random_codebooks(pipe.unet, config).save_pretrained(tmp_path)
        loaded = AVQCodebooks.from_pretrained(tmp_path)
        assert loaded.avq_config == config
        draw(apply_avq(pipe, loaded))
        ran = [row.name for row in summary(pipe).rows if row.calls]
        expected = [x.name for x in select_layers(pipe.unet, (0,)) if "down_blocks" in x.name]
        assert ran == expected

    def test_remove_without_avq(self, pipe):
        exact = draw(pipe)
        assert torch.equal(draw(remove_avq(pipe)), exact)

    @pytest.mark.feature("several pipelines and threads")
    def test_two_pipelines(self, pipe, codebooks):
        """Catches state on a class or module: each pipeline has its own codebooks."""
        other = random_codebooks(pipe.unet, seed=1)
        first = draw(apply_avq(pipe, codebooks))
        second_pipe = apply_avq(tiny_pipe(), other)
        second = draw(second_pipe)
        assert differ(first, second)
        assert torch.equal(draw(pipe), first)
        remove_avq(pipe)
        assert torch.equal(draw(second_pipe), second)

    def test_one_set_of_codebooks_for_two_pipelines(self, pipe, codebooks):
        """Catches state on the codebooks: one pipeline's setting must not reach the other."""
        first = draw(apply_avq(pipe, codebooks))
        second = set_num_refined(apply_avq(tiny_pipe(), codebooks), 0)
        assert differ(draw(second), first)
        assert torch.equal(draw(pipe), first)

    def test_foreign_processors_stay(self, pipe, codebooks):
        """Catches `set_attn_processor` over all layers, and a restore that undoes others' work."""
        others = {name: AttnProcessor2_0() for name in pipe.unet.attn_processors}
        pipe.unet.set_attn_processor(dict(others))
        apply_avq(pipe, codebooks)
        chosen = {f"{name}.processor" for name in codebooks.layer_specs}
        for name, processor in pipe.unet.attn_processors.items():
            assert (processor is others[name]) == (name not in chosen)
        set_later = AttnProcessor2_0()
        pipe.unet.get_submodule(LAYER).set_processor(set_later)
        remove_avq(pipe)
        others[f"{LAYER}.processor"] = set_later
        assert pipe.unet.attn_processors == others

    def test_a_processor_with_weights_stays(self, unet, codebooks):
        """Catches an assignment, which torch refuses where a module was registered."""
        attn = unet.get_submodule(LAYER)
        attn.set_processor(CustomDiffusionAttnProcessor2_0(train_kv=False, train_q_out=False))
        before = attn.processor
        apply_avq(unet, codebooks)
        assert remove_avq(unet).get_submodule(LAYER).processor is before

    def test_backends_agree(self, pipe, codebooks):
        """Catches a backend argument that is dropped, or backends that compute other things."""
        exact = draw(pipe)
        images = {}
        for backend in ("torch", "reference"):
            images[backend] = draw(apply_avq(pipe, codebooks, backend=backend))
            assert {row.runs for row in summary(pipe).rows if row.calls} == {
                f"AVQ ({backend} backend)"
            }
        assert not torch.equal(images["torch"], images["reference"])  # they round differently
        error = (images["torch"] - images["reference"]).norm()
        assert error < 1e-3 * (images["torch"] - exact).norm()

    @pytest.mark.parametrize(("height", "width"), [(520, 264), (64, 256)])
    def test_sizes(self, pipe, codebooks, height, width):
        """Catches square images and even latents (520 / 8 = 65) taken for granted."""
        avq = draw(apply_avq(pipe, codebooks), height=height, width=width, num_inference_steps=1)
        tokens = {row.level: row.num_tokens for row in summary(pipe).rows if row.calls}
        assert tokens[0] == height // 8 * width // 8
        assert {kind for row in summary(pipe).rows for kind in row.calls} == {"AVQ"}
        with avq_disabled(pipe):
            assert differ(draw(pipe, height=height, width=width, num_inference_steps=1), avq)

    @pytest.mark.feature("batches")
    @pytest.mark.parametrize("guidance_scale", [1.0, 7.5])
    def test_batches(self, pipe, codebooks, guidance_scale):
        """Catches images of a batch that see each other's keys, with and without guidance."""
        apply_avq(pipe, codebooks)
        arguments = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
        arguments["guidance_scale"] = guidance_scale
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        batch = pipe(["a fox", "a hen"], generator=generators, **arguments).images
        for index, prompt in enumerate(["a fox", "a hen"]):
            generator = torch.Generator().manual_seed(3 + index)
            alone = pipe(prompt, generator=generator, **arguments).images
            torch.testing.assert_close(batch[index : index + 1], alone, rtol=1e-4, atol=1e-4)

    def test_saved_codebooks_give_the_same_image(self, pipe, tmp_path):
        """Catches anything that matters to the image and is not in the file."""
        config = AVQConfig(4, 2, 2, query_tile=16, query_order="random", levels=(0, 2),
                           key_norm=True, overrides={"2": {"num_refined": 1}})  # fmt: skip
        codebooks = tuned_codebooks(pipe.unet, config)
        for name in codebooks.layer_specs:
            torch.nn.init.normal_(codebooks.key_norm(name).weight)
        expected = draw(apply_avq(pipe, codebooks))
        codebooks.save_pretrained(tmp_path)
        loaded = AVQCodebooks.from_pretrained(tmp_path)
        assert torch.equal(draw(apply_avq(tiny_pipe(), loaded)), expected)

    def test_errors_change_nothing(self, pipe, codebooks):
        """Catches half-installed codebooks, and an earlier AVQ lost to a failed apply."""
        avq = draw(apply_avq(pipe, codebooks))
        other = random_codebooks(tiny_unet(layers_per_block=2))
        with pytest.raises(ValueError, match="codebooks of another model"):
            apply_avq(pipe, other)
        with pytest.raises(TypeError, match="expected AVQCodebooks, an AVQConfig or nothing"):
            apply_avq(pipe, {})
        with pytest.raises(ValueError, match=r"backend must be one of .*, but got 'cuda'"):
            apply_avq(pipe, codebooks, backend="cuda")
        assert torch.equal(draw(pipe), avq)

    @pytest.mark.parametrize("verb", [remove_avq, summary, lambda x: set_num_refined(x, 1)])
    @pytest.mark.parametrize("thing", [object(), None, "pipe"])
    def test_no_unet(self, verb, thing):
        with pytest.raises(TypeError, match="expected a pipeline with a unet or a UNet, but got"):
            verb(thing)

    def test_not_codewords(self, pipe, codebooks):
        codebooks.codebook(LAYER).parents[0, 0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"parents .*finite"):
            apply_avq(pipe, codebooks)


class TestDisabled:
    def test_exact_inside_avq_outside(self, pipe, codebooks):
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, codebooks))
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)
            with avq_disabled(pipe):
                pass
            assert torch.equal(draw(pipe), exact)
        assert torch.equal(draw(pipe), avq)

    def test_overlapping_blocks(self, pipe, codebooks):
        """Two threads that share a UNet: catches AVQ that is back early, and one that stays off."""
        apply_avq(pipe, codebooks)
        first, second = avq_disabled(pipe), avq_disabled(pipe)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert runs(pipe) == {"exact: disabled"}
        second.__exit__(None, None, None)
        assert runs(pipe) == {"AVQ"}

    def test_exception(self, pipe, codebooks):
        """Catches AVQ that stays off after an error inside the block."""
        apply_avq(pipe, codebooks)
        with pytest.raises(KeyError), avq_disabled(pipe):
            raise KeyError
        predict(pipe.unet)
        assert summary(pipe).rows[0].calls == {"AVQ": 1}

    def test_without_avq(self, pipe):
        exact = predict(pipe.unet)
        with avq_disabled(pipe):
            assert torch.equal(predict(pipe.unet), exact)


class TestOutOfMemory:
    """In mid-generation: the pipeline draws the same images afterwards, with AVQ and without."""

    @pytest.mark.parametrize("call", [1, 9, 17])  # of 24: six layers, four steps
    def test_at_any_layer(self, pipe, codebooks, call):
        """Catches what a call leaves half-done: a schedule's step, an order of queries."""
        exact = draw(pipe)
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, {1000: 1, 501: 4})
        avq = draw(pipe)

        def run_out(*_):
            if next(calls) == call:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        for mode in (avq_disabled(pipe), nullcontext()):
            calls = count(1)
            layers = [pipe.unet.get_submodule(name) for name in codebooks.layer_specs]
            handles = [layer.to_out[0].register_forward_hook(run_out) for layer in layers]
            with pytest.raises(torch.OutOfMemoryError), mode:
                draw(pipe, num_inference_steps=4)
            for handle in handles:
                handle.remove()
        assert torch.equal(draw(pipe), avq)
        assert torch.equal(draw(remove_avq(pipe)), exact)

    @pytest.mark.gpu
    def test_of_a_gpu(self, pipe, codebooks):
        pipe.to("cuda")
        exact = draw(pipe)
        apply_avq(pipe, codebooks, route="always")
        avq = draw(pipe)
        torch.cuda.empty_cache()
        size = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**27) / size)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                draw(pipe, height=2048, width=2048)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(draw(pipe), avq)
        assert torch.equal(draw(remove_avq(pipe)), exact)


class TestProjectionChanges:
    """Distilled codebooks change projections; the UNet's own stay what they are."""

    @pytest.fixture
    def tuned(self, unet):
        return tuned_codebooks(unet)

    def test_applied_and_removed(self, pipe, codebooks, tuned):
        """Catches changes that do not run, and any parameter that is written over."""
        exact, untuned = draw(pipe), draw(apply_avq(tiny_pipe(), codebooks))
        before = copy.deepcopy(pipe.unet.state_dict())
        avq = draw(apply_avq(pipe, tuned))
        assert differ(avq, untuned)
        assert differ(avq, exact)
        now = pipe.unet.state_dict()
        assert list(now) == list(before)
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)
        assert torch.equal(draw(apply_avq(pipe, tuned)), avq)
        assert torch.equal(draw(apply_avq(pipe, codebooks)), untuned)
        assert torch.equal(draw(remove_avq(pipe)), exact)

    def test_control(self, pipe, codebooks):
        """Changes of zero change nothing: the noise does, above."""
        none = {
            name: {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
            for name, tensors in random_changes(pipe.unet).items()
        }
        expected = draw(apply_avq(tiny_pipe(), codebooks))
        avq = draw(apply_avq(pipe, random_codebooks(pipe.unet, projection_changes=none)))
        assert torch.equal(avq, expected)

    def test_moves_between_apply_and_remove(self, unet, tuned):
        """Catches changes kept in half precision, and originals that miss a move."""
        exact, avq = predict(unet), predict(apply_avq(unet, tuned))
        sample, text = torch.zeros(1, 4, 16, 16), torch.zeros(1, 5, 32)
        unet.to(torch.bfloat16)(sample.bfloat16(), 10, text.bfloat16())
        widened = tiny_unet().to(torch.bfloat16).float()
        assert torch.equal(predict(remove_avq(unet.float())), predict(widened))
        assert torch.equal(predict(apply_avq(unet, tuned)), predict(apply_avq(widened, tuned)))
        unet.load_state_dict(tiny_unet().state_dict())
        assert torch.equal(predict(unet), avq)
        assert torch.equal(predict(remove_avq(unet)), exact)

    def test_summary(self, pipe, codebooks, tuned):
        """Catches a table on which a student and a calibrated model look the same."""
        apply_avq(pipe, tuned)
        assert summary(pipe).rows[0].runs == "AVQ, tuned"
        predict(pipe.unet)
        assert runs(pipe) == {"AVQ (torch backend), tuned"}
        with avq_disabled(pipe):
            assert summary(pipe).rows[0].runs == "exact: disabled"
        apply_avq(pipe, codebooks)
        assert summary(pipe).rows[0].runs == "AVQ"


class TestSetNumRefined:
    def refined(self, pipe):
        return {row.name: row.config for row in summary(pipe).rows if row.config}

    def test_changes_the_image_and_back(self, pipe, codebooks):
        avq = draw(apply_avq(pipe, codebooks))
        assert differ(draw(set_num_refined(pipe, 1)), avq)
        assert torch.equal(draw(set_num_refined(pipe, CONFIG.num_refined)), avq)

    def test_level_and_layer(self, pipe, codebooks):
        """Catches a filter that is ignored or inverted."""
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, 1, level=1)
        set_num_refined(pipe, 0, layer="up_blocks.3.attentions.1")
        changed = {name for name, config in self.refined(pipe).items() if config != "M4P2C2"}
        level_1 = {name for name, spec in codebooks.layer_specs.items() if spec.level == 1}
        last = "up_blocks.3.attentions.1.transformer_blocks.0.attn1"
        assert changed == level_1 | {last}
        assert self.refined(pipe)[last] == "M4P0C2"

    def test_refuses_whole_or_not_at_all(self, pipe):
        """Catches layers changed before the one that cannot refine so many was reached."""
        config = AVQConfig(8, 2, 2, levels=(0, 1), overrides={"1": {"num_parents": 4}})
        apply_avq(pipe, random_codebooks(pipe.unet, config))
        before = self.refined(pipe)
        with pytest.raises(ValueError, match=r"between 0 and 4 in down_blocks\.1.*, but got 5"):
            set_num_refined(pipe, 5)
        with pytest.raises(ValueError, match=r"between 0 and 8 in .*, but got -1"):
            set_num_refined(pipe, -1)
        assert self.refined(pipe) == before
        set_num_refined(pipe, 8, level=0)

    def test_errors(self, pipe, codebooks):
        with pytest.raises(ValueError, match=r"no AVQ layer; call apply_avq\(pipe\)"):
            set_num_refined(pipe, 1)
        apply_avq(pipe, codebooks)
        with pytest.raises(ValueError, match="no AVQ layer matches level=2, layer=None"):
            set_num_refined(pipe, 1, level=2)
        with pytest.raises(TypeError, match="num_refined must be an int, but got float"):
            set_num_refined(pipe, 1.0)

    @pytest.mark.parametrize("chosen", [{"layer": "up_blocks"}, {"level": 1}])
    def test_entries_that_no_chosen_layer_has(self, pipe, codebooks, chosen):
        """Catches an entry of a plan that matches layers, but none of those it may change."""
        apply_avq(pipe, codebooks)
        before = self.refined(pipe)
        message = (
            r"layer is 'down_blocks\.0' or in it; the chosen layers are (up_blocks|down_blocks\.1)"
        )
        with pytest.raises(ValueError, match=message):
            set_num_refined(pipe, {"up_blocks": 1, "down_blocks.0": 1}, **chosen)
        assert self.refined(pipe) == before

    @pytest.mark.parametrize(
        "name", ["up_blocks.3.attentions.1.trans", "up_blocks.3.att", "up", ""]
    )
    def test_names_end_where_a_module_ends(self, pipe, codebooks, name):
        """Catches "up_blocks.1" taken for "up_blocks.10" as well."""
        apply_avq(pipe, codebooks)
        with pytest.raises(ValueError, match=f"no AVQ layer matches level=None, layer='{name}'"):
            set_num_refined(pipe, 1, layer=name)
        with pytest.raises(ValueError, match=f"no AVQ layer is '{name}' or in it"):
            set_num_refined(pipe, {name: 1})

    def test_plan(self, pipe, codebooks):
        """Catches entries in the order of writing, and layers without an entry reset."""
        apply_avq(pipe, codebooks)
        plan = {"up_blocks.3.attentions.1": 0, "up_blocks": 1, "down_blocks.1": {1000: 4, 500: 3}}
        assert set_num_refined(pipe, plan) is pipe
        expected = {}
        for name in codebooks.layer_specs:
            expected[name] = "M4P1C2" if name.startswith("up_blocks") else "M4P2C2"
            if name.startswith("down_blocks.1"):
                expected[name] = "M4P4-3C2"
        expected["up_blocks.3.attentions.1.transformer_blocks.0.attn1"] = "M4P0C2"
        assert self.refined(pipe) == expected
        set_num_refined(pipe, {"up_blocks": 4, "down_blocks": 4}, level=0)
        for name, spec in codebooks.layer_specs.items():
            if spec.level == 0:
                expected[name] = "M4P4C2"
        assert self.refined(pipe) == expected


def timesteps_of(unet):
    """Timestep and refined parents of every call of every AVQ layer, as the calls come."""
    seen, timestep = [], []

    def see_timestep(module, args, kwargs):
        timestep[:] = [float(args[1])]

    def see_layer(attn, args, kwargs):
        seen.append((timestep[0], attn._avq.num_refined))

    unet.register_forward_pre_hook(see_timestep, with_kwargs=True)
    for module in unet.modules():
        if hasattr(module, "_avq"):
            module.register_forward_pre_hook(see_layer, with_kwargs=True)
    return seen


SCHEDULE = {1000: 1, 501: 4}


class TestSchedule:
    """`set_num_refined` by timestep."""

    @pytest.mark.parametrize(
        ("scheduler", "timesteps", "schedule"),
        [
            (DDIMScheduler, [751, 501, 251, 1], {1000: 1, 501: 4}),
            (DDIMScheduler, [751, 501, 251, 1], {400: 0, 1000: 1, 502: 4}),
            (EulerDiscreteScheduler, [999, 666, 333, 0], {1000: 1, 666: 4}),
            (EulerDiscreteScheduler, [999, 666, 333, 0], {1000: 1, 998: 2, 665: 0, 0: 4}),
        ],
    )
    def test_switches_at_the_timestep(self, pipe, codebooks, scheduler, timesteps, schedule):
        """Catches steps counted, a switch one step off, and a setting that is not what runs."""
        options = {"timestep_spacing": "linspace"} if scheduler is EulerDiscreteScheduler else {}
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **options)
        apply_avq(pipe, codebooks)
        expected = [
            schedule[min(start for start in schedule if start >= timestep)]
            for timestep in timesteps
        ]
        later = iter(expected[1:])

        def set_by_hand(pipe, step, timestep, tensors):
            set_num_refined(pipe, next(later, 0))
            return tensors

        set_num_refined(pipe, expected[0])
        by_hand = draw(pipe, num_inference_steps=4, callback_on_step_end=set_by_hand)
        set_num_refined(pipe, schedule)
        seen = timesteps_of(pipe.unet)
        assert torch.equal(draw(pipe, num_inference_steps=4), by_hand)
        assert seen == [
            (timestep, count)
            for timestep, count in zip(timesteps, expected, strict=True)
            for _ in codebooks.layer_specs
        ]
        assert differ(draw(set_num_refined(pipe, expected[0]), num_inference_steps=4), by_hand)

    def test_comes_and_goes(self, pipe, codebooks):
        """Catches a hook or a number that stays behind, and one that is installed twice."""
        exact = draw(pipe)
        attributes = {name: set(vars(module)) for name, module in pipe.unet.named_modules()}
        avq = draw(apply_avq(pipe, codebooks))
        scheduled = draw(set_num_refined(pipe, SCHEDULE))
        assert differ(scheduled, avq)
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)
        assert torch.equal(draw(pipe), scheduled)
        set_num_refined(pipe, SCHEDULE)
        assert len(pipe.unet._forward_pre_hooks) == 1
        assert torch.equal(draw(pipe), scheduled)

        assert torch.equal(draw(set_num_refined(pipe, CONFIG.num_refined)), avq)
        assert not pipe.unet._forward_pre_hooks
        set_num_refined(pipe, SCHEDULE)
        assert torch.equal(draw(apply_avq(pipe, codebooks)), avq)
        assert torch.equal(draw(remove_avq(set_num_refined(pipe, SCHEDULE))), exact)
        for name, module in pipe.unet.named_modules():
            assert set(vars(module)) == attributes[name]
            assert not module._forward_pre_hooks

    def test_other_layers_keep_theirs(self, pipe, codebooks):
        """Catches one schedule for the whole UNet, and a hook kept for nothing."""
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, SCHEDULE, level=0)
        set_num_refined(pipe, {1000: 2, 700: 3, 300: 3, 200: 0}, level=1)
        levels = {row.level: row.config for row in summary(pipe).rows if row.config}
        assert levels == {0: "M4P1-4C2", 1: "M4P2-3-0C2"}
        seen = timesteps_of(pipe.unet)
        draw(pipe)  # timesteps 501 and 1
        assert {count for timestep, count in seen if timestep == 501} == {4, 3}
        assert {count for timestep, count in seen if timestep == 1} == {4, 0}
        set_num_refined(pipe, 2, level=0)
        levels = {row.level: row.config for row in summary(pipe).rows if row.config}
        assert levels == {0: "M4P2C2", 1: "M4P2-3-0C2"}
        set_num_refined(pipe, {1000: 2, 500: 2}, level=1)
        assert {row.config for row in summary(pipe).rows if row.config} == {"M4P2C2"}
        assert not hasattr(pipe.unet, "_avq_scheduler")

    def test_copies_and_other_pipelines(self, pipe, codebooks, tmp_path):
        """Catches a copy that switches its original, and a saved pipeline that knows of AVQ."""
        exact, image = draw(pipe), torch.rand(1, 3, 128, 128)
        scheduled = draw(set_num_refined(apply_avq(pipe, codebooks), SCHEDULE))
        twin = copy.copy(pipe)
        twin.register_modules(unet=copy.deepcopy(pipe.unet))
        set_num_refined(twin, 0)
        assert torch.equal(draw(pipe), scheduled)
        other = quiet(StableDiffusionImg2ImgPipeline.from_pipe(pipe))
        seen = timesteps_of(pipe.unet)
        draw(other, image=image, strength=1.0, num_inference_steps=4)
        assert set(seen) == {(751, 1), (501, 4), (251, 4), (1, 4)}
        pipe.save_pretrained(tmp_path)
        loaded = quiet(StableDiffusionPipeline.from_pretrained(tmp_path))
        torch.testing.assert_close(draw(loaded), exact, rtol=1e-4, atol=1e-4)

    def test_threads(self, codebooks):
        """Catches a timestep, or a table of timesteps, that two pipelines share."""
        schedules = [SCHEDULE, {1000: 4, 300: 0}]
        pipes = [set_num_refined(apply_avq(tiny_pipe(), codebooks), x) for x in schedules]
        alone = [draw(pipe, num_inference_steps=4) for pipe in pipes]
        assert differ(*alone)
        with ThreadPoolExecutor(2) as threads:
            for _ in range(3):
                together = threads.map(lambda pipe: draw(pipe, num_inference_steps=4), pipes)
                for got, expected in zip(together, alone, strict=True):
                    assert torch.equal(got, expected)

    def test_threads_of_one_unet(self, unet, codebooks):
        """Catches a number of parents that is another thread's, and one that outlives it."""
        set_num_refined(apply_avq(unet, codebooks), SCHEDULE)
        inputs = torch.ones(1, 4, 16, 16), torch.ones(1, 5, 32)

        @torch.no_grad()
        def output(timestep):
            return unet(inputs[0], timestep, inputs[1]).sample

        early, late = torch.tensor([900, 5])
        alone = output(early)
        assert differ(output(late), alone)
        with ThreadPoolExecutor(1) as thread:

            def draw_elsewhere(*_):
                handle.remove()
                thread.submit(output, late).result()

            handle = unet.get_submodule(LAYER).register_forward_pre_hook(draw_elsewhere)
            assert torch.equal(output(early), alone)
            set_num_refined(unet, 3, level=0)
            seen = timesteps_of(unet)
            thread.submit(output, late).result()
        assert {count for _, count in seen} == {3, 4}

    @pytest.mark.parametrize("compiled_first", [True, pytest.param(False, marks=pytest.mark.long)])
    def test_compile(self, compiled_first):
        """Catches compiled code that keeps the first number, and a graph for every timestep."""
        unet = small_unet()
        apply_avq(unet, random_codebooks(unet, AVQConfig(4, 2, 2)))
        inputs = torch.randn(1, 4, 16, 16), torch.randn(1, 5, 32)

        @torch.no_grad()
        def output(model, timestep):
            return model(inputs[0], timestep, inputs[1]).sample

        schedule = {1000: 1, 400: 4}
        timesteps = torch.tensor([900.0, 700, 400, 200, 900, 7])
        expected = []
        for timestep in timesteps:
            set_num_refined(unet, 1 if timestep > 400 else 4)
            expected.append(output(unet, timestep))
        torch.compiler.reset()
        counter = CompileCounter()
        if compiled_first:
            model = set_num_refined(torch.compile(unet, backend=counter, fullgraph=True), schedule)
        else:
            model = torch.compile(set_num_refined(unet, schedule), backend=counter)
        graphs = []
        for timestep, want in zip(timesteps, expected, strict=True):
            torch.testing.assert_close(output(model, timestep), want)
            graphs.append(counter.frame_count)
        assert graphs == [1, 1, 2, 2, 2, 2]
        remove_avq(model)
        assert not unet._forward_pre_hooks
        assert not model._forward_pre_hooks
        torch.compiler.reset()

    def test_several_timesteps(self, pipe, codebooks):
        unet = set_num_refined(apply_avq(pipe, codebooks), SCHEDULE).unet
        inputs = torch.zeros(2, 4, 16, 16), torch.tensor([900, 5]), torch.zeros(2, 5, 32)
        with pytest.raises(ValueError, match=r"one timestep for the whole batch, .* \[5, 900\]"):
            unet(*inputs)
        unet(inputs[0], torch.tensor([5, 5]), inputs[2])
        assert unet.get_submodule(LAYER)._avq.num_refined == 4

    @pytest.mark.parametrize(
        ("num_refined", "error", "message"),
        [
            ({400: 1}, ValueError, r"must begin at timestep 1000 .*, but got \{400: 1\}"),
            ({1001: 1, 1000: 2}, ValueError, "must begin at timestep 1000"),
            ({1000: 1, -1: 2}, ValueError, "must begin at timestep 1000 and have none below 0"),
            ({}, ValueError, r"must begin at timestep 1000 .*, but got \{\}"),
            ({1000: 1, 400: 5}, ValueError, r"between 0 and 4 in down_blocks\.0.*, but got 5"),
            ({1000: 1.0}, TypeError, "num_refined must be an int, but got float"),
            ({1000: 1, 10.5: 2}, TypeError, "must have ints as timesteps, but got float"),
            ({1000: 1, "up_blocks": 2}, TypeError, "must have ints as timesteps, but got str"),
            ({"up_blocks": 1, "mid": 2}, ValueError, "no AVQ layer is 'mid' or in it; the"),
            ({"up_blocks": 1, "down_blocks": {1000: 7}}, ValueError, "0 and 4 in .* but got 7"),
        ],
    )  # fmt: skip
    def test_errors_change_nothing(self, unet, codebooks, num_refined, error, message):
        set_num_refined(apply_avq(unet, codebooks), SCHEDULE, level=1)
        before = str(summary(unet))
        with pytest.raises(error, match=message):
            set_num_refined(unet, num_refined)
        assert str(summary(unet)) == before


class TestSummary:
    def test_rows(self, pipe, codebooks):
        """Catches a summary that reports intentions instead of what ran."""
        apply_avq(pipe, codebooks)
        rows = {row.name: row for row in summary(pipe).rows}
        assert len(rows) == 10
        assert rows[LAYER].num_tokens is None
        assert rows[LAYER].calls == {}
        draw(pipe, width=192)
        with avq_disabled(pipe):
            predict(pipe.unet)
            assert runs(pipe) == {"exact: disabled"}
        rows = {row.name: row for row in summary(pipe).rows}
        row = rows[LAYER]
        assert (row.level, row.num_heads, row.head_dim, row.config) == (0, 2, 8, "M4P2C2")
        assert row.runs == "AVQ (torch backend)"
        assert row.calls == {"AVQ": 2, "disabled": 1}
        assert row.num_tokens == 256
        other = rows["mid_block.attentions.0.transformer_blocks.0.attn1"]
        assert (other.level, other.config, other.runs) == (3, "", "exact: AttnProcessor2_0")

    def test_hand_over(self, pipe, codebooks):
        """Catches a layer reported as AVQ whose last call was not."""
        attn = apply_avq(pipe, codebooks).unet.get_submodule(LAYER)
        attn(torch.zeros(1, 7, 16))
        row = summary(pipe).rows[0]
        assert row.runs == "exact: tokens are not the grid"
        assert row.calls == {"tokens are not the grid": 1}

    def test_table(self, pipe, codebooks):
        """Catches a column shifted against its header."""
        draw(apply_avq(pipe, codebooks))
        report = summary(pipe)
        header, first, *rest = str(report).splitlines()
        assert len(rest) == 9
        assert header.split() == ["layer", "level", "heads", "config", "runs", "tokens", "calls"]
        cells = [LAYER, "0", "2x8", "M4P2C2", "AVQ (torch backend)", "256", "AVQ: 2"]
        assert first.split() == " ".join(cells).split()
        assert first.index("M4P2C2") == header.index("config")
        assert report.cells()[1] == cells

    def test_replaced(self, pipe, codebooks):
        apply_avq(pipe, codebooks).unet.get_submodule(LAYER).set_processor(AttnProcessor2_0())
        assert summary(pipe).rows[0].runs == "exact: replaced by AttnProcessor2_0"


class TestOwnersLine:
    """`pipe.set_attn_processor(AVQProcessor(...))`, in the three forms that users meet."""

    @pytest.fixture
    def expected(self, codebooks):
        return draw(apply_avq(tiny_pipe(), codebooks))

    @pytest.mark.parametrize(
        ("form", "tuned"), [("class", True), ("from_pipe", False), ("stock", True)]
    )
    def test_equals_apply(self, pipe, tuned, form):
        """Catches the literal line working on a subclass's own components only by luck."""
        codebooks = (tuned_codebooks if tuned else random_codebooks)(pipe.unet)
        expected = draw(apply_avq(tiny_pipe(), codebooks))
        if form == "class":
            pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
        elif form == "from_pipe":
            pipe = quiet(AVQStableDiffusionPipeline.from_pipe(pipe))
        others = {name: p for name, p in pipe.unet.attn_processors.items() if "attn2" in name}
        if form == "stock":
            pipe.unet.set_attn_processor(AVQProcessor(codebooks, unet=pipe.unet))
        else:
            pipe.set_attn_processor(AVQProcessor(codebooks))
            processors = pipe.unet.attn_processors
            assert all(processors[name] is other for name, other in others.items())
        assert torch.equal(draw(pipe), expected)

    def test_route_and_backend(self, pipe, codebooks):
        """Catches choices that only `apply_avq` takes."""
        with pytest.raises(ValueError, match=r"route must be fastest, .*, but got 'nev"):
            AVQProcessor(codebooks, route="never")
        with pytest.raises(ValueError, match=r"backend must be one of auto, .*but got 'fast'"):
            AVQProcessor(codebooks, backend="fast")
        avq_pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
        avq_pipe.set_attn_processor(AVQProcessor(codebooks, backend="reference"))
        pipe.unet.set_attn_processor(AVQProcessor(codebooks, unet=pipe.unet, backend="reference"))
        for pipeline in (avq_pipe, pipe):
            draw(pipeline)
            assert runs(pipeline) == {"AVQ (reference backend)"}

    def test_other_processors(self, codebooks, expected):
        """Catches an AVQ pipeline on which nothing else can be set any more."""
        pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
        pipe.set_attn_processor(AVQProcessor(codebooks))
        processor = AttnProcessor2_0()
        pipe.set_attn_processor(processor)
        assert set(pipe.unet.attn_processors.values()) == {processor}
        pipe.set_attn_processor(AVQProcessor(codebooks))
        assert torch.equal(draw(pipe), expected)

    @pytest.mark.feature("save_pretrained")
    def test_saves_as_a_stock_pipeline(self, codebooks, expected, tmp_path):
        """Catches a saved folder that only opens where this package is installed."""
        pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
        pipe.set_attn_processor(AVQProcessor(codebooks))
        pipe.save_pretrained(tmp_path)
        assert type(DiffusionPipeline.from_pretrained(tmp_path)) is StableDiffusionPipeline
        loaded = AVQStableDiffusionPipeline.from_pretrained(tmp_path)
        assert isinstance(loaded, AVQStableDiffusionPipeline)
        loaded.set_progress_bar_config(disable=True)
        loaded.set_attn_processor(AVQProcessor(codebooks))
        torch.testing.assert_close(draw(loaded), expected, rtol=1e-4, atol=1e-4)


def test_deepcopied_pipeline(pipe, codebooks):
    """Catches a copy that shares enabled flags or hooks with its original."""
    avq = draw(apply_avq(pipe, codebooks))
    twin = copy.copy(pipe)
    with avq_disabled(pipe):  # a block that never ends for the copy
        twin.register_modules(unet=copy.deepcopy(pipe.unet))
    remove_avq(pipe)
    assert torch.equal(draw(twin), avq)
