"""The table of quality and speed: `python -m eval table`."""

from types import SimpleNamespace

import pytest
from eval_helpers import SETTINGS_2X

from eval.methods.registry import EXACT
from eval.quality import scene_rows
from eval.quality.method_table import build_table, quality_table
from eval.store.report import Result

METRICS = {"fid": 20.0, "fid_sem": 0.5, "clip_score": 90.0, "copy_agreement": 0.75}
FOLDER = "runs/m64/codebooks"
BUT_ONE = "runs/but-one/codebooks"
OLDER = "M64P16C8X9/own"  # of a version with other options
SMALL, LARGE = "256²", "512², ScaleCrafter"
TIMES = "512² (SD1.5; compiled)"


def quality_row(method, config=None, origin=None, levels=(0,), **figures):
    facts = {"config": config, "origin": origin, "levels": list(levels)}
    facts["effective_codewords"] = 192 if config == "M64P16C8" else None
    return {"method": method, **facts, "num_images": 5, **figures}


def quality(rows, *, kind="scenes", size=256, seed=0, **changes):
    document = {"command": f"python -m eval {kind} --x", "first_seed": seed, "size": size}
    document |= dict.fromkeys(scene_rows.PROTOCOL) | {"size": size, "scalecrafter": size > 256}
    return {**document, "rows": rows, **changes}


def speed(times, *, size=512, model="sd15", run="compiled"):
    facts = {"model": model, "title": "SD1.5", "size": size, "run": run}
    rows = [{**facts, "method": method, "ms": ms} for method, ms in times.items()]
    document = {"command": "python -m eval bench steps", "environment": {"device": "GPU"}}
    return {**document, "rows": rows}


def build(*documents):
    """The table of documents, as if each were read from a file: a.json, b.json ..."""
    results = []
    for letter, document in zip("abcdefgh", documents, strict=False):
        words, name = document["command"].split(), f"{letter}.json"
        kind = " ".join(words[3:5]) if words[3] == "bench" else words[3]
        path = type("P", (SimpleNamespace,), {"__str__": lambda self: self.name})(name=name)
        results.append(Result(path, kind, document))
    return build_table(results)


@pytest.fixture
def table():
    distilled = (FOLDER, "M64P16C8", "distilled")
    small = [
        {"method": scene_rows.REAL, "num_images": 5, **METRICS},
        quality_row(EXACT, **METRICS),
        quality_row("M64P16C8", "M64P16C8", "calibrated", **METRICS),
        quality_row(*distilled, fid=21.0, clip_score=89.0, psnr_median=40.0),
        quality_row(f"{FOLDER}@P8", "M64P8C8", "distilled", **METRICS),
        quality_row("tome", **METRICS),
        quality_row("tome", levels=(0, 1), **METRICS),
        quality_row(BUT_ONE, "M64P16C8, up_blocks.1 exact", "calibrated", (0, 1), **METRICS),
        quality_row("value-projection", **METRICS),
        quality_row("runs/linear", "LinFusion", "distilled", (0, 1, 2), **METRICS),
        quality_row("runs/linear-01", "LinFusion", "distilled", (0, 1), **METRICS),
        quality_row("M4", "M4", "calibrated", **METRICS),
        quality_row("M64P16C8/own", "M64P16C8/own", "own", **METRICS),
        quality_row("M64C8T1e-4", "M64C8T1e-4", "own", **METRICS),
        quality_row(OLDER, OLDER, "own", (0, 1), **METRICS),
    ]
    both = [quality_row(EXACT, levels=(0, 1), fid=99.0), quality_row(*distilled, (0, 1), fid=22.0)]
    large = [quality_row(EXACT, fid=30.0, clip_score=80.0), quality_row(*distilled, fid=31.0)]
    timed = {"exact": 10.0, "limit": 5.0, "M64P16C8": 6.0, "M64P16C8@L0": 7.0, "tome": 8.0}
    timed |= {"M4": 5.5, "M4@L0": 5.25}
    timed |= {"linfusion": 9.0, "tome@L01": 8.5, "M64P16C8-up_blocks.1": 6.25}
    timed |= {"M64P16C8@L0/own": 6.75, "M64P16C8@L0/own1": 6.875}
    timed |= {"avq": 6.75, "M64C8T1e-4@L0": 6.625, "M64C8T5e-4@L0": 6.5, OLDER: 7.25}
    return build(
        speed(timed),
        quality(small),
        quality(both),
        quality(large, kind="merge", size=512, runs=[{"first_seed": 0}, {"first_seed": 5}]),
        speed({"exact": 40.0, "M64P16C8@L0": 28.0}, size=1024),
        speed({"exact": 3.0}, run="eager"),
        speed({"exact": 4.0}, model="flux"),
    )


def test_times_belong_to_what_runs(table):
    """Fails for a join by name: of folders, levels, the default route, exact, projections, own
    codewords."""
    times = {(row["method"], *row["levels"]): row["ms"].get(TIMES) for row in table["rows"]}
    assert times == {
        (scene_rows.REAL,): None,
        (EXACT,): 10,
        ("M64P16C8", 0): 7,
        (FOLDER, 0): None,  # with other projections
        (f"{FOLDER}@P8", 0): None,
        ("tome", 0): 8,
        ("tome", 0, 1): 8.5,
        (BUT_ONE, 0, 1): 6.25,
        ("value-projection", 0): None,
        ("runs/linear", 0, 1, 2): 9,
        ("runs/linear-01", 0, 1): None,  # not in every self-attention, which was timed
        ("M4", 0): 5.25,
        ("M64P16C8/own", 0): 6.75,
        ("M64C8T1e-4", 0): 6.625,
        ("AVQ 64/8, threshold 5e-4, level 0", 0): 6.5,
        ("AVQ 64/8, threshold 1e-4", 0, 1): 6.75,
        (OLDER, 0, 1): 7.25,
        ("AVQ 64/16/8, own codewords, 1 update, level 0", 0): 6.875,
        (FOLDER, 0, 1): None,
        ("limit",): 5,
        ("AVQ 64/16/8", 0, 1): 6,
        ("VQ 4", 0, 1): 5.5,
    }
    (exact,) = (row for row in table["rows"] if row["method"] == EXACT)
    other_times = {"1024² (SD1.5; compiled)": 40, "512² (SD1.5; eager)": 3}
    assert exact["ms"] == {TIMES: 10, **other_times}


def test_quality_stands_by_size(table):
    """Fails where a size overwrites another, or a later file a row that is there."""
    rows = {(row["method"], *row["levels"]): row["quality"] for row in table["rows"]}
    assert rows[EXACT,][SMALL] == METRICS
    fids = {key: {size: x["fid"] for size, x in row.items()} for key, row in rows.items()}
    assert fids[EXACT,] == {SMALL: 20, LARGE: 30}
    assert fids[FOLDER, 0] == {SMALL: 21, LARGE: 31}
    assert fids[FOLDER, 0, 1] == {SMALL: 22}
    assert fids["limit",] == {}
    assert table["quality"][LARGE]["first_seeds"] == [0, 5]


def test_markdown(table):
    cells = {line.split(" | ")[0]: line.split(" | ") for line in quality_table(table).splitlines()}
    assert cells[f"| {EXACT}"][1:7] == ["-", "-", "20.000 ± 0.500", "-", "90.00", "0.750"]
    assert cells[f"| {EXACT}"][-3:] == ["10", "40", "3 |"]
    assert cells["| M64P16C8"][1:3] == ["192", "0"]
    assert cells["| AVQ 64/16/8"][1:3] == ["192", "0, 1"]


def test_times_are_those_of_the_same_fields():
    """Catches a time of the default computation beside a row of another one."""
    rows = [
        quality_row(name, "M64P16C8", "calibrated", fields=fields)
        for name, fields in (("a", {}), ("b", {"query_tile": 16}))
    ]
    table = build(quality(rows), speed({"M64P16C8@L0": 7.0}))
    assert [row["ms"].get(TIMES) for row in table["rows"]] == [7.0, None]


EXACT_ROW = [quality_row(EXACT)]
OTHERS = "another protocol or other seeds; average seeds with merge first"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (quality(EXACT_ROW, seed=1), OTHERS),
        (quality(EXACT_ROW, dtype="x"), f"have images of 256², but {OTHERS}"),
        (quality(EXACT_ROW, scorer=2), OTHERS),
        (quality(EXACT_ROW, size=512, scalecrafter={"downsamplers": False}), OTHERS),
        (
            quality([quality_row("runs/a", "M4", sha256="new")], size=64),
            "d.json and an earlier result have images of different versions of runs/a",
        ),
        ({"command": "python -m eval scenes"}, "d.json is not a complete result .KeyError: 'size"),
        (speed({"exact": 1.0}), "c.json both have times of 512"),
    ],
)
def test_what_does_not_fit_is_refused(document, message):
    small = [quality_row(EXACT), quality_row("runs/a", "M4", sha256="old")]
    large = quality(EXACT_ROW, size=512, scalecrafter=SETTINGS_2X)
    fitting = [quality(small), large, speed({"exact": 1.0})]
    table = build(*fitting, quality(EXACT_ROW, size=512, scalecrafter=False))
    assert list(table["quality"]) == [SMALL, LARGE, "512²"]
    assert table["rows"][1]["sha256"] == "old"
    with pytest.raises(ValueError, match=message):
        build(*fitting, document)
