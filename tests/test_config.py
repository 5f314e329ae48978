import math
import re
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from avq_diffusers.config import AVQConfig, Spec

NAMES = "num_parents", "num_refined", "num_children", "threshold"


@pytest.mark.parametrize(
    ("text", "sizes", "columns"),
    [
        ("M64P16C8", (64, 16, 8, None), 192),
        (" m64p16c8 ", (64, 16, 8, None), 192),
        ("M8P0C4", (8, 0, 4, None), 8),
        ("M256", (256, 0, 0, None), 256),
        ("M64P16C8/stored", (64, 16, 8, None), 192),
        ("M64C8T1e-4", (64, None, 8, 1e-4), None),
        ("M64C8T0.02", (64, None, 8, 0.02), None),
        ("M64C8T0", (64, None, 8, 0), None),
        ("m64c8tINF", (64, None, 8, math.inf), None),
        ("M256T2.5e-5", (256, None, 0, 2.5e-5), None),
    ],
)
def test_parses_all_forms(text, sizes, columns):
    config = AVQConfig.parse(text, levels=[1, 0, 1])
    assert config.levels == (0, 1)
    assert config.most_refined == (sizes[0] if sizes[2] else 0)
    assert tuple(getattr(config.spec, name) for name in NAMES) == sizes
    assert config.columns == columns
    assert str(config).lower() == text.strip().lower()
    assert config.means != text.endswith("/stored")


@pytest.mark.parametrize(
    ("threshold", "digits"),
    [
        (1e-4, "1e-4"),
        (3.3e-300, "3.3e-300"),
        (5e-2, "0.05"),
        (1, "1"),
        (200.0, "200"),
        (0.1, "0.1"),
        (0.0028775334942001242, "0.0028775334942001242"),
        (3e20, "3e+20"),
        (10**400, "inf"),
    ],
)
def test_a_threshold_has_few_digits(threshold, digits):
    """Catches a configuration string that is parsed as another threshold."""
    config = AVQConfig(threshold=threshold)
    assert str(config) == f"M64C8T{digits}"
    assert AVQConfig.parse(str(config)) == config


def test_sizes_have_names():
    """Catches numbers that are taken for others: configurations order them differently."""
    spec = AVQConfig(num_parents=64, num_children=8, num_refined=16).spec
    assert spec == Spec(num_parents=64, num_refined=16, num_children=8)
    assert (str(spec), spec.columns) == ("M64P16C8", 64 + 16 * 8)
    assert len({spec, AVQConfig.parse(str(spec)).spec}) == 1
    assert Spec() == Spec(num_parents=64, num_children=8, threshold=1e-4)
    with pytest.raises(TypeError, match="positional"):
        Spec(64, 16, 8)


@pytest.mark.parametrize(
    "options", [{"num_refined": 3, "codewords": "stored"}, {"threshold": 1e-300}]
)
def test_an_operator_gets_every_option(options):
    """Catches a field that an operator's schema loses."""
    spec = Spec(num_parents=9, num_children=2, query_tile=6, **options)
    assert Spec.from_numbers(spec.numbers, spec.threshold) == spec
    assert len({*spec.numbers}) == len(spec.numbers)


def test_one_resolution_takes_the_place_of_the_other():
    """Catches options with both, and a threshold that a change of sizes loses."""
    config = AVQConfig.parse("M64P16C8", query_tile=16)
    fine = config.changed(threshold=1e-3, num_parents=32)
    assert (fine.num_refined, fine.threshold, fine.num_parents) == (None, 1e-3, 32)
    assert fine.changed(num_children=4).threshold == 1e-3
    assert fine.changed(num_refined=16, num_parents=64) == config
    overrides = {"1": {"threshold": 1e-3}, "up": {"num_refined": 2}}
    layers = replace(config, overrides=overrides)
    assert str(layers.for_layer("down.0", 1)) == "M64C8T0.001"
    assert str(layers.for_layer("up.0", 1)) == "M64P2C8"


@pytest.mark.parametrize("text", ["M\uff16\uff14P16C8", "M" + 5000 * "9", "M64C8T\u0663"])
def test_parse_takes_ascii_digits_of_numbers_in_range(text):
    with pytest.raises(ValueError, match=r"such as M64C8T1e-4, .* or M256, but got 'M.{1,90}$"):
        AVQConfig.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "64/16/8", "T1e-4", "M64P16C8E256", "M64C8P16", "M-1", "M64P16C8x", "M6.4"),
        *("M64C8T", "M64C8T-1", "M64C8Te-4", "M64C8T.", "M64C8Tnan", "M64T1e-4C8"),
    ],
)
def test_parse_rejects_other_forms(text):
    message = f"such as M64C8T1e-4, M64P16C8 or M256, but got {text!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        AVQConfig.parse(text)
    with pytest.raises(TypeError, match="a configuration such as 'M64C8T1e-4', but got 64"):
        AVQConfig.parse(64)


@pytest.mark.parametrize("text", ["M64C8", "M64P16C8T1e-4"])
def test_parse_takes_one_resolution(text):
    with pytest.raises(
        ValueError, match=f"either a threshold, .*, or refined parents, .* '{text}'"
    ):
        AVQConfig.parse(text)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_parents": 0}, ValueError, "num_parents must be at least 1, but got 0."),
        ({"num_children": -1}, ValueError, "num_children must be at least 0, but got -1."),
        ({"num_refined": -1}, ValueError, "num_refined must be at least 0, but got -1."),
        ({"query_tile": 0}, ValueError, "query_tile must be at least 1, but got 0."),
        ({"threshold": -1}, ValueError, "threshold must be at least 0, but got -1."),
        ({"threshold": math.nan}, ValueError, "threshold must be at least 0, but got nan."),
        ({"threshold": "1"}, TypeError, "threshold must be a number, but got '1' (str)."),
        ({"threshold": True}, TypeError, "threshold must be a number, but got True (bool)."),
        (
            {"threshold": 0.1, "num_refined": 1},
            ValueError,
            "threshold and num_refined exclude each other, but got 0.1 and 1.",
        ),
        (
            {"codewords": "stored"},
            ValueError,
            'codewords="stored" needs num_refined in place of a threshold.',
        ),
        *(
            ({name: 2**31}, ValueError, f"{name} must be at most 2147483647, but got 2147483648.")
            for name in ("num_parents", "num_children", "query_tile")
        ),
        ({"num_parents": 8.0}, TypeError, "num_parents must be an int, but got 8.0 (float)."),
        ({"query_tile": True}, TypeError, "query_tile must be an int, but got True (bool)."),
        (
            {"num_parents": 8, "num_refined": 9},
            ValueError,
            "num_refined must be at most num_parents, 8, but got 9.",
        ),
        (
            {"num_children": 0, "num_refined": 4},
            ValueError,
            "num_refined must be 0 without children (flat VQ), but got 4.",
        ),
        (
            {"num_parents": 2**31},
            ValueError,
            "num_parents must be at most 2147483647, but got 2147483648.",
        ),
        (
            {"codewords": "own"},
            ValueError,
            "codewords must be one of means, stored, but got 'own'.",
        ),
        (
            {"query_order": "hilbert"},
            ValueError,
            "query_order must be one of gilbert, raster, random, but got 'hilbert'.",
        ),
        ({"levels": ()}, ValueError, "levels must name at least one UNet level, but got ()."),
        ({"levels": (-1,)}, ValueError, "levels must be at least 0, but got -1."),
        ({"levels": ("0",)}, TypeError, "levels must be an int, but got '0' (str)."),
        ({"levels": 0}, TypeError, "levels must be a tuple of ints, but got 0."),
        (
            {"exact": "up_blocks.1"},
            TypeError,
            "exact must be a tuple of layer names, but got 'up_blocks.1'.",
        ),
        ({"exact": (1,)}, TypeError, "exact must be a tuple of layer names, but got (1,)."),
        ({"key_norm": "no"}, TypeError, "key_norm must be a bool, but got 'no'."),
        ({"overrides": None}, TypeError, "overrides must be a mapping, but got None."),
        (
            {"overrides": {1: {"num_parents": 8}}},
            TypeError,
            "overrides must have strings as keys, but got 1.",
        ),
        ({"overrides": {"1": 8}}, TypeError, "overrides['1'] must be a mapping, but got 8."),
        (
            {"overrides": {"1": {"query_tile": 8}}},
            ValueError,
            "overrides['1'] may set num_parents, num_children, threshold, num_refined, but got "
            "query_tile.",
        ),
        (
            {"overrides": {"1": {"num_refined": 65}}},
            ValueError,
            "num_refined must be at most num_parents, 64, but got 65.",
        ),
    ],
)
def test_rejects_values_that_cannot_work(fields, error, message):
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        AVQConfig(**fields)


def test_is_frozen_and_hashable():
    config = AVQConfig(overrides={"1": {"num_refined": 8}})
    with pytest.raises(FrozenInstanceError):
        config.num_parents = 1
    assert hash(config) == hash(AVQConfig(overrides={"1": {"num_refined": 8}}))


def test_overrides_are_a_copy():
    """Catches a frozen config that changes with the mapping it was built from."""
    values = {"num_refined": 8}
    overrides = {"1": values}
    config = AVQConfig(overrides=overrides)
    values["num_refined"] = 4
    overrides["2"] = {}
    assert config.overrides == {"1": {"num_refined": 8}}


def test_layer_names_win_over_levels_and_longer_names_over_shorter():
    config = AVQConfig(
        overrides={
            "up_blocks.3.attentions.1": {"num_refined": 2},
            "1": {"num_refined": 8, "num_parents": 32},
            "up_blocks.3": {"num_refined": 4},
        }
    )
    plain = config.for_layer("down_blocks.0.attentions.0", level=0)
    by_level = config.for_layer("down_blocks.1.attentions.0", level=1)
    by_name = config.for_layer("up_blocks.3.attentions.0", level=1)
    by_long_name = config.for_layer("up_blocks.3.attentions.1", level=1)
    assert (plain.num_parents, plain.num_refined, plain.threshold) == (64, None, 1e-4)
    assert (by_level.num_parents, by_level.num_refined) == (32, 8)
    assert (by_name.num_parents, by_name.num_refined) == (32, 4)
    assert (by_long_name.num_parents, by_long_name.num_refined) == (32, 2)
    assert by_long_name.overrides == {}
    assert by_long_name.query_tile == config.query_tile
    longer_number = config.for_layer("up_blocks.3.attentions.10", level=2)
    assert longer_number.num_refined == 4


def test_dict_round_trip():
    config = AVQConfig(
        num_parents=32,
        num_children=4,
        num_refined=8,
        levels=(0, 1),
        overrides={"1": {"num_refined": 2}},
    )
    assert AVQConfig.from_dict(asdict(config)) == config
    with pytest.raises(ValueError, match=r"unknown AVQConfig keys: num_parent, tile\."):
        AVQConfig.from_dict({"tile": 1, "num_parent": 2, "num_parents": 3})
    with pytest.raises(ValueError, match=r"unknown AVQConfig keys: 1, tile\."):
        AVQConfig.from_dict({"tile": 1, 1: 2})
    with pytest.raises(TypeError, match=r"must be a mapping, but got \['M64'\]\."):
        AVQConfig.from_dict(["M64"])
