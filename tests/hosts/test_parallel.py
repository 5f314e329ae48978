"""AVQ in models that several real processes share, on gloo.

Each case runs in both ranks of a process group at once. Each rank writes the outcomes by case, as
they come. In the last case, one dies.
"""

import datetime
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checks import calls
from diffusers import ContextParallelConfig, FluxTransformer2DModel, TensorParallelConfig
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from hosts.kinds import KIND
from platformdirs import user_cache_path
from processes import start_ranks
from tiny_transformers import flux_pipe, flux_transformer, inputs, predict
from torch.distributed.fsdp import fully_shard

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_disabled,
    measure_error,
    remove_avq,
    set_threshold,
    summary,
)
from avq_diffusers.attention.limits import faults
from avq_diffusers.hosts.core import routing, state
from avq_diffusers.hosts.core.ranks import Joined
from avq_diffusers.hosts.measuring import exact_runs
from avq_diffusers.hosts.models import parallel
from eval.benchmarks.parallel import enable_parallelism

GUIDE = Path(__file__).parents[2] / "avq_diffusers/guides/parallel.md"
PATIENCE = 15  # seconds of the process group
CLOSE = 2e-6  # sums in another order
FAR = 1e-3  # AVQ differs from exact attention by more
CONFIG = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0,))
BY_ERROR = AVQConfig.parse("M16C8T1e0", query_tile=16, levels=(0,))
CASES: dict[str, Callable[[], None]] = {}
WORLD = 2


def case(check: Callable[[], None]) -> Callable[[], None]:
    CASES[check.__name__] = check
    return check


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def ulysses(model, **options):
    """Split the model's tokens over all ranks."""
    blocks = {name for name, _ in model.named_modules()}
    # Helios' plan names the blocks of its full size.
    plan = {name: x for name, x in model._cp_plan.items() if "*" in name or name in blocks}
    config = ContextParallelConfig(ulysses_degree=WORLD, **options)
    enable_parallelism(model, config, cp_plan=plan)
    return model


def avq(model, config=CONFIG, **options):
    return apply_avq(model, config, **{"route": "always"} | options)


# Families


def same_as_one(name: str, **overrides) -> None:
    """Parallelism before and after AVQ, on and off, gives what one process does."""
    kind = KIND[name]
    model, overrides = kind.make(), {**kind.padding, **overrides}
    exact = kind.predict(model, **overrides)
    alone = kind.predict(avq(model), **overrides)
    assert off(alone, exact) > FAR
    shared = kind.predict(ulysses(model), **overrides)
    assert off(shared, alone) < CLOSE
    assert {row.runs for row in summary(model).rows} == {"AVQ (torch backend)"}
    assert calls(model) == [{"AVQ": 2}] * len(calls(model))
    assert str(summary(model)).endswith("parallelism: Ulysses, degree 2")
    remove_avq(model)
    plain = kind.predict(model, **overrides)
    assert off(plain, exact) < CLOSE
    assert torch.equal(kind.predict(avq(model), **overrides), shared)
    with avq_disabled(model):
        assert torch.equal(kind.predict(model, **overrides), plain)
    assert torch.equal(kind.predict(remove_avq(model), **overrides), plain)


FAMILIES = {name: {} for name in ("Flux", "Flux2", "QwenImage", "Wan", "ChronoEdit", "Helios")}
FAMILIES |= {"MiniMaxH3": {}, "LTXVideo": {"encoder_attention_mask": None}}
CASES |= {name: partial(same_as_one, name, **options) for name, options in FAMILIES.items()}


@case
def the_tokens_are_found() -> None:
    """Catches a check that would pass with text and image in one piece each."""
    kind = KIND["Flux"]
    model = avq(kind.make())
    alone = kind.predict(model)

    def in_place(beside, grid, *others):
        return Joined(*[torch.arange(beside + grid)] * 2)

    with patch.object(state, "joined_order", in_place):
        assert off(kind.predict(ulysses(model)), alone) > FAR
    assert off(kind.predict(model), alone) < CLOSE
    deepcopy(model)  # a call that it kept would hold a process group, which cannot be copied


@case
def sizes_that_do_not_divide() -> None:
    """77 tokens of the grid, 25 of the text and 5 heads.

    Without padding: diffusers joins masks of several sizes wrongly.
    """
    kind, rank = KIND["QwenImage"], dist.get_rank()
    model = kind.make.func(kind.make.args[0], num_attention_heads=5)
    size = {"height": 7, "width": 11}
    text = torch.randn(2, 25, 32, generator=torch.Generator().manual_seed(5))
    given = inputs(model, **size) | {"encoder_hidden_states": text, "return_dict": False}
    with torch.no_grad():
        (exact,), (alone,) = model(**given), avq(model)(**given)
        assert off(alone, exact) > FAR
        # gloo cannot gather outputs of several sizes.
        plan = {name: x for name, x in model._cp_plan.items() if name != "proj_out"}
        config = ContextParallelConfig(ulysses_degree=WORLD, ulysses_anything=True)
        enable_parallelism(model, config, cp_plan=plan)
        assert off(model(**given)[0], alone.tensor_split(WORLD, dim=1)[rank]) < CLOSE
        assert calls(model) == [{"AVQ": 2}] * 2
        with avq_disabled(model):
            assert off(model(**given)[0], exact.tensor_split(WORLD, dim=1)[rank]) < CLOSE


# Options


@case
def schedules() -> None:
    kind = KIND["Wan"]
    model = avq(kind.make(), BY_ERROR)
    set_threshold(model, {1000: "exact", 800: 1.0, 400: 100.0})
    times = [kind.timestep(x) for x in (900, 600, 100)]
    alone = [kind.predict(model, **x) for x in times]
    ulysses(model)
    for timestep, expected in zip(times, alone, strict=True):
        assert off(kind.predict(model, **timestep), expected) < CLOSE
    assert calls(model) == [{"scheduled": 2, "AVQ": 4}] * 2


@case
def gradients() -> None:
    """Of this rank's tokens, which add up to those of one process."""
    kind = KIND["Flux"]
    model = avq(kind.make())
    weight = model.transformer_blocks[0].attn.to_k.weight

    def gradient() -> torch.Tensor:
        model.zero_grad()
        kind.call(model).square().sum().backward()
        return weight.grad.clone()

    alone = gradient()
    ulysses(model)
    shared = gradient()
    dist.all_reduce(shared)
    assert off(shared, alone) < 1e-4
    with avq_disabled(model):
        exact = gradient()
    dist.all_reduce(exact)
    assert off(exact, alone) > FAR


@case
def checkpoints() -> None:
    kind = KIND["QwenImage"]
    model = ulysses(avq(kind.make()))
    kind.call(model).square().sum().backward()
    expected = model.img_in.weight.grad.clone()
    model.zero_grad()
    model.enable_gradient_checkpointing()
    kind.call(model.train()).square().sum().backward()
    assert torch.equal(model.img_in.weight.grad, expected)


@case
def a_compiled_block() -> None:
    kind = KIND["Wan"]
    model = ulysses(avq(kind.make()))
    expected = kind.predict(model)
    model.blocks[0].compile(backend="eager")
    assert off(kind.predict(model), expected) < CLOSE


# Decisions


@contextmanager
def unequal_ranks():
    """Of which each finds the other attention faster."""
    rank, asked = dist.get_rank(), []

    def measure(names, dtype, device, trial):
        asked.append(trial.shape)
        return dict.fromkeys(names, rank > 0)

    routing._table.cache_clear()
    with (
        patch.object(routing, "MEASURED", ("cuda", "cpu")),
        patch.object(routing, "measure", measure),
    ):
        yield asked
    routing._table.cache_clear()


@case
def routes() -> None:
    """The first rank measures the heads that a rank has."""
    kind = KIND["Wan"]
    model = ulysses(avq(kind.make(), BY_ERROR, route="fastest"))
    with unequal_ranks() as asked:
        for _ in range(3):
            kind.predict(model)
    assert calls(model) == [{"AVQ": 1, "faster": 2}] * 2
    assert {*asked} == (set() if dist.get_rank() else {(2, 288, 1, 64)})
    columns = [None, None]
    dist.all_gather_object(columns, model.blocks[0].attn1._avq.needed.columns)
    assert columns[0] == columns[1]


@case
def verdicts() -> None:
    """A GPU that the first rank finds wrong runs no kernels in any."""
    kind, device = KIND["Wan"], torch.device("cpu")
    model = ulysses(avq(kind.make()))
    if dist.get_rank() == 0:
        faults[(device,)] = "wrong"
    with patch.object(parallel, "is_verified", lambda device: False):
        kind.predict(model)
    del faults[(device,)]
    assert calls(model) == [{"the kernels are wrong on this GPU": 1}] * 2


@case
def tolerances() -> None:
    """The first rank's times and cache choose for all."""
    pipe = flux_pipe(transformer=flux_transformer(in_channels=16, num_single_layers=0))
    ulysses(pipe.transformer)
    measured = exact_runs.MeasuredLayer._time

    def slower(*arguments):
        return (1 + 5 * dist.get_rank()) * measured(*arguments)

    run = {"num_inference_steps": 1, "height": 32, "width": 48, "max_sequence_length": 8}
    run |= {"progress": False}
    found = [None, None]
    with patch.object(exact_runs.MeasuredLayer, "_time", slower):
        dist.all_gather_object(found, str(measure_error(pipe, "a red fox", BY_ERROR, **run)))
        assert found[0] == found[1]
        apply_avq(pipe, BY_ERROR, prompt="a red fox", tolerance=0.1, **run)
    chosen = str(summary(pipe))
    if dist.get_rank():  # only the first rank's cache has the profile
        shutil.rmtree(user_cache_path("avq-diffusers") / "profiles")
    apply_avq(pipe, BY_ERROR, tolerance=0.1, **run)
    assert str(summary(pipe)) == chosen
    assert "effect" in chosen


# Other parallelism


def ring_forward(ctx, query, key, value, mask, dropout_p, is_causal, scale, *others, **options):
    """Exact attention with the logarithm of its sums, which `native` does not return."""
    logits = torch.einsum("bqhd,bkhd->bqhk", query, key) * query.shape[-1] ** -0.5
    output = torch.einsum("bqhk,bkhd->bqhd", logits.softmax(-1), value)
    return output, logits.logsumexp(-1)


def with_ring(query, key, value, *others, _parallel_config=None, **options):
    return attention_dispatch._templated_context_parallel_attention(
        query,
        key,
        value,
        return_lse=False,
        forward_op=ring_forward,
        backward_op=None,
        _parallel_config=_parallel_config,
    )


@case
def ring_attention_is_exact() -> None:
    kind = KIND["Flux"]
    model = kind.make()
    exact = kind.predict(model)
    enable_parallelism(avq(model), ContextParallelConfig(ring_degree=2))
    with patch.dict(_AttentionBackendRegistry._backends, {AttentionBackendName.NATIVE: with_ring}):
        assert off(kind.predict(model), exact) < CLOSE
    assert calls(model) == [{"ring attention": 1}] * 3
    assert str(summary(model)).endswith("parallelism: ring attention, degree 2")


def same_as_one_with_tensors_split(name: str) -> None:
    kind = KIND[name]
    model = avq(kind.make())
    alone = kind.predict(model, **kind.padding)
    with patch("diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES", ("cpu",)):
        enable_parallelism(model, TensorParallelConfig(tp_degree=2))
    heads, orders = [], state.orders

    def noted(order, query, *others, **options):
        heads.append(query.shape[1])
        return orders(order, query, *others, **options)

    with patch.object(state, "orders", noted):
        assert off(kind.predict(model, **kind.padding), alone) < 1e-5
    assert {*heads} == {1}
    assert str(summary(model)).endswith("parallelism: tensor parallelism, degree 2")


SPLIT = ("Flux", "Flux2", "QwenImage")
CASES |= {f"tensors of {x}": partial(same_as_one_with_tensors_split, x) for x in SPLIT}


@case
def sharded_parameters() -> None:
    """Also of a model whose tokens are split."""
    kind = KIND["Flux"]
    model = avq(kind.make())
    given, alone = kind.inputs(model, *kind.sizes[0]), kind.predict(model)
    ulysses(model)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block)
    with torch.no_grad():
        assert off(fully_shard(model)(**given)[0], alone) < CLOSE
    assert calls(model) == [{"AVQ": 2}] * 3


@case
def guidance_in_two_processes() -> None:
    """One has the prompt, the other the negative prompt."""
    kind, rank = KIND["Wan"], dist.get_rank()
    model = avq(kind.make())
    both = kind.inputs(model, *kind.sizes[0])
    alone = kind.predict(model)
    half = {x: y[rank : rank + 1] if isinstance(y, torch.Tensor) else y for x, y in both.items()}
    assert off(kind.predict(model, **half), alone[rank : rank + 1]) < CLOSE


@case
def the_script_of_the_guide() -> None:
    """On a tiny model, in the group that there is."""
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    folder = f"{sys.argv[1]}/flux"
    if dist.get_rank() == 0:
        flux_pipe().save_pretrained(folder)
    dist.barrier()
    for shown, small in {
        "torch.distributed.init_process_group()\n": "",
        "torch.cuda.set_device(rank)\n": "",
        '"black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16).to("cuda")': f"{folder!r})",
        "pipe.transformer.enable_parallelism(": "enable(pipe.transformer, ",
        "height=2048, width=2048": "height=32, width=48, num_inference_steps=1",
    }.items():
        assert script.count(shown) == 1, shown
        script = script.replace(shown, small)
    made: dict[str, Any] = {"enable": enable_parallelism}
    exec(compile(script, GUIDE.name, "exec"), made)
    assert {row.runs for row in summary(made["pipe"]).rows} == {"AVQ (torch backend)"}
    images = [None, None]
    dist.all_gather_object(images, made["image"].tobytes())
    assert images[0] == images[1]


@case
def a_rank_dies() -> None:
    """The other one gets an error in time, and its model is whole."""
    kind = KIND["Wan"]
    model = ulysses(avq(kind.make()))
    kind.predict(model)
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_pre_hook(lambda *x: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):
        kind.predict(model)
    states = [layer._avq for layer in (model.blocks[0].attn1, model.blocks[1].attn1)]
    assert [x.call.get() for x in states] == [None, None]
    assert not calls(remove_avq(model))
    assert not any("_avq" in vars(x) for x in model.modules())


def main() -> None:
    """In each rank, whose folder is the argument."""
    path = Path(sys.argv[1]) / os.environ["RANK"]
    os.environ["XDG_CACHE_HOME"] = str(path)  # as on machines of their own
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    routing.MEASURED = ("cuda",)
    outcomes: dict[str, str] = {}
    for name, check in CASES.items():
        outcomes[name] = "died"
        path.with_suffix(".json").write_text(json.dumps(outcomes))
        try:
            check()
            outcomes[name] = "passed"
        except Exception:
            outcomes[name] = traceback.format_exc()
        path.with_suffix(".json").write_text(json.dumps(outcomes))
        if outcomes[name] != "passed":
            return  # the ranks no longer run the same calls


# The group

feature = pytest.mark.feature
FEATURES = {
    "sizes_that_do_not_divide": "Ulysses with sizes that do not divide",
    "schedules": "schedules under Ulysses",
    "gradients": "training under Ulysses",
    "tolerances": "a tolerance under Ulysses",
    "ring_attention_is_exact": "ring attention (runs exact)",
    "sharded_parameters": "FSDP and Ulysses",
    "guidance_in_two_processes": "guidance in two processes",
    **{name: "Ulysses" for name in CASES if name[0].isupper()},
    **{name: "tensor parallelism" for name in CASES if name.startswith("tensors")},
}
DIES = "a_rank_dies"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    """The outcomes of each rank by case."""
    folder = tmp_path_factory.mktemp("ranks")
    commands = start_ranks("hosts.test_parallel:main", WORLD, [folder])
    printed = [command.finish()[1] for command in commands]
    paths = [folder / f"{rank}.json" for rank in range(WORLD)]
    assert all(path.is_file() for path in paths), printed
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=feature(FEATURES[x]) if x in FEATURES else ()) for x in CASES]
)
def test_ranks(outcomes, name):
    found = [of_rank.get(name, "an earlier case failed") for of_rank in outcomes]
    expected = ["passed"] * WORLD
    if name == DIES:
        expected[1] = "died"
    assert found == expected, "\n".join(found)


def test_joined_orders():
    """Text, image, text, image, text, image of 2 and 4 tokens."""
    order = state.joined_order(2, 4, True, 3, torch.device("cpu"))
    assert order.tokens.tolist() == [0, 2, 3, 1, 4, 5]
    assert order.indices[order.tokens].tolist() == [*range(6)]
    order = state.joined_order(2, 4, False, 3, torch.device("cpu"))
    assert order.tokens.tolist() == [0, 1, 4, 2, 5, 3]


def test_the_command_of_the_guide(tmp_path):
    """Exact attention and AVQ, alone and by two processes."""
    (line,) = re.findall(r"```bash\n(.*)\n```", GUIDE.read_text(encoding="utf-8"))
    launch = "torchrun --nproc-per-node 2 -m eval "
    assert line.startswith(launch)
    arguments = [*line.removeprefix(launch).split(), "--output", tmp_path]
    for command in start_ranks("eval.__main__:main", 2, arguments):
        code, printed = command.finish()
        assert code == 0, printed
    rows = json.loads((tmp_path / "bench_parallel_cpu_x2.json").read_text())["rows"]
    assert [(row["method"], row["degree"]) for row in rows] == [
        (method, degree) for degree in (1, 2) for method in ("native", "avq")
    ]
    assert [row["tokens_of_rank"] for row in rows] == [180, 180, 90, 90]
    assert all(row["error_to_one_process"] < CLOSE for row in rows)
    assert all(row["attention_ms"] > row.get("all_to_all_ms", 0) > 0 for row in rows[2:])


@feature("device_map")
def test_a_device_map(tmp_path):
    """Blocks on disk and in memory: devices of two kinds that every machine has."""
    model = flux_transformer()
    exact, alone = predict(model), predict(avq(model))
    flux_transformer().save_pretrained(tmp_path / "flux")
    places = {name: "cpu" for name, _ in model.named_children()} | {"transformer_blocks": "disk"}
    model = FluxTransformer2DModel.from_pretrained(
        tmp_path / "flux", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert off(predict(avq(model)), alone) < CLOSE
    assert off(alone, exact) > FAR
    assert calls(model) == [{"AVQ": 1}] * 3
