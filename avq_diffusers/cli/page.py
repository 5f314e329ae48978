"""The page of `avq app`: exact and AVQ images of one prompt, side by side. Needs gradio."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import gradio as gr
import torch
from diffusers import DiffusionPipeline

from avq_diffusers.cli.images import TimedImage, dilation, image_error, timed_image, training_size
from avq_diffusers.cli.request import ImageRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.extras.scalecrafter.settings import SETTINGS
from avq_diffusers.hosts.examples import lacks_memory
from avq_diffusers.hosts.models import has_unet
from avq_diffusers.hosts.profile import SHOWN_TOLERANCES, ErrorProfile
from avq_diffusers.hosts.refinement import refinable_parents
from avq_diffusers.hosts.report import Summary
from avq_diffusers.hosts.sources import WITHOUT_CODEBOOKS, AVQSource
from avq_diffusers.hosts.verbs import apply_avq, avq_disabled, set_num_refined, states_of, summary
from avq_diffusers.images import DIFFERENCE_GAIN, difference, psnr
from avq_diffusers.mini.loading import usual_guidance

LARGEST_SEED = 2**32 - 1
MOST_CHARACTERS = 5000  # of a prompt; no text encoder reads as many, and tokenizing takes longer
MOST_STEPS = 100
SIZE_STEP = 64  # pixels; every Stable Diffusion UNet takes its multiples
LARGEST_SIDE = 4  # times that of training
CACHE_SECONDS = 3600  # how long gradio keeps the files of images that it has shown

IMAGE_HEIGHT = 280  # pixels on the page
NO_TOLERANCE = "none"
EXACT, AVQ, DIFFERENCE = "**Exact**", "**AVQ**", "**Difference**"

CSS = """
.image .icon-button-wrapper { opacity: 0; }
.image:hover .icon-button-wrapper, .image:focus-within .icon-button-wrapper { opacity: 1; }
#report { overflow-x: auto; }
#report table { border: 0; font-size: 13px; white-space: nowrap; }
#report thead, #report tr { border: 0; border-bottom: 1px solid var(--border-color-primary); }
#report th, #report td { border: 0; padding: 1px 8px; }
"""

# Called after each denoising step with the number of steps done.
OnStep = Callable[[int], None]


class SharedPipeline:
    """A pipeline with AVQ that generates one image at a time, from any thread.

    Args:
        pipe: the pipeline.
        source: what AVQ was applied with; only a configuration allows tolerances.

    Attributes:
        default_refined: refined parents per query tile when it was shared; the largest number
            where layers differ.
        most_refined: parents of the largest codebook; 0 for flat codebooks.
    """

    def __init__(self, pipe: DiffusionPipeline, source: AVQSource | None = None) -> None:
        self.pipe = pipe
        self.config = source if isinstance(source, AVQConfig) else None
        self.profile: tuple[ImageRequest, ErrorProfile] | None = None  # the last one measured
        self.lock = Lock()
        states = states_of(pipe)
        sizes = {x.name: state.sizes.get() or state.config.sizes for x, state in states.items()}
        self.own = {name: of_layer.num_refined for name, of_layer in sizes.items()}
        self.most = refinable_parents(states)
        self.default_refined = max(self.own.values())
        self.most_refined = max(self.most.values())

    def generate_exact(self, request: ImageRequest, on_step: OnStep) -> TimedImage:
        """Generate with exact attention."""
        with self.lock, avq_disabled(self.pipe):
            return self._generate(request, on_step)

    def generate_avq(
        self,
        request: ImageRequest,
        num_refined: int,
        on_step: OnStep,
        tolerance: float | None = None,
    ) -> tuple[TimedImage, Summary]:
        """Generate with AVQ attention, and report what ran in each layer.

        Layers with fewer than `num_refined` parents refine all. At `default_refined` each layer
        refines as many as when the pipeline was shared. A tolerance, measured on the image,
        replaces `num_refined`.
        """
        plan = {name: min(num_refined, most) for name, most in self.most.items()}
        with self.lock:
            if tolerance is None:
                own = num_refined == self.default_refined
                set_num_refined(self.pipe, self.own if own else plan)
            else:
                profile = self._profile_of(request, on_step)
                apply_avq(self.pipe, profile, tolerance=tolerance, route="always")
            for state in states_of(self.pipe).values():
                state.calls.clear()
            return self._generate(request, on_step), summary(self.pipe)

    def _profile_of(self, request: ImageRequest, on_step: OnStep) -> ErrorProfile:
        """The last profile if it is of this request, else a new one; its steps count as step 0."""
        if self.config is None:
            raise ValueError(WITHOUT_CODEBOOKS)
        if self.profile is None or self.profile[0] != request:
            after_step = _step_callback(lambda step: on_step(0))
            with dilation(self.pipe, request):
                self.profile = request, image_error(self.pipe, self.config, request, after_step)
        return self.profile[1]

    def _generate(self, request: ImageRequest, on_step: OnStep) -> TimedImage:
        with dilation(self.pipe, request):
            return timed_image(self.pipe, request, _step_callback(on_step))


class ShownImage(NamedTuple):
    """The exact image on a visitor's page."""

    request: ImageRequest
    exact: TimedImage


class _Events:
    """What the page does when a visitor acts. Arguments and results are the values of fields.

    Attributes:
        present: sessions of the visitors who asked for an image and have not left.
    """

    def __init__(self, pipeline: SharedPipeline) -> None:
        self.pipeline = pipeline
        self.present: set[str | None] = set()

    def generate_exact(
        self,
        shown: ShownImage | None,
        prompt: str | None,
        negative_prompt: str | None,
        width: float | None,
        height: float | None,
        seed: float | None,
        steps: float,
        guidance: float,
        dilated: bool,
        visitor: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008, gradio looks for it here
    ) -> list:
        """The exact image, and the other two emptied; nothing if it is shown already."""
        with _shown_errors():
            if not prompt or not prompt.strip():
                raise ValueError("The prompt is empty; write what the image shows.")
            for name, text in (("prompt", prompt), ("negative prompt", negative_prompt or "")):
                if len(text) > MOST_CHARACTERS:
                    raise ValueError(
                        f"The {name} can have {MOST_CHARACTERS} characters, but got {len(text)}."
                    )
            largest = LARGEST_SIDE * training_size(self.pipeline.pipe)
            request = ImageRequest(
                prompt,
                negative_prompt or None,
                _whole("height", height, 1, largest),
                _whole("width", width, 1, largest),
                _whole("number of steps", steps, 1, MOST_STEPS),
                guidance,
                _whole("seed", seed, 0, LARGEST_SEED),
                dilated,
            )
            if shown is not None and shown.request == request:
                return [gr.skip()] * 8
            on_step = self._on_step(visitor, progress, request.steps, "Exact")
            exact = self.pipeline.generate_exact(request, on_step)
        title = f"{EXACT}, {exact.seconds:.1f} s"
        return [ShownImage(request, exact), title, exact.image, AVQ, None, DIFFERENCE, None, ""]

    def generate_avq(
        self,
        shown: ShownImage | None,
        num_refined: float,
        tolerance: str | None,
        visitor: gr.Request,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list:
        """The AVQ image, its difference from the exact one, and what ran in each layer."""
        if shown is None:
            return [gr.skip()] * 5
        exact = shown.exact.image
        with _shown_errors():
            avq, report = self.pipeline.generate_avq(
                shown.request,
                _whole("number of refined parents", num_refined, 0, self.pipeline.most_refined),
                self._on_step(visitor, progress, shown.request.steps, "AVQ"),
                None if tolerance in (None, NO_TOLERANCE) else float(tolerance),
            )
        return [
            f"{AVQ}, {avq.seconds:.1f} s",
            avq.image,
            f"{DIFFERENCE} x{DIFFERENCE_GAIN}, PSNR {psnr(avq.image, exact):.1f} dB",
            difference(exact, avq.image),
            f"{_as_typed(shown.request)}\n\n{_table(report)}",
        ]

    def offer_scalecrafter(self, width: float | None, height: float | None) -> gr.Checkbox:
        """The checkbox, enabled at the sizes that ScaleCrafter has settings for."""
        side = training_size(self.pipeline.pipe)
        is_known = ((height or 0) / side, (width or 0) / side) in SETTINGS
        fits = is_known and has_unet(self.pipeline.pipe)
        return gr.Checkbox(interactive=True) if fits else gr.Checkbox(False, interactive=False)

    def leave(self, visitor: gr.Request) -> None:
        """Stop the work for a visitor who closed the page, at its next step."""
        self.present.discard(visitor.session_hash)

    def _on_step(
        self, visitor: gr.Request, progress: gr.Progress, steps: int, title: str
    ) -> OnStep:
        """Show the progress; the function raises `gr.Error` once the visitor has left."""
        session = visitor.session_hash
        self.present.add(session)

        def on_step(step: int) -> None:
            if session not in self.present:
                raise gr.Error("The visitor has left.", print_exception=False)
            progress((step, steps), title)

        return on_step


def build_page(
    pipe: DiffusionPipeline, model: str, examples: Sequence[str], source: AVQSource | None = None
) -> gr.Blocks:
    """Lay out the page for a pipeline with AVQ; the prompt field begins with the first example.

    It offers tolerances if `source`, what AVQ was applied with, is a configuration.

    Visitors wait for one another. The page generates the exact image again only when something
    other than the number of refined parents has changed.

    Raises:
        ValueError: the pipeline has no AVQ layer.
    """
    shared = SharedPipeline(pipe, source)
    events = _Events(shared)
    guidance_scale = usual_guidance(pipe)
    side = training_size(pipe)
    first = side // SIZE_STEP * SIZE_STEP + SIZE_STEP
    sizes = [side, *range(first, LARGEST_SIDE * side + 1, SIZE_STEP)]
    dilated_sizes = ", ".join(f"{width * side:g} x {height * side:g}" for height, width in SETTINGS)

    with gr.Blocks(
        title="AVQ attention",
        analytics_enabled=False,
        delete_cache=(CACHE_SECONDS, CACHE_SECONDS),
    ) as page:
        shown = gr.State()
        gr.Markdown(f"# Exact and AVQ attention\n{_note(pipe, model)}")
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                prompt = gr.Textbox(examples[0], label="Prompt", lines=3, elem_id="prompt")
                negative_prompt = gr.Textbox(label="Negative prompt", lines=1)
                with gr.Row():
                    width = gr.Dropdown(sizes, value=side, label="Width", min_width=80)
                    height = gr.Dropdown(sizes, value=side, label="Height", min_width=80)
                seed = gr.Number(0, label="Seed", elem_id="seed")
                steps = gr.Slider(1, MOST_STEPS, 25, step=1, label="Steps", elem_id="steps")
                guidance = gr.Slider(1, 20, guidance_scale, step=0.5, label="Guidance")
                dilated = gr.Checkbox(
                    label="ScaleCrafter", info=f"For {dilated_sizes}.", interactive=False
                )
                button = gr.Button("Generate", variant="primary", elem_id="generate")
            with gr.Column(scale=3):
                with gr.Row():
                    exact_title, exact = _image(EXACT, "exact")
                    avq_title, avq = _image(AVQ, "avq")
                    difference_title, differing = _image(DIFFERENCE, "difference")
                num_refined = gr.Slider(
                    0,
                    shared.most_refined,
                    shared.default_refined,
                    step=1,
                    label="Refined parents per query tile",
                    info="Fewer are faster and coarser. Moving this generates the AVQ image again.",
                    interactive=shared.most_refined > 0,
                    elem_id="refined",
                )
                tolerance = gr.Radio(
                    [NO_TOLERANCE, *map(str, SHOWN_TOLERANCES)],
                    value=NO_TOLERANCE,
                    label="Tolerance",
                    info="Largest relative error of a layer's attention, measured on this image; "
                    "replaces the refined parents.",
                    visible=shared.config is not None,
                    elem_id="tolerance",
                )
                report = gr.Markdown(elem_id="report")
        gr.Examples([[example] for example in examples], prompt, label="Prompts to try")

        avq_results = [avq_title, avq, difference_title, differing, report]
        refine = {
            "fn": events.generate_avq,
            "inputs": [shown, num_refined, tolerance],
            "outputs": avq_results,
            "show_progress_on": avq,
            "concurrency_id": "pipeline",
        }
        num_refined.release(**refine)
        tolerance.input(**refine, api_visibility="private")
        button.click(
            events.generate_exact,
            [shown, prompt, negative_prompt, width, height, seed, steps, guidance, dilated],
            [shown, exact_title, exact, *avq_results],
            show_progress_on=exact,
            concurrency_limit=1,
            concurrency_id="pipeline",
        ).success(**refine, api_visibility="private")
        gr.on(
            [width.change, height.change],
            events.offer_scalecrafter,
            [width, height],
            dilated,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        page.unload(events.leave)
    return page


def serve(page: gr.Blocks, *, host: str, port: int, share: bool = False) -> str:
    """Serve the page in threads of this process; return its address. `page.close()` ends it.

    With `share`, Gradio's servers publish it too.

    Raises:
        OSError: the port is taken.
    """
    _, local, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css=CSS,
        footer_links=[],
        ssr_mode=False,
        enable_monitoring=False,
        prevent_thread_lock=True,
        quiet=True,
    )
    return public or local


def _image(title: str, name: str) -> tuple[gr.Markdown, gr.Image]:
    with gr.Column(min_width=200):
        return gr.Markdown(title, elem_id=f"{name}-title"), gr.Image(
            format="png",  # gradio's own choice loses detail
            height=IMAGE_HEIGHT,
            show_label=False,
            interactive=False,
            buttons=["download", "fullscreen"],
            elem_id=name,
            elem_classes="image",
        )


def _step_callback(on_step: OnStep) -> Callable[..., dict[str, Any]]:
    """A pipeline's `callback_on_step_end`."""

    def after_step(
        pipe: DiffusionPipeline, step: int, timestep: int, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        on_step(step + 1)
        return tensors

    return after_step


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """A field's value as an int; ValueError if it is none from `least` to `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or value % 1:
        raise ValueError(
            f"The {name} must be a whole number from {least} to {most}, but got {value}."
        )
    return int(value)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Show a visitor's mistake on the page; the page goes on."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise gr.Error(str(error), print_exception=False) from error
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise gr.Error("The memory is too small for this size.", print_exception=False) from error


def _note(pipe: DiffusionPipeline, model: str) -> str:
    threads = torch.get_num_threads()
    if pipe.device.type == "cuda":
        device = torch.cuda.get_device_name(pipe.device)
    elif pipe.device.type == "cpu":
        device = f"{threads} CPU thread{'' if threads == 1 else 's'}"
    else:
        device = pipe.device.type.upper()
    return f"{model} on {device}, {str(pipe.dtype).removeprefix('torch.')}"


def _as_typed(request: ImageRequest) -> str:
    """The request with all punctuation escaped, so that Markdown shows it as typed."""
    return re.sub(r"([!-/:-@[-`{-~])", r"\\\1", str(request))


def _table(report: Summary) -> str:
    """The report in Markdown."""
    header, *rows = report.cells()
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
