"""What --runs names: patterns, and folders whose names hold what patterns and lists are made of."""

from absl import flags

from cxda_jax.studies.folders import find_runs
from cxda_jax.studies.jobs import listed
from tests.lines import refused

NAMES = ["a,b[1]/x", "a,b[1]/y", "a", "b", "c*", "cd", "e[12]", "e1", 'q"r, s']
FOUND = {
    "a,b[1]/*": ["a,b[1]/x", "a,b[1]/y"], "?": ["a", "b"], "[ab],a": ["a", "b"], "./a/,b": ["a", "b"],
    "c*": ["c*"],  # a name that stands there comes before what it would match
    listed(NAMES): NAMES,  # a list that we write is read as it was
}  # fmt: skip


def test_runs_are_found_by_patterns_and_by_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    (tmp_path / "empty").mkdir()

    def find(text):
        return [str(path) for path in find_runs(flags.ListParser().parse(text))]

    assert {given: find(given) for given in FOUND} == FOUND
    for given, said in {"a,none,b": "none: nothing matches", "empty": "empty: nothing that matches holds"}.items():
        with refused(f"^--runs={said}"):
            find(given)
