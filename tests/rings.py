"""The three rings of the tests: which test runs when.

    inner        no marker. `python -m pytest` runs it alone: in 4 minutes on two cores, in 3 with -n 2.
    gate         .ci/run adds it: conformance, networks, PyTorch's numbers, checkpoints, commands. Both in 15 to 50 minutes.
    exhaustive   `-m exhaustive` runs it: many cases of one promise, random inputs, kills. .ci/run draws a tenth of it.

TABLE names files, and tests of a file by regular expressions. Such an expression fits the beginning of a test's name with
its parameters, without `test_`. What TABLE does not name is in the gate. A test in a browser is always exhaustive.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest

INNER, GATE, EXHAUSTIVE = "inner", "gate", "exhaustive"
COLLECTED = pytest.StashKey[dict[str, list[str]]]()  # names of all tests, by file, before some are deselected


class Rings(NamedTuple):
    """The ring of most tests of a file, and the tests that are in others. The first expression that fits counts."""

    most: str = GATE
    inner: Sequence[str] = ()
    gate: Sequence[str] = ()
    exhaustive: Sequence[str] = ()

    def of(self, name: str) -> str:
        others = {INNER: self.inner, GATE: self.gate, EXHAUSTIVE: self.exhaustive}
        return next((ring for ring, tests in others.items() if any(fits(test, name) for test in tests)), self.most)


TABLE = {  # by the file's name without test_ and .py
    "adapted_page": Rings(INNER),
    "adapting": Rings(inner=["a_gain_is_expected"], exhaustive=["many_images", "a_method_that_never"]),
    "archives": Rings(EXHAUSTIVE),
    "architecture": Rings(INNER),
    "augment": Rings(INNER),
    "benchmark": Rings(exhaustive=["other_suites", "the_gpu_suite", "the_large_suite"]),
    "buffer": Rings(
        inner=["attention", "what_cannot_be"],
        exhaustive=[r"it_equals.*\[(?!bn|cxda_any|t3a)", "ten_thousand", r"a_reservoir"],
    ),
    "build": Rings(INNER, exhaustive=["what_is_taken", "an_optimizer_is_built", "images_too_small"]),
    "cells": Rings(INNER, gate=["a_cell_is_done_again"]),
    "checkpoints": Rings(exhaustive=["saving_and_restoring_keep_no_memory"]),
    "cli": Rings(INNER, gate=["a_closed_output", "command_lines"]),
    "configs": Rings(exhaustive=[r"every_method_is_traced.*\[(?!glyphs)", "one_method_runs", "regenerated_data"]),
    "contexts": Rings(
        INNER, gate=["runs_are_tested", "images_arrive", "the_figure", "a_report", "differences_are_those"]
    ),
    "corruptions": Rings(EXHAUSTIVE),
    "episodes": Rings(INNER),
    "exhaustive": Rings(INNER, gate=["a_result_holds", "the_mean_is_over_all_images"]),
    "fitting": Rings(INNER),
    "frozen": Rings(inner=["lames_steps_converge"]),
    "icrm": Rings(inner=["parameter_counts", "wrong_options"]),
    "identity": Rings(exhaustive=["a_flipped_bit"]),
    "launch": Rings(
        inner=["a_run_leaves_what_it_promises"],
        exhaustive=["methods_that_start_from_erm", "a_training_whose_output_nobody_reads"],
    ),
    "launch_report": Rings(inner=["a_report_holds_all_there_is"], exhaustive=["a_wrong_value_of_any_field"]),
    "losses": Rings(INNER),
    "malformed_files": Rings(EXHAUSTIVE),
    "malformed_raws": Rings(EXHAUSTIVE),
    "model": Rings(exhaustive=[r"a_loaded_model.*\[(?!erm|cxda_any|t3a)"]),
    "methods": Rings(
        inner=[r"(?!overfits|statistics_options).*\[(erm|bn|cxda)\]$"],
        exhaustive=[r"compiled_functions.*\[(cotta|ft_im|sf_ocda|icrm)", r"overfits.*\[cxda_(?!any)"],
    ),
    "metrics": Rings(INNER),
    "metrics_file": Rings(INNER, exhaustive=["no_flipped_bit"]),
    "optimizer": Rings(inner=["a_text_that_is_no_chain", "the_names_of_a_chain"]),
    "other_data": Rings(exhaustive=["every_method_takes"]),
    "overrides": Rings(INNER, exhaustive=["ten_thousand", "any_text", "data_of_any_name", "data_are_not_made"]),
    "plots": Rings(exhaustive=["files_are_the_same_again", "labels_of_near_points"]),
    "prepare": Rings(exhaustive=["memory_does_not_grow", "cifar_c_through", "cifar_c_regenerated"]),
    "properties": Rings(
        EXHAUSTIVE,
        inner=["a_plan_is", "every_draw_is_uniform", "scores_equal", "the_worst_decile", "mean_and_standard_error"],
        gate=["both_sources_give_equal_bytes"],
    ),
    "queue": Rings(
        inner=["options", "times_are", "time_limits", "a_training_has", "the_examples"],
        exhaustive=[
            "jobs_",
            "a_job_that",
            "a_cancelled",
            "a_training_goes",
            "a_time_limit",
            "a_stopped",
            "a_whole",
            "slurm_takes",
        ],
    ),
    "real_images": Rings(exhaustive=[r"from_raw_files.*(qmnist|cifar10_c)"]),
    "reliability": Rings(EXHAUSTIVE),
    "results": Rings(INNER),
    "recorded_pages": Rings(INNER),
    "results_page": Rings(INNER),
    "rings": Rings(INNER),
    "safetensors": Rings(INNER),
    "store": Rings(INNER),
    "store_properties": Rings(EXHAUSTIVE),
    "stops": Rings(exhaustive=["a_signal_while_imports_run"]),
    "strong_augment": Rings(exhaustive=["draws_fill", "every_order", "off_is"]),
    "study": Rings(exhaustive=["a_study_from_one_command", "a_killed_study", "each_job_gets_one_signal"]),
    "study_commands": Rings(INNER),
    "study_details": Rings(INNER),
    "study_page": Rings(INNER, gate=["the_published"]),
    "support_loss": Rings(exhaustive=[r"leaving_one_out_equals.*\[(flat|patch)\]"]),
    "tables": Rings(INNER),
    "train": Rings(
        inner=[r"a_broken_off_run_resumes.*\[5\]"],
        exhaustive=["a_broken_off_run_resumes", r"a_step_that_is_not_finite.*\[gradient"],
    ),
    "mesh": Rings(EXHAUSTIVE, gate=[r"all_devices.*2-1-device", "a_killed.*0", "a_missing"]),
    "export": Rings(gate=[r"programs_answer.*-(erm|bn|cxda_any)-resnet"], exhaustive=[r"programs_answer.*-resnet"]),
    "web": Rings(
        INNER,
        gate=["the_shipped_model", "other_methods", "strokes_become", "a_page_is_written", "a_page_that_does_not"],
    ),
}


def fits(test: str, name: str) -> bool:
    return bool(re.match(test, name.removeprefix("test_")))


def ring(file: str, name: str) -> str:
    """The ring of a test, by its file's name without .py and its own name, such as `test_train` and `test_a[cxda-0]`."""
    return TABLE.get(file.removeprefix("test_"), Rings()).of(name)


def stale(file: str, names: Sequence[str]) -> list[str]:
    """The expressions for a file that fit none of its tests, whose names are all given."""
    its = TABLE.get(file.removeprefix("test_"), Rings())
    return [test for test in (*its.inner, *its.gate, *its.exhaustive) if not any(fits(test, name) for name in names)]


def in_tenth(seed: str, nodeid: str) -> bool:
    """Whether a test is in the tenth that a seed draws. Every test is, for one seed of ten on average."""
    return int.from_bytes(hashlib.sha256(f"{seed} {nodeid}".encode()).digest()[:8], "big") % 10 == 0


# Hooks of pytest, which conftest.py imports.


def pytest_addoption(parser):
    parser.addoption("--tenth", metavar="SEED", help="of the exhaustive ring only the tenth that this text draws")


@pytest.hookimpl(tryfirst=True)  # before -m selects by markers
def pytest_collection_modifyitems(config, items):
    names: dict[str, list[str]] = {}
    for item in items:
        names.setdefault(item.path.stem, []).append(item.name)
        its = EXHAUSTIVE if "browser" in item.fixturenames else ring(item.path.stem, item.name)
        if its != INNER:
            item.add_marker(its)
    config.stash[COLLECTED] = names
    seed = config.getoption("tenth")
    if seed is not None:
        left_out = {item for item in items if item.get_closest_marker(EXHAUSTIVE) and not in_tenth(seed, item.nodeid)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
