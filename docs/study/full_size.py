"""Sentences of the study about networks of the paper's width and length."""

from docs.study import run, tables
from docs.study.answers import NOTHING, bullets, listed, said
from docs.study.tables import BASE, FULL, FULL_CURVES, MAIN, Studies, called, many


def full(studies: Studies) -> str:
    """The paper's width and length: its figures beside ours, and what is left of the leads of small networks."""
    if FULL not in studies:
        return NOTHING
    evidence, store = studies[FULL], MAIN[1]
    paper, gaps, small = tables.paper_means(store), tables.full_gaps(evidence), tables.small_leads(studies)
    own = gaps["cxda", "bn"]
    level = float(evidence.level(("cxda", ""), "avg").mean())
    moved = tables.moved_by_seeds(studies, store)
    return "\n".join(
        [
            f"- **The paper's method** reaches {level:.1f} (the paper has {paper['cxda']:.1f} on CIFAR-C). `cxda` minus `bn` is "
            f"{said(own.avg)}; the paper has {paper['cxda'] - paper['bn']:+.1f}.",
            bullets(
                "**Against a network that does not adapt**, with 100 images",
                (
                    f"{called(m)} minus `{BASE}` is {said(gap.avg)}, and {small[m]:+.1f} in the small networks above"
                    for (m, other), gap in gaps.items()
                    if other == BASE
                ),
            ),
            *full_curves(studies),
            f"- **Seeds.** Each method has {many(len(own.seeds))} here. With so many, two small networks must differ by "
            f"{tables.needed(moved, len(own.seeds)):.1f} points to be told apart. How far seeds move wide networks was not measured.",
        ]
    )


def full_curves(studies: Studies) -> list[str]:
    """Sentences about the models of FULL with fewer images."""
    if FULL_CURVES not in studies:
        return []
    evidence, (method,) = studies[FULL_CURVES], [m for m, sizes in run.CURVED.items() if sizes]
    gaps = evidence.gaps([((method, f"context={n}"), (BASE, "")) for n in run.CURVED[method]])
    gains = evidence.gaps([((method, f"context={n}"), (method, "context=0")) for n in run.CURVED[method][-1:]])
    (gain,) = gains.values()
    told = listed(f"{said(gap.avg)} with {a[1].split('=')[1]}" for (a, _), gap in gaps.items())
    last = run.CURVED[method][-1]
    return [
        f"- **With fewer images**, in {run.CURVE_TASKS} tasks, `{method}` minus `{BASE}` is {told} images. {last} images instead of none "
        f"add {said(gain.avg)}."
    ]
