"""`python -m distill.vision`: models, fine-tuning by Trainer, resuming, comparison."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    DPTConfig,
    DPTForSemanticSegmentation,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
)
from typer.testing import CliRunner

from avq_diffusers import AVQCodebooks, AVQConfig, apply_avq
from distill.config_file import load_config
from distill.quantizer import Quantizer
from distill.vision import compare as vision_compare
from distill.vision import training
from distill.vision.__main__ import app
from distill.vision.calls import Call
from distill.vision.compare import compare
from distill.vision.config import VisionConfig, parse_attention
from distill.vision.images import Collator, open_images
from distill.vision.models import load_classifier, load_segmenter, vit_from_timm
from distill.vision.training import (
    BatchMetric,
    build_model,
    fine_tune,
    newest_checkpoint,
    predictions,
)

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "vision").glob("*.yaml"))
ROOT = Path(__file__).parents[2]
SIDE = 64


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and a set of each task: a red or a green square, left or right, on noise."""
    place = tmp_path_factory.mktemp("vision")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 8}
    Dinov2Model(Dinov2Config(**sizes, mlp_ratio=1, image_size=SIDE)).save_pretrained(place / "vit")
    rng = np.random.default_rng(0)
    for split, folder, count in (("training", "train", 12), ("validation", "val", 6)):
        for index in range(count):
            pixels = rng.integers(0, 100, (SIDE, SIDE, 3), np.uint8)
            labels = np.full((SIDE, SIDE), 3, np.uint8)
            square = slice(8, 40), slice(0, 32) if index % 4 < 2 else slice(32, 64)
            pixels[square] = (220, 20, 20) if index % 2 else (20, 220, 20)
            labels[square] = 1 + index % 2
            name = "red" if index % 2 else "green"
            for path, array in (
                (place / "sets" / folder / name / f"{index}.png", pixels),
                (place / "sets" / "images" / split / f"{index}.png", pixels),
                (place / "sets" / "annotations" / split / f"{index}.png", labels),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
    return place


def settings(place, task="classification", **changes):
    overrides = {
        "model": place / "vit",
        "data.path": place / "sets",
        "data.num_labels": 3 if task == "segmentation" else "null",
        "data.image_size": SIDE,
        "data.workers": 1,
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 4,
        "precision": "fp32",
        "learning_rate": 0.001,
        "head_learning_rate": 0.002,
        "codebooks.start_images": 4,
        "codebooks.keys_per_layer": 128,
        **changes,
    }
    path = next(path for path in CONFIGS if path.stem == f"scenes_{task}")
    return load_config(path, VisionConfig, [f"{name}={value}" for name, value in overrides.items()])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_complete(path):
    config = load_config(path, VisionConfig, [])
    parse_attention(config.attention)
    is_the_paper = path.stem.startswith(("ade20k_", "imagenet_"))
    assert is_the_paper == (config.precision == "fp16")
    assert (config.learning_rate == 1e-5) == is_the_paper


def test_the_loss_falls_and_the_score_rises(place, tmp_path):
    config = settings(place, max_steps=30, **{"log_every": 5, "data.augment": "none"})
    scores = fine_tune(config, tmp_path / "run", resume=False)
    assert scores["eval_top1"] > 90
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "green", 1: "red"}


@pytest.mark.parametrize("key_norm", [True, False])
@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_what_was_trained_is_what_is_loaded(place, tmp_path, monkeypatch, task, key_norm):
    """Catches codebooks of another layer, a lost key norm, and a head or a norm left behind."""
    config = settings(
        place,
        task,
        attention="M4P2C2",
        **{"codebooks.key_norm": str(key_norm).lower(), "codebooks.dead_every": 2},
    )
    seen = []

    def remember(task, logits, labels):
        seen.append(logits[0] if isinstance(logits, tuple) else logits)
        return predictions(task, logits, labels)

    monkeypatch.setattr(training, "predictions", remember)
    fine_tune(config, tmp_path / "run", resume=False)
    folder = str(tmp_path / "run" / "model")
    if task == "segmentation":
        model = load_segmenter(folder, 3)
    else:
        model = load_classifier(folder, ["green", "red"])
    apply_avq(model, AVQCodebooks.from_pretrained(tmp_path / "run" / "codebooks"), route="always")
    validation, _ = open_images(config, "validation")
    batch = Collator(config.data)([validation[0], validation[1]])
    with torch.no_grad():
        logits = model.eval()(batch["pixel_values"]).logits
    torch.testing.assert_close(logits, seen[0], rtol=1e-4, atol=1e-4)


def test_codebooks_are_updated_once_a_step_by_all_its_keys(place, tmp_path, monkeypatch):
    """Catches an update for each micro-batch, and one that sees the last micro-batch only."""
    fields = ("decay_start", "decay_end")
    config = settings(
        place,
        attention="M4P2C2",
        max_steps=3,
        **{f"codebooks.{name}": 0.0 for name in fields},
        **{"codebooks.dead_threshold": "null"},
    )
    counts = []
    update = Quantizer.update

    def counted(quantizer, decay):
        update(quantizer, decay)
        counts.append(float(quantizer.ema_counts[0, :, 0].sum()))

    monkeypatch.setattr(Quantizer, "update", counted)
    fine_tune(config, tmp_path / "run", resume=False)
    assert counts == [config.batch_size * 64.0] * 3 * 4


def test_scores_are_those_of_the_definition():
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (4, 6, 6), generator=rng)
    labels[labels == 2] = torch.where(torch.rand(4, 6, 6, generator=rng) < 0.5, 255, 2)[labels == 2]
    logits = torch.randn(4, 3, 3, 3, generator=rng)
    found = predictions("segmentation", logits, labels)
    larger = F.interpolate(logits, (6, 6), mode="bilinear", align_corners=False)
    assert torch.equal(found, larger.argmax(1))
    valid = labels != 255
    shares = [
        ((found == c) & (labels == c)).sum() / (((found == c) | (labels == c)) & valid).sum()
        for c in range(3)
    ]
    metric = BatchMetric("segmentation", 3)
    for i, last in ((0, False), (2, True)):
        batch = type("Batch", (), {"predictions": found[i : i + 2], "label_ids": labels[i : i + 2]})
        scores = metric(batch, compute_result=last)
    assert scores["miou"] == pytest.approx(100 * float(torch.stack(shares).mean()), abs=1e-4)


def train(place, output, *more):
    config = settings(place)
    values = {
        "model": config.model,
        "data.path": config.data.path,
        "data.image_size": SIDE,
        "data.workers": 0,
        "data.preload": "false",
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 8,
        "evaluate_every": 2,
        "keep_checkpoints": 2,
        "precision": "fp32",
        "learning_rate": 0.001,
        "attention": "M4P2C2",
        "codebooks.start_images": 4,
        "codebooks.keys_per_layer": 128,
        "codebooks.dead_every": 3,
    }
    path = ROOT / "configs" / "vision" / "scenes_classification.yaml"
    arguments = ["train", "--config", str(path), "--output", str(output)]
    for name, value in values.items():
        arguments += ["--set", f"{name}={value}"]
    return [*arguments, *more]


def weights(output):
    folders = (
        output / "model" / "model.safetensors",
        *(output / "codebooks").glob("*.safetensors"),
    )
    return [load_file(path) for path in folders]


@pytest.mark.parametrize("attention", ["exact", "M4P2C2"])
def test_a_resumed_run_ends_in_the_same_weights(place, tmp_path, attention):
    """Catches Trainer's own reader of checkpoints, and images of another epoch after it."""
    config = settings(place, attention=attention, max_steps=7, evaluate_every=5)
    fine_tune(config, tmp_path, resume=False)
    expected = weights(tmp_path)
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint.name == "checkpoint-5"  # in the middle of the second epoch
    fine_tune(config, tmp_path, resume=True)
    for whole, resumed in zip(expected, weights(tmp_path), strict=True):
        assert whole.keys() == resumed.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_best_checkpoint_is_kept(place, tmp_path):
    rate = {"learning_rate": 0.02, "head_learning_rate": 0.02}
    config = settings(place, max_steps=8, evaluate_every=1, best="true", keep_checkpoints=1, **rate)
    scores = fine_tune(config, tmp_path, resume=False)
    logs = json.loads((newest_checkpoint(tmp_path) / "trainer_state.json").read_text())
    found = [log["eval_top1"] for log in logs["log_history"] if "eval_top1" in log]
    assert scores["eval_top1"] == max(found)
    assert len(set(found)) > 1


@pytest.mark.long
def test_a_killed_run_ends_in_the_same_weights(place, tmp_path):
    """A process killed while it trains, and a checkpoint that a kill cut short."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(output, *more):
        command = [sys.executable, "-m", "distill.vision", *train(place, output, *more)]
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    assert start(tmp_path / "whole").wait() == 0
    process = start(tmp_path / "killed")
    limit = time.monotonic() + 300
    while newest_checkpoint(tmp_path / "killed") is None and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    found = newest_checkpoint(tmp_path / "killed")
    cut = tmp_path / "killed" / "checkpoint-99"
    shutil.copytree(found, cut)
    (cut / "trainer_state.json").unlink()
    assert newest_checkpoint(tmp_path / "killed") == found
    assert start(tmp_path / "killed", "--resume").wait() == 0
    for whole, resumed in zip(
        weights(tmp_path / "whole"), weights(tmp_path / "killed"), strict=True
    ):
        assert whole.keys() == resumed.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_two_processes_end_in_the_same_weights(place, tmp_path):
    """Catches statistics that are not summed over processes, and a fight for the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    changes = ("--set", "codebooks.dead_threshold=null", "--set", "max_steps=4")
    for count in (1, 2):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc_per_node", str(count), "-m", "distill.vision"]
        command = [*launch, *train(place, tmp_path / str(count), *changes)]
        found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
    for one, two in zip(weights(tmp_path / "1"), weights(tmp_path / "2"), strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)


def test_errors_are_one_sentence(place, tmp_path):
    def message(*arguments):
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 2
        return result.output

    def changed(name, *changes):
        return train(place, tmp_path / name, *(x for change in changes for x in ("--set", change)))

    nowhere = changed("a", "data.path=nowhere/x", "task=segmentation", "data.num_labels=3")
    assert "there is no folder nowhere/x/images/training" in message(*nowhere)
    shutil.copytree(place / "sets", tmp_path / "sets")
    wrong = tmp_path / "sets" / "annotations" / "training" / "7.png"
    Image.fromarray(np.full((SIDE, SIDE), 9, np.uint8)).save(wrong)
    maps = (f"data.path={tmp_path / 'sets'}", "task=segmentation", "data.num_labels=3")
    for workers in (0, 1):
        told = message(*changed(f"w{workers}", *maps, f"data.workers={workers}"))
        assert told.rpartition("error: ")[2].strip() == (
            f"labels must be at most num_labels = 3, but {wrong} has 9."
        )
        assert "Traceback" not in told
    assert "attention must be exact, swin" in message(*changed("b", "attention=swim"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps({"task": "segmentation"}))
    assert "holds a run: add --resume" in message(*train(place, tmp_path / "c"))
    assert "other settings (attention, batch_size" in message(
        *train(place, tmp_path / "c", "--resume")
    )
    few = message(*changed("d", "batch_size=64"))
    assert "at least batch_size = 64 training images, but got 12" in few
    compared = train(place, tmp_path / "e")
    compared[0] = "compare"
    for change in (*maps, "data.workers=1", "data.preload=false", "attention=exact"):
        compared += ["--set", change]
    told = message(*compared)
    assert f"error: labels must be at most num_labels = 3, but {wrong} has 9." in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("task", "kind", "config", "expected"),
    [
        (
            "classification",
            BertModel,
            BertConfig(vocab_size=2, hidden_size=8, num_hidden_layers=1, num_attention_heads=1),
            "^model must be a vision model that classifies, but .* is of type bert.$",
        ),
        (
            "segmentation",
            ResNetModel,
            ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]),
            "^model must be DPT, or a vision transformer of one grid .* is of type resnet.$",
        ),
    ],
)
def test_models_of_other_kinds_get_one_sentence(place, tmp_path, task, kind, config, expected):
    kind(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=expected):
        build_model(settings(place, task, model=tmp_path), ["green", "red"])


def test_damaged_weights_and_a_single_class_get_one_sentence(place, tmp_path):
    shutil.copytree(place / "vit", tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"no weights")
    for task in ("classification", "segmentation"):
        with pytest.raises(ValueError, match=r"^the weights of .*vit cannot be read: "):
            build_model(settings(place, task, model=tmp_path / "vit"), ["green", "red"])
    with pytest.raises(
        ValueError, match=r"^a classifier needs two classes or more, but got red\.$"
    ):
        build_model(settings(place), ["red"])


def test_a_loss_that_is_not_finite_ends_the_run(place, tmp_path):
    config = settings(place, learning_rate=1e30, log_every=1, max_steps=6)
    with pytest.raises(FloatingPointError, match="the loss is nan at step"):
        fine_tune(config, tmp_path / "run", resume=False)


def test_label_maps_without_a_label_end_a_run_that_logs_nothing(place, tmp_path):
    """Their loss is the mean over no pixel."""
    shutil.copytree(place / "sets", tmp_path / "sets")
    for path in (tmp_path / "sets" / "annotations" / "training").iterdir():
        Image.fromarray(np.zeros((SIDE, SIDE), np.uint8)).save(path)
    changes = {"data.path": tmp_path / "sets", "max_steps": 2, "log_every": 50}
    config = settings(place, "segmentation", **changes)
    with pytest.raises(FloatingPointError, match=r"nan at step 2.* or leave out images without a"):
        fine_tune(config, tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / "model").exists()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_comparison_goes_on_and_starts_each_attention_from_the_teacher(place, tmp_path):
    config = settings(place, max_steps=3)
    names = ["exact", "M4P2C2/own", "M4P2C2", "flat@M4P2C2", "linformer"]
    options = {"steps": 2, "rate": 0.5, "elastic": [1, 4, 5], "seconds": 1e9}
    compare(config, names[:3], tmp_path, seeds=[0], **options)
    first = rows_of(tmp_path)
    compare(config, names, tmp_path, seeds=[0, 1], **options)
    rows = rows_of(tmp_path)
    assert rows[: len(first)] == first
    expected = {("teacher", 0)} | {(name, seed) for name in names for seed in (None, 0, 1)}
    assert {(row["name"], row["seed"]) for row in rows} == expected
    assert len(rows) == len(expected)
    found = {(row["name"], row["seed"]): row for row in rows}
    assert found["exact", None]["score"] == pytest.approx(found["teacher", 0]["score"], abs=1e-4)
    assert found["flat@M4P2C2", 1]["attention"] == "M8"
    assert found["M4P2C2", 0]["elastic"].keys() == {"1", "4"}
    layers = found["M4P2C2", 1]["layers"]
    assert len(layers) == 4
    assert layers[0].keys() == {"quantization_error", "active_ratio", "capture"}
    assert all(row["ms"] > 0 for (_, seed), row in found.items() if seed is None)


@pytest.mark.parametrize("kind", [RuntimeError, FloatingPointError])
def test_an_attention_that_fails_is_named_and_left_out(place, tmp_path, monkeypatch, kind):
    def fails(*inputs):
        raise kind("no kernel for this GPU\nat line 3")

    monkeypatch.setattr("distill.vision.baselines.Performer.attend", fails)
    config, names = settings(place, max_steps=1), ["performer", "exact"]
    compare(config, names, tmp_path, steps=1, rate=1, seeds=[0], elastic=[], seconds=1e9)
    teacher, performer, untrained, trained = rows_of(tmp_path)
    assert performer["failed"] == "no kernel for this GPU"
    assert untrained["score"] == teacher["score"]
    assert (trained["name"], trained["seed"]) == ("exact", 0)


@pytest.mark.parametrize(
    ("attention", "sizes", "form"),
    [
        ("M8P4C2E16/own2", "M8P4C2E16", ("means", 2)),
        ("M8P4C2E16/own2", "M8", ("means", 2)),
        ("M8P4C2", "M8P4C2", ("stored", 0)),
    ],
)
def test_the_timed_operation_is_the_whole_attention(monkeypatch, attention, sizes, form):
    """Catches flat VQ that is compared with AVQ without its exact keys or updates."""
    seen = {}

    def see(query, key, value, codebook, **options):
        seen.update(options, codebook=codebook)

    monkeypatch.setattr(vision_compare, "avq_attention", see)
    monkeypatch.setattr(vision_compare, "_ms", lambda function: function())
    sinks = torch.randn(2, 1, 2, 1, 8)
    call = Call(*torch.randn(3, 1, 2, 16, 8), *sinks, query_order=torch.arange(16), scale=0.5)
    timed = AVQConfig.parse(sizes)
    vision_compare._operation_ms(parse_attention(attention), timed, call)
    assert {name: seen[name] for name in asdict(timed.sizes)} == asdict(timed.sizes)
    assert (seen["codewords"], seen["num_updates"]) == form
    assert seen["sink_key"] is call.sink_key
    if form[0] == "stored":
        assert seen["codebook"].children.shape == (2, 8, 2, 8)
        assert torch.equal(seen["codebook"].parents[:, [0, 7]], call.key[0, :, [0, 15]])


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, 24), (25, 24), (119, 88), (120, 120), (200, 184), (9999, 504)]
)
def test_flat_vq_takes_as_long_on_a_gpu(monkeypatch, limit, expected):
    """Catches a search that stops early, passes the limit, or does not end."""

    def operation_ms(attention, config, call):
        return config.num_parents if config.num_children == 0 else limit

    monkeypatch.setattr(vision_compare, "_operation_ms", operation_ms)
    tokens = torch.empty(1, 2, 1024, 8)
    part = SimpleNamespace(timed=SimpleNamespace(query=SimpleNamespace(is_cuda=True), key=tokens))
    name = vision_compare._resolved("flat@M56P8C8/own", part)  # 56 + 8 * 8 columns
    assert name == f"M{expected}/own"


def test_a_comparison_scales_the_rates_of_the_teacher(place, tmp_path):
    config = settings(place, max_steps=2, learning_rate=1e-3, head_learning_rate=1e-2)
    compare(config, ["exact"], tmp_path, steps=1, rate=1e-9, seeds=[0], elastic=[], seconds=1e9)
    _, untrained, still = rows_of(tmp_path)
    assert still["score"] == untrained["score"]
    assert (untrained["rate"], still["rate"]) == (None, 1e-9)


def test_a_comparison_keeps_to_its_time(place, tmp_path):
    command = ["compare", *train(place, tmp_path, "--set", "max_steps=1")[1:]]
    command += ["--attentions", "exact", "--seeds", "0,1", "--elastic", "", "--seconds", "0"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [row["name"] for row in rows_of(tmp_path)] == ["teacher"]
    assert "exact, seed 1: no time left" in result.output
    assert "--rate must be above 0" in CliRunner().invoke(app, [*command, "--rate", "0"]).output


@pytest.mark.parametrize("attention", ["M4P2C2", "M4P2C2/own"])
def test_analyses_agree_with_the_run(place, tmp_path, attention):
    """Catches settings that change nothing, and codewords or norms of another run."""
    config = settings(place, attention=attention, **{"codebooks.key_norm": "true"})
    scores = fine_tune(config, tmp_path, resume=False)
    result = CliRunner().invoke(
        app, ["analyse", str(tmp_path), "--refined", "1,2,4,9", "--tiles", "16,128"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "analyses.json").read_text())["rows"]
    kinds = {
        kind: [row for row in rows if row["analysis"] == kind]
        for kind in ("elastic", "order", "layers", "importance")
    }
    assert [len(found) for found in kinds.values()] == [3, 6, 8, 3]
    elastic = {row["num_refined"]: row for row in kinds["elastic"]}
    assert elastic[2]["score"] == pytest.approx(scores["eval_top1"])
    assert elastic[1]["capture"] < elastic[2]["capture"] < elastic[4]["capture"]
    assert elastic[4]["capture"] == pytest.approx(1, abs=1e-5)
    for row in kinds["importance"]:
        assert row["best"] >= max(row["exact"], row["tiled"]) - 1e-6
    mean = np.mean([row["capture"] for row in kinds["layers"]])
    assert mean == pytest.approx(elastic[2]["capture"], abs=1e-5)
    assert all(row["commitment"] > 0 < row["active_ratio"] <= 1 for row in kinds["layers"])


def test_analyses_are_of_avq(place, tmp_path):
    command = train(place, tmp_path / "run", "--set", "max_steps=1", "--set", "attention=exact")
    result = CliRunner().invoke(app, command)
    assert "'eval_top1': " in result.output
    for folder, message in (("run", "has attention exact"), ("none", "holds no finished run")):
        result = CliRunner().invoke(app, ["analyse", str(tmp_path / folder)])
        assert result.exit_code == 2
        assert message in result.output


def timm_weights(model):
    """The weights of a ViT under timm's names, with query, key and value in one matrix."""
    state, found = model.state_dict(), {}
    names = {"classifier": "head", "vit.layernorm": "norm"}
    names["vit.embeddings.patch_embeddings.projection"] = "patch_embed.proj"
    for name, value in state.items():
        stem, kind = name.rpartition(".")[::2]
        if stem in names:
            found[f"{names[stem]}.{kind}"] = value
    found["cls_token"] = state["vit.embeddings.cls_token"]
    found["pos_embed"] = state["vit.embeddings.position_embeddings"]
    for i, layer in enumerate(m for m in model.modules() if type(m).__name__ == "ViTLayer"):
        attention, block = layer.attention, f"blocks.{i}"
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        modules = {
            "norm1": layer.layernorm_before,
            "norm2": layer.layernorm_after,
            "attn.proj": attention.o_proj,
            "mlp.fc1": layer.mlp.fc1,
            "mlp.fc2": layer.mlp.fc2,
        }
        for kind in ("weight", "bias"):
            found[f"{block}.attn.qkv.{kind}"] = torch.cat([getattr(x, kind) for x in parts])
            found |= {f"{block}.{n}.{kind}": getattr(m, kind) for n, m in modules.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def test_a_vit_of_timm(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        layer_norm_eps=1e-6,
        num_labels=7,
    )
    model = ViTForImageClassification(config).eval()
    weights = timm_weights(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        weights = timm_weights(model)
        found = vit_from_timm(weights, 32, {"num_labels": 7}).eval()
        torch.testing.assert_close(found(images).logits, model(images).logits)
        other = vit_from_timm(weights, 32, {"num_labels": 3}).eval()
        assert other(images).logits.shape == (2, 3)
        save_file(weights, tmp_path / "model.safetensors")
        of_size = {"pretrained_cfg": {"input_size": [3, 32, 32]}}
        (tmp_path / "config.json").write_text(json.dumps(of_size))
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name: tmp_path / name)
        of_hub = load_classifier("timm/vit", [*"abcdefg"]).eval()
        torch.testing.assert_close(of_hub(images).logits, model(images).logits)
        assert of_hub.config.id2label[6] == "g"
    del weights["blocks.1.mlp.fc2.bias"]
    with pytest.raises(ValueError, match=r"not a ViT of timm: there is no 'blocks.1.mlp.fc2.bias'"):
        vit_from_timm(weights, 32, {})


def test_dpt_keeps_its_own_head(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = DPTConfig(
        **sizes,
        intermediate_size=32,
        image_size=SIDE,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8] * 4,
        fusion_hidden_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = DPTForSemanticSegmentation(config).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        torch.testing.assert_close(
            load_segmenter(str(tmp_path), 3).eval()(images).logits, model(images).logits
        )


def test_settings_that_contradict_are_refused(place):
    config = settings(place)
    data = config.data
    for change, message in (
        ({"best": True}, "best needs evaluate_every"),
        ({"batch_size": 3}, "must be a multiple of micro_batch_size"),
        ({"task": "segmentation"}, "num_labels must be a number for segmentation"),
        ({"data": replace(data, num_labels=2)}, "null for classification, but got 2"),
        ({"warmup": 1.0}, r"warmup must be in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **change)
    maps = settings(place, "segmentation")
    with pytest.raises(ValueError, match="segmentation needs resize: squash and augment: flip or"):
        replace(maps, data=replace(maps.data, resize="crop"))
    for part, change, message in (
        (data, {"augment": "crop", "preload": True}, "augment must be flip or none"),
        (data, {"crop_share": 1.1}, "crop_share must be above 0, at most 1, but got 1.1"),
        (config.codebooks, {"diveq": True, "full_spawning": False}, "diveq needs full_spawning"),
        (config.codebooks, {"decay_end": 1.0}, r"decay_end must be in \[0, 1\), but got 1.0"),
        (config.codebooks, {"decay_warmup": 2}, r"decay_warmup must be in \[0, 1\], but got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(part, **change)


def test_half_precision_needs_a_gpu(place, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="precision fp16 needs a GPU; choose bf16 or fp32"):
        fine_tune(settings(place, precision="fp16"), tmp_path / "run", resume=False)
