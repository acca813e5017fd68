"""Adapts the classifier that you already have: fit() learns from what it says of labelled images.

    adapter = cxda_jax.fit(logits, labels, domains, style=style)    # images that the classifier was not trained on
    device = adapter.adapt(buffer_logits, style=buffer_style)       # unlabelled images of a device, any number
    proba = device.predict_proba(new_logits, style=new_style)

Logits are what the classifier gives before softmax. The style of an image is any vector that tells domains apart: means
and deviations of the channels of early maps do, and the last features hardly do.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cxda_jax.adapter.adapter import PLAIN, SIZES, Adapter, as_array, as_logits, as_numbers
from cxda_jax.adapter.buffer import check_number
from cxda_jax.adapter.correction import added, correction_in
from cxda_jax.adapter.device import CELLS, method_of
from cxda_jax.adapter.judge import (
    FULL,
    TASKS,
    WAYS,
    FitData,
    Turn,
    calibrated,
    diagnosis,
    headroom,
    judge,
    of_style,
    planned,
    report_on,
    some_of,
)
from cxda_jax.adapter.own_style import (
    OwnStyle,
    Taught,
    beyond_turns,
    corrected_by,
    in_one_form,
    last_layers,
    room,
    untaught,
)
from cxda_jax.adapter.report import in_words
from cxda_jax.adapter.settling import FLOORS, settle
from cxda_jax.data import augment
from cxda_jax.data.episodes import EpisodeSpec, Plan, sample_plans
from cxda_jax.data.sources import AS_GIVEN
from cxda_jax.data.store import DomainStore, StoreInfo
from cxda_jax.errors import UserError
from cxda_jax.methods.cxda_shares import ADAPTER_DEFAULTS, VALIDATIONS, changed, measure
from cxda_jax.training import loop
from cxda_jax.training.pace import Pace, TimeLimit
from cxda_jax.training.selection import CHOICES, Selection, by_style, with_floor, without_buffer
from cxda_jax.types import Described, Episode, Images, Variables

MINUTES = 5.0
PARTS = ("style", "shares")
OWN_STYLE = "correction by the own style"
FEWEST = 3  # domains: one teaches, one chooses, one judges
STEPS = 250  # of a training: the keys do not learn, so a quarter of those of cxda_shares are enough
STEP_TASKS = 8  # new devices gain as much as with 16, and a compiled fit() takes two thirds of the time
TURNS = 4  # adapters at most that are judged in the place of the returned one
CHOOSING = 4  # of so many domains one chooses the best weights
QUERIES, FEW_QUERIES, FEW_TASKS = 20, 5, 4
BALANCED, FILLING = 100, 101  # the numbers of the random streams of balanced tasks, and of how far buffers are filled
JUDGING = 40  # judging takes as long as so many validations
MISSING = ("None", "nan", "NaT", "<NA>")  # what unknown values of numpy and pandas print as
USE = {"train": "teach", "val": "choose"}  # what the domains of a split do
PIECES = (4, 12)  # of images without domains: drift takes four, and of more than twelve each would have few images
ONE_SET = (
    "without domains an adapter learns class shares alone; with them also how errors follow from the look of images"
)
WITHOUT = {  # what it costs if the keys come from something else than a style
    "features": "the keys come from the features: these tell domains apart worse than a style does, so a mixed buffer "
    "helps less",
    "logits": "the keys come from the logits: these hardly tell domains apart, so a mixed buffer helps little",
}


class Trained(NamedTuple):
    """The result of a training.

    Attributes:
      data: the images, with their keys in place of the style.
      start: the variables with which it began, which read the style.
      ways: variables by the name in WAYS of how they take shares from a buffer. They read the keys.
      steps: that were taken.
    """

    data: FitData
    start: Variables
    ways: dict[str, Variables]
    steps: int


def fit(  # noqa: PLR0913
    logits: Any,
    labels: Any,
    domains: Any = None,
    style: Any = None,
    features: Any = None,
    minutes: float = MINUTES,
    steps: int = STEPS,
    seed: int = 0,
    parts: Sequence[str] = PARTS,
    floor: float | None = None,
    log: Callable[[str], None] = print,
) -> Adapter:
    """Learns to adapt a classifier, from images that it was not trained on.

    The report is of what new domains get. The domains are dealt into turns; in each an adapter that learnt from the
    other domains is judged. The adapter that is returned has all domains: a quarter of them choose, the others teach.

    A task has up to 100 images in its buffer. A step has 8 tasks of 20 queries for up to 131 classes. For more classes
    it has fewer queries (5 at least), and then fewer tasks (4 at least), so that the tasks times the queries times the
    classes of a step are at most 21,000.

    The result is a function of the arguments but for `minutes`, as long as no step is left out to keep to these.

    Args:
      logits: of the classifier, [n, classes].
      labels: class numbers [n].
      domains: numbers or names [n] of where each image comes from, three at least. None: the images are one set. Then
        an adapter learns class shares alone, and a device whose images look otherwise keeps the classifier's answers.
      style: a vector of each image [n, d] that tells domains apart.
      features: the inputs of the classifier's last layer, [n, d]. The report says what a new one gains that learns from
        these images, and reads the style too. Without a style they take its place, or else the logits. Both tell
        domains apart worse.
      minutes: that it may take. Steps are left out to keep to them, but a UserError tells the minutes that are needed
        if next to none would be left.
      steps: of each training, at most: one for each turn, and one for the adapter that is returned.
      seed: of all that is random.
      parts: what may be learnt: "style", a correction of the logits by the image's own style, which needs no buffer;
        "shares", what the buffer tells. Held-out domains say what of these pays.
      floor: bounds what a buffer can do, and protects rare classes. It changes the odds of an image's classes by
        factors, and none is less than this part of the largest: with 0.2 an answer that is five times as likely as
        every other one stays. 0: all factors are allowed, which gains more where a device has few classes. None: the
        least with which rare classes lose at most two points of recall on held-out domains, or no more than by the own
        style alone; or a smaller one, if no gain would be sure with it.
      log: takes lines of progress.
    """
    began = time.monotonic()
    check_numbers(minutes, steps, seed, floor)
    check_parts(parts)
    keys = "style" if style is not None else "features" if features is not None else "logits"
    judged = as_fit_data(logits, labels, domains, style, features, seed, FEWEST)
    _tell_of_less(judged, keys, parts, log)
    dealt = deal(judged)
    _tell_of_small(dealt[0], log)
    limit = TimeLimit(began, 60 * minutes, len(dealt), JUDGING, log)
    steps = steps if "shares" in parts else 0
    asks = "style" in parts and not judged.one_set
    tries = asks and _has_room(judged, judged.style, OWN_STYLE, log)
    if tries:
        log(OWN_STYLE)
    known, (of_whole, *of_turns), made, whole = _train_all(judged, dealt, tries, limit, steps)
    made, reads = _beside_last_layers(made, judged, keys, log)
    chosen = settle(made, FLOORS if floor is None else (float(floor),))
    learnt = jax.device_put(of_style(whole.ways[chosen.way], whole.start))
    variables = with_floor(learnt, chosen.floor)
    facts = {"steps": whole.steps, "asked": steps, "one_set": judged.one_set, "corrects": bool(of_whole.correction)}
    facts |= {"tries": tries, "beyond_turns": beyond_turns(of_whole, of_turns), "reads": reads, **chosen.facts}
    facts["room"] = room(judged.store.num_classes) if asks and not tries else None
    report, kept = report_on(judged, of_whole.data, variables, chosen.turns, chosen.plans, facts, known)
    log(said := in_words(report))
    classes = judged.store.num_classes
    return Adapter(classes, judged.rows.shape[1] - classes, keys, seed, variables, kept, report, said)


def gains_on(adapter: Adapter, logits: Any, labels: Any, domains: Any, style: Any = None) -> dict[str, Any]:
    """What an adapter gains on labelled images of other domains than fit() had, by parts of a report.

    They are `images`, `right`, `headroom`, `gain`, `overall`, `by_domain` and `calibration`; the temperatures are the
    adapter's own.

    Args:
      adapter: of fit().
      logits: labels, domains and style: as in fit(), of one domain or more.
    """
    adapter.rows(logits, style)  # names what is not as in fit()
    judged = as_fit_data(logits, labels, domains, style, None, adapter.seed)
    temperatures = {PLAIN: adapter.temperature(None)} | {str(n): adapter.temperature(n) for n in SIZES}
    corrected = corrected_by(judged, correction_in(adapter.variables))
    own = {name: adapter.known.get(f"own_{name}", adapter.known[name]) for name in ("scale", "bias")}
    rivals: dict[str, Any] = {"em": adapter.known, "own_em": {**adapter.known, **own}}
    turns = [Turn(corrected, judged, adapter.variables, rivals)]
    found, _ = judge(turns, planned(turns), temperatures)
    right = judged.logits.argmax(1) == judged.store.labels
    return {"images": len(right), "right": float(right.mean()), "headroom": headroom(judged), **found}


def diagnosed(logits: Any, labels: Any, domains: Any) -> str:
    """How much there is to gain for a classifier, from what it says of images that are new to it."""
    return diagnosis(as_fit_data(logits, labels, domains, None, None, 0))


def check_numbers(minutes: Any, steps: Any, seed: Any, floor: Any) -> None:
    check_number("minutes", minutes, (int, float), 0, 1e6)
    check_number("steps", steps, int, 1, 2**31 - 1)
    check_number("seed", seed, int, 0, 2**31 - 1)
    check_number("floor", 0 if floor is None else floor, (int, float), 0, 1)


def check_parts(parts: Any) -> None:
    if isinstance(parts, str) or not parts or not {*parts} <= {*PARTS}:
        raise UserError(f"choose from {', '.join(map(repr, PARTS))}", "parts", parts)


def load_of(classes: int) -> tuple[int, int]:
    """The tasks of a step, and the queries of each, by the rule of fit()."""
    room = CELLS // 2 // (FULL * classes)
    queries = min(QUERIES, max(FEW_QUERIES, room // STEP_TASKS))
    return min(STEP_TASKS, max(FEW_TASKS, room // queries)), queries


@functools.cache
def optimizer() -> Any:
    """Adam, whose rate a Pace sets."""
    # Of all parameters as one array: a step of thirteen small ones takes a tenth more time to compile.
    return optax.inject_hyperparams(lambda learning_rate: optax.flatten(optax.adam(learning_rate)))(
        learning_rate=ADAPTER_DEFAULTS.rate
    )


@functools.cache
def programs(classes: int, corrected: bool) -> loop.Programs:
    """The compiled step that all trainings of so many classes share."""
    learner = loop.Learner(method_of(classes, corrected), optimizer(), augment.Weak(crop=False, flip=False, rotate=0.0))
    return loop.Programs(learner, AS_GIVEN, effort=1)


@functools.lru_cache(4)
def _untrained(classes: int, corrected: bool, seed: int, width: int) -> Variables:
    """New variables, in the memory of the host, for rows of this width."""
    rows = _images(np.zeros((2, width), np.float32))
    found: Any = jax.device_get(loop.init_variables(method_of(classes, corrected), seed, rows))
    return found


def _train_all(
    judged: FitData, dealt: Sequence[FitData], tries: bool, limit: TimeLimit, steps: int
) -> tuple[Any, list[Taught], list[Turn], Trained]:
    """The headroom, what all domains and each turn teach of the own style, the turns, and the adapter of all domains.

    Own styles keep one core busy. So another thread learns them, while programs compile and adapters learn. After an
    error or a signal it begins no other one.
    """
    learns = OwnStyle(judged).of if tries else untaught
    with ThreadPoolExecutor(1) as beside, contextlib.closing(in_one_form(beside.map(learns, dealt))) as found:
        known, taught, made = headroom(judged), [next(found)], []
        for turn, of_turn in zip(dealt[1:], found, strict=True):
            taught.append(of_turn)
            made.append(_turn(turn, of_turn, limit, steps))
        return known, taught, made, _train(taught[0], limit, steps)


def _train(taught: Taught, limit: TimeLimit, steps: int) -> Trained:
    """Learns from what a turn teaches; without steps nothing is learnt of a buffer."""
    store, classes = taught.data.store, taught.data.store.num_classes
    width, corrected, seed = taught.data.rows.shape[1], taught.data.corrected, taught.data.seed
    start = added(_start(taught.data, _untrained(classes, corrected, seed, width)), taught.correction)
    judged, variables = taught.data.keyed(start)
    (tasks, _), rows = load_of(classes), judged.rows
    draws = {split: judged.draw(split, i, _spec(judged, split)) for i, split in enumerate(("train", "val"))}
    if not steps:
        return Trained(judged, start, dict.fromkeys(WAYS, without_buffer(variables)), 0)
    asked = sample_plans(draws["val"], range(TASKS))

    def score(variables: Variables) -> float:
        return float((judged.answers(variables, asked).argmax(-1) == store.labels[asked.query]).mean())

    def episodes(step: int) -> Episode:
        plan = sample_plans(draws["train"], range(step * tasks, (step + 1) * tasks))
        rng = np.random.Generator(np.random.Philox(key=[seed, step], counter=[0, 0, FILLING, 0]))
        return _episodes(rows, store.labels, plan, filled(rng, *plan.support.shape))

    judged.answers(variables, Plan(*(rows[:1] for rows in asked)))  # compiles
    began = time.monotonic()
    untrained = variables, score(variables)
    seconds = time.monotonic() - began
    pace = Pace(limit, steps, ADAPTER_DEFAULTS.rate, VALIDATIONS, CHOICES, seconds)
    selection = Selection(score, _gain_of_balanced(judged), untrained)

    def choose(best: Variables, scored: float) -> Variables:
        return selection.narrower(*selection.likeliest(jax.device_get(best), scored))

    run = loop.Run(None, log=lambda line: None)  # the time limit tells of the progress of all trainings
    of_step, state = programs(classes, corrected), loop.state_of(jax.device_put(variables), optimizer())
    best = loop.train(of_step, episodes, state, pace, loop.Validation(score, choose), run, seed).best
    assert best is not None
    found = (best, selection.more_careful(best), by_style(best), without_buffer(best))
    return Trained(judged, start, dict(zip(WAYS, found, strict=True)), pace.taken)


def _gain_of_balanced(judged: FitData) -> Callable[[Variables], float]:
    """What a full buffer brings on validation tasks of even shares, of as many domains as a task can have."""
    store, number = judged.store, judged.most_domains("val")
    spec = EpisodeSpec(number, FULL // number, judged.queries, shares="even", skip_small=True)
    draw = judged.draw("val", BALANCED, spec)
    if len(draw.domains) < number:
        return lambda variables: 0.0
    plan = sample_plans(draw, range(TASKS))
    support, query = plan
    plain = judged.answers({}, Plan(support[:, :0], query))

    def right(logits: np.ndarray) -> float:
        return float((logits.argmax(-1) == store.labels[query]).mean())

    return lambda variables: right(judged.answers(variables, plan)) - right(plain)


def deal(judged: FitData) -> list[FitData]:
    """All images for the adapter that is returned, and then for each turn, in which some domains judge and the others
    teach and choose. Each domain judges in one turn.

    Domains with images enough for tasks of their own are dealt first, so that each part gets some.
    """
    store, count = judged.store, len(judged.store.split)
    order = np.random.Generator(np.random.Philox(key=[judged.seed, 0])).permutation(count)
    small = np.diff(store.offsets)[order] < FULL + judged.queries
    order, large = order[np.argsort(small, kind="stable")], int((~small).sum())
    number = max(FEWEST, min(TURNS, (large if large >= FEWEST else count) // 2))

    def of(judging: Any) -> FitData:
        others = order[~np.isin(order, judging)]
        choosing = others[::CHOOSING]
        split = ("test" if d in judging else "val" if d in choosing else "train" for d in range(count))
        return judged._replace(store=store._replace(split=tuple(split)))

    return [of([]), *(of(order[i::number]) for i in range(number))]


def _tell_of_less(judged: FitData, keys: str, parts: Sequence[str], log: Callable[[str], None]) -> None:
    """Says what an adapter cannot learn without domains or a style; a UserError if that is all that was asked for."""
    if judged.one_set and "shares" not in parts:
        raise UserError("one set without domains teaches shares alone; give domains, or leave it out", "parts", parts)
    if judged.one_set or keys in WITHOUT:
        log(ONE_SET if judged.one_set else WITHOUT[keys])


def _tell_of_small(judged: FitData, log: Callable[[str], None]) -> None:
    for split, use in USE.items():
        domains, spec = judged.store.domains(split), _spec(judged, split)
        if small := len(domains) - len(judged.draw(split, 0, spec).domains):
            fewer = f"that {use} have fewer than {spec.least} images"
            log(f"{small} of the {len(domains)} domains {fewer}, so no task is drawn from them")


def _has_room(judged: FitData, style: np.ndarray, what: str, log: Callable[[str], None]) -> bool:
    """Whether this is small enough to be learnt from."""
    d, most = style.shape[1], room(judged.store.num_classes)
    if d > most:
        log(f"no {what} is tried: {d:,} numbers are more than {most:,}, the most for these classes")
    return d <= most


def _turn(plain: FitData, taught: Taught, limit: TimeLimit, steps: int) -> Turn:
    """An adapter of the domains that teach and choose, and its rivals of the same."""
    trained = _train(taught, limit, steps)
    rows = plain.rows_of("train", "val")
    rivals = {"em": calibrated(plain, rows), "own_em": calibrated(taught.data, rows)}
    return Turn(trained.data, plain, {}, rivals, trained.ways)


def _beside_last_layers(
    turns: list[Turn], judged: FitData, keys: str, log: Callable[[str], None]
) -> tuple[list[Turn], str]:
    """The turns with a new last layer as a rival, and what it reads: the features and the style, the features where
    both are too large to be learnt from, or nothing."""
    if judged.features is None:
        return turns, ""
    features, reads = judged.features, "features"
    if keys == "style" and features.shape[1] + judged.style.shape[1] <= room(judged.store.num_classes):
        features, reads = np.concatenate([features, judged.style], axis=1), "features and the style"
    elif not _has_room(judged, features, "last layer", log):
        return turns, ""
    tests = [turn.plain.store.domains("test") for turn in turns]
    layers, _ = last_layers(judged._replace(features=features), tests)
    return [turn._replace(refit=layer) for turn, layer in zip(turns, layers, strict=True)], reads


def _start(judged: FitData, variables: Variables) -> Variables:
    """The variables with which the training begins: keys, temperature and class shares are measured on the images that
    teach, or on some of them where there are many.

    The classifier's own training images are unknown. Their classes are taken to have the same shares.
    """
    store, own = judged.store, judged.rows_of("train")
    some = some_of(own, judged)
    rows = np.concatenate([judged.logits[some], judged.style[some]], axis=1)
    held = Described(rows, store.labels[some], store.row_domains()[some])
    start = measure(variables, held, store.labels[own])
    return changed(start, ("kernel",), jnp.zeros_like) if judged.one_set else start  # then all images count alike


def _spec(judged: FitData, split: str) -> EpisodeSpec:
    """Tasks of any shares and mixture, of five domains or of as many as there are."""
    number = judged.most_domains(split)
    if not number:
        most = np.diff(judged.store.offsets)[judged.store.domains(split)].max()
        what = f"those that {USE[split]} have at most {most} images each"
        raise UserError(f"domains: {what}; give {FULL + judged.queries} of each domain")
    return EpisodeSpec(number, FULL // number, judged.queries, shares="any", mixture="any", skip_small=True)


def _images(rows: Any, present: Any = None) -> Images:
    """In the memory of the host: a step that reads them may still wait for the step before."""
    domains: Any = np.zeros(rows.shape[:-1], np.int32)
    return Images(rows[..., None, None, :], domains, present)


def _episodes(rows: np.ndarray, labels: Any, plan: Plan, present: np.ndarray) -> Episode:
    (support, query), (support_label, label) = plan, (labels[part] for part in plan)
    return Episode(_images(rows[support], present), _images(rows[query]), label, support_label)


def filled(rng: np.random.Generator, tasks: int, places: int) -> np.ndarray:
    """Which places of each task's buffer hold an image, bool [tasks, places].

    They are drawn as by draw_present() in methods/cxda_shares.py, but on the host: random numbers and sorting would be
    a quarter of a step's time.
    """
    some = np.exp(rng.random(tasks) * np.log(places + 1)).astype(int)
    sizes = np.where(rng.random(tasks) < 0.5, places, some)
    return rng.random((tasks, places)).argsort(1) < sizes[:, None]


def as_fit_data(
    logits: Any, labels: Any, domains: Any, style: Any, features: Any, seed: int, fewest: int = 1
) -> FitData:
    """The arguments of fit() as images whose domains all judge; a UserError names the first that is wrong."""
    z = as_logits(logits)
    if z.shape[1] < 2 or not len(z):
        raise UserError(f"logits: shape {z.shape}; give at least one image, and a column for each of the classes")
    s, f = (
        None if given is None else as_numbers(name, given, len(z))
        for name, given in (("style", style), ("features", features))
    )
    y, d = as_array("labels", labels), _pieces(len(z), seed) if domains is None else as_array("domains", domains)
    for name, array in (("labels", y), ("domains", d)):
        if array.shape != (len(z),):
            raise UserError(f"{name}: shape {array.shape}, but logits has {len(z)} rows; give one for each image")
    if y.dtype == object and all(isinstance(label, int | np.integer) for label in y):
        y = y.astype(np.int64)
    if y.dtype.kind not in "iu":
        raise UserError(f"labels: {y.dtype}; give class numbers as integers, the columns of logits")
    if not 0 <= y.min() <= y.max() < z.shape[1]:
        wrong = y.min() if y.min() < 0 else y.max()
        raise UserError(f"labels: {wrong} is none of the {z.shape[1]} columns of logits; count classes from 0")
    at, count = z.argmax(1), z.shape[1]
    right, shifted = (at == y).mean(), (at == y - 1).mean()
    by_chance = np.bincount(at, minlength=count)[:-1] @ np.bincount(y, minlength=count)[1:] / len(y) ** 2
    if y.min() > 0 and shifted > max(2 * right, by_chance + 0.1):
        what = f"none is 0, and the classifier is right on {right:.0%}, but on {shifted:.0%} of the labels less 1"
        raise UserError(f"labels: {what}; count classes from 0")
    if y.min() == y.max():
        raise UserError(f"labels: all are {y[0]}; give images of two classes at least")
    names, d = domains_of("domains", d)
    if len(names) < fewest:
        told = "one teaches, one chooses and one judges"
        raise UserError(f"domains: {len(names)} of them; give images of {fewest} at least, of which {told}")
    keys = next(x for x in (s, f, z) if x is not None)
    order = np.argsort(d, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(d, minlength=len(names)))])
    info = StoreInfo("what fit() was given", tuple(map(str, range(z.shape[1]))), (0.0,), (1.0,))
    rows = np.concatenate([z, keys], axis=1)[order][:, None, None]
    judging, told = ("test",) * len(names), tuple(map(str, names))
    store = DomainStore(info, rows, y.astype(np.int32)[order], offsets, judging, told, "")
    own = None if f is None else f[order]
    return FitData(store, load_of(z.shape[1])[1], seed, one_set=domains is None, features=own)


def _pieces(count: int, seed: int) -> np.ndarray:
    """Random parts of one set in place of domains, as many as have images enough for tasks."""
    (fewest, most), least = PIECES, FULL + QUERIES
    if count < fewest * least:
        what = f"missing, and one set of {count} images is too small"
        raise UserError(f"domains: {what}; give {fewest * least}, or domains")
    return np.random.default_rng(seed).permutation(count) % min(most, count // least)


def domains_of(name: str, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The names of domains, and the number of each image's [n]; a UserError where one is unknown."""
    for i, domain in enumerate(given.ravel().tolist()):
        if not isinstance(domain, str) and str(domain) in MISSING:
            raise UserError(f"{name}: row {i} has {domain}; give the domain of each image")
    return np.unique(given.astype(str) if given.dtype == object else given, return_inverse=True)
