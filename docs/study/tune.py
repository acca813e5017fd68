"""Chooses the learning rates of the study, on validation domains. In a clone, with the data in --data_dir:

python -m docs.study.tune --data_dir=DATA --folder=runs/tuning

The rule is the same for all methods, and was written before any test: each one trains at three rates, seed 0, at the
length of its config. The rate counts whose best checkpoint has the highest mean accuracy on 300 validation tasks; of
equal ones the smaller. Where that is the first or the last of the three, one more training is made beyond it. The
number of steps is chosen with it, since the best checkpoint is one of those that were validated. The test that ends a
training has one task, and nobody reads it.

The methods that fine-tune have no training of their own. Their rate is a share of erm's: `finetune.rate`, a tenth
in the paper. Each is tried at four shares on 100 validation tasks, from erm at its chosen rate. The share counts
that is best; of equal ones the smaller.

It writes all validation scores and the choices to docs/study/tuning.json, and goes on where it was stopped: what is in that file is
not trained again.
"""

import argparse
import concurrent.futures as futures
import json
import subprocess
import sys
import time
from pathlib import Path

from cxda_jax.disk.reading import read_lines
from cxda_jax.progress import duration

CHOSEN = Path(__file__).parent / "tuning.json"
BENCHMARKS = {"unipen": "unipen:{}", "cifar10_c": "cifar10_c:{},small"}
METHODS = ("erm_iid", "cxda_any", "icrm", "cxda_loo", "cxda", "bn", "erm", "cml")
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
FIRST = RATES[1:4]
TASKS = 300
FINE_TUNE = ("ft_em", "ft_im", "sf_ocda", "cotta")
SHARES = (0.01, 0.03, 0.1, 0.3)
PAPER_SHARE = 0.1  # the default, which tests do not name
SHARE_TASKS = 100


def train(benchmark: str, method: str, rate: float, folder: Path, data_dir: str) -> dict[str, float]:
    """The best validation of one training, its step, and the minutes."""
    workdir = folder / benchmark / f"{method}-{rate:g}"
    fields = {"optimizer.learning_rate": rate, "evaluation.val_tasks": TASKS, "evaluation.test_tasks": 1}
    flags = [f"--config={BENCHMARKS[benchmark].format(method)}", f"--workdir={workdir}", f"--data_dir={data_dir}"]
    flags += [f"--config.{name}={value}" for name, value in fields.items()]
    workdir.mkdir(parents=True, exist_ok=True)
    if not (workdir / "result.json").exists():
        with open(workdir.with_name(f"{workdir.name}.log"), "a") as log:
            ended = subprocess.run([sys.executable, "-m", "cxda_jax", "train", *flags], stdout=log, stderr=log)
        if ended.returncode and not (workdir / "nonfinite.json").exists():
            raise SystemExit(f"{workdir}: failed; see {log.name}")
    scores = {line["step"]: line["val_score"] for line in read_lines(workdir / "metrics.jsonl") if "val_score" in line}
    if not (workdir / "result.json").exists():  # the loss was not finite: a rate that is too large
        return {"val": 0.0, "step": 0, "steps": 0, "minutes": 0.0}
    best = max(scores, key=lambda step: scores[step])
    result = json.loads((workdir / "result.json").read_text())
    minutes = round(result["train_minutes"], 1)
    return {"val": round(100 * scores[best], 2), "step": best, "steps": result["steps"], "minutes": minutes}


def chosen(scores: dict[float, dict[str, float]]) -> float:
    """The rate with the highest validation; of equal ones the smaller."""
    return min(scores, key=lambda rate: (-scores[rate]["val"], rate))


def next_rate(scores: dict[float, dict[str, float]]) -> float | None:
    """The rate to try next; None where the choice is made."""
    for rate in (*FIRST[::-1], RATES[0], RATES[-1]):
        needed = rate in FIRST or (
            len(scores) == len(FIRST) and abs(RATES.index(chosen(scores)) - RATES.index(rate)) == 1
        )
        if needed and rate not in scores:
            return rate
    return None


def tune(benchmark: str, method: str, folder: Path, data_dir: str) -> dict[float, dict[str, float]]:
    """All trainings of a method."""
    scores: dict[float, dict[str, float]] = {}
    while rate := next_rate(scores):
        scores[rate] = train(benchmark, method, rate, folder, data_dir)
    return scores


def fine_tune(benchmark: str, rate: float, folder: Path, data_dir: str) -> dict[str, dict[float, dict[str, float]]]:
    """By method that fine-tunes: its validation at each share of erm's rate, from erm's training of this tuning."""
    train(benchmark, "erm", rate, folder, data_dir)
    run = folder / benchmark / f"erm-{rate:g}"
    scores: dict[str, dict[float, dict[str, float]]] = {method: {} for method in FINE_TUNE}
    for share in SHARES:
        told = {method: run / f"{method},finetune.rate={share:g},validation" / "result.json" for method in FINE_TUNE}
        if todo := [method for method, path in told.items() if not path.exists()]:
            flags = [f"--runs={run}", f"--methods={','.join(todo)}", f"--config.finetune.rate={share}", "--validation"]
            flags += [f"--num_tasks={SHARE_TASKS}", f"--data_dir={data_dir}"]
            with open(run.with_name("fine_tune.log"), "a") as log:
                start = [sys.executable, "-m", "cxda_jax", "evaluate"]
                subprocess.run([*start, *flags], stdout=log, stderr=log, check=True)
        for method, path in told.items():
            scores[method][share] = {"val": round(json.loads(path.read_text())["avg"], 2)}
    return scores


def label(method: str, share: float) -> str:
    """The name of results of a method that fine-tunes."""
    return method if share == PAPER_SHARE else f"{method},finetune.rate={share:g}"


def shares(benchmark: str) -> dict[str, float]:
    """By method that fine-tunes: the share of erm's rate that was chosen; nothing where none was."""
    told = json.loads(CHOSEN.read_text()).get("shares", {}) if CHOSEN.exists() else {}
    return {method: of["rate"] for method, of in told.get(benchmark, {}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="where `cxda prepare` put unipen and cifar10_c")
    parser.add_argument("--folder", type=Path, default=Path("runs/tuning"), help="of the trainings")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="benchmarks; all if empty")
    parser.add_argument("--workers", type=int, default=2, help="trainings at once")
    args = parser.parse_args()
    began = time.monotonic()
    told = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {"seed": 0, "tasks": TASKS, "rates": {}}
    with futures.ThreadPoolExecutor(args.workers) as pool:
        wanted = args.only or list(BENCHMARKS)
        todo = [(b, m) for b in wanted for m in METHODS if m not in told["rates"].get(b, {})]
        jobs = {pool.submit(tune, b, m, args.folder, args.data_dir): (b, m) for b, m in todo}
        for done, job in enumerate(futures.as_completed(jobs), 1):
            benchmark, method = jobs[job]
            tried = keep(told, "rates", benchmark, {method: job.result()}, METHODS)[method]["tried"]
            rest = (time.monotonic() - began) / done * (len(jobs) - done)
            print(f"[{done}/{len(jobs)}] {benchmark} {method}: {said(tried)}  eta {duration(rest)}", flush=True)
        todo = [b for b in wanted if b not in told.get("shares", {})]
        rates = {b: told["rates"][b]["erm"]["rate"] for b in todo}
        print(*(f"{b}: fine-tuning erm; see {args.folder / b / 'fine_tune.log'}" for b in todo), sep="\n", flush=True)
        jobs = {pool.submit(fine_tune, b, rates[b], args.folder, args.data_dir): b for b in todo}
        for job in futures.as_completed(jobs):
            for method, entry in keep(told, "shares", jobs[job], job.result(), FINE_TUNE).items():
                print(f"{jobs[job]} {method}, share of the rate: {said(entry['tried'])}", flush=True)


def keep(told: dict, what: str, benchmark: str, scores: dict[str, dict[float, dict]], methods: tuple[str, ...]) -> dict:
    """Writes the scores of methods to CHOSEN, in order, and returns what is known of the benchmark."""
    known = told.setdefault(what, {}).setdefault(benchmark, {})
    for method, of in scores.items():
        known[method] = {"rate": chosen(of), "tried": {f"{rate:g}": of[rate] for rate in sorted(of)}}
    told[what] = {
        b: {m: told[what][b][m] for m in methods if m in told[what][b]} for b in BENCHMARKS if b in told[what]
    }
    CHOSEN.write_text(json.dumps(told, indent=1) + "\n")
    return told[what][benchmark]


def said(tried: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{rate}: {of['val']:.1f}" for rate, of in tried.items())


if __name__ == "__main__":
    main()
