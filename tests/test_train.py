"""The training loop: resume bit by bit, validation, checkpoints, and what it says and counts."""

import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax import augment
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

ROOT = Path(__file__).parent.parent
SPEC = EpisodeSpec(num_domains=2, per_domain=4, num_query=4)


class Small(nn.Module):
    """One convolution: the program of a step is compiled in a third of the time that the smallest CNN takes."""

    @nn.compact
    def __call__(self, x, batch=False):
        x = nn.Conv(8, (4, 4), (4, 4), name="conv0")(x)
        return nn.relu(BatchNorm(name="norm0")(x, batch))


METHOD = bn(Classifier(Small(), LinearHead(4), (0.5,), (0.5,)))


def run(
    store, workdir, stop_at=None, scores=(0.2, 0.5, 0.5, 0.1), source=device_source, tasks=1, steps=12, log_every=1,
    steps_per_call=1, stopping=lambda: False, rate=0.01, save_every=2, stop_validating=None, method=METHOD,
):  # fmt: skip
    """Trains bn for 12 steps, validating every 3; `stop_at` breaks off before that step, `stop_validating` in its validation."""
    tx, validated = make_optimizer("sgd", rate, 0.9, 1e-4), []

    def plan_of(step):
        if step == stop_at:
            raise KeyboardInterrupt
        return sample_plans(SPEC, store.offsets, store.domains("train"), 0, range(step * tasks, (step + 1) * tasks))

    def validate(variables):
        validated.append(variables)
        step = int(lines(workdir)[-1]["step"])
        if step == stop_validating:
            raise KeyboardInterrupt
        return scores[step // 3 - 1]

    workdir.mkdir(exist_ok=True)
    example = Images(store.images[:2], np.zeros(2, np.int32))
    state = init_state(method, tx, 0, example)
    schedule = Schedule(steps, 3, log_every, save_every, tasks, steps_per_call=steps_per_call)
    logged = []
    train(
        method, tx, augment.Weak(), source(store), plan_of, state, 0, schedule, validate, workdir, log=logged.append,
        stopping=stopping,
    )  # fmt: skip
    if checkpoints.steps(workdir / "last")[0] < steps:
        return None  # it was stopped
    last, _ = checkpoints.restore(workdir / "last", state)
    best, notes = checkpoints.restore(workdir / "best", state.variables)
    return last, best, notes, logged


def lines(workdir):
    return read_lines(workdir / "metrics.jsonl")


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("stop_at", [0, 5, 11])
def test_a_broken_off_run_resumes_bit_identically(store, tmp_path, stop_at):
    whole = run(store, tmp_path / "whole")
    assert len(jax.tree.leaves(whole[0].optimizer)) > 0  # the momentum is part of what must come back
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "broken", stop_at)
    resumed = run(store, tmp_path / "broken")
    assert_equal_trees(whole[0], resumed[0])
    assert_equal_trees(whole[1], resumed[1])
    assert int(resumed[0].step) == 12
    timeless = [
        [{k: v for k, v in line.items() if k in ("step", "loss", "accuracy", "val_score")} for line in lines(folder)]
        for folder in (tmp_path / "whole", tmp_path / "broken")
    ]
    firsts = [{line["step"]: line for line in found} for found in timeless]
    assert firsts[0] == firsts[1]


def test_what_is_stopped_while_validating_goes_on_with_that_validation(store, tmp_path):
    scores, fields = (0.1, 0.5, 0.5, 0.6), ("step", "loss", "val_score", "best_score")
    whole = run(store, tmp_path / "whole", scores=scores)
    for stop_at in (3, 12):
        broken = tmp_path / f"broken{stop_at}"
        with pytest.raises(KeyboardInterrupt):
            run(store, broken, scores=scores, stop_validating=stop_at)
        assert checkpoints.steps(broken / "last")[0] == stop_at  # nothing of the interval is lost
        resumed = run(store, broken, scores=scores)
        validation = f"step {stop_at}  validation {scores[stop_at // 3 - 1]:.4f}"
        assert resumed[3][0] == f"resumed from step {stop_at} of 12" and resumed[3][1].startswith(validation)
        for mine, other in zip(resumed[:3], whole[:3], strict=True):
            assert_equal_trees(mine, other)
        told = [[{k: line.get(k) for k in fields} for line in lines(path)] for path in (tmp_path / "whole", broken)]
        assert told[0] == told[1]


def test_a_state_in_last_names_a_best_that_is_there(store, tmp_path):
    """Of the two states the older one too, from which a run goes on where the newer is damaged."""
    better = (0.1, 0.2, 0.3, 0.4)
    whole = run(store, tmp_path / "whole", scores=better, save_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "broken", stop_at=11, scores=better, save_every=100)
    assert checkpoints.steps(tmp_path / "broken" / "last") == [9, 6]
    (tmp_path / "broken" / "last" / "9" / "manifest.json").unlink()
    resumed = run(store, tmp_path / "broken", scores=better, save_every=100)
    assert "resumed from step 6 of 12" in resumed[3]
    for mine, other in zip(resumed[:3], whole[:3], strict=True):
        assert_equal_trees(mine, other)


def test_a_finished_run_validates_once_more_and_stays_as_it_is(store, tmp_path):
    first = run(store, tmp_path / "run")
    before = lines(tmp_path / "run")
    again = run(store, tmp_path / "run")
    for mine, other in zip(again[:3], first[:3], strict=True):
        assert_equal_trees(mine, other)
    assert [{**line, "seconds": 0} for line in before] == [{**line, "seconds": 0} for line in lines(tmp_path / "run")]


def test_a_network_without_statistics_resumes_and_becomes_a_model(store, tmp_path):
    method = build_method("bn", net__name="vit")
    whole = run(store, tmp_path / "whole", method=method)
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "broken", 5, method=method)
    resumed, best, _, _ = run(store, tmp_path / "broken", method=method)
    assert resumed.variables["batch_stats"] == {} and int(resumed.step) == 12
    assert_equal_trees(whole[0], resumed)
    models.write_model(tmp_path / "model", best, {}, {})
    like = jax.eval_shape(lambda: best)
    assert_equal_trees(models.read_model(tmp_path / "model", like)[0], best)


def test_the_earlier_of_equal_best_scores_is_kept_beside_the_last(store, tmp_path):
    last, best, notes, _ = run(store, tmp_path / "run")
    assert notes["step"] == 6 and notes["score"] == 0.5
    assert int(last.step) == 12
    six = run(store, tmp_path / "six", steps=6)[0]
    assert_equal_trees(best, six.variables)


def test_streamed_and_resident_images_train_the_same_parameters(store, tmp_path):
    pytest.importorskip("tensorflow")
    resident = run(store, tmp_path / "device", tasks=2)
    streamed = run(store, tmp_path / "tfdata", source=tfdata_source, tasks=2)
    assert_equal_trees(resident[0], streamed[0])


def test_several_steps_in_one_program_train_the_same_parameters(store, tmp_path):
    alone = run(store, tmp_path / "alone", scores=[0.5] * 4, log_every=6)
    several = run(store, tmp_path / "several", scores=[0.5] * 4, log_every=6, steps_per_call=2)
    assert int(several[0].step) == 12
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), alone[0].variables, several[0].variables
    )
    assert [line["step"] for line in lines(tmp_path / "several") if "loss" in line] == [2, 6, 12]
    for a, b in zip(*(lines(tmp_path / name)[-2:] for name in ("alone", "several")), strict=True):
        assert a["step"] == b["step"] == 12
        assert {k: b[k] for k in ("loss", "accuracy") if k in b} == pytest.approx(
            {k: a[k] for k in ("loss", "accuracy") if k in a}, rel=1e-4
        )


def test_batches_are_stacked_whatever_holds_them(store):
    plans = [sample_plans(SPEC, store.offsets, store.domains("train"), 0, [step]) for step in range(3)]
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
    stops = {0, *range(4, 24, 4), *range(7, 24, 7), *range(10, 24, 10), 23}
    assert stops <= set(np.cumsum([0, *calls])) and step == 23
    assert calls == [3, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 1]


def test_log_lines_tell_the_time_left_and_the_wait(store, tmp_path):
    logged = run(store, tmp_path / "run")[3]
    assert logged[0].startswith("compiling") and "first time only" in logged[0]
    assert logged[1].startswith("compiled in ") and logged[1].endswith("s")
    assert logged[2].startswith("step 1/12  compiled  loss ")  # its time tells nothing of those to come
    assert set(lines(tmp_path / "run")[0]) == {"step", "loss", "accuracy"}
    assert "step 4/12  eta " in logged[6] and "episodes/s" in logged[6] and "data_wait" in logged[6]
    record = lines(tmp_path / "run")[1]
    assert set(record) == {"step", "loss", "accuracy", "episodes_per_s", "data_wait_ms", "eta_s"}
    assert all(np.isfinite(v) for v in record.values())


def test_each_program_is_announced_once(store, tmp_path):
    logged = run(store, tmp_path / "run", scores=[0.5] * 4, log_every=6, steps_per_call=2)[3]
    assert sum(line.startswith("compiling") for line in logged) == 2
    assert sum(line.startswith("compiled in") for line in logged) == 2


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
    found = [
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    ]
    assert (7, "loss", 0.25) in found


def test_duration():
    assert [duration(s) for s in (5.4, 65, 3725)] == ["5s", "1m05s", "1h02m"]


def test_weights_hash_sees_one_bit(store):
    variables = METHOD.init(jax.random.key(0), Images(store.images[:2], np.zeros(2, np.int32)))
    arrays = jax.tree.map(np.array, variables)
    assert checkpoints.weights_hash(arrays) == checkpoints.weights_hash(variables)
    arrays["params"]["trunk"]["conv0"]["bias"].view(np.uint8)[0] ^= 1
    assert checkpoints.weights_hash(arrays) != checkpoints.weights_hash(variables)


@pytest.mark.parametrize("what, steps_per_call", [("loss", 1), ("loss", 2), ("gradient", 1)])
def test_a_step_that_is_not_finite_is_not_taken(store, tmp_path, what, steps_per_call):
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

    with pytest.raises(UserError, match="^step 7: .* not finite"):
        run(
            store, tmp_path / "run", source=source, log_every=6, steps_per_call=steps_per_call,
            method=METHOD._replace(loss=poisoned),
        )  # fmt: skip
    told = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    plan = sample_plans(SPEC, store.offsets, store.domains("train"), 0, [7])
    assert told == {"step": 7, "seed": 0, "plan": {"support": plan.support.tolist(), "query": plan.query.tolist()}}
    # What is kept is the state that the whole run passes through, so a run of a mended program ends as that does.
    whole = run(store, tmp_path / "whole", log_every=6, steps_per_call=steps_per_call)
    mended = run(store, tmp_path / "run", log_every=6, steps_per_call=steps_per_call)
    assert mended[3][0] == "resumed from step 7 of 12"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), mended[0], whole[0])


def test_the_time_left_does_not_count_compilation(monkeypatch, capsys):
    now = iter([0.0, 60.0, 61.0, 70.0, 100.0])  # made; then 1, 2, 11 and 101 of 101 things are done
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    count = Counter("tasks", 101, every=10.0)
    for done in (1, 2, 11, 101):
        count(done)
    assert capsys.readouterr().out == "tasks 2/101  eta 1m39s\n"
