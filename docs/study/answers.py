"""The study's answers to its questions, as sentences. Their numbers and their verdicts follow from the records."""

from collections.abc import Iterable, Mapping

import numpy as np

from docs.study import tables, tune
from docs.study.detail_tables import domain_gaps, kind_gaps, over_domains
from docs.study.evidence import Evidence, Gap, sign_of
from docs.study.spread_tables import rerun, seed_gaps
from docs.study.tables import (
    BASE,
    CHANGES,
    FORWARD,
    FULL,
    MAIN,
    RIVALS,
    SIZES,
    VARIED,
    Studies,
    called,
    many,
)

NOTHING = "Nothing is recorded yet."
BLENDED = f"bn_alpha,from={BASE}"
KINDS = {"case by size": "letters whose case shows in their size alone (c, o, s)", "all others": "all other classes"}
Interval = tuple[float, float, float]


def said(gap: Interval) -> str:
    """+1.6 (+1.1 to +2.0)."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*gap)


def listed(texts: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def sorted_out(gaps: Mapping[str, tuple[Interval, int]], better: str, worse: str, equal: str) -> str:
    """Names by sign, each with its gap: "BETTER a +1.0 (+0.5 to +1.5); WORSE b ...; EQUAL c ...".

    Args:
      gaps: by a name as the page calls it, the gap and its sign.
    """
    parts = []
    for wanted, words in ((1, better), (-1, worse), (0, equal)):
        of_sign = sorted(((gap, name) for name, (gap, sign) in gaps.items() if sign == wanted), reverse=wanted >= 0)
        if of_sign:
            parts.append(f"{words} {listed(f'{name} {said(gap)}' for gap, name in of_sign)}")
    return "; ".join(parts)


def bullets(head: str, parts: Iterable[str]) -> str:
    """A point of a list with its own list below it, a sentence each."""
    return "\n".join([f"- {head}:", *(f"    - {part[0].upper()}{part[1:]}." for part in parts)])


def summary(studies: Studies) -> str:
    """README's: its table, and for each main data set where the paper's method stands and who passes BASE."""
    lines = []
    for store in (s for s in MAIN if s in studies and studies[s].has(("cxda", ""), (BASE, ""))):
        found, moved = tables.leads(studies[store]), tables.moved_by_seeds(studies, store)
        signs = {m: {tables.lead_verdict(m, found[m, n], moved) for n in SIZES if (m, n) in found} for m in FORWARD}
        always = [called(m) for m in FORWARD if signs[m] == {1}]
        never_worse = [called(m) for m in FORWARD if signs[m] == {0, 1}]
        gaps = studies[store].gaps([(("cxda", ""), (other, "")) for other in ("bn", BASE)])
        words = {1: "better than", -1: "worse than", 0: "not told apart from"}
        wide = {
            pair: f"; {low:+.1f} to {high:+.1f} over the seeds"
            for pair, ((_, low, high), _) in seed_gaps(studies[store]).items()
        }
        own = listed(
            f"{words[tables.verdict(gap, moved)]} {called(b[0])} ({gap.avg[0]:+.1f}{wide.get((a[0], b[0]), '')})"
            for (a, b), gap in gaps.items()
        )
        text = f"On `{store}` the paper's `cxda` is {own}."
        if always:
            text += f" Better than `{BASE}` at every number of images shown, 0 to {max(SIZES)}: {listed(always)}."
        if never_worse:
            text += f" Better at some and worse at none: {listed(never_worse)}."
        lines.append(text)
    if FULL in studies:
        gap, small = tables.full_gaps(studies[FULL])["cxda_any", BASE], tables.small_leads(studies)["cxda_any"]
        lines.append(
            f"These networks are small. At the paper's width and length `cxda_any` minus `{BASE}` is {said(gap.avg)} on `{MAIN[1]}`, "
            f"{many(len(gap.seeds))}, where it is {small:+.1f} in small networks."
        )
    return f"{tables.summary(studies)}\n\n{' '.join(lines)}" if lines else NOTHING


def rivals(studies: Studies) -> str:
    """1. Does the paper's method beat its rivals?"""
    lines = []
    for store in (s for s in MAIN if s in studies and studies[s].has(("cxda", ""))):
        evidence, paper = studies[store], tables.paper_means(store)
        gaps = tables.rival_gaps(evidence)
        own = {rival: gap for rival, gap in gaps.items() if rival in paper}
        if not own:
            continue
        ahead = [rival for rival, gap in own.items() if gap.sign > 0]
        lowest = [rival for rival, gap in own.items() if gap.w10 and sign_of(gap.w10) > 0]
        moved = tables.moved_by_seeds(studies, store)
        clear = [rival for rival in ahead if tables.verdict(own[rival], moved) > 0]
        better = f"It is better than {listed(map(called, clear))}: these leads are larger than what seeds move"
        if not clear:
            better = "None of these leads is larger than what seeds move"
        nearest = min(own, key=lambda rival: own[rival].avg[0])
        theirs = max((rival for rival in paper if rival != "cxda"), key=lambda rival: paper[rival])
        parts = [
            f"`cxda` is ahead of {len(ahead)} of {many(len(own), 'rival')} of the paper on average, and of {len(lowest)} in the worst tenth",
            better,
            f"the nearest rival is {with_gap(nearest, own[nearest], evidence)}; in the paper, on {tables.STAND_INS[store]}, it is "
            f"{called(theirs)}, {paper['cxda'] - paper[theirs]:+.1f}",
        ]
        if untested := [called(m) for m in tune.shares(store) if tables.CHOSEN[m] not in gaps]:
            parts.append(
                f"the rate of fine-tuning is the paper's there. Not tested yet at the rate that validation chose: {listed(untested)}"
            )
        elif chosen := {m: gaps[name] for m, name in tables.CHOSEN.items() if name in gaps}:
            won = [m for m, gap in chosen.items() if tables.verdict(gap, moved) > 0]
            strongest = min(chosen, key=lambda m: chosen[m].avg[0])
            parts.append(
                f"the rate of fine-tuning is the paper's there. With the one that validation chose, `cxda` is better than {len(won)} of "
                f"{len(chosen)}; the nearest is then {with_gap(strongest, chosen[strongest], evidence)}"
            )
        others = {
            BASE: "which the paper does not have",
            BLENDED: f"which is `{BASE}` with statistics blended on the device",
        }
        for (_, (other, _)), gap in evidence.gaps([(("cxda", ""), (other, "")) for other in others]).items():
            words = {1: "It is better than", -1: "It is worse than", 0: "No difference is shown to"}[
                tables.verdict(gap, moved)
            ]
            parts.append(f"{words} {with_gap(other, gap, evidence)}, {others[other]}")
        if missing := [called(rival) for rival in RIVALS if rival not in gaps]:
            parts.append(f"Not recorded yet: {listed(missing)}")
        lines.append(bullets(f"**On `{store}`** ({many(len(evidence.scores['cxda', '']))})", parts))
    return "\n".join(lines) or NOTHING


def with_gap(rival: str, gap: Gap, evidence: Evidence) -> str:
    return f"{called(rival)}, {said(gap.avg)}{tables.fewer(gap, evidence)}"


def buffers(studies: Studies) -> str:
    """2. Does anything beat a network that does not adapt? From which size of the buffer, and where does it do harm?"""
    lines, most = [], max(SIZES)
    for store in (s for s in MAIN if s in studies):
        found, moved = tables.leads(studies[store]), tables.moved_by_seeds(studies, store)
        labels = [label for label in FORWARD if (label, most) in found]
        good: dict[str, str] = {}
        harm: dict[str, list[str]] = {}
        for label in sorted(labels, key=lambda label: -found[label, most].avg[0]):
            signs = {n: tables.lead_verdict(label, found[label, n], moved) for n in SIZES if (label, n) in found}
            gains = [n for n in signs if all(sign > 0 for m, sign in signs.items() if m >= n)]
            if gains:
                where = "at every size, the empty one too" if gains[0] == 0 else f"from {images(gains[0])} on"
                good[label] = f"{called(label)} {where}, {said(found[label, most].avg)} at {most}"
            if harms := [n for n, sign in signs.items() if sign < 0]:
                harm.setdefault(spans(harms, list(signs)), []).append(called(label))
        if labels:
            parts = [
                f"better than `{BASE}`: {'; '.join(good.values())}" if good else f"nothing is better than `{BASE}`"
            ]
            lost = "; ".join(f"{listed(names)} {where}" for where, names in harm.items())
            parts.append(f"worse: {lost}" if lost else "nothing does harm")
            pairs = {((m, f"context={most}"), (m, "context=0")): called(m) for m in good}
            adds = {pairs[pair]: (gap.avg, gap.sign) for pair, gap in studies[store].gaps([*pairs]).items()}
            if adds:
                said_so = sorted_out(adds, "add to", "take from", "are not shown to add to or take from")
                parts.append(f"the device's own {most} images, instead of none, {said_so}")
            lines.append(bullets(f"**On `{store}`** ({many(len(found[labels[0], most].seeds))})", parts))
    return "\n".join(lines) or NOTHING


def images(n: int) -> str:
    return "one image" if n == 1 else f"{n} images"


def spans(sizes: list[int], of: list[int]) -> str:
    """Where in `of` the sizes are: "at every size", "at 1 to 10 images", "at 0 and 5 images"."""
    if sizes == of:
        return "at every size"
    runs: list[list[int]] = []
    for n in sizes:
        if runs and of.index(n) == of.index(runs[-1][-1]) + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return f"at {listed(f'{run[0]} to {run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)} images"


def changes(studies: Studies) -> str:
    """3. Which parts of the method count?"""
    moved = tables.moved_by_seeds(studies, "unipen")
    found = {CHANGES[name]: (gap.avg, tables.verdict(gap, moved)) for name, gap in tables.changed(studies).items()}
    if not found:
        return NOTHING
    little = "**No difference is shown, or less than seeds move**, with"
    text = sorted_out(found, "**Better** with", "**Worse** with", little)
    return "- " + text.replace("; **", ".\n- **") + "."


def domains(studies: Studies) -> str:
    """4. How does the lead vary with the domains?"""
    lines = []
    for store in (s for s in (*MAIN, "unipen_sizes") if s in studies):
        evidence, parts = studies[store], []
        for kind, what in (("num_domains", "domain"), ("support_size", "support image")):
            numbers = sorted({int(s.split("=")[1]) for _, s in evidence.scores if s.startswith(kind)})
            for label in ("icrm", "cxda") if numbers else ():
                ends = [((label, f"{kind}={n}"), (BASE, f"{kind}={n}")) for n in (numbers[0], numbers[-1])]
                gaps = evidence.gaps(ends)
                if len(gaps) == 2:
                    first, last = (said(gaps[pair].avg) for pair in ends)
                    parts.append(
                        f"{called(label)} minus `{BASE}` is {first} with {many(numbers[0], what)}, {last} with {numbers[-1]}"
                    )
        apart = domain_gaps(evidence)
        for label in (m for m in VARIED[:2] if m in apart):
            gains = np.array([*apart[label].values()])
            parts.append(
                f"{called(label)} is above `{BASE}` in {(gains > 0).sum()} of {len(gains)} test domains and below in "
                f"{(gains < 0).sum()}, by {said(over_domains(evidence, label))} over the domains; a domain changes by {gains.min():+.0f} to "
                f"{gains.max():+.0f} points"
            )
        kinds = {name: of["icrm"] for name, of in kind_gaps(evidence).items() if "icrm" in of}
        if kinds:
            of_kinds = listed(
                f"{said(gap)} on {KINDS.get(name, f'questions of {name}')}" for name, gap in kinds.items()
            )
            parts.append(f"`icrm` minus `{BASE}` is {of_kinds}")
        if parts:
            lines.append(bullets(f"**On `{store}`**", parts))
    return "\n".join(lines) or NOTHING


def attention(studies: Studies) -> str:
    """5. Where does attention go, and does it predict who gains?"""
    lines = []
    for what, title in (("own_domain", "domain"), ("same_class", "class")):
        by_sign: dict[int, list[str]] = {1: [], 0: [], -1: []}
        links: dict[int, list[str]] = {1: [], 0: [], -1: []}
        for store in (s for s in (*MAIN, FULL) if s in studies):
            for label, told in studies[store].details.get("methods", {}).items():
                if a := told.get("attention"):
                    mean, low, high = (100 * share for share in a[what])
                    chance = 100 * a[f"{what}_chance"]
                    name = f"{called(label)} on `{store}`"
                    shares = f"{name} ({mean:.1f} %, {low:.1f} to {high:.1f}; chance {chance:.1f})"
                    by_sign[sign_of((mean - chance, low - chance, high - chance))].append(shares)
                    if r := a.get("gain_correlation", {}).get(what):
                        links[sign_of(tuple(r))].append("{} {:+.2f} ({:+.2f} to {:+.2f})".format(name, *r))
        if not any(by_sign.values()):
            continue
        parts = [
            f"{words}: {listed(by_sign[sign])}"
            for sign, words in (
                (1, "more than chance"),
                (0, "no more than chance, as far as shown"),
                (-1, "less than chance"),
            )
            if by_sign[sign]
        ]
        clear, count = [*links[1], *links[-1]], sum(map(len, links.values()))
        if clear:
            parts.append(
                f"its correlation with what a query gains leaves out zero for {listed(clear)}, of {count} measured"
            )
        elif count:
            parts.append(
                f"it does not predict which query gains: all {count} correlations hold zero in their intervals"
            )
        lines.append(bullets(f"**Attention on images of the query's own {title}**", parts))
    return "\n".join(lines) or NOTHING


def spread(studies: Studies) -> str:
    """6. What moves a result without a reason?"""
    lines = []
    for store, found in tables.seeds_move(studies).items():
        deviation = tables.root_mean_square(found.values())
        least, most = min(found, key=lambda k: found[k]), max(found, key=lambda k: found[k])
        counted = tables.moved_by_seeds(studies, store)
        one, three, five = (tables.needed(counted, seeds) for seeds in (1, 3, 5))
        with_all = (
            "At that deviation"
            if counted == deviation
            else f"With that of all data sets, {counted:.2f}, which is larger,"
        )
        lines.append(
            f"- **The seed** moves Avg on `{store}` by a standard deviation of {deviation:.2f} points (root mean square of "
            f"{many(len(found), 'method')}; least {found[least]:.1f}, {called(least)}; most {found[most]:.1f}, {called(most)}). {with_all} "
            f"two methods with one seed each must differ by {one:.1f} points to be told apart, with three seeds each by "
            f"{three:.1f}, with five by {five:.1f}."
        )
    for store in (s for s in tables.STORES if s in studies):
        shown = {
            f"{called(a)} minus {called(b)}": (gap, sign_of(gap))
            for (a, b), (gap, _) in seed_gaps(studies[store]).items()
        }
        if shown:
            signs = sorted_out(shown, "above zero", "below zero", "not told from zero")
            lines.append(f"- **Over the seeds** of `{store}` the mean difference, with a t interval, is: {signs}.")
    told = rerun(studies)
    again: dict[str, list[str]] = {}
    for method, what, gap, *_ in told:
        again.setdefault(what, []).append(f"{method} {said(gap)}")
    twice = [method for method, what, _, alike, _ in told if what == "once more" and "of again" in alike]
    if told:
        parts = [f"{what}: {listed(gaps)}" for what, gaps in again.items()]
        if twice:
            parts.append(f"twice on one machine (again, once more) the weights are equal, bit for bit: {listed(twice)}")
        if moved := tables.moved_by_seeds(studies, "unipen"):
            # "once more" is left out where it is "again", bit for bit.
            other = [
                gap
                for _, what, gap, alike, _ in told
                if "of the first" not in alike and (what != "once more" or "of again" not in alike)
            ]
            within = sum(abs(gap[0]) <= tables.needed(moved, 1) for gap in other)
            outside = sum(sign_of(gap) != 0 for gap in other)
            parts.append(
                f"where the weights differ, {within} of {len(other)} differences are within {tables.needed(moved, 1):.1f} points, what two "
                f"seeds differ by; {outside} of their intervals leave out zero, so an interval over tasks says little of another training"
            )
        lines.append(bullets("**The same seed again**, minus the first training", parts))
    return "\n".join(lines) or NOTHING
