"""What --runs names: patterns, and folders whose names hold what patterns and lists are made of."""

import pytest
from absl import flags

from cxda_jax.errors import UserError
from cxda_jax.study.jobs import listed
from cxda_jax.study.runs import find_runs

NAMES = ["a,b[1]/x", "a,b[1]/y", "a", "b", "c*", "cd", "e[12]", "e1", 'q"r, s']


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize(
    "given, found",
    [
        ("a,b[1]/x", ["a,b[1]/x"]), ("a,b[1]/*", ["a,b[1]/x", "a,b[1]/y"]), ("e[12]", ["e[12]"]), ("?", ["a", "b"]),
        ("a,b[1]/x,a,b[1]/y", ["a,b[1]/x", "a,b[1]/y"]), ("a,b", ["a", "b"]), ("[ab],a", ["a", "b"]),
        ("c*", ["c*"]),  # a name that stands there comes before what it would match
        ("c?,cd", ["c*", "cd"]), ("./a/,b", ["a", "b"]), ('"q""r, s",a', ['q"r, s', "a"]),
        (listed(NAMES), NAMES),  # a list that we write is read as it was
    ],
)  # fmt: skip
def test_find_runs(given, found):
    assert [str(path) for path in find_runs(flags.ListParser().parse(given))] == found


def test_the_run_one_stands_in(monkeypatch):
    monkeypatch.chdir("a")
    assert [str(path) for path in find_runs(["."])] == ["."]


@pytest.mark.parametrize(
    "given, what", [(["a", "none", "b"], "none: nothing matches"), (["empty"], "empty: nothing that matches holds")]
)
def test_what_is_not_there_is_named(given, what):
    with pytest.raises(UserError, match=f"--runs={what}"):
        find_runs(given)
