"""The pages of results: each table that names a record, and figures of the text, follow from docs/results."""

import json
import math
import re
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parent.parent / "docs"
STORES, SIZES = ("unipen", "unipen_sizes", "qmnist", "cifar10_c", "glyphs"), (0, 1, 2, 5, 10, 20, 50, 100)
PAIRED = "paired_to_erm_iid"
SCORES, SHOWN = {"avg": "Avg", "w10": "W10%"}, (0, 1, 5, 20, 100)  # SHOWN: the sizes of the table of opponents
PLAIN, FULL = "random subsets, plain loss 0.5", ("erm_iid, beside full", "full=0.5", "full=0")
SINK, BLENDED = "random subsets, 32 learned tokens with a softmax of their own, sink", "blended, N = 20"
TRIED = {  # rows of the tables of "What was tried", as the record names them; the others stay in the record
    "unipen_sizes": ["erm_iid", "cxda_loo", "all others seen", "random subsets", f"{PLAIN}, 5 to 50 domains",
                     "random subsets, 32 learned tokens", ("random subsets, 32 learned tokens", BLENDED), SINK],
    "cifar10_c": ["erm_iid", "cxda_loo", "all others seen", ("all others seen", BLENDED),
                  ("all others seen", "blended from each image's own pass, N = 20"), PLAIN, f"{PLAIN}, 5 to 50 domains",
                  "random subsets, 32 learned tokens", ("random subsets, 32 learned tokens", BLENDED), (SINK, BLENDED)],
    "unipen": ["erm_iid", "cxda_loo", PLAIN, f"{PLAIN}, batch renormalisation", f"{PLAIN}, 5 to 50 domains",
               (f"{PLAIN}, 5 to 50 domains", BLENDED), "random subsets", "random subsets, sink"],
}  # fmt: skip
COSTS = ("erm erm_iid sla", "bn bn_alpha", "cml", "cxda cxda_loo", "cxda_p2p", "cxda_supervised", "cxda_any",
         "cxda_any,prior=0", "icrm", "t3a", "lame", "feature_shift", "ft_em ft_im sf_ocda", "cotta")  # fmt: skip


def load(name):
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def read(page):
    """All tables of a page, as lists of cells, and its text in one line."""
    text = (DOCS / page).read_text()
    lines = [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
             for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M)]  # fmt: skip
    return [[header, *rows] for header, _, *rows in lines], " ".join(text.split())


def grouped(name, *keys, part="rows"):
    """The rows of a record by the values that they have under some keys."""
    groups = {}
    for row in load(name)[part]:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def single(*arguments, **options):
    """The same, where no two rows have the same values."""
    return {key: row for key, (row,) in grouped(*arguments, **options).items()}


def ordered(found, *names):
    """What a record has, in the order of the page. What the page does not show is an error."""
    return sorted(set(found), key=names.index)


def mean(rows, score="avg"):
    return float(np.mean([row[score] for row in rows]))


def spreads(rows):
    """Means and their standard errors over the seeds."""
    assert [row["seed"] for row in rows] == [0, 1, 2] and {row["num_tasks"] for row in rows} == {600}
    errors = {score: np.std([row[score] for row in rows], ddof=1) / 3**0.5 for score in SCORES}
    return " / ".join(f"{mean(rows, score):.1f} ± {error:.1f}" for score, error in errors.items())


def level(row, size=None):
    return " / ".join(f"{row[score] if size is None else row[score][str(size)]:.1f}" for score in SCORES)


def rounded(x, form="+.1f"):
    """The texts of what a record has with two digits: a last 5 may be rounded either way, as it was rounded itself."""
    return {f"{y:{form}}" for y in ((x - 0.001, x + 0.001) if round(100 * x) % 10 == 5 else (x,))}


def gap(values, bold=False):
    texts = {f"{x} ({low} to {high})" for x, low, high in product(*map(rounded, values))}
    return {f"**{text}**" for text in texts} if bold else texts


def says(page, *sentences):
    assert [sentence for sentence in sentences if sentence not in read(page)[1]] == []


def columns(sizes):
    return [f"n = {n}" for n in sizes]


def real_levels():
    found = grouped("real-images", "data_name", "method")
    methods = ordered((m for _, m in found), "erm_iid", "bn", "cxda", "cxda_loo")
    yield ["", *methods]
    for store in ordered((s for s, _ in found), *STORES):
        (best,) = {max((mean(found[store, m], score), m) for m in methods)[1] for score in SCORES}
        yield [f"`{store}`", *(f"{'**' * (m == best)}{spreads(found[store, m])}{'**' * (m == best)}" for m in methods)]


def real_gaps():
    found = single("real-images", "data_name", "method", "against", part="pairs")
    levels, lead = grouped("real-images", "data_name", "method"), ("cxda_loo", "erm_iid")
    pairs = ordered((key[1:] for key in found), *product(("cxda", "cxda_loo"), ("erm_iid", "bn")))
    yield ["", *(f"{method} - {against}" for method, against in pairs)]
    for store, score in product(ordered((key[0] for key in found), *STORES), SCORES):
        gaps = {pair: found[store, *pair][score] for pair in pairs}
        for pair, (middle, *_) in gaps.items():
            a, b = (mean(levels[store, method], score) for method in pair)
            assert middle == pytest.approx(a - b, abs=0.006), "a difference is that of the levels"
        yield [f"`{store}`, {SCORES[score]}", *(gap(x, pair == lead and x[1] > 0) for pair, x in gaps.items())]


def trainings():
    """Seconds and memory have no record. The test of minutes is below."""
    yield ["", "steps", "prepare, two cores", "memory", "train and test, one core", "memory"]
    found = grouped("real-images", "data_name")
    for store in ordered((s for (s,) in found), *STORES):
        (steps,) = {row["steps"] for row in found[store,]}
        yield [f"`{store}`", f"{steps:,}", None, None, None, None]


def size_levels():
    found = single("buffer-sizes", "data", "method", "images")
    sizes = ordered((n for *_, n in found), *SIZES)
    methods = ordered((m for _, m, _ in found), "erm_iid", "cxda_loo", "cxda_any")
    yield ["", *columns(sizes)]
    for store, method in product(ordered((s for s, *_ in found), *STORES), methods):
        known = sizes if method != "erm_iid" else (0,)
        yield [f"`{store}`, {method}", *(level(found[store, method, n]) if n in known else "=" for n in sizes)]


def size_gaps():
    found = single("buffer-sizes", "data", "method", "images", part=PAIRED)
    sizes = ordered((n for *_, n in found), *SIZES, "area")[:-1]
    yield ["", *columns(sizes)]
    for store, score in product(ordered((s for s, *_ in found), *STORES), SCORES):
        yield [f"`{store}`, {SCORES[score]}", *(gap(found[store, "cxda_any", n][score]) for n in sizes)]


def all_gaps():
    """By store, method and number of images."""
    sizes, others = (single(name, "data", "method", "images", part=PAIRED) for name in ("buffer-sizes", "opponents"))
    assert not set(sizes) & set(others)
    return sizes | others


def opponents():
    found, names = all_gaps(), ("cxda_any", "cxda_loo", "icrm", "bn_alpha", "feature_shift", "lame", "t3a")
    yield ["method - `erm_iid`, Avg", *columns(SHOWN)]
    for store, method in product(ordered((s for s, *_ in found), *STORES), ordered((m for _, m, _ in found), *names)):
        yield [f"`{store}`, {method}", *(gap(found[store, method, n]["avg"]) for n in SHOWN)]


def glyphs_methods():
    rows = load("glyphs-methods")["rows"]
    best = {score: max(row[score] for row in rows) for score in SCORES}
    yield ["method", "Avg", "W10%", "adapt ms", "predict ms", "training minutes"]
    for row in rows:
        levels = [f"**{row[s]:.1f}**" if row[s] == best[s] else f"{row[s]:.1f}" for s in SCORES]
        shared = row["method"] != "erm" and row["weights_hash"] == rows[0]["weights_hash"]
        minutes = "that of erm" if shared else f"{row['train_minutes']:.1f}"
        yield [row["method"], *levels, f"{row['adapt_ms']:.1f}", f"{row['predict_ms']:.1f}", minutes]


def glyphs_seeds():
    """The interval on the other machine has no record. Its difference is among the figures of the text, below."""
    yield ["", "ERM", "BN", "CXDA", "CXDA minus BN, Avg"]
    printed = re.findall(r"[+-][\d.]+", load("glyphs-seeds")["note"].partition("cxda - bn")[2])[:3]
    for label, name, more in (("one", "glyphs-seeds", ", with the commands"), ("another", "glyphs", "")):
        found = grouped(name, "method")
        (commit,) = {row["commit"] for rows in found.values() for row in rows}
        cells = [spreads(found[method,]) for method in ordered((m for (m,) in found), "erm", "bn", "cxda")]
        lead = mean(found["cxda",]) - mean(found["bn",])
        known = gap([lead, *map(float, printed[1:])]) if more else None
        yield [f"{label} machine, commit {commit} ([record](results/{name}.json){more})", *cells, known]


def glyphs_c():
    yield ["method", "Avg", "W10%"]
    yield from ([row["method"], *level(row).split(" / ")] for row in load("glyphs_c")["rows"])


def tried(store):
    """A table of the fields that were tried on one data set. Its first column has words of the page."""
    found = single("cxda-any-choice", "data", "tried", "statistics")
    usual = ("running", "as published")
    found = {(s, name if how in usual else (name, how)): row for (s, name, how), row in found.items()}
    rows = [found[store, name] for name in TRIED[store]]
    (steps,) = {row["steps"] for row in rows}
    yield [f"`{store}`, {steps:,} steps", *columns((0, 5, 100))]
    yield from ([None, *(level(row, n) if str(n) in row["avg"] else "=" for n in (0, 5, 100))] for row in rows)


def of_full():
    """By store and name: `erm_iid` and both shares of images that see all others."""
    found = single("cxda-any-choice", "data", "tried", "statistics")
    return {key[:2]: row for key, row in found.items() if key[1] in FULL}


def full():
    found = of_full()
    yield ["seed 0, validation", "`erm_iid`", "0.5, n = 0", "n = 5", "n = 100", "0, n = 0", "n = 5", "n = 100"]
    for store in ordered((s for s, _ in found), *STORES):
        plain, *others = (found[store, name] for name in FULL)
        yield [f"`{store}`", level(plain, 0), *(level(row, n) for row in others for n in (0, 5, 100))]


def costs():
    found = {row["method"]: row for row in load("benchmark-buffer")["buffer"]}
    yield ["", "ms until the new image counts", "ms a query", "bytes a support image", "bytes for 100 images"]
    assert sorted(found) == sorted(" ".join(COSTS).split())
    for names in map(str.split, COSTS):
        row = found[names[0]]
        assert {(found[n]["per_image"], found[n]["kept"]) for n in names} == {(row["per_image"], row["kept"])}
        times = [part and part["median_ms"] for part in (row["take_in"], row["predict"])]
        texts = [f"{ms:.{0 if ms > 100 else 1 if ms > 2 else 2}f}" if ms else "none" for ms in times]
        label = ", ".join(f"`{name}`" for name in names).replace(",prior=0", "` with `prior=0")
        yield [label, *texts, f"{row['per_image']:,}", f"{row['kept']:,}"]


def parity():
    found = json.loads((DOCS / "live" / "unipen" / "parity.json").read_text())
    allowed, logits = str(found["tolerance"]), max(found["logits"].values())
    yield ["what", "allowed", "`unipen`"]
    yield ["logits, relative to the largest one", allowed, f"{logits:.7f}"]
    yield ["attention weights", allowed, f"{found['attention']:.7f}"]
    yield ["pixels of a drawing, of 255", None, f"{found['pixels']}"]
    yield ["classes", "all the same", "all the same" if found["same_classes"] else "others"]


def writers():
    """The record has `bn` and `cxda` too, which the page does not show."""
    found = load("one-writer")
    assert [model["method"] for model in found["models"]] == ["icrm", "cxda_any", "icrm", "bn", "cxda"]
    yield ["drawings in the buffer", *map(str, found["buffer"])]
    labels = (("the shipped model", "gain"), ("`cxda_any`", ""), ("`icrm` as published, 12 layers", "its gain"))
    for (label, gains), model in zip(labels, found["models"][:3], strict=True):
        yield [label, *(rounded(x, ".1f") for x in model["right"])]
        if gains:
            yield [gains, "", *(gap(x, x[1] > 0 or x[2] < 0) for x in model["gain"][1:])]


def times():
    found = load("live")
    yield ["what", "ms"]
    for name, digits in (("load_ms", 0), ("encode_100_ms", 0), ("predict_ms", 1)):
        yield [None, f"{found[name]:.{digits}f} ({found[f'{name}_median']:.{digits}f})"]


def demo_seeds():
    rows = load("demo")["rows"]
    yield ["seed", *(str(row["seed"]) for row in rows), "mean"]
    for what, share in demo_shares().items():
        yield [what, *(f"{x:{'+' * what.startswith('difference')}.1f}" for x in (*share, np.mean(share)))]


def demo_shares():
    """Before and after adapting, and the difference, for each seed, in %."""
    before, after = (
        np.array([100 * row[when] / row["answers"] for row in load("demo")["rows"]]) for when in ("before", "after")
    )
    return {"right before, %": before, "right after, %": after, "difference, points": after - before}


PAGES = {  # what makes the tables of each page, in their order; None: a table of words, or one without a record
    "results.md": (real_levels, real_gaps, trainings, size_levels, size_gaps, opponents, glyphs_methods, glyphs_seeds,
                   glyphs_c),
    "methods.md": (None, None, *(partial(tried, store) for store in TRIED), full, costs, None, None),
    "live.md": (parity, None, writers, times, None),
    "device.md": (demo_seeds, *[None] * 10),
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_follow_from_the_records(page):
    for table, make in zip(read(page)[0], PAGES[page], strict=True):
        rows = list(make()) if make else table
        assert len(table) == len(rows), f"rows of the page: {[row[0] for row in table]}"
        for row, known in zip(table, rows, strict=True):
            agree = [
                x is None or cell in (x if isinstance(x, set) else {x}) for cell, x in zip(row, known, strict=True)
            ]
            assert all(agree), f"the page has {row}, the record {known}"


def test_minutes_are_those_of_the_trainings():
    """The page's include the test, and so the record's are rounded up."""
    found = grouped("real-images", "data_name")
    for label, *_, minutes, _ in read("results.md")[0][2][1:]:
        spans = [range(int(low), int(high) + 1) for low, high in re.findall(r"(\d+) to (\d+)", minutes)]
        known = {math.ceil(row["train_minutes"]) for row in found[label.strip("`"),]}
        assert known <= set().union(*spans) and {x for span in spans for x in (span[0], span[-1])} <= known, label


def test_the_text_of_results_has_the_figures_of_the_tables():
    of = {name: row for (name,), row in single("glyphs-methods", "method").items()}
    seeds, (again,) = grouped("glyphs", "method"), load("glyphs-again")["rows"]
    first = grouped("glyphs-seeds", "method")["cxda",][0]
    assert level(again) == level(first) and "gives the same test figures for the first seed" in read("results.md")[1]
    gaps, sizes = all_gaps(), single("buffer-sizes", "data", "method", "images")
    stores = [store for store in STORES if store != "qmnist"]
    own = {m: [gaps[s, m, 100]["avg"][0] - gaps[s, m, 0]["avg"][0] for s in stores] for m in ("cxda_any", "icrm")}
    leads = [sizes[s, "cxda_any", 100]["avg"] - sizes[s, "cxda_loo", 100]["avg"] for s in stores]
    lost = [-gaps["glyphs", "cxda_any", n]["w10"][0] for n in (0, 1, 2)]
    a, nothing, b, c = (f"{x:.1f}" for x in own["cxda_any"])
    assert nothing == "0.0" and max(map(abs, leads[:2])) < 0.15
    kept = {row["method"]: row["per_image"] for row in load("benchmark-buffer")["buffer"]}
    lows = [row["avg"] for row in seeds["erm",]]
    says(
        "results.md",
        f"its lead of {gaps['glyphs', 'cxda_any', 0]['avg'][0]:.1f} points is less than its interval",
        f"it is {max(lost):.1f} to {min(lost):.1f} points below with 0, 1 and 2 images**",
        f"{leads[2]:.1f} and {leads[3]:.1f} points above on `cifar10_c` and `glyphs`",
        f"{a} points on `unipen`, nothing on `unipen_sizes`, {b} points on `cifar10_c`, {c} on `glyphs`",
        f"Its own images add {min(own['icrm']):.1f} to {max(own['icrm']):.1f} points",
        f"keeps {kept['icrm'] / kept['cxda_any']:.0f} times as many bytes of an image",
        f"(`erm_iid`) gains {of['erm_iid']['avg'] - of['erm']['avg']:.0f} points",
        f"**ERM is far below `erm_iid`** ({level(of['erm'])} against {level(of['erm_iid'])} on all",
        f"**SLA is above ERM at seed 0** ({level(of['sla'])})",
        f"against {level(seeds['erm',][1])}, on all 600 tasks",
        f"ERM alone runs from {min(lows):.1f} to {max(lows):.1f}",
        f"is below `cxda`** ({level(of['cxda_supervised'])} against {level(of['cxda'])})",
        f"CML is below ERM ({level(of['cml'])} against {level(of['erm'])})",
        f"`cxda_loo` is {of['cxda_loo']['avg'] - of['cxda']['avg']:.0f} points above `cxda`",
        f"is {of['cxda_loo']['avg'] - of['erm_iid']['avg']:.1f} points below at the common rate",
        f"{spreads(seeds['cxda',])} | {mean(seeds['cxda',]) - mean(seeds['bn',]):+.1f} (",
    )


def test_the_text_of_results_claims_what_holds():
    for (store, method, n), row in (gaps := all_gaps()).items():
        avg, w10 = row["avg"], row["w10"]
        if method == "cxda_any" and n != "area":
            assert avg[0] > 0 and (n < 5 or avg[1] > 0)
            assert w10[0] > 0 if store != "glyphs" or n > 2 else w10[1] < 0 < w10[2]
            rivals = {m: gaps[s, m, k]["avg"][0] for s, m, k in gaps if (s, k) == (store, n) and m != "icrm"}
            if n >= 5 or store in ("unipen", "cifar10_c"):
                assert gaps[store, "icrm", n]["avg"][0] > max(rivals.values())
            assert store != "unipen_sizes" or n >= 5 or gaps[store, "icrm", n]["avg"][0] <= avg[0]
        assert method != "bn_alpha" or (avg[0] >= 0 and (n != 100 or avg[1] > 0))


def test_the_text_on_what_was_tried_has_the_figures_of_the_tables():
    found = {key: row["avg"] for key, row in of_full().items()}
    leads = {name: [] for name in FULL}
    for (store, name), scores in found.items():
        leads[name] += [(x - found[store, FULL[0]]["0"], store, n) for n, x in scores.items()]
    (half, *at_half), (none, *at_none) = (min(leads[name]) for name in FULL[1:])
    where = (("unipen_sizes", "100"), ("cifar10_c", "0"))
    sizes, cifar = (found[store, FULL[1]][n] - found[store, FULL[2]][n] for store, n in where)
    says(
        "methods.md",
        f"That is {none:+.1f} points with 0 (`{at_none[0]}`, n = {at_none[1]}), and {half:+.1f} with 0.5 "
        f"(`{at_half[0]}`, n = {at_half[1]})",
        f"The price is {sizes:.1f} points at 100 images on `unipen_sizes`, and {cifar:.1f} at n = 0 on `cifar10_c`",
    )


def test_the_texts_on_the_live_page_have_the_figures_of_the_records():
    found, live = load("one-writer"), load("live")
    card = json.loads((DOCS.parent / "cxda_jax" / "device" / "shipped" / "unipen" / "card.json").read_text())
    right, (_, low, high) = found["models"][0]["right"], found["models"][0]["gain"][-1]
    assert live["same_classes"] and (live["before"], live["after"]) == (live["jax_before"], live["jax_after"])
    says(
        "../README.md",
        f"Over {found['writers']} writers whom training did not see, {right[0]:.1f} % were right before and "
        f"{right[-1]:.1f} % after {found['buffer'][-1]} drawings of their own; the 95 % interval of the gain is "
        f"{low:+.1f} to {high:+.1f} points",
    )
    says(
        "live.md",
        f"{found['writers']} writers whom training did not see were asked",
        f"with {card['gain']['sizes'][-1]} images by {card['gain']['mean'][-1]:.1f} points",
        f"the strokes of {live['writers']} of these writers",
        f"differed by at most {live['logits']:.7f} of the largest",
        f"Of these {live['queries']} questions {live['before']} % were right before and {live['after']} % after "
        f"({gap((live['gain'], *live['gain_interval'])).pop().replace(' (', ', ')}",
        f"`index.html`, of {live['parity']['bytes'] / 1e6:.1f} MB",
    )


def test_the_text_on_the_demo_has_the_figures_of_its_record():
    before, after, gain = demo_shares().values()
    numbers = {4: "four", 6: "six"}
    better, worse = (numbers[int(np.sum(sign * gain > 0))] for sign in (1, -1))
    assert f"{better.title()} seeds gained and {worse} lost." in read("device.md")[1]
    says(
        "../README.md",
        f"the mean accuracy went from {before.mean():.1f} to {after.mean():.1f} %: {better} groups gained up to {gain.max():.1f} "
        f"points, {worse} lost up to {-gain.min():.1f}.",
    )
