r"""Money, percent signs and thin spaces mean the same to the rules `math` and `exact_number`, in truths and answers."""

from __future__ import annotations

from itertools import product

import pytest

from tests.scoring.fakes import rules_of

SPELLINGS = {
    "18.90": [r"\$18.90", r"18.90\$", r"\text{\$}18.90", r"\$ 18.9", r"\$18.90 \text{ per hour}", r"\mbox{\$}18.90"],
    "-5": [r"-\$5", r"-5", r"-5\%", r"-\$5.00"],
    "5": [r"\$5", r"5\%", "5%", r"5 \%", r"5\,\%", r"US\$ 5", r"\!5", r"5\,\text{cm}", "5％", r"\$\!5"],
    "0.05": ["0.05", r"0.05\%", r"\$0.05", ".05"],
    "32348": [
        *(r"32,\!348", r"32\,348", r"32\ 348", r"32\;348", "32~348", "32 348", "32{,}348", r"\$32,\!348", "32,348"),
        *("32\u2009348", "32\u202f348", "32\u00a0348", r"32\,348\%", r"32{,}348\,\text{m}"),
    ],
    "1000000": [r"1\,000\,000", r"1,\!000,\!000", "1\u2009000\u2009000", r"\$1{,}000{,}000"],
    "5000.5": [r"5\,000.5", r"5,\!000.5", r"\$5{,}000.50", "5\u202f000.5"],
}
FORMS = ("{}", "${}$", r"\boxed{{{}}}")


@pytest.mark.slow
@pytest.mark.parametrize("number", SPELLINGS)
def test_every_spelling_of_a_number_is_that_number_in_truths_and_answers(number: str) -> None:
    maths, exact = rules_of("math", cpu_s=60.0), rules_of("exact_number")
    spellings = [number, *SPELLINGS[number]]
    pairs = [(rf"\boxed{{{each}}}", number) for each in spellings]
    pairs += [(rf"\boxed{{{number}}}", form.format(each)) for form, each in product(FORMS, spellings)]
    wrong = [(answer, truth) for answer, truth in pairs if maths(answer, truth).outcome != 1.0]
    assert not wrong
    boxed = [(answer, truth if "boxed" in truth else rf"\boxed{{{truth.strip('$')}}}") for answer, truth in pairs]
    assert not [(answer, truth) for answer, truth in boxed if exact(answer, truth).outcome != 1.0]


@pytest.mark.slow
def test_no_spelling_is_taken_for_another_number() -> None:
    maths, exact = rules_of("math", cpu_s=60.0), rules_of("exact_number")
    found = [
        (rf"\boxed{{{answer}}}", truth)
        for (number, answers), (other, truths) in product(SPELLINGS.items(), repeat=2)
        if number != other
        for answer, truth in zip(answers, truths, strict=False)
    ]
    found += [
        (r"\boxed{0.5}", r"50\%"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{380}", r"32\,348"),
        (r"\boxed{1}", r"\$100\%"),
    ]
    for rule in (maths, exact):
        assert not [(answer, truth) for answer, truth in found if rule(answer, truth).outcome != 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"(1,\,2)", r"\boxed{(1, 2)}"),
        (r"\{1,\,2,\,3\}", r"\boxed{\{1,2,3\}}"),
        (r"x\,y", r"\boxed{xy}"),
        (r"\frac{1}{2}\%", r"\boxed{\frac12}"),
        (r"100\,x", r"\boxed{100x}"),
        (r"\$5 \text{ and } \$6", r"\boxed{\$5} and \boxed{\$6}"),
        (r"\text{(A)}", r"\boxed{\text{(A)}}"),
        (r"5\$", r"The price is \$5."),
        ("12", r"We pay $\$5$ and then \$7, so $\boxed{12}$ dollars, or 50\% of \$24."),
        (r"32\,348", "The answer is $32\\,348$."),
    ],
)
def test_spaces_and_signs_that_belong_to_no_number_change_no_meaning(truth: str, answer: str) -> None:
    assert rules_of("math", cpu_s=60.0)(answer, truth).outcome == 1.0


@pytest.mark.slow
def test_what_the_converter_of_math_writes_can_be_judged() -> None:
    from asyncrl.data.converters.math_problems import last_box

    for solution, answer in (
        (r"So it is \boxed{\$32,\!348}.", "32348"),
        (r"\boxed{\$18.90}", r"\$18.90"),
        (r"\boxed{40\%}", "40"),
    ):
        assert rules_of("math", cpu_s=60.0)(rf"\boxed{{{answer}}}", last_box(solution)).outcome == 1.0
