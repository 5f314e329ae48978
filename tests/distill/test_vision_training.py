"""`python -m distill.vision`: models, fine-tuning by Trainer, resuming."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_training import CONFIGS, ROOT
from tiny_vision import choosing, tiny_vision
from torch.utils.data import get_worker_info
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    ResNetConfig,
    ResNetModel,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from typer.testing import CliRunner

from avq_diffusers import AVQCodebooks, apply_avq
from distill.checkpointing.folders import check_digests
from distill.config_file import load_config
from distill.vision import models
from distill.vision.__main__ import app
from distill.vision.config import VisionConfig
from distill.vision.images import Prepared
from distill.vision.models import load_classifier, load_model, load_segmenter, vit_from_timm
from distill.vision.training import fine_tune, metric_of, newest_checkpoint, open_run, predictions

FILES = {
    "classification": CONFIGS / "vision" / "imagenet_m64p16c8.yaml",
    "segmentation": CONFIGS / "vision" / "ade20k_m64p16c8.yaml",
}
SIDE = 64


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and a set of each task: a red or a green square, left or right, on noise."""
    place = tmp_path_factory.mktemp("vision")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 8}
    sizes |= {"mlp_ratio": 1, "image_size": SIDE, "layerscale_value": 1.0}
    choosing(lambda: Dinov2Model(Dinov2Config(**sizes))).save_pretrained(place / "vit")
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
                (place / "classes" / folder / name / f"{index}.png", pixels),
                (place / "maps" / "images" / split / f"{index}.png", pixels),
                (place / "maps" / "annotations" / split / f"{index}.png", labels),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
        patch.setattr(models, "NECK_SIZES", (8,) * 4)
        patch.setattr(models, "FUSION_SIZE", 8)
        yield place


def overrides(place, task, **changes):
    values = {
        "model": place / "vit",
        "data.path": place / ("maps" if task == "segmentation" else "classes"),
        "data.num_labels": 3 if task == "segmentation" else "null",
        "data.image_size": SIDE,
        "data.resize": "squash",
        "data.augment": "flip",
        "attention": "exact",
        "codebooks.key_norm": "false",
        "codebooks.decay_start": 0.9,
        "codebooks.decay_warmup_steps": 10,
        "codebooks.dead_threshold": 0.5,
        "codebooks.start_images": 4,
        "codebooks.keys_per_layer": 128,
        "codebooks.dead_every": 3,
        "head_rate": 2.0,
        "trainer.per_device_train_batch_size": 2,
        "trainer.gradient_accumulation_steps": 2,
        "trainer.max_steps": 4,
        "trainer.learning_rate": 0.001,
        "trainer.fp16": "false",
        "trainer.warmup_steps": 0.1,
        "trainer.lr_scheduler_type": "cosine",
        "trainer.eval_strategy": "'no'",
        "trainer.save_strategy": "'no'",
        "trainer.load_best_model_at_end": "false",
        "trainer.dataloader_num_workers": 0,
        **changes,
    }
    return [f"{name}={value}" for name, value in values.items()]


def settings(place, task="classification", **changes):
    return load_config(FILES[task], VisionConfig, overrides(place, task, **changes))


def saving(every):
    return {"trainer.save_strategy": "steps", "trainer.save_steps": every}


def command(place, output, task="classification", **changes):
    values = [part for value in overrides(place, task, **changes) for part in ("--set", value)]
    return ["train", "--config", str(FILES[task]), "--output", str(output), *values]


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, [str(x) for x in arguments])
    assert result.exit_code == code, result.output
    return result.output


def assert_same_weights(one, two, **tolerances):
    names = ["model/model.safetensors"]
    names += [str(path.relative_to(one)) for path in (one / "codebooks").glob("*.safetensors")]
    for name in names:
        first, second = load_file(one / name), load_file(two / name)
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            torch.testing.assert_close(second[key], tensor, **tolerances)


def test_every_config_is_complete():
    known = {field.name for field in fields(TrainingArguments)}
    for path in CONFIGS.glob("vision/*.yaml"):
        config = load_config(path, VisionConfig, [])
        assert config.trainer.keys() <= known
        assert config.trainer["fp16"]
        assert config.trainer["learning_rate"] == 1e-5


def test_the_loss_falls_and_the_score_rises(place, tmp_path):
    batch = {"trainer.per_device_train_batch_size": 4, "trainer.gradient_accumulation_steps": 1}
    config = settings(place, **batch, **{"trainer.max_steps": 30, "data.augment": "none"})
    assert fine_tune(config, tmp_path, resume=False)["eval_top1"] > 90
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert model.config.id2label == {0: "green", 1: "red"}


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    """A finished run with stored codewords, its configuration and its figures."""
    changes = {
        "attention": "M4P2C2/stored",
        "codebooks.key_norm": "true",
        "codebooks.dead_every": 2,
    }
    config = settings(place, **changes)
    folder = tmp_path_factory.mktemp("run")
    return folder, config, fine_tune(config, folder, resume=False)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_what_was_trained_is_what_is_loaded(place, run, tmp_path, task):
    """Catches codebooks of another layer, a lost key norm, and a head or a norm left behind."""
    folder, config, figures = run
    if task == "segmentation":  # without a key norm
        folder, config = tmp_path, settings(place, task, attention="M4P2C2/stored")
        figures = fine_tune(config, folder, resume=False)
    exact = replace(config, attention="exact", model=str(folder / "model"))
    loaded = open_run(exact, tmp_path / "none")
    without = loaded.trainer.evaluate()
    codebooks = AVQCodebooks.from_pretrained(folder / "codebooks")
    apply_avq(loaded.model, codebooks, route="always")
    found = loaded.trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(figures["eval_loss"], rel=1e-5)
    if task == "classification":  # DPT's head hardly depends on the attention of so small a model
        assert without["eval_loss"] != pytest.approx(figures["eval_loss"], rel=1e-4)


def test_codebooks_are_updated_once_a_step_by_all_its_keys(place, tmp_path):
    """Catches an update for each micro-batch, and one that sees the last micro-batch only."""
    changes = {f"codebooks.{name}": 0.0 for name in ("decay_start", "decay_end")}
    changes |= {"attention": "M4P2C2/stored", "codebooks.dead_threshold": "null"}
    run = open_run(settings(place, **changes, **{"trainer.max_steps": 1}), tmp_path)
    run.start_codebooks()
    run.trainer.train()
    counts = [float(layer.quantizer.ema_counts[0, :, 0].sum()) for layer in run.layers.values()]
    assert counts == [4 * 64.0] * 4


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
    metric = metric_of("segmentation", 3)
    for i, last in ((0, False), (2, True)):
        batch = type("Batch", (), {"predictions": found[i : i + 2], "label_ids": labels[i : i + 2]})
        scores = metric(batch, compute_result=last)
    assert scores["miou"] == pytest.approx(100 * float(torch.stack(shares).mean()), abs=1e-4)


def test_a_resumed_run_ends_in_the_same_weights(place, tmp_path):
    """Catches weights that Trainer loses, and images or flips of another epoch after it; half a
    checkpoint that is resumed from, or spoils the one that overwrites it; with gradient
    checkpointing, layers that attend otherwise."""
    changes = {"attention": "M4P2C2/stored", "trainer.max_steps": 7, **saving(5)}
    fine_tune(settings(place, **changes), tmp_path, resume=False)
    shutil.copytree(tmp_path, tmp_path / "whole")
    shutil.rmtree(tmp_path / "model")
    digests = tmp_path / "checkpoint-7" / "digests.json"
    digests.rename(digests.with_name(".writing-digests.json"))  # a kill cut it short
    assert newest_checkpoint(tmp_path).name == "checkpoint-5"  # in the middle of an epoch
    path = tmp_path / "checkpoint-5" / "trainer_state.json"
    saved = path.read_text()
    path.write_text(saved.replace('"global_step": 5', '"global_step": 6'))
    with pytest.raises(ValueError, match="checkpoint-5 does not hold the files that were saved"):
        fine_tune(settings(place, **changes), tmp_path, resume=True)
    path.write_text(saved)
    fine_tune(settings(place, **changes), tmp_path, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path, rtol=1e-5, atol=1e-6)
    check_digests(newest_checkpoint(tmp_path))
    again = settings(place, **changes, **{"trainer.gradient_checkpointing": "true"})
    fine_tune(again, tmp_path / "again", resume=False)
    assert_same_weights(tmp_path / "whole", tmp_path / "again", rtol=1e-4, atol=1e-5)


def test_the_optimizer_is_as_configured(place, tmp_path):
    """Catches AdamW's own betas and epsilon, and numbers that YAML reads as text."""
    changes = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": "1e-3", "weight_decay": "1e-2"}
    config = settings(place, **{f"trainer.{name}": value for name, value in changes.items()})
    optimizer = open_run(config, tmp_path).trainer.optimizer
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.5, 0.6), 1e-3)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0, 0.01}


def test_a_process_uses_one_gpu(place, tmp_path, monkeypatch):
    """Catches `nn.DataParallel`, whose replicas update no codebook, and batches for each GPU."""

    class ThatSeesTwo(TrainingArguments):
        def __post_init__(self):
            super().__post_init__()
            self._n_gpu = 2

    monkeypatch.setattr("distill.vision.training.TrainingArguments", ThatSeesTwo)
    args = open_run(settings(place), tmp_path).trainer.args
    assert (args.n_gpu, args.train_batch_size) == (1, 2)


def test_the_best_checkpoint_is_kept(place, tmp_path):
    changes = {
        "trainer.learning_rate": 0.02,
        "head_rate": 1.0,
        "trainer.load_best_model_at_end": "true",
    }
    changes |= {"trainer.eval_strategy": "steps", "trainer.eval_steps": 1, "trainer.max_steps": 8}
    config = settings(place, **changes, **saving(1), **{"trainer.save_total_limit": 1})
    score = fine_tune(config, tmp_path, resume=False)["eval_top1"]
    logs = json.loads((newest_checkpoint(tmp_path) / "trainer_state.json").read_text())
    found = [log["eval_top1"] for log in logs["log_history"] if "eval_top1" in log]
    assert score == max(found)
    assert len(set(found)) > 1


@pytest.mark.long
def test_two_processes_end_in_the_same_weights(place, tmp_path):
    """Catches statistics that are not summed over processes, and a fight for the folder."""
    changes = {"attention": "M4P2C2/stored", "codebooks.dead_threshold": "null"}
    of_two = {**changes, "trainer.gradient_accumulation_steps": 1}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["HF_DATASETS_CACHE"] = str(tmp_path / "sets")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launch += ["-m", "distill.vision", *command(place, tmp_path / "two", **of_two)]
    found = subprocess.run(launch, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    invoke(*command(place, tmp_path / "one", **changes))
    assert_same_weights(tmp_path / "one", tmp_path / "two", rtol=1e-4, atol=1e-5)


# What these change is ignored, breaks --resume, rounds the saved model or ends in a traceback.
RESERVED = ["optim", "optim_args", "save_only_model", "dataloader_persistent_workers", "use_cpu"]
RESERVED += ["bf16_full_eval", "fp16_full_eval", "label_smoothing_factor", "report_to"]


@pytest.mark.parametrize(
    ("task", "changes", "expected"),
    [
        ("segmentation", {"data.path": "no/x"}, "no/x/images/training must hold images, but has"),
        ("classification", {"data.path": "no/x"}, "no/x"),
        ("classification", {"attention": "swim"}, "attention must be exact, or sizes such as"),
        ("classification", {"trainer.max_step": 4}, "unexpected keyword argument 'max_step'"),
        *(
            ("classification", {f"trainer.{name}": 1}, f"trainer must leave out {name}, which")
            for name in RESERVED
        ),
        (
            "classification",
            {"trainer.per_device_train_batch_size": 64},
            "training needs at least 64 images, one batch, but got",
        ),
    ],
)
def test_wrong_settings_get_one_sentence(place, tmp_path, task, changes, expected):
    """And the folder stays free for the corrected command."""
    told = invoke(*command(place, tmp_path / "run", task, **changes), code=2)
    assert expected in told.replace("\n", " ")
    assert "Traceback" not in told
    assert not (tmp_path / "run" / "config.json").exists()


def killed_in_a_worker(*_):
    if get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_happens_to_a_worker_is_one_sentence(place, tmp_path, monkeypatch, is_killed):
    """Catches a traceback for a damaged image, or where memory ran out."""
    shutil.copytree(place / "maps", tmp_path / "maps")
    if is_killed:
        monkeypatch.setattr(Prepared, "_box", killed_in_a_worker)
        message = "a data worker died "
    else:
        damaged = tmp_path / "maps" / "images" / "training" / "9.png"
        damaged.write_bytes(b"no image")
        message = f"{damaged} cannot be read as an image: "
    changes = {"data.path": tmp_path / "maps", "trainer.dataloader_num_workers": 1}
    told = invoke(*command(place, tmp_path / "run", "segmentation", **changes), code=2)
    assert f"error: {message}" in told
    assert "Traceback" not in told


def test_maps_without_a_label_end_a_run_that_logs_nothing(place, tmp_path):
    """The loss without a label is the mean over no pixel."""
    shutil.copytree(place / "maps", tmp_path / "maps")
    for path in (tmp_path / "maps" / "annotations" / "training").iterdir():
        Image.fromarray(np.zeros((SIDE, SIDE), np.uint8)).save(path)
    changes = {"data.path": tmp_path / "maps", "trainer.max_steps": 2}
    with pytest.raises(FloatingPointError, match=r"nan at step 2.* or leave out images without a"):
        fine_tune(settings(place, "segmentation", **changes), tmp_path / "run", resume=False)
    assert not (tmp_path / "run" / "model").exists()


def test_folders_without_a_run_of_theirs_are_refused(place, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"task": "segmentation"}))
    taken = command(place, tmp_path)
    assert "holds a run: add --resume" in invoke(*taken, code=2)
    assert "other settings (attention, codebooks." in invoke(*taken, "--resume", code=2)


BERT = BertConfig(vocab_size=2, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
RESNET = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])


@pytest.mark.parametrize(
    ("task", "other", "classes", "expected"),
    [
        ("classification", BertModel(BERT), "ab", "that classifies, but .* is of type bert.$"),
        ("segmentation", ResNetModel(RESNET), "ab", "^model must be DPT, or .* of type resnet.$"),
        ("classification", None, "ab", r"^the weights of .*vit cannot be read: "),
        ("classification", None, "a", r"^a classifier needs two classes or more, but got a\.$"),
    ],
)
def test_models_of_other_kinds_get_one_sentence(place, tmp_path, task, other, classes, expected):
    shutil.copytree(place / "vit", tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"no weights")
    if other is not None:
        other.save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match=expected):
        load_model(settings(place, task, model=tmp_path / "vit"), [*classes])


def timm_weights(model):
    """The weights of a ViT under timm's names, with query, key and value in one matrix."""
    vit, found = model.vit, {}
    found["cls_token"] = vit.embeddings.cls_token
    found["pos_embed"] = vit.embeddings.position_embeddings
    modules = {
        "patch_embed.proj": vit.embeddings.patch_embeddings.projection,
        "norm": vit.layernorm,
        "head": model.classifier,
    }
    for i, layer in enumerate(m for m in model.modules() if type(m).__name__ == "ViTLayer"):
        attention, block = layer.attention, f"blocks.{i}"
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        modules |= {
            f"{block}.norm1": layer.layernorm_before,
            f"{block}.norm2": layer.layernorm_after,
            f"{block}.attn.proj": attention.o_proj,
            f"{block}.mlp.fc1": layer.mlp.fc1,
            f"{block}.mlp.fc2": layer.mlp.fc2,
        }
        for kind in ("weight", "bias"):
            found[f"{block}.attn.qkv.{kind}"] = torch.cat([getattr(x, kind) for x in parts])
    for kind in ("weight", "bias"):
        found |= {f"{name}.{kind}": getattr(module, kind) for name, module in modules.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def test_a_vit_of_timm(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 96, "image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6}
    model = ViTForImageClassification(ViTConfig(**sizes, num_labels=7)).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        weights = timm_weights(model)
        save_file(weights, tmp_path / "model.safetensors")
        of_size = {"pretrained_cfg": {"input_size": [3, 32, 32]}}
        (tmp_path / "config.json").write_text(json.dumps(of_size))
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name: tmp_path / name)
        of_hub = load_classifier("timm/vit", [*"abcdefg"]).eval()
        torch.testing.assert_close(of_hub(images).logits, model(images).logits)
        assert of_hub.config.id2label[6] == "g"
        other = vit_from_timm(weights, 32, {"num_labels": 3}).eval()
        assert other(images).logits.shape == (2, 3)
    for name, told in (("blocks.1.mlp.fc2.bias", "fc2.bias"), ("patch_embed.proj.weight", "proj")):
        cut = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(ValueError, match=f"not a timm ViT: .*{told}"):
            vit_from_timm(cut, 32, {})


@pytest.mark.parametrize("kind", ["dpt", "backbone"])
def test_dpt_keeps_its_own_head(place, tmp_path, kind):
    """Unless it is for another number of labels."""
    model = tiny_vision("dpt") if kind == "dpt" else load_segmenter(str(place / "vit"), 5).eval()
    images = torch.randn(1, 3, SIDE, SIDE)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = load_segmenter(str(tmp_path), 5).eval()
        torch.testing.assert_close(loaded(images).logits, model(images).logits)
        assert load_segmenter(str(tmp_path), 4).eval()(images).logits.shape[1] == 4


def test_settings_that_contradict_are_refused(place):
    config, maps = settings(place), settings(place, "segmentation")
    for part, change, message in (
        (config, {"task": "segmentation"}, "num_labels must be a number for segmentation"),
        (config, {"data": replace(config.data, num_labels=2)}, "for classification, but got 2"),
        (maps, {"data": replace(maps.data, resize="crop")}, "segmentation needs resize: squash"),
        (maps, {"data": replace(maps.data, augment="crop")}, "segmentation needs resize: squash"),
        (config.data, {"crop_share": 1.1}, "less than or equal to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(part, **change)
