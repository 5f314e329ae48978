"""Random problems against the definition, and damaged files of every format that is read.

The cases are those of `python -m eval soak`, drawn by hypothesis, which shrinks what fails. Readers
of training are here alone: `eval` does not know them.
"""

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
import yaml
from cases import make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import random_codebooks, tiny_pipe
from torch import nn

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.plugin import routing
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.config_file import load_config
from distill.data.cache import open_cache
from distill.log import log_path, read_log
from distill.optimizer import load_optimizer, optimizer_tensors
from eval import problems, soak
from eval.damage import Format, library_formats, read_damaged
from eval.problems import draw_problem, error_over_budget, gradient_over_budget

CONFIG = Path(__file__).parents[2] / "configs" / "mini_m64p16c8.yaml"
CPU = torch.device("cpu")
RANDOM = st.randoms(use_true_random=False)
TENSORS = ("query", "key", "value")
repeatable = partial(
    settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


# The operation


@repeatable(max_examples=60)
@given(RANDOM)
def test_any_problem_is_solved_within_the_budget(rng):
    """Catches an error of one shape, dtype, layout, order, scale or distribution of keys."""
    problem = draw_problem(rng, kernels=False, device=CPU)
    assert error_over_budget(problem, "torch") <= 1, problem


@repeatable(max_examples=25)
@given(RANDOM)
def test_gradients_are_those_of_the_definition(rng):
    problem = draw_problem(rng, kernels=False, device=CPU, most=60)
    wide = {name: getattr(problem, name).double() for name in TENSORS}
    wide["codebook"] = problem.codebook.to(dtype=torch.float64)
    assert gradient_over_budget(replace(problem, **wide)) <= 1, problem


# Every problem has kernels of its own to compile: ten parts, for as many processes.
@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
@repeatable(max_examples=30)
@given(number=st.integers(0, 2**32))
def test_any_problem_is_solved_within_the_budget_by_the_kernels(part, number):
    rng = Random(f"{part} {number}")
    problem = draw_problem(rng, kernels=True, device=torch.device("cuda"), most=2000)
    assert error_over_budget(problem, "triton") <= 1, problem


SPOILED = {
    "query order ignored": lambda arguments: arguments | {"query_order": None},
    "tiles of twice the length": lambda x: x | {"query_tile": 2 * x["query_tile"]},
    "scale one percent off": lambda x: x | {"scale": 1.01 * (x["scale"] or default_scale(x))},
    "last key lost": lambda x: x | {name: x[name][:, :, :-1] for name in ("key", "value")},
    "heads mixed": lambda x: x | {"value": x["value"].roll(1, dims=1)},
    "children ignored": lambda x: x | {"num_refined": 0},
}


def default_scale(arguments) -> float:
    return arguments["query"].shape[-1] ** -0.5


@pytest.mark.parametrize("spoiled", SPOILED)
def test_wrong_results_are_beyond_the_budget(spoiled, choosing, monkeypatch):
    """The control of the tests above, on problems whose tiles can choose different parents."""

    def wrong(query, key, value, codebook, *, backend, **options):
        arguments = {"query": query, "key": key, "value": value, **options}
        if backend == "torch":
            arguments = SPOILED[spoiled](arguments)
        return avq_attention(codebook=codebook, backend=backend, **arguments)

    monkeypatch.setattr(problems, "avq_attention", wrong)
    errors = [error_over_budget(problem, "torch") for problem in choosing]
    assert sum(error > 1 for error in errors) > len(errors) / 3


@pytest.fixture(scope="module")
def choosing():
    problems = [draw_problem(Random(seed), kernels=False, device=CPU) for seed in range(200)]
    return [problem for problem in problems if chooses(problem)]


def chooses(problem) -> bool:
    *_, num_queries, _ = problem.query.shape
    return (
        0 < problem.options["num_refined"] < problem.codebook.num_parents
        and 1 < problem.options["query_tile"] < min(100, num_queries)
        and "query_order" in problem.options
        and problem.key.shape[2] > 1
    )


QUERY, KEY, VALUE, CODEBOOK = make_case(queries=20, dtype=torch.float32)
INTEGERS = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 2, 6, 7, 2**31, 2**63]))
THINGS = st.one_of(INTEGERS, st.none(), st.booleans(), st.floats(), st.text(max_size=3))
SHAPES = st.lists(st.integers(0, 9), max_size=5)
DTYPES = st.sampled_from(
    [torch.float16, torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64]
)


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(DTYPES)
    return torch.zeros(shape, dtype=dtype, device=draw(st.sampled_from(["cpu", "meta"])))


@st.composite
def codebooks(draw):
    heads, parents, children, head_dim = (draw(st.integers(1, n)) for n in (3, 7, 3, 9))
    dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.float64]))
    return Codebook(
        torch.zeros(heads, parents, head_dim, dtype=dtype),
        torch.zeros(heads, parents, draw(st.integers(0, children)), head_dim, dtype=dtype),
    )


CHANGES = {
    **{name: st.one_of(tensors(), THINGS) for name in (*TENSORS, "query_order")},
    "codebook": st.one_of(codebooks(), THINGS),
    "backend": st.sampled_from(["auto", "torch", "dense", "triton", "flash", ""]),
    **{
        name: st.one_of(INTEGERS, THINGS)
        for name in ("num_refined", "query_tile", "importance_tile", "scale")
    },
}


@repeatable(max_examples=100)
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_any_arguments_are_carried_out_or_refused(changes):
    """Catches an error from inside for what should have been refused at the door, and nonsense."""
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "codebook": CODEBOOK, "num_refined": 2}
    arguments |= changes
    with suppress(TypeError, ValueError):
        output = avq_attention(**arguments)
        assert output.shape == arguments["query"].shape
        assert output.dtype == arguments["query"].dtype


# Files


class Nothing:
    """An encoder of four samples."""

    def __call__(self, batches):
        for batch in batches:
            yield {"moments": torch.ones(len(batch), 2), "text": torch.ones(len(batch), 3)}


def written_cache(folder: Path, file: str) -> Path:
    read_cache(folder / file)
    return folder / file


def read_cache(path: Path) -> None:
    sizes = {"num_samples": 4, "batch_size": 2, "process_index": 0, "num_processes": 1}
    samples = open_cache(path.parent, {"size": 64}, Nothing(), **sizes)
    assert len([samples[index] for index in range(4)]) == 4


@cache
def whole_config() -> DistillConfig:
    return load_config(CONFIG, DistillConfig, [])


def written_checkpoint(folder: Path, file: str) -> Path:
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    groups = {
        "model": module.state_dict(),
        "optimizer": optimizer_tensors(module, optimizer),
    }
    return checkpoint.save(folder, 3, groups, config=whole_config(), keep=1) / file


def read_checkpoint(path: Path) -> None:
    found = checkpoint.newest(path.parents[2])
    checkpoint.check(found, whole_config(), free=())
    module = nn.Linear(2, 2)
    module.load_state_dict(found.tensors("model"))
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    load_optimizer(module, optimizer, found.tensors("optimizer"))
    assert found.step >= 0


def written_config(folder: Path, file: str) -> Path:
    """JSON is YAML, and its values can be changed one by one."""
    text = CONFIG.read_text()
    if file.endswith(".json"):
        text = json.dumps(yaml.safe_load(text))
    (folder / file).write_text(text)
    return folder / file


def read_config(path: Path) -> None:
    assert isinstance(load_config(path, DistillConfig, []), DistillConfig)


def written_log(folder: Path) -> Path:
    log_path(folder).write_text(
        "".join(json.dumps({"step": i, "loss": 1.0}) + "\n" for i in range(3))
    )
    return log_path(folder)


def written_routes(folder: Path) -> Path:
    table = {"GPU, float16": {"eager": 1024, "compiled": 512}}
    (folder / "routes.json").write_text(json.dumps(table))
    return folder / "routes.json"


def read_routes(path: Path) -> None:
    for entry in routing._read(path).values():
        assert all(type(tokens) is int for tokens in routing.BreakEven(**entry))


TRAINING = [
    Format(
        "distill config",
        partial(written_config, file="a.yaml"),
        read_config,
        (ValueError, TypeError),
    ),
    Format(
        "config values",
        partial(written_config, file="a.json"),
        read_config,
        (ValueError, TypeError),
    ),
    *(
        Format(f"checkpoint, {file}", partial(written_checkpoint, file=file), read_checkpoint)
        for file in ("run.json", "model.safetensors", "optimizer.safetensors")
    ),
    *(
        Format(f"cache, {file}", partial(written_cache, file=file), read_cache)
        for file in ("fingerprint.json", "shard-000000.safetensors")
    ),
    Format("distill log", written_log, lambda path: read_log(path.parent)),
    Format("break-even numbers", written_routes, read_routes, ()),
]
PIPE = tiny_pipe()
FORMATS = [*library_formats(PIPE, random_codebooks(PIPE.unet)), *TRAINING]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_damaged_file_is_read_or_refused_by_name(form):
    """Catches another exception than the reader promises, one that names no file, a hang, and
    memory for what a file of a few kilobytes claims."""
    with TemporaryDirectory() as folder:
        form.read(form.write(Path(folder)))  # the whole file is read

    outcomes = set()

    @repeatable(max_examples=30)
    @given(RANDOM)
    def check(rng):
        with TemporaryDirectory() as folder:
            outcomes.add(read_damaged(rng, form, Path(folder)))

    check()
    assert ("refused" in outcomes) == bool(form.refusals)


def test_a_soak_repeats_a_case_and_names_what_fails(monkeypatch):
    """Catches a case that depends on those before it, and a failure that is only counted."""
    first = soak._cases(0, FORMATS, CPU, seed=0, first_case=5)
    assert (first["cases"], first["failures"]) == (1, [])
    assert first["counts"]["problems"] == 1
    assert soak._cases(0, FORMATS, CPU, seed=0, first_case=5) == first
    assert soak._cases(0, FORMATS, CPU, seed=1, first_case=5) != first

    def read_badly(*_):
        raise KeyError("a")

    monkeypatch.setattr(soak, "error_over_budget", lambda *_: 2.0)
    monkeypatch.setattr(soak, "read_damaged", read_badly)
    (wrong, *files) = soak._cases(0, FORMATS, CPU, seed=0, first_case=5)["failures"]
    assert wrong["case"] == 5
    assert wrong["error"].startswith("output 2: B")
    assert len(files) == soak.FILES_PER_PROBLEM
    assert all("KeyError" in failure["error"] for failure in files)
