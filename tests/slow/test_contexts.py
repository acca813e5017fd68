"""Context curves: which images have arrived, how the curves are paired and measured, and what is shown."""

import shutil

import numpy as np

from cxda_jax.studies.folders import read_result
from tests.commands import command


def test_runs_are_tested_in_contexts(smoke, erm_run, tmp_path):
    """Each n has the queries of the usual test, and n = 0 the answers without any support that a row compares with."""
    for source in (smoke[0] / "run", erm_run):  # other tests share these
        shutil.copytree(source, tmp_path / source.name)
    run, options = tmp_path / "run", (f"--runs={tmp_path}/*r*", f"--data_dir={smoke[0]}/data")
    output = command("evaluate", *options, "--context=0,100,200", "--against=erm")
    assert {p.name for p in (tmp_path / "erm").iterdir() if "context" in p.name} == {"erm,context=0"}
    usual = dict(np.load(run / "predictions.npz"))
    stored = {n: dict(np.load(run / f"cxda,context={n}" / "predictions.npz")) for n in (0, 100, 200)}
    erm = dict(np.load(tmp_path / "erm" / "erm,context=0" / "predictions.npz"))
    for arrays in (*stored.values(), erm):
        for name in ("query", "labels"):
            np.testing.assert_array_equal(arrays[name], usual[name])
    for n, arrays in stored.items():
        assert arrays["support"].shape == (10, n)
        np.testing.assert_array_equal(arrays["support"], stored[200]["support"][:, :n])
    np.testing.assert_array_equal(np.sort(stored[100]["support"]), np.sort(usual["support"]))
    assert (stored[100]["predictions"] == usual["predictions"]).mean() > 0.95  # the order only changes rounding
    np.testing.assert_array_equal(erm["predictions"], np.load(erm_run / "predictions.npz")["predictions"])
    alone, result = stored[0]["predictions"], read_result(run, run)
    was, now = (x == usual["labels"] for x in (alone, usual["predictions"]))
    found = [result.compared, result.corrected, result.spoiled]
    assert found == [200, (now & ~was).sum(), (was & ~now).sum()] and sum(found[1:]) > 0
    result = read_result(run, run / "cxda,context=100")
    assert (result.label, str(result.setting), result.num_tasks) == ("cxda,context=100", "context=100", 10)
    assert "differences to erm at the same n\nmethod" in output
    command("evaluate", f"--runs={run}", options[1], "--num_tasks=2", "--context=30", "--arrival=by_domain")
    found = np.load(run / "cxda,by_domain=30" / "predictions.npz")["support"]
    np.testing.assert_array_equal(found, usual["support"][:2, :30])
