"""The benchmark's arithmetic and its records. Whether anything is fast, the benchmark itself must say."""

from tools.bench.measure import interleave


def test_contenders_take_turns():
    called = []
    contenders = {name: lambda calls, name=name: called.append(name) or 1.0 for name in "ab"}
    assert interleave(contenders, repeats=3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert called == ["a", "a", "b", "b", *["a", "b"] * 3]
