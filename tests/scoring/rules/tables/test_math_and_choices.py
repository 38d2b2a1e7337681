"""The ways in which models write mathematics, and in which they name the option C, another, several or none. We choose
the final expression, and math-verify judges it."""

from tests.scoring.rules.tables.judging import assert_judged, rows, sections, table

MATH, CHOICES = sections("math"), sections("multiple_choice")


def test_mathematics_is_judged_by_its_meaning():
    # Where the host takes the processor away, that counts as time of the processor, too.
    assert_judged("math", table(MATH["right"]), [*table(MATH["wrong"]), ("", r"\frac{1}{2}")], cpu_s=60.0)


def test_the_option_is_read_as_models_name_it():
    right, wrong = ([(each, "C") for each in rows(CHOICES[half])] for half in ("right", "wrong"))
    assert_judged("multiple_choice", right, [*wrong, ("", "C")])


def test_the_ground_truth_may_be_written_in_the_same_ways():
    truths = ["C", "c", "(C)", "C.", "C) Paris", r"\boxed{C}", "The answer is C."]
    assert_judged("multiple_choice", [("C", each) for each in truths * 6], [("B", each) for each in truths * 6])
