"""The training loop: resume bit by bit, validation, checkpoints, and what it says and counts."""

import contextlib
import json

import jax
import numpy as np
import pytest

from cxda_jax.data.episodes import Draw, sample_plans
from cxda_jax.data.sources import tfdata_source
from cxda_jax.disk import checkpoints, models
from cxda_jax.errors import UserError
from tests.fast.test_train import (  # noqa: F401
    MEASURED,
    METHOD,
    NORMED,
    PLAIN,
    PROGRAMS,
    SCORES,
    SPEC,
    TRACED,
    TX,
    Run,
    Small,
    assert_equal_trees,
    lines,
    run,
    timeless,
    whole,
)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4), a, b)


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


def test_a_state_in_last_names_a_best_that_is_there(fixed_store, whole, tmp_path):
    """Of the two states the older one too, from which a run goes on where the newer is damaged."""
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path, stop_at=11, save_every=100)
    assert checkpoints.steps(tmp_path / "last") == [9, 6]
    (tmp_path / "last" / "9" / "manifest.json").unlink()
    resumed = run(fixed_store, tmp_path, save_every=100)
    assert "resumed from step 6 of 12" in resumed.said
    assert_equal_trees(whole[1][:3], resumed[:3])


def test_a_network_without_statistics_resumes_and_becomes_a_model(fixed_store, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(fixed_store, tmp_path, 5, method=PLAIN, steps=6)
    resumed = run(fixed_store, tmp_path, method=PLAIN, steps=6)
    assert resumed.last.variables["batch_stats"] == {} and int(resumed.last.step) == 6
    models.write_model(tmp_path / "model", resumed.best, {}, {})
    assert_equal_trees(models.read_model(tmp_path / "model", resumed.best)[0], resumed.best)


def test_streamed_images_train_the_same_parameters(fixed_store, whole, tmp_path):
    pytest.importorskip("tensorflow")
    assert_equal_trees(whole[1].last, run(fixed_store, tmp_path, source=tfdata_source, log_every=6).last)


def test_several_steps_in_one_program_train_the_same_parameters(fixed_store, whole, tmp_path):
    several = run(fixed_store, tmp_path, log_every=6, steps_per_call=2)
    assert int(several.last.step) == 12
    assert_close(whole[1].last.variables, several.last.variables)
    alone, found = ([line for line in timeless(folder) if "loss" in line] for folder in (whole[0], tmp_path))
    assert [line["step"] for line in found] == [2, 6, 12]
    for line, start in zip(found, (0, 2, 6), strict=True):  # a line has the means since the one before
        for name in ("loss", "accuracy"):
            assert line[name] == pytest.approx(np.mean([a[name] for a in alone[start : line["step"]]]), rel=1e-4)


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
