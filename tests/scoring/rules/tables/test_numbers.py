"""How models write numbers. `exact_number` reads every answer, `gsm8k` those with the mark."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scoring.rules.exact_number import final_number
from tests.scoring.fakes import rules_of
from tests.scoring.rules.tables.judging import assert_judged, rows, table

SAME = table(r"""
72 : 72 | 72. | 72.0 | 72.00 | **72** | *72* | `72` | __72__ | $72 | $72.00 | \$72 | $72$ | $\$72$ | €72 | 72 €
72 : 72 dollars | USD 72 | US$72 | Rs. 72 | 72% | 72\% | 72 km/h | 72 m² | 72 m^2 | 72\text{ cm}^2 | 72^\circ | 72°
72 : \boxed{72} | $\boxed{72}$ | \boxed{\text{72 apples}} | \boxed{\$72} | \boxed{x = 72} | \(72\) | \[ 72 \]
72 : \text{72} | \mathbf{72} | x = 72 | 8 * 9 = 72 | $8 \times 9 = 72$ | ~72 | ≈ 72
12 : １２
1234 : 1,234 | 1{,}234 | 1,\!234
1234567.5 : 1,234,567.5
-5 : -5 | −5 | –5 | -$5 | $-5 | -\$5 | −€5 | minus 5 | negative 5 | (-5)
-1234.5 : -$1,234.50
5 : +5
1/2 : .5
0.5 : 1/2 | \frac{1}{2} | \dfrac{1}{2} | \frac12 | \frac{-1}{-2} | ½ | 1⁄2
-0.5 : -1/2 | -\frac{1}{2} | \frac{-1}{2} | \frac{1}{-2}
1.5 : 1\frac{1}{2} | 1 \frac{1}{2} | 1\,\frac{1}{2} | 1\frac12 | 1 1/2 | 1½
-1.5 : -1\frac{1}{2} | -1 1/2 hours
11.5 : 11\frac{1}{2}
1000 : 1e3
0.0015 : 1.5e-3
1000000 : 10⁶ | 10^6 | 10^{6} | 10**6
0.01 : 10⁻²
1024 : 2^10
1500000 : 1.5 × 10⁶ | 1.5 \times 10^6
0.015 : 1.5 \times 10^{-2}
300 : 3 \cdot 10^{2} | 3 x 10^2 | 3*10^2
3 : 3 million
""")
OTHER = table(r"""
72 : seventy-two | 72.1 | 7.2 | 720 | 7,2 | -72 | −72 | -$72 | minus 72 | 72/0 | 72/7 | \frac{72}{0} | x_72
72 : I cannot say | \boxed{} | \boxed{x} | nan | inf
-5 : $5 | 10 - 5 | 10-5 | 10 minus 5
5.5 : 1\frac{1}{2} | 1 1/2
11/2 : 1\frac{1}{2}
0.5 : 1\frac{1}{2} | 1 1/2 | 1½
1 : 1½ | 1e3 | 1e3000 | 1,2345 | 1,234
10 : 10⁶ | 10^6 | 1.5 × 10⁶
106 : 10⁶ | 10^{6}
6 : 10^6
210 : 2^10
1.5 : 1.5 × 10⁶
2 : 72 m² | 72 m^2 | H2O
27 : 72 km
234 : 1,234
3 : 3:30
9 : 9^999
""")
OTHER += [("", "72"), ("9" * 5000, "9"), ("9^" + "9" * 50, "9")]
EXPRESSIONS = table(r"""
2 : √2 | \sqrt{2} | 2\sqrt{3} | sqrt(2) | log(2) | 2π | π/2 | 2\pi | \frac{\pi}{2} | 2x | 2x + 1 | 2e | 2(x+1)
3 : 3√2 | 3i | ±3 | \pm 3 | > 3 | x ≥ 3 | x \geq 3 | 5 + 3
1 : x + 1
5 : 5! | 5 + 3
72 : 72 - 3 | 72*2 | 72 \times 2
""")
"""An answer that is one of these is no plain number."""
RUNNING = table(r"""
1000 : The answer is 1 000.
72 : The answer is 72! | The answer is 72 (= 3*24). | She has 72 apples! That is 24 + 48, so 72 | She has 72 apples.
72 : She needs 3 boxes of 24, which is 72 in all. | The answer is 72.
72 : The answer is **72** apples. Each of the 3 boxes holds 24. | Final Answer: $72. (This took 3 steps.)
72 : So the answer is 72 because 8*9=72 | So \boxed{72}, as 3 * 24 shows in step 2.
72 : First \boxed{5}, but then \boxed{72} | <answer>72</answer> (3 boxes) | <answer>8 * 9 = 72</answer>
72 : a_1 = 7 and so the sum is 72 | 17+5*11=72 | #### 72 apples in 3 boxes
0 : The answer is 0. There are 5 others.
1234567.5 : It costs $1,234,567.50
-5 : x=-5 | x = −5
5 : 10-5 | (3)-5
0.5 : .5
-0.75 : -3/4
3 : 1,2,3
2345 : f(1,2345)
50 : 50%
1/10 : 0.1
1,000 : 1000
""")
RUNNING += [
    ("**Answer:** 72\n\nCheck: 3 * 24", "72"),
    ("1. 3 boxes\n2. 24 each\n\nTotal: 72", "72"),
    ("#### Step 3: add up\n\nThis gives 72", "72"),
    ("So\n#### 72", "72"),
    ("#### 5\nno, #### 72", "72"),
    ("72", "She sold 48/2 = 24 clips.\n#### 72"),
]
STRAY = table(r"""
72 : 72 of the 80 | 72? No: \boxed{5} | The answer is 5. I also thought of 72 | <answer>5</answer> 72 | 72 #### 5
72 : I do not know | 72 or 73 | 7 2 | #### nothing | 72 #### | 72.0000000000000000000000000001
-72 : 3-72
5 : 5/0
0.3 : 0.30000000000000004
""")


LONGER = [(f"#### {each}", "1") for each in rows("1,2345 | 1.234,50 | 1,2,3 | 1e3 | 1e3000 | 1½ | 1 000 | 1/2/3")]
"""Numbers that only begin like the ground truth."""
FRAMES = ("#### {}", r"So \boxed{{{}}}", "<answer>{}</answer>", "<answer>{} in all</answer>")


def test_exact_number_reads_numbers_as_models_write_them():
    framed = [(frame.format(each), truth) for each, truth in EXPRESSIONS for frame in FRAMES]
    assert_judged("exact_number", SAME + RUNNING, OTHER + STRAY + LONGER + framed)


def test_gsm8k_reads_them_behind_the_mark():
    marked = [
        *SAME,
        ("1 234", "1234"),
        (r"1\,234", "1234"),
        ("1,00,000", "100000"),
        ("3 * 4 = 12", "12"),
        ("- 5", "-5"),
        ("12 (= 3*4)", "12"),
        ("12 (3*4)", "12"),
        ("**12** apples", "12"),
        ("=> 12", "12"),
        ("12/hour", "12"),
        ("12 - as asked", "12"),
        ("Total - 12", "12"),
        ("Final Answer\n\n12", "12"),
        ("<b>12</b>", "12"),
        ("$1,234,567.50 dollars", "1234567.5"),
        ("-3 °C", "-3"),
        ("3/4 cup", "0.75"),
        (r"\frac{3}{4}", ".75"),
        ("1,000", "#### 1000"),
        ("1 000 km", "1000"),
        ("¾", "0.75"),
        ("72 apples in 3 boxes", "She has 72.\n#### 72"),
    ]
    more = [("**#### 72**", "72"), ("####72", "72"), ("#### 5\n#### 72", "72"), ("#### 72\n\nAll 3 boxes.", "72")]
    step = ("#### Step 1: 5\n\n#### 72\n\n#### Step 2: check 7 * 9", "72")
    right = [(f"8 and 9.\n#### {answer}", truth) for answer, truth in marked] + more + [step]
    wrong = [(f"8 and 9.\n#### {answer}", truth) for answer, truth in OTHER + EXPRESSIONS] + STRAY
    assert_judged(
        "gsm8k",
        right,
        [
            *wrong,
            *LONGER,
            ("72 ####", "72"),
            ("#### 7 2", "72"),
            ("72", "72"),
            (r"\boxed{72}", "72"),
            ("#### Step 72", "72"),
        ],
    )


def test_gsm8k_without_its_mark_reads_as_exact_number_does():
    assert_judged("gsm8k", SAME + RUNNING, OTHER + STRAY, strict=False)


def test_both_read_the_published_solutions():
    lines = (Path(__file__).parents[3] / "data" / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    numbers = [solution.rpartition("#### ")[2] for solution in solutions]
    right = list(zip(solutions, numbers, strict=True))
    wrong = [(solution, str(int(number.replace(",", "")) + 1)) for solution, number in right]
    assert_judged("gsm8k", right, wrong)
    boxed = [(solution.replace("#### ", "The answer is $\\boxed{") + "}$.", number) for solution, number in right]
    assert_judged("exact_number", right + boxed, wrong)


def test_gsm8k_may_be_lenient_and_tolerant():
    assert rules_of("gsm8k", strict=False)("it is 72", "72").outcome == 1.0
    within = rules_of("gsm8k", tolerance=0.001)
    assert [within(f"#### {each}", "3.14159").outcome for each in ("3.1416", "3.15")] == [1.0, 0.0]


@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4),
    st.sampled_from(["{}", "it is {}.", "1, 2, then {} units", "x = {}\n", "old 7 #### {} and 9"]),
    st.sampled_from(["{:.4f}", "{:,.4f}", "{:+.4f}", "{:+,.4f}"]),
)
def test_any_number_is_read_exactly_in_any_dress(number, frame, dress):
    assert final_number(frame.format(dress.format(number))) == Fraction(number)


@given(st.text(alphabet="0123456789.,-+/# a\\frac{}$", max_size=200))
def test_no_text_breaks_them(text):
    for rule in ("gsm8k", "exact_number"):
        assert rules_of(rule)(text).outcome in (0.0, 1.0)


@pytest.mark.parametrize("text", ["9" * 50_000, "1" + ",111" * 20_000 + "1", "1/" + "0" * 50_000, "-" * 50_000])
def test_monstrous_text_is_read_quickly_and_is_no_number(text):
    assert final_number(text) != 72
