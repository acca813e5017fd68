"""The commands as a user types them: what they leave behind, and one line for each mistake."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from cxda_jax import backend, metrics
from cxda_jax.config import differences, read
from cxda_jax.disk.reading import read_lines
from cxda_jax.errors import UserError
from cxda_jax.experiment import METHODS, build, open_data
from cxda_jax.report.attention import explorer_tasks, kept_attention
from cxda_jax.study.comparing import comparison, table
from cxda_jax.study.identity import read_config, read_record
from cxda_jax.study.results import Result, by_store, read_result, read_results
from cxda_jax.study.runs import restore_best
from cxda_jax.study.settings import USUAL, Setting, asked, reshaped
from cxda_jax.types import Images
from tests.commands import command
from tests.lines import write_config

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(smoke):
    return smoke[0]


def row_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_run_leaves_what_it_promises(smoke):
    folder, output = smoke
    names = {p.name for p in (folder / "run").iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "last", "best", "result.json", "predictions.npz", "attention.png", "attention.npz", "cost.json",
        "model", "lock", "manifest.json",
    }  # fmt: skip
    row = row_of(folder / "run")
    stored = np.load(folder / "run" / "predictions.npz", allow_pickle=False)
    scores = metrics.scores("accuracy", stored["predictions"], stored["labels"])
    assert row["avg"] == pytest.approx(100 * scores.mean()) and row["w10"] == pytest.approx(100 * scores.min())
    assert stored["support"].shape == (10, 100) and stored["query"].shape == (10, 20)
    assert row["method"] == "cxda" and row["seed"] == 0 and len(row["weights_hash"]) == 64
    assert row["device"].startswith(f"{backend.machine()} x1 (")
    assert output.count("(first time only)") == output.count("compiled in ") - 1 == 2  # one is in the line of costs
    assert f"{row['avg']:.1f}" in output and "eta" in output and "validation" in output
    passport = json.loads((folder / "run" / "cost.json").read_text())
    assert passport["steps"] == 20 and passport["programs"] >= passport["programs_from_cache"] >= 0
    assert passport["steps_per_s"] > 0 and passport["step_gflop"] > 0.1 and 0 < passport["of_peak"] < 1
    assert passport["bytes_to_device_per_step"] == 4 * 120 and passport["memory_of"] == "process"
    line = next(line for line in output.splitlines() if line.startswith("cost: "))
    assert "for 20 steps" in line and "programs from the cache" in line
    assert f"of 200 queries, adapting corrected {row['corrected']} and spoiled {row['spoiled']}" in output
    with Image.open(folder / "run" / "attention.png") as picture:
        assert picture.size[0] > 800 and len(set(picture.convert("L").get_flattened_data())) > 50


def test_evaluating_again_gives_the_same_row(folder):
    """In a folder whose name holds what patterns and lists are made of."""
    copy = folder / "co,py[1]"
    shutil.copytree(folder / "run", copy)
    before = row_of(copy)
    for name in ("result.json", "predictions.npz", "attention.png", "metrics.jsonl", "last"):
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    output = command("evaluate", f"--runs={copy}", f"--data_dir={folder}/data")
    after = row_of(copy)
    assert before["train_minutes"] > 0 and after["train_minutes"] is None  # the metrics did not come along
    times = ("task_ms", "adapt_ms", "predict_ms", "train_minutes", "seal")
    assert {k: v for k, v in before.items() if k not in times} == {k: v for k, v in after.items() if k not in times}
    assert (copy / "attention.png").exists() and "cxda" in output


def test_a_training_whose_output_nobody_reads_goes_on(folder, tmp_path):
    """As after `| head -1`: it trains the second half of the run, validates and tests."""
    shutil.copytree(folder / "run", tmp_path / "run")
    for path in (tmp_path / "run" / "last" / "20", tmp_path / "run" / "model"):
        shutil.rmtree(path)
    (tmp_path / "run" / "result.json").unlink()
    command = [sys.executable, "-m", "launch.train", TRAIN[1], f"--workdir={tmp_path}/run", f"--data_dir={folder}/data"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as child:
        assert child.stdout and child.stderr
        assert child.stdout.readline().startswith("cxda on glyphs")
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == ("", 0)
    rows = [row_of(path / "run") for path in (folder, tmp_path)]
    assert rows[0]["predictions_sha256"] == rows[1]["predictions_sha256"]
    assert (tmp_path / "run" / "last" / "20").is_dir()


def test_queries_are_compared_with_their_answers_without_support(folder):
    config = read_config(folder / "run")
    experiment = build(config, folder / "data", splits=("test",))
    store, method = experiment.store, experiment.method
    variables, _ = restore_best(folder / "run", experiment)
    stored, domains = np.load(folder / "run" / "predictions.npz"), store.row_domains()

    def images(rows):
        return Images(jnp.asarray(store.images[rows]), jnp.asarray(domains[rows]))

    unadapted = method.adapt(variables, images(np.arange(0)), jax.random.key(0))
    before = np.asarray(method.predict(unadapted, images(stored["query"].ravel())).argmax(-1)).reshape(10, 20)
    was, now = before == stored["labels"], stored["predictions"] == stored["labels"]
    row = row_of(folder / "run")
    found = {name: row[name] for name in ("compared", "corrected", "spoiled")}
    assert found == {"compared": 200, "corrected": (now & ~was).sum(), "spoiled": (was & ~now).sum()}
    assert (before != stored["predictions"]).any(), "nothing that could be told apart"


def test_a_models_plain_files_are_tested_as_its_run_is(folder, tmp_path):
    shutil.copytree(folder / "run" / "model", tmp_path / "model")
    output = command("evaluate", f"--runs={tmp_path}/model", f"--data_dir={folder}/data")
    rows = [row_of(path) for path in (folder / "run", tmp_path / "model")]
    for field in ("avg", "w10", "weights_hash", "best_step", "config_hash", "data_hash", "method"):
        assert rows[0][field] == rows[1][field]
    assert f"weights {rows[0]['weights_hash'][:12]}" in output


def test_no_tensorflow_torch_or_wilds_is_imported():
    code = (
        "import sys, cxda_jax, launch.train, launch.evaluate, configs.glyphs; "
        "bad = {'tensorflow', 'torch', 'wilds', 'tensorflow_datasets'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


TRAIN = ("train", "--config=glyphs:cxda,smoke", "--workdir={tmp}/w", "--data_dir={tmp}/d")
TESTED = ("evaluate", "--runs={run}", "--data_dir={data}")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*TRAIN, "--config.optimizer.lr=1"), "config.optimizer has no field 'lr'; fields: chain, learning_rate, momentum"),
        ((*TRAIN, "--config.sed=1"), "config has no field 'sed'; did you mean 'seed'?"),
        ((*TRAIN, "--workdirr=x"), "Unknown command line flag 'workdirr'"),
        ((*TRAIN, "--config.benchmark=glyfs"), "benchmark='glyfs' is unknown; did you mean 'glyphs'? choose from cifar10_c"),
        ((*TRAIN, "--config.data.drawings=39"), "has 39 images, episode.per_domain + episode.num_query needs 40"),
        (("train", "--config=configs/glyphs.py:cxdaa", "--workdir={tmp}/w"), "method='cxdaa' is unknown; did you mean 'cxda'?"),
        (("train", "--config=configs/glyfs.py:cxda", "--workdir={tmp}/w"), "no file configs/glyfs.py; did you mean configs/glyphs.py?"),
        (("train", "--config=configs/glyphs.py:ft_em,smoke", *TRAIN[2:]), "method 'ft_em' starts from the runs of 'erm' and trains nothing; train that"),
        ((*TRAIN[:2], "--workdir={run}", "--data_dir={data}", "--config.seed=3"), "holds a run with config.seed=0, not 3; choose another --workdir"),
        (("evaluate", "--runs={tmp}/nothing*"), "nothing matches; name run directories"),
        ((*TESTED, "--methods=ft_em"), "--methods=ft_em: --runs={run} holds no run to test it on"),
        ((*TESTED, "--methods=ft"), "--methods=ft: no such method; choose from all, erm, "),
        ((*TESTED, "--config.net.width=4"), "--config.net.width: a trained run fixes it; this command can change "),
    ],
)  # fmt: skip
def test_a_mistake_costs_one_line_and_exit_code_2(folder, tmp_path, arguments, message):
    def filled(text):
        return text.format(tmp=tmp_path, run=folder / "run", data=folder / "data")

    error = command(*map(filled, arguments), code=2)
    assert error.count("\n") == 1 and error.startswith("error: ") and filled(message) in error


def test_a_run_without_checkpoint(folder, tmp_path):
    for name in ("config.json", "manifest.json"):
        shutil.copy(folder / "run" / name, tmp_path)
    error = command("evaluate", f"--runs={tmp_path}", f"--data_dir={folder}/data", code=2)
    assert error.count("\n") == 1 and f"error: {tmp_path}: no checkpoint in best/; train it" in error


def files(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


TIMES = ("task_ms", "adapt_ms", "predict_ms", "seal")


def result(folder):
    return {k: v for k, v in row_of(folder).items() if k not in TIMES}, dict(np.load(folder / "predictions.npz"))


def test_methods_that_start_from_erm_leave_it_untouched(erm_run, tmp_path):
    erm, derived = tmp_path / "erm", ["ft_em", "ft_im", "sf_ocda", "cotta", "bn_alpha", "t3a", "lame", "feature_shift"]
    for name in ("erm", "run"):
        shutil.copytree(erm_run.parent / name, tmp_path / name)
    options = (f"--data_dir={erm_run.parent}/data", "--num_tasks=3")
    checkpoint, (trained, arrays) = files(erm / "best"), result(erm)
    output = command("evaluate", f"--runs={tmp_path}/[er]*", "--methods=all", *options)
    rows = output.split("predict ms\n")[1].splitlines()
    assert [row.split()[2] for row in rows] == ["erm", "cxda", *derived]
    first = {name: result(erm / name) for name in derived}
    alone, alone_arrays = result(erm)
    assert checkpoint == files(erm / "best") and alone["weights_hash"] == trained["weights_hash"]
    np.testing.assert_array_equal(alone_arrays["predictions"], arrays["predictions"][:3])
    again = derived[2:4]
    for name in again:
        shutil.rmtree(erm / name)
    command("evaluate", f"--runs={erm}", "--methods=cotta,sf_ocda,erm", *options)
    for name in again:
        row, arrays = result(erm / name)
        assert row == first[name][0] and row["method"] == name and row["weights_hash"] == alone["weights_hash"]
        jax.tree.map(np.testing.assert_array_equal, arrays, first[name][1])
    assert result(erm)[0] == alone and "compared" not in alone  # it uses no support
    assert all(row["compared"] == 60 >= row["corrected"] + row["spoiled"] for row, _ in first.values())
    row, arrays = first["cotta"]
    teacher = metrics.scores("accuracy", arrays["teacher"], arrays["labels"])
    assert row["also"]["teacher"]["avg"] == pytest.approx(100 * teacher.mean())
    assert -0.05 <= row["calibration"]["threshold"] < 0.95 and "teacher: " in output


def test_changed_fields_are_tested_in_a_folder_of_their_own(erm_run):
    before, data = result(erm_run), f"--data_dir={erm_run.parent}/data"
    command("evaluate", f"--runs={erm_run}", "--methods=ft_em", "--config.finetune.steps=1", data)
    assert result(erm_run / "ft_em,finetune.steps=1")[0]["label"] == "ft_em,finetune.steps=1"
    command("evaluate", f"--runs={erm_run}", "--methods=bn", "--config.batch_norm.test_time_only=True", data)
    row, _ = result(erm_run / "bn,batch_norm.test_time_only=True")
    assert row["method"] == "bn" and row["weights_hash"] == before[0]["weights_hash"]
    assert result(erm_run)[0] == before[0]


def test_methods_without_training_start_from_erm_iid_where_asked(erm_run, tmp_path):
    """On two runs of equal weights, whose configs say erm and erm_iid."""
    for name in ("erm", "erm_iid"):
        shutil.copytree(erm_run, tmp_path / name, ignore=shutil.ignore_patterns("*,*", *METHODS))
        write_config(tmp_path / name, {**read_config(erm_run), "method": name}, read_record(erm_run).data_hash)
    options = (f"--runs={tmp_path}/erm*", f"--data_dir={erm_run.parent}/data", "--num_tasks=3")
    usual = command("evaluate", *options, "--methods=erm_iid,t3a")
    output = command(
        "evaluate", *options, "--methods=erm_iid,t3a,ft_em", "--from=erm_iid", "--against=t3a,from=erm_iid"
    )
    rows = [[line.split()[2] for line in text.split("predict ms\n")[1].splitlines()[:3]] for text in (usual, output)]
    assert rows == [["erm_iid", "t3a"], ["erm_iid", "ft_em,from=erm_iid", "t3a,from=erm_iid"]]
    assert "erm_iid - t3a,from=erm_iid  " in output
    (row, arrays), (other, same) = (result(tmp_path / name) for name in ("erm/t3a", "erm_iid/t3a,from=erm_iid"))
    assert (row["label"], other["label"]) == ("t3a", "t3a,from=erm_iid") and row["method"] == other["method"] == "t3a"
    np.testing.assert_array_equal(arrays["predictions"], same["predictions"])
    assert not (tmp_path / "erm_iid" / "t3a").exists() and not list((tmp_path / "erm").glob("*from*"))


def test_a_method_costs_one_file_and_its_entries(erm_run, tmp_path):
    """What docs/methods.md says, done to a copy of the package."""
    text = (ROOT / "docs" / "methods.md").read_text()
    group, lines = (
        re.search(rf"{where}.*?```python\n(.*?)   ```", text, re.S)[1].replace("\n   ", "\n").strip()
        for where in ("FIELDS` of `cxda_jax/fields.py", "two lines to `cxda_jax/experiment.py")
    )
    load, entry = lines.splitlines()
    for name in ("cxda_jax", "configs", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "docs" / "examples" / "prior_shift.py", tmp_path / "cxda_jax" / "methods")
    for file, start, added in (("fields", "\nFIELDS: ", group), ("experiment", "\nMETHODS: ", entry)):
        path = tmp_path / "cxda_jax" / f"{file}.py"
        code = path.read_text()
        end = code.index("\n}", code.index(start))
        code = f"{code[:end]}\n    {added}{code[end:]}"
        path.write_text(code.replace("\nimport jax\n", f"\n{load}\nimport jax\n", 1))
    done = subprocess.run(
        [sys.executable, "-m", "launch.evaluate", f"--runs={erm_run}", "--methods=prior_shift", "--config.prior_shift.steps=3",
         f"--data_dir={erm_run.parent}/data"], cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"glyphs \(smoke\) +prior_shift,prior_shift.steps=3 +0 ", done.stdout)
    assert result(erm_run / "prior_shift,prior_shift.steps=3")[0]["method"] == "prior_shift"


def test_differences_name_dotted_fields():
    a, b = {"x": 1, "n": {"y": 2, "z": 3}}, {"x": 1, "n": {"y": 5, "w": 3}}
    assert differences(a, b) == {"config.n.w": (None, 3), "config.n.y": (2, 5), "config.n.z": (3, None)}


class Made(Result):
    """A result whose scores are at hand: one for each of four tasks of one query."""

    def stored(self, name="predictions"):
        right = np.array(self.row["scores"], int)[:, None]
        plans = dict.fromkeys(("support", "query"), np.zeros((4, 1)))
        return {"labels": np.ones_like(right), "predictions": right, **plans}


def made(label="m", seed=0, scores=(1, 1, 0, 0), **other):
    row = {"benchmark": "b", "label": label, "seed": seed, "num_tasks": 5, "avg": 50.0, "w10": 10.0, "steps": 9,
           "adapt_ms": 2, "predict_ms": 1, "metric": "accuracy", "scores": scores}  # fmt: skip
    return Made(row | other, {}, Path(label), Path(label))


def test_table_shows_mean_and_standard_error_over_seeds():
    results = [made(seed=s, avg=a) for s, a in enumerate((50.0, 52.0, 54.0))]
    assert "52.0 +- 1.2" in table(results) and "0,1,2" in table(results) and "nan" not in table(results[:1])


def test_comparison_pairs_the_seeds_that_both_have():
    results = [made("bn", 0), made("bn", 1, (0, 0, 0, 0)), made("cxda", 1, (1, 1, 1, 1)), made("cxda", 2)]
    assert "\ncxda - bn  +100.00  [+100.00, +100.00]  seeds 1" in comparison(results, "bn")


def test_two_stores_of_one_name_are_never_averaged_or_compared():
    results = [made(label, seed, scores, data_name="mine", data_hash=digest, avg=avg)
               for digest, avg in (("1" * 64, 10.0), ("2" * 64, 90.0)) for seed in (0, 1)
               for label, scores in (("bn", (0, 0, 0, 0)), ("cxda", (avg > 50,) * 4))]  # fmt: skip
    lines = table(results).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == ["mine [11111111]"] * 2 + ["mine [22222222]"] * 2
    assert "10.0 +- 0.0" in lines[1] and "90.0 +- 0.0" in lines[3]
    assert comparison(results, "bn").splitlines()[1:] == [
        "mine [11111111]: cxda - bn  +0.00  [+0.00, +0.00]  seeds 0,1",
        "mine [22222222]: cxda - bn  +100.00  [+100.00, +100.00]  seeds 0,1",
    ]


def test_unfinished_seeds_have_a_line_of_their_own():
    results = [made("cxda", s, steps=2880, reached_step=2880 if s else 500, avg=50.0 * s) for s in range(3)]
    lines = table(results).splitlines()
    assert lines[1].startswith("b ") and "cxda†" in lines[1] and "cxda  " in lines[2] and "75.0 +- 25.0" in lines[2]
    assert lines[3] == "† b, cxda seed 0: unfinished, at step 500 of 2880; in no mean with finished seeds"
    told = comparison([*results, made("bn", 0)], "bn")
    assert "cxda - bn" not in told and "left out: b, cxda seed 0: unfinished, at step 500 of 2880" in told


def test_other_tasks_and_what_fails_among_them(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.copytree(folder / "run", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "best")
    arguments = (f"--runs={tmp_path}/run,{tmp_path}/broken", "--num_domains=2", "--support_size=10", "--num_tasks=4")
    error = command("evaluate", *arguments, f"--data_dir={folder}/data", code=2)
    first = "error: 2 of 4 evaluations failed; the first: cxda,num_domains=2 of "
    assert error.count("\n") == 1 and error.startswith(first) and "no checkpoint in best/" in error
    for label, shape in {"num_domains=2": (100, 50), "support_size=10": (10, 2)}.items():
        found = tmp_path / "run" / f"cxda,{label}"
        row, stored = row_of(found), np.load(found / "predictions.npz")
        assert (row["label"], row["setting"], row["num_tasks"]) == (f"cxda,{label}", label, 4)
        assert (stored["support"].shape, stored["query"].shape) == ((4, shape[0]), (4, shape[1]))
        assert row["avg"] == pytest.approx(100 * np.mean(stored["predictions"] == stored["labels"]))
        assert not (found / "attention.npz").exists()


def test_validation_domains_are_tested_apart(folder, tmp_path):
    """With the score that the training had there, in a folder and a line of their own."""
    shutil.copytree(folder / "run", tmp_path / "run")
    runs = f"--runs={tmp_path}/run", f"--data_dir={folder}/data"
    output = command("evaluate", *runs, "--validation")
    made = tmp_path / "run" / "cxda,validation"
    row, arrays = result(made)
    best = max(line["val_score"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "val_score" in line)
    assert row["avg"] == pytest.approx(100 * best) and (row["label"], row["split"]) == ("cxda", "val")
    assert re.search(r"^glyphs \(smoke\) \(validation\) +cxda ", output, re.MULTILINE)
    store = open_data(read_config(tmp_path / "run"), folder / "data")
    asked = store.row_domains()[arrays["query"]]
    assert set(asked.ravel()) <= set(store.domains("val")) and not (made / "attention.npz").exists()
    command("evaluate", *runs, "--validation", "--context=0,5", "--num_tasks=3")
    for n in (0, 5):
        few = result(tmp_path / "run" / f"cxda,context={n},validation")[1]
        np.testing.assert_array_equal(few["query"], arrays["query"][:3])
    results, faults = read_results([tmp_path / "run"])
    assert not faults and sorted(by_store(results)) == ["glyphs (smoke)", "glyphs (smoke) (validation)"]


def test_attention_is_kept_with_its_domains(folder):
    kept, stored = (np.load(folder / "run" / f"{name}.npz") for name in ("attention", "predictions"))
    assert kept["weights"].shape == (10, 20, 8, 100)
    np.testing.assert_allclose(kept["weights"].astype(float).sum(-1), 1, atol=2e-2)  # float16
    domains = open_data(read_config(folder / "run"), folder / "data").row_domains()
    for name in ("support", "query"):
        np.testing.assert_array_equal(kept[f"{name}_domain"], domains[stored[name]])


def test_settings_keep_as_many_queries_as_images_of_a_domain():
    for setting, expected in {
        Setting("num_domains", 10): (10, 10, 10), Setting("num_domains", 1): (1, 100, 100), USUAL: (5, 20, 20),
        Setting("support_size", 500): (5, 100, 100), Setting("support_size", 10): (5, 2, 2),
        Setting("finetune.steps", 1): (5, 20, 20),
    }.items():  # fmt: skip
        episode = reshaped(read("glyphs:cxda"), setting)["episode"]
        assert (episode["num_domains"], episode["per_domain"], episode["num_query"]) == expected, setting


def test_settings_keep_the_usual_queries_where_the_config_says_so():
    config = read("glyphs:cxda", [("evaluation.reshaped_queries", "fixed"), ("episode.num_query", "15")])
    for setting, expected in {
        Setting("num_domains", 10): (10, 10, 15), Setting("support_size", 10): (5, 2, 15), USUAL: (5, 20, 15),
    }.items():  # fmt: skip
        episode = reshaped(config, setting)["episode"]
        assert (episode["num_domains"], episode["per_domain"], episode["num_query"]) == expected, setting


def test_every_image_is_tested_once(folder, tmp_path):
    """600 of them; tasks of 18 queries do not divide the 120 of a writer."""
    shutil.copytree(folder / "run", tmp_path / "run")
    runs, data = f"--runs={tmp_path}/run", f"--data_dir={folder}/data"
    changes = ["--config.episode.num_query=18", "--config.evaluation.tasks=exhaustive"]
    command("evaluate", runs, data, *changes)
    label = "cxda,episode.num_query=18,evaluation.tasks=exhaustive"
    result = read_result(tmp_path / "run", tmp_path / "run" / label)
    row, stored = result.row, result.stored()
    counts = stored["labels"] >= 0
    assert counts.shape == (35, 18) and counts.sum() == len(np.unique(stored["query"])) == 600
    hits = (stored["predictions"] == stored["labels"])[counts]
    assert row["avg"] == pytest.approx(100 * hits.mean()) and row["num_tasks"] == 35
    assert row["compared"] == counts[:24].sum() < 24 * 18
    (kept,), faults = kept_attention([result], f"{folder}/data")
    tasks = explorer_tasks(kept, [result], 7)
    assert not faults and [len(task.query_labels) for task in tasks] == list(counts[:7].sum(1))
    assert all(len(task.weights) == len(task.query) == len(task.query_labels) for task in tasks)
    said = command("evaluate", runs, data, *changes, "--num_tasks=5", code=2)
    assert said == "error: --num_tasks=5: evaluation.tasks=exhaustive tests every image; leave out one of them\n"


def test_bad_settings():
    for text in ("0", "-1", "x", "1.5", ""):
        with pytest.raises(UserError, match=f"--num_domains={text}: give whole numbers of at least 1"):
            asked("num_domains", [text])
    with pytest.raises(UserError, match="--support_size=3: 3 support images cannot come from 5 domains"):
        reshaped(read("glyphs:cxda"), Setting("support_size", 3))


def test_compiled_programs_are_kept_where_others_cannot_write(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda name, value: kept.append((name, value)))
    kept = []
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend.keep_compiled()
    (folder,) = (tmp_path / "cxda_jax" / "compiled").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700 and kept == [("jax_compilation_cache_dir", str(folder))]
    folder.chmod(0o777)
    with pytest.raises(UserError, match=f"^{folder}: others can write"):
        backend.keep_compiled()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    backend.keep_compiled()
    assert kept[1:] == [("jax_compilation_cache_dir", str(tmp_path / "mine"))]
