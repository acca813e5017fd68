"""The study's tables about its records: rates, benchmarks, what was planned, and what it cost."""

import json
from pathlib import Path
from typing import Any

from docs.study import run, tune
from docs.study.evidence import CHANGED
from docs.study.tables import FULL_CURVES, SIZES, STORES, Studies, at, table

HERE = Path(__file__).parent


def rates(studies: Studies) -> str:
    """The rates that the validation domains chose."""
    rows = []
    for what, unit in (("rates", ""), ("shares", " of `erm`'s")):
        for store, of_store in tuning().get(what, {}).items():
            for method, entry in of_store.items():
                tried = ", ".join(f"{rate}: {of['val']:.1f}" for rate, of in entry["tried"].items())
                rows.append([f"`{store}`, `{method}`", f"{entry['rate']:g}{unit}", tried])
    return table(["", "rate", "validation accuracy at each rate"], rows)


def tuning() -> dict[str, dict[str, Any]]:
    """tuning.json: what validation scored each rate, by store and method."""
    path = HERE / "tuning.json"
    return json.loads(path.read_text()) if path.exists() else {"rates": {}}


def benchmarks(studies: Studies) -> str:
    """The facts that make results comparable: hashes of the data, and of the
    questions and supports of the usual tasks."""
    rows = []
    for store in (store for store in STORES if store in studies):
        evidence = studies[store]
        usual = [r for (_, setting), of in evidence.rows.items() if not setting for r in of.values()]
        tasks = {(str(r["num_tasks"]), r["recorded"]["query"], r["recorded"]["support"]) for r in usual}
        data = {r["data_hash"] for r in usual}
        assert len(tasks) == len(data) == 1, f"{store}: results of different tasks or data"
        rows += [
            [f"`{store}`, version 1", f"`{min(data)}`", tasks[0], *(f"`{text}`" for text in tasks[1:])]
            for tasks in tasks
        ]
    return table(["benchmark", "SHA-256 of the data", "tasks", "of their questions", "of their supports"], rows)


def plan(studies: Studies) -> str:
    """The parts to be recorded, and those that are."""
    rows = []
    for name, planned in run.SEEDS.items():
        have = [seed for seed in range(planned) if (run.RECORDS / f"{name}-{seed}.records").exists()]
        others = {
            "unipen_changes": run.CHANGES,
            "unipen_spread": run.REPEATED,
            "unipen_cells": run.CELLS,
            "cifar10_c_curves": run.CURVED,
        }
        what = others.get(name) or (tune.FINE_TUNE if name in run.SHARES else run.PARTS[name].methods)
        said = ", ".join(map(str, have)) or "none yet"
        curves = studies[name].scores.get(at("cxda", SIZES[-2]), {}) if name in studies else {}
        rows.append(
            [f"`{name}`", ", ".join(f"`{m}`" for m in what), str(planned), said, ", ".join(map(str, sorted(curves)))]
        )
    return table(
        ["part", "what is trained or starts from a training", "seeds planned", "recorded", "with fewer images too"],
        rows,
    )


def cost(studies: Studies) -> str:
    """Trainings and minutes of each data set, and of all."""
    # Of each: trainings, their minutes, those that were best at their last step, and tests.
    counts: dict[str, tuple[float, ...]] = {}
    made_on: dict[str, list[str]] = {}  # machines and commits
    for store, evidence in sorted(studies.items()):
        apart = store.endswith(CHANGED)  # there equal weights may be of two trainings
        runs = {(r["weights_hash"], label * apart): r for (label, _), of in evidence.rows.items() for r in of.values()}
        devices, commits = (
            {*values} for values in zip(*((r["device"], r["recorded"]["commit"]) for r in runs.values()), strict=True)
        )
        minutes = sum(r["train_minutes"] or 0 for r in runs.values())
        ends = sum(r.get("best_step") == r["steps"] for r in runs.values())
        tested = sum(map(len, evidence.scores.values()))
        # The models of FULL_CURVES were trained for FULL, which counts them.
        counts[f"`{store}`"] = (0, 0, 0, tested) if store == FULL_CURVES else (len(runs), minutes, ends, tested)
        made_on[f"`{store}`"] = ["; ".join(sorted(devices)), ", ".join(sorted(commits))]
    of_stores = tuning()["rates"].values()
    tried = [one for of_store in of_stores for entry in of_store.values() for one in entry["tried"].values()]
    ends = sum(one["step"] == one["steps"] for one in tried)
    counts["choice of rates"] = len(tried), sum(one["minutes"] for one in tried), ends, 0
    counts["all"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    rows = [[name, *(f"{count:,.0f}" for count in of), *made_on.get(name, ["", ""])] for name, of in counts.items()]
    return table(["", "trainings", "minutes", "best at the last step", "tests", "machine", "commit"], rows)
