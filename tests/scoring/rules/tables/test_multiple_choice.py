r"""How models name the option C, and how they name another, several or none."""

from tests.scoring.rules.tables.judging import assert_judged, rows

RIGHT = rows(r"""
C | C. | (C) | **C** | `C` | $C$ | C) Paris | C. Paris | C: Paris | **C) Paris** | **C**: Paris | The answer is C
The answer is $C$. | The answer is **C**. | The answer is "C". | The answer is `C`. | The answer is ‘C’.
The answer is \(C\). | The answer is \(\text{C}\). | The answer is $\boxed{C}$. | \boxed{\text{C}}
\[\boxed{\textbf{(C)}~42}\] | <answer>C</answer> | <answer>c</answer> | The correct answer should be C.
It should be C. | So the answer must be (C). | **Answer:** C | **Answer: C** | Answer: (c) | Final answer: C
The correct option is (C) Paris. | Option C is correct. | C is the correct answer. | (C) Paris is the correct answer.
I would choose C because it is the capital. | I'd go with C. | #### C | (A) is tempting but wrong. The answer is $C$.
At first I thought the answer is A. On reflection the answer is actually C. | A is incorrect, B is incorrect, so C.
(A) is wrong. (B) is wrong. (D) is wrong, too. That leaves C.
The answer is A. Wait, that is not the capital. The answer is C.
The answer is therefore C, since Paris is the capital. | The best answer to the question is option C.
Among the options, the one that fits is (C). | The answer is not (B) but follows from the map. The answer is (C).
答案：the answer is （Ｃ）. | Hence, the answer is: C. Paris, the capital of France.
The answer is clearly C, and D is wrong. | Only option C satisfies both conditions, so the answer is option C. | c
c. | **c** | Answer: c | The answer is c. | [[C]] | A is close. My verdict: [[C]]
The answer is B. Hmm, actually, it's C. | The answer is B. Wait, no. It is C.
The correct answer is D, no wait, it's C | Vitamin B is the answer to beriberi, so the option is C | 答案是 C
答案：C | 所以正确答案是C。 | 因此选 C。 | 故选：C | 答えはCです。 | 정답은 C입니다. | 정답: C
La respuesta correcta es C. | La respuesta es la opción C. | A resposta correta é a letra C. | La risposta è C.
La réponse est C | La bonne réponse est la C. | Die Antwort ist C | Die richtige Antwort lautet **C**.
Het antwoord is C. | Правильный ответ — C. | Ответ: C | Answer: (C). | the ANSWER is: **C** | (A) is wrong, so (C)
A looks good. But the answer is C, not (B). | \boxed{C} | A. Final: \boxed{\text{C}} | the answer is option C
C is correct | The correct option is C | Option A is wrong. Option C | I choose C. (B) is wrong. | (c)
The answer is (c) | \boxed{\mathrm{C}} | \boxed{\textbf{(C)}}
""")
RIGHT += [
    '"C"',
    "<answer>\n(C) Paris\n</answer>",
    "### Final Answer\n\n**C**",
    "A) Rome\nB) Berlin\nC) Paris\nD) Madrid\n\nThe answer is C) Paris.",
    "A. Rome is in Italy.\nB. Berlin is in Germany.\nC. Paris is in France.\n\nThe correct answer is:\n\n**C. Paris**",
    "My answer: C.\n\nExplanation: (A) and (B) are other capitals.",
    "C\n\nParis is the capital of France, so options A, B and D are wrong.",
    "The answer is\n\n(C)",
    "**Answer:** c\n\nIt is the capital.",
    "C\n\nExplanation: The answer to similar questions is A when X",
]
WRONG = rows(r"""
A | B. | (D) | The answer is A. | The answer is $B$. | <answer>D</answer> | <answer>Paris</answer>
<answer>A or C</answer> | `B` | \boxed{A} | \boxed{\text{B}} | C is close, but \boxed{D}
\boxed{C} would be too easy. \boxed{B} | The answer should be B. | (C) is tempting but wrong. The answer is $A$.
The answer is C. Wait, that is Paris. The answer is A. | C is not correct. | The answer is not C.
The answer isn't C. | I don't think the answer is C. | If the answer is C, then B fails. | Is the answer C?
The answer is B or C. | The answer is C or D. | The answer is A, B or C. | A and C | Both (A) and (C).
(A), (B), (C) and (D) are all possible. | I do not know. | Caesar | The answer is Caesar. | The answer is C3PO.
The answer is vitamin C's rival. | The answer is a city. | b | Answer: b | Answer: c or d | answer: city
The answer is c-like. | The answer is C. Hmm, actually, it's B. | The answer is B. Actually, it's C that fails.
Vitamin C is the answer to scurvy, so the option is A. | Vitamin C is the best source. | [[B]] | C was close. [[A]]
答案是 B | 答案不是C | 如果答案是C，那么B错 | 答案是B或C | La respuesta no es C. | Si la respuesta es C, B falla.
Die Antwort ist nicht C. | Die Antwort ist B oder C. | La réponse est C ou D. | La réponse est Caen. | Paris
The options are C and D; choose one. | Option C is wrong. | (C) is wrong, so (D). | Rule out (C).
C is incorrect, A is correct. | We can eliminate C. B is correct. | The correct answer is D) Madrid, not C) Paris.
I choose A over C. | The answer is (a) | #### B | C++ is a language. | the answer is Caesar | I do not know | C and D
I choose C vitamins | C is not correct
""")
WRONG += [
    "",
    "B\n\nExplanation: The answer to similar questions is C when X",
    "Answer: A\n\n(C) would be Paris.",
    "A) Rome\nB) Berlin\nC) Paris\nD) Madrid",
]


def test_the_option_is_read_as_models_name_it():
    assert_judged("multiple_choice", [(each, "C") for each in RIGHT], [(each, "C") for each in WRONG])


def test_the_ground_truth_may_be_written_in_the_same_ways():
    truths = ["C", "c", "(C)", "C.", "C) Paris", r"\boxed{C}", "The answer is C."]
    assert_judged("multiple_choice", [("C", each) for each in truths * 6], [("B", each) for each in truths * 6])
