"""The commands of `python -m eval coco`, run in this process, and rows of given images."""

import contextlib
import io
import json
import sys

import numpy as np
from PIL import Image

from eval.quality import captions, coco, protocol
from eval.store.report import SCORER


def run(*arguments):
    """Exit code, output and errors of `python -m eval coco ...`, run in this process."""
    from eval import __main__ as command

    output, errors, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["eval", "coco", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            command.main()
    except SystemExit as exit_:
        code = exit_.code or 0
    finally:
        sys.argv = argv
    shown = [line for line in errors.getvalue().splitlines() if line.startswith(("eval:", "warn"))]
    return code, output.getvalue(), "\n".join(shown)


def score(place, *folders, output="results", **changes):
    options = {
        "real": place / "scenes/images",
        "scorer": SCORER,
        "cache": place / "cache",
        "output": place / output,
        "threads": 2,
    }
    options |= changes
    parts = [part for name, value in options.items() for part in (f"--{name}", value)]
    return run("score", *(place / folder for folder in folders), *parts)


def rows_of(place, output="results"):
    return json.loads((place / output / "coco.json").read_text())["rows"]


def noise(height, width, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return values, Image.fromarray(values)


def protocol_config(**changes):
    return {**protocol.GENERATION, "size": 512, "scalecrafter": False, **changes}


def write_row(folder, images, size):
    """A finished row of given images."""
    texts = [f"image {index}" for index in range(len(images))]
    digest = captions.Captions(tuple(texts), "").sha256
    config = protocol_config(size=size, captions_sha256=digest, num_images=len(images))
    (folder / "images").mkdir(parents=True)
    for index, image in enumerate(images):
        image.save(coco.image_path(folder, index))
    (folder / "captions.txt").write_text("\n".join(texts) + "\n")
    row = {"method": "exact", "config": None, "effective_codewords": None}
    manifest = {"command": "c", "environment": {}, "earlier_sessions": []}
    config |= {"method": "exact", "model": "models/tiny", "model_sha256": "d"}
    manifest |= {"config": config, "row": row}
    (folder / "manifest.json").write_text(json.dumps(manifest))
