"""Routing to the faster attention: by a table of break-even token counts, measured on GPUs only."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from checks import differ, runs
from tiny import predict, small_unet
from torch._subclasses import FakeTensorMode

from avq_diffusers import AVQConfig, apply_avq, select_layers, summary
from avq_diffusers.attention import limits
from avq_diffusers.config import Sizes
from avq_diffusers.hosts import routing
from avq_diffusers.hosts.routing import (
    NEVER,
    TOKENS,
    BreakEven,
    Workload,
    break_even,
    known_break_even,
    measure_break_even,
)

WORKLOAD = Workload(
    16, 40, Sizes(num_parents=64, num_refined=16, num_children=8, exact_keys=0), 128, torch.float16
)
FOUND = BreakEven(eager=2048, compiled=512)
KEY = "GPU X, float16, 16 rows, D40, M64P16C8, tiles of 128"


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
    """The workloads that were measured; each gives FOUND."""
    workloads = []
    monkeypatch.setattr(
        routing, "measure_break_even", lambda workload, *others: workloads.append(workload) or FOUND
    )
    return workloads


def set_break_even(unet, eager, compiled=NEVER):
    """Break-even of every AVQ layer for a batch of two in float32."""
    for layer in select_layers(unet):
        state = layer.avq_state
        if state is not None:
            workload = state.workload(torch.empty(2, 1, 1), state.config.sizes)
            state.route.break_even = {workload: BreakEven(eager, compiled)}


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

        def learn(*, measure=True, capturing=False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
            workload = state.workload(tokens, state.config.sizes)
            state.route.learn(workload, tokens.device, measure=measure)
            return list(state.route.break_even.values())

        return learn

    @pytest.mark.parametrize("when", [{"measure": False}, {"capturing": True}])
    def test_what_is_not_measured_now(self, state, learn, measured, when):
        """Catches a measurement that breaks a CUDA graph and one that is never made up for, and a
        CUDA graph of AVQ where exact attention is known to be faster."""
        assert learn(**when) == []
        assert not measured
        assert learn() == learn() == [FOUND]
        assert len(measured) == 1
        state.route.break_even = {}
        assert learn(**when) == [FOUND]
        assert len(measured) == 1

    def test_a_choice_needs_no_measurement(self, state, learn, measured):
        """A fixed route, or that of a tolerance. Catches minutes before the first image."""
        state.route.route = "always"
        assert learn() == []
        state.route.route = "fastest"
        state.note_allocation(None, 64)
        assert learn() == []
        assert not measured
        state.set_sizes(state.config.sizes)
        assert learn() == [FOUND]


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


def test_a_measurement_is_made_once_and_kept(cache_file, measured):
    device = torch.device("cuda")
    assert known_break_even(WORKLOAD, device) is None
    assert break_even(WORKLOAD, device, 8) == break_even(WORKLOAD, device, 8) == FOUND
    assert measured == [WORKLOAD]
    assert json.loads(cache_file.read_text()) == {KEY: FOUND._asdict()}
    routing._table.cache_clear()
    assert known_break_even(WORKLOAD, device) == FOUND
    assert set(cache_file.parent.iterdir()) == {cache_file, cache_file.with_suffix(".lock")}


def test_measurements_of_other_shapes_and_of_the_package_stay(cache_file, measured):
    """Catches a file of the last shape alone, a table without the package's, and one over ours."""
    device, other = torch.device("cuda"), replace(WORKLOAD, head_dim=80)
    table = json.loads(routing._SHIPPED.read_text())
    assert table == routing._read(routing._SHIPPED)
    assert {tokens for found in table.values() for tokens in found.values()} <= {*TOKENS, NEVER}
    shipped, entry = next(iter(table.items()))
    for workload in (WORKLOAD, other):
        break_even(workload, device, 8)
    kept = json.loads(cache_file.read_text())
    assert kept.keys() == {WORKLOAD.key(device), other.key(device)}
    assert routing._table()[shipped] == entry
    cache_file.write_text(json.dumps({**kept, shipped: FOUND._asdict()}))
    routing._table.cache_clear()
    assert routing._table()[shipped] == FOUND._asdict() != entry


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


def test_never_slower_from_a_break_even_on(monkeypatch):
    """Catches the first number of tokens at which AVQ wins, though it loses at a later one.

    An eager call of AVQ counts three times: SD1.5's step at 512 pixels waits for the host.
    """
    exact = dict(zip(TOKENS, (3.0, 1.0, 3.0, 5.9, 6.1, 7.0), strict=True))

    def both(workload, num, *others):
        return lambda: 2.0, lambda: exact[num]

    monkeypatch.setattr(routing, "_both_attentions", both)
    monkeypatch.setattr(routing, "_eager_milliseconds", lambda call: call())
    monkeypatch.setattr(routing, "_compiled_milliseconds", lambda call: call())
    cpu = torch.device("cpu")
    assert measure_break_even(WORKLOAD, cpu, 8) == BreakEven(TOKENS[4], TOKENS[2])
    exact[TOKENS[-1]] = 1.0
    assert measure_break_even(WORKLOAD, cpu, 8) == BreakEven(NEVER, NEVER)


def test_what_is_measured(monkeypatch):
    """Catches arguments of the operation that are wrong or left out, and strides of their own, for
    which every kernel would compile again."""
    sizes, seen = Sizes(num_parents=4, num_refined=2, num_children=3, exact_keys=20), []
    workload = Workload(16, 8, sizes, 16, torch.float32, num_updates=1)

    def see(query, *others, **options):
        seen.append(options | {"shape": query.shape})
        assert query.transpose(1, 2).is_contiguous()
        return original(query, *others, **options)

    original = routing.avq_attention
    monkeypatch.setattr(routing, "avq_attention", see)
    monkeypatch.setattr(routing, "TOKENS", (48,))
    for name in ("_eager_milliseconds", "_compiled_milliseconds"):
        monkeypatch.setattr(routing, name, lambda call: call().numel())
    assert measure_break_even(workload, torch.device("cpu"), 8) == BreakEven(NEVER, 48)
    expected = {**asdict(sizes), "query_tile": 16, "num_updates": 1, "shape": (2, 8, 48, 8)}
    for options in seen:
        assert torch.equal(options.pop("query_order"), torch.arange(48))
        assert options == expected


def test_the_workload_of_a_call(unet):
    """Catches heads, the batch, sizes, updates or dtype left out of what decides."""
    num_updates = 1
    config = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0,), num_updates=num_updates)
    state = select_layers(apply_avq(unet, config), (0,))[0].avq_state
    sizes = Sizes(num_parents=4, num_refined=1, num_children=2, exact_keys=0)
    workload = Workload(8, 8, sizes, 16, torch.float32, num_updates)
    for batch in (3, 4):  # of two heads, rounded up to a power of two
        assert state.workload(torch.empty(batch, 1, 1), sizes) == workload
    with torch.autocast("cpu", torch.bfloat16):  # leaves the layer's input in float32
        half = state.workload(torch.empty(3, 1, 1), sizes)
    assert half == replace(workload, dtype=torch.bfloat16)


@pytest.mark.parametrize("content", ["", "{", "[1]", f'{{"{KEY}": 2048}}'])
def test_a_broken_cache_costs_a_measurement(cache_file, measured, content):
    cache_file.parent.write_text("a file in the way")
    assert break_even(WORKLOAD, torch.device("cuda"), 8) == FOUND
    cache_file.parent.unlink()
    cache_file.parent.mkdir()
    cache_file.write_text(content)
    routing._table.cache_clear()
    assert break_even(WORKLOAD, torch.device("cuda"), 8) == FOUND
    assert json.loads(cache_file.read_text()) == {KEY: FOUND._asdict()}
    assert len(measured) == 2


@pytest.mark.gpu
def test_long_sequences_are_worth_it_on_a_gpu():
    found = routing.measure_break_even(WORKLOAD, torch.device("cuda"), 8)
    assert found.eager in TOKENS
    assert found.compiled in TOKENS
    assert found.compiled <= found.eager
