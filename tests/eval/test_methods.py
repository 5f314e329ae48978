"""Methods by their names: they change what they say, and undo themselves."""

import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from eval_helpers import prepare, watched
from tiny import draw, random_codebooks, two_level_pipe, two_level_unet
from tiny_transformers import predict, sd3_pipe

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.extras.linfusion import load_linfusion, remove_linfusion
from eval.methods.folder import Folder
from eval.methods.peer import Peer
from eval.methods.prepared import attention_method, load_methods
from eval.methods.registry import EXACT, METHOD_COLUMNS, NO_ATTENTION, TOME, parse_method


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        *((name, True) for name in (EXACT, NO_ATTENTION, TOME, "M4P2C2", "LINFUSION")),
        ("DISTILLED", True),
        ("M4P2C2/stored", False),
    ],
)
def test_attention_method_puts_everything_back(name, fails, distilled, linfusion):
    """Fails for processors of another class or order, hooks that stay, or a missing finally."""
    pipe = two_level_pipe()
    exact = draw(pipe)
    before = pipe.unet.attn_processors
    folders = {"DISTILLED": str(distilled), "LINFUSION": str(linfusion)}
    (method,) = prepare(pipe, folders.get(name, name))
    inside = []
    with pytest.raises(KeyError) if fails else nullcontext(), attention_method(pipe, method):
        inside.append(draw(pipe))
        if fails:
            raise KeyError
    assert torch.equal(inside[0], exact) == (name == EXACT)
    after = pipe.unet.attn_processors
    assert all(after[name] is processor for name, processor in before.items())
    assert torch.equal(draw(pipe), exact)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("M4C2T0.01@L01", AVQConfig.parse("M4C2T0.01", levels=(0, 1))),
        (
            "M4C2T1e-4-up_blocks",
            AVQConfig.parse("M4C2T1e-4", levels=(0,), exact=("up_blocks",)),
        ),
        (
            "M4P1C2-up_blocks@P3",
            AVQConfig.parse("M4P3C2", levels=(0,), exact=("up_blocks",)),
        ),
    ],
)
def test_own_codewords_are_those_of_apply_avq(name, config):
    """Fails for codebooks, another configuration, a suffix that is lost, or a faster route."""
    pipe = two_level_pipe()
    (method,) = prepare(pipe, name)
    assert (method.config, method.codebooks) == (config, None)
    with attention_method(pipe, method):
        drawn = draw(pipe)
    assert torch.equal(drawn, draw(apply_avq(pipe, config, route="always")))


def test_methods_change_their_levels_only(distilled):
    """Also fails where a GPU would run exact attention because it is faster there."""
    pipe = two_level_pipe()
    without, calibrated, loaded = prepare(
        pipe, NO_ATTENTION, "M4P2C2/stored", str(distilled), levels=(1,)
    )
    for method, levels in ((without, {1}), (calibrated, {1}), (loaded, {0, 1})):
        with attention_method(pipe, method):
            assert {row.level for row in summary(pipe).rows if row.config} == levels
            chosen = select_layers(pipe.unet, tuple(levels))
            assert {layer.avq_state.route.route for layer in chosen} == {"always"}


def test_a_folder_is_its_codebooks_with_any_number_refined(distilled):
    """Fails where changes of projections are lost, or @P changes nothing or the codebooks."""
    pipe = two_level_pipe()
    methods = prepare(pipe, str(distilled), f"{distilled}@P4", f"{distilled}@P0")
    for method, num_refined in zip(methods, (2, 4, 0), strict=True):
        with attention_method(pipe, method):
            drawn = draw(pipe)
        apply_avq(pipe, AVQCodebooks.from_pretrained(distilled))
        set_num_refined(pipe, num_refined)
        assert torch.equal(drawn, draw(pipe))
        remove_avq(pipe)
        facts = method.facts()
        assert facts["config"] == f"M4P{num_refined}C2/stored"
        assert facts["effective_codewords"] == 4 + 2 * num_refined
        assert facts["origin"] == "distilled"
        assert facts["levels"] == [0, 1]


def test_a_row_says_which_weights_a_folder_had(distilled, linfusion, tmp_path):
    """Fails where a folder that is trained again cannot be told from what it was."""
    folders = [shutil.copytree(path, tmp_path / path.name) for path in (distilled, linfusion)]

    def digests():
        names = [*map(str, folders), f"{folders[0]}@P0", "M4P2C2/stored", EXACT]
        return [method.sha256 for method in load_methods(two_level_pipe(), names, levels=(0,))]

    before = digests()
    assert before == digests()
    assert before[0] == before[2] != before[1] != before[3] is before[4] is None
    config = folders[0] / "config.json"
    config.write_text(config.read_text() + "\n")
    after = digests()
    assert after[0] == after[2] != before[0]
    assert after[1] == before[1]


def test_a_folder_of_linfusion_layers_is_these_layers(linfusion):
    """Fails for layers of another level, or switches that leave or lose something, in any order."""
    pipe = two_level_pipe()
    expected = draw(load_linfusion(pipe, linfusion))
    remove_linfusion(pipe)
    exact = draw(pipe)
    assert (expected - exact).abs().max() > 1e-3
    layers, codebooks = prepare(pipe, str(linfusion), "M4/stored", levels=(0,))
    assert layers.levels == (1,)
    assert torch.equal(draw(pipe), exact)
    for _ in range(2):
        with attention_method(pipe, layers):
            assert torch.equal(draw(pipe), expected)
        with attention_method(pipe, codebooks):
            assert not torch.equal(draw(pipe), expected)
        assert torch.equal(draw(pipe), exact)


def test_what_rows_say_of_their_methods(linfusion):
    methods = prepare(
        two_level_pipe(), EXACT, NO_ATTENTION, "M6/stored", "M4P2C2@P3/stored", str(linfusion)
    )
    rows = [method.facts() for method in methods]
    cells = [" | ".join(column(row) for column in METHOD_COLUMNS.values()) for row in rows]
    expected = [
        "exact | -",
        "value-projection | -",
        "M6/stored | 6",
        "M4P2C2@P3/stored (M4P3C2/stored) | 10",
    ]
    assert cells == [*expected, f"{linfusion} (LinFusion) | -"]
    origins = [None, None, "calibrated", "calibrated", "distilled"]
    assert [method.origin for method in methods] == origins
    assert methods[-1].facts()["effective_codewords"] is None
    assert methods[-1].facts()["levels"] == [1]
    method, own = prepare(two_level_pipe(), "M4P2C2-up_blocks@P1/stored", "M4P2C2-up_blocks@P1")
    assert method.facts()["config"] == "M4P1C2/stored, up_blocks exact"
    assert all("up_blocks" not in name for name in method.codebooks.layer_specs)
    mixed = AVQConfig.parse("M4P2C2", levels=(0, 1), overrides={"1": {"num_parents": 8}})
    books = random_codebooks(two_level_unet(), mixed)
    facts = Folder("x", "x", levels=(0, 1), codebooks=books).facts()
    # Three layers of 4 + 2 x 2 codewords, and one of 8 + 2 x 2.
    assert (facts["effective_codewords"], facts["config"]) == (9, "M4P2C2/stored, M8P2C2/stored")
    unusual = {"query_tile": 16, "query_order": "random", "key_norm": True}
    codebooks = random_codebooks(two_level_unet(), AVQConfig.parse("M4P2C2", **unusual))
    assert Folder("x", "x", levels=(0,), codebooks=codebooks).facts()["fields"] == unusual
    assert own.facts() == {
        "method": own.name,
        "config": "M4P1C2, up_blocks exact",
        "origin": "own",
        "sha256": None,
        "levels": [0],
        "effective_codewords": 6,
    }


@pytest.mark.parametrize(("name", "tool"), [(EXACT, "AVQ"), (NO_ATTENTION, "LinFusion")])
def test_a_changed_pipeline_is_refused(name, tool, linfusion):
    """Fails for a method that takes the change away, or measures it as something else."""
    pipe = two_level_pipe()
    method = replace(parse_method(name, ()), levels=(0,))
    if tool == "AVQ":
        apply_avq(pipe, random_codebooks(pipe.unet))
    else:
        load_linfusion(pipe, linfusion)
    changed = draw(pipe)
    message = rf"has {tool} already; call remove_{tool.lower()}\(pipe\) first"
    with pytest.raises(ValueError, match=message), attention_method(pipe, method):
        pass
    with pytest.raises(ValueError, match=message):
        prepare(pipe, name)
    assert torch.equal(draw(pipe), changed)


def test_value_projection_is_its_formula():
    """to_out(to_v(x)), whatever other tokens hold; attention to all would change token 0."""
    pipe = two_level_pipe()
    inputs = torch.randn(2, 4, 16, 16, generator=torch.manual_seed(0)), 5, torch.randn(2, 7, 32)
    (method,) = prepare(pipe, NO_ATTENTION, levels=(0, 1))
    with attention_method(pipe, method):
        _, calls = watched(pipe, inputs)
    for layer in select_layers(pipe.unet, (0, 1)):
        attn, (hidden_states, output) = layer.attn, calls[layer.name]
        weight = attn.to_out[0].weight @ attn.to_v.weight
        torch.testing.assert_close(output, hidden_states @ weight.T + attn.to_out[0].bias)
        assert not torch.allclose(output, attn(hidden_states), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "levels", "message"),
    [
        ("M4P2C2@Px", (0,), r"methods must be exact, .*M4P2C2@Px"),
        ("DISTILLED@P5", (0,), "num_refined must be between 0 and 4"),
        ("OTHER", (0,), "codebooks of another model"),
        ("EMPTY", (0,), "there is no file"),
        ("./codebooks@P8", (0,), r"methods: there is no folder \./codebooks\."),
        ("LINFUSION@P2", (0,), "LinFusion layers refine no parents, but got .*@P2'"),
        ("LINFUSION/none", (0,), "methods: there is no folder .*none"),
        ("BROKEN", (0,), "is not a complete safetensors file"),
        ("pisa@.5", (0,), "methods for images by a UNet are exact, .*, but got 'pisa@.5'"),
        ("linfusion", (0,), "but got 'linfusion'"),
        ("tome@0", (0,), "a share above 0 and at most 0.75 of the tokens, but got 'tome@0'"),
        ("tome@.9", (0,), "a share above 0 and at most 0.75 of the tokens, but got 'tome@.9'"),
        (TOME, (1,), r"from level 0 on, leaving none out, but got levels \(1,"),
        (EXACT, (7,), "no self-attention at level 7"),
        ("M4P2C2-up_blocks.7", (0,), "exact must name layers of this model"),
    ],
)
def test_mistakes_are_found_before_the_first_image(
    name, levels, message, distilled, linfusion, tmp_path
):
    """A misspelt second method must not cost the images of the first one."""
    pipe = two_level_pipe()
    before = pipe.unet.attn_processors
    random_codebooks(two_level_unet(attention_head_dim=4)).save_pretrained(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    shutil.copytree(linfusion, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    folders = {name: tmp_path / name.lower() for name in ("OTHER", "EMPTY", "BROKEN")}
    folders |= {"DISTILLED": distilled, "LINFUSION": linfusion}
    for word, folder in folders.items():
        name = name.replace(word, str(folder))
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("something was drawn"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(pipe, "M4P2C2/stored", name, levels=levels)
    assert pipe.unet.attn_processors == before


def test_folders_may_have_any_name(distilled, tmp_path, monkeypatch):
    """Catches a number of refined parents that is read off a path, and a configuration that is
    calibrated although a folder of its name was meant."""
    pipe = two_level_pipe()
    for name in ("a@P2", "M4P2C2", "M4P2C2-seed1"):
        shutil.copytree(distilled, tmp_path / name)
    (method,) = prepare(pipe, f"{tmp_path}/a@P2")
    assert method.num_refined is None
    (method,) = prepare(pipe, f"{tmp_path}/a@P2@P1")
    assert method.num_refined == 1
    monkeypatch.chdir(tmp_path)
    for name in ("M4P2C2", "M4P2C2@P1", "M4P2C2-seed1"):
        source = name.removesuffix("@P1")
        message = f"methods: {source} is a configuration, but also a folder here; write ./{source} "
        with pytest.raises(ValueError, match=message):
            prepare(pipe, name)
        (method,) = prepare(pipe, f"./{name}")
        assert method.sha256 is not None


def test_peers_meet_all_tokens_in_an_order_of_neighbours(monkeypatch):
    """Catches outputs that stay in that order, and a text whose keys are missing."""
    pipe, orders = sd3_pipe(), []
    exact = predict(pipe.transformer)

    def attend(peer, inputs, scale):
        orders.append((peer.source, peer.setting, inputs[0].shape == inputs[1].shape))
        return F.scaled_dot_product_attention(*inputs, scale=scale)

    monkeypatch.setattr(Peer, "attend", attend)
    method = replace(parse_method("pisa@.15", ()), levels=(0,))
    with attention_method(pipe, method):
        found = predict(pipe.transformer)
    torch.testing.assert_close(found, exact)
    assert orders == [("pisa", 0.15, True)] * len(select_layers(pipe.transformer))
