"""What is on disk is what was written, or somebody says so."""

import pytest

from cxda_jax.disk import checkpoints
from cxda_jax.errors import UserError
from tests.fast.test_checkpoints import rot
from tests.fast.test_train import assert_equal_trees, lines, run


def test_a_run_that_is_stopped_and_damaged_ends_as_the_whole_run(fixed_store, tmp_path):
    """It is stopped at steps 1, 3, where it validates, and 5. It then goes on from the one before a damaged one."""
    whole, begun = run(fixed_store, tmp_path / "whole", steps=6), 0
    for at in (1, 3, 5):
        asked = iter([False] * (at - begun - 1) + [True])
        assert run(fixed_store, tmp_path / "run", steps=6, stopping=lambda asked=asked: next(asked)) is None
        assert checkpoints.steps(tmp_path / "run" / "last")[0] == at
        begun = at
    rot(tmp_path / "run" / "best" / "3")
    with pytest.raises(UserError, match="best/3: .* differs from its recorded hash; copy it back, or delete"):
        run(fixed_store, tmp_path / "run", steps=6)
    rot(tmp_path / "run" / "best" / "3")  # the bit is back
    rot(tmp_path / "run" / "last" / "5")
    resumed = run(fixed_store, tmp_path / "run", steps=6)
    assert_equal_trees(whole[:2], resumed[:2])
    assert resumed.notes == whole.notes
    assert "last/5 is damaged" in resumed.said[0] and "resumed from step 4" in resumed.said[1]
    assert [line["step"] for line in lines(tmp_path / "run") if "val_score" in line] == [3, 6]
