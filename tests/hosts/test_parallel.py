"""AVQ in models that several real processes share, on gloo; `ranks.py` has what they check."""

import json
import socket

import pytest
from hosts.ranks import CASES
from processes import Command

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
