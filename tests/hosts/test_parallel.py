"""AVQ in models that several real processes share, on gloo; `ranks.py` has what they check."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import FluxTransformer2DModel
from hosts.ranks import CASES, CLOSE, FAR, GUIDE, avq, calls, off
from processes import Command
from tiny_transformers import flux_transformer, predict

feature = pytest.mark.feature
FEATURES = {
    "sizes_that_do_not_divide": "Ulysses with sizes that do not divide",
    "schedules": "schedules under Ulysses",
    "gradients": "training under Ulysses",
    "tolerances": "a tolerance under Ulysses",
    "ring_attention_is_exact": "ring attention (runs exact)",
    "sharded_parameters": "FSDP and Ulysses",
    "guidance_in_two_processes": "guidance in two processes",
    **{name: "Ulysses" for name, check in CASES[2].items() if name[0].isupper()},
    **{name: "tensor parallelism" for name in CASES[2] if name.startswith("tensors")},
}
DIES = "a_rank_dies"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, list[dict[str, str]]]:
    """By number of ranks, the outcomes of each rank by case; all groups run at once."""
    folder, groups = tmp_path_factory.mktemp("ranks"), {}
    for world in CASES:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = [(rank, world, port, folder) for rank in range(world)]
        groups[world] = [Command("hosts.ranks:main", [*map(str, x)]) for x in arguments]
    printed = [command.finish()[1] for commands in groups.values() for command in commands]
    found = {x: [folder / f"{rank} of {x}.json" for rank in range(x)] for x in CASES}
    assert all(path.is_file() for paths in found.values() for path in paths), printed
    return {x: [json.loads(path.read_text()) for path in paths] for x, paths in found.items()}


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=feature(FEATURES[name]) if name in FEATURES else ())
        for world, cases in CASES.items()
        for name in cases
    ],
)
def test_ranks(outcomes, world, name):
    found = [of_rank.get(name, "an earlier case failed") for of_rank in outcomes[world]]
    expected = ["passed"] * world
    if name == DIES:
        expected[1] = "died"
    assert found == expected, "\n".join(found)


def test_the_command_of_the_guide(tmp_path):
    """Exact attention and AVQ, alone and by two processes."""
    (line,) = re.findall(r"```bash\n(.*)\n```", GUIDE.read_text(encoding="utf-8"))
    program, *words = line.split()
    paths = {"PYTHONPATH": str(GUIDE.parents[2]), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).parent / program), *words]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "runs/bench_parallel_cpu_x2.json").read_text())["rows"]
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
