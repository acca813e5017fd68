"""The tables of the study, as Markdown, one function each. detail_tables.py and spread_tables.py have more."""

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from cxda_jax.metrics import mean_sem
from cxda_jax.report.tables import STAND_INS, paper_figures
from docs.study import run, tune
from docs.study.evidence import Evidence, Gap, Key

MAIN = ("unipen", "cifar10_c")
FULL, FULL_CURVES = "cifar10_c_full", "cifar10_c_curves"  # the parts with the paper's width and length
STORES = (*MAIN, "unipen_sizes", "qmnist", "glyphs", "glyphs_c")
RIVALS = ("erm", "erm_iid", "bn", "cml", "ft_em", "ft_im", "sf_ocda", "cotta", "sla")  # of question 1
CHOSEN = {method: f"{method}, chosen" for method in tune.FINE_TUNE}  # rivals at the rate that validation chose
BASE = run.BASE  # what a method that adapts has to beat
UNTRAINED = tuple(f"{name},from={BASE}" for name in ("bn_alpha", "feature_shift", "lame", "t3a"))
FORWARD = ("cxda_any", "icrm", "cxda_loo", "cxda", "bn", "cml", *UNTRAINED)  # of question 2
LEVELS = ("erm", *FORWARD, *tune.FINE_TUNE, "sla")
SUMMARY = {
    "bn": "its statistics", "cxda": "the paper's cross-attention", BASE: "not at all; trained on shuffled images",
    "cxda_any": "attention, trained with buffers of any size", "icrm": "a transformer over it",
}  # fmt: skip
SIZES = (0, 1, 2, 5, 10, 20, 50, 100)
SHOWN = (0, 1, 5, 20, 100)
CHANGES = {  # question 3: what the change is called on the page
    "known_domains": "known domains (`cxda_supervised`)", "patch": "patches in place of images (`cxda_p2p`)", "pooled": "pooled features",
    "statistics_stop": "no gradient through the support's statistics", "statistics_own": "training queries by their own statistics",
    "statistics_blended": "statistics blended by n / (n + 20)", "statistics_running": "running statistics",
    "scale_head": "scores divided by the head's size", "flips": "horizontal flips of the training images",
    "four_tasks": "four tasks an update and a quarter of the updates",
    "labels_own": "the support's labels where each image sees itself",
    "cxda_loo": "the support's labels by leave-one-out (`cxda_loo`)", "cxda_any": "the support's labels by random subsets, learned tokens, blended statistics (`cxda_any`)",
    "icrm": "a causal transformer (`icrm`)", "icrm_small": "a small causal transformer (`icrm` with 2 layers of width 64)",
}  # fmt: skip
VARIED = ("cxda_any", "icrm", "cxda_loo", "cxda", "bn")  # of question 4
SPREAD = run.TRAINED  # of question 6
Studies = dict[str, Evidence]


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; "nothing yet" where there is no row."""
    if not rows:
        return "Nothing is recorded yet."
    return "\n".join([row(*head), row(*["---"] * len(head)), *(row(*cells) for cells in rows)])


def signed(gap: tuple[float, float, float] | None) -> str:
    """+1.6 (+1.1 to +2.0); bold where the interval leaves out zero."""
    if gap is None:
        return ""
    text = "{:+.1f} ({:+.1f} to {:+.1f})".format(*gap)
    return f"**{text}**" if gap[1] > 0 or gap[2] < 0 else text


def signed_gap(gap: Gap | None) -> str:
    return signed(gap and gap.avg)


def called(label: str) -> str:
    """A method as the page calls it. Those without training start from BASE there, which the page says once."""
    return f"`{label.removesuffix(f',from={BASE}')}`"


def many(count: int, what: str = "seed") -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def at(label: str, n: int) -> Key:
    """A method when n images have arrived; BASE reads no image, so that its usual result holds for all n."""
    return (label, "") if label == BASE else (label, f"context={n}")


@functools.cache
def leads(evidence: Evidence) -> dict[tuple[str, int], Gap]:
    """By method and n: its lead over BASE. Cached, since two tables and a figure show it."""
    found = evidence.gaps([(at(label, n), (BASE, "")) for label in FORWARD for n in SIZES])
    return {(a[0], int(a[1].split("=")[1])): gap for (a, _), gap in found.items()}


def levels(studies: Studies) -> str:
    """Avg / W10% of methods on all data sets."""
    names = [store for store in STORES if store in studies]
    return table(
        ["", *seeded(studies, names)],
        [[called(label), *(level(studies[store], label) for store in names)] for label in (BASE, *LEVELS)],
    )


def seeded(studies: Studies, names: Sequence[str]) -> list[str]:
    """Data sets as heads of columns, with their numbers of seeds."""
    return [f"`{store}`, {many(len(studies[store].scores.get((BASE, ''), {})))}" for store in names]


def summary(studies: Studies) -> str:
    """README's: some methods on the main data sets, and how much of each score the device's images bring."""
    names = [store for store in MAIN if store in studies]
    head = [cell for title in seeded(studies, names) for cell in (title, "by the images")]
    rows = []
    for method, how in SUMMARY.items():
        cells = [(level(studies[store], method), signed_gap(by_images(studies[store]).get(method))) for store in names]
        rows.append([called(method), how, *(cell for pair in cells for cell in pair)])
    return table(["method", "it uses the buffer by", *head], rows)


def level(evidence: Evidence, label: str) -> str:
    """Avg / W10%, each with its standard error where there are three seeds or more."""
    if not evidence.has((label, "")):
        return ""
    seeds = len(evidence.scores[label, ""])
    scores = [mean_sem(evidence.level((label, ""), score)) for score in ("avg", "w10")]
    text = " / ".join(f"{mean:.1f}" + f" ± {sem:.1f}" * (seeds > 2) for mean, sem in scores)
    return text + f", {many(seeds)}" * (seeds < len(evidence.scores.get((BASE, ""), {})))


def rivals(studies: Studies) -> str:
    """cxda minus each rival of the paper, beside the paper's own difference."""
    head, columns = ["`cxda` minus"], []
    stores = [store for store in MAIN if store in studies]
    both = [m for m in CHOSEN if all(tune.shares(store).get(m) == tune.PAPER_SHARE for store in stores)]
    for store in stores:
        gaps = rival_gaps(studies[store])
        for score, metric, title in (("avg", "mean_accuracy", "Avg"), ("w10", "worst10_accuracy", "W10%")):
            head += [f"`{store}`, {title}", f"paper, {STAND_INS[store]}, {title}"]
            told = paper_means(store, metric)
            columns.append({r: signed(getattr(gap, score)) + fewer(gap, studies[store]) for r, gap in gaps.items()})
            columns.append({r: f"{told['cxda'] - told[r]:+.1f}" for r in RIVALS if r in told})
    names = {rival: called(rival) for rival in RIVALS} | {
        chosen: f"{called(m)}, rate chosen" for m, chosen in CHOSEN.items() if m not in both
    }
    names |= {m: f"{called(m)}, at the rate chosen too" for m in both}
    rows = [[name, *(column.get(rival, "") for column in columns)] for rival, name in names.items()]
    return table(head, [cells for cells in rows if any(cells[1::2])])


@functools.cache
def rival_gaps(evidence: Evidence) -> dict[str, Gap]:
    """By rival, and by CHOSEN of those that fine-tune: cxda's lead, of the worst tenth too."""
    shares = tune.shares(evidence.store)
    labels = {rival: rival for rival in RIVALS} | {CHOSEN[m]: tune.label(m, share) for m, share in shares.items()}
    found = evidence.gaps([(("cxda", ""), (label, "")) for label in dict.fromkeys(labels.values())], worst=True)
    gaps = {b[0]: gap for (_, b), gap in found.items()}
    return {name: gaps[label] for name, label in labels.items() if label in gaps}


def fewer(gap: Gap, evidence: Evidence) -> str:
    """The number of seeds of a difference to cxda, where cxda has more."""
    return f", {many(len(gap.seeds))}" if len(gap.seeds) < len(evidence.scores["cxda", ""]) else ""


def paper_means(store: str, metric: str = "mean_accuracy") -> dict[str, float]:
    """The paper's figures of cxda and its rivals, on the data that are nearest to the store."""
    nearest = STAND_INS[store]
    return {
        m: mean
        for (part, data, m, setting, of), (mean, _) in paper_figures().items()
        if (part, data, setting, of) == ("main", nearest, "", metric) and m in ("cxda", *RIVALS)
    }


def buffers(studies: Studies) -> str:
    """Each method minus BASE at some sizes of the buffer, and the sizes at which it does harm or good."""
    rows = []
    for store in (store for store in MAIN if store in studies):
        found, moved = leads(studies[store]), moved_by_seeds(studies, store)
        for label in FORWARD:
            gaps = {n: found[label, n] for n in SIZES if (label, n) in found}
            if gaps:
                harm = [n for n, gap in gaps.items() if lead_verdict(label, gap, moved) < 0]
                good = [n for n, gap in gaps.items() if lead_verdict(label, gap, moved) > 0]
                ends = [", ".join(map(str, sizes)) or "nowhere" for sizes in (good, harm)]
                rows.append(
                    [f"`{store}`, {called(label)}", *(signed(gaps[n].avg) if n in gaps else "" for n in SHOWN), *ends]
                )
    return table([f"minus `{BASE}`, Avg", *(f"n = {n}" for n in SHOWN), "better at n", "worse at n"], rows)


def elsewhere(studies: Studies) -> str:
    """Each method minus BASE on all data sets, with an empty buffer and a full one."""
    names = [store for store in STORES if store in studies]
    rows = []
    for label in FORWARD:
        cells = [
            [
                signed(leads(studies[store])[label, n].avg) if (label, n) in leads(studies[store]) else ""
                for n in (0, 100)
            ]
            for store in names
        ]
        rows.append([called(label), *("; ".join(filter(None, of_store)) for of_store in cells)])
    return table(
        [f"minus `{BASE}`, Avg at n = 0; at n = 100", *(f"`{store}`" for store in names)],
        [r for r in rows if any(r[1:])],
    )


@functools.cache
def by_images(evidence: Evidence) -> dict[str, Gap]:
    """By method: its result at n = 100 minus its own at n = 0. Cached, since two tables show it."""
    found = evidence.gaps([(at(label, 100), at(label, 0)) for label in FORWARD])
    return {a[0]: gap for (a, _), gap in found.items()}


def own_images(studies: Studies) -> str:
    """The gain by the device's images: each method at n = 100 minus itself at n = 0."""
    names = [store for store in STORES if store in studies]
    rows = [[called(m), *(signed_gap(by_images(studies[store]).get(m)) for store in names)] for m in FORWARD]
    return table(["100 images minus none, Avg", *(f"`{store}`" for store in names)], [r for r in rows if any(r[1:])])


def full(studies: Studies) -> str:
    """At the paper's width and length: scores beside the paper's, and leads over BASE, with 100 images."""
    if FULL not in studies:
        return table([], [])
    evidence, rows = studies[FULL], []
    told = [paper_means(MAIN[1], metric) for metric in ("mean_accuracy", "worst10_accuracy")]
    gaps = full_gaps(evidence)
    for label in (BASE, *FORWARD):
        if evidence.has((label, "")):
            paper, gap = " / ".join(f"{means[label]:.1f}" for means in told if label in means), gaps.get((label, BASE))
            cells = [signed(gap.avg), signed(gap.w10)] if gap else ["", ""]
            rows.append([called(label), level(evidence, label), paper, *cells])
    many_seeds = many(len(evidence.scores[BASE, ""]))
    return table(
        ["", f"`cifar10_c`, {many_seeds}", "paper, CIFAR-C", f"minus `{BASE}`, Avg", f"minus `{BASE}`, W10%"], rows
    )


@functools.cache
def full_gaps(evidence: Evidence) -> dict[tuple[str, str], Gap]:
    """The leads over BASE with all 100 images, and that of cxda over bn, of the worst tenth too."""
    pairs = [*((label, BASE) for label in FORWARD), ("cxda", "bn")]
    found = evidence.gaps([((a, ""), (b, "")) for a, b in pairs], worst=True)
    return {(a, b): gap for ((a, _), (b, _)), gap in found.items()}


def small_leads(studies: Studies) -> dict[str, float]:
    """By method of FULL: its lead over BASE in small networks on the same data, in points."""
    evidence = studies[MAIN[1]]
    return {
        m: float(evidence.level((m, ""), "avg").mean() - evidence.level((BASE, ""), "avg").mean())
        for m, _ in studies[FULL].scores
    }


def changes(studies: Studies) -> str:
    """Changes to the paper's method on unipen, each minus the method itself."""
    found = changed(studies)
    rows = [[CHANGES[name], signed(gap.avg), signed(gap.w10), many(len(gap.seeds))] for name, gap in found.items()]
    return table(["`cxda` on `unipen` with", "Avg", "W10%", ""], rows)


def changed(studies: Studies) -> dict[str, Gap]:
    """By change, its gap to the method itself."""
    if "unipen" not in studies:
        return {}
    base, own = studies["unipen"], studies.get("unipen_changes")
    together = Evidence("unipen", dict(base.scores), dict(base.rows), {})
    if own:
        together.scores.update(own.scores)
        together.rows.update(own.rows)
    gaps = together.gaps([((name, ""), ("cxda", "")) for name in CHANGES], worst=True)
    return {a[0]: gap for (a, _), gap in gaps.items()}


def other_tasks(studies: Studies) -> str:
    """The lead over BASE with other numbers of domains and of support images."""
    rows = []
    for store in (store for store in MAIN if store in studies):
        evidence = studies[store]
        for kind, title in (("num_domains", "domain"), ("support_size", "image")):
            settings = sorted({s for _, s in evidence.scores if s.startswith(kind)}, key=lambda s: int(s.split("=")[1]))
            gaps = evidence.gaps([((label, s), (BASE, s)) for s in settings for label in VARIED])
            for s in settings:
                cells = [gaps.get(((label, s), (BASE, s))) for label in VARIED]
                rows.append([f"`{store}`, {many(int(s.split('=')[1]), title)}", *map(signed_gap, cells)])
    return table([f"minus `{BASE}`, Avg, seed 0", *map(called, VARIED)], rows)


def seeds_move(studies: Studies) -> dict[str, dict[str, float]]:
    """The deviation of Avg over seeds: by data set with more than one seed, then by method."""
    found: dict[str, dict[str, float]] = {}
    for store in (s for s in STORES if s in studies):
        for label in SPREAD:
            evidence = studies[store]
            if len(evidence.scores.get((label, ""), {})) > 1:
                values = evidence.level((label, ""), "avg")
                found.setdefault(store, {})[label] = float(values.std(ddof=1))
    return found


def root_mean_square(values: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square([*values]))))


def moved_by_seeds(studies: Studies, store: str) -> float:
    """The deviation of a data set's results over seeds: of its own methods, and at least that of all data sets."""
    found = seeds_move(studies)
    of_all = [x for of in found.values() for x in of.values()]
    return max((root_mean_square(of) for of in (found.get(store, {}).values(), of_all) if of), default=0.0)


def needed(deviation: float, seeds: int) -> float:
    """The difference that two methods must have to be told apart: seeds alone seldom make it.

    Each has so many seeds.
    """
    return 2 * deviation * (2 / seeds) ** 0.5


def verdict(gap: Gap, moved: float) -> int:
    """The sign of a difference of methods that were trained apart; 0 where seeds alone may have made it.

    Args:
      moved: the deviation over seeds.
    """
    return gap.sign if abs(gap.avg[0]) >= needed(moved, len(gap.seeds)) else 0


def lead_verdict(label: str, gap: Gap, moved: float) -> int:
    """The verdict on a lead over BASE.

    Methods that start from BASE's own weights share its seed, which then moves nothing.
    """
    return gap.sign if label in UNTRAINED else verdict(gap, moved)
