import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from avq_diffusers.attention.orders import _build_order, _cached, joint_order, query_order

LARGE_GRIDS = [(64, 64), (128, 128), (96, 64), (45, 80), (80, 45), (127, 50), (1, 300), (33, 257)]


@pytest.fixture
def empty_cache():
    _cached.cache_clear()
    yield
    _cached.cache_clear()


def step_lengths(height, width):
    """Distance in rows and in columns between consecutive tokens: (2, h * w - 1)."""
    order = query_order(height, width).long()
    return torch.stack([order // width, order % width]).diff(dim=1).abs()


def num_diagonal_steps(height, width):
    """A path between two corners of one side alternates colours as on a chess board. A long side
    that is odd, with an even short side, has corners of one colour and an even number of cells: a
    diagonal step is needed. A strip of width 2 ends on the other side instead.
    """
    short, long = sorted((height, width))
    return int(long % 2 == 1 and short % 2 == 0 and short > 2)


@pytest.mark.parametrize("kind", ["gilbert", "raster", "random"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (9, 1), (7, 12), (64, 48)])
def test_is_a_permutation(kind, height, width):
    order = query_order(height, width, kind)
    assert order.dtype == torch.int32
    assert order.sort().values.tolist() == list(range(height * width))
    if kind == "raster":
        assert order.tolist() == list(range(height * width))


def test_gilbert_visits_every_token_by_steps_to_neighbours():
    small = itertools.product(range(1, 25), range(1, 25))
    for height, width in (*small, *LARGE_GRIDS):
        check_curve(height, width)


def check_curve(height, width):
    assert query_order(height, width).sort().values.tolist() == list(range(height * width))
    steps = step_lengths(height, width)
    assert (steps <= 1).all(), (height, width)
    assert (steps.sum(0) == 2).sum() == num_diagonal_steps(height, width), (height, width)


def test_four_by_four_is_the_hilbert_curve():
    assert query_order(4, 4).tolist() == [0, 1, 5, 4, 8, 12, 13, 9, 10, 14, 15, 11, 7, 6, 2, 3]


def mean_tile_perimeter(height, width, kind, tile=64):
    perimeters = []
    for tokens in query_order(height, width, kind).long().split(tile):
        rows, columns = tokens // width, tokens % width
        perimeters.append(2 * (rows.max() - rows.min() + columns.max() - columns.min() + 2))
    return torch.stack(perimeters).float().mean()


@pytest.mark.parametrize(("height", "width"), [(64, 64), (45, 61), (32, 96)])
def test_gilbert_tiles_are_compact_and_raster_tiles_are_not(height, width):
    square = 4 * 64**0.5
    assert mean_tile_perimeter(height, width, "gilbert") < 1.5 * square
    assert mean_tile_perimeter(height, width, "raster") > 2 * square
    assert mean_tile_perimeter(height, width, "random") > 4 * square


def test_random_is_always_the_same():
    first = query_order(8, 8, "random").clone()
    _cached.cache_clear()
    torch.manual_seed(123)
    assert torch.equal(query_order(8, 8, "random"), first)


def test_eager_calls_share_one_tensor():
    assert query_order(6, 7) is query_order(6, 7, "gilbert", "cpu")
    assert query_order(6, 7) is not query_order(7, 6)


def test_compiles_to_one_op_whose_result_is_not_the_cached_tensor():
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    cached = query_order(5, 8, "random")
    expected = cached.clone()
    compiled = torch.compile(lambda: query_order(5, 8, "random"), backend=backend, fullgraph=True)
    order = compiled()
    assert "avq_diffusers.query_order" in graphs[0]
    assert torch.equal(order, expected)
    order.zero_()
    assert torch.equal(cached, expected)


def test_op_passes_opcheck():
    op = torch.ops.avq_diffusers.query_order.default
    torch.library.opcheck(op, (5, 8, "gilbert", torch.device("cpu")))


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_a_tensor_cached_inside_a_mode_works_outside_it(mode, empty_cache):
    with mode():
        _cached(_build_order, 4, 4, "gilbert", torch.device("cpu"), 1)
    order = query_order(4, 4)
    assert type(order) is torch.Tensor
    values = torch.randn(16, requires_grad=True)
    (values[order] ** 2).sum().backward()
    assert torch.allclose(values.grad, 2 * values)


@pytest.mark.parametrize("frames", [1, 3, 8, 9, 21])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (6, 9), (8, 8)])
def test_videos_are_walked_by_steps_to_neighbours(frames, height, width):
    """Catches a frame that is left out, and jumps other than those between slabs of frames."""
    order = query_order(height, width, frames=frames).long()
    assert order.sort().values.tolist() == list(range(frames * height * width))
    places = torch.stack([order // (height * width), order // width % height, order % width])
    steps = places.diff(dim=1).abs()
    diagonal = num_diagonal_steps(height, width)
    slabs = -(-frames // 8)
    assert (steps.sum(0) > 1).sum() <= slabs * (1 + diagonal)
    assert (steps[1:] <= 1).all()


def test_tiles_of_videos_are_compact_in_time_and_space():
    """Catches one frame after the other, and time before space."""
    order = query_order(16, 24, frames=16).long()
    places = torch.stack([order // 384, order // 24 % 16, order % 24]).unflatten(1, (-1, 128))
    extent = places.amax(2) - places.amin(2) + 1
    assert (extent[0] == 8).all()
    assert (extent[1:] <= 8).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4, "hilbert"), "one of gilbert, raster, random, but got 'hilbert'"),
        ((0, 4), "height and width must be at least 1, but got 0 x 4"),
        ((4, 0), "height and width must be at least 1, but got 4 x 0"),
        ((4, 4, "gilbert", "cpu", 0), "frames must be at least 1, but got 0"),
    ],
)
def test_refusals(arguments, message):
    names = ("height", "width", "kind", "device", "frames")
    with pytest.raises(ValueError, match=message):
        query_order(**dict(zip(names, arguments, strict=False)))


@pytest.mark.parametrize("text_first", [False, True])
def test_a_joint_order_ends_with_the_text(text_first):
    """Catches tokens of the grid that are taken for text, and a text at the wrong end."""
    order = query_order(4, 6)
    joint = joint_order(order, 5, text_first=text_first)
    tokens = torch.arange(29)
    grid, text = (tokens[5:], tokens[:5]) if text_first else (tokens[:24], tokens[24:])
    assert joint.dtype == torch.int32
    assert torch.equal(joint.long(), torch.cat([grid[order.long()], text]))
    assert joint_order(order, 5, text_first=text_first) is joint
