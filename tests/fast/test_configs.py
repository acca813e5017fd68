"""Each benchmark's config is the paper's, and its smoke twin takes every method."""

import jax
import numpy as np
import pytest

from cxda_jax.config.reading import read, replaced
from cxda_jax.config.registry import METHODS
from cxda_jax.data.published import empty_store, sample_store
from cxda_jax.nets.building import NETS
from cxda_jax.studies import training
from cxda_jax.training.experiment import build, build_method, make_schedule
from cxda_jax.types import Images
from docs.examples.vit import vit

# Of the paper's appendix and ARM's and WILDS's code: optimiser, rate, momentum, decay, epochs, epochs per validation,
# validation and test tasks, network, context channels, CoTTA's restoring.
PAPER = {
    "femnist": ("sgd", 1e-4, 0.9, 1e-4, 200, 10, 420, 420, "cnn", 1, 0.01),
    "cifar_c": ("sgd", 1e-2, 0.9, 1e-4, 100, 10, 850, 11_000, "cnn", 3, 0.01),
    "tiny_imagenet_c": ("sgd", 1e-2, 0.9, 1e-4, 50, 5, 1700, 11_000, "resnet50", 3, 0.001),
    "iwildcam": ("adam", 3e-5, 0.0, 0.0, 50, 5, 745, 2125, "resnet50", 3, 0.001),
}


def shapes(method, store):
    return jax.eval_shape(method.init, jax.random.key(0), Images(store.images[:2], np.zeros(2, np.int32)))


@pytest.mark.parametrize("benchmark", PAPER)
def test_hyper_parameters_are_the_papers(benchmark):
    name, rate, momentum, decay, epochs, every, val, test, net, context, restore = PAPER[benchmark]
    configs = [read(f"{benchmark}:{method}") for method in METHODS]
    c = {field: value for config in configs for field, value in config.items()}
    assert all(config | {"method": ""} == {field: c[field] for field in config} | {"method": ""} for config in configs)
    fill = 1.0 if benchmark == "femnist" else 0.0  # white paper; 0 once it is 1 - x
    for group, fields in {
        "optimizer": {"name": name, "learning_rate": rate, "momentum": momentum, "weight_decay": decay},
        "attention": {"features": "pool", "heads": 8, "ratio": 2, "scale": "paper", "shared_norm": True, "zero_out": False},
        "cotta": {"copies": 32, "average": 0.999, "restore": restore, "quantile": 0.05, "margin": 0.05, "answer": "student"},
        "episode": {"num_domains": 5, "per_domain": 20, "num_query": 20, "replacement": False, "shares": "natural",
                    "mixture": "even", "skip_small": False},
        "augment": {"crop": True, "flip": True, "rotate": 30.0, "fill": fill, "probability": 0.5},
        "batch_norm": {"statistics": "flow", "momentum": 1.0, "test_time_only": False, "prior": 0.0},
        "cml": {"width": 64, "convs": 3}, "sla": {"adapters": 2, "zero_adapters": False, "all_convs": False},
        "finetune": {"steps": 10, "rate": 0.1, "trainable": "all", "statistics": "frozen"},
        "sf_ocda": {"probability": 0.3, "draw": "step", "confidence": 0.0},
        "train": {"epochs": epochs, "steps": 0, "tasks_per_step": 1, "support_loss": "none"},
        "evaluation": {"every_epochs": every, "every_steps": 0, "val_tasks": val, "test_tasks": test, "select": "mean"},
        "net": {"name": net, "width": 128, "padding": "arm", "stages": [3, 4, 6, 3]},
    }.items():  # fmt: skip
        assert fields.items() <= c[group].items(), group
    if net == "cnn":  # the context has as many channels as the image
        store = sample_store(benchmark, 1, 2)
        params = shapes(build_method(read(f"{benchmark}:cml"), store), store)["params"]
        assert params["context"]["out"]["kernel"].shape[-1] == context
        assert params["trunk"]["conv0"]["kernel"].shape[2] == 2 * context


def test_epochs_are_counted_in_images():
    """N_train // 100 episodes: CIFAR-C's 56,000 images give 560 steps of one task, or 140 of four."""
    for tasks, steps in (1, 560), (4, 140):
        config = replaced(read("cifar_c:erm"), train={"tasks_per_step": tasks})
        schedule = make_schedule(config, empty_store("cifar_c"))
        assert (schedule.steps, schedule.validate_every) == (100 * steps, 10 * steps)


def test_a_network_without_a_place_for_adapters_loses_no_training(data_dir, monkeypatch):
    """sla, which needs such a place, is left out of what the methods learn from a training of erm."""
    monkeypatch.setitem(NETS, "vit", vit)
    monkeypatch.setattr(training, "METHODS", {name: METHODS[name] for name in ("erm", "sla")})
    experiment = build(replaced(read("glyphs:erm,smoke"), net={"name": "vit"}), data_dir, ())
    assert training.calibrations(experiment, {}) == {}
