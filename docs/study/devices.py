"""What fit() gains on devices that taught nothing, by the shares of their classes, beside naive ways.

python -m docs.study.devices OUT.json SEEDS NAME=FEATURES.npz [NAME=FEATURES.npz ...]
python -m docs.study.devices OUT.json FIGURE.png                                       a figure of these
python -m docs.study.devices OUT.json                                                  tables of these

A file is of `cxda features`: features without logits, style, labels and domains. The domains are dealt into three
parts, each of which is new in turn: of the others, two fifths teach a head by logistic regression and three fifths go
to fit(). Where the names of domains begin with their splits, test- is new and train- takes the place of the others. A
file with logits has a head already. Every new device is asked for the same number of tasks, of 100 images and 20
queries; with two classes, for five times as many. Intervals are over devices.

Where each device has enough images of each class, shares are replayed too: a task has those of a real day or camera,
from class_counts.json. The classes correspond by a random order. In a stream the images of a device come in the order
of RoTTA (Yuan, Xie and Li, CVPR 2023): each class is spread over slots by a Dirichlet. The buffer has 100 successive
images, and the queries are those after them. Where names of files tell when images were taken, there is a stream in
that order too.
"""

import json
import math
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from cxda_jax.adapter.diagnosis import Diagnosis
from cxda_jax.adapter.features import Labelled
from cxda_jax.adapter.head import learn_head
from cxda_jax.adapter.settling import RARE
from cxda_jax.data.episodes import Draw, EpisodeSpec, Plan, sample_plans
from cxda_jax.data.store import SPLITS
from cxda_jax.training.metrics import interval_over_groups
from cxda_jax.training.selection import with_floor
from docs.study.parts import BOTH, NAMES, OURS, OWN, PLAIN, REFIT, fitted, named

PARTS, HEAD = 3, 0.4
KINDS = (
    (1, "natural", 1.0), (1, "dirichlet", 0.3), (1, "even", 1.0), (5, "natural", 1.0), (5, "dirichlet", 0.3),
    (1, "stream", 0.1),
)  # fmt: skip
EACH, OF_TWO = 10, 5  # tasks of a device and kind; times so many with two classes, as few tasks then have a rare one
BUFFER, QUERIES = 100, 20
SIZES = 0, 5, 20  # smaller buffers
LEAST = BUFFER + QUERIES
SLOTS = 100  # of a stream
TAKEN = re.compile(r"_(\d{8}_\d{6})_cell_(\d+)")  # the time of a photograph, and the number of the cell in it
REPLAYED, OF_EACH = ("weeds", "cameras"), 60  # keys of class_counts.json; images of each class that a device must have
WORDS = {
    "1 domain": "one", "5 domains": "five mixed", "even": "balanced", "stream": "a stream",
    "order taken": "a stream as taken", "days of weeds": "replayed days of weeds", "cameras": "replayed cameras",
}  # fmt: skip
UNBOUND = f"{OURS}, floor 0"
COLUMNS = {
    REFIT: "last layer of features", BOTH: "new last layer", OWN: "own style", NAMES["em"]: "EM",
    NAMES["own_em"]: "own style, EM", NAMES["unmix"]: "in clusters", UNBOUND: "`fit(floor=0)`", OURS: "`fit()`",
}  # fmt: skip
DRAWN = ("dirichlet 0.3", "even")
MADE = "cifar10_c"  # what names of sets whose devices are no real ones begin with
ENOUGH = 30  # images of rare classes, from which a kind of tasks tells of them
COUNTS = Path(__file__).with_name("class_counts.json")


def loaded(path):
    """The arrays of a file, sorted by domain, without devices that are too small for a task."""
    file = np.load(path)
    domain = file["domains" if "domains" in file.files else "domain"]
    names, numbers = np.unique(domain.astype(str), return_inverse=True)
    split = np.array([name.partition("-")[0] for name in names])
    kept = (file["labels"] >= 0) & (np.bincount(numbers)[numbers] >= LEAST)
    order = np.flatnonzero(kept)[np.argsort(numbers[kept], kind="stable")]
    data = {n: file[n][order] for n in ("features", "style", "labels", "logits") if n in file.files}
    data |= {"split": split[numbers[order]]} if {*split} <= {*SPLITS} else {}
    if "paths" in file.files and all(times := [TAKEN.search(path) for path in file["paths"][order]]):
        data["taken"] = np.argsort(np.lexsort(([int(t[2]) for t in times], [t[1] for t in times])))
    data["features"], data["labels"] = data["features"].astype(np.float32), data["labels"].astype(np.int32)
    return {**data, "domain": np.unique(numbers[order], return_inverse=True)[1]}


def dealt(data, seed):
    """The devices that are new, for each fit."""
    domains = np.unique(data["domain"])
    if "split" in data:
        return [np.unique(data["domain"][data["split"] == "test"])]
    order = np.random.default_rng([seed, 5]).permutation(domains)
    return [np.sort(order[i::PARTS]) for i in range(PARTS)]


def classified(data, new, seed):
    """The logits of all images, and the rows for fit()."""
    others = ~np.isin(data["domain"], new)
    if "split" in data:
        others &= data["split"] == "train"
    rows = np.flatnonzero(others)
    if "logits" in data:
        return data["logits"], rows
    teach = Labelled(None, *(data[name][rows] for name in ("labels", "domain", "style", "features")), {})
    left, head = learn_head(teach, HEAD, seed, lambda line: print(line, flush=True))
    return head(data["features"]), rows[np.isin(data["domain"][rows], np.unique(left.domains))]


def tasks_of(labels):
    """The tasks of each device and kind."""
    return EACH * (OF_TWO if labels.max() == 1 else 1)


def kinds_of(data):
    """KINDS, and what can be replayed."""
    of_each = np.zeros((data["domain"].max() + 1, data["labels"].max() + 1), int)
    np.add.at(of_each, (data["domain"], data["labels"]), 1)
    kinds = (*KINDS, *[(1, "order taken", 1.0)] * ("taken" in data))
    return (*kinds, *((n, name, 1.0) for n in (1, 5) for name in REPLAYED if of_each.min() >= OF_EACH))


def replayed(labels, rows, name, seed):
    """Tasks of one device, each with the class shares of a random day or camera. Images of the buffer repeat where the
    device has too few of a class."""
    rng, plans = np.random.default_rng([seed, 7, rows[0]]), []
    counts = np.array(json.loads(COUNTS.read_text())[name]["devices"], float)
    matched = np.random.default_rng([seed, 8]).permutation(labels.max() + 1)  # the same for all devices
    for _ in range(tasks_of(labels)):
        shares = rng.choice(counts)
        drawn = matched[rng.choice(len(shares), LEAST, p=shares / shares.sum())]
        task = np.zeros(LEAST, int)
        for label in np.unique(drawn):
            at, own = np.flatnonzero(drawn == label), rng.permutation(rows[labels[rows] == label])
            asked = at >= BUFFER
            task[at[asked]], task[at[~asked]] = own[: asked.sum()], np.resize(own[asked.sum() :], (~asked).sum())
        plans.append(task)
    return Plan(*np.split(np.array(plans), [BUFFER], axis=1))


def streamed(labels, rows, concentration, seed):
    """The images of one device, class after class."""
    rng, slots = np.random.default_rng([seed, 9, rows[0]]), [[] for _ in range(SLOTS)]
    for label in np.unique(labels[rows]):
        own = rng.permutation(rows[labels[rows] == label])
        cuts = rng.dirichlet(np.full(SLOTS, concentration)).cumsum()[:-1] * len(own)
        for slot, part in zip(slots, np.split(own, np.round(cuts).astype(int)), strict=True):
            slot.append(part)
    return np.concatenate([slot[i] for slot in slots for i in rng.permutation(len(slot))])


def in_order(order, count):
    """So many tasks of one device, from evenly spread places of a stream."""
    starts = np.linspace(0, len(order) - LEAST, count).astype(int)
    return Plan(*np.split(order[starts[:, None] + np.arange(LEAST)], [BUFFER], axis=1))


def plans_of(data, new, number, shares, concentration, seed):
    """Tasks of each new device: it has the queries, and at least a part of the buffer."""
    labels, count = data["labels"], tasks_of(data["labels"])
    offsets, found = np.searchsorted(data["domain"], np.arange(data["domain"].max() + 2)), []
    for device in new:
        own = np.arange(*offsets[device : device + 2])
        if shares in REPLAYED:
            found.append(replayed(labels, own, shares, seed))
        elif shares == "stream":
            found.append(in_order(streamed(labels, own, concentration, seed), count))
        elif shares == "order taken":
            found.append(in_order(own[np.argsort(data["taken"][own])], count))
        else:
            spec = EpisodeSpec(1, BUFFER, QUERIES, shares=shares, concentration=concentration)
            found.append(sample_plans(Draw(spec, offsets, np.array([device]), seed, 2, labels), range(count)))
    plan = Plan(*(np.concatenate(part) for part in zip(*found, strict=True)))
    if number == 1:
        return plan
    rng, each = np.random.default_rng([seed, 6]), BUFFER // number
    support = plan.support.copy()
    for i, own in enumerate(np.repeat(np.arange(len(new)), count)):
        others = rng.choice(np.delete(np.arange(len(new)), own), number - 1, replace=False)
        buffers = [plan.support[d * count + rng.integers(count), :each] for d in others]
        support[i] = np.concatenate([plan.support[i, :each], *buffers])
    return Plan(support, plan.query)


def one_fit(data, new, seed):
    """By kind: which device asks, whether each answer is right by row, and whether its class is rare in the buffer."""
    z, rows = classified(data, new, seed)
    adapter, seconds, _, answers = fitted(data, z, rows, seed)
    always, found, labels, style = adapter.trusted(), {}, data["labels"], data["style"]
    unbound = always._replace(variables=with_floor(always.variables, 0.0))

    def asked(adapter, plan, n):
        buffers = plan.support[:, :: BUFFER // n] if n else plan.support[:, :0]
        each = [
            adapter.adapt(z[s], style[s]).predict_logits(z[q], style[q])
            for s, q in zip(buffers, plan.query, strict=True)
        ]
        return np.stack(each).argmax(-1) == labels[plan.query]

    for kind in kinds_of(data):
        plan = plans_of(data, new, *kind, seed)
        y = labels[plan.query]
        right = {name: x.argmax(-1) == y for name, x in answers(plan).items()}
        right |= {f"{OURS}, {n} images": asked(always, plan, n) for n in SIZES}
        right[UNBOUND] = asked(unbound, plan, BUFFER)
        rare = (labels[plan.support][:, None] == y[..., None]).sum(-1) <= RARE
        found[named(*kind)] = np.repeat(new, tasks_of(labels)), right, rare
    told = {kind: np.round(row[str(BUFFER)], 2).tolist() for kind, row in adapter.report["gain"].items()}
    gains = {kind: (right[OURS].mean() - right[PLAIN].mean()) * 100 for kind, (_, right, _) in found.items()}
    notes = {"seed": seed, "new": len(new), "images for fit()": len(rows), "seconds": round(seconds)}
    notes |= {"domains for fit()": len(np.unique(data["domain"][rows]))}
    notes |= {name: adapter.report[name] for name in ("takes", "floor", "rare", "floors", "beyond_turns")}
    notes |= {"trusted": adapter.helps, "diagnosed": diagnosed(adapter.report["headroom"]), "told": told}
    return found, {**notes, "found": {kind: round(float(gain), 2) for kind, gain in gains.items()}}


def diagnosed(headroom):
    """What `cxda diagnose` foretells, by kind: the gain of what follows from shares alone."""
    return {kind: round(Diagnosis(headroom, 0.0).expected(kind), 2) for kind in headroom}


def effective(data, device):
    """The number of classes of a device, exp of the entropy of their shares, as a part of that in all images."""

    def count(labels):
        shares = np.bincount(labels) / len(labels)
        return np.exp(-(shares * np.log(np.maximum(shares, 1e-12))).sum())

    return float(count(data["labels"][data["domain"] == device]) / count(data["labels"]))


def summary(data, fits):
    """By kind and row the accuracy, the gain and what is recalled of rare classes, each with its interval; and each
    device's gains."""
    table, points = {}, []
    for kind in fits[0][0]:
        owner = np.concatenate([found[kind][0] for found, _ in fits])
        rare = np.concatenate([found[kind][2] for found, _ in fits])
        some, table[kind] = rare.any(1), {}
        right = {name: np.concatenate([found[kind][1][name] for found, _ in fits]) for name in fits[0][0][kind][1]}
        recall = {name: (x & rare)[some].sum(1) / rare[some].sum(1) for name, x in right.items()}
        for name, x in right.items():
            gains, plain = [x.mean(1) - right[PLAIN].mean(1)], [x.mean(1)]
            row = {"avg": 100 * float(interval_over_groups(np.stack(plain), owner)[0, 0])}
            row["gain"] = (100 * interval_over_groups(np.stack(gains), owner)[0]).round(2).tolist()
            if len(np.unique(owner[some])) > 1:
                both = np.stack([recall[name], recall[name] - recall[PLAIN]])
                spans = 100 * interval_over_groups(both, owner[some])
                row |= {"rare": round(float(spans[0, 0]), 2), "rare gain": spans[1].round(2).tolist()}
                row["rare queries"] = int(rare.sum())
            table[kind][name] = {**row, "avg": round(row["avg"], 2)}
        if kind == named(*KINDS[0]):
            for device in np.unique(owner):
                own = owner == device
                gains = {name: 100 * float((x - right[PLAIN])[own].mean()) for name, x in
                         ((name, x.astype(float)) for name, x in right.items())}  # fmt: skip
                points.append({"classes": round(effective(data, device), 3),
                               **{name: round(gain, 2) for name, gain in gains.items()}})  # fmt: skip
    return {"runs": [notes for _, notes in fits], "devices": len(points), "table": table, "points": points}


def draw(record, out):
    """Gain against the effective number of classes, a point for each device; those that were made are hollow."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, row in zip(axes, (OURS, NAMES["em"]), strict=True):
        for i, (name, found) in enumerate(record.items()):
            x, y = ([point[key] for point in found["points"]] for key in ("classes", row))
            colour, label = f"C{i}", f"{name}, {len(x)} devices"
            inside = "none" if name.startswith(MADE) else colour
            axis.scatter(x, y, s=14, alpha=0.7, facecolors=inside, edgecolors=colour, label=label)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=row, xlabel="effective number of classes of a device, part of all")
    axes[0].set_ylabel("gain with 100 images, points")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(out, dpi=110)


def in_words(kind):
    number, shares = kind.split(", ")
    return f"{WORDS[number]}, {WORDS.get(shares, shares).replace('dirichlet', 'Dirichlet')}"


def in_cells(span):
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*span)


def row_of(*cells):
    return f"| {' | '.join(cells)} |"


def tables(record):
    """The lines of the page's tables: gains with shares that are real, replayed or a stream's; with drawn shares; and
    recall of rare classes."""
    each = [(f"`{name}`", kind, rows) for name, found in record.items() for kind, rows in found["table"].items()]
    for drawn in (False, True):
        yield row_of("set", "devices in the buffer", "none, %", *COLUMNS.values())
        yield f"|{'---|' * (3 + len(COLUMNS))}"
        for name, kind, rows in each:
            if kind.endswith(DRAWN) == drawn:
                cells = [f"{rows[row]['gain'][0]:+.1f}" if row in rows else "" for row in COLUMNS][:-1]
                yield row_of(name, in_words(kind), f"{rows[PLAIN]['avg']:.1f}", *cells, in_cells(rows[OURS]["gain"]))
        yield ""
    shown = (NAMES["em"], NAMES["own_em"], OWN, UNBOUND, OURS)
    yield row_of("set", "devices in the buffer", "such images asked", "none, %", *(COLUMNS[row] for row in shown))
    yield f"|{'---|' * (4 + len(shown))}"
    for name, kind, rows in each:
        if (asked := rows[PLAIN].get("rare queries", 0)) >= ENOUGH:
            cells = [f"{rows[row]['rare gain'][0]:+.1f}" if row in rows else "" for row in shown[:-1]]
            cells = [f"{asked:,}", f"{rows[PLAIN]['rare']:.1f}", *cells, in_cells(rows[OURS]["rare gain"])]
            yield row_of(name, in_words(kind), *cells)


def foretold(record):
    """By set and kind: the gains that diagnoses and the fits foretold, those found on their new devices, and how many
    of these lie inside the interval that a fit foretold, above and below it: as it is, and with the sampling error of
    these devices, as large for each as for one of those that judged. What all domains gain beyond those of a turn
    (`beyond_turns`) is added to the mean and to the upper end."""
    rows = {}
    for name, run in ((name, run) for name, found in record.items() for run in found["runs"]):
        for kind, (mean, low, high) in run["told"].items() if "domains for fit()" in run else ():
            of_kind, kind = kind, kind.replace("Dirichlet", "dirichlet").replace("even shares", "even")
            if (gain := run["found"].get(kind)) is not None:
                before, told, found, counts = rows.setdefault((name, kind), ([], [], [], np.zeros((2, 3), int)))
                more = run["beyond_turns"]
                before.append(run["diagnosed"][of_kind])
                told.append(mean + more)
                found.append(gain)
                for i, wider in enumerate((1.0, math.sqrt(1 + run["domains for fit()"] / run["new"]))):
                    below, above = gain < mean - wider * (mean - low), gain > mean + more + wider * (high - mean)
                    counts[i, 2 if below else 1 if above else 0] += 1
    return rows


def foretold_table(record):
    """The lines of a table of foretold()."""
    columns = "diagnosed", "foretold", "found", "inside, above, below", "the same with the new devices' error"
    yield row_of("set", "devices in the buffer", *columns)
    yield f"|{'---|' * 7}"
    rows, total = foretold(record), np.zeros((2, 3), int)
    for (name, kind), (*gains, counts) in rows.items():
        total += counts
        cells = [", ".join(map(str, of)) for of in counts.tolist()]
        yield row_of(f"`{name}`", in_words(kind), *(f"{np.mean(of):+.1f}" for of in gains), *cells)
    yield row_of("all", "", "", "", "", *(", ".join(map(str, of)) for of in total.tolist()))


def main():
    if len(sys.argv) == 2:
        record = json.loads(Path(sys.argv[1]).read_text())
        print("\n".join([*tables(record), "", *foretold_table(record)]))
        return None
    if len(sys.argv) == 3:
        with open(sys.argv[1]) as file:
            return draw(json.load(file), sys.argv[2])
    out, seeds, sets = sys.argv[1], int(sys.argv[2]), dict(each.split("=", 1) for each in sys.argv[3:])
    record = {}
    for name, path in sets.items():
        data, fits = loaded(path), []
        for seed in range(seeds):
            for new in dealt(data, seed):
                with ProcessPoolExecutor(1, get_context("spawn")) as own:  # else compiled programs fill the memory
                    fits.append(own.submit(one_fit, data, new, seed).result())
                record[name] = summary(data, fits)
                print(name, fits[-1][1], flush=True)
                for kind, rows in record[name]["table"].items():
                    gains = {row: (x["gain"][0], x.get("rare gain", [None])[0]) for row, x in rows.items()}
                    print(" ", kind, gains, flush=True)
        with open(out, "w") as file:
            lines = (f" {json.dumps(name)}: {json.dumps(each)}" for name, each in record.items())
            file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
