"""A report of fit() as text. judge.py finds its numbers, page.py shows them, and docs/fit.md explains them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cxda_jax.adapter.adapter import PLAIN, SIZES
from cxda_jax.adapter.diagnosis import BY_HEART, FIRST, Diagnosis
from cxda_jax.adapter.judge import RIVALS, WAYS
from cxda_jax.adapter.settling import RARE
from cxda_jax.machine.progress import aligned

FULL = str(SIZES[-1])
LEAST = 0.1  # points, from which on a gain is told as larger
COLUMNS: Mapping[str, str] = {  # of a row of gains, where they are known; the report itself has more
    "0": "own style",
    **{str(n): f"{n} images" for n in SIZES[2:]},
    "em": "EM",
    "unmix": "EM in clusters",
    "refit": "new last layer",
}


def in_words(report: Mapping[str, Any]) -> str:
    """The verdict, the table of gains, and a line on each other part."""
    lines = list(sentences(report))
    return "\n".join([lines[0], "", as_table(report), "", *lines[1:]])


def as_table(report: Mapping[str, Any]) -> str:
    """The gains of a report as lines of a table."""
    return "\n".join(aligned(in_cells(report)))


def in_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """The gains of a report as cells of a table, the head first."""
    rows = [*report["gain"].items(), ("all", report["overall"])]
    columns = [name for name in COLUMNS if name in report["overall"] and (name != "0" or corrects(report))]
    head = ["gain in points (95 % interval)", "right, %", *(COLUMNS[name] for name in columns)]
    return [head, *([name, f"{row['plain']:.1f}", *(span_of(row[c]) for c in columns)] for name, row in rows)]


def sentences(report: Mapping[str, Any]) -> Iterator[str]:
    """The verdict, and a line on each other part."""
    overall = report["overall"][FULL]
    gain = f"the adapter gains {span_of(overall)} points on new domains"
    gain = f"By the image's own style alone {gain}" if style_alone(report) else f"With {FULL} images {gain}"
    if overall[1] > 0:
        yield f"Trusted. {gain}; expect {report['expected']:+.1f}."
    else:
        yield f"Not trusted. {gain}, so it may lose. Devices keep the classifier's own answers."
    yield from _turns(report)
    if overall[1] > 0 and style_alone(report):
        yield "A device needs no buffer: on held-out domains it did not pay to take anything from one."
    if report["one_set"]:
        yield (
            "Domains were not given, and random parts of the images took their place. So this holds for devices that "
            "differ from these images in class shares alone. A device that looks otherwise keeps the classifier's own "
            "answers."
        )
    if overall[1] <= 0:
        yield from narrower(report)
        yield (
            "What may help: more domains; a style of earlier maps; more minutes, if steps were left out. "
            "adapter.trusted() adapts all the same."
        )
    yield from of_rare(report)
    name, least = min(report["by_domain"].items(), key=lambda gained: gained[1])
    losing = sum(gain < 0 for gain in report["by_domain"].values())
    yield f"{losing} of {len(report['by_domain'])} domains lose; the least gain is {least:+.1f}, on domain {name}."
    yield from _parts(report)
    if not report["headroom"]:
        yield f"Fewer than two domains have {FIRST} images: no headroom."
    elif not style_alone(report) or overall[1] <= 0:
        yield Diagnosis(report["headroom"], 0.0).headroom()
    if report["right"] > BY_HEART:
        yield (
            f"The classifier knows these images by heart: {report['right']:.1%} of its answers are right. "
            "An adapter learns nothing from them; give images that it was not trained on."
        )
    harms = [f"{name} with {n} images" for name, row in report["gain"].items() for n in SIZES[1:] if row[str(n)][2] < 0]
    yield f"These surely lose: {'; '.join(harms)}." if harms else "No kind of task surely loses."
    plain = report["calibration"][PLAIN]
    adapted = report["calibration"][FULL] if overall[1] > 0 else plain
    yield (
        f"Calibration error: {plain['ece'][0]:.1%} for the classifier, {plain['ece'][1]:.1%} if a temperature divides "
        f"its logits, {adapted['ece'][1]:.1%} for predict_proba(). "
        f"Of the surest 80 % of answers {plain['risk']['0.8']:.1%} and {adapted['risk']['0.8']:.1%} are wrong."
    )
    alarms = report["drift"]["false_alarms"]
    yield (
        "Drift is never told: that takes four domains."
        if alarms is None
        else f"The drift warning came for {alarms:.1%} of the buffers of test domains, which would then not adapt."
    )


def _turns(report: Mapping[str, Any]) -> Iterator[str]:
    """Which adapters were tested, and how the one that is returned differs from them."""
    steps = f"{report['steps']} of {report['asked']} steps"
    yield (
        f"Each of the {len(report['by_domain'])} domains tested an adapter that had not learnt from it "
        f"({report['turns']} turns). The adapter itself learnt from all {report['domains']} domains in {steps}."
    )
    if report["overall"][FULL][1] > 0:
        more = f", by about {report['beyond_turns']:.1f} points" if report.get("beyond_turns", 0) >= LEAST else ""
        yield (
            f"So new domains tend to gain more than the tested ones{more}. The lower ends of the intervals are the "
            f"promise{', and the upper ends are too low by as much' * bool(more)}."
        )


def nothing_taken(report: Mapping[str, Any]) -> bool:
    """Whether the adapter takes nothing from a buffer."""
    return report.get("takes") == WAYS[-1]


def style_alone(report: Mapping[str, Any]) -> bool:
    """Whether it corrects answers by the image's own style, and a buffer changes none."""
    return nothing_taken(report) and corrects(report)


def narrower(report: Mapping[str, Any]) -> Iterator[str]:
    """What to do where the style was too wide to be learnt from."""
    if most := report.get("room"):
        yield (
            f"Give a style of at most {most:,} numbers, such as moments of fewer maps (--maps of cxda features). Then "
            "the image's own style can correct answers too, which is often most of the gain."
        )


def of_rare(report: Mapping[str, Any]) -> Iterator[str]:
    """What becomes of rare classes, and of which floor."""
    floor, rare = report.get("floor", 0), report.get("rare")  # older reports have neither
    if floor == 1:
        yield "With a floor of 1 a buffer changes no answer."
    elif floor:
        yield f"With a floor of {floor:g} a buffer divides the odds between two classes by {1 / floor:.3g} at most."
    if rare is not None and not nothing_taken(report):
        changes = "changes" if report["overall"][FULL][1] > 0 else "would change"
        worst = report.get("rare_in")
        span = f"{span_of(worst['change'])} points from {worst['before']:.1f} %" if worst else f"{rare:+.1f} points"
        where = f" ({worst['kind']}, {worst['images']} such images)" if worst else ""
        yield (
            f"Recall of rare classes (at most {RARE} of the buffer's {FULL} images) {changes} by {span} in the kind of "
            f"task that is worst for them{where}."
        )
    elif "rare" in report and not nothing_taken(report):
        yield "Too few images are of rare classes to tell what a buffer does to these."
    yield from other_floors(report)


def other_floors(report: Mapping[str, Any]) -> Iterator[str]:
    """What no floor would gain and lose, and which one would keep rare classes but gain too little."""
    floors = report.get("floors", {})
    chosen, unbound = floors.get(f"{report.get('floor', 0):g}"), floors.get("0")
    if not chosen or chosen["rare"] is None:
        return
    if unbound and unbound["gain"] >= chosen["gain"] + LEAST:
        yield (
            f"If rare classes do not matter to you: with floor=0 the adapter would gain {unbound['gain']:+.1f} points "
            f"on average in place of {chosen['gain']:+.1f}, and their recall would change by {unbound['rare']:+.1f}."
        )
    largest, keeps = [*floors.items()][-1]
    if keeps is not chosen:
        unsure = ", but no gain is sure" if report["overall"][FULL][1] > 0 else ""
        yield f"With floor={largest} this recall would change by {keeps['rare']:+.1f}{unsure}."


def _parts(report: Mapping[str, Any]) -> Iterator[str]:
    """What simpler ways gain, and what the adapter gains over the best of these."""
    overall = report["overall"]
    if corrects(report):
        yield f"The image's own style gains {span_of(overall['0'])}, without any buffer."
    if "refit" in overall:
        yield f"A new {last_layer(report)} gains {span_of(overall['refit'])}, without any buffer."
    em = f"EM gains {span_of(overall['em'])} with {FULL} images"
    if corrects(report):
        em += f", and {span_of(overall['own_em'])} after the correction by the own style"
    yield f"{em}. In clusters of the buffer's styles it gains {span_of(overall['unmix'])}."
    best = max((name for name in ("0", *RIVALS) if name in overall), key=lambda name: overall[name][0])
    unbound = " EM has no floor for rare classes." if report.get("floor") and best in RIVALS[:3] else ""
    yield f"Compared with the best of these, the adapter gains {span_of(overall[f'over_{best}'])}.{unbound}"
    if not (corrects(report) or report["one_set"]):
        tried = "does not surely gain on domains that did not teach it: it is left out"
        yield f"Correcting by the own style {tried if report.get('tries', True) else 'was not tried'}."


def last_layer(report: Mapping[str, Any]) -> str:
    """The last layer that is a rival."""
    return f"last layer that reads the {report.get('reads', 'features')} of these images"  # older reports do not say


def corrects(report: Mapping[str, Any]) -> bool:
    """Whether answers without a buffer were others than the classifier's, in any turn."""
    return any(report["overall"]["0"])


def span_of(numbers: Sequence[float]) -> str:
    """A gain with its interval."""
    mean, low, high = numbers
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
