"""The page of what fit() found: whether the adapter is trusted, what it gains and where, and what to do next."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cxda_jax.adapter.adapter import CURVES, PLAIN, SIZES, Adapter
from cxda_jax.adapter.diagnosis import BY_HEART, Diagnosis
from cxda_jax.adapter.judge import RIVALS
from cxda_jax.adapter.report import (
    COLUMNS,
    FULL,
    LEAST,
    corrects,
    in_cells,
    last_layer,
    narrower,
    nothing_taken,
    other_floors,
    sentences,
    span_of,
    style_alone,
)
from cxda_jax.errors import printable
from cxda_jax.pages.page import Page, Section, render
from cxda_jax.pages.rows import Row, fold, picture

ENOUGH = 10  # domains, with which a few points are sure
STEPS = 4  # that are advised, at most
RISKS = (0.01, 0.05, 0.1, 0.2)
LEGEND = {"dot": "the adapter, with its 95 % interval", "ring": "EM", "square": "EM in clusters",
          "diamond": "own style, no buffer", "triangle": "new last layer, no buffer"}  # fmt: skip
MARKED = {"ring": "em", "square": "unmix", "diamond": "0", "triangle": "refit"}  # in a row of gains


def as_html(adapter: Adapter) -> str:
    """The page, as text."""
    report = adapter.report
    parts = {
        "summary": ("In short", _summary(report)),
        "next": ("What to do next", "".join(f"<p>{_text(step)}</p>" for step in advice(adapter))),
        "gain": ("Gain by kind of device", _gains(report)),
        "sizes": ("Gain by size of the buffer", _sizes(report)),
        "domains": ("Gain by domain", _domains(report["by_domain"])),
        "calibration": ("Calibration", _calibration(report)),
        "risk": ("Risk and coverage", _risk(adapter)),
        "words": ("How it was measured", "".join(f"<p>{_text(line)}</p>" for line in list(sentences(report))[1:])),
    }
    sections = [Section(name, title, [("", part)]) for name, (title, part) in parts.items()]
    return render(Page("What adapting gains", [], [], sections))


def advice(adapter: Adapter) -> list[str]:
    """What to do next, the most important first."""
    found = _if_trusted(adapter.report) if _trusted(adapter.report) else _if_not(adapter)
    return [*_of_images(adapter.report), *found][:STEPS]


def _of_images(report: Mapping[str, Any]) -> Iterator[str]:
    if report["right"] > BY_HEART:
        yield (
            f"Give images that the classifier was not trained on. It is right on {report['right']:.1%} of these, so it "
            "knows them by heart and leaves nothing to learn."
        )


def _if_trusted(report: Mapping[str, Any]) -> Iterator[str]:
    overall, domains = report["overall"], len(report["by_domain"])
    if "refit" in overall and overall["refit"][0] > overall[FULL][0]:
        yield (
            f"If you can change the classifier, give it a {last_layer(report)}: that gains {span_of(overall['refit'])} "
            "points, more than the adapter."
        )
    if style_alone(report):
        yield "A device needs no buffer: the adapter takes nothing from one. It answers by each image alone."
    elif corrects(report) and overall["over_0"][1] <= 0:
        yield (
            f"A device needs no buffer: the image's own style gains {span_of(overall['0'])} points without one, and "
            f"{FULL} images add {span_of(overall['over_0'])}, which is not sure."
        )
    else:
        sure = next(n for n in SIZES[1:] if all(overall[str(m)][1] > 0 for m in SIZES if m >= n))
        more = f", and {FULL} images bring {overall[FULL][0]:+.1f}" * (str(sure) != FULL)
        yield (
            f"Collect unlabelled images on a device. With {sure} images the gain is sure, "
            f"{overall[str(sure)][0]:+.1f} points on average{more}."
        )
    best = max(("em", "own_em", "unmix"), key=lambda name: overall[name][0])
    if overall[f"over_{best}"][2] < 0:
        yield (
            f"EM alone gains more here, {span_of(overall[best])} points: the domains seem to differ in class shares "
            "alone. fit(floor=0) comes nearest to it, but EM and a floor of 0 protect no rare class."
        )
    if harmed := [name for name, row in report["gain"].items() if row[FULL][2] < 0]:
        yield f"Do not adapt on devices of this kind, where the adapter surely loses: {'; '.join(harmed)}."
    yield from other_floors(report)
    if domains < ENOUGH:
        yield f"Add images of more domains. Only {domains} tested the adapter, so the intervals are wide."
    yield (
        "If you have labelled images of a new domain, check the gain there by cxda evaluate. A single domain may lose "
        "although the average gains."
    )


def _if_not(adapter: Adapter) -> Iterator[str]:
    report, gains = adapter.report, [*adapter.report["by_domain"].values()]
    yield from narrower(report)
    if report["steps"] < report["asked"]:
        yield f"Give more minutes: time was left for {report['steps']} of {report['asked']} training steps."
    if report["one_set"]:
        yield "Give the domain of each image, if you know it. An adapter then learns more than class shares."
    elif len(gains) < ENOUGH:
        yield (
            f"Give images of more domains. {len(gains)} tested the adapter; so few must gain nearly the same for a "
            "sure gain."
        )
    elif losing := sum(gain < 0 for gain in gains):
        yield f"Look at the domains: {losing} of {len(gains)} lose. If they differ much, more domains help most."
    if not report["one_set"] and adapter.keys != "style":
        yield (
            f"Give a style, such as means and deviations of early and middle feature maps. The {adapter.keys} took its "
            "place, and tell domains apart worse."
        )
    if report["headroom"]:
        yield Diagnosis(report["headroom"], 0.0).headroom()
    yield "Until then devices keep the classifier's own answers, and nothing is lost. adapter.trusted() adapts anyway."


def _trusted(report: Mapping[str, Any]) -> bool:
    return report["overall"][FULL][1] > 0


def _summary(report: Mapping[str, Any]) -> str:
    """The verdict in a sentence or two, and its numbers."""
    overall, (mean, *_), alone = report["overall"], report["overall"][FULL], style_alone(report)
    before, after = f"{overall['plain']:.1f} %", f"{overall['plain'] + mean:.1f} %"
    facts = {
        "Right before": before,
        "Right after": after if alone else f"{after}, with {FULL} images",
        "Gain in points": f"{span_of(overall[FULL])}, 95 % interval",
    }
    source = "from each image's own style, without a buffer" if alone else f"from {FULL} unlabelled images"
    if _trusted(report):
        facts["Expected gain"] = f"{report['expected']:+.1f}; {_beside_measured(report)}"
        said = (
            f"Trusted: on a new place, expect a gain of {report['expected']:.1f} points {source}. "
            f"In the tests {before} of the answers were right before and {after} after."
        )
    else:
        said = (
            f"Not trusted: {FULL} unlabelled images of a new place may do harm. In the tests {before} of the answers "
            f"were right before and {after} after. Devices keep the classifier's own answers."
        )
    if report.get("rare") is not None and not nothing_taken(report):
        facts["Recall of rare classes"] = f"{report['rare']:+.1f} points in the kind of task that is worst for them"
    facts["Tested on"] = f"{len(report['by_domain'])} domains, each new to the adapter that it tests"
    pairs = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(fact)}</dd></div>" for name, fact in facts.items())
    return f'<p class="verdict">{_text(said)}</p><dl>{pairs}</dl>'


def _beside_measured(report: Mapping[str, Any]) -> str:
    """Why the expected gain is another than the measured one."""
    more = report.get("beyond_turns", 0)  # older reports do not say
    too_large = "a trusted adapter's measured gain is a little too large"
    return too_large + f", but all domains together teach {more:.1f} points more" * (more >= LEAST)


def _gains(report: Mapping[str, Any]) -> str:
    """A row for each kind of tasks, and the whole table behind a fold."""
    overall = report["overall"]
    marked = {shape: name for shape, name in MARKED.items() if name in overall and (name != "0" or corrects(report))}
    rows = [
        Row(name, span_of(row[FULL]), {"dot": row[FULL], **{shape: row[n][:1] for shape, n in marked.items()}})
        for name, row in [*report["gain"].items(), ("all", overall)]
    ]
    legend = {shape: LEGEND[shape] for shape in ("dot", *marked)}
    best = max((name for name in ("0", *RIVALS) if name in overall), key=lambda name: overall[name][0])
    said = (
        f"What {FULL} images of a device bring, by the number of domains mixed on it and by its class shares. Compared "
        f"with the best simpler way the adapter gains {span_of(overall[f'over_{best}'])} points."
    )
    head, *cells = in_cells(report)
    return f"<p>{said}</p>{picture(rows, legend, 'points')}{fold('All gains as a table', _table(head, cells))}"


def _sizes(report: Mapping[str, Any]) -> str:
    spans = {n: report["overall"][str(n)] for n in SIZES}
    rows = [Row(COLUMNS.get(str(n), f"{n} images"), span_of(span), {"dot": span}) for n, span in spans.items()]
    rows[0] = rows[0]._replace(name="no image" + ", own style" * corrects(report))
    said = "How the gain grows with the unlabelled images of a device, over all kinds."
    return f"<p>{said}</p>{picture(rows, {'dot': LEGEND['dot']}, 'points')}"


def _domains(gains: Mapping[str, float]) -> str:
    """The domains, the worst first."""
    ordered = sorted(gains.items(), key=lambda gained: gained[1])
    (worst, least), (best, most) = ordered[0], ordered[-1]
    losing = sum(gain < 0 for gain in gains.values())
    said = (
        f"The worst domain is {worst} with {least:+.1f} points, the best is {best} with {most:+.1f}. "
        f"{losing} of {len(gains)} lose. A single domain has few images, so part of the spread is chance."
    )
    rows = [Row(name, f"{gain:+.1f}", {"bar": [gain]}) for name, gain in ordered]
    return f"<p>{_text(said)}</p>{picture(rows, {'bar': f'gain with {FULL} images'}, 'points')}"


def _calibration(report: Mapping[str, Any]) -> str:
    names = {PLAIN: "the classifier", "0": "no image", **{str(n): f"{n} images" for n in SIZES[1:]}}
    errors = {names[name]: [100 * error for error in report["calibration"][name]["ece"]] for name in names}
    rows = [
        Row(name, f"{before:.1f} % → {after:.1f} %", {"ring": [before], "dot": [after]})
        for name, (before, after) in errors.items()
    ]
    said = (
        "How far confidence is from the part of right answers, on average (expected calibration error). "
        "predict_proba() divides the logits by a temperature, which other domains chose."
    )
    return f"<p>{said}</p>{picture(rows, {'ring': 'without temperature', 'dot': 'with it'}, 'per cent')}"


def _risk(adapter: Adapter) -> str:
    """Wrong answers among the surest ones, and thresholds that promise a risk."""
    plain, adapted = (adapter.report["calibration"][name]["risk"] for name in (PLAIN, FULL))
    rows = []
    for coverage, before in plain.items():
        risks = [100 * before, 100 * adapted[coverage]]
        name = f"surest {100 * float(coverage):.0f} %" if float(coverage) < 1 else "all answers"
        rows.append(Row(name, "{:.1f} % → {:.1f} %".format(*risks), {"ring": risks[:1], "dot": risks[1:]}))
    legend = {"ring": "the classifier", "dot": f"adapted with {FULL} images"}
    said = "The part of wrong answers, if a device answers only where it is surest."
    table = _table(["promised risk", "confidence", "answered"], [*_thresholds(adapter)])
    whose = f"answers adapted with {FULL} images" if adapter.helps else "the classifier's own answers"
    told = (
        f"For {whose}. If a device answers only from this confidence on, no larger part of its answers is wrong: on "
        "average over new domains, with 95 % confidence. threshold_for(risk) gives the number. Where there is none, "
        "these images cannot show so small a risk."
    )
    return f'<p>{said}</p>{picture(rows, legend, "per cent wrong")}{table}<p class="notes">{told}</p>'


def _thresholds(adapter: Adapter) -> Iterator[list[str]]:
    thresholds, accepted, _ = (np.asarray(adapter.known[name])[int(adapter.helps)] for name in CURVES)
    answered = accepted.sum(0) / accepted[:, -1].sum()
    for risk in RISKS:
        least = adapter.threshold_for(risk)
        if math.isinf(least):
            yield [f"{risk:.0%}", "–", "–"]
        else:
            yield [f"{risk:.0%}", f"{least:.3f}", f"{answered[np.flatnonzero(thresholds >= least)[-1]]:.1%}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        name, *numbers = map(_text, cells)
        others = "".join(f'<{kind} class="number">{number}</{kind}>' for number in numbers)
        return f"<tr><{kind}>{name}</{kind}>{others}</tr>"

    body = "".join(line("td", row) for row in rows)
    table = f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{_text(head[0])}">{table}</div>\n'


def _text(text: str) -> str:
    return html.escape(printable(text))
