"""The page of `avq app`: its images, mistakes and visitors."""

import json
import math
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlparse

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import CONFIG, random_codebooks, two_level_pipe, two_level_unet

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, set_threshold
from avq_diffusers.cli import main as cli
from avq_diffusers.hosts import verbs
from avq_diffusers.hosts.measuring import exact_runs
from avq_diffusers.hosts.measuring.profile import SHOWN_TOLERANCES
from avq_diffusers.images import difference

PROMPT = "a red fox"
SIDE = 128
SIZES = AVQConfig.parse("M16C4T1e-4", query_tile=16)
COARSE = "0.001"
FIELDS = {"prompt": PROMPT, "width": SIDE, "height": SIDE, "seed": 0, "steps": 1}
NO_TOLERANCE = "none"


def generate(pipe, seed: int = 0, steps: int = 1, prompt=PROMPT, width: int = SIDE) -> np.ndarray:
    """What `avq generate` writes."""
    sizes = {"height": SIDE, "width": width, "num_inference_steps": steps}
    generator = torch.Generator().manual_seed(seed)
    return np.asarray(pipe(prompt, generator=generator, **sizes).images[0])


def generate_exact(pipe, **arguments) -> np.ndarray:
    with avq_disabled(pipe):
        return generate(pipe, **arguments)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def reference():
    """A pipeline like that of the page."""
    return apply_avq(two_level_pipe(), SIZES, route="always")


@pytest.fixture(scope="module")
def site():
    """A served page and its pipeline; nothing leaves the machine."""
    pytest.importorskip("gradio", reason="needs the extra app")
    from avq_diffusers.cli.page import build_page, serve

    called = []
    connect = socket.socket.connect

    def watched(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] != "127.0.0.1":
            called.append(address)
        return connect(self, address)

    pipe = two_level_pipe()
    page = build_page(pipe, "tiny", [PROMPT], SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", watched)
        patch.setattr(exact_runs, "THRESHOLDS", (1e-2, 1.0, 1e3))
        patch.setattr(exact_runs, "MOST_REPEATED", 24)
        yield serve(page, host="127.0.0.1", port=free_port()), pipe
        page.close()
    assert called == []


class Visitor:
    """A browser's tab with the page."""

    def __init__(self, address: str, folder) -> None:
        from gradio_client import Client

        self.client = Client(address, verbose=False, download_files=folder, analytics_enabled=False)

    def press(self, name: str, **fields):
        """The job of an event, begun as the page does it."""
        self.client.predict(api_name="/begin")
        return self.client.submit(api_name=f"/{name}", **fields)

    def cancel(self, *_) -> None:
        self.client.predict(api_name="/cancel")

    def press_generate(self, **changes) -> tuple[str, np.ndarray]:
        """Title and pixels of the exact image."""
        exact = self.press("generate_exact", **FIELDS | changes).result()[0]
        return exact["label"], np.asarray(Image.open(exact["value"]))

    def turn(self, dial: str = "0.0001", tolerance: str = NO_TOLERANCE):
        """Title and pixels of the AVQ image and of the difference, and the rows of the report."""
        fields = {"dial": dial, "tolerance": tolerance}
        *images, report = self.press("generate_avq", **fields).result()
        shown = [(x["label"], np.asarray(Image.open(x["value"]))) for x in images]
        return *shown, report["value"]["data"]


@pytest.fixture
def visit(site, tmp_path):
    return lambda: Visitor(site[0], tmp_path)


@pytest.fixture
def calls(site):
    """An entry for each call of the UNet; a test may make each slow, or fail."""
    made, act = [], []

    def called(*_) -> None:
        made.append(1)
        for each in act:
            each()

    hook = site[1].unet.register_forward_pre_hook(called)
    yield made, act
    hook.remove()


def test_the_images_are_those_of_generate(visit, reference):
    """Fails where the columns are swapped, a field is dropped, or images lose detail."""
    visitor = visit()
    fields = {"prompt": "a cat", "width": 192, "seed": 3, "steps": 2}
    exact_title, exact = visitor.press_generate(**fields)
    (title, avq), (difference_title, differing), rows = visitor.turn()
    assert exact_title.startswith("Exact, ")
    assert title.startswith("AVQ, ")
    assert "PSNR" in difference_title
    assert np.array_equal(exact, generate_exact(reference, **fields))
    assert np.array_equal(avq, generate(reference, **fields))
    assert not np.array_equal(exact, avq)
    expected = difference(Image.fromarray(exact), Image.fromarray(avq))
    assert np.array_equal(differing, np.asarray(expected))
    for cell in ("AVQ (torch backend)", "M16C4T1e-4"):
        assert str(rows).count(cell) == 4


def test_the_dial_generates_the_avq_image_only(visit, calls, reference):
    """Fails where the dial does nothing, or the exact image is generated again without need."""
    visitor, runs = visit(), calls[0]
    visitor.press_generate()
    (_, default), *_ = visitor.turn()
    (_, avq), _, rows = visitor.turn(COARSE)
    visitor.client.predict(api_name="/generate_exact", **FIELDS)
    assert len(runs) == 3
    assert "M16C4T0.001" in str(rows)
    assert np.array_equal(avq, generate(set_threshold(reference, 1e-3)))
    assert not np.array_equal(default, avq)


def test_a_tolerance_replaces_the_threshold(visit, reference, monkeypatch):
    """Fails where it is measured anew for each image, on another one, or stays for the next."""
    visitor, measured, measure = visit(), [], verbs.measure_error
    monkeypatch.setattr(
        verbs, "measure_error", lambda *x, **y: measured.append(1) or measure(*x, **y)
    )
    _, exact = visitor.press_generate(seed=1)
    tolerances = [str(min(SHOWN_TOLERANCES)), str(max(SHOWN_TOLERANCES))]
    fine = visitor.turn(tolerance=tolerances[0])[0][1]
    coarse = visitor.turn(tolerance=tolerances[1])[0][1]
    assert len(measured) == 1
    assert not np.array_equal(fine, coarse) or np.array_equal(fine, exact)
    assert np.array_equal(visitor.turn()[0][1], generate(reference, seed=1))


def test_mistakes_are_told_and_the_page_goes_on(visit, calls, reference, capfd):
    """Fails where the next image finds AVQ disabled, or a visitor reads a traceback."""
    from gradio_client.exceptions import AppError

    visitor = visit()
    # The latter two are refused by fields of gradio, unless these leave that to the page.
    for changes in ({"prompt": "  "}, {"seed": -1}, {"width": [128]}):
        with pytest.raises(AppError, match=r"the prompt is empty|Seed must|Width must be one of"):
            visitor.press_generate(**changes)
    assert "Traceback" not in capfd.readouterr().err

    def run_out():
        raise torch.OutOfMemoryError("out of memory")

    calls[1].append(run_out)
    with pytest.raises(AppError, match="out of memory"):
        visitor.press_generate()
    calls[1].clear()
    assert np.array_equal(visitor.press_generate()[1], generate_exact(reference))
    assert np.array_equal(visitor.turn()[0][1], generate(reference))


def test_cancelled_work_stops(visit, calls, reference):
    """Fails where the next visitor waits for all the steps of an image that nobody wants."""
    from gradio_client.exceptions import AppError

    gone, (steps, act) = visit(), calls
    act.append(lambda: time.sleep(0.02))
    job = gone.press("generate_exact", **FIELDS | {"steps": 100})
    while not steps:
        time.sleep(0.01)
    gone.cancel()
    gone.client.predict(api_name="/begin")  # as the next press does
    with pytest.raises(AppError, match="Cancelled"):
        job.result(timeout=60)
    assert len(steps) < 50
    assert np.array_equal(visit().press_generate()[1], generate_exact(reference))


def test_cancelled_work_does_not_start(visit, calls, site):
    """Catches an image that its visitor cancelled while it was queued behind another visitor's, and
    an AVQ image that its visitor cancelled while the exact one was decoded."""
    from gradio_client.exceptions import AppError

    gone, (steps, act) = visit(), calls
    act.append(lambda: time.sleep(0.02))
    other = visit().press("generate_exact", **FIELDS | {"steps": 20})
    while not steps:
        time.sleep(0.01)
    queued = gone.press("generate_exact", **FIELDS)
    gone.cancel()
    other.result(timeout=60)
    with pytest.raises(AppError, match="Cancelled"):
        queued.result(timeout=60)
    assert len(steps) == 20
    decoding = site[1].vae.decoder.register_forward_pre_hook(gone.cancel)
    gone.press_generate()
    decoding.remove()
    with pytest.raises(AppError, match="Cancelled"):
        gone.client.predict(api_name="/generate_avq", dial=COARSE, tolerance=NO_TOLERANCE)
    assert len(steps) == 21


def test_fields_are_refused_in_one_sentence():
    """Also those that the browser's fields do not send: JSON holds NaN and lone surrogates."""
    gradio = pytest.importorskip("gradio", reason="needs the extra app")
    from avq_diffusers.cli.page import _Events

    events = _Events(two_level_pipe(), SIZES)
    surrogate = json.loads(r'"a fox \ud800"')
    for changes, message in [
        ({"prompt": surrogate}, r"the prompt must be text, but its character 7 is .*'\\ud800'\."),
        ({"prompt": 7}, "the prompt must be text, but got 7."),
        ({"prompt": None}, "the prompt is empty; say what the image shows."),
        ({"prompt": "x" * 5001}, "the prompt is over 5000 characters long."),
        ({"seed": 1e300}, "Seed must be a whole number to 4294967295, but got 1e\\+300."),
        *(
            ({"steps": x}, rf"Steps must be from 1 to 100, but got {x!r}\.")
            for x in (math.nan, math.inf, -math.inf, True, "1", None, 2.5, 0, 101)
        ),
        ({"height": "128"}, "Height must be one of 128, .*, but got '128'."),
        ({"width": 100.0}, "Width must be one of 128, .*, but got 100.0."),
    ]:
        with pytest.raises(gradio.Error) as refused:
            events.generate_exact(None, **FIELDS | changes, visitor=None)
        assert re.fullmatch(message, refused.value.message)
    for dial, tolerance, message in [
        ("fine", NO_TOLERANCE, r"Threshold must be one of 0\.001, .*, but got 'fine'\."),
        (COARSE, "1", r"Tolerance must be one of none, .*, but got '1'\."),
    ]:
        with pytest.raises(gradio.Error) as refused:
            events.generate_avq((None, None), dial, tolerance, visitor=None)
        assert re.fullmatch(message, refused.value.message)


def test_visitors_do_not_disturb_each_other(visit, reference):
    """Each gets the images that it would get alone; fails without a queue for the pipeline."""
    dials = ("0.0001", COARSE)

    def stay(seed: int):
        visitor = visit()
        exact = visitor.press_generate(seed=seed, steps=2)[1]
        return exact, visitor.turn(dials[seed])[0][1]

    with ThreadPoolExecutor(len(dials)) as pool:
        results = list(pool.map(stay, range(len(dials))))
    for seed, (exact, avq) in enumerate(results):
        assert np.array_equal(exact, generate_exact(reference, seed=seed, steps=2))
        if seed == 1:
            set_threshold(reference, 1e-3)
        assert np.array_equal(avq, generate(reference, seed=seed, steps=2))


def test_a_dial_before_the_first_image_does_nothing(visit, calls):
    visit().client.predict(api_name="/generate_avq", dial=COARSE, tolerance=NO_TOLERANCE)
    assert calls[0] == []


def test_the_command_serves_a_page(site, model, tmp_path, monkeypatch, capsys):
    """With codebooks there are no tolerances; a port that is taken is refused. Catches a table
    without rows before the first image, and refined parents shown beside a tolerance."""
    import gradio

    random_codebooks(two_level_unet(), CONFIG).save_pretrained(tmp_path)
    served = []
    monkeypatch.setattr(
        gradio.Blocks, "block_thread", lambda page: served.append(page) or page.close()
    )
    command = ["avq", "app", "--model", str(model), "--codebooks", str(tmp_path), "--port"]
    monkeypatch.setattr(sys, "argv", [*command, port := str(free_port())])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert f"page: http://127.0.0.1:{port}/" in capsys.readouterr().out
    components = [x["props"] for x in served[0].config["components"]]
    fields = {x["label"]: x for x in components if "label" in x}
    assert not fields["Tolerance"]["visible"]
    assert "M4P2C2" in str(fields["What ran in each layer"]["value"])
    slider = ["Refined parents per query tile"]
    (show,) = [x.fn for x in served[0].fns.values() if [y.label for y in x.outputs] == slider]
    assert [show(x).visible for x in (NO_TOLERANCE, "0.02")] == [True, False]
    taken = str(urlparse(site[0]).port)
    monkeypatch.setattr(sys, "argv", [*command, taken])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert f"cannot listen on --host 127.0.0.1 --port {taken}: " in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, taken, "--host", "nosuchhost.invalid"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "cannot listen on --host nosuchhost.invalid" in capsys.readouterr().err


def test_without_gradio_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "avq_diffusers.cli.page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["avq", "app"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    expected = "loading mini-sd\navq: the page needs gradio: in a clone of the repository, "
    expected += "pip install -e '.[app]'.\n"
    assert capsys.readouterr().err == expected
