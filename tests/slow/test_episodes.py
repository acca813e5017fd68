"""Plans are a pure function of seed, stream and task, uniform and distinct. Sources give the bytes of a plan's rows."""

import functools

import jax
import numpy as np
import pytest

from cxda_jax.data.episodes import Draw, sample_plans
from cxda_jax.data.sources import device_source, stack, tfdata_source
from tests.fast.test_episodes import MIXED, SPEC


@pytest.mark.parametrize("spec", [SPEC, MIXED])
def test_both_sources_give_the_bytes_of_the_planned_rows(fixed_store, spec, monkeypatch):
    """Each process reads its own tasks alone; together they are the step."""
    pytest.importorskip("tensorflow")
    many, owner = fixed_store, fixed_store.row_domains()

    def plan_of(step):
        return sample_plans(Draw(spec, many.offsets, many.domains("train"), 0), range(6 * step, 6 * step + 6))

    device, stream = device_source(many), tfdata_source(many)
    assemble = jax.jit(device.assemble)
    whole = [*stream.own_batches(plan_of, 3, 6)]
    for plan, batch, step in zip(device.batches(plan_of, 3, 6), whole, (3, 4, 5), strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, plan_of(step))
        ours, theirs = assemble(device.resident, plan), stream.assemble((), batch)
        parts = (ours.support, ours.support_label), (ours.query, ours.label)
        for (images, label), rows in zip(parts, plan, strict=True):
            for array, column in ((images.pixels, many.images), (images.domain, owner), (label, many.labels)):
                np.testing.assert_array_equal(array, column[rows])
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), ours, theirs)
    np.testing.assert_array_equal(stack(whole).label, np.stack([episode.label for episode in whole]))
    on_a_mesh, parts = stream._replace(mesh="of all processes"), []
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for which in range(3):
        monkeypatch.setattr(jax, "process_index", lambda which=which: which)
        parts.append([*on_a_mesh.own_batches(plan_of, 3, 6)])
    for episode, *of_step in zip(whole, *parts, strict=True):
        assert all(len(part.label) == 2 for part in of_step)
        together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *of_step)
        jax.tree.map(np.testing.assert_array_equal, episode, together)
