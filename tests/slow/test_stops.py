"""Ctrl-C and SIGTERM: what has work to save ends after it, with a line; an import ends at once."""

import signal

import pytest

from cxda_jax.machine import stops
from cxda_jax.machine.progress import compiling


@pytest.fixture
def said(monkeypatch):
    """What is said while signals are watched."""
    lines = []
    monkeypatch.setattr(stops, "say", lines.append)
    stops.watch()
    yield lines
    stops.unwatch()


def test_work_that_is_deferred_is_done_before_the_signal_ends_it(said):
    with pytest.raises(stops.Stopped) as stopped, stops.deferred():
        signal.raise_signal(signal.SIGINT)
        stops.say("saved")
    assert "saved" in said and stopped.value.code == 128 + signal.SIGINT
    stops.watch()  # anew: a second signal would end this process
    with stops.interruptible():
        pass
    with pytest.raises(stops.Stopped):  # without work to save, also after work that a signal may break off
        signal.raise_signal(signal.SIGTERM)


def test_inside_work_that_is_deferred_a_signal_in_a_compilation_waits_for_all_of_it(said):
    with pytest.raises(stops.Stopped), stops.deferred():
        with compiling("a program", said.append):
            signal.raise_signal(signal.SIGTERM)
        stops.say("saved")
    assert "saved" in said
    stops.watch()
    with pytest.raises(stops.Stopped), compiling("a program", said.append):
        signal.raise_signal(signal.SIGTERM)
        stops.say("compiled")
    assert "compiled" in said
