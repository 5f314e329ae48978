"""The page of `avq app`: its images, errors and visitors, then in a real browser."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import CONFIG, random_codebooks, tiny_pipe

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, scalecrafter, set_num_refined
from avq_diffusers.cli import main as cli
from avq_diffusers.hosts import measurement
from avq_diffusers.hosts.verbs import states_of
from avq_diffusers.images import difference

PROMPT = "a *red* fox"  # no emphasis, to the page
SIDE = 128
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FIELDS = {
    "prompt": PROMPT,
    "negative_prompt": "",
    "width": SIDE,
    "height": SIDE,
    "seed": 0,
    "steps": 1,
    "guidance": 7.5,
    "dilated": False,
}
BUTTON, SLIDER = "/generate_exact", "/generate_avq"


def with_avq(config: AVQConfig = CONFIG):
    pipe = tiny_pipe()
    return apply_avq(pipe, random_codebooks(pipe.unet, config), route="always")


def generate(pipe, seed: int = 0, steps: int = 1, height: int = SIDE, width: int = SIDE):
    """What `avq generate` writes."""
    sizes = {"height": height, "width": width, "num_inference_steps": steps}
    generator = torch.Generator().manual_seed(seed)
    return np.asarray(pipe(PROMPT, generator=generator, **sizes).images[0])


def generate_exact(pipe, **arguments):
    with avq_disabled(pipe):
        return generate(pipe, **arguments)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def pixels(path: str) -> np.ndarray:
    return np.asarray(Image.open(path))


@pytest.fixture(scope="module")
def reference():
    """A pipeline like that of the page."""
    return with_avq()


@pytest.fixture(scope="module")
def site():
    """A served page and its pipeline; nothing leaves the machine."""
    pytest.importorskip("gradio", reason="needs avq-diffusers[app]")
    from avq_diffusers.cli.page import build_page, serve

    called = []
    connect = socket.socket.connect

    def watched(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] != "127.0.0.1":
            called.append(address)
        return connect(self, address)

    pipe = with_avq()
    page = build_page(pipe, "tiny", [PROMPT])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", watched)
        yield serve(page, host="127.0.0.1", port=free_port()), pipe
        page.close()
    assert called == []  # the browser's own requests are watched below


@pytest.fixture(scope="module")
def visit(site, tmp_path_factory):
    """Open the page: a function that asks it for something, with a visitor's own state."""
    from gradio_client import Client

    def open_page():
        folder = tmp_path_factory.mktemp("visitor")
        client = Client(site[0], verbose=False, download_files=folder, analytics_enabled=False)

        def ask(event: str, **values):
            return client.predict(api_name=event, **values)

        return ask

    return open_page


@pytest.fixture(scope="module")
def visitor(visit):
    """A visitor with an image, and what the page shows."""
    ask = visit()
    ask(BUTTON, **FIELDS)
    return ask, ask(SLIDER, num_refined=1)


def test_the_images_are_those_of_generate(visit, reference):
    """Fails where the columns are swapped, a field is dropped, or images lose detail."""
    ask = visit()
    exact_title, exact, *_ = ask(BUTTON, **FIELDS | {"seed": 3, "steps": 2})
    title, avq, difference_title, differing, report = ask(SLIDER, num_refined=CONFIG.num_refined)
    assert exact_title.startswith("**Exact**, ")
    assert title.startswith("**AVQ**, ")
    assert np.array_equal(pixels(exact), generate_exact(reference, seed=3, steps=2))
    assert np.array_equal(pixels(avq), generate(reference, seed=3, steps=2))
    assert not np.array_equal(pixels(exact), pixels(avq))
    expected = difference(Image.open(exact), Image.open(avq))
    assert np.array_equal(pixels(differing), np.asarray(expected))
    assert "PSNR" in difference_title
    assert f"{PROMPT} ({SIDE} x {SIDE}, seed 3, 2 steps, guidance 7.5)" in report.replace("\\", "")
    assert report.count("AVQ (torch backend)") == len(states_of(reference))
    assert report.count("| AVQ: 2 |") == len(states_of(reference))


def test_every_field_reaches_the_image(visit):
    """Fails where a field is read and forgotten, or missing where images are reused."""
    ask = visit()
    changes = {"prompt": "a cat", "negative_prompt": "blue", "width": 192, "height": 192}
    changes |= {"seed": 1, "steps": 2, "guidance": 2.0}
    images = [pixels(ask(BUTTON, **FIELDS)[1])]
    for name, value in changes.items():
        images.append(pixels(ask(BUTTON, **FIELDS | {name: value})[1]))
    assert len({image.tobytes() for image in images}) == 1 + len(changes)
    assert [p.shape[:2] for p in images[3:5]] == [(128, 192), (192, 128)]


def test_the_slider_generates_the_avq_image_only(visit, site, reference):
    """Fails where the slider does nothing, or the exact image is generated again without need."""
    runs = []
    hook = site[1].unet.register_forward_pre_hook(lambda *_: runs.append(1))
    ask = visit()
    ask(BUTTON, **FIELDS)
    default = pixels(ask(SLIDER, num_refined=CONFIG.num_refined)[1])
    assert len(runs) == 2
    _, avq, _, _, report = ask(SLIDER, num_refined=0)
    ask(BUTTON, **FIELDS)
    assert len(runs) == 3
    ask(BUTTON, **FIELDS | {"seed": 1})
    assert len(runs) == 4
    hook.remove()
    assert "M4P0C2" in report
    expected = generate(set_num_refined(reference, 0))
    set_num_refined(reference, CONFIG.num_refined)
    assert np.array_equal(pixels(avq), expected)
    assert not np.array_equal(default, expected)


def test_layers_with_other_numbers_of_parents(site):
    """Fails where the slider's own value is not the codebooks', or small layers are refused."""
    from avq_diffusers.cli.page import SharedPipeline
    from avq_diffusers.cli.request import ImageRequest

    config = AVQConfig.parse(
        "M4P2C2",
        query_tile=16,
        levels=(0, 1),
        overrides={"1": {"num_parents": 3, "num_refined": 1}},
    )
    shared = SharedPipeline(with_avq(config))
    assert (shared.default_refined, shared.most_refined) == (2, 4)
    request = ImageRequest(PROMPT, None, SIDE, SIDE, 1, 7.5, 0, False)
    steps = []
    image, report = shared.generate_avq(request, 2, steps.append)
    assert np.array_equal(np.asarray(image.image), generate(with_avq(config)))
    assert {row.config for row in report.rows} == {"M4P2C2", "M3P1C2", ""}
    _, report = shared.generate_avq(request, 4, steps.append)
    assert {row.config for row in report.rows} == {"M4P4C2", "M3P3C2", ""}
    assert steps == [1, 1]


def test_a_tolerance_replaces_the_refined_parents(monkeypatch):
    """Fails where it is measured anew for each image, on another one, or stays for the next."""
    pytest.importorskip("gradio", reason="needs avq-diffusers[app]")
    from avq_diffusers.cli import page
    from avq_diffusers.cli.request import ImageRequest

    monkeypatch.setattr(measurement, "LADDER", ("M4P0C0", "M8P8C4E16"))
    config = AVQConfig.parse("M8P4C2", query_tile=16)
    pipe = apply_avq(tiny_pipe(), config, route="always")
    shared = page.SharedPipeline(pipe, config)
    runs, steps = [], []
    pipe.unet.register_forward_pre_hook(lambda *_: runs.append(1))
    requests = [ImageRequest(PROMPT, None, SIDE, SIDE, 1, 7.5, seed, False) for seed in (0, 1)]
    images = {
        (tolerance, seed): shared.generate_avq(requests[seed], 4, steps.append, tolerance)[0].image
        for seed in (0, 1)
        for tolerance in (0.00001, 1.5, None)
    }
    assert len(runs) == 2 * (3 + 1)  # one step of measurement for each image
    runs.clear()

    def leave(step):
        raise InterruptedError

    request = ImageRequest(PROMPT, None, SIDE, SIDE, 4, 7.5, 2, False)
    with pytest.raises(InterruptedError):
        shared.generate_avq(request, 4, leave, 1.5)
    assert len(runs) == 1  # the measurement stops too
    reference = tiny_pipe()
    for seed in (0, 1):
        assert np.array_equal(images[0.00001, seed], generate(reference, seed=seed))
    apply_avq(reference, config)
    assert np.array_equal(images[None, 1], generate(reference, seed=1))
    apply_avq(reference, AVQConfig.parse("M4", query_tile=16))
    assert np.array_equal(images[1.5, 1], generate(reference, seed=1))
    with pytest.raises(ValueError, match="apply it without codebooks"):
        page.SharedPipeline(with_avq()).generate_avq(requests[0], 2, steps.append, 0.1)


def test_scalecrafter_runs_for_one_image(visit, reference):
    """Fails where the page offers another size than the authors', or swaps the sides."""
    sizes = {"height": 2 * SIDE, "width": 4 * SIDE}
    fields = FIELDS | {"steps": 2} | sizes
    ask = visit()
    dilated = pixels(ask(BUTTON, **fields | {"dilated": True})[1])
    plain = pixels(ask(BUTTON, **fields)[1])
    assert np.array_equal(plain, generate_exact(reference, steps=2, **sizes))
    with scalecrafter(reference, **sizes):
        assert np.array_equal(dilated, generate_exact(reference, steps=2, **sizes))
    assert not np.array_equal(dilated, plain)


def test_mistakes_are_told_and_change_nothing(visitor):
    """The message arrives, and the images before stay."""
    from gradio_client.exceptions import AppError

    ask, (_, avq, _, _, report) = visitor
    for changes, message in [
        ({"prompt": "  "}, "The prompt is empty; write what the image shows."),
        ({"seed": -1}, "The seed must be a whole number from 0 to 4294967295, but got -1."),
        ({"seed": None}, "The seed must be a whole number from 0 to 4294967295, but got None."),
        ({"seed": 1.5}, "The seed must be a whole number from 0 to 4294967295, but got 1.5."),
        ({"steps": 2.5}, "The number of steps must be a whole number from 1 to 100, but got 2.5."),
        ({"width": None}, "The width must be a whole number from 1 to 512, but got None."),
        ({"height": 128.5}, "128.5"),
        ({"prompt": "fox " * 50_000}, "The prompt can have 5000 characters, but got 200000."),
        ({"negative_prompt": "x" * 5001}, "The negative prompt can have 5000 characters"),
        ({"width": 100}, "100"),
        ({"steps": 101}, "101"),
        ({"dilated": True}, "larger than the training size, 128, but got 128 x 128"),
    ]:
        with pytest.raises(AppError, match=message):
            ask(BUTTON, **FIELDS | changes)
    after = ask(SLIDER, num_refined=1)
    assert np.array_equal(pixels(after[1]), pixels(avq))
    assert after[4] == report
    with pytest.raises(AppError, match=r"whole number from 0 to 4, but got 0\.5\."):
        ask(SLIDER, num_refined=0.5)


def test_the_work_for_a_visitor_who_leaves_stops(visit, site, reference):
    """Fails where the next visitor waits for all the steps of an image that nobody sees."""
    import httpx
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    steps = []
    hook = site[1].unet.register_forward_pre_hook(lambda *_: (steps.append(1), time.sleep(0.05))[0])
    gone = Client(site[0], verbose=False, analytics_enabled=False)
    # Like a tab, a client holds this connection for as long as it is there.
    with httpx.stream("GET", f"{site[0]}gradio_api/heartbeat/{gone.session_hash}") as tab:
        lines = tab.iter_lines()
        next(lines)
        job = gone.submit(api_name=BUTTON, **FIELDS | {"steps": 100})
        while not steps:
            time.sleep(0.01)
    with pytest.raises(AppError, match="The visitor has left"):
        job.result(timeout=60)
    assert len(steps) < 50
    hook.remove()
    assert np.array_equal(pixels(visit()(BUTTON, **FIELDS)[1]), generate_exact(reference))


def test_the_page_goes_on_after_running_out_of_memory(visit, site, reference):
    """Fails where the second image finds the lock held, or AVQ still disabled."""
    from gradio_client.exceptions import AppError

    def run_out(*_):
        raise torch.OutOfMemoryError("out of memory")

    ask = visit()
    hook = site[1].unet.mid_block.register_forward_pre_hook(run_out)
    with pytest.raises(AppError, match="The memory is too small for this size"):
        ask(BUTTON, **FIELDS)
    hook.remove()
    assert np.array_equal(pixels(ask(BUTTON, **FIELDS)[1]), generate_exact(reference))
    assert np.array_equal(pixels(ask(SLIDER, num_refined=2)[1]), generate(reference))


@pytest.mark.parametrize(
    ("width", "height", "fits"), [(2, 4, True), (2, 3, False), (None, 2, False), (2, None, False)]
)
def test_scalecrafter_is_offered_at_its_sizes(width, height, fits):
    """Fails where a visitor empties a field to write another size."""
    pytest.importorskip("gradio", reason="needs avq-diffusers[app]")
    from avq_diffusers.cli.page import SharedPipeline, _Events

    offer = _Events(SharedPipeline(with_avq())).offer_scalecrafter
    assert offer(width and SIDE * width, height and SIDE * height).interactive == fits


def test_a_mistake_of_ours_is_not_told_as_one_of_the_visitor():
    pytest.importorskip("gradio", reason="needs avq-diffusers[app]")
    from avq_diffusers.cli.page import _shown_errors

    with pytest.raises(RuntimeError, match="sizes of tensors must"), _shown_errors():
        raise RuntimeError("sizes of tensors must match")


def test_visitors_do_not_disturb_each_other(visit, reference):
    """Each gets the images that it would get alone; fails without a lock around the pipeline."""
    refined = (CONFIG.num_refined, 0)

    def stay(seed: int):
        ask = visit()
        exact = ask(BUTTON, **FIELDS | {"seed": seed, "steps": 2})[1]
        return pixels(exact), pixels(ask(SLIDER, num_refined=refined[seed])[1])

    with ThreadPoolExecutor(len(refined)) as pool:
        results = list(pool.map(stay, range(len(refined))))
    for seed, (exact, avq) in enumerate(results):
        assert np.array_equal(exact, generate_exact(reference, seed=seed, steps=2))
        expected = generate(set_num_refined(reference, refined[seed]), seed=seed, steps=2)
        assert np.array_equal(avq, expected)
    set_num_refined(reference, CONFIG.num_refined)


def test_a_slider_before_the_first_image_does_nothing(visit, site):
    runs = []
    hook = site[1].unet.register_forward_pre_hook(lambda *_: runs.append(1))
    visit()(SLIDER, num_refined=0)
    hook.remove()
    assert runs == []


def test_a_port_that_is_taken(site):
    from avq_diffusers.cli.page import build_page, serve

    port = urlparse(site[0]).port
    with pytest.raises(OSError, match=str(port)):
        serve(build_page(site[1], "tiny", [PROMPT]), host="127.0.0.1", port=port)


def test_without_gradio_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "avq_diffusers.cli.page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["avq", "app", "--model", "/no/such/folder"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    expected = "avq: the page needs gradio: pip install 'avq-diffusers[app]'.\n"
    assert capsys.readouterr().err == expected


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> list[str]:
    """Options that name a tiny model and its codebooks."""
    folder = tmp_path_factory.mktemp("codebooks")
    random_codebooks(tiny_pipe().unet, CONFIG).save_pretrained(folder)
    return ["--model", str(model), "--codebooks", str(folder)]


@pytest.fixture
def browser():
    """A headless Chromium of this machine; nothing is downloaded."""
    pytest.importorskip("gradio", reason="needs avq-diffusers[app]")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)} on the path")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox refuses to run as root, the usual user of containers.
        chromium = driver.chromium.launch(executable_path=path, chromium_sandbox=os.getuid() != 0)
        yield chromium
        chromium.close()


@pytest.fixture
def command(saved, tmp_path):
    """The real `avq app` in its own process; its address."""
    avq = [str(Path(sys.executable).parent / "avq"), "app", *saved, "--device", "cpu"]
    settings = {"HF_HUB_OFFLINE": "1", "GRADIO_TEMP_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*avq, "--port", str(free_port())],
            env=os.environ | settings,
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + 120
    while "page: " not in log.read_text():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield log.read_text().split("page: ")[1].split()[0]
    server.send_signal(signal.SIGINT)
    server.wait(30)
    assert "Traceback" not in log.read_text()


@pytest.mark.long
def test_in_a_browser(command, browser, reference):
    """A visitor types, clicks, waits, moves the slider, and makes a mistake."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    problems, hosts = [], set()
    page.on("console", lambda message: problems.append(message) if message.type == "error" else 0)
    page.on("pageerror", lambda error: problems.append(error))
    page.on("request", lambda request: hosts.add(urlparse(request.url).hostname))

    def shown(name: str) -> np.ndarray:
        source = page.get_attribute(f"#{name} img", "src")
        return np.asarray(Image.open(BytesIO(page.request.get(source).body())))

    page.goto(command)
    page.fill("#prompt textarea", PROMPT)
    page.fill("#steps input[type=number]", "1")
    page.click("#generate")
    page.wait_for_selector("#difference img")
    assert np.array_equal(shown("exact"), generate_exact(reference))
    assert np.array_equal(shown("avq"), generate(reference))
    assert "PSNR" in page.inner_text("#difference-title")
    assert page.inner_text("#report").startswith(PROMPT)
    rows = page.locator("#report tbody tr")
    assert rows.count() == 10
    assert rows.filter(has_text="AVQ (torch backend)").count() == len(states_of(reference))

    exact = page.get_attribute("#exact img", "src")
    slider = page.locator("#refined input[type=range]")
    slider.click(position={"x": 1, "y": slider.bounding_box()["height"] / 2})
    page.wait_for_selector("#report :text('M4P0C2')")
    expected = generate(set_num_refined(reference, 0))
    set_num_refined(reference, CONFIG.num_refined)
    assert np.array_equal(shown("avq"), expected)
    assert page.get_attribute("#exact img", "src") == exact

    steps, seed, prompt = "#steps input[type=number]", "#seed input", "#prompt textarea"
    for field, mistake, right, message in (
        (prompt, "", PROMPT, "The prompt is empty; write what the image shows."),
        (prompt, "fox " * 50_000, PROMPT, "The prompt can have 5000 characters, but got 200000."),
        (seed, "1.5", "0", "The seed must be a whole number from 0 to 4294967295, but got 1.5."),
        (seed, "", "0", "The seed must be a whole number from 0 to 4294967295, but got None."),
        (steps, "2.5", "1", "The number of steps must be a whole number"),
    ):
        page.fill(field, mistake)
        page.click("#generate")
        page.wait_for_selector(f":text('{message}')")
        page.fill(field, right)
        assert page.get_attribute("#exact img", "src") == exact
    assert hosts == {"127.0.0.1"}
    assert problems == []


@pytest.mark.long
def test_a_closed_tab_in_a_browser(command, browser, tmp_path):
    """Fails where the next visitor waits until the image of a tab that was closed is done."""

    def visit(steps: int, side: int):
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(command)
        page.fill("#steps input[type=number]", str(steps))
        for name in ("Width", "Height"):
            page.get_by_label(name).fill(str(side))
            page.get_by_label(name).press("Enter")
        page.click("#generate")
        return page

    tab = visit(100, 4 * SIDE)
    tab.wait_for_selector("#exact :text('2/100')")
    tab.close()
    visit(1, SIDE).wait_for_selector("#difference img", timeout=120_000)
    bars = (tmp_path / "log").read_text()
    assert "| 1/1 " in bars
    assert "/100 " in bars
    assert "| 100/100 " not in bars
