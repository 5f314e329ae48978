"""`measure_error`: errors and costs along the ladder; and what measuring and calibrating refuse."""

import json
import math
from contextlib import nullcontext
from functools import cache, partial
from threading import Barrier, BrokenBarrierError

import pytest
import tomesd
import torch
from cases import OPTIONS
from diffusers import EDMEulerScheduler
from tiny import LAYER, small_unet, tiny_pipe
from tiny_transformers import sd3_pipe, sd3_transformer
from tiny_vision import images, tiny_vision
from tqdm import tqdm

from avq_diffusers import AVQConfig, calibrate, measure_error
from avq_diffusers.config import Sizes
from avq_diffusers.hosts import measurement, routing
from avq_diffusers.hosts.layers import LayerSpec
from avq_diffusers.hosts.measurement import Denoising, Ladder

PROMPT = "a red fox"
CONFIG = AVQConfig.parse("M8P4C2", query_tile=16, levels=(0, 1))
COARSE, MIDDLE, FINE = "M4P0C0", "M8P4C2", "M8P8C4E16"
SIZE = {"height": 128, "width": 128, "progress": False}
SPEC = LayerSpec("a", 0, 2, 8)


@pytest.fixture(autouse=True)
def short_ladder(monkeypatch):
    monkeypatch.setattr(measurement, "LADDER", (COARSE, FINE))


@cache
def unrun_pipe():
    """Fails if it runs."""
    pipe = tiny_pipe()
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    return pipe


def measure(pipe, config=CONFIG, **arguments):
    return measure_error(pipe, [PROMPT], config, **SIZE | {"num_inference_steps": 3} | arguments)


class TestMeasure:
    def test_parts(self, pipe):
        """Catches a mean over calls, and parts mixed up; errors are those of the contract."""

        def stop(pipe, step, timestep, tensors):
            pipe._interrupt = True
            return tensors

        first = measure(pipe, parts=3, seed=5, callback_on_step_end=stop)
        three, two = (measure(pipe, parts=parts, seed=5) for parts in (3, 2))
        for layers in zip(first.layers, three.layers, two.layers, strict=True):
            begin, by_call, halves = (
                {start: errors[FINE] for start, errors in x.errors.items()} for x in layers
            )
            assert [*by_call] == [1000, 666, 333]  # calls at 667, 334 and 1
            early, middle, late = by_call.values()
            assert len({early, middle, late}) == 3
            assert begin == {1000: early}
            assert halves == {1000: early, 500: max(middle, late)}
        assert measure(pipe, parts=2).layers != two.layers  # another seed

    def test_sizes_that_cost_as_much_as_exact_are_left_out(self, pipe, monkeypatch):
        """Catches E256 measured, and chosen, for 64 tokens."""
        monkeypatch.setattr(measurement, "LADDER", (COARSE, "M8P0C0E56", "M8P0C0E55"))
        for one in measure(pipe).layers:
            sizes = {COARSE: 4, MIDDLE: 16, "M8P0C0E55": 63}
            sizes |= {"M8P0C0E56": 64} if one.layer.level == 0 else {}
            tokens = (16 >> one.layer.level) ** 2
            assert one.costs == {name: columns / tokens for name, columns in sizes.items()}

    @pytest.mark.parametrize(
        ("make", "examples", "arguments"),
        [
            (lambda: tiny_pipe(small_unet()), [PROMPT], {"height": 64, "num_inference_steps": 1}),
            (partial(tiny_vision, "dinov2"), images(), {}),
        ],
        ids=["unet", "vision"],
    )
    def test_a_compiled_model_is_measured_eagerly(self, make, examples, arguments):
        """Catches a layer that does not run, as hooks in compiled code do not."""
        pipe, config = (make(), AVQConfig.parse("M8P4C2", query_tile=16))
        profile = measure_error(pipe, examples, config, progress=False, **arguments)
        getattr(pipe, "unet", pipe).compile(backend=lambda *_: pytest.fail("it was compiled"))
        assert measure_error(pipe, examples, config, progress=False, **arguments) == profile

    def test_nan_names_the_layer(self, pipe):
        pipe.unet.get_submodule(LAYER).to_k.weight.data[0, 0] = math.nan
        with pytest.raises(ValueError, match=rf"attention of {LAYER} gives NaN or infinity"):
            measure(pipe, num_inference_steps=1)

    def test_samplers_without_training_timesteps(self, pipe):
        pipe.scheduler = EDMEulerScheduler()
        with pytest.raises(ValueError, match="measure_error with several parts need a sampler"):
            measure(pipe)
        assert set(measure(pipe, parts=1).layers[0].errors) == {1000}


@pytest.mark.parametrize(
    ("make", "examples", "arguments", "error", "message"),
    [
        *(
            (unrun_pipe, [PROMPT], {"config": AVQConfig(**{name: value})}, ValueError, message)
            for name, value, message in (
                ("overrides", {"0": {"num_refined": 1}}, "chooses sizes .*; drop overrides"),
                ("codewords", "stored", 'a tolerance chooses sizes .*; drop codewords="stored"'),
                ("key_norm", True, "a tolerance chooses sizes .*; drop key_norm"),
            )
        ),
        (
            unrun_pipe,
            [PROMPT],
            {"num_inference_steps": 1001},
            ValueError,
            "at most 1000, but got 1",
        ),
        (unrun_pipe, [PROMPT], {"parts": 0}, ValueError, "parts must be at least 1, but got 0"),
        (cache(sd3_pipe), [PROMPT], {"parts": 2}, ValueError, "parts must be 1, but got 2"),
        (sd3_transformer, [PROMPT], {}, TypeError, "the pipeline of a transformer, but got SD3"),
        (tiny_vision, 3, {}, TypeError, "pixel_values must be tensors, but got int"),
        (tiny_vision, [3], {}, TypeError, "pixel_values must be tensors, but got int"),
        (tiny_vision, [], {}, ValueError, "at least one batch"),
        (tiny_vision, torch.ones(3, 64, 64), {}, ValueError, r"be batches .*got \(3, 64, 64\)"),
        (tiny_vision, [images(), images(32)], {}, ValueError, "one height and width"),
    ],
)
def test_refused(make, examples, arguments, error, message):
    with pytest.raises(error, match=message):
        measure_error(make(), examples, **arguments)


@pytest.mark.parametrize("measure", [calibrate, measure_error])
class TestRefusals:
    """Before the pipeline runs, but for the last."""

    @pytest.mark.parametrize(
        ("prompts", "arguments", "error", "message"),
        [
            ([PROMPT], {"hieght": 64}, TypeError, "StableDiffusionPipeline takes no argument hieg"),
            *(
                ([PROMPT], {name: "np"}, TypeError, f"are set for each .*, but got {name}")
                for name in ("prompt", "generator", "output_type")
            ),
            *(
                ([PROMPT], {"num_inference_steps": x}, TypeError, "num_inference_steps must be an ")
                for x in (1.5, "2", True)
            ),
            ([PROMPT], {"num_inference_steps": 0}, ValueError, "steps must be at least 1, but got"),
            ([PROMPT], {"config": "M4P2C2"}, TypeError, "config must be an AVQConfig, but got 'M4"),
            ([PROMPT], {"config": AVQConfig(levels=(7,))}, ValueError, "no self-attention at leve"),
            (PROMPT, {}, TypeError, "prompts must be a sequence of strings, but got one string"),
            ([PROMPT, 7], {}, TypeError, "a sequence of strings, but got 7 in it"),
            (7, {}, TypeError, "prompts must be a sequence of strings, but got 7"),
            ([], {}, ValueError, "prompts must hold at least one prompt, but got none"),
        ],
    )
    def test_arguments(self, measure, prompts, arguments, error, message):
        with pytest.raises(error, match=message):
            measure(unrun_pipe(), prompts, **SIZE | arguments)

    @pytest.mark.parametrize(
        ("thing", "message"),
        [
            (object(), "expected a pipeline with a unet or a transformer, or a model, but got obj"),
            (torch.nn.Linear(1, 1), "AVQ does not know the attention of Linear"),
            (small_unet(), "expected the pipeline of a UNet, but got UNet2DConditionModel"),
        ],
    )
    def test_no_pipeline(self, measure, thing, message):
        with pytest.raises(TypeError, match=message):
            measure(thing, [PROMPT])

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda pipe: tomesd.apply_patch(pipe, use_rand=False), "tokens are not the grid"),
            (lambda pipe: setattr(pipe.unet, "forward", lambda x, *_, **__: (x,)), "it did not ru"),
        ],
        ids=["merged", "not-run"],
    )
    def test_layers_that_avq_does_not_serve(self, pipe, measure, change, reason):
        """Catches codebooks that were fitted to nothing, and the order of another grid."""
        change(pipe)
        with pytest.raises(RuntimeError, match=rf"attn1 has no call that AVQ serves: {reason}"):
            measure(pipe, [PROMPT], CONFIG, num_inference_steps=1, **SIZE)


def test_costs_on_a_gpu_are_measured_once_and_kept(monkeypatch, tmp_path):
    """Catches a choice that changes with a second measurement, and the ratio upside down."""
    times = iter((1.0, 2.0, 4.0, 1.0))
    monkeypatch.setattr(routing, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(routing, "_compiled_milliseconds", lambda call: call())
    workload = routing.Workload(
        4, 8, Sizes(num_parents=4, num_refined=2, num_children=2, exact_keys=0), 16, torch.float16
    )

    def cost(num_tokens):
        turns = {"avq": lambda: next(times), "exact": lambda: next(times)}
        return routing.relative_cost(workload, num_tokens, torch.device("cuda"), **turns)

    try:
        for _ in range(2):
            routing._table.cache_clear()
            assert cost(256) == 0.5
        assert cost(1024) == 4.0
    finally:
        routing._table.cache_clear()
    (kept,) = tmp_path.rglob("routes.json")
    assert [*json.loads(kept.read_text()).values()] == [0.5, 4.0]


class TestLadder:
    @pytest.fixture
    def ladder(self):
        return Ladder(SPEC, None, CONFIG, Denoising(1, tqdm(disable=True)))

    def test_the_first_call_decides_what_is_measured(self, ladder):
        """Catches a later call of more tokens that has sizes of its own, where the first had
        none."""
        for num_tokens in (4, 64):
            tokens = torch.randn(3, 1, 2, num_tokens, 8)
            ladder.attend(*tokens, None, **OPTIONS | {"codewords": "means"})
        assert ladder.costs == {}
        assert [len(errors) for errors in ladder.calls[1000]] == [0, 0]

    def test_kernels_compile_side_by_side(self, ladder):
        """Catches rungs that compile one after another, gradients in a thread, a lost error."""
        both, modes = Barrier(2), []

        def call():
            both.wait(timeout=10)
            modes.append(torch.is_grad_enabled())

        ladder._compile([call, call], torch.device("cpu"))
        assert modes == [False, False]
        both.abort()
        with pytest.raises(BrokenBarrierError):
            ladder._compile([call], torch.device("cpu"))
