"""How models write numbers. `exact_number` reads every answer, `gsm8k` those with the mark."""

import json
from pathlib import Path

from tests.scoring.rules.tables.judging import assert_judged

SAME = [
    ("72", "72"),
    ("72.", "72"),
    ("72.0", "72"),
    ("72.00", "72"),
    ("**72**", "72"),
    ("*72*", "72"),
    ("`72`", "72"),
    ("__72__", "72"),
    ("$72", "72"),
    ("$72.00", "72"),
    (r"\$72", "72"),
    ("$72$", "72"),
    (r"$\$72$", "72"),
    ("€72", "72"),
    ("72 €", "72"),
    ("72 dollars", "72"),
    ("USD 72", "72"),
    ("US$72", "72"),
    ("Rs. 72", "72"),
    ("72%", "72"),
    (r"72\%", "72"),
    ("72 km/h", "72"),
    ("72 m²", "72"),
    ("72 m^2", "72"),
    (r"72\text{ cm}^2", "72"),
    (r"72^\circ", "72"),
    ("72°", "72"),
    (r"\boxed{72}", "72"),
    (r"$\boxed{72}$", "72"),
    (r"\boxed{\text{72 apples}}", "72"),
    (r"\boxed{\$72}", "72"),
    (r"\boxed{x = 72}", "72"),
    (r"\(72\)", "72"),
    (r"\[ 72 \]", "72"),
    (r"\text{72}", "72"),
    (r"\mathbf{72}", "72"),
    ("x = 72", "72"),
    ("8 * 9 = 72", "72"),
    ("$8 \\times 9 = 72$", "72"),
    ("~72", "72"),
    ("≈ 72", "72"),
    ("１２", "12"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1,\!234", "1234"),
    ("1,234,567.5", "1234567.5"),
    ("-5", "-5"),
    ("−5", "-5"),
    ("–5", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    (r"-\$5", "-5"),
    ("−€5", "-5"),
    ("-$1,234.50", "-1234.5"),
    ("minus 5", "-5"),
    ("negative 5", "-5"),
    ("+5", "5"),
    ("(-5)", "-5"),
    (".5", "1/2"),
    ("1/2", "0.5"),
    ("-1/2", "-0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", "0.5"),
    (r"\frac12", "0.5"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", "-0.5"),
    (r"\frac{1}{-2}", "-0.5"),
    (r"\frac{-1}{-2}", "0.5"),
    (r"1\frac{1}{2}", "1.5"),
    (r"1 \frac{1}{2}", "1.5"),
    (r"1\,\frac{1}{2}", "1.5"),
    (r"-1\frac{1}{2}", "-1.5"),
    (r"11\frac{1}{2}", "11.5"),
    (r"1\frac12", "1.5"),
    ("1 1/2", "1.5"),
    ("-1 1/2 hours", "-1.5"),
    ("1½", "1.5"),
    ("½", "0.5"),
    ("1⁄2", "0.5"),
    ("1e3", "1000"),
    ("1.5e-3", "0.0015"),
    ("10⁶", "1000000"),
    ("10^6", "1000000"),
    ("10^{6}", "1000000"),
    ("10**6", "1000000"),
    ("10⁻²", "0.01"),
    ("2^10", "1024"),
    ("1.5 × 10⁶", "1500000"),
    (r"1.5 \times 10^6", "1500000"),
    (r"1.5 \times 10^{-2}", "0.015"),
    (r"3 \cdot 10^{2}", "300"),
    ("3 x 10^2", "300"),
    ("3*10^2", "300"),
    ("3 million", "3"),
]
OTHER = [
    ("", "72"),
    ("seventy-two", "72"),
    ("72.1", "72"),
    ("7.2", "72"),
    ("720", "72"),
    ("7,2", "72"),
    ("-72", "72"),
    ("−72", "72"),
    ("-$72", "72"),
    ("minus 72", "72"),
    ("$5", "-5"),
    ("10 - 5", "-5"),
    ("10-5", "-5"),
    ("10 minus 5", "-5"),
    ("72/0", "72"),
    ("72/7", "72"),
    (r"\frac{72}{0}", "72"),
    (r"1\frac{1}{2}", "5.5"),
    (r"1\frac{1}{2}", "11/2"),
    (r"1\frac{1}{2}", "0.5"),
    ("1 1/2", "0.5"),
    ("1 1/2", "5.5"),
    ("1½", "0.5"),
    ("1½", "1"),
    ("10⁶", "10"),
    ("10⁶", "106"),
    ("10^6", "6"),
    ("10^6", "10"),
    ("10^{6}", "106"),
    ("2^10", "210"),
    ("1.5 × 10⁶", "1.5"),
    ("1.5 × 10⁶", "10"),
    ("1e3", "1"),
    ("1e3000", "1"),
    ("1,2345", "1"),
    ("72 m²", "2"),
    ("72 m^2", "2"),
    ("72 km", "27"),
    ("1,234", "1"),
    ("1,234", "234"),
    ("3:30", "3"),
    ("x_72", "72"),
    ("H2O", "2"),
    ("I cannot say", "72"),
    (r"\boxed{}", "72"),
    (r"\boxed{x}", "72"),
    ("nan", "72"),
    ("inf", "72"),
    ("9" * 5000, "9"),
    ("9^" + "9" * 50, "9"),
    ("9^999", "9"),
]
RUNNING = [
    ("She has 72 apples.", "72"),
    ("She needs 3 boxes of 24, which is 72 in all.", "72"),
    ("The answer is 72.", "72"),
    ("The answer is **72** apples. Each of the 3 boxes holds 24.", "72"),
    ("**Answer:** 72\n\nCheck: 3 * 24", "72"),
    ("Final Answer: $72. (This took 3 steps.)", "72"),
    ("So the answer is 72 because 8*9=72", "72"),
    ("The answer is 0. There are 5 others.", "0"),
    (r"So \boxed{72}, as 3 * 24 shows in step 2.", "72"),
    (r"First \boxed{5}, but then \boxed{72}", "72"),
    ("<answer>72</answer> (3 boxes)", "72"),
    ("<answer>8 * 9 = 72</answer>", "72"),
    ("1. 3 boxes\n2. 24 each\n\nTotal: 72", "72"),
    ("#### Step 3: add up\n\nThis gives 72", "72"),
    ("a_1 = 7 and so the sum is 72", "72"),
]
STRAY = [
    ("72 of the 80", "72"),
    (r"72? No: \boxed{5}", "72"),
    ("The answer is 5. I also thought of 72", "72"),
    ("<answer>5</answer> 72", "72"),
    ("72 #### 5", "72"),
    ("3-72", "-72"),
]


def test_exact_number_reads_numbers_as_models_write_them():
    assert_judged("exact_number", SAME + RUNNING, OTHER + STRAY)


def test_gsm8k_reads_them_behind_the_mark():
    marked = [
        *SAME,
        ("1 234", "1234"),
        (r"1\,234", "1234"),
        ("1,00,000", "100000"),
        ("3 * 4 = 12", "12"),
        ("- 5", "-5"),
    ]
    more = [("**#### 72**", "72"), ("####72", "72"), ("#### 5\n#### 72", "72"), ("#### 72\n\nAll 3 boxes.", "72")]
    step = ("#### Step 1: 5\n\n#### 72\n\n#### Step 2: check 7 * 9", "72")
    right = [(f"8 and 9.\n#### {answer}", truth) for answer, truth in marked] + more + [step]
    wrong = [(f"8 and 9.\n#### {answer}", truth) for answer, truth in OTHER] + STRAY
    assert_judged("gsm8k", right, [*wrong, ("72", "72"), (r"\boxed{72}", "72"), ("#### Step 72", "72")])


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
