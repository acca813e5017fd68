"""Lines of code by room: how many there may be, and how many there are.

python -m tests.rooms       prints the table of today's numbers, as it stands below

A line of code holds a token that is neither a comment nor a docstring.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Whoever raises a number adds to its line what was bought for it.
CEILINGS = {
    "configs": 200,
    "cxda_jax": 258,  # the losses of labels in NumPy, with their gradient; a public name for keeping compiled programs
    "cxda_jax/adapter": 3135,  # corrects by the own and the common style, chooses what to take of a buffer; tokens and heads; a page; predictions of camera traps; models of PyTorch by name; a floor, which rare classes choose by the mean of domains; a last layer that reads the style too; what an untried own style or a buffer that tells nothing means for the user; what all domains teach beyond those of a turn; keys in place of styles while fit() learns; a correction's loss in NumPy, and L-BFGS; buffers that the host fills; tasks that are drawn, and ways that are asked, once for two uses; one program of answers with any floor; one program for the trainings of all turns, and one of EM for all numbers of tasks; own styles, and answers of several tasks, side by side
    "cxda_jax/config": 470,
    "cxda_jax/data": 2385,  # tasks share what they know of a domain's classes, their generators, and the sizes of domains; tasks in half of the time
    "cxda_jax/device": 1065,  # the plain answers of an adapter that corrects; class shares on the page; camera traps; what is right by class
    "cxda_jax/disk": 825,  # other names of a column
    "cxda_jax/export": 885,  # tokens and a head in describe.onnx
    "cxda_jax/export (js)": 981,  # the own and the common style, and the evidence, in browsers; EM that goes on after the common style
    "cxda_jax/machine": 866,  # stacks the batches of several steps, which data/ did; keeps small programs, and leaves out options that jaxlib does not know; a third effort of the compiler; threads
    "cxda_jax/methods": 1238,  # EM in clusters of a buffer; shares of classes without images
    "cxda_jax/nets": 916,  # starts from weights, which training/ did; the evidence and the common style of a buffer; a floor; posteriors as products; EM without a quotient; what learns from its last step alone
    "cxda_jax/pages": 300,  # from studies/, which device/ needs no more; pictures of rows
    "cxda_jax/pages (js)": 210,
    "cxda_jax/studies": 2850,  # compares configs, which config/ did
    "cxda_jax/training": 1083,  # the ways to take shares, how narrow the attention is, and a floor; few tasks wait for their step, and a training begins with given variables; an optimizer begins in one program; Student's limit without scipy.stats
    "docs": 1453,  # what each part of fit() gains beside naive ways, on drawn devices and on real ones, with real class shares and the tables of their page; five examples; a table of what was foretold; how fit() grows; streams as taken; made devices as circles; more tasks where one class of two is rare; what diagnoses foretold
    "launch": 664,  # a head, and the tensor of features; flags for predictions of camera traps; a file in place of a folder
    "tests": 9815,  # models of PyTorch and examples; the two formats of camera traps; devices; the page of fit(); what rare classes tell by; posteriors as products; the directions of keys; what more domains gain; keys in place of styles; slopes by finite differences; a least value beside its solution; EM that goes on, and that learns from its last step; turns in one form; what is told of means of any size; narrowing from a known score; threads
    "tools": 1630,
}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER}  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """The lines of code of a file of Python or JavaScript."""
    text = path.read_text()
    if path.suffix == ".js":
        plain = re.sub(r"/\*.*?\*/|^\s*//.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
        return sum(1 for line in plain.splitlines() if line.strip())
    without = set()  # the lines of docstrings
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            without |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    return len(lines - without)


def room_of(path: Path) -> str:
    """The room of a file, such as cxda_jax/data, and the language where it is not Python."""
    first, *others = path.relative_to(ROOT).parts
    room = f"{first}/{others[0]}" if first == "cxda_jax" and len(others) > 1 else first
    return f"{room} (js)" if path.suffix == ".js" else room


def counted() -> dict[str, int]:
    """The lines of code of each room."""
    rooms = Counter()
    for top in ("cxda_jax", "launch", "configs", "tools", "docs", "tests"):
        for path in (*(ROOT / top).rglob("*.py"), *(ROOT / top).rglob("*.js")):
            rooms[room_of(path)] += code_lines(path)
    return dict(rooms)


def excess(rooms: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """A line for each room that has more lines of code than it may."""
    fix = "delete as many, or raise its number in tests/rooms.py and say beside it what was bought"
    return [
        f"{room} has {count} lines of code, at most {ceilings.get(room, 0)} are allowed: {fix}"
        for room, count in rooms.items()
        if count > ceilings.get(room, 0)
    ]


if __name__ == "__main__":
    print("\n".join(f'    "{room}": {count},' for room, count in sorted(counted().items())))
