"""Each test is in one ring, and the gate's draws reach all of them."""

from pathlib import Path

import pytest

from tests import rings


def test_the_table_names_files_and_tests_that_are_there(request):
    gone = [name for name in rings.TABLE if not Path(__file__).with_name(f"test_{name}.py").is_file()]
    if not any("::" in argument for argument in request.config.args):  # else only some of the tests are known
        for file, names in request.config.stash[rings.COLLECTED].items():
            gone += [f"{file}: {test}" for test in rings.stale(file, names)]
    assert not gone, f"tests/rings.py names what is not there: {gone}"


def test_what_the_table_names_no_more_is_found():
    assert rings.stale("test_stops", ["test_a_signal_while_imports_run_is_one_line[jax-2]"]) == []
    assert rings.stale("test_stops", ["test_signals_are_given_back"]) == ["a_signal_while_imports_run"]


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("test_losses", "test_any", rings.INNER),
        ("test_of_a_new_file", "test_any", rings.GATE),
        ("test_reliability", "test_any", rings.EXHAUSTIVE),
        ("test_methods", "test_jit_equals_eager[cxda]", rings.INNER),
        ("test_methods", "test_jit_equals_eager[cxda_loo]", rings.GATE),
        ("test_train", "test_a_broken_off_run_resumes_bit_identically[5]", rings.INNER),
        ("test_train", "test_a_broken_off_run_resumes_bit_identically[0]", rings.EXHAUSTIVE),
    ],
)
def test_rings_of_tests(file, name, expected):
    assert rings.ring(file, name) == expected


def test_each_seed_draws_a_tenth_and_all_seeds_draw_each_test():
    tests, seeds = [f"tests/test_a.py::test_b[{i}]" for i in range(1000)], [f"{i:040x}" for i in range(200)]
    drawn = [{test for test in tests if rings.in_tenth(seed, test)} for seed in seeds]
    assert all(50 < len(of_seed) < 150 for of_seed in drawn) and set().union(*drawn) == set(tests)
    assert drawn[0] != drawn[1] and drawn[0] == {test for test in tests if rings.in_tenth(seeds[0], test)}
