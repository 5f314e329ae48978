"""Routing to the faster attention: by a table of break-even token counts, measured once."""

import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from checks import calls, differ, runs
from tiny import predict, small_unet, traced_unet
from tiny_transformers import flux_transformer, sd3_transformer
from tiny_transformers import predict as predict_tokens
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_disabled,
    select_layers,
    set_threshold,
    summary,
)
from avq_diffusers.attention import limits
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.self_check import versions
from avq_diffusers.attention.tensors import Tensors, mean_columns
from avq_diffusers.config import Spec
from avq_diffusers.hosts.core import columns, routing
from avq_diffusers.hosts.core import state as states
from avq_diffusers.hosts.core.routing import (
    NEVER,
    BreakEven,
    LayerRoute,
    Trial,
    Workload,
    break_even,
    known_break_even,
    measure,
)

WORKLOAD = Workload(
    16, 40, Spec(num_parents=64, num_refined=16, num_children=8), 192, torch.float16
)
ON_CPU = replace(WORKLOAD, dtype=torch.float32)
NUM_TOKENS = 1024
FOUND = BreakEven(NEVER, NUM_TOKENS, NUM_TOKENS, 0)  # between the two of `measured`
KEY = f"GPU X, {versions()}, float16, 16 rows, D40, 192 columns, M64P16C8, tiles of 128"


@pytest.fixture
def cache_file(monkeypatch, tmp_path):
    """A user's cache folder and a GPU's name; tables are read again."""
    monkeypatch.setattr(routing, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    routing._table.cache_clear()
    yield tmp_path / "avq-diffusers" / "routes.json"
    routing._table.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """What was measured on a GPU with break-evens of 2048 and 512 tokens."""
    measurements, least = [], {"eager": 2048, "compiled": 512}

    def measure(names, workload, device, trial):
        measurements.append((trial.num_tokens, *names))
        return {name: trial.num_tokens >= least[name] for name in names}

    monkeypatch.setattr(routing, "measure", measure)
    return measurements


def trial(num_tokens=NUM_TOKENS, num_beside=0, batch_heads=(2, 8)):
    batch, heads = batch_heads
    return Trial(attend_with, (batch, num_tokens + num_beside, heads, 40), num_tokens)


def attend_with(spec, **tensors):
    return attend(Tensors.of(**tensors), spec)


TRIAL = trial()


def set_break_even(unet, eager, compiled=NEVER):
    """Break-even of every AVQ layer for a batch of two in float32."""
    for layer in select_layers(unet):
        state = layer.avq_state
        if state is not None:
            workload = state.workload(2, torch.float32, torch.device("cpu"), state.config.spec)
            key = torch.device("cpu"), workload
            state.route.break_even = {key: BreakEven(eager, compiled)}
            state.settled = None, None


def compile_callers(unet):
    """Compile the modules whose hooks begin the layers' calls."""
    torch.compiler.reset()
    for layer in select_layers(unet):
        layer.caller.compile(backend="eager", fullgraph=True)


def test_layers_run_exact_where_the_kernels_are_wrong(unet, codebooks, monkeypatch):
    """Catches the PyTorch path in their place, which a GPU runs slower than exact attention."""
    exact = predict(unet)
    monkeypatch.setitem(limits.faults, (torch.device("cpu"),), "a wrong result")
    assert torch.equal(predict(apply_avq(unet, codebooks)), exact)
    assert runs(unet) == {"exact: the kernels are wrong on this GPU"}


def test_layers_below_the_break_even_run_exact(unet, codebooks):
    """Fails where the comparison, the layer's own number of tokens, or the batch is wrong."""
    exact = predict(unet, batch=2)
    apply_avq(unet, codebooks)
    avq, other = predict(unet, batch=2), predict(unet, batch=3)
    set_break_even(unet, 257)
    assert torch.equal(predict(unet, batch=2), exact)
    assert runs(unet) == {"exact: faster"}
    assert torch.equal(predict(unet, batch=3), other)
    set_break_even(unet, 256)
    predict(unet, batch=2)
    by_level = {row.level: row.runs for row in summary(unet).rows if row.config}
    assert by_level == {0: "AVQ (torch backend)", 1: "exact: faster"}
    set_break_even(unet, 1)
    assert torch.equal(predict(unet, batch=2), avq)


def test_compiled_code_has_a_break_even_of_its_own():
    unet = small_unet()
    exact = predict(unet, batch=2)
    avq = predict(apply_avq(unet, AVQConfig.parse("M4P2C2")), batch=2)
    assert differ(avq, exact)
    set_break_even(unet, NEVER, compiled=1)
    assert torch.equal(predict(unet, batch=2), exact)
    for layer in select_layers(unet):
        layer.attn.compile(backend="eager")
    torch.testing.assert_close(predict(unet, batch=2), avq)


class TestLearning:
    """What one layer learns from tokens that seem to lie on a GPU."""

    @pytest.fixture
    def state(self, unet, codebooks, cache_file, measured):
        return select_layers(apply_avq(unet, codebooks), (0,))[0].avq_state

    @pytest.fixture
    def learn(self, state, monkeypatch):
        with FakeTensorMode():
            tokens = torch.empty(2, 1, 1, device="cuda")

        def learn(trial=TRIAL, *, capturing=False, mode=nullcontext):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
            workload = state.workload(2, tokens.dtype, tokens.device, state.config.spec)
            with mode():
                state.route.learn(workload, tokens.device, trial)
            return list(state.route.break_even.values())

        return learn

    @pytest.mark.parametrize(
        "when",
        [{"trial": None}, {"capturing": True}, {"mode": partial(FlopCounterMode, display=False)}],
    )
    def test_what_is_not_measured_now(self, state, learn, measured, when):
        """Catches a measurement that breaks a CUDA graph or is counted as the model's, one that is
        never made up for, and a CUDA graph of AVQ where exact attention is known to be faster."""
        assert learn(**when) == []
        assert not measured
        assert learn() == learn() == [FOUND]
        assert len(measured) == 1
        assert learn(trial(4096)) == [FOUND._replace(eager=4096)]
        assert len(measured) == 2
        state.route.break_even = {}
        assert learn(**when) == [FOUND._replace(eager=4096)]
        assert len(measured) == 2

    def test_a_choice_needs_no_measurement(self, state, learn, measured):
        """A fixed route, or that of a tolerance. Catches minutes before the first image."""
        state.route.route = "always"
        assert learn() == []
        state.route.route = "fastest"
        state.note_allocation(None, 64)
        assert learn() == []
        assert not measured
        state.set_schedule(state.schedule)
        assert learn() == [FOUND]

    def test_one_device_does_not_decide_for_another(self, state, learn):
        """Catches a model that moves to the CPU with the break-evens of its GPU."""
        assert learn() == [FOUND]
        ((device, workload),) = state.route.break_even
        assert state.route.learn(workload, device) == FOUND
        assert state.route.learn(workload, torch.device("cpu")) is None


class TestCPU:
    """A CPU decides as a GPU does."""

    @pytest.fixture
    def times(self, cache_file, monkeypatch):
        """Milliseconds of AVQ's next calls; exact attention always takes one."""
        times = []

        def milliseconds(attend):
            return 1.0 if attend.func is scaled_dot_product_attention else times.pop(0)

        monkeypatch.setattr(routing, "MEASURED", ("cuda", "cpu"))
        monkeypatch.setattr(routing, "_cpu_name", lambda: "CPU X")
        monkeypatch.setattr(routing, "_wall_milliseconds", milliseconds)
        return times

    @pytest.mark.parametrize(("milliseconds", "expected"), [(1.1, "exact: faster"), (0.9, "AVQ")])
    def test_the_faster_attention_runs(
        self, unet, times, cache_file, capfd, milliseconds, expected
    ):
        """Catches AVQ where it is slower, a second measurement, and one for all CPUs."""
        config = AVQConfig.parse("M4P2C2", levels=(0,))
        times += 4 * [milliseconds]
        for _ in range(2):  # the second finds the first's
            predict(apply_avq(unet, config))
            assert not times
            (found,) = runs(unet)
            assert found.startswith(expected)
            routing._table.cache_clear()
        text = "measures once which attention is faster with 256 tokens"
        assert text in capfd.readouterr().err
        (key,) = json.loads(cache_file.read_text())
        device = f"CPU X (threads: {torch.get_num_threads()})"
        assert key.startswith(f"{device}, {versions()}, float32, 2 rows, D8, 8 columns, M4P2C2, ")

    def test_compiled_code_does_the_same(self, times):
        """Catches two measurements of one time, and a cost of launches, which a CPU has not."""
        times += 4 * [0.9]
        names = "eager", "compiled"
        found = measure(names, ON_CPU, torch.device("cpu"), TRIAL)
        assert found == dict.fromkeys(names, True)

    def test_one_slow_call_decides_nothing(self, times):
        """Catches the first call, which also warms up, as the time."""
        times += [9.0, 1.1, 0.9, 1.1]
        assert measure(["eager"], ON_CPU, torch.device("cpu"), TRIAL) == {"eager": True}

    def test_long_calls_are_timed_twice(self, times):
        """Catches minutes before the first step of a large model, and one call that decides alone:
        the first may take long because it warms up, or something else runs."""
        times += [400.0, 350.0]
        assert measure(["eager"], ON_CPU, torch.device("cpu"), TRIAL) == {"eager": False}
        assert not times
        times += [400.0, 0.9, 1.1, 1.1]
        assert measure(["eager"], ON_CPU, torch.device("cpu"), TRIAL) == {"eager": True}
        assert not times

    def test_one_batch_element_is_timed(self, times, monkeypatch):
        """Catches seconds of a large batch, whose elements run one after another."""
        shapes = []
        monkeypatch.setattr(routing, "_both_attentions", lambda *call: shapes.append(call[2].shape))
        with suppress(TypeError):
            measure(["eager"], ON_CPU, torch.device("cpu"), TRIAL)
        assert shapes == [(1, *TRIAL.shape[1:])]


@pytest.mark.parametrize(("num_tokens", "is_faster"), [(8192, True), (64, False)])
def test_real_times_of_a_cpu(num_tokens, is_faster):
    """Columns per query: 192 of AVQ, against 8192 and 64."""
    layer = trial(num_tokens, batch_heads=(2, 1))
    found = measure(["eager"], ON_CPU, torch.device("cpu"), layer)
    assert found == {"eager": is_faster}


@pytest.mark.parametrize("route", ["quick", True, 4096.0, None, -1])
def test_unknown_routes_are_refused(unet, route):
    wanted = "at least 0" if route == -1 else "fastest, always or a number of tokens"
    with pytest.raises(ValueError, match=f"route must be {wanted}, but got {route!r}"):
        apply_avq(unet, route=route)


@pytest.mark.parametrize(("route", "levels"), [(257, {}), (256, {0}), (65, {0}), (64, {0, 1})])
def test_layers_with_few_tokens_run_exact(unet, codebooks, route, levels):
    """Catches a layer of just as many tokens that runs exact, and one of fewer that does not."""
    predict(apply_avq(unet, codebooks, route=route))
    for row in summary(unet).rows:
        avq = "AVQ (torch backend)" if row.level in levels else "exact: few tokens"
        assert not row.config or row.runs == avq


def test_a_measurement_is_made_once_and_kept(cache_file, measured, monkeypatch):
    """Also catches one of another version's kernels."""
    device = torch.device("cuda")
    assert known_break_even(WORKLOAD, device) is None
    assert break_even(WORKLOAD, device, TRIAL) == break_even(WORKLOAD, device, TRIAL) == FOUND
    assert measured == [(NUM_TOKENS, "eager", "compiled")]
    assert json.loads(cache_file.read_text()) == {KEY: FOUND._asdict()}
    routing._table.cache_clear()
    assert known_break_even(WORKLOAD, device) == FOUND
    assert set(cache_file.parent.iterdir()) == {cache_file, cache_file.with_suffix(".lock")}
    monkeypatch.setattr(routing, "versions", lambda: "torch 3.0")
    assert known_break_even(WORKLOAD, device) is None


def test_two_that_measure_at_once_keep_both(cache_file, monkeypatch):
    """Catches a writer that does not see what another wrote since it read."""
    read, both_have_read = routing._read, Barrier(2)

    def slow_read(path):
        table = read(path)
        with suppress(BrokenBarrierError):  # whoever holds the lock waits in vain
            both_have_read.wait(0.5)
        return table

    monkeypatch.setattr(routing, "_read", slow_read)
    with ThreadPoolExecutor() as pool:
        list(pool.map(routing._keep, ["one", "two"], [FOUND._asdict()] * 2))
    assert json.loads(cache_file.read_text()).keys() == {"one", "two"}


def test_break_evens_are_enclosed(cache_file, measured):
    """Catches a second measurement of what is known, and one that is taken for another number of
    tokens, or for compiled code."""
    for num_tokens in (1024, 4096, 8192, 600, 256, 512, 2000, 3000, 100):
        found = break_even(WORKLOAD, torch.device("cuda"), trial(num_tokens))
        assert found.unknown(num_tokens) == []
    assert measured == [
        (1024, "eager", "compiled"),
        *((4096, "eager"), (600, "compiled"), (256, "compiled"), (512, "compiled")),
        *((2000, "eager"), (3000, "eager")),
    ]
    assert found == BreakEven(3000, 512, 2000, 256)


@pytest.mark.parametrize("milliseconds", [0.01, 0.1, 9.9, 10.1, 200.0])
def test_a_measurement_is_short_and_says_so(monkeypatch, capfd, milliseconds):
    """Catches many calls of a slow attention in the middle of a denoising, and an eager call of AVQ
    that gains less than it keeps the host busy: SD1.5's step at 512 pixels waits for the host. The
    same for compiled layers, around which less is fused."""
    clock = []
    both = partial(clock.append, milliseconds / 2), partial(clock.append, milliseconds / 4), 0.25

    def elapsed(calls):
        before = sum(clock)
        calls()
        return sum(clock) - before

    def captured(call):
        return lambda: [call() for _ in range(routing._CALLS)]

    monkeypatch.setattr(routing, "_both_attentions", lambda *call: both)
    monkeypatch.setattr(routing, "_elapsed", elapsed)
    monkeypatch.setattr(routing, "_captured", captured)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    found = measure(("eager", "compiled"), WORKLOAD, torch.device("cuda"), TRIAL)
    gain = milliseconds / 2
    assert found == {"eager": gain > 0.2, "compiled": gain > 0.04}
    assert sum(clock) <= 3000
    assert "measures once which attention is faster with 1024 tokens" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["M4P2C2", "M4C2Tinf"])
@pytest.mark.parametrize("make", [small_unet, flux_transformer, sd3_transformer])
def test_a_measurement_runs_the_kernels_of_the_layer(make, name, monkeypatch):
    """Catches a layout, order or option of its own, for which kernels would compile again."""
    model, looks, of_trials = make(), [], []
    config = AVQConfig.parse(name, query_tile=16)

    def look(tensors, spec, backend):
        facts = [
            (x.shape, x.stride()[1:], x.dtype) if isinstance(x, torch.Tensor) else x
            for x in tensors
        ]
        looks.append((spec.any_refinement, backend, *facts))
        return original(tensors, spec, backend)

    def learn(route, workload, device, trial, ranks):
        before = len(looks)
        avq, exact, share = routing._both_attentions(workload, device, trial)
        assert avq().output.shape == exact().shape
        assert share == 1
        of_trials.extend(looks[before:])
        del looks[before:]

    original = states.attend
    monkeypatch.setattr(states, "attend", look)
    apply_avq(model, config)
    monkeypatch.setattr(LayerRoute, "learn", learn)
    monkeypatch.setattr(LayerRoute, "is_open", lambda *call: True)
    predict_of = predict if make is small_unet else predict_tokens
    for _ in range(2):  # the first call with a threshold tells the columns
        predict_of(model)
    assert len(looks) == 2 * len(calls(model))
    assert {*map(str, looks)} == {*map(str, of_trials)}


def test_what_needs_no_measurement(monkeypatch):
    """Catches seconds for AVQ that is off or must run anyway, and times of another attention, or of
    another backend, that are kept for all calls."""
    unet, trials = small_unet(), []
    monkeypatch.setattr(LayerRoute, "is_open", lambda *call: True)
    monkeypatch.setattr(LayerRoute, "learn", lambda *call: trials.append(len(call) > 3 and call[3]))
    config = AVQConfig.parse("M4P2C2")
    with avq_disabled(apply_avq(unet, config)):
        predict(unet)
    predict(apply_avq(unet, config, backend="torch"))
    apply_avq(unet, config)
    for layer in select_layers(unet, (0,)):
        layer.avq_state.function = states.attend
    predict(unet)
    predict(apply_avq(unet, AVQConfig.parse("M256P2C32")))  # of 256 keys
    assert trials
    assert not any(trials)


@pytest.mark.parametrize(
    "other",
    [
        {"height": 12, "width": 8},
        {"encoder_hidden_states": torch.ones(2, 9, 32), "txt_ids": torch.zeros(9, 3)},
    ],
)
def test_settled_calls_do_not_answer_for_others(other):
    """Catches the query order of another grid of as many tokens, and another text's length."""
    config = AVQConfig.parse("M4P2C2", query_tile=16)
    fresh = predict_tokens(apply_avq(flux_transformer(), config), **other)
    model = apply_avq(flux_transformer(), config)
    for _ in range(2):
        predict_tokens(model)
    assert torch.equal(predict_tokens(model, **other), fresh)


def test_a_trace_compares_no_sizes(unet):
    """Catches a warning, or an error, for each layer's settled call."""
    apply_avq(unet.requires_grad_(False), AVQConfig.parse("M4P2C2"))
    tokens = torch.ones(1, 4, 16, 16), torch.tensor(1), torch.ones(1, 7, 32)
    with avq_disabled(unet), warnings.catch_warnings(record=True) as caught:
        unet(*tokens)
        warnings.simplefilter("always")
        torch.jit.trace(lambda *x: unet(*x)[0], tokens, check_trace=False)
    assert not [warning for warning in caught if warning.filename == states.__file__]


class TestThreshold:
    """The time of a call with a threshold depends on the columns that the layer needs."""

    CONFIG = AVQConfig(query_tile=16, num_parents=4, num_children=2, levels=(0,))

    @pytest.fixture
    def unet(self):
        return traced_unet()

    @pytest.fixture
    def trials(self, monkeypatch, cache_file):
        """Workloads and trials of 256 tokens that were measured: AVQ is faster up to 80 columns."""
        trials = []

        def measure(names, workload, device, trial):
            trials.append((str(workload.spec), workload.columns))
            return dict.fromkeys(names, workload.columns <= 80)

        monkeypatch.setattr(routing, "MEASURED", ("cuda", "cpu"))
        monkeypatch.setattr(routing, "measure", measure)
        return trials

    @pytest.fixture
    def reads(self, monkeypatch):
        """How many calls came before each reading."""
        reads, count = [], columns.Needed.count

        def noted(needed, *shown):
            before = needed.num_read
            count(needed, *shown)
            if needed.num_read != before:
                reads.append(needed.num_read)

        monkeypatch.setattr(columns.Needed, "count", noted)
        return reads

    def test_columns_decide(self, unet, trials):
        """Catches a layer that needs all keys and runs AVQ, one that needs few and does not, and
        one that is not asked again."""
        exact = predict(unet)
        apply_avq(unet, self.CONFIG.changed(threshold=0))
        first, second = predict(unet), predict(unet)
        assert not torch.equal(first, exact)
        assert torch.equal(second, exact)
        assert runs(unet) == {"exact: faster"}
        assert not trials  # as many columns as keys
        predict(set_threshold(unet, math.inf))
        assert not trials  # the first call tells
        predict(unet)
        assert {*trials} == {("M4C2Tinf", 4)}
        assert calls(unet) == [{"AVQ": 2}]
        set_threshold(unet, {1000: math.inf, 5: 0})
        for _ in range(3):
            predict(unet)
        assert runs(unet) == {"AVQ (torch backend)"}

    def test_another_number_of_tokens_is_asked_once(self, unet, trials):
        """Catches AVQ in each call of two sizes in turns, and of the parts of a schedule."""
        apply_avq(unet, self.CONFIG.changed(threshold=0))
        for _ in range(3):
            predict(unet)
            predict(unet, height=8)
        assert calls(unet) == [{"AVQ": 2, "faster": 4}]
        set_threshold(unet, {1000: 0, 500: 1e-9})
        for timestep in (900, 100) * 3:
            unet(torch.ones(1, 4, 16, 16), timestep, torch.ones(1, 5, 32))
        assert calls(unet) == [{"AVQ": 2, "faster": 4}]

    def test_kinds_of_calls_are_few(self, unet, trials):
        """Catches columns that are kept for each size of image that a server has ever made, and a
        usual size that is forgotten."""
        apply_avq(unet, self.CONFIG.changed(threshold=0))
        for height in range(columns.MOST_KINDS + 2):
            predict(unet)
            predict(unet, height=18 + 2 * height)
        (layer,) = select_layers(unet)
        assert len(layer.avq_state.kinds) == columns.MOST_KINDS
        assert layer.avq_state.calls["AVQ"] == columns.MOST_KINDS + 3

    def test_readings_are_few(self, unet, trials, reads):
        """Catches a wait for the GPU in each call, columns of the first call for ever, and a seed
        whose later images differ."""
        for num_calls, kind in ((16, "faster"), (32, "AVQ")):
            apply_avq(unet, self.CONFIG.changed(threshold=math.inf))
            for _ in range(num_calls):
                predict(unet)
            assert calls(unet) == [{"AVQ": num_calls}]
            (layer,) = select_layers(unet)
            layer.avq_state.shown.fill_(100)
            predict(unet)
            assert layer.avq_state.last_call == kind
            assert reads == [1, 2, 4, 8, 16]
            reads.clear()

    def test_a_settled_call_is_not_decided_again(self, unet, trials, monkeypatch):
        """Catches a step that waits for its host, and the decision for another dtype."""
        begun, begin = [], states.LayerState._begun

        def noted(*call):
            begun.append(call)
            return begin(*call)

        monkeypatch.setattr(states.LayerState, "_begun", noted)
        apply_avq(unet, self.CONFIG.changed(threshold=math.inf))
        for _ in range(20):
            predict(unet)
        assert len(begun) == 17  # the first tells the columns, sixteen are counted
        predict(set_threshold(unet, math.inf))  # the same, which a tolerance may have chosen before
        assert len(begun) == 18
        state = select_layers(unet, (0,))[0].avq_state
        tokens = states.Tokens(torch.ones(2, 16, 16, 16), torch.float32, (16, 16))
        for _ in range(20):
            state.enter(tokens, None)
        before = len(begun)
        with torch.autocast("cpu", torch.bfloat16):  # leaves the layer's input in float32
            state.enter(tokens, None)
        assert len(begun) == before + 1

    def test_always_never_looks(self, unet, trials, reads):
        for route in ("always", 16):
            apply_avq(unet, self.CONFIG.changed(threshold=math.inf), route=route)
            for _ in range(3):
                predict(unet)
        assert not trials
        assert not reads

    def test_what_records_waits_for_nothing(self, unet, trials, reads, monkeypatch):
        """Catches a wait in a CUDA graph, which fails, and columns of what it computes later."""
        apply_avq(unet, self.CONFIG.changed(threshold=math.inf))
        for module in (states, routing):
            monkeypatch.setattr(module, "is_recorded", lambda device: True)
        for _ in range(3):
            predict(unet)
        assert not trials
        assert not reads
        assert {row.columns for row in summary(unet).rows} == {None}
        assert calls(unet) == [{"AVQ": 3}]

    def test_what_was_recorded_is_measured_later(self, unet, trials, monkeypatch):
        """Catches the answer for a call in a CUDA graph, which measures nothing, that stays."""
        apply_avq(unet, AVQConfig.parse("M4P2C2", levels=(0,)))
        between = BreakEven(4096, 4096, 16, 16)
        monkeypatch.setattr(routing, "known_break_even", lambda *call: between)
        with monkeypatch.context() as patch:
            for module in (states, routing):
                patch.setattr(module, "is_recorded", lambda device: True)
            predict(unet)
        assert not trials
        predict(unet)
        assert trials

    def test_compiled_code_counts_as_usual(self, unet, trials, reads):
        """Catches a graph break, and AVQ where the usual columns take longer."""
        exact = predict(unet, batch=2)
        set_break_even(apply_avq(unet, self.CONFIG.changed(threshold=math.inf)), eager=1)
        assert differ(predict(unet, batch=2), exact)
        compile_callers(unet)
        torch.testing.assert_close(predict(unet, batch=2), exact)
        assert not trials
        assert not reads

    def test_compiled_before_the_first_call(self, unet, trials, monkeypatch):
        """Catches AVQ in every layer, a graph break, and the times of eager calls, which the
        compiler slows down."""
        names, measure = [], routing.measure

        def noted(of, *call):
            names.extend(of)
            return measure(of, *call)

        monkeypatch.setattr(routing, "measure", noted)
        exact = predict(unet, batch=2)
        compile_callers(apply_avq(unet, self.CONFIG.changed(threshold=math.inf)))
        torch.testing.assert_close(predict(unet, batch=2), exact)
        assert {*trials} == {("M4C2Tinf", 192)}  # the usual columns
        assert {*names} == {"compiled"}


def test_some_heads_stand_for_all(monkeypatch):
    """Catches seconds of exact attention of one large call."""
    monkeypatch.setitem(routing._MOST_LOGITS, "cpu", 4 * 48**2)
    large = trial(40, num_beside=8)
    _, exact, share = routing._both_attentions(ON_CPU, torch.device("cpu"), large)
    assert exact().shape == (1, 4, 48, 40)
    assert share == 1 / 4


@pytest.mark.parametrize("wanted", [64, 96, 192, 448, 900])
def test_random_tokens_need_the_columns_of_the_layer(wanted):
    """Catches the time of a call that attends to fewer columns than the layer, or to more."""
    for num_beside in (0, 8):
        timed = trial(1024, num_beside, batch_heads=(1, 2))
        workload = Workload(2, 40, Spec(), wanted, torch.float32)
        avq, _, _ = routing._both_attentions(workload, torch.device("cpu"), timed)
        assert mean_columns(avq().shown) == pytest.approx(wanted, rel=0.05)


def test_numbers_of_columns_are_rounded():
    """Catches a time of other columns, and a measurement for each number."""
    rounded = {needed: columns.rounded(needed) for needed in range(64, 2000)}
    assert all(abs(found - needed) <= needed / 8 for needed, found in rounded.items())
    assert len({*rounded.values()}) < 24
    for num_tokens in range(64, 6000):  # all of them as columns
        every = replace(ON_CPU, columns=columns.rounded(num_tokens))
        assert not every.may_be_faster(num_tokens)
        assert every.may_be_faster(2 * num_tokens)


def test_the_workload_of_a_call(unet):
    """Catches heads, the batch, sizes or dtype left out of what decides."""
    config = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0,))
    state = select_layers(apply_avq(unet, config), (0,))[0].avq_state
    sizes = {"num_parents": 4, "num_refined": 1, "num_children": 2}
    spec = Spec(**sizes, query_tile=16)
    workload = Workload(8, 8, spec, 6, torch.float32)
    given = torch.float32, torch.device("cpu")
    for batch in (3, 4):  # of two heads, rounded up to a power of two
        assert state.workload(batch, *given, spec) == workload
    with torch.autocast("cpu", torch.bfloat16):  # leaves the layer's input in float32
        half = state.workload(3, *given, spec)
    assert half == replace(workload, dtype=torch.bfloat16)
    coarse = state.workload(4, *given, spec.changed(threshold=0.1))  # counts as usual
    assert coarse == replace(workload, spec=spec.changed(threshold=0.1), columns=192)
    assert "192 columns, M4C2T1e-4, tiles of 16" in coarse.key(given[1])


@pytest.mark.parametrize("content", ["", "{", "[1]", f'{{"{KEY}": 2048}}'])
def test_a_broken_cache_costs_a_measurement(cache_file, measured, content):
    cache_file.parent.write_text("a file in the way")
    assert break_even(WORKLOAD, torch.device("cuda"), TRIAL) == FOUND
    cache_file.parent.unlink()
    cache_file.parent.mkdir()
    cache_file.write_text(content)
    routing._table.cache_clear()
    assert break_even(WORKLOAD, torch.device("cuda"), TRIAL) == FOUND
    assert json.loads(cache_file.read_text()) == {KEY: FOUND._asdict()}
    assert len(measured) == 2


@pytest.mark.gpu
def test_long_sequences_are_worth_it_on_a_gpu():
    names, device = ("eager", "compiled"), torch.device("cuda", 0)
    for num_tokens, is_faster in ((16384, True), (64, False)):
        found = measure(names, WORKLOAD, device, trial(num_tokens))
        assert found == dict.fromkeys(names, is_faster)
