"""`set_threshold` and `set_num_refined`: by layer and by timestep, with exact attention."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import differ
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from tiny import LAYER, draw, predict, random_codebooks, traced_unet
from torch._dynamo.testing import CompileCounter

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    remove_avq,
    select_layers,
    set_num_refined,
    set_threshold,
    summary,
)

SCHEDULE = {1000: 1, 501: 4}
NO_NAMES = ("up_blocks.3.attentions.1.trans", "up_blocks.3.att", "up", "")
LAST = "up_blocks.3.attentions.1.transformer_blocks.0.attn1"


@pytest.fixture
def avq_unet(unet, codebooks):
    return apply_avq(unet, codebooks)


def refined(unet):
    return {row.name: row.config for row in summary(unet).rows if row.config}


def by_level(unet):
    return {row.level: row.config for row in summary(unet).rows if row.config}


def timesteps_of(unet):
    """Timestep and refined parents of every call of every AVQ layer, as the calls come."""
    seen, timestep = [], []

    def see_timestep(module, args, kwargs):
        timestep[:] = [float(torch.as_tensor(args[1]).max())]

    def see_layer(attn, args):
        seen.append((timestep[0], attn._avq.call.get().spec.num_refined))

    unet.register_forward_pre_hook(see_timestep, with_kwargs=True)
    for layer in select_layers(unet):
        if layer.avq_state is not None:
            layer.attn.register_forward_pre_hook(see_layer)
    return seen


def test_plan(avq_unet, codebooks):
    """Catches a filter that is ignored or inverted, entries in the order of writing, and layers
    without an entry reset."""
    plan = {"up_blocks.3.attentions.1": 0, "up_blocks": 1, "down_blocks.1": {1000: 4, 500: 3}}
    assert set_num_refined(avq_unet, plan) is avq_unet
    expected = {}
    for name in codebooks.layer_specs:
        expected[name] = "M4P1C2/stored" if name.startswith("up_blocks") else "M4P2C2/stored"
        if name.startswith("down_blocks.1"):
            expected[name] = "M4P4C2/stored, M4P3C2/stored"
    expected[LAST] = "M4P0C2/stored"
    assert refined(avq_unet) == expected
    set_num_refined(avq_unet, {"up_blocks": 4, "down_blocks": 4}, level=0)
    set_num_refined(avq_unet, 3, layer="up_blocks.3.attentions.1")
    for name, spec in codebooks.layer_specs.items():
        if spec.level == 0:
            expected[name] = "M4P4C2/stored"
    expected[LAST] = "M4P3C2/stored"
    assert refined(avq_unet) == expected


def test_one_takes_the_place_of_the_other(unet):
    """Catches sizes that are lost, a threshold that changes nothing, and both at once."""
    exact = predict(unet)
    config = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0, 1))
    refined_two = predict(apply_avq(unet, config))
    assert set_threshold(unet, 1e-3, level=0) is unet
    assert by_level(unet) == {0: "M4C2T0.001", 1: "M4P2C2"}
    fine = predict(set_threshold(unet, {"up_blocks": {1000: 1e-3, 5: 2}, "down_blocks": 1e-3}))
    assert refined(unet)[LAST] == "M4C2T0.001, M4C2T2"
    assert differ(fine, refined_two)
    assert torch.equal(predict(set_threshold(unet, {1000: 1e-3, 9: "exact"})), fine)
    torch.testing.assert_close(predict(set_threshold(unet, 0)), exact)
    assert torch.equal(predict(set_threshold(unet, "exact")), exact)
    assert torch.equal(predict(set_num_refined(unet, 2)), refined_two)


class TestErrors:
    """They change nothing."""

    @pytest.mark.parametrize(
        ("threshold", "error", "message"),
        [
            (-1, ValueError, "threshold must be at least 0, but got -1"),
            ({1000: True}, TypeError, "threshold must be a number or 'exact', but got bool"),
            (
                {"up_blocks": "fine"},
                TypeError,
                "threshold must be a number or 'exact', but got str",
            ),
        ],
    )
    def test_thresholds(self, avq_unet, threshold, error, message):
        stored = str(summary(avq_unet))
        with pytest.raises(ValueError, match='stored" needs num_refined in place of a threshold'):
            set_threshold(avq_unet, 0.1)
        assert str(summary(avq_unet)) == stored
        own = str(summary(apply_avq(avq_unet, AVQConfig.parse("M4C2T0.1"))))
        with pytest.raises(error, match=message):
            set_threshold(avq_unet, threshold)
        assert str(summary(avq_unet)) == own

    VALUES = (
        (5, ValueError, r"between 0 and 4 in down_blocks\.1.*, but got 5"),
        (-1, ValueError, r"between 0 and 8 in down_blocks\.0.*, but got -1"),
        (1.0, TypeError, "num_refined must be an int or 'exact', but got float"),
        ({1000: "dense"}, TypeError, "num_refined must be an int or 'exact', but got str"),
        ({400: 1}, ValueError, r"must begin at timestep 1000 .*, but got \{400: 1\}"),
        ({1001: 1, 1000: 2}, ValueError, "must begin at timestep 1000"),
        ({1000: 1, -1: 2}, ValueError, "must begin at timestep 1000 and have none below 0"),
        ({}, ValueError, r"must begin at timestep 1000 .*, but got \{\}"),
        ({1000: 1, 10.5: 2}, TypeError, "must have ints as timesteps, but got float"),
        ({1000: 1, "up_blocks": 2}, TypeError, "must have ints as timesteps, but got str"),
        ({"up_blocks": 1, "mid": 2}, ValueError, "no AVQ layer is 'mid' or in it; the"),
        ({"up_blocks": 1, "down_blocks": {1000: 9}}, ValueError, "0 and 8 in .* but got 9"),
    )

    def test_values(self, unet):
        """Catches layers changed before the one that cannot refine so many was reached."""
        config = AVQConfig.parse("M8P2C2", levels=(0, 1), overrides={"1": {"num_parents": 4}})
        set_num_refined(apply_avq(unet, random_codebooks(unet, config)), SCHEDULE, level=1)
        before = str(summary(unet))
        for num_refined, error, message in self.VALUES:
            with pytest.raises(error, match=message):
                set_num_refined(unet, num_refined)
            assert str(summary(unet)) == before
        set_num_refined(unet, 8, level=0)

    def test_names(self, avq_unet):
        """Catches "up_blocks.1" taken for "up_blocks.10", and an entry of a plan that matches
        layers, but none of those it may change."""
        before, none = str(summary(avq_unet)), "no AVQ layer"
        plan = {"up_blocks": 1, "down_blocks.0": 1}
        chosen = r"is 'down_blocks\.0' or in it; the chosen layers are"
        for num_refined, options, message in (
            *((1, {"layer": x}, f"{none} matches level=None, layer='{x}'") for x in NO_NAMES),
            *(({x: 1}, {}, f"{none} is '{x}' or in it") for x in NO_NAMES),
            (plan, {"layer": "up_blocks"}, rf"{none} {chosen} up_blocks"),
            (plan, {"level": 1}, rf"{none} {chosen} down_blocks\.1"),
            (1, {"level": 2}, f"{none} matches level=2, layer=None"),
        ):
            with pytest.raises(ValueError, match=message):
                set_num_refined(avq_unet, num_refined, **options)
        assert str(summary(avq_unet)) == before


class TestSchedule:
    @pytest.mark.feature("callbacks")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' use of NumPy
    @pytest.mark.parametrize(
        ("scheduler", "timesteps", "schedule"),
        [
            (DDIMScheduler, [751, 501, 251, 1], {400: 0, 1000: 1, 501: 4}),
            (EulerDiscreteScheduler, [999, 666, 333, 0], {1000: 1, 998: 2, 665: 0, 0: 4}),
        ],
    )
    def test_switches_at_the_timestep(self, pipe, codebooks, scheduler, timesteps, schedule):
        """Catches steps counted, a switch one step off, and a setting that is not what runs."""
        options = {"timestep_spacing": "linspace"} if scheduler is EulerDiscreteScheduler else {}
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **options)
        apply_avq(pipe, codebooks)
        expected = [schedule[min(x for x in schedule if x >= timestep)] for timestep in timesteps]
        later = iter(expected[1:])

        def set_by_hand(pipe, step, timestep, tensors):
            set_num_refined(pipe, next(later, 0))
            return tensors

        set_num_refined(pipe, expected[0])
        by_hand = draw(pipe, num_inference_steps=4, callback_on_step_end=set_by_hand)
        set_num_refined(pipe, schedule)
        seen = timesteps_of(pipe.unet)
        assert torch.equal(draw(pipe, num_inference_steps=4), by_hand)
        steps = zip(timesteps, expected, strict=True)
        assert seen == [step for step in steps for _ in codebooks.layer_specs]
        assert differ(draw(set_num_refined(pipe, expected[0]), num_inference_steps=4), by_hand)

    def test_other_layers_keep_theirs(self, pipe, codebooks):
        """Catches one schedule for the whole UNet, and a hook kept for nothing."""
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, SCHEDULE, level=0)
        set_num_refined(pipe, {1000: 2, 700: 3, 300: 3, 200: 0}, level=1)
        assert by_level(pipe) == {
            0: "M4P1C2/stored, M4P4C2/stored",
            1: "M4P2C2/stored, M4P3C2/stored, M4P0C2/stored",
        }
        seen = timesteps_of(pipe.unet)
        draw(pipe)  # timesteps 501 and 1
        assert {count for timestep, count in seen if timestep == 501} == {4, 3}
        assert {count for timestep, count in seen if timestep == 1} == {4, 0}
        set_num_refined(pipe, 2, level=0)
        assert by_level(pipe) == {
            0: "M4P2C2/stored",
            1: "M4P2C2/stored, M4P3C2/stored, M4P0C2/stored",
        }
        set_num_refined(pipe, {1000: 2, 500: 2}, level=1)
        assert by_level(pipe) == {0: "M4P2C2/stored", 1: "M4P2C2/stored"}
        assert "_avq" not in vars(pipe.unet)

    def test_threads_of_one_unet(self, avq_unet):
        """Catches a number of parents that is another thread's, and one that outlives it."""
        set_num_refined(avq_unet, SCHEDULE)
        inputs = torch.ones(1, 4, 16, 16), torch.ones(1, 5, 32)

        @torch.no_grad()
        def output(timestep):
            return avq_unet(inputs[0], timestep, inputs[1]).sample

        early, late = torch.tensor([900, 5])
        alone = output(early)
        assert differ(output(late), alone)
        with ThreadPoolExecutor(1) as thread:

            def draw_elsewhere(*_):
                handle.remove()
                thread.submit(output, late).result()

            handle = avq_unet.get_submodule(LAYER).register_forward_pre_hook(draw_elsewhere)
            assert torch.equal(output(early), alone)
            set_num_refined(avq_unet, 3, level=0)
            seen = timesteps_of(avq_unet)
            thread.submit(output, late).result()
        assert {count for _, count in seen} == {3, 4}

    def test_compile(self):
        """Catches compiled code that keeps the first number, a graph for every timestep, and calls
        past the compiled wrapper that keep the last number."""
        unet = apply_avq(traced_unet(), AVQConfig.parse("M4P2C2"))
        inputs = torch.randn(1, 4, 16, 16), torch.randn(1, 5, 32)

        @torch.no_grad()
        def output(model, timestep):
            return model(inputs[0], timestep, inputs[1]).sample

        schedule = {1000: 1, 400: "exact"}
        timesteps = torch.tensor([900.0, 700, 400, 900])
        expected = []
        for timestep in timesteps:
            part = min(start for start in schedule if start >= timestep)
            set_num_refined(unet, schedule[part])
            expected.append(output(unet, timestep))
        torch.compiler.reset()
        counter = CompileCounter()
        model = set_num_refined(torch.compile(unet, backend=counter, fullgraph=True), schedule)
        graphs = []
        for timestep, want in zip(timesteps, expected, strict=True):
            torch.testing.assert_close(output(model, timestep), want)
            graphs.append(counter.frame_count)
        assert graphs == [1, 1, 2, 2]
        torch.testing.assert_close(output(unet, timesteps[2]), expected[2])
        remove_avq(model)
        assert not unet._forward_pre_hooks
        assert not model._forward_pre_hooks
        torch.compiler.reset()

    def test_several_timesteps(self, avq_unet):
        set_num_refined(avq_unet, SCHEDULE)
        inputs = torch.zeros(2, 4, 16, 16), torch.tensor([900, 5]), torch.zeros(2, 5, 32)
        with pytest.raises(ValueError, match=r"one timestep for the whole batch, .* 5, 900\."):
            avq_unet(*inputs)
        seen = timesteps_of(avq_unet)
        avq_unet(inputs[0], torch.tensor([5, 5]), inputs[2])
        assert {count for _, count in seen} == {4}
