"""The training loop: resume bit by bit, validation, checkpoints, and what it says and counts."""

import contextlib
import functools
import json
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from flax import linen as nn

from cxda_jax.data import augment
from cxda_jax.data.episodes import Draw, EpisodeSpec, sample_plans
from cxda_jax.data.sources import device_source, tfdata_source
from cxda_jax.disk import checkpoints
from cxda_jax.disk.reading import read_lines
from cxda_jax.errors import UserError
from cxda_jax.machine import backend
from cxda_jax.methods.erm import bn
from cxda_jax.nets.classifier import Classifier
from cxda_jax.nets.normalisation import BatchNorm
from cxda_jax.nets.resnet import LinearHead
from cxda_jax.training import loop
from cxda_jax.training.evaluation import Tasks, compile_task, evaluate
from cxda_jax.training.experiment import make_optimizer
from cxda_jax.training.loop import Learner, Schedule, init_state
from cxda_jax.types import Images
from tests.lines import refused, rot
from tests.nets import KEY, assert_equal_trees

SPEC = EpisodeSpec(num_domains=2, per_domain=4, num_query=4)
MEASURED = ("step", "loss", "accuracy", "val_score", "best_score")


class Small(nn.Module):
    """One convolution: the program of a step is compiled in a third of the time that the smallest CNN takes."""

    @nn.compact
    def __call__(self, x, batch=False):
        x = nn.Conv(8, (4, 4), (4, 4), name="conv0")(x)
        return nn.relu(BatchNorm(name="norm0")(x, batch))


TRACED = []
NORMED = bn(Classifier(Small(), LinearHead(4), (0.5,), (0.5,)))
METHOD = NORMED._replace(loss=lambda *arguments: (TRACED.append(1), NORMED.loss(*arguments))[1])
TX = make_optimizer("sgd", 0.01, 0.9, 1e-4)
SCORES = (0.1, 0.2, 0.3, 0.3)  # of the validations, of which the third one is the best
PROGRAMS = {}


class Run(NamedTuple):
    last: Any  # state
    best: Any  # variables
    notes: Any  # of the best
    said: list[str]
    spent: Any
    validated: dict[int, Any]  # variables by step


def run(
    store, workdir, stop_at=None, steps=12, log_every=1, steps_per_call=1, stopping=lambda: False,
    save_every=2, stop_validating=None, method=METHOD, source=device_source, said=None, choose=None,
):  # fmt: skip
    """Trains 12 steps, validating every 3; `stop_at` breaks off before that step, `stop_validating` in its validation.

    Runs of one method and source share their programs, so each is compiled once.
    """

    def plan_of(step):
        if step == stop_at:
            raise KeyboardInterrupt
        return sample_plans(Draw(SPEC, store.offsets, store.domains("train"), 0), [step])

    def validate(variables):
        step = int(lines(workdir)[-1]["step"])
        if step == stop_validating:
            raise KeyboardInterrupt
        validated[step] = variables
        return SCORES[step // 3 - 1]

    def jit(call, **options):
        return PROGRAMS.setdefault((method.loss, source, call.args[-1]), compiled(call, **options))

    workdir.mkdir(exist_ok=True)
    compiled, validated, said = backend.jit, {}, [] if said is None else said
    state = init_state(method, TX, 0, Images(store.images[:2], np.zeros(2, np.int32)))
    schedule = Schedule(steps, 3, log_every, save_every, steps_per_call=steps_per_call)
    learner, place = Learner(method, TX, augment.Weak()), loop.Run(workdir, said.append, stopping)
    with mock.patch.object(backend, "jit", jit):
        programs = loop.Programs(learner, source(store), steps_per_call)
        spent = loop.train(programs, plan_of, state, schedule, loop.Validation(validate, choose), place)
    if checkpoints.steps(workdir / "last")[0] < steps:
        return None  # it was stopped
    last, _ = checkpoints.restore(workdir / "last", state)
    best, notes = checkpoints.restore(workdir / "best", state.variables)
    return Run(last, best, notes, said, spent, validated)


def lines(workdir):
    return read_lines(workdir / "metrics.jsonl")


def timeless(workdir):
    return [{k: v for k, v in line.items() if k in MEASURED} for line in lines(workdir)]


@pytest.fixture(scope="module")
def whole(fixed_store, tmp_path_factory):
    """The folder of a run that nothing broke off, what run() returns, and how often its step was traced."""
    folder, before = tmp_path_factory.mktemp("whole"), len(TRACED)
    return folder, run(fixed_store, folder), len(TRACED) - before


def test_a_run_that_is_broken_off_again_and_again_ends_bit_for_bit_as_the_whole(fixed_store, whole, tmp_path):
    assert len(jax.tree.leaves(whole[1].last.optimizer)) > 0  # the momentum is part of what must come back
    for stop_at in (0, 5, 11):
        with pytest.raises(KeyboardInterrupt):
            run(fixed_store, tmp_path, stop_at)
    resumed = run(fixed_store, tmp_path)
    assert resumed.said[0] == "resumed from step 10 of 12"
    for ended in (resumed, run(fixed_store, tmp_path)):  # a finished run validates once more, and stays as it is
        assert_equal_trees(whole[1][:3], ended[:3])
        assert timeless(whole[0]) == timeless(tmp_path)


def test_the_earlier_of_equal_best_scores_is_kept_beside_the_last(whole):
    folder, (last, best, notes, _, _, validated), _ = whole
    assert notes == {"step": 9, "score": 0.3} and int(last.step) == 12
    assert checkpoints.steps(folder / "best") == [9, 6, 3]
    assert_equal_trees(best, validated[9])
    assert_equal_trees(last.variables, validated[12])
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(best), jax.tree.leaves(last.variables), strict=True))


def test_what_is_chosen_in_the_end_takes_the_place_of_the_best(fixed_store, whole, tmp_path):
    """Also where an earlier process has found the best; and once it is there, the same command leaves it."""
    scores = []

    def half(variables, score):
        scores.append(score)
        return jax.tree.map(lambda x: np.asarray(x) / 2, variables)

    run(fixed_store, tmp_path)
    for _ in range(2):
        chosen = run(fixed_store, tmp_path, choose=half)
        assert checkpoints.steps(tmp_path / "best") == [13, 9, 6, 3]
        assert chosen.notes == {"step": 9, "score": 0.3} and scores[0] == 0.3
        assert_equal_trees(chosen.best, jax.tree.map(lambda x: np.asarray(x) / 2, whole[1].best))


def test_a_program_never_runs_past_what_is_to_be_done():
    schedule = Schedule(steps=23, validate_every=10, log_every=4, save_every=7, steps_per_call=3)
    calls, step = [], 0
    while step < schedule.steps:
        calls.append(schedule.next_call(step))
        step += calls[-1]
    assert calls == [3, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 1]  # stops at multiples of 4, 7 and 10, and at 23


def test_a_step_is_traced_once_and_its_line_and_the_time_spent_are_complete(whole):
    folder, (_, _, _, _, spent, _), traced = whole
    assert traced <= 1 and spent.finished and spent.steps == 12 and spent.steps_per_s > 0
    assert set(lines(folder)[1]) == {"step", "loss", "accuracy", "episodes_per_s", "data_wait_ms", "eta_s", "time"}
    assert 0 <= spent.waiting + spent.saving + spent.validating <= spent.seconds


def test_outputs_that_are_not_finite_are_no_answers(fixed_store):
    method = METHOD._replace(predict=lambda *given: METHOD.predict(*given) * jax.numpy.nan)
    source = device_source(fixed_store)
    plan_of = functools.partial(sample_plans, Draw(SPEC, fixed_store.offsets, fixed_store.domains("test"), 0))
    variables = init_state(method, TX, 0, Images(fixed_store.images[:2], np.zeros(2, np.int32))).variables
    with refused(named="3 of 3 tasks"):
        evaluate(compile_task(method, source), variables, source, Tasks(plan_of, 3, "accuracy"))


def test_each_step_has_a_key_of_its_own(fixed_store, whole):
    """So its images are augmented in another way than those of the step before."""
    program, source = PROGRAMS[METHOD.loss, device_source, 1], device_source(fixed_store)
    state = init_state(METHOD, TX, 0, Images(fixed_store.images[:2], np.zeros(2, np.int32)))
    plan = sample_plans(Draw(SPEC, fixed_store.offsets, fixed_store.domains("train"), 0), [0])
    steps = (0, 1, 2, 0)
    losses = [float(program(state.replace(step=np.int32(n)), source.resident, plan, KEY)[1]["loss"]) for n in steps]
    assert len(set(losses)) == 3 and losses[3] == losses[0]


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4), a, b)


@pytest.mark.slow
def test_what_is_stopped_while_validating_goes_on_with_that_validation(fixed_store, whole, tmp_path):
    for begun, at in ((0, 3), (3, 12), (12, None)):
        said = []
        with pytest.raises(KeyboardInterrupt) if at else contextlib.nullcontext():
            resumed = run(fixed_store, tmp_path, stop_validating=at, said=said)
        assert at is None or checkpoints.steps(tmp_path / "last")[0] == at  # nothing of the interval is lost
        if begun:
            assert said[0] == f"resumed from step {begun} of 12"
            assert said[1].startswith(f"step {begun}  validation {SCORES[begun // 3 - 1]:.4f}")
    assert_equal_trees(whole[1][:3], resumed[:3])
    assert timeless(whole[0]) == timeless(tmp_path)


@pytest.mark.slow
def test_a_state_in_last_names_a_best_that_is_there(fixed_store, whole, tmp_path):
    """Of the two states the older one too, from which a run goes on where the newer is damaged."""
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path, stop_at=11, save_every=100)
    assert checkpoints.steps(tmp_path / "last") == [9, 6]
    (tmp_path / "last" / "9" / "manifest.json").unlink()
    resumed = run(fixed_store, tmp_path, save_every=100)
    assert "resumed from step 6 of 12" in resumed.said
    assert_equal_trees(whole[1][:3], resumed[:3])


@pytest.mark.slow
def test_streamed_images_train_the_same_parameters(fixed_store, whole, tmp_path):
    pytest.importorskip("tensorflow")
    assert_equal_trees(whole[1].last, run(fixed_store, tmp_path, source=tfdata_source, log_every=6).last)


@pytest.mark.slow
def test_several_steps_in_one_program_train_the_same_parameters(fixed_store, whole, tmp_path):
    several = run(fixed_store, tmp_path, log_every=6, steps_per_call=2)
    assert int(several.last.step) == 12
    assert_close(whole[1].last.variables, several.last.variables)
    alone, found = ([line for line in timeless(folder) if "loss" in line] for folder in (whole[0], tmp_path))
    assert [line["step"] for line in found] == [2, 6, 12]
    for line, start in zip(found, (0, 2, 6), strict=True):  # a line has the means since the one before
        for name in ("loss", "accuracy"):
            assert line[name] == pytest.approx(np.mean([a[name] for a in alone[start : line["step"]]]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("what, steps_per_call", [("loss", 2), ("gradient", 1)])
def test_a_step_that_is_not_finite_is_not_taken(fixed_store, whole, tmp_path, what, steps_per_call):
    bad = 7  # of 12
    plan = sample_plans(Draw(SPEC, fixed_store.offsets, fixed_store.domains("train"), 0), [bad])
    support_label, label = (fixed_store.labels[rows[0]] for rows in plan)

    def poisoned(variables, episode, key):
        loss, aux = METHOD.loss(variables, episode, key)
        hit = (episode.support_label == support_label).all() & (episode.label == label).all()
        if what == "loss":
            return loss * jax.numpy.where(hit, jax.numpy.inf, 1.0), aux
        zero = sum(x.sum() - jax.lax.stop_gradient(x.sum()) for x in jax.tree.leaves(variables["params"]))
        return loss + jax.numpy.sqrt(jax.numpy.where(hit, zero, 1.0)) - 1.0, aux  # at 0 its slope is infinite

    options = {"log_every": 6, "steps_per_call": steps_per_call}
    with pytest.raises(UserError, match=f"^step {bad}: .* not finite"):
        run(fixed_store, tmp_path, method=METHOD._replace(loss=poisoned), **options)
    told = json.loads((tmp_path / "nonfinite.json").read_text())
    assert told == {"step": bad, "seed": 0, "plan": {"support": plan.support.tolist(), "query": plan.query.tolist()}}
    # What is kept is the state that the whole run passes through, so a run of a mended program ends as that does.
    mended = run(fixed_store, tmp_path, **options)
    assert mended.said[0] == f"resumed from step {bad} of 12"
    assert_close(mended.last, whole[1].last)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_damaged_ends_as_the_whole_run(fixed_store, tmp_path):
    """It is stopped at steps 1, 3, where it validates, and 5. It then goes on from the one before a damaged one."""
    whole, begun = run(fixed_store, tmp_path / "whole", steps=6), 0
    for at in (1, 3, 5):
        asked = iter([False] * (at - begun - 1) + [True])
        assert run(fixed_store, tmp_path / "run", steps=6, stopping=lambda asked=asked: next(asked)) is None
        assert checkpoints.steps(tmp_path / "run" / "last")[0] == at
        begun = at
    rot(tmp_path / "run" / "best" / "3")
    with pytest.raises(UserError, match="best/3: "):
        run(fixed_store, tmp_path / "run", steps=6)
    rot(tmp_path / "run" / "best" / "3")  # the bit is back
    rot(tmp_path / "run" / "last" / "5")
    resumed = run(fixed_store, tmp_path / "run", steps=6)
    assert_equal_trees(whole[:2], resumed[:2])
    assert resumed.notes == whole.notes
    assert "last/5 is damaged" in resumed.said[0] and "resumed from step 4" in resumed.said[1]
    assert [line["step"] for line in lines(tmp_path / "run") if "val_score" in line] == [3, 6]


def test_an_evaluation_compiles_once_whatever_its_length_and_a_task_draws_by_its_number(fixed_store):
    """A method that answers by chance, so that an answer tells the key of its task."""
    traced, source = [], device_source(fixed_store)

    def assemble(resident, batch):
        traced.append(1)
        return source.assemble(resident, batch)

    drawing = METHOD._replace(
        adapt=lambda variables, support, key: key,
        predict=lambda key, query: jax.random.normal(key, (len(query.pixels), 4)),
    )
    counting = source._replace(assemble=assemble)
    evaluator = compile_task(drawing, counting)
    plans = functools.partial(sample_plans, Draw(SPEC, fixed_store.offsets, fixed_store.domains("test"), 0))
    few, many = (evaluate(evaluator, {}, counting, Tasks(plans, n, "accuracy", per_call=2)).confidence for n in (3, 7))
    assert len(traced) == 1
    assert len(np.unique(many)) == many.size
    np.testing.assert_array_equal(few, many[:3])
