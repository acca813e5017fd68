"""Each benchmark's config is the paper's, and its smoke twin trains and tests every method."""

import functools
import json

import jax
import numpy as np
import pytest

from cxda_jax import backend, train
from cxda_jax.config import read
from cxda_jax.data.store import open_store
from cxda_jax.evaluation import compile_task, evaluate
from cxda_jax.experiment import BENCHMARKS, METHODS, READERS, build, build_method, open_data
from cxda_jax.study import preparing
from cxda_jax.types import Images
from tests import raw_fixtures as raws
from tests.commands import command
from tests.lines import refused
from tests.nets import fill

# Of the paper's appendix and ARM's and WILDS's code: optimiser, rate, momentum, decay, epochs, epochs per validation,
# validation and test tasks, network, metric, context channels, CoTTA's restoring.
PAPER = {
    "femnist": ("sgd", 1e-4, 0.9, 1e-4, 200, 10, 420, 420, "cnn", "accuracy", 1, 0.01),
    "cifar_c": ("sgd", 1e-2, 0.9, 1e-4, 100, 10, 850, 11_000, "cnn", "accuracy", 3, 0.01),
    "tiny_imagenet_c": ("sgd", 1e-2, 0.9, 1e-4, 50, 5, 1700, 11_000, "resnet50", "accuracy", 3, 0.001),
    "iwildcam": ("adam", 3e-5, 0.0, 0.0, 50, 5, 745, 2125, "resnet50", "macro_f1", 3, 0.001),
}
EMBEDDED = ("glyphs", "glyphs_c")
REAL = ("unipen", "qmnist", "cifar10_c")  # test_real_images.py has them
ROWS = (
    "erm", "erm_iid", "bn", "cml", "cxda", "cxda_p2p", "cxda_supervised", "cxda_loo", "cxda_any", "icrm", "ft_em", "ft_im",
    "sf_ocda", "cotta", "sla", "bn_alpha", "t3a", "lame", "feature_shift",
)  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Stores of all benchmarks, the real ones prepared from tiny raw copies."""
    folder = tmp_path_factory.mktemp("data")
    raws.write_femnist(folder / "raw")
    raws.write_cifar_c(folder / "raw")
    raws.write_tiny_imagenet_c(folder / "raw", per_class=10)
    raws.write_iwildcam(folder / "raw")
    for name in PAPER:
        options = {"size": 64} if name == "iwildcam" else {}  # 112 takes minutes; test_resnet.py has it
        preparing.prepare(READERS[name](folder / "raw", **options), folder / name, workers=2)
    raws.write_folder(folder / "mine", domains=55)
    preparing.prepare(READERS["folder"](folder / "mine", size=32), folder / "folder", workers=2)
    return folder


def test_rows_and_benchmarks_are_complete():
    assert tuple(METHODS) == ROWS and set(BENCHMARKS) == {*PAPER, *EMBEDDED, *REAL, "folder"}


@pytest.mark.parametrize("benchmark", PAPER)
def test_hyper_parameters_are_the_papers(benchmark, data_dir):
    name, rate, momentum, decay, epochs, every, val, test, net, metric, context, restore = PAPER[benchmark]
    c = read(f"{benchmark}:cml")
    assert all(read(f"{benchmark}:{method}") == c | {"method": method} for method in ROWS)
    assert (c["benchmark"], c["method"], c["net"]["name"]) == (benchmark, "cml", net)
    sgd = {"name": name, "learning_rate": rate, "momentum": momentum, "weight_decay": decay}
    assert c["optimizer"] == sgd | {"chain": ""}
    assert (c["train"]["epochs"], c["train"]["steps"], c["train"]["tasks_per_step"]) == (epochs, 0, 1)
    assert (c["evaluation"]["every_epochs"], c["evaluation"]["every_steps"]) == (every, 0)
    assert [c["evaluation"][field] for field in ("val_tasks", "test_tasks", "select")] == [val, test, "mean"]
    assert c["episode"] == {"num_domains": 5, "per_domain": 20, "num_query": 20, "replacement": False}
    fill_value = 1.0 if benchmark == "femnist" else 0.0  # white paper; 0 once it is 1 - x
    assert c["augment"] == {"crop": True, "flip": True, "rotate": 30.0, "fill": fill_value, "probability": 0.5}
    attention = {"features": "pool", "heads": 8, "ratio": 2, "scale": "paper", "shared_norm": True, "zero_out": False}
    assert c["attention"] == attention
    assert c["batch_norm"] == {"statistics": "flow", "momentum": 1.0, "test_time_only": False, "prior": 0.0}
    assert c["train"]["support_loss"] == "none"
    assert c["net"]["width"] == 128 and c["net"]["padding"] == "arm" and c["net"]["stages"] == [3, 4, 6, 3]
    assert c["cml"] == {"width": 64, "convs": 3} and c["sla"] == {
        "adapters": 2,
        "zero_adapters": False,
        "all_convs": False,
    }
    assert c["finetune"] == {"steps": 10, "rate": 0.1, "trainable": "all", "statistics": "frozen"}
    assert c["sf_ocda"] == {"probability": 0.3, "draw": "step", "confidence": 0.0}
    cotta = {"copies": 32, "average": 0.999, "restore": restore, "quantile": 0.05, "margin": 0.05, "answer": "student"}
    assert c["cotta"] == cotta
    store = open_data(c, data_dir)
    assert store.info.metric == metric
    if net == "cnn":  # the context has as many channels as the image
        example = Images(store.images[:2], np.zeros(2, np.int32))
        params = jax.eval_shape(build_method(c, store).init, jax.random.key(0), example)["params"]
        assert params["context"]["out"]["kernel"].shape[-1] == context
        assert params["trunk"]["conv0"]["kernel"].shape[2] == 2 * context


def test_epochs_are_counted_in_images(data_dir):
    """N_train // 100 episodes: CIFAR-C's 56,000 images give 560 steps, here 56 x 45 give 25."""
    schedule = build(read("cifar_c:erm"), data_dir).schedule
    assert schedule.steps == 100 * (56 * 45 // 100) and schedule.validate_every == 10 * (56 * 45 // 100)


def prepared(benchmark, method, data_dir):
    experiment = build(read(f"{benchmark}:{method},smoke"), data_dir)
    return experiment, fill(jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example))


def stepped(e, variables, run):
    """What a step from these variables gives; `run` is jax.eval_shape, or compiles."""
    call = functools.partial(train.train_call, e.method, e.optimizer, e.weak, e.source, 1)
    state = train.TrainState(np.int32(0), variables, e.optimizer.init(variables["params"]))
    batch = next(e.source.batches(e.train_plans, 0, 1))
    return run(call, state, e.source.resident, batch, jax.random.key(0))


@pytest.mark.parametrize(("benchmark", "method"), [
    *((b, m) for b in ("glyphs_c", "tiny_imagenet_c") for m in ROWS),
    *((b, "cml") for b in ("femnist", "cifar_c", "iwildcam", "glyphs", "folder")),
])  # fmt: skip
def test_every_method_is_traced_on_both_networks_and_one_on_every_benchmark(benchmark, method, data_dir):
    """All shapes fit, from the images in the store to the logits."""
    experiment, variables = prepared(benchmark, method, data_dir)
    its = experiment.method
    if not its.trains_as:
        after, measured = stepped(experiment, variables, jax.eval_shape)
        assert jax.tree.map(np.shape, after.variables) == jax.tree.map(np.shape, variables)
        assert measured["loss"].shape == ()
    if its.calibrate:
        variables = jax.eval_shape(its.calibrate, variables, experiment.calibration_images())
    tasks = experiment.source.assemble(experiment.source.resident, experiment.task_plans("test")(range(1)))
    episode = jax.tree.map(lambda x: x[0], tasks)
    adapted = jax.eval_shape(its.adapt, variables, episode.support, jax.random.key(0))
    logits = jax.eval_shape(its.predict, adapted, episode.query)
    assert logits.shape == (20, experiment.store.num_classes) and logits.dtype == np.float32


@pytest.mark.parametrize(
    ("benchmark", "method"),
    [*((b, "cxda") for b in (*PAPER, *EMBEDDED, "folder")), ("glyphs", "cotta"), ("tiny_imagenet_c", "ft_em")],
)
def test_one_method_runs_on_every_benchmark(benchmark, method, data_dir):
    """test_methods.py runs every method on every network."""
    experiment, variables = prepared(benchmark, method, data_dir)
    its = experiment.method
    if not its.trains_as:
        after, measured = stepped(experiment, variables, lambda call, *arguments: backend.jit(call)(*arguments))
        assert np.isfinite(measured["loss"])
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after.variables["params"], variables["params"])
        assert all(value > 0 for value in jax.tree.leaves(moved["head"]))
        variables = after.variables
    if its.calibrate:
        variables = its.calibrate(variables, experiment.calibration_images())
    tasks = evaluate(
        compile_task(its, experiment.source), variables, experiment.source, experiment.task_plans("test"), 1,
        experiment.store.info.metric,
    )  # fmt: skip
    assert tasks.predictions.shape == (1, 20) and 0 <= tasks.mean <= 1


@pytest.mark.parametrize("benchmark", READERS)
def test_unprepared_data_is_told_in_one_line(benchmark, tmp_path):
    with refused(f"no prepared data; .* --benchmark={benchmark} --raw_dir=DIR", tmp_path):
        build(read(f"{benchmark}:erm"), tmp_path)


def test_regenerated_data_is_told_of_in_every_result(tmp_path):
    """From raw files to a result in two commands; the row, and the table, say that the data are not the published ones."""
    raws.write_cifar_c(tmp_path)
    raws.write_cifar_binary(tmp_path)
    data = f"--data_dir={tmp_path}/data"
    command("prepare", "--benchmark=cifar_c", f"--raw_dir={tmp_path}", "--regenerate", data)
    lines = command("train", "--config=cifar_c:erm,smoke", f"--workdir={tmp_path}/run", data).splitlines()
    row = json.loads((tmp_path / "run" / "result.json").read_text())
    assert row["data_marks"] == ["regenerated"] and row["started_from"] == "random"
    assert lines[-1].startswith("* cifar_c (smoke): regenerated; not comparable")
    assert lines[-2].startswith("cifar_c (smoke)* ")
    assert row["data_hash"] == open_store(tmp_path / "data" / "cifar_c").sha256
