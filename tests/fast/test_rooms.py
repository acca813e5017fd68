"""No room has more lines of code than tests/rooms.py allows."""

from tests.rooms import CEILINGS, counted, excess


def test_no_room_has_more_code_than_it_may():
    rooms = counted()
    assert not (found := excess(rooms, CEILINGS)), "\n".join(found)
    assert rooms.keys() == CEILINGS.keys()
