"""The training loop: resume bit by bit, validation, checkpoints, and what it says and counts."""

import json
import shutil
import time
from unittest import mock

import jax
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax import augment, backend
from cxda_jax.data.episodes import EpisodeSpec, sample_plans
from cxda_jax.data.sources import device_source, stack, tfdata_source
from cxda_jax.disk import checkpoints, models
from cxda_jax.disk.reading import read_lines
from cxda_jax.errors import UserError
from cxda_jax.experiment import make_optimizer
from cxda_jax.methods.erm import bn
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.normalisation import BatchNorm
from cxda_jax.nets.resnet import LinearHead
from cxda_jax.progress import Counter, Meter, MetricsFile, duration
from cxda_jax.train import Schedule, init_state, next_call, train
from cxda_jax.types import Images
from tests.nets import build_method

SPEC = EpisodeSpec(num_domains=2, per_domain=4, num_query=4)
MEASURED = ("step", "loss", "accuracy", "val_score", "best_score")


class Small(nn.Module):
    """One convolution: the program of a step is compiled in a third of the time that the smallest CNN takes."""

    @nn.compact
    def __call__(self, x, batch=False):
        x = nn.Conv(8, (4, 4), (4, 4), name="conv0")(x)
        return nn.relu(BatchNorm(name="norm0")(x, batch))


METHOD = bn(Classifier(Small(), LinearHead(4), (0.5,), (0.5,)))
TX = make_optimizer("sgd", 0.01, 0.9, 1e-4)
RISING = (0.1, 0.2, 0.3, 0.4)
PROGRAMS = {}


def run(
    store, workdir, stop_at=None, scores=(0.2, 0.5, 0.5, 0.1), source=device_source, tasks=1, steps=12, log_every=1,
    steps_per_call=1, stopping=lambda: False, save_every=2, stop_validating=None, method=METHOD,
):  # fmt: skip
    """Trains bn for 12 steps, validating every 3; `stop_at` breaks off before that step, `stop_validating` in its validation.

    Runs of one method and source share their programs, so each is compiled once.
    """

    def plan_of(step):
        if step == stop_at:
            raise KeyboardInterrupt
        return sample_plans(SPEC, store.offsets, store.domains("train"), 0, range(step * tasks, (step + 1) * tasks))

    def validate(variables):
        step = int(lines(workdir)[-1]["step"])
        if step == stop_validating:
            raise KeyboardInterrupt
        return scores[step // 3 - 1]

    def jit(call, **options):
        return PROGRAMS.setdefault((method.loss, source, call.args[-1]), compiled(call, **options))

    workdir.mkdir(exist_ok=True)
    compiled = backend.jit
    state = init_state(method, TX, 0, Images(store.images[:2], np.zeros(2, np.int32)))
    schedule = Schedule(steps, 3, log_every, save_every, tasks, steps_per_call=steps_per_call)
    logged = []
    parts = method, TX, augment.Weak(), source(store), plan_of, state, 0, schedule, validate, workdir
    with mock.patch.object(backend, "jit", jit):
        train(*parts, log=logged.append, stopping=stopping)
    if checkpoints.steps(workdir / "last")[0] < steps:
        return None  # it was stopped
    last, _ = checkpoints.restore(workdir / "last", state)
    best, notes = checkpoints.restore(workdir / "best", state.variables)
    return last, best, notes, logged


def lines(workdir):
    return read_lines(workdir / "metrics.jsonl")


def timeless(workdir):
    return [{k: v for k, v in line.items() if k in MEASURED} for line in lines(workdir)]


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4), a, b)


@pytest.fixture(scope="module")
def whole(fixed_store, tmp_path_factory):
    """The folder of a run that nothing broke off, and what run() returns."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(fixed_store, folder)


@pytest.fixture(scope="module")
def rising(fixed_store, tmp_path_factory):
    """The same of a run whose last validation is its best."""
    folder = tmp_path_factory.mktemp("rising")
    return folder, run(fixed_store, folder, scores=RISING)


@pytest.mark.parametrize("stop_at", [0, 5, 11])
def test_a_broken_off_run_resumes_bit_identically(fixed_store, whole, tmp_path, stop_at):
    assert len(jax.tree.leaves(whole[1][0].optimizer)) > 0  # the momentum is part of what must come back
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path, stop_at)
    resumed = run(fixed_store, tmp_path)
    assert_equal_trees(whole[1][:3], resumed[:3])
    assert timeless(whole[0]) == timeless(tmp_path)


@pytest.mark.parametrize("stop_at", [3, 12])
def test_what_is_stopped_while_validating_goes_on_with_that_validation(fixed_store, rising, tmp_path, stop_at):
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path, scores=RISING, stop_validating=stop_at)
    assert checkpoints.steps(tmp_path / "last")[0] == stop_at  # nothing of the interval is lost
    resumed = run(fixed_store, tmp_path, scores=RISING)
    assert resumed[3][0] == f"resumed from step {stop_at} of 12"
    assert resumed[3][1].startswith(f"step {stop_at}  validation {RISING[stop_at // 3 - 1]:.4f}")
    assert_equal_trees(rising[1][:3], resumed[:3])
    assert timeless(rising[0]) == timeless(tmp_path)


def test_a_state_in_last_names_a_best_that_is_there(fixed_store, rising, tmp_path):
    """Of the two states the older one too, from which a run goes on where the newer is damaged."""
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path, stop_at=11, scores=RISING, save_every=100)
    assert checkpoints.steps(tmp_path / "last") == [9, 6]
    (tmp_path / "last" / "9" / "manifest.json").unlink()
    resumed = run(fixed_store, tmp_path, scores=RISING, save_every=100)
    assert "resumed from step 6 of 12" in resumed[3]
    assert_equal_trees(rising[1][:3], resumed[:3])


def test_a_finished_run_validates_once_more_and_stays_as_it_is(fixed_store, whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    again = run(fixed_store, tmp_path)
    assert_equal_trees(again[:3], whole[1][:3])
    assert [line | {"seconds": 0} for line in lines(whole[0])] == [line | {"seconds": 0} for line in lines(tmp_path)]


def test_a_network_without_statistics_resumes_and_becomes_a_model(fixed_store, tmp_path):
    method = build_method("bn", net__name="vit")
    unbroken = run(fixed_store, tmp_path / "unbroken", method=method)
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path / "broken", 5, method=method)
    resumed, best, *_ = run(fixed_store, tmp_path / "broken", method=method)
    assert resumed.variables["batch_stats"] == {} and int(resumed.step) == 12
    assert_equal_trees(unbroken[0], resumed)
    models.write_model(tmp_path / "model", best, {}, {})
    assert_equal_trees(models.read_model(tmp_path / "model", jax.eval_shape(lambda: best))[0], best)


def test_the_earlier_of_equal_best_scores_is_kept_beside_the_last(fixed_store, whole, tmp_path):
    last, best, notes, _ = whole[1]
    assert notes["step"] == 6 and notes["score"] == 0.5 and int(last.step) == 12
    assert_equal_trees(best, run(fixed_store, tmp_path, steps=6)[0].variables)


def test_streamed_and_resident_images_train_the_same_parameters(fixed_store, tmp_path):
    pytest.importorskip("tensorflow")
    resident = run(fixed_store, tmp_path / "device", tasks=2)
    streamed = run(fixed_store, tmp_path / "tfdata", source=tfdata_source, tasks=2)
    assert_equal_trees(resident[0], streamed[0])


def test_several_steps_in_one_program_train_the_same_parameters(fixed_store, tmp_path):
    alone = run(fixed_store, tmp_path / "alone", log_every=6)
    several = run(fixed_store, tmp_path / "several", log_every=6, steps_per_call=2)
    assert int(several[0].step) == 12
    assert_close(alone[0].variables, several[0].variables)
    assert [line["step"] for line in lines(tmp_path / "several") if "loss" in line] == [2, 6, 12]
    for a, b in zip(*(timeless(tmp_path / name)[-2:] for name in ("alone", "several")), strict=True):
        assert a["step"] == b["step"] == 12 and a == pytest.approx(b, rel=1e-4)
    for said in ("compiling", "compiled in"):  # once for each of the two programs
        assert sum(line.startswith(said) for line in several[3]) == 2


def test_batches_are_stacked_whatever_holds_them(fixed_store):
    plans = [sample_plans(SPEC, fixed_store.offsets, fixed_store.domains("train"), 0, [step]) for step in range(3)]
    assert stack(plans[:1]) is plans[0]
    stacked = stack(plans)
    for part, parts in zip(stacked, zip(*plans, strict=True), strict=True):
        assert type(part) is np.ndarray and part.dtype == np.int32
        np.testing.assert_array_equal(part, np.stack(parts))
    assert isinstance(stack([jax.numpy.ones(2), jax.numpy.ones(2)]), jax.Array)


def test_a_program_never_runs_past_what_is_to_be_done():
    schedule = Schedule(steps=23, validate_every=10, log_every=4, save_every=7, steps_per_call=3)
    calls, step = [], 0
    while step < schedule.steps:
        calls.append(next_call(step, schedule))
        step += calls[-1]
    assert calls == [3, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 1]  # stops at multiples of 4, 7 and 10, and at 23


def test_log_lines_tell_the_time_left_and_the_wait(whole):
    folder, (*_, logged) = whole
    assert logged[0].startswith("compiling") and "first time only" in logged[0]
    assert logged[1].startswith("compiled in ") and logged[1].endswith("s")
    assert logged[2].startswith("step 1/12  compiled  loss ")  # its time tells nothing of those to come
    assert "step 4/12  eta " in logged[6] and "episodes/s" in logged[6] and "data_wait" in logged[6]
    first, second = lines(folder)[:2]
    assert set(first) == {"step", "loss", "accuracy"}
    assert set(second) == {"step", "loss", "accuracy", "episodes_per_s", "data_wait_ms", "eta_s"}
    assert all(np.isfinite(v) for v in second.values())


def test_the_time_left_is_that_of_all_intervals_and_of_steps_alone(monkeypatch):
    """1 s a step but for one interval, which another process slowed down; compilation, validation and saving are left out."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter, found = Meter(0, 100), []
    excluded = {1: (60.0, 1), 20: (30.0, 0), 30: (5.0, 0)}  # step: seconds, and steps compiled in them
    for step in range(1, 41):
        seconds, steps = excluded.get(step, (0.0, 0))
        now[0] += seconds + (0 if steps else 4.0 if 20 < step <= 30 else 1.0)
        meter.exclude(seconds, steps)
        meter.add({"loss": np.float32(1)})
        if step in (1, 10, 20, 30, 40):
            found.append(meter.read(step, 2))
    assert "eta_s" not in found[0]
    assert [m["eta_s"] for m in found[1:]] == pytest.approx([90, 80, 70 * (9 + 10 + 40) / 29, 60 * 69 / 39])
    assert [m["episodes_per_s"] for m in found[1:]] == pytest.approx([2, 2, 0.5, 2])  # of the interval


def test_tensorboard_is_a_second_sink(tmp_path):
    tf = pytest.importorskip("tensorflow")
    with MetricsFile(tmp_path / "metrics.jsonl", 0, tensorboard=True) as file:
        file.write({"step": 7, "loss": 0.25})
    (events,) = (tmp_path / "tensorboard").iterdir()
    *_, event = tf.compat.v1.train.summary_iterator(str(events))
    (value,) = event.summary.value
    assert (event.step, value.tag, float(tf.make_ndarray(value.tensor))) == (7, "loss", 0.25)


def test_weights_hash_sees_one_bit(fixed_store):
    variables = METHOD.init(jax.random.key(0), Images(fixed_store.images[:2], np.zeros(2, np.int32)))
    arrays = jax.tree.map(np.array, variables)
    assert checkpoints.weights_hash(arrays) == checkpoints.weights_hash(variables)
    arrays["params"]["trunk"]["conv0"]["bias"].view(np.uint8)[0] ^= 1
    assert checkpoints.weights_hash(arrays) != checkpoints.weights_hash(variables)


@pytest.mark.parametrize("what, steps_per_call", [("loss", 1), ("loss", 2), ("gradient", 1)])
def test_a_step_that_is_not_finite_is_not_taken(fixed_store, whole, tmp_path, what, steps_per_call):
    bad = 7  # of 12

    def poisoned(variables, episode, key):
        loss, aux = METHOD.loss(variables, episode, key)
        hit = (episode.query.domain == -1).any()
        if what == "loss":
            return loss * jax.numpy.where(hit, jax.numpy.inf, 1.0), aux
        zero = sum(x.sum() - jax.lax.stop_gradient(x.sum()) for x in jax.tree.leaves(variables["params"]))
        return loss + jax.numpy.sqrt(jax.numpy.where(hit, zero, 1.0)) - 1.0, aux  # at 0 its slope is infinite

    def source(store):
        plain = device_source(store)

        def assemble(resident, batch):
            plan, hit = batch
            episode = plain.assemble(resident, plan)
            domain = jax.numpy.where(hit, -1, episode.query.domain)
            return episode.replace(query=episode.query.replace(domain=domain))

        def batches(plan_of, start, stop):
            return ((plan_of(step), np.array(step == bad)) for step in range(start, stop))

        return plain._replace(assemble=assemble, batches=batches)

    options, method = {"log_every": 6, "steps_per_call": steps_per_call}, METHOD._replace(loss=poisoned)
    with pytest.raises(UserError, match="^step 7: .* not finite"):
        run(fixed_store, tmp_path / "run", source=source, method=method, **options)
    told = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    plan = sample_plans(SPEC, fixed_store.offsets, fixed_store.domains("train"), 0, [7])
    assert told == {"step": 7, "seed": 0, "plan": {"support": plan.support.tolist(), "query": plan.query.tolist()}}
    # What is kept is the state that the whole run passes through, so a run of a mended program ends as that does.
    mended = run(fixed_store, tmp_path / "run", **options)
    assert mended[3][0] == "resumed from step 7 of 12"
    assert_close(mended[0], whole[1][0])


def test_the_time_left_does_not_count_compilation(monkeypatch, capsys):
    now = iter([0.0, 60.0, 61.0, 70.0, 100.0])  # made; then 1, 2, 11 and 101 of 101 things are done
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    count = Counter("tasks", 101, every=10.0)
    for done in (1, 2, 11, 101):
        count(done)
    assert capsys.readouterr().out == "tasks 2/101  eta 1m39s\n"
    assert [duration(s) for s in (5.4, 65, 3725)] == ["5s", "1m05s", "1h02m"]
