r"""How models write mathematics, judged by math-verify behind our choice of the final expression."""

from tests.scoring.rules.tables.judging import assert_judged, table

HALF = r"\frac{1}{2}"
RIGHT = table(r"""
\frac{1}{2} : $\boxed{\frac{1}{2}}$ | \boxed{\dfrac{1}{2}} | \boxed{\frac12} | \boxed{0.5} | \boxed{1/2}
\frac{1}{2} : The answer is $\frac{1}{2}$. | \[\boxed{\frac{1}{2}}\] | \(\boxed{\tfrac{1}{2}}\)
\frac{1}{2} : $$x = \boxed{\frac{1}{2}}$$ | \boxed{x = \frac{1}{2}} | \boxed{\frac{2}{4}}
\frac{1}{2} : \boxed{\left(\frac{1}{2}\right)} | \boxed{ \frac{1}{2} } | \boxed{2^{-1}}
\frac{1}{2} : First \boxed{3}. No wait, that was wrong: \boxed{\frac{1}{2}} | <answer>$\frac{1}{2}$</answer>
\frac{1}{2} : <answer>\boxed{\frac{1}{2}}</answer>
72 : so it is 72 | The final answer is 72. | \boxed{72} | \boxed{72.0} | \boxed{72}. | **$\boxed{72}$**
72 : \boxed{\text{72}} | \boxed{72^\circ} | \boxed{\$72} | \boxed{72 \text{ cm}}
72\% : \boxed{72\%}
1234 : \boxed{1,234}
-5 : \boxed{-5}
\sqrt{12} : \boxed{2\sqrt{3}}
2\sqrt{3} : \boxed{\sqrt{12}}
\frac{\pi}{4} : \boxed{\frac{\pi}{4}}
\{2, 1\} : \boxed{\{1, 2\}}
\{1, 2\} : \boxed{1} and \boxed{2} | $\boxed{1}$, $\boxed{2}$
(3, \frac{\pi}{2}) : \boxed{(3, \frac{\pi}{2})}
[0, 1) : \boxed{[0, 1)}
(x+1)^2 : \boxed{x^2 + 2x + 1}
x^2 - 1 : \boxed{(x+1)(x-1)}
10 : \boxed{\binom{5}{2}}
120 : \boxed{5!}
\text{(C)} : \boxed{\text{(C)}}
0.5 : The answer is $\boxed{\frac{1}{2}}$
\frac12 : $x = \frac{1}{2}$, so $\boxed{0.5}$
\{1,2\} : \boxed{\{2, 1\}}
$\sqrt{12}$ : $\boxed{2\sqrt{3}}$
""")
WRONG = table(r"""
\frac{1}{2} : no idea | \boxed{} | \boxed{\frac{1}{3}} | \boxed{-\frac{1}{2}} | \boxed{2} | \boxed{0.05}
\frac{1}{2} : \boxed{\frac{1}{2}} was my guess, but \boxed{\frac{1}{3}} | \frac{1}{ | \boxed{
\frac{1}{2} : <answer>\boxed{1}</answer>
72 : \boxed{\frac{1}{2} | so it is 71 | The final answer is 71. | The final answer is \boxed{71}, not 72
72 : \boxed{72.1} | \boxed{-72} | \boxed{720} | \boxed{x} | \boxed{72x} | \boxed{\text{seventy-two}} | \boxed{\infty}
72 : \boxed{\frac{1}{0}} | \boxed{1/0 - 1/0} | \boxed{x = 71}
1 : \boxed{1} and \boxed{2} | \boxed{\{1, 2\}}
2 : \boxed{1} and \boxed{2}
\{1, 2\} : \boxed{\{1, 2, 3\}}
1234 : \boxed{1,235}
-5 : \boxed{5}
\sqrt{12} : \boxed{3\sqrt{2}}
2\sqrt{3} : \boxed{\sqrt{13}}
\frac{\pi}{4} : \boxed{\frac{\pi}{3}}
(3, \frac{\pi}{2}) : \boxed{(\frac{\pi}{2}, 3)}
[0, 1) : \boxed{[0, 1]} | \boxed{(0, 1)}
(x+1)^2 : \boxed{x^2 + 1}
x^2 - 1 : \boxed{(x+1)(x+1)}
10 : \boxed{\binom{5}{3} + 1}
120 : \boxed{4!}
\text{(C)} : \boxed{\text{(B)}}
""")
WRONG += [("", "\\frac{1}{2}")]


def test_mathematics_is_judged_by_its_meaning():
    assert_judged("math", RIGHT, WRONG)
