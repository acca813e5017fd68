"""Ctrl-C and SIGTERM: what has work to save ends after it, with a line; an import ends at once."""

import signal

import pytest

from cxda_jax.machine import stops


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
    with pytest.raises(stops.Stopped):  # without work to save
        signal.raise_signal(signal.SIGTERM)
