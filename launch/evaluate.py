"""Tests the best checkpoint of each run and prints one table.

python -m launch.evaluate --runs='runs/glyphs/*/*'
python -m launch.evaluate --runs='runs/glyphs/*/*' --methods=all
python -m launch.evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,cotta --config.finetune.steps=1
python -m launch.evaluate --runs=runs/glyphs/cxda/0 --num_tasks=2000
python -m launch.evaluate --runs='runs/glyphs/*/*' --against=bn
python -m launch.evaluate --runs='runs/glyphs/*/*' --num_domains=1,2,5,10,20 --support_size=10,20,50,100,200,500
python -m launch.evaluate --runs='runs/glyphs/erm/*' --methods=ft_em,ft_im --steps=1

A run directory is all it needs: the config, the data set and the weights follow from it. Writes result.json,
predictions.npz and, for methods that attend, attention.png into each run; what is tested on the checkpoint of another
method, or with changed fields, into a folder of its own there, such as runs/glyphs/erm/0/ft_em,finetune.steps=1.

--num_domains and --support_size test, in place of the usual tasks, tasks of that many support domains (and as many support
images as usual), or of that many support images; as many queries as there are support images of one domain. A program is
compiled once for each method and shape; checkpoints are data. What fails is named, and the rest goes on.
"""

import glob
import hashlib
import json
import platform
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import common
from cxda_jax import __version__, artefact, backend, checkpoints, files, metrics
from cxda_jax.analysis.attention import draw_attention
from cxda_jax.data.episodes import Plan
from cxda_jax.evaluate import Evaluator, TaskTable, compile_task, evaluate, time_task
from cxda_jax.experiment import (
    BENCHMARKS,
    METHODS,
    Config,
    Experiment,
    build,
    build_method,
    config_hash,
    lookup,
    open_data,
)
from cxda_jax.progress import Counter
from cxda_jax.reading import read_lines, read_object, require
from cxda_jax.types import Images, UserError, Variables, brief
from launch import cli

RUNS = flags.DEFINE_list("runs", [], "Run directories: quoted patterns, such as 'runs/glyphs/*/*'.")
flags.adopt_module_key_flags(cli)
_METHODS = flags.DEFINE_list(
    "methods",
    [],
    "What to test: names, or all. ft_em, ft_im, sf_ocda and cotta start from the runs of erm. Each run's own if empty.",
)
AGAINST = flags.DEFINE_string(
    "against", None, "A method among the runs: print each one's paired difference to it. In a report: paper."
)
_NUM_DOMAINS = flags.DEFINE_list("num_domains", [], "Test with so many support domains: 1,2,5,10,20.")
_SUPPORT_SIZE = flags.DEFINE_list("support_size", [], "Test with so many support images: 10,20,50,100,200,500.")
_STEPS = flags.DEFINE_list("steps", [], "Test what fine-tunes with so many steps: 1,10.")
_NUM_TASKS = flags.DEFINE_integer("num_tasks", None, "Test tasks; the config's number unless given.", lower_bound=1)

# Groups whose fields all go to the code that takes them.
WHOLE = tuple(f".{name}" for name in (
    "attention", "augment", "batch_norm", "cotta", "episode", "finetune", "optimizer", "sf_ocda", "sla", "strong",
))  # fmt: skip
# What --config.GROUP.FIELD may change here: all that a checkpoint does not depend on.
CHANGEABLE = ("batch_norm", "cotta", "episode", "evaluation", "finetune", "sf_ocda", "strong")


ATTENTION_TASKS = 24  # of which attention.npz keeps the weights

Changes = list[tuple[str, str]]  # --config.field=value


class Setting(NamedTuple):
    """Tasks of another form than a config's own: its name, such as num_domains=10, and the fields that differ."""

    name: str
    changes: Changes


OWN = Setting("", [])


class Job(NamedTuple):
    """A method to test on the checkpoint of a run, and where its results go."""

    run: Path
    folder: Path
    label: str
    config: Config
    setting: str = ""


def main() -> None:
    backend.keep_freed_memory()
    cli.keep_compiled()
    if not RUNS.value:
        raise UserError("--runs is missing; give a run directory or a quoted pattern such as 'runs/glyphs/*/*'")
    rows, scores, failures = [], {}, []
    kept: tuple[str, Experiment, Evaluator] | None = None
    jobs = find_jobs(find_runs(RUNS.value), _METHODS.value, cli.overrides(CHANGEABLE), asked_settings())
    if AGAINST.value:
        check_against(AGAINST.value, {job.label for job in jobs})  # now, not when all is tested
    for job in jobs:
        # Jobs that differ in their seed alone share one compiled program.
        shape = config_hash({**job.config, "seed": 0})
        try:
            if kept is None or kept[0] != shape:
                experiment = build(job.config, cli.DATA_DIR.value, splits=("test",))
                kept = (shape, experiment, compiled(experiment))
            experiment = kept[1]._replace(config=job.config)
            job.folder.mkdir(exist_ok=True)
            with files.locked(job.folder):
                rows.append(evaluate_run(job, experiment, kept[2], _NUM_TASKS.value))
        except UserError as e:
            if len(jobs) == 1:
                raise
            failures.append(f"{job.label} of {job.run}: {e}")
            print(f"failed: {failures[-1]}", flush=True)
            continue
        scores.setdefault(job.label, {})[job.config["seed"]] = stored_scores(job.folder, rows[-1])
        print(f"{job.folder}: {summary(rows[-1])}", flush=True)
    if rows:
        print(table(rows))
    if AGAINST.value:
        print(comparison(scores, AGAINST.value))
    if failures:
        raise UserError(f"{len(failures)} of {len(jobs)} evaluations failed; the first: {failures[0]}")


def asked_settings() -> list[Setting]:
    """What --num_domains, --support_size and --steps name; the usual tasks where they name nothing."""
    asked = [("num_domains", _NUM_DOMAINS), ("support_size", _SUPPORT_SIZE), ("finetune.steps", _STEPS)]
    return [setting(kind, text) for kind, flag in asked for text in flag.value] or [OWN]


def setting(kind: str, text: str) -> Setting:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"--{kind.removeprefix('finetune.')}={text[:40]}: give whole numbers of at least 1, such as 1,10"
        )
    return Setting(f"{kind}={int(text)}", [(kind, text)] if kind == "finetune.steps" else [])


def reshaped(config: Config, name: str) -> Config:
    """The config with the tasks that a setting's name asks for."""
    kind, _, number = name.partition("=")
    if kind not in ("num_domains", "support_size"):
        return config
    episode = config["episode"]
    support = int(number) if kind == "support_size" else episode["num_domains"] * episode["per_domain"]
    domains = int(number) if kind == "num_domains" else episode["num_domains"]
    if support < domains:
        raise UserError(f"--{name}: {support} support images cannot come from {domains} domains; ask for more images")
    each = support // domains
    return {**config, "episode": {**episode, "num_domains": domains, "per_domain": each, "num_query": each}}


def find_jobs(
    runs: list[Path], methods: list[str], changes: Changes, settings: Sequence[Setting] = (OWN,)
) -> list[Job]:
    """One job for each run, method that can be tested on it and setting; those of equal programs are neighbours."""
    for name in methods:
        if name not in METHODS and name != "all":
            raise UserError(f"--methods={brief(name, 30)}: no such method; choose from all, {', '.join(METHODS)}")
    jobs, stores = [], {}
    for run in runs:
        stored = read_config(run)
        own = stored["method"]
        data = json.dumps([stored["benchmark"], stored["data"]])
        if data not in stores:
            stores[data] = open_data(stored, cli.DATA_DIR.value)
        for name in METHODS if "all" in methods else methods or [own]:
            method = build_method(changed({**stored, "method": name}, changes), stores[data])
            if (method.trains_as or name) != own:
                continue
            for wanted in settings:
                if wanted.changes and method.feed_forward:
                    continue  # nothing to fine-tune
                config = reshaped(changed({**stored, "method": name}, [*changes, *wanted.changes]), wanted.name)
                label = ",".join([name, *("=".join(change) for change in changes), *filter(None, [wanted.name])])
                jobs.append(Job(run, run if label == own else run / label, label, config, wanted.name))
    missing = [name for name in methods if name != "all" and name not in {job.config["method"] for job in jobs}]
    if missing:
        raise UserError(
            f"--methods={missing[0]}: --runs={','.join(RUNS.value)} holds no run to test it on; train one first"
        )
    order = {label: i for i, label in reversed(list(enumerate(job.label for job in jobs)))}  # as first met
    return sorted(jobs, key=lambda job: (list(METHODS).index(job.config["method"]), order[job.label]))


def changed(config: Config, changes: Changes) -> Config:
    """The config with --config.field=value pairs applied."""
    fields = ConfigDict(config, convert_dict=True)
    for name, text in changes:
        cli.override(fields, name, text)
    return fields.to_dict()


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Directories that match and hold a config.json."""
    found = []
    for pattern in patterns:
        matches = [Path(p) for p in sorted(glob.glob(pattern))]
        runs = [p for p in matches if (p / "config.json").exists()]
        if not runs:
            what = "nothing that matches holds a config.json" if matches else "nothing matches"
            raise UserError(f"--runs={pattern}: {what}; name run directories that launch.train made")
        found += [run for run in runs if run not in found]
    return found


def read_config(workdir: Path) -> Config:
    """The run's config; fields younger than the run have their defaults."""
    path, fix = workdir / "config.json", "restore it or train again"
    stored = read_object(path, fix)
    require(stored, {"method": str, "benchmark": str, "seed": int, "data": dict}, f"{path}", fix)
    lookup(f"{path}: method", stored["method"], METHODS)
    lookup(f"{path}: benchmark", stored["benchmark"], BENCHMARKS)
    defaults = common.default().to_dict()
    check_kinds(stored, defaults, f"{path}: config", fix)
    return with_defaults(stored, defaults)


def check_kinds(config: Config, defaults: Config, where: str, fix: str) -> None:
    """Raises a UserError unless each field of `config` that has a default is of the default's kind."""
    unknown = [name for name in config if name not in defaults] if where.endswith(WHOLE) else []
    if unknown:
        raise UserError(f"{where}.{brief(unknown[0], 40)}: this version has no such field; {fix}")
    for name, default in defaults.items():
        value, at = config.get(name, default), f"{where}.{name}"
        if not _fits(value, default):
            like = "a group of fields" if isinstance(default, dict) else f"{default!r} or the like"
            raise UserError(f"{at}={brief(repr(value), 40)}: expected {like}; {fix}")
        if isinstance(default, dict):
            check_kinds(value, default, at, fix)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value that JSON has held is of the default's kind."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(type(v) is type(default[0]) for v in value)
    return type(value) in (int, float) if isinstance(default, float) else type(value) is type(default)


def with_defaults(config: Config, defaults: Config) -> dict[str, Any]:
    return {**defaults, **config} | {
        k: with_defaults(config.get(k, {}), v) for k, v in defaults.items() if isinstance(v, dict)
    }


def compiled(experiment: Experiment) -> Evaluator:
    return compile_task(experiment.method, experiment.source)


def score(experiment: Experiment, evaluator: Evaluator, variables: Variables, split: str, num_tasks: int) -> TaskTable:
    """Scores the first num_tasks tasks of a split."""
    return evaluate(
        evaluator,
        variables,
        experiment.source,
        experiment.task_plans(split),
        num_tasks,
        experiment.store.info.metric,
        experiment.config["evaluation"]["seed"],
        experiment.per_call,
        Counter(f"  {split} tasks", num_tasks),
    )


def evaluate_run(
    job: Job, experiment: Experiment, evaluator: Evaluator, num_tasks: int | None = None
) -> dict[str, Any]:
    """Tests the job's method on its run's best checkpoint; writes and returns its results row."""
    config, method = job.config, experiment.method
    variables, notes = restore_best(job, experiment)
    weights_hash = checkpoints.weights_hash(variables)
    if method.calibrate:
        variables = backend.jit(method.calibrate)(variables, experiment.calibration_images())
    num_tasks = int(num_tasks or config["evaluation"]["test_tasks"])
    tasks = score(experiment, evaluator, variables, "test", num_tasks)
    plan = experiment.task_plans("test")(range(num_tasks))
    episode = jax.tree.map(
        lambda x: x[0], jax.jit(experiment.source.assemble)(experiment.source.resident, _first(experiment))
    )
    adapt_ms, predict_ms = time_task(evaluator, variables, episode)
    metric = experiment.store.info.metric
    row = {
        "label": job.label,
        "setting": job.setting,
        "method": method.name,
        "version": method.version,
        "benchmark": config["benchmark"],
        "seed": config["seed"],
        "metric": metric,
        **averages(tasks.scores),
        "also": {name: averages(metrics.scores(metric, p, tasks.labels)) for name, p in tasks.also.items()},
        "calibration": jax.tree.map(float, variables.get("calibration", {})),
        "num_tasks": num_tasks,
        "task_ms": tasks.task_ms,
        "adapt_ms": adapt_ms,
        "predict_ms": predict_ms,
        "steps": experiment.schedule.steps,
        "best_step": notes["step"],
        "train_minutes": training_minutes(job.run),
        "config_hash": config_hash(config),
        "started_from": config["net"]["weights"] or "random",
        "weights_hash": weights_hash,
        "data_hash": experiment.store.sha256,
        "data_marks": list(experiment.store.info.marks),
        "device": device(),
        "package": __version__,
    }
    arrays: dict[str, Any] = {**plan._asdict(), "predictions": tasks.predictions, "labels": tasks.labels, **tasks.also}
    row["predictions_sha256"] = write_arrays(job.folder / "predictions.npz", arrays)
    files.write_text(job.folder / "result.json", json.dumps(row, indent=1) + "\n")
    if evaluator.attention and not job.setting:
        names, classes = experiment.store.domain_names, experiment.store.info.class_names
        adapted = evaluator.adapt(variables, episode.support, jax.random.key(0))
        answers, weights = (np.asarray(f(adapted, episode.query)) for f in (evaluator.predict, evaluator.attention))
        files.write_whole(
            job.folder / "attention.png",
            lambda partial: draw_attention(partial, episode, answers, weights, names, classes),
        )
        keep_attention(job.folder / "attention.npz", experiment, evaluator, variables, plan)
    return row


def restore_best(job: Job, experiment: Experiment) -> tuple[Variables, dict[str, Any]]:
    """The variables that validated best, and what is known of them: from a run's best/, or from a model's files."""
    like = jax.eval_shape(experiment.method.init, jax.random.key(0), experiment.example)
    found = checkpoints.restore(job.run / "best", like)
    if found is None and artefact.is_model(job.run):
        found = artefact.read_model(job.run, like)
    if found is None:
        raise UserError(f"{job.run}: no checkpoint in best/; train it: python -m launch.train ... --workdir={job.run}")
    return found


def keep_attention(path: Path, experiment: Experiment, evaluator: Evaluator, variables: Variables, plan: Plan) -> None:
    """Attention weights of the first tasks [tasks, queries, heads, support], and each image's domain."""
    store, attention = experiment.store, evaluator.attention
    assert attention
    domains, weights = store.row_domains(), []

    def images(rows: np.ndarray) -> Images:
        return Images(jnp.asarray(store.images[rows]), jnp.asarray(domains[rows]))

    for support, query in zip(*(rows[:ATTENTION_TASKS] for rows in plan), strict=True):
        adapted = evaluator.adapt(variables, images(support), jax.random.key(0))
        weights.append(np.asarray(attention(adapted, images(query)), np.float16))
    count = len(weights)
    arrays: dict[str, Any] = {
        "support_domain": domains[plan.support[:count]],
        "query_domain": domains[plan.query[:count]],
    }
    write_arrays(path, {"weights": np.stack(weights), **arrays})


def write_arrays(path: Path, arrays: dict[str, Any]) -> str:
    """Writes a .npz file and returns its SHA-256."""
    files.write_whole(path, lambda partial: np.savez_compressed(partial, **arrays))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def averages(scores: np.ndarray) -> dict[str, float]:
    return {"avg": 100 * float(scores.mean()), "w10": 100 * metrics.worst_decile(scores)}


def stored_scores(workdir: Path, row: dict[str, Any]) -> np.ndarray:
    """Scores [tasks] from the stored predictions."""
    with np.load(workdir / "predictions.npz", allow_pickle=False) as stored:
        return metrics.scores(row["metric"], stored["predictions"], stored["labels"])


def check_against(against: str, labels: Collection[str]) -> None:
    if against not in labels:
        known = brief(", ".join(sorted(labels)), 100)
        raise UserError(f"--against={brief(against, 30)}: no such method among the runs; choose from {known}")


def comparison(scores: dict[str, dict[int, np.ndarray]], against: str) -> str:
    """Each method's mean score minus that of `against`, over the seeds that both have and the tasks all share."""
    check_against(against, scores)
    lines = ["paired differences, 95 % bootstrap interval over the shared tasks:"]
    for method, found in scores.items():
        seeds = sorted(found.keys() & scores[against].keys())
        if method == against or not seeds:
            continue
        ours, theirs = (np.stack([s[seed] for seed in seeds]) for s in (found, scores[against]))
        mean, low, high = (100 * v for v in metrics.paired_difference(ours, theirs))
        names = ",".join(map(str, seeds))
        lines.append(f"{method} - {against}  {mean:+.2f}  [{low:+.2f}, {high:+.2f}]  seeds {names}")
    return "\n".join(lines)


def training_minutes(workdir: Path) -> float | None:
    """From the start of the training to its last validation, over all resumptions; None where no metrics came along."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return None
    return max((line.get("seconds", 0.0) for line in read_lines(path)), default=0.0) / 60


def _first(experiment: Experiment) -> Any:
    return next(iter(experiment.source.batches(lambda _: experiment.task_plans("test")(range(1)), 0, 1)))


def device() -> str:
    return f"{jax.devices()[0].device_kind} x{jax.device_count()} ({platform.machine()}), jax {jax.__version__}"


def summary(row: dict[str, Any]) -> str:
    also = "".join(f"  ({name}: {found['avg']:.1f}, {found['w10']:.1f})" for name, found in row["also"].items())
    return (
        f"{row['label']} seed {row['seed']}  Avg {row['avg']:.1f}  W10% {row['w10']:.1f}{also}  "
        f"{row['task_ms']:.1f} ms/task  weights {row['weights_hash'][:12]}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and standard error over seeds, one line per benchmark, method and number of tasks; ms of one task alone."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    footnotes: dict[str, str] = {}
    for row in rows:
        marks = row.get("data_marks", [])
        groups.setdefault((row["benchmark"] + "*" * bool(marks), row["label"], row["num_tasks"]), []).append(row)
        if marks:
            footnotes[row["benchmark"]] = f"* {row['benchmark']}: {', '.join(marks)}; not the published data"
    wide = max(18, *(len(row["label"]) + 2 for row in rows))
    lines = [
        f"{'benchmark':<17}{'method':<{wide}}{'seeds':<8}{'tasks':>6}  {'Avg':>13}  {'W10%':>13}  {'adapt ms':>9}"
        f"  {'predict ms':>10}"
    ]
    for (benchmark, label, num_tasks), group in groups.items():
        cells = ["{:.1f} +- {:.1f}".format(*metrics.mean_sem(np.array([r[k] for r in group]))) for k in ("avg", "w10")]
        cells = [cell.replace(" +- nan", "") for cell in cells]
        seeds = ",".join(str(r["seed"]) for r in group)
        adapt_ms, predict_ms = (np.median([r[k] for r in group]) for k in ("adapt_ms", "predict_ms"))
        lines.append(
            f"{benchmark:<17}{label:<{wide}}{seeds:<8}{num_tasks:>6}  {cells[0]:>13}  {cells[1]:>13}  {adapt_ms:>9.1f}"
            f"  {predict_ms:>10.1f}"
        )
    return "\n".join([*lines, *footnotes.values()])


if __name__ == "__main__":
    cli.run(main)
