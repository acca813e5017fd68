"""Pages on methods, on the live page and on devices: tables and figures that name a record follow from it, README's too."""

import csv
import json
from functools import partial

import jax
import numpy as np

from cxda_jax import config
from cxda_jax.device.model import as_store, find_model
from cxda_jax.disk import models
from cxda_jax.experiment import build_method
from cxda_jax.types import Images
from tests.recorded import (
    DOCS,
    STORES,
    check_tables,
    columns,
    gap,
    level,
    load,
    ordered,
    read,
    rounded,
    says,
    single,
)

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


def test_the_tables_follow_from_the_records():
    check_tables("methods.md", (None, None, *(partial(tried, store) for store in TRIED), full, costs, None))
    check_tables("live.md", (parity, None, writers, times, None))
    check_tables("device.md", (demo_seeds, *[None] * 10))


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
        f"{right[-1]:.1f} % after {found['buffer'][-1]} drawings of their own; the gain has a 95 % interval over these "
        f"writers of {low:+.1f} to {high:+.1f} points",
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


def test_the_text_on_icrm_counts_parameters_and_has_the_study_s_figures():
    card = models.read_card(find_model("unipen"))
    store, images = as_store(card), Images(np.zeros((100, *card.shape), np.float32), np.zeros(100, np.int32))
    small = [("icrm.layers", "2"), ("icrm.width", "64")]

    def parameters(spec, changes=()):
        method = build_method(config.read(spec, changes), store)
        shapes = jax.eval_shape(method.init, jax.random.key(0), images)["params"]
        return sum(x.size for x in jax.tree.leaves(shapes))

    count = {name: parameters(f"unipen:{name}") for name in ("icrm", "cxda_any", "cxda_loo")}
    with open(DOCS / "study" / "results.csv") as file:
        avg = {(r["study"], r["label"]): float(r["avg"]) for r in csv.DictReader(file) if r["seed"] == "0"}
    says(
        "methods.md",
        f"`icrm` has {count['icrm']:,} parameters and `cxda_loo` {count['cxda_loo']:,}",
        f"it has {parameters('unipen:icrm', small):,} parameters, fewer than the {count['cxda_any']:,} of `cxda_any`",
        f"add {100 * (count['cxda_any'] / count['cxda_loo'] - 1):.0f} % to the parameters",
        f"it has {avg['unipen_changes', 'icrm_small']:.1f} %, `cxda_any` {avg['unipen', 'cxda_any']:.1f} %, and `icrm` of the published size "
        f"{avg['unipen', 'icrm']:.1f} %",
    )
    says("results.md", f"it has {count['icrm'] / count['cxda_any']:.0f} times as many parameters as `cxda_any`")
