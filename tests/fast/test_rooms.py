"""No room has more lines of code than tests/rooms.py allows."""

from tests.rooms import CEILINGS, code_lines, counted, excess

PYTHON = '''"""A file."""

import math  # one


def area(r):
    """The area
    of a circle."""
    # squared
    return math.pi * (
        r**2
    )  # five
'''
SCRIPT = """/* A file,
with a head. */
// a comment
const area = (r) => { // one

  return Math.PI * r * r;
};
"""


def test_no_room_has_more_code_than_it_may():
    rooms = counted()
    assert not (found := excess(rooms, CEILINGS)), "\n".join(found)
    assert rooms.keys() == CEILINGS.keys()
    assert excess({"a": 3, "b": 1, "new": 1}, {"a": 2, "b": 1})[1].startswith("new has 1 lines of code, at most 0")


def test_lines_of_code_hold_more_than_a_comment_or_a_docstring(tmp_path):
    for name, text, expected in (("a.py", PYTHON, 5), ("a.js", SCRIPT, 3)):
        (tmp_path / name).write_text(text)
        assert code_lines(tmp_path / name) == expected
