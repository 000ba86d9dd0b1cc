"""Cores change their speed: what was measured at several paces is scaled to one."""

from planner.measure import pace


def test_the_pace_of_a_piece_of_work_is_the_mean_of_before_and_after(monkeypatch):
    paces = iter([1.0, 3.0, 5.0])
    monkeypatch.setattr(pace, "pace_seconds", lambda: next(paces))
    paced = pace.Paced()

    assert paced.measure(lambda: "first") == ("first", 2.0)
    assert paced.measure(lambda: "second") == ("second", 4.0)


def test_the_pace_is_that_of_a_fixed_piece_of_work():
    seconds = [pace.pace_seconds() for _ in range(5)]

    assert 1e-5 < min(seconds) < max(seconds) < 1.0
