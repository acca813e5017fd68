"""The study's records, and the tables of its page that follow from them, as Markdown."""

from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from cxda_jax.studies import records
from cxda_jax.studies.formats import markdown
from cxda_jax.studies.result import Result
from cxda_jax.studies.statistics import Difference, Span, measure, pairs
from cxda_jax.training.metrics import mean_sem
from docs.study.plan import BASE, RECORDS, TRAINED

MAIN = ("unipen", "cifar10_c")
STORES = (*MAIN, "unipen_sizes", "qmnist", "glyphs", "glyphs_c")
CHANGED = ("_changes", "_spread", "_cells")  # parts that hold a method several times, each in a folder of its own
APART = (*CHANGED, "cifar10_c_full", "cifar10_c_curves")  # parts that are not set beside the others of their store
STARTED = tuple(f"{name},from={BASE}" for name in ("bn_alpha", "feature_shift", "lame", "t3a"))
FORWARD = ("cxda_any", "icrm", "cxda_loo", "cxda", "bn", "cml", *STARTED)
BY_SIZE = (*FORWARD[:5], STARTED[0])  # the sizes of the others are in the records
LEVELS = (BASE, "erm", *FORWARD, "ft_em", "ft_im", "sf_ocda", "cotta", "sla")
SUMMARY = {
    "bn": "its statistics", "cxda": "the paper's cross-attention", BASE: "not at all; trained on shuffled images",
    "cxda_any": "attention, trained with buffers of any size", "icrm": "a transformer over it",
}  # fmt: skip
SIZES = (0, 1, 2, 5, 10, 20, 50, 100)
SHOWN = (0, 1, 5, 20, 100)
COMPARED = (
    *(("cxda", other) for other in ("bn", "erm", "cml", BASE)),
    *((m, BASE) for m in ("cxda_any", "icrm", "cxda_loo")),
)
Key = tuple[str, str]  # a label and a setting such as "context=5"; "" is the usual tasks
Study = dict[Key, dict[int, Result]]  # of one store: by key and seed
Studies = dict[str, Study]


def load() -> Studies:
    """The recorded results of each store, and of each part that is apart."""
    studies: Studies = {}
    for path in sorted(RECORDS.glob("*.records")):
        part = path.stem.rpartition("-")[0]
        for result in records.read(path):
            store = result.data_name + " (smoke)" * result.smoke
            label = result.run.parts[-2] if part.endswith(CHANGED) else result.variant
            seeds = studies.setdefault(part if part.endswith(APART) else store, {}).setdefault(
                (label, str(result.setting)), {}
            )
            # Records that others send may hold what is there already. The first count.
            seeds.setdefault(result.seed, result)
    return studies


def gaps(study: Study, wanted: Iterable[tuple[Key, Key]], worst: bool = False) -> dict[tuple[Key, Key], Difference]:
    """The first of each pair minus the second, at the seeds that both have; what no seed has is left out."""
    known = [(a, b) for a, b in wanted if a in study and b in study]
    for a, b in known:
        asked = {result.tasks.query for key in (a, b) for result in study[key].values()}
        assert len(asked) == 1, f"{a} and {b} are of different tasks"
    used = {key for pair in known for key in pair}
    scores = {(key, seed): result.tasks.scores for key in used for seed, result in study[key].items()}
    return measure(scores, pairs(scores, known), worst)


def level(study: Study, label: str, score: str) -> np.ndarray:
    """avg or w10 of each seed on the usual tasks."""
    return np.array([getattr(result, score) for result in study[label, ""].values()])


def signed(span: Span) -> str:
    """+1.6 (+1.1 to +2.0); bold where the interval leaves out zero."""
    text = "{:+.1f} ({:+.1f} to {:+.1f})".format(*span)
    if span.sign and ("+0.0" in text or "-0.0" in text):  # one digit would hide why it is bold
        text = "{:+.2f} ({:+.2f} to {:+.2f})".format(*span)
    return f"**{text}**" if span.sign else text


def signed_gap(gap: Difference | None) -> str:
    return signed(gap.avg) if gap else ""


def called(label: str) -> str:
    """A method as the page calls it. Those without training start from BASE there, which the page says once."""
    return f"`{label.removesuffix(f',from={BASE}')}`"


def seeds_text(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def at(label: str, n: int) -> Key:
    """A method when n images have arrived; BASE reads no image, so that its usual result holds for all n."""
    return (label, "") if label == BASE else (label, f"context={n}")


def seeded(studies: Studies, names: Sequence[str]) -> list[str]:
    """Data sets as heads of columns, with their numbers of seeds."""
    return [f"`{store}`, {seeds_text(len(studies[store].get((BASE, ''), {})))}" for store in names]


def level_text(study: Study, label: str) -> str:
    """Avg / W10%, each with its standard error where there are three seeds or more."""
    if (label, "") not in study:
        return ""
    seeds = len(study[label, ""])
    scores = [mean_sem(level(study, label, score)) for score in ("avg", "w10")]
    text = " / ".join(f"{mean:.1f}" + f" ± {sem:.1f}" * (seeds > 2) for mean, sem in scores)
    return text + f", {seeds_text(seeds)}" * (seeds < len(study.get((BASE, ""), {})))


def levels(studies: Studies) -> str:
    """Avg / W10% of methods on all data sets."""
    names = [store for store in STORES if store in studies]
    rows = [[called(label), *(level_text(studies[store], label) for store in names)] for label in LEVELS]
    return markdown(["", *seeded(studies, names)], rows)


def by_images(study: Study) -> dict[str, Difference]:
    """By method: its result at n = 100 minus its own at n = 0."""
    return {a[0]: gap for (a, _), gap in gaps(study, [(at(m, 100), at(m, 0)) for m in FORWARD]).items()}


def summary(studies: Studies) -> str:
    """Some methods on the main data sets, and how much of each score the device's images bring."""
    names = [store for store in MAIN if store in studies]
    head = [cell for title in seeded(studies, names) for cell in (title, "by the images")]
    images = {store: by_images(studies[store]) for store in names}
    rows = []
    for method, how in SUMMARY.items():
        cells = []
        for store in names:
            gap, seeds = images[store].get(method), len(studies[store].get((BASE, ""), {}))
            fewer = f", {seeds_text(len(gap.seeds))}" if gap and len(gap.seeds) < seeds else ""
            cells += [level_text(studies[store], method), signed_gap(gap) + fewer]
        rows.append([called(method), how, *cells])
    return markdown(["method", "it uses the buffer by", *head], rows)


def own_images(studies: Studies) -> str:
    """The gain by the device's images: each method at n = 100 minus itself at n = 0."""
    names = [store for store in STORES if store in studies]
    images = {store: by_images(studies[store]) for store in names}
    rows = [[called(m), *(signed_gap(images[store].get(m)) for store in names)] for m in FORWARD]
    head = ["100 images minus none, Avg", *(f"`{store}`" for store in names)]
    return markdown(head, [row for row in rows if any(row[1:])])


def buffers(studies: Studies) -> str:
    """Each method minus BASE at some sizes of the buffer, and the sizes at which it does good or harm."""
    rows, moved = [], moved_by_seeds(studies)
    for store in (store for store in MAIN if store in studies):
        found = gaps(studies[store], [(at(label, n), at(BASE, n)) for label in BY_SIZE for n in SIZES])
        for label in BY_SIZE:
            of_sizes = {n: found[pair] for n in SIZES if (pair := (at(label, n), at(BASE, n))) in found}
            if of_sizes:
                signs = {n: verdict(label, gap, moved[store]) for n, gap in of_sizes.items()}
                ends = [", ".join(str(n) for n in signs if signs[n] == sign) or "nowhere" for sign in (1, -1)]
                rows.append([f"`{store}`, {called(label)}", *(signed_gap(of_sizes.get(n)) for n in SHOWN), *ends])
    return markdown([f"minus `{BASE}`, Avg", *(f"n = {n}" for n in SHOWN), "better at n", "worse at n"], rows)


def over_seeds(studies: Studies) -> str:
    """Differences at each seed, and the interval that other seeds would give, where there are three seeds or more."""
    rows = []
    for store in (store for store in MAIN if store in studies):
        for (a, b), gap in gaps(studies[store], [((a, ""), (b, "")) for a, b in COMPARED]).items():
            each = [*gap.of_seeds.values()]
            if len(each) > 2:
                low, high = stats.t.interval(0.95, len(each) - 1, np.mean(each), stats.sem(each))
                interval = signed(Span(*(round(float(x), 6) for x in (np.mean(each), low, high))))
                told = ", ".join(f"{x:+.1f}" for x in each)
                rows.append([f"`{store}`, {called(a[0])} minus {called(b[0])}", told, interval])
    return markdown(["Avg", "at each seed", "mean, 95 % t interval over the seeds"], rows)


def moved_by_seeds(studies: Studies) -> dict[str, float]:
    """By store, the deviation of Avg over seeds: the root mean square of its trained methods, or of those of all stores
    where that is larger."""
    squares = {
        store: [level(study, m, "avg").var(ddof=1) for m in TRAINED if len(study.get((m, ""), {})) > 1]
        for store, study in studies.items()
        if store in STORES
    }
    of_all = float(np.mean([square for of_store in squares.values() for square in of_store]))
    return {store: max(of_all, float(np.mean(each)) if each else 0.0) ** 0.5 for store, each in squares.items()}


def verdict(label: str, gap: Difference, moved: float) -> int:
    """The sign of a lead over BASE; 0 where seeds alone may have made it.

    Methods that start from BASE's own weights share its seed, which then moves nothing.

    Args:
      moved: the deviation over seeds. Two methods with k seeds each must differ by 2 s (2 / k)^0.5.
    """
    clear = abs(gap.avg.mean) >= 2 * moved * (2 / len(gap.seeds)) ** 0.5
    return gap.sign if clear or label in STARTED else 0
