"""The page of `avq app`: exact and AVQ pictures of one prompt, side by side. Needs gradio."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import gradio as gr
import torch

from avq_diffusers.cli.comparison import Picture, psnr, timed_picture
from avq_diffusers.cli.sheet import DIFFERENCE_GAIN, difference
from avq_diffusers.extras.scalecrafter.apply import scalecrafter
from avq_diffusers.extras.scalecrafter.settings import SETTINGS
from avq_diffusers.plugin.apply import avq_disabled
from avq_diffusers.plugin.layer_state import applied_states
from avq_diffusers.plugin.prompts import lacks_memory
from avq_diffusers.plugin.refinement import refinable_parents, set_num_refined
from avq_diffusers.plugin.report import Summary, summary

LARGEST_SEED = 2**32 - 1
MOST_STEPS = 100
SIZE_STEP = 64  # pixels; a size that every Stable Diffusion UNet takes
LARGEST_SIDE = 4  # times that of training
CACHE_SECONDS = 3600  # how long gradio keeps the files of pictures that it has shown

PICTURE_HEIGHT = 280  # pixels on the page
EXACT, AVQ, DIFFERENCE = "**Exact**", "**AVQ**", "**Difference**"

CSS = """
.picture .icon-button-wrapper { opacity: 0; }
.picture:hover .icon-button-wrapper, .picture:focus-within .icon-button-wrapper { opacity: 1; }
#report { overflow-x: auto; }
#report table { border: 0; font-size: 13px; white-space: nowrap; }
#report thead, #report tr { border: 0; border-bottom: 1px solid var(--border-color-primary); }
#report th, #report td { border: 0; padding: 1px 8px; }
"""

# Called after each denoising step with the number of steps done.
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Request:
    """A picture to draw, but for the number of refined parents.

    Attributes:
        prompt: what it shows.
        negative_prompt: what it must not show; may be empty.
        width: in pixels.
        height: in pixels.
        seed: of the noise.
        steps: denoising steps.
        guidance_scale: of classifier-free guidance.
        scalecrafter: whether ScaleCrafter's dilated convolutions run.

    Raises:
        ValueError: the prompt is empty, or the seed is out of its range.
    """

    prompt: str
    negative_prompt: str
    width: int
    height: int
    seed: int
    steps: int
    guidance_scale: float
    scalecrafter: bool

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("The prompt is empty; write what the picture shows.")
        if self.seed is None or not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(
                f"The seed must be a whole number from 0 to {LARGEST_SEED}, but got {self.seed}."
            )

    def __str__(self) -> str:
        return (
            f"{self.prompt} ({self.width} x {self.height}, seed {self.seed}, {self.steps} steps, "
            f"guidance {self.guidance_scale:g}{', ScaleCrafter' if self.scalecrafter else ''})"
        )


class Studio:
    """Draws with a pipeline that has AVQ, one picture at a time, from any thread.

    Attributes:
        default_refined: refined parents per query tile when the studio was made; the largest
            number where layers differ.
        most_refined: the parents that can be refined: all of the largest codebook.
    """

    def __init__(self, pipe: Any) -> None:
        states = applied_states(pipe)
        self.pipe = pipe
        self.lock = Lock()
        self.own = {layer.name: state.num_refined for layer, state in states.items()}
        self.most = refinable_parents(pipe)
        self.default_refined = max(self.own.values())
        self.most_refined = max(self.most.values())

    @property
    def size(self) -> int:
        """Side in pixels of the pictures that the model was trained on."""
        return self.pipe.unet.config.sample_size * self.pipe.vae_scale_factor

    def draw_exact(self, request: Request, on_step: OnStep) -> Picture:
        """Draw with exact attention."""
        with self.lock, avq_disabled(self.pipe):
            return self._draw(request, on_step)

    def draw_avq(
        self, request: Request, num_refined: int, on_step: OnStep
    ) -> tuple[Picture, Summary]:
        """Draw with AVQ attention, and report what ran in each layer.

        Args:
            request: what to draw.
            num_refined: parents refined per query tile; layers with fewer refine all. At
                `default_refined` each layer refines as many as when the studio was made.
            on_step: called after each denoising step.
        """
        plan = {name: min(num_refined, most) for name, most in self.most.items()}
        with self.lock:
            set_num_refined(self.pipe, self.own if num_refined == self.default_refined else plan)
            for state in applied_states(self.pipe).values():
                state.calls.clear()
            return self._draw(request, on_step), summary(self.pipe)

    def _draw(self, request: Request, on_step: OnStep) -> Picture:
        def after_step(pipe: Any, step: int, timestep: int, tensors: dict) -> dict:
            on_step(step + 1)
            return tensors

        arguments = {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt or None,
            "height": request.height,
            "width": request.width,
            "num_inference_steps": request.steps,
            "guidance_scale": request.guidance_scale,
            "callback_on_step_end": after_step,
        }
        dilated = scalecrafter(self.pipe, request.height, request.width)
        with dilated if request.scalecrafter else nullcontext():
            return timed_picture(self.pipe, arguments, request.seed)


@dataclass(frozen=True)
class Drawn:
    """The exact picture that one visitor's page shows."""

    request: Request
    exact: Picture


class _Events:
    """What the page does when a visitor acts: functions from and to the values of its fields."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio

    def draw_exact(
        self,
        drawn: Drawn | None,
        prompt: str,
        negative_prompt: str,
        width: int,
        height: int,
        seed: int,
        steps: int,
        guidance: float,
        dilated: bool,
        progress: gr.Progress = gr.Progress(),  # noqa: B008, gradio looks for it here
    ) -> list:
        """The exact picture, and fields of the other two emptied; nothing if it is shown."""
        with _shown_errors():
            request = Request(
                prompt, negative_prompt, width, height, seed, steps, guidance, dilated
            )
            if drawn is not None and drawn.request == request:
                return [gr.skip()] * 8
            exact = self.studio.draw_exact(request, lambda step: progress((step, steps), "Exact"))
        title = f"{EXACT}, {exact.seconds:.1f} s"
        return [Drawn(request, exact), title, exact.image, AVQ, None, DIFFERENCE, None, ""]

    def draw_avq(
        self,
        drawn: Drawn | None,
        num_refined: int,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list:
        """The AVQ picture, its difference from the exact one, and what ran in each layer."""
        if drawn is None:
            return [gr.skip()] * 5
        steps, exact = drawn.request.steps, drawn.exact.image
        with _shown_errors():
            avq, report = self.studio.draw_avq(
                drawn.request, num_refined, lambda step: progress((step, steps), "AVQ")
            )
        return [
            f"{AVQ}, {avq.seconds:.1f} s",
            avq.image,
            f"{DIFFERENCE} x{DIFFERENCE_GAIN}, PSNR {psnr(avq.image, exact):.1f} dB",
            difference(exact, avq.image),
            f"{_as_typed(drawn.request)}\n\n{_table(report)}",
        ]

    def offer_scalecrafter(self, width: int, height: int) -> gr.Checkbox:
        """The box, which can be ticked at the sizes that ScaleCrafter has settings for."""
        fits = (height / self.studio.size, width / self.studio.size) in SETTINGS
        return gr.Checkbox(interactive=True) if fits else gr.Checkbox(False, interactive=False)


def build_page(
    pipe: Any, model: str, examples: Sequence[str], *, guidance_scale: float | None = None
) -> gr.Blocks:
    """Lay out the page for a pipeline with AVQ.

    Visitors' pictures are drawn one after the other. The exact one is drawn again only when
    something other than the number of refined parents has changed.

    Args:
        pipe: a pipeline that `apply_avq` was called on.
        model: its name, to show.
        examples: prompts to try; the first stands in the prompt field.
        guidance_scale: to begin with; None takes the pipeline's default.

    Raises:
        ValueError: the pipeline has no AVQ layer.
    """
    studio = Studio(pipe)
    events = _Events(studio)
    if guidance_scale is None:
        guidance_scale = inspect.signature(type(pipe).__call__).parameters["guidance_scale"].default
    side = studio.size
    first = side // SIZE_STEP * SIZE_STEP + SIZE_STEP
    sizes = [side, *range(first, LARGEST_SIDE * side + 1, SIZE_STEP)]
    dilated_sizes = ", ".join(f"{width * side:g} x {height * side:g}" for height, width in SETTINGS)

    with gr.Blocks(
        title="AVQ attention",
        analytics_enabled=False,
        delete_cache=(CACHE_SECONDS, CACHE_SECONDS),
    ) as page:
        drawn = gr.State()
        gr.Markdown(f"# Exact and AVQ attention\n{_note(pipe, model)}")
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                prompt = gr.Textbox(examples[0], label="Prompt", lines=3, elem_id="prompt")
                negative_prompt = gr.Textbox(label="Negative prompt", lines=1)
                with gr.Row():
                    width = gr.Dropdown(sizes, value=side, label="Width", min_width=80)
                    height = gr.Dropdown(sizes, value=side, label="Height", min_width=80)
                seed = gr.Number(0, label="Seed", precision=0, elem_id="seed")
                steps = gr.Slider(1, MOST_STEPS, 25, step=1, label="Steps", elem_id="steps")
                guidance = gr.Slider(1, 20, guidance_scale, step=0.5, label="Guidance")
                dilated = gr.Checkbox(
                    label="ScaleCrafter", info=f"For {dilated_sizes}.", interactive=False
                )
                button = gr.Button("Draw", variant="primary", elem_id="draw")
            with gr.Column(scale=3):
                with gr.Row():
                    exact_title, exact = _picture(EXACT, "exact")
                    avq_title, avq = _picture(AVQ, "avq")
                    difference_title, differing = _picture(DIFFERENCE, "difference")
                num_refined = gr.Slider(
                    0,
                    studio.most_refined,
                    studio.default_refined,
                    step=1,
                    label="Refined parents per query tile",
                    info="Fewer are faster and coarser. Moving this draws the AVQ picture again.",
                    interactive=studio.most_refined > 0,
                    elem_id="refined",
                )
                report = gr.Markdown(elem_id="report")
        gr.Examples([[example] for example in examples], prompt, label="Prompts to try")

        avq_results = [avq_title, avq, difference_title, differing, report]
        refine = {
            "fn": events.draw_avq,
            "inputs": [drawn, num_refined],
            "outputs": avq_results,
            "show_progress_on": avq,
            "concurrency_id": "pipeline",
        }
        num_refined.release(**refine)
        button.click(
            events.draw_exact,
            [drawn, prompt, negative_prompt, width, height, seed, steps, guidance, dilated],
            [drawn, exact_title, exact, *avq_results],
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
    return page


def serve(page: gr.Blocks, *, host: str, port: int, share: bool = False) -> str:
    """Serve the page in threads of this process; `page.close()` ends it.

    Args:
        page: of `build_page`.
        host: address to listen on.
        port: to listen on.
        share: also publish the page through Gradio's servers.

    Returns:
        The address of the page.

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


def _picture(title: str, name: str) -> tuple[gr.Markdown, gr.Image]:
    with gr.Column(min_width=200):
        return gr.Markdown(title, elem_id=f"{name}-title"), gr.Image(
            format="png",  # gradio's own choice loses detail
            height=PICTURE_HEIGHT,
            show_label=False,
            interactive=False,
            buttons=["download", "fullscreen"],
            elem_id=name,
            elem_classes="picture",
        )


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


def _note(pipe: Any, model: str) -> str:
    threads = torch.get_num_threads()
    if pipe.device.type == "cuda":
        device = torch.cuda.get_device_name(pipe.device)
    elif pipe.device.type == "cpu":
        device = f"{threads} CPU thread{'' if threads == 1 else 's'}"
    else:
        device = pipe.device.type.upper()
    return f"{model} on {device}, {str(pipe.dtype).removeprefix('torch.')}"


def _as_typed(request: Request) -> str:
    """The request in Markdown that shows its characters and takes none of them for markup."""
    return re.sub(r"([!-/:-@[-`{-~])", r"\\\1", str(request))


def _table(report: Summary) -> str:
    """The report in Markdown."""
    header, *rows = report.cells()
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
