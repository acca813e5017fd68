"""Pages on methods, on the live page, on devices and on GPUs: tables and figures that name a record follow from it, README's too."""

import csv
import io
import json
import re
import zipfile
from functools import partial

import jax
import numpy as np

from cxda_jax import config
from cxda_jax.bench.cases import SHAPES
from cxda_jax.device.model import as_store, find_model
from cxda_jax.disk import models
from cxda_jax.experiment import build_method
from cxda_jax.report.tables import PAPER
from cxda_jax.study import records
from cxda_jax.types import Images
from docs.study.evidence import RECORDS
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


def test_what_is_said_of_gpus_follows_from_the_records():
    step, task = load("benchmark-gpu")["rows"]
    assert (step["case"]["dtype"], step["case"]["work"], task["case"]["work"]) == ("bfloat16", "train", "infer")
    ms, each = step["ours"]["median_ms"], task["ours"]["median_ms"]
    compiled, eager = (step["peers"][f"exact_{how}_bf16"]["median_ms"] for how in ("compiled", "channels_last"))
    program = load("passports/cifar_c-bfloat16-h100-1-1")["programs"]["step"]
    reached, peak = program["flops"] / ms / 1e9, load("benchmark-gpu")["gemm_gflop_per_s"]["ours_bf16"] / 1e3
    shape, validated = SHAPES["cifar_c"], config.read("cifar_c:cxda")["evaluation"]["val_tasks"]
    whole = (shape.steps * ms + shape.validations * validated * each) / 1e3
    says("speed.md", f"| {whole:.0f} s, reckoned from {ms:.2f} ms a step and {each:.2f} ms a validation task |")
    says("speed.md", f"{reached / peak:.0%}".replace("%", " %") + f" ({reached:.0f} of {peak:.0f} TFLOP/s)")
    says("speed.md", f"not measured, and {compiled / ms:.1f} times |")
    says("speed.md", f"{compiled:.2f} ms by torch.compile, {eager:.2f} ms eagerly")
    says("speed.md", f"the {program['flops'] / 1e9:.0f} GFLOP of the [passport]")
    says("speed.md", f"stopped after {load('benchmark-gpu')['seconds']:.0f} seconds")
    minutes = [r.row["train_minutes"] for r in records.read(RECORDS / "cifar10_c_full-0.records")]
    says("speed.md", f"each took {min(minutes):.1f} to {max(minutes):.1f} minutes for its {shape.steps:,} steps")
    says("accelerators.md", f"the step takes {ms:.2f} ms, five times the bound")
    assert round(ms / program["bound_ms"]) == 5

    runs = load("gpu-determinism")["runs"]
    weights, scores = (
        {wanted: {run[name] for run in runs if run["deterministic"] is wanted} for wanted in (True, False)}
        for name in ("weights_hash", "avg")
    )
    assert len(weights[True]) == 1 and len(weights[False]) == 2
    assert round(max(scores[False]) - min(scores[False]), 1) == 0.5
    says("reliability.md", "Two trainings of 300 steps with `--deterministic`")


def test_what_is_said_of_the_papers_size_follows_from_its_record():
    path = RECORDS / "cifar10_c_full-0.records"
    with zipfile.ZipFile(path) as archive:
        lines = [json.loads(line) for line in archive.read("results.jsonl").splitlines()]
        with np.load(io.BytesIO(archive.read("scores.npz"))) as arrays:
            (counts,) = arrays.values()
        configs = json.loads(archive.read("configs.json"))
    scores = {line["row"]["method"]: 100 * counts[line["line"]] / 20 for line in lines}
    assert {c["net"]["width"] for c in configs.values()} == {128}
    assert all(
        line["row"]["steps"] == 56_000 and len(s) == 11_000 for line, s in zip(lines, scores.values(), strict=True)
    )
    paper = {
        row["method"]: float(row["mean"])
        for row in csv.DictReader(PAPER.read_text().splitlines())
        if (row["table"], row["benchmark"], row["metric"], row["setting"]) == ("main", "cifar_c", "mean_accuracy", "")
    }
    rng = np.random.default_rng(0)
    page = (DOCS / "study" / "index.md").read_text()
    level, apart = scores["cxda"].mean(), paper["cxda"] - paper["bn"]
    assert f"reaches {level:.1f} (the paper has {paper['cxda']:.1f} on CIFAR-C)" in page
    assert f"the paper has {apart:+.1f}." in page
    for first, second in (("cxda", "bn"), ("cxda_any", "erm_iid"), ("cxda", "erm_iid"), ("bn", "erm_iid")):
        gap = scores[first] - scores[second]
        told = re.search(
            rf"`{first}` minus `{second}` is ([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)",
            page.split("<!-- answer_full -->")[1],
        )
        found = [gap.mean(), *np.percentile([rng.choice(gap, len(gap)).mean() for _ in range(500)], [2.5, 97.5])]
        np.testing.assert_allclose([float(x) for x in told.groups()], found, atol=0.1)
    with zipfile.ZipFile(RECORDS / "cifar10_c_curves-0.records") as archive:
        lines = [json.loads(line) for line in archive.read("results.jsonl").splitlines()]
        with np.load(io.BytesIO(archive.read("scores.npz"))) as arrays:
            (counts,) = arrays.values()
    means = {line["row"]["setting"]: 5 * counts[line["line"]].mean() for line in lines}
    weights = {line["row"]["weights_hash"] for line in lines}
    with zipfile.ZipFile(path) as archive:
        trained = {json.loads(line)["row"]["weights_hash"] for line in archive.read("results.jsonl").splitlines()}
    assert counts.shape == (5, 600) and len(weights) == 2 and weights < trained, "models of the same trainings"
    (told,) = re.findall(r"\*\*With fewer images\*\*, in 600 tasks, (.*)", page)
    found = [float(x) for x in re.findall(r"([+-][\d.]+) \(", told)]
    gaps = [means[f"context={n}"] - means[""] for n in (0, 1, 5, 20)]
    np.testing.assert_allclose(found, [*gaps, means["context=20"] - means["context=0"]], atol=0.0501)
