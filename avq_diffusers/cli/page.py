"""The page of `avq app`: exact and AVQ images for one prompt, side by side. Needs gradio."""

import socket
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import gradio as gr
from diffusers import DiffusionPipeline

from avq_diffusers.cli.dials import set_dial, usual_values
from avq_diffusers.cli.images import TimedImage, largest_side, timed_image, training_size
from avq_diffusers.cli.request import NUM_REFINED, THRESHOLD, TOLERANCE, ImageRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core import AVQSource
from avq_diffusers.hosts.measuring import SHOWN_TOLERANCES
from avq_diffusers.hosts.verbs import apply_avq, avq_disabled, states_of, summary
from avq_diffusers.images import DIFFERENCE_GAIN, difference, psnr
from avq_diffusers.mini.loading import usual_guidance
from avq_diffusers.options import not_empty

LARGEST_SEED = 2**32 - 1
MOST_CHARACTERS = 5000  # per prompt; no text encoder reads that many
MOST_STEPS = 100
SIZE_STEP = 64  # pixels; every Stable Diffusion UNet takes multiples of it
LARGEST_SIDE = 4  # times the training size
CACHE_SECONDS = 3600  # how long gradio keeps the files of shown images
NO_TOLERANCE = "none"
CANCEL = "Cancel"
# Columns of the report and their widths, with which it fits a phone.
REPORTED = {"layer": "36%", "runs": "36%", "columns": "28%"}
WHAT_AVQ_IS = (
    "Adaptive vector-quantized (AVQ) attention averages similar keys where attention allows it, so "
    "that diffusion models run faster on large images."
)


class ShownImage(NamedTuple):
    """The exact image shown on a visitor's page."""

    request: ImageRequest
    exact: TimedImage


class _Events:
    """The page's event handlers. Arguments and results are field values.

    Gradio's queue lets one visitor at a time use the pipeline.

    Attributes:
        kind: what the dial sets, a threshold or the number of refined parents.
        dials: values of the dial, from coarse to fine.
        default_dial: the one in `source`: a threshold, or refined parents per query tile, the
            largest number where layers differ.
        sides: sides of images in pixels, the training size first.
        working: what a visitor pressed last, by session; None once cancelled or the page closed.
    """

    def __init__(self, pipe: DiffusionPipeline, source: AVQSource) -> None:
        self.pipe, self.source = pipe, source
        states = states_of(apply_avq(pipe, source, route="always")).values()
        if isinstance(source, AVQConfig) and source.threshold is not None:
            self.kind, default = THRESHOLD, source.threshold
        else:
            self.kind, default = NUM_REFINED, max(x.config.num_refined or 0 for x in states)
        values = sorted({default, *usual_values(pipe, self.kind)}, reverse=self.kind == THRESHOLD)
        self.dials, self.default_dial = [f"{x:g}" for x in values], f"{default:g}"
        self.working: dict[str | None, object] = {}
        side = training_size(pipe)
        most = min(LARGEST_SIDE * side, largest_side(pipe) or LARGEST_SIDE * side)
        self.sides = [side, *range(side // SIZE_STEP * SIZE_STEP + SIZE_STEP, most + 1, SIZE_STEP)]

    def generate_exact(
        self,
        shown: ShownImage | None,
        prompt: object,
        width: int,
        height: int,
        seed: int,
        steps: int,
        visitor: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008, gradio looks for it there
    ) -> list:
        """The exact image, with the other two cleared; nothing if it is already shown."""
        if not isinstance(prompt, str | None):
            raise _mistake(f"the prompt must be text, but got {prompt!r}.")
        if len(prompt or "") > MOST_CHARACTERS:
            raise _mistake(f"the prompt is over {MOST_CHARACTERS} characters long.")
        try:
            prompt = not_empty(prompt or "")
        except ValueError as error:
            raise _mistake(str(error)) from error
        sides = f"one of {', '.join(map(str, self.sides))}"
        width = _whole("Width", width, self.sides, sides)
        height = _whole("Height", height, self.sides, sides)
        seed = _whole("Seed", seed, range(LARGEST_SEED + 1), f"a whole number to {LARGEST_SEED}")
        steps = _whole("Steps", steps, range(1, MOST_STEPS + 1), f"from 1 to {MOST_STEPS}")
        request = ImageRequest(
            *(prompt, None, height, width, steps, usual_guidance(self.pipe), seed),
            scalecrafter=False,
        )
        if shown is not None and shown.request == request:
            return [gr.skip()] * 4
        after_step = self._after_step(visitor, _steps_of("Exact", steps, progress))
        with avq_disabled(self.pipe):
            exact = timed_image(self.pipe, request, after_step)
        return [ShownImage(request, exact), _titled("Exact", exact), None, None]

    def generate_avq(
        self,
        shown: ShownImage | None,
        dial: str,
        tolerance: str,
        visitor: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list:
        """The AVQ image, its difference from the exact one, and what ran in each layer.

        At `default_dial`, each layer runs as `source` says. A tolerance, measured on the image,
        overrides the dial.
        """
        if shown is None:
            return [gr.skip()] * 3
        _one_of("Threshold" if self.kind == THRESHOLD else "Refined parents", dial, self.dials)
        _one_of("Tolerance", tolerance, [NO_TOLERANCE, *map(str, SHOWN_TOLERANCES)])
        request = shown.request
        if tolerance != NO_TOLERANCE:
            progress(0, "Measuring layers")

            def tell(name: str, done: int, total: int) -> None:
                progress((done, total), name.capitalize(), unit="model calls")

            watching = {"progress": tell, "callback_on_step_end": self._after_step(visitor)}
            set_dial(self.pipe, self.source, request, TOLERANCE, float(tolerance), **watching)
        else:
            apply_avq(self.pipe, self.source, route="always")
            if dial != self.default_dial:
                set_dial(self.pipe, self.source, request, self.kind, float(dial))
        after_step = self._after_step(visitor, _steps_of("AVQ", request.steps, progress))
        avq = timed_image(self.pipe, request, after_step)
        likeness = f"PSNR {psnr(avq.image, shown.exact.image):.1f} dB"
        differing = difference(shown.exact.image, avq.image)
        return [
            _titled("AVQ", avq, f" ({shown.exact.seconds / avq.seconds:.1f}x)"),
            gr.Image(differing, label=f"Difference x{DIFFERENCE_GAIN}, {likeness}"),
            gr.Dataframe(**self.report()),
        ]

    def report(self) -> dict[str, list]:
        """What each layer runs, as arguments for a table."""
        header, *cells = summary(self.pipe).cells()
        layers = [dict(zip(header, row, strict=True)) for row in cells]
        for row in layers:
            if row["config"] != "-":
                row["runs"] += f", {row['config']}"
        return {"value": [[row[x] for x in REPORTED] for row in layers], "headers": [*REPORTED]}

    def begin(self, visitor: gr.Request) -> gr.Button:
        """Let a visitor's runs start; returns the button that cancels them."""
        self.working[visitor.session_hash] = object()
        return gr.Button(CANCEL, visible=True)

    def cancel(self, visitor: gr.Request) -> None:
        """Stop a visitor's run at its next step, and those that are still queued."""
        self.working[visitor.session_hash] = None

    def _after_step(
        self, visitor: gr.Request, tell: Callable[[int], None] | None = None
    ) -> Callable[..., dict[str, Any]]:
        """A `callback_on_step_end` that tells of steps and stops cancelled runs.

        Raises:
            gr.Error: the run was cancelled while it was queued.
        """

        session = visitor.session_hash
        pressed = self.working.setdefault(session, object())

        def stop_if_cancelled() -> None:
            if pressed is None or self.working.get(session) is not pressed:
                raise gr.Error("Cancelled.", print_exception=False)

        def after_step(
            pipe: DiffusionPipeline, step: int, timestep: int, tensors: dict[str, Any]
        ) -> dict[str, Any]:
            stop_if_cancelled()
            if tell is not None:
                tell(step + 1)
            return tensors

        stop_if_cancelled()
        after_step.only_watches = True  # type: ignore[attr-defined]
        return after_step


def _steps_of(title: str, steps: int, progress: gr.Progress) -> Callable[[int], None]:
    """What shows the number of steps done."""
    return lambda done: progress(done / steps, f"{title}, step {done} of {steps}")


def build_page(
    pipe: DiffusionPipeline, model: str, examples: Sequence[str], source: AVQSource
) -> gr.Blocks:
    """Apply AVQ to a pipeline and lay out its page; the prompt field starts with the first example.

    Offers tolerances if `source` has a threshold. The page only regenerates the exact image when
    something other than AVQ has changed.
    """
    events = _Events(pipe, source)
    sizes, side, has_threshold = events.sides, events.sides[0], events.kind == THRESHOLD

    with gr.Blocks(
        title="AVQ attention",
        analytics_enabled=False,
        delete_cache=(CACHE_SECONDS, CACHE_SECONDS),
    ) as page:
        shown = gr.State()
        gr.Markdown(f"# AVQ attention\n{WHAT_AVQ_IS} This page runs {model} on {pipe.device}.")
        prompt = gr.Textbox(examples[0], label="Prompt", lines=2, max_length=MOST_CHARACTERS)
        with gr.Row():
            button = gr.Button("Generate", variant="primary", min_width=120)
            cancel = gr.Button(CANCEL, min_width=120, visible=False)
        with gr.Row():
            images = [
                gr.Image(label=title, format="png", interactive=False, elem_id=title)
                for title in ("Exact", "AVQ", "Difference")
            ]
        tolerance = gr.Radio(
            [NO_TOLERANCE, *map(str, SHOWN_TOLERANCES)],
            value=NO_TOLERANCE,
            label="Tolerance",
            info="Largest relative error of the model's output, measured on this image; sets the "
            "threshold of every layer.",
            visible=has_threshold,
        )
        dial = gr.Radio(
            events.dials,
            value=events.default_dial,
            label="Threshold" if has_threshold else "Refined parents per query tile",
            info=f"{'Larger' if has_threshold else 'Fewer'} is faster and coarser. Changing this "
            "regenerates the AVQ image.",
        )
        with gr.Row():
            width = gr.Dropdown(sizes, value=side, label="Width", min_width=120)
            height = gr.Dropdown(sizes, value=side, label="Height", min_width=120)
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED)
            steps = gr.Slider(1, MOST_STEPS, 25, step=1, precision=0, label="Steps")
        report = gr.Dataframe(
            **events.report(),
            label="What ran in each layer",
            column_widths=[*REPORTED.values()],
            max_height=1200,
            wrap=True,
            interactive=False,
        )
        gr.Examples([[example] for example in examples], prompt, label="Prompts to try")

        for field in (prompt, width, height, seed, steps, dial, tolerance):
            # `_Events` checks the input: gradio's own checks print tracebacks.
            vars(field)["preprocess"] = lambda value: value
        exact, avq, differing = images
        pipeline = {"concurrency_id": "pipeline", "concurrency_limit": 1}
        refine = {
            "fn": events.generate_avq,
            "inputs": [shown, dial, tolerance],
            "outputs": [avq, differing, report],
            "show_progress_on": avq,
            **pipeline,
        }
        begin = {"fn": events.begin, "outputs": cancel, "queue": False}
        hides_cancel = {
            "fn": partial(gr.Button, CANCEL, visible=False),
            "outputs": cancel,
            "queue": False,
            "api_visibility": "private",
        }
        gr.on([dial.input, tolerance.input], **begin).then(**refine).then(**hides_cancel)
        tolerance.input(
            lambda chosen: gr.Radio(visible=chosen == NO_TOLERANCE),
            tolerance,
            dial,
            queue=False,
            api_visibility="private",
        )
        generated = button.click(**begin).then(
            events.generate_exact,
            [shown, prompt, width, height, seed, steps],
            [shown, exact, avq, differing],
            show_progress_on=exact,
            **pipeline,
        )
        generated.failure(**hides_cancel)
        generated.success(**refine, api_visibility="private").then(**hides_cancel)
        cancel.click(events.cancel, queue=False)
        page.unload(events.cancel)
    return page


def serve(page: gr.Blocks, *, host: str, port: int, share: bool = False) -> str:
    """Serve the page in threads of this process; return its address. `page.close()` stops it.

    With `share`, Gradio's servers publish it, too.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise OSError(f"cannot listen on --host {host} --port {port}: {error.strerror}.") from error
    _, local, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        footer_links=[],
        show_error=True,
        ssr_mode=False,
        enable_monitoring=False,
        prevent_thread_lock=True,
        quiet=True,
    )
    return public or local


def _whole(name: str, value: object, allowed: Container[int], expected: str) -> int:
    """Check a whole number sent by a visitor."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise _mistake(f"{name} must be {expected}, but got {value!r}.")
    if int(value) not in allowed:
        raise _mistake(f"{name} must be {expected}, but got {value!r}.")
    return int(value)


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a choice that the page does not offer."""
    if value not in allowed:
        raise _mistake(f"{name} must be one of {', '.join(allowed)}, but got {value!r}.")


def _mistake(message: str) -> gr.Error:
    return gr.Error(message, print_exception=False)


def _titled(title: str, timed: TimedImage, gain: str = "") -> gr.Image:
    return gr.Image(timed.image, label=f"{title}, {timed.seconds:.1f} s{gain}")
