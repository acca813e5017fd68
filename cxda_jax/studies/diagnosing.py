"""The diagnosis of a trained run."""

from pathlib import Path

import numpy as np

from cxda_jax.adapter.diagnosis import Diagnosis, diagnose
from cxda_jax.studies.finding import restore_best
from cxda_jax.studies.identity import check_data, read_config, read_record
from cxda_jax.training.answers import plain_answers
from cxda_jax.training.experiment import build

SAMPLED = 2000  # training images that are asked


def diagnose_run(run: Path, data_dir: str | Path, split: str = "val") -> Diagnosis:
    """The diagnosis of a trained run's network, without any support."""
    config = read_config(run)
    experiment = build(config, data_dir, ())
    store = experiment.store
    check_data(run, read_record(run), store, False)
    variables, logits = restore_best(run, experiment)[0], np.zeros((len(store.labels), store.num_classes), np.float32)
    training = np.flatnonzero(np.isin(store.row_domains(), store.domains("train")))
    some = np.sort(np.random.default_rng(0).permutation(training)[:SAMPLED])
    rows = np.concatenate([some, np.flatnonzero(np.isin(store.row_domains(), store.domains(split)))])
    logits[rows] = plain_answers(experiment, variables, rows)
    by_heart = float((logits[some].argmax(1) == store.labels[some]).mean())
    return diagnose(store, logits, by_heart, split)
