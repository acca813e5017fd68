"""Whether the tests notice mistakes: makes one in a copy of the checkout, runs the tests of that place, and undoes it.

python -m tools.mistakes --out=mistakes.json
python -m tools.mistakes --jobs=2
python -m tools.mistakes --numbers=3,7 --tree=ANOTHER_CHECKOUT
python -m tools.mistakes --check
python -m tools.mistakes --control

A mistake is caught if a test fails, and missed if all pass. It is hung if the tests do not end in time. That counts as
caught only where somebody has looked at why. What else ends the tests is broken. A stopped run goes on from --out.
--check runs no tests. --control runs the tests with no mistake: what fails then proves nothing of a mistake.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parents[1]
LEFT_OUT = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info")
CAUGHT, MISSED, HUNG, BROKEN = "caught", "missed", "hung", "broken"
SCRIPT = uuid.uuid4().hex  # stands in the environment of all that this process starts
FAILED, NO_TESTS = 1, 5  # exit codes of pytest
CONTROL_TIMES = 20  # so many times as long may the tests of all mistakes take together


class Mistake(NamedTuple):
    """A text of the package that stands once in its file, and what somebody may have written in its place."""

    room: str
    file: str  # below cxda_jax/, or in launch/ beside it
    before: str
    after: str
    tests: tuple[str, ...]  # files of tests/ without test_ and .py; those that know most of the place come first


# fmt: off
MISTAKES = (
    # Methods.
    Mistake("methods", "methods/erm.py", "lambda o, n: (1 - rate) * o + rate * n,",
            "lambda o, n: rate * o + (1 - rate) * n,", ("methods", "training_free", "anytime", "nets")),
    Mistake("methods", "methods/erm.py", '"batch_stats": jax.lax.stop_gradient(seen["batch_stats"])}',
            '"batch_stats": seen["batch_stats"]}', ("methods", "nets", "support_loss")),
    Mistake("methods", "methods/cxda.py", "support_logits = answer(adapted, maps, support.domain, True)",
            "support_logits = answer(adapted, maps, support.domain)", ("support_loss", "methods", "anytime")),
    Mistake("methods", "methods/anytime.py", "jnp.where(jnp.eye(n, dtype=bool), 2.0, jax",
            "jnp.where(jnp.eye(n, dtype=bool), -1.0, jax", ("anytime", "methods", "support_loss")),
    Mistake("methods", "methods/cotta.py", "jax.random.bernoulli(key, probability, own.shape)",
            "jax.random.bernoulli(key, probability)", ("finetune", "methods")),
    Mistake("methods", "methods/cotta.py", "jnp.quantile(confidences, quantile) - margin",
            "jnp.quantile(confidences, 1 - quantile) - margin", ("finetune", "configs", "methods")),
    Mistake("methods", "methods/icrm.py", "ordered = episode.replace(support_label=episode.support_label[order])",
            "ordered = episode", ("icrm", "methods")),
    Mistake("methods", "methods/cxda_shares.py", "answer(changed(variables, ERRORS, jax.lax.stop_gradient), query",
            "answer(variables, query", ("shares",)),
    Mistake("methods", "training/selection.py", "errors * part) for part in PARTS]", "errors) for part in PARTS]",
            ("adapter_fit",)),
    Mistake("adapter", "adapter/fit.py", "others = order[~np.isin(order, judging)]", "others = order", ("adapter_fit",)),
    Mistake("adapter", "adapter/judge.py", "other = np.flatnonzero(turn != i)", "other = np.flatnonzero(turn == i)",
            ("adapter_fit",)),
    Mistake("adapter", "adapter/judge.py", "weight, group = 1 / times[which]", "weight, group = 1.0 + 0 * times[which]",
            ("adapter_fit",)),
    Mistake("adapter", "training/metrics.py", "scipy.special.stdtrit(freedom, 0.975)", "scipy.special.ndtri(0.975)", ("metrics",)),
    Mistake("adapter", "adapter/correction.py", "b[i][:, None] + np.repeat(shares[i], counts, axis=1)", "b[i][:, None]",
            ("adapter_fit",)),
    # Networks.
    Mistake("nets", "nets/attention.py", "scores /= math.sqrt(width)", "scores /= width",
            ("nets", "anytime", "web", "methods")),
    Mistake("nets", "nets/attention.py", "jnp.concatenate(x), self.remember(self.tokens), memory)",
            "jnp.concatenate(x), memory, self.remember(self.tokens))", ("anytime", "nets", "buffer", "methods")),
    Mistake("nets", "nets/classifier.py", "x = pixels.astype(jnp.float32) / 255 if",
            "x = pixels.astype(jnp.float32) if", ("nets", "methods", "cml", "train")),
    Mistake("nets", "nets/normalisation.py",
            "var = channel_sum(jnp.where(chosen, jnp.square(x.astype(jnp.float32) - mean), 0)) / count",
            "var = channel_sum(jnp.square(x.astype(jnp.float32) - mean)) / count",
            ("layers", "methods", "buffer", "export")),
    Mistake("nets", "nets/resnet.py",
            '"conv1", x, self.width, 1), batch)\n'
            '        y = BatchNorm(True, name="bn2")(_conv(self, "conv2", y, self.width, 3, self.stride), batch)',
            '"conv1", x, self.width, 1, self.stride), batch)\n'
            '        y = BatchNorm(True, name="bn2")(_conv(self, "conv2", y, self.width, 3), batch)',
            ("resnet", "nets", "sla")),
    Mistake("nets", "nets/transformer.py", "(present.sum() - jnp.cumsum(present) < self.context)",
            "(jnp.cumsum(present) <= self.context)", ("icrm", "buffer", "methods")),
    Mistake("nets", "nets/pretrained.py", "value.transpose(2, 3, 1, 0)", "value.transpose(3, 2, 1, 0)",
            ("resnet", "malformed_files", "parameters")),
    # Episodes and sources.
    Mistake("episodes", "data/episodes.py", "_seat(rng, draw.seed, task, draw.stream)\n        if spec.mixed:",
            "_seat(rng, draw.seed, i, draw.stream)\n        if spec.mixed:",
            ("episodes", "configs", "train")),
    Mistake("episodes", "data/episodes.py", "drawn = rng.choice(ends[-1], spec.num_query, replace=False)",
            "drawn = rng.choice(ends[-1], spec.num_query)", ("episodes", "configs")),
    Mistake("episodes", "data/episodes.py", "for taken in (rows, query):", "for taken in (rows,):",
            ("contexts", "episodes")),
    Mistake("episodes", "data/episodes.py", "parts(own)[:number] + parts(own)[number + 1 :]",
            "parts(own)[:number] + parts(own)[number:]", ("exhaustive", "episodes")),
    Mistake("episodes", "data/sources.py", "return map(plan_of, range(start, stop))",
            "return map(plan_of, range(stop - start))", ("episodes", "train", "identity")),
    # Stores and readers.
    Mistake("store", "data/store.py", 'IDENTITY = ("class_names", "mean", "std", "shape", "domains")',
            'IDENTITY = ("class_names", "mean", "std", "shape")', ("store", "identity", "prepare")),
    Mistake("store", "disk/files.py", "time.time() - max(f.lstat()", "time.time() - min(f.lstat()",
            ("folders", "archives")),
    Mistake("store", "data/readers/cifar_c.py", "train.append(rows[cut:])", "train.append(rows)",
            ("prepare", "malformed_files", "configs")),
    Mistake("store", "data/readers/femnist.py", "Rows(np.rint(255 * x).astype(np.uint8)",
            "Rows((255 * x).astype(np.uint8)", ("prepare", "malformed_files")),
    Mistake("store", "data/readers/folder.py", "order = np.random.default_rng(seed)",
            "order = np.random.default_rng(0)", ("prepare", "images")),
    Mistake("store", "adapter/encoders.py", "if i != axis % x.ndim)", "if i != x.ndim - 1)", ("features",)),
    Mistake("store", "adapter/features.py", "name: np.array(each)[kept] for", "name: np.array(each)[: len(kept)] for",
            ("features",)),
    Mistake("store", "adapter/features.py", "        file.truncate(4 * ", "        _ = (4 * ", ("features",)),
    # Pixels: what is drawn, and augmentation.
    Mistake("pixels", "data/glyphs.py", "repr((VERSION, seed, tuple(writers), drawings))",
            "repr((VERSION, seed, tuple(writers)))", ("glyphs", "build", "configs")),
    Mistake("pixels", "data/glyphs.py", "np.random.default_rng([VERSION, seed, s, number])",
            "np.random.default_rng([VERSION, seed, number])", ("glyphs", "configs", "adapting")),
    Mistake("pixels", "data/augment.py", "jnp.where(flip, w - 1 - column, column)", "jnp.where(flip, w - column, column)",
            ("augment", "train")),
    Mistake("pixels", "data/augment.py", "minval=-options.rotate, maxval", "minval=0.0, maxval",
            ("augment", "train")),
    # Training and checkpoints.
    Mistake("train", "training/loop.py", "            self.bests.save(step, variables, self.best)\n",
            "        self.bests.save(step, variables, self.best)\n        if True:\n",
            ("train", "checkpoints", "launch", "identity")),
    Mistake("train", "training/loop.py", "jax.random.split(jax.random.fold_in(key, state.step), own",
            "jax.random.split(key, own", ("train", "mesh", "ahead")),
    Mistake("train", "training/loop.py", "(loss, grads), state.finite)", "loss, state.finite)", ("train", "mesh")),
    Mistake("train", "training/loop.py", "lambda s: s.mean(0), aux", "lambda s: s[0], aux", ("train", "mesh", "cost")),
    Mistake("train", "machine/progress.py", 'line["step"] < start or line["step"] == start and "val_score" not in line',
            'line["step"] <= start', ("metrics_file", "train", "identity")),
    Mistake("train", "disk/files.py", "write_whole(path, lambda partial: partial.write_bytes(data))",
            "path.write_bytes(data)", ("checkpoints", "identity", "reliability", "launch")),
    Mistake("train", "disk/folders.py", "            if at == _version(folder):\n                return found",
            "            return found", ("folders", "adapter_fit")),
    Mistake("train", "disk/checkpoints.py",
            'sorted((int(p.name) for p in path.glob("*") if p.name.isdecimal()), reverse=True)',
            '[int(n) for n in sorted((p.name for p in path.glob("*")), reverse=True) if n.isdecimal()]',
            ("checkpoints", "train", "identity")),
    Mistake("train", "methods/optimizers.py",
            "return optax.chain(optax.add_decayed_weights(weight_decay), OPTIMIZERS[name](learning_rate, momentum))",
            "return optax.chain(OPTIMIZERS[name](learning_rate, momentum), "
            "optax.add_decayed_weights(-learning_rate * weight_decay))",
            ("optimizer", "finetune", "train")),
    # Evaluation, scores and losses.
    Mistake("evaluation", "training/metrics.py", "np.sort(scores)[: max(1, len(scores) // 10)]",
            "np.sort(scores)[: max(1, -(-len(scores) // 10))]", ("metrics", "exhaustive", "contexts")),
    Mistake("evaluation", "training/metrics.py", "values.std(ddof=1)", "values.std()", ("metrics", "tables")),
    Mistake("evaluation", "losses.py", "(losses * counted).sum() / jnp.maximum(1, counted.sum())",
            "(losses * counted).mean()", ("losses", "finetune", "methods")),
    Mistake("evaluation", "losses.py", "return entropy(logits) + (jnp.exp(log_mean)",
            "return entropy(logits) - (jnp.exp(log_mean)", ("losses", "finetune")),
    Mistake("evaluation", "training/evaluation.py", "lambda task: jax.random.fold_in(key, task))(own)",
            "lambda task: jax.random.fold_in(key, task))(np.arange(len(own)))", ("train", "icrm", "mesh", "model")),
    # Results, their comparison, tables and the jobs of a study.
    Mistake("results", "studies/statistics.py",
            "return np.mean([_sum(values, terms) for terms in sums.values()], axis=0)",
            "return _sum(values, next(iter(sums.values())))",
            ("tables", "contexts", "records", "launch_report")),
    Mistake("results", "studies/statistics.py", "if theirs != first or tasks.support != supports.setdefault(form, tasks.support):",
            "if theirs != first:", ("tables", "contexts", "launch_report", "launch")),
    Mistake("results", "studies/result.py", '" (validation)" * (result.split == "val") + " (union F1)"',
            '" (union F1)"', ("tables", "contexts", "launch", "launch_report")),
    Mistake("results", "studies/formats.py", "writer.writerow([*head, *texts, *tail])",
            r'file.write(",".join(map(str, [*head, *texts, *tail])) + "\n")', ("tables", "launch_report", "contexts")),
    Mistake("results", "studies/identity.py", "if record.data_hash == store.sha256:",
            "if record.data_name == store.info.name:", ("identity", "launch", "exhaustive")),
    Mistake("results", "studies/jobs.py", "identity = [hashed(study.config(name, seed)), methods[name].version]",
            "identity = [hashed(study.config(name, seed))]", ("study",)),
    # A model on a device.
    Mistake("device", "adapter/buffer.py", "integers(self._drawn_from + number + 1)", "integers(self.seen + number + 1)",
            ("buffer",)),
    Mistake("device", "device/buffer.py",
            "        if self.model.method.stochastic:\n"
            "            order = np.arange(len(order))  # as adapted() gave them\n",
            "", ("buffer", "icrm", "adapting")),
    Mistake("device", "device/model.py", "            start += len(some)\n", "", ("model", "adapting", "buffer")),
    Mistake("device", "device/adapting.py", "path.stat().st_mtime, path))[-capacity:]", "path.stat().st_mtime, path))[:capacity]",
            ("adapting", "launch")),
    Mistake("device", "device/adapting.py", "if count < since:", "if count <= since:", ("adapting", "adapted_page")),
    # Exports.
    Mistake("export", "export/exporting.py", "if files.hash_file(out / name) == facts[\"sha256\"]", "if (out / name).exists()",
            ("export", "web")),
    Mistake("export", "export/exporting.py", "error <= allowed.error and equal >= allowed.same",
            "error <= allowed.error or equal >= allowed.same", ("export", "web")),
    Mistake("export", "pages/document.py", r'separators=(",", ":")).replace("<", "\\u003c")', 'separators=(",", ":"))',
            ("web", "live_page", "report")),
    Mistake("export", "export/web.py", 'dim / heads / (1 if attention["scale"] == "paper" else attention["ratio"])',
            "dim / heads", ("web", "live_page")),
    # Configs and what is built from them.
    Mistake("config", "config/fields.py", '"weight_decay": Field(1e-4,', '"weight_decay": Field(1e-3,',
            ("configs", "parameters", "build")),
    Mistake("config", "training/experiment.py", "seed, context = self.config.evaluation.seed, self.context",
            "seed, context = self.config.seed, self.context", ("configs", "episodes", "exhaustive", "launch")),
    Mistake("config", "training/experiment.py", "epoch = images // 100 // tasks", "epoch = images // 100",
            ("configs", "build", "mesh")),
    Mistake("config", "methods/finetune.py", 'make_optimizer(**{**training, "learning_rate": rate})', "make_optimizer(**training)",
            ("finetune", "configs", "parameters", "build")),
    # Commands, signals and hosts.
    Mistake("commands", "machine/stops.py", "        _deferring = before\n    _raise_if_received()\n",
            "        _deferring = before\n", ("stops", "reliability", "study", "launch")),
    Mistake("commands", "machine/hosts.py", "seen[number] = new, now", "seen[number] = new, when", ("identity", "mesh")),
    Mistake("commands", "launch/cli.py", 'removeprefix("config.").partition("=")',
            'removeprefix("config.").rpartition("=")', ("cli", "launch")),
    Mistake("commands", "launch/evaluate.py", "_AGAINST.value, _FROM.value,", "_AGAINST.value, 'erm',",
            ("launch", "study", "cli", "contexts")),
)
# fmt: on


def place(tree: Path, mistake: Mistake) -> Path:
    return tree / ("" if mistake.file.startswith("launch/") else "cxda_jax") / mistake.file


def files_of_tests(tree: Path, mistake: Mistake) -> list[str]:
    names = (f"tests/{ring}/test_{name}.py" for name in mistake.tests for ring in ("fast", "slow"))
    return [name for name in names if (tree / name).is_file()]


def changed(tree: Path, mistake: Mistake) -> str:
    """The file with the mistake."""
    text = place(tree, mistake).read_text()
    found = text.count(mistake.before)
    if found != 1:
        raise SystemExit(f"{mistake.file}: stands {found} times there: {mistake.before!r}")
    return text.replace(mistake.before, mistake.after)


def check(tree: Path) -> None:
    """Ends the script where a mistake cannot be made, would not even be imported, or has no tests."""
    for mistake in MISTAKES:
        compile(changed(tree, mistake), mistake.file, "exec")
        if not files_of_tests(tree, mistake):
            raise SystemExit(f"{mistake.file}: none of its tests is in {tree}: {', '.join(mistake.tests)}")


def write(path: Path, text: str) -> None:
    """Python takes compiled code as that of a file of equal size and time, so none is left."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink(missing_ok=True)


@contextlib.contextmanager
def made(tree: Path, mistake: Mistake) -> Iterator[None]:
    """Inside, the mistake is in the tree."""
    path = place(tree, mistake)
    text = path.read_text()
    write(path, changed(tree, mistake))
    try:
        yield
    finally:
        write(path, text)


def kill(mark: str) -> None:
    """Kills all that was started with the mark, since tests start processes that leave the group of their parent."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def run_tests(tree: Path, names: Sequence[str], seconds: float) -> tuple[str, str]:
    """The outcome, and the first test that fails or the last line of what was printed."""
    mark = f"{SCRIPT}-{uuid.uuid4().hex}"
    # Commands that tests start elsewhere must import this tree too, and not the one that is installed.
    around = {
        "cwd": tree,
        "env": {**os.environ, "PYTHONPATH": str(tree), "STARTED_BY": mark},
        "start_new_session": True,
    }
    options = ["-x", "-q", "-m", "not weekly", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, "-m", "pytest", *options, *names], **around, **streams)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kill(mark)
        process.wait()
        said.seek(0)
        text = said.read()
    lines = text.strip().splitlines() or [""]
    last = next(
        (line for line in reversed(lines) if re.search(r"\d (passed|failed|error|deselected)", line)), lines[-1]
    )[:200]
    if code is None:
        return HUNG, last
    if code == FAILED:
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        return CAUGHT, found[1] if found else last
    return (MISSED if code in (0, NO_TESTS) else BROKEN), last


def identity(mistake: Mistake) -> str:
    return hashlib.sha256(repr(mistake).encode()).hexdigest()[:12]


def read(out: Path | None) -> list[dict[str, Any]]:
    """Earlier outcomes of these mistakes, in all trees. What was broken is to be tried again."""
    rows = json.loads(out.read_text()) if out and out.exists() else []
    now = {identity(mistake) for mistake in MISTAKES}
    return [row for row in rows if row["identity"] in now and row["outcome"] != BROKEN]


def keep(out: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".{out.name}.{os.getpid()}")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        os.replace(partial, out)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By room, how many of the mistakes that were made were caught."""
    lines = [f"{'room':<12}{'caught':>8}{'of':>5}   not caught"]
    for room in dict.fromkeys(mistake.room for mistake in MISTAKES):
        mine = [row for row in rows if row["room"] == room]
        rest = [f"{row['number']} {row['outcome']}" for row in mine if row["outcome"] != CAUGHT]
        lines += [f"{room:<12}{len(mine) - len(rest):>8}{len(mine):>5}   {', '.join(rest)}"] * bool(mine)
    caught = sum(row["outcome"] == CAUGHT for row in rows)
    return "\n".join([*lines, f"{'all':<12}{caught:>8}{len(rows):>5}"])


def chosen(numbers: str) -> dict[int, Mistake]:
    """The mistakes of these numbers; all where there are none."""
    wanted = {int(text) if text.isdecimal() else 0 for text in filter(None, numbers.split(","))}
    if not wanted <= {*range(1, len(MISTAKES) + 1)}:
        raise SystemExit(f"--numbers: give some of 1 to {len(MISTAKES)}")
    return {n: mistake for n, mistake in enumerate(MISTAKES, 1) if not wanted or n in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mistakes", description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout; this one unless given")
    parser.add_argument("--numbers", default="", help="numbers of mistakes; all unless given")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes at once, each in a copy of its own")
    parser.add_argument("--out", type=Path, help="a JSON file of outcomes, which a later run goes on with")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the tests of a mistake may take")
    parser.add_argument("--check", action="store_true", help="only check that each mistake can be made")
    parser.add_argument("--control", action="store_true", help="run the tests of all these mistakes without any")
    flags = parser.parse_args()
    tree, mistakes = flags.tree.resolve(), chosen(flags.numbers)
    check(tree)
    if flags.check:
        print(f"{len(MISTAKES)} mistakes can be made in {tree}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left running
    rows = read(flags.out)
    done, copies = {row["identity"] for row in rows if row["tree"] == str(tree)}, queue.SimpleQueue()
    left = {n: mistake for n, mistake in mistakes.items() if identity(mistake) not in done}

    def outcome_of(number: int, mistake: Mistake) -> dict[str, Any]:
        copy, began = copies.get(), time.monotonic()
        try:
            with made(copy, mistake):
                outcome, said = run_tests(copy, files_of_tests(copy, mistake), flags.seconds)
        finally:
            copies.put(copy)
        known = {"number": number, "room": mistake.room, "file": mistake.file, "identity": identity(mistake)}
        return known | {"tree": str(tree), "outcome": outcome, "said": said, "seconds": time.monotonic() - began}

    with tempfile.TemporaryDirectory(prefix="mistakes_", ignore_cleanup_errors=True) as scratch:
        for i in range(1 if flags.control else flags.jobs):
            shutil.copytree(tree, Path(scratch) / str(i), ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
            copies.put(Path(scratch) / str(i))
        pool = ThreadPoolExecutor(flags.jobs)
        try:
            if flags.control:
                names = dict.fromkeys(name for mistake in mistakes.values() for name in files_of_tests(tree, mistake))
                outcome, said = pool.submit(run_tests, copies.get(), [*names], CONTROL_TIMES * flags.seconds).result()
                print(f"without a mistake: {outcome}, {said}")
                sys.exit(outcome != MISSED)
            for future in as_completed([pool.submit(outcome_of, n, mistake) for n, mistake in left.items()]):
                row = future.result()
                rows.append(row)
                keep(flags.out, rows)
                print("{number:>3}  {outcome:<7}{seconds:>6.0f} s  {room}, {file}  {said}".format(**row), flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            kill(SCRIPT)
            pool.shutdown()
    numbers = {identity(mistake): n for n, mistake in mistakes.items()}
    mine = [row for row in rows if row["tree"] == str(tree) and row["identity"] in numbers]
    shown = [{**row, "number": numbers[row["identity"]]} for row in mine]
    print(table(sorted(shown, key=lambda row: row["number"])))
    sys.exit(any(row["outcome"] == BROKEN for row in shown))


if __name__ == "__main__":
    main()
