"""Rewards that compare a response with an answer: a number, a letter, or what math-verify reads."""

import re
from decimal import Decimal
from time import perf_counter

import pytest
from helpers import parametrize, value_error

from tasks import Problem
from tasks.answers import Answers, Unreadable, last_number, plain_number

# text => its last number
PLAIN = (
    ".5 => 0.5 ~ -.5 => -0.5 ~ 1e3 => 1000 ~ 1,234 => 1234 ~ -$5 => -5 ~ \u2212\u20ac5 => -5 ~ +5 => 5 ~ "
    "-1,200.50 => -1200.5 ~ 8.7e8 => 870000000.0 ~ 8.7 \\times 10^{8} => 870000000.0 ~ -3\\cdot 10^{-2} => -0.03"
)
AT_THE_END = (
    "50% => 50 ~ 50 \\% => 50 ~ 1E-2. => 0.01 ~ so $1,200.00 left => 1200 ~ $\\boxed{-\\$5}$ => -5 ~ "
    "x = -3 => -3 ~ 7-5=2 => 2 ~ \\(x = 42\\). => 42 ~ is:**42** => 42 ~ <<6*7=42>> => 42 ~ "
    "50% of 84 is '42'! => 42 ~ \u662f-42\u5143\u3002 => -42 ~ 1 12 => 12 ~ in 2024 100 came => 100"
)
OTHERS = (
    "so 3 / 2 ~ 10^5 ~ 10^{5} ~ \\frac{3}{2} ~ \\sqrt{2} ~ \u221a2 ~ 2\u00b2 ~ 2x ~ 12\u202f345 ~ 1_000 ~ 3,14 ~ "
    "1,2345 ~ 0,123 ~ 1.2.3 ~ ...42 ~ 12:30 ~ 10-12 ~ COVID-19 ~ 0x1F ~ (2)-3 ~ no idea ~ "
    "1e99999999999999999999 ~ 1/-2 ~ 3\u00f72 ~ x \\times 10^{8} ~ 3 \\times 10^8.5 ~ 1\u00bc ~ 5 000 ~ "
    "10\u201315"
)


def test_the_last_number_is_a_plain_one_or_none():
    for line in f"{PLAIN} ~ {AT_THE_END}".split(" ~ "):
        text, number = line.split(" => ")
        assert last_number(text) == Decimal(number), text
        assert (plain_number(text) is not None) == (line in PLAIN), text
    for text in OTHERS.split(" ~ "):
        assert last_number(text) is plain_number(text) is None, text


@pytest.fixture(scope="module")
def answers():
    return Answers(limit_s=60)


def problem(answer):
    return Problem("?", answer, f"line {answer}")


@parametrize("sign", "-\u2212\u2010\u2011\u2013\ufe63\uff0d")
def test_each_minus_sign_is_one_but_a_dash_between_words_is_none(answers, sign):
    for text in (f"The answer is {sign}5.", f"\u7b54\u6848\u662f{sign}5", rf"\boxed{{{sign}5}}"):
        assert [answers.reward(problem(gold), text) for gold in ("5", "-5", f"{sign}5")] == [0, 1, 1]
    assert answers.reward(problem("-5"), f"3{sign}5") == 0
    assert answers.reward(problem("5"), "It is odd \u2013 5") == 1


# A line is: answer => right responses, or answer =/= wrong ones. The wrong ones are near to right ones.
PAIRS = r"""
# boxes, ends and letters
6 * 7 = 42⏎#### 42 => 6 times 7 is 42.00 ~ \boxed{41} or rather \fbox{42}
6 * 7 = 42⏎#### 42 =/=  ~ first 42, then 43
1e-05 => that is 0.00001 ~ \boxed{10^{-5}}
1e-05 =/= \boxed{10^{-4}}
9 => there are $\boxed{9}$ divisors of 196. ~ $\boxed 9$. ~ the box \boxed{} has 9
9 =/= \boxed{x + 9} ~ \boxed{9}, no: \boxed{ }
54 => \boxed{54}\text{ cm}^2. ~ \boxed{54\%} ~ \boxed{54 dollars.} ~ \boxed{{{{54}}}}
54 =/= \boxed{5 4} ~ \boxed{54 million}
44 => 17^{-1}\equiv \boxed{44}\pmod{83} ~ \boxed{\boxed{44}}
44 =/= \boxed{44 1/2}
30000 => \boxed{30{,}000} ~ \boxed{30\,000}
30000 =/= \boxed{30{,}001}
10 =/= \boxed{7}. (There are 10 cases.)
50% => 50% ~ $50\%$ ~ 0.5
50% =/= 5
870000000 => is $8.7 \times 10^{8}$ ~ \boxed{8.7e8}
870000000 =/= \boxed{8.7 \times 10^{7}}
so $\frac{x}{2}$ #### \frac{1}{2} => 1/2 ~ is 0.5 ~ $\frac{2}{4}$
so $\frac{x}{2}$ #### \frac{1}{2} =/= 3/2 ~ 2 ~  ~ \boxed{1/23
2t => $2t$ ~ \boxed{t \cdot 2}
2t =/= $2$ ~ \boxed{2}
5 => \boxed{5\ \text{cm}} ~ \boxed{5\,\mathrm{m/s}} ~ \boxed{x = 5 cm} ~ \boxed{5\text{ cm}^2.}
5 => \boxed{5 miles per hour} ~ \boxed{5 sq. units}
5 =/= \boxed{\$5\text{ million}} ~ \boxed{5 hundredths} ~ \boxed{5_8}
5\ \text{cm} => 5 ~ \boxed{5} ~ so $5\text{ cm}$.
5\ \text{cm} =/= 6 ~ \boxed{5 million}
1+x => \boxed{x+1\ \text{cm}}
1+x =/= \boxed{x+1\text{ thousand}}
3 => \boxed{3 apples}
3 =/= \boxed{3\text{ dozen}} ~ \boxed{\text{3 million}} ~ \boxed{3 percent} ~ \boxed{3 halves} ~ \boxed{3 ab}
3 =/= \boxed{3 over two} ~ \boxed{3\ldots}
52_{8} => \boxed{52_8} ~ \boxed{52}
52_{8} =/= \boxed{52_9}
90 => \boxed{90°} ~ \boxed{90\degree} ~ \boxed{90^\circ}
12 => \boxed{12 cm²}
x^2 => \boxed{x²}
\frac12 => \boxed{½}
\sqrt{16} => \boxed{√16}
\sqrt{16} =/= \boxed{0}
\text{even} => \boxed{even}
\text{even} =/= \boxed{odd}
2,3 => \boxed{2 and 3}
2,3 =/= \boxed{2 and 4}
A => (A) ~ Answer: A ~ **A** ~ \boxed{A) 5 cm} ~ \boxed{\textbf{(A)}\ 5} ~ so $A$. ~ **Answer:** A
A => the answer is option A ~ Thus, (A) is right ~ Answer is A. (B) is wrong. ~ <answer>A</answer> ~ Correct option: A
A => Option A is correct. ~ Therefore, A ~ 5 cm.⏎**A.** ~ I take [A] here
A =/= A dog ~ a ~ BAD ~ Answer: AB ~ P(A) = 1 ~ A) 5, B) 6 ~ is not A ~ The answer is A or B ~ The answer is A dog.
A =/= Answer: A 5 cm rod ~ \boxed{A, B} ~ \boxed{B} and (A) ~ it isn't (A) ~ (A) is wrong ~ We rule out (A)
A =/= \boxed{\text{Not } (A)} ~ Option A is wrong
C => Answer: "C" ~ Answer: C - it is so ~ <answer>⏎C⏎</answer>
C =/= 20 degrees C ~ vitamin C. ~ Answer: vitamin C ~ Answer: C - B
D => (C) 3 (D) 4⏎So (D).
D =/= (A) 1⏎(B) 2⏎(C) 3⏎(D) 4 ~ A. 1⏎B. 2⏎C. 3⏎D. 4 ~ Option C: 3⏎Option D: 4 ~ **C.** 3⏎**D.** 4
# sign
-3 => x = - 3 ~ x = − 3. ~ The answer is - 3 ~ $x = - 3$ ~ \boxed{- 3} ~ - 3 ~ it becomes - 3 ~ x = –3
-3 => It is –€3 ~ It is –\$3
-3 => 所以 x = - 3。
-3 =/= x = 3 ~ 5 - 3 ~ 2x - 3 ~ x = 3 or -3 ~ x = 3 or x = - 3 ~ (2, -3) ~ x - 3 ~ not -3 ~ ± 3
3 => x = + 3 ~ x = 3 ~ Answer - 3 ~ Answer – 3
3 =/= x = - 3 ~ $x = - 3$ ~ \boxed{- 3} ~ x = − 3 ~ The answer is - 3.
-1/2 => x = - 1/2 ~ $x = - \frac{1}{2}$ ~ so it is - 1/2.
-1/2 =/= x = 1/2 ~ $\frac{1}{2}$ ~ 1 - 1/2
1/2 => x = 1/2
1/2 =/= x = - 1/2 ~ 3 - 1/2 ~ 2x - 1/2 ~ $- \frac{1}{2}$
- 3 a => $-3a$ ~ \boxed{- 3 a}
- 3 a =/= $3a$ ~ -3
# part
1 => it is (1) ~ In box 2 is 1.
1 =/= 2x - 1 ~ (3, 1) ~ x + 1 ~ 3 and 1 ~ 3 or 1 ~ [0, 1] ~ x > 1 ~ x \geq 1 ~ x = 2, 1 ~ 2 * 1 ~ f(1) ~ x^2 + 1
1 =/= between 0 and 1 ~ x \cdot 1 ~ 3 : 1 ~ \frac{1}{x} ~ $\log 1$ ~ 5 mod 1 ~ 1 - x ~ 1 + y ~ $1 + \sqrt{x}$ ~ 1/x
1 =/= (-\infty,-1) ~ $\begin{array}{c}2 \\ 1\end{array}$ ~ {2, 1} ~ 3; 1 ~ a + 1 ~ x**1 ~ isn't 1
3 => so 3 m ~ 3 h. ~ 3 kg ~ It costs $3 ~ 3, which is odd ~ 6 x 3 = 18 and 18 / 6 = 3
3 =/= $3\pi$ ~ 3π ~ 3 n ~ 3n ~ $2\sqrt{3}$ ~ $3\sqrt{x}$ ~ x = 3y ~ 5 x 3 ~ x ≡ 5 (mod 3) ~ is not 3
2 => 7-5=2 ~ $7 - 5 = 2$ ~ x = 2
2 =/= 2 n ~ 5, 2 ~ x < 2 ~ either 1 or 2 ~ $x \in \{1, 2\}$
5 => m = 5 ~ f(2) = 5 ~ x_1 = 5 ~ S_{10} = 5 ~ 3 x 2 - 1 = 5 ~ Cost of 3 apples = 5
5 =/= 2x + 1 = 5 ~ x^2 = 5 ~ 3y = 5 ~ x - 1 = 5 ~ x/2 = 5
4/3 => x = 4/3
4/3 =/= 3/4 or 4/3 ~ between 1/3 and 4/3 ~ (1, 4/3) ~ x > 4/3 ~ 5 + 4/3 ~ not 4/3 ~ 2x = 4/3
# tags, bold, full stop
3/4 => <answer>3/4</answer> ~ <answer> 3/4. </answer> ~ The answer is **3/4**. ~ **3/4** ~ **Answer: 3/4**
3/4 => **Answer:** 3/4. ~ Answer: 3/4 ~ so 3/4. ~ It is 3/4 ~ <answer>$\frac{3}{4}$</answer>
3/4 => <answer>\boxed{3/4}</answer> ~ **$\frac{3}{4}$**. ~ \boxed{3/4.} ~ \boxed{\frac{3}{4}.}
3/4 => <answer>x = 3/4</answer> ~ <answer>0.75</answer> ~ <b>3/4</b> ~ <answer>**3/4**</answer>
3/4 => <think>1/2</think>⏎<answer>⏎3/4⏎</answer> ~ The answer is 3/4! ~ a 3/4 chance ~ $\frac{3}{4}.$
3/4 => \(\frac{3}{4}\). ~ #### 3/4 ~ is \[\frac{3}{4}.\] ~ <final_answer>3/4</final_answer> ~ `3/4` ~ ***3/4***
3/4 => 3/4。 ~ The final answer is $\frac{3}{4}$. I hope it is correct.
3/4 =/= <answer>4/3</answer> ~ The answer is **4/3**. ~ <answer>3/4</answer> <answer>1/4</answer> ~ **3/4** or **4/3**
3/4 =/= 13/4. ~ 3/4 + 1 ~ <answer>not 3/4</answer> ~ 3/45 ~ <answer>3/4 or 4/3</answer> ~ <answer>(3/4, 1)</answer>
3/4 =/= 3/4 - x ~ $x\frac{3}{4}$ ~ <answer>2x = 3/4</answer> ~ <answer></answer> 34 ~ The answer is **3**/**5**.
9/14 => 9/14. ~ x = 9/14. ~ The probability is 9/14.
9/14 =/= 9/15. ~ 9.14. ~ 9/1.4 ~ 1 - 9/14.
7 => <answer>7</answer> ~ **7**. ~ <answer>**7.**</answer> ~ \boxed{7.} ~ The answer is **7**
7 => <answer>The answer is 7</answer>
7 =/= <answer>8</answer> 7 ~ **7**/**2** ~ <answer>x - 7</answer>
x + 1 => <answer>x+1</answer> ~ The answer is **x + 1**. ~ $1 + x$. ~ <answer>\(x + 1\)</answer>
x + 1 =/= <answer>x - 1</answer> ~ **x + 1/2**. ~ <answer>2(x + 1)</answer>
# equation
5 => \boxed{x=5} ~ \boxed{x = 5.} ~ \boxed{f(2) = 5} ~ \boxed{x_1 = 5} ~ \boxed{AB = 5} ~ \boxed{Area = 5}
5 => \boxed{\frac{a}{b} = 5} ~ \boxed{\angle A = 5} ~ \boxed{2 + 3 = 5} ~ \boxed{S_{10} = 5} ~ \boxed{x = 2 + 3 = 5}
5 => \boxed{\text{Area} = 5}
5 =/= \boxed{2x+1=5} ~ \boxed{2x=5} ~ \boxed{x-5=0} ~ \boxed{x^2=5} ~ \boxed{\frac{x}{2}=5} ~ \boxed{\sqrt{x}=5}
5 =/= \boxed{x+1=5} ~ \boxed{-x=5} ~ \boxed{2(x+1)=5} ~ \boxed{x=6, x=5} ~ so 2x + 1 = 5 ~ <answer>3x = 5</answer>
2x+1 => \boxed{y = 2x+1} ~ \boxed{f(x) = 2x+1} ~ $y = 2x + 1$
2x+1 =/= \boxed{2y = 2x+1} ~ \boxed{y^2 = 2x+1}
y=1-x => \boxed{y=1-x} ~ \boxed{x + y = 1}
y=1-x =/= \boxed{y=1+x}
# letters
B => Option B ~ Option B. ~ **Option B** ~ I choose B. ~ B is the answer ~ (B) is the correct answer.
B => So B is correct. ~ B is correct ~ Therefore, B is the right option. ~ Thus the answer is option (B).
B => The answer would be B. ~ A is wrong, so B is correct. ~ <answer>Option B</answer> ~ My choice: B
B => \boxed{\text{Option B}} ~ The correct choice is B ~ A is too small. Option B ~ the answer must be B ~ ANS: B
B =/= not B ~ between A and B ~ Option A or B ~ Option A or Option B ~ B is not the answer ~ B is wrong
B =/= Neither A nor B is correct ~ I do not think B is correct. ~ It is not option B ~ If B is correct, x = 2
B =/= A and B is the answer ~ Either A or B is correct ~ vitamin B ~ plan B is good ~ B is the wrong answer
B =/= It is unlikely that B is correct. ~ The answer isn't B ~ Option C ~ Option B is wrong ~ BB is correct
B =/= rule out option B ~ The answer is A, not B. ~ point B
D => D is the answer ~ Hence D is correct.
D =/= Vitamin D is the best
A => A is the answer. ~ Option A
A =/= A dog is the answer ~ A right answer is hard to find ~ An answer
# letters in other languages
B => 所以答案是B。 ~ 答案：B ~ 答案为 B。 ~ 故选B． ~ 因此选择B。 ~ 正确答案是（B）。 ~ 正确选项为B项 ~ B是正确的。
B => 所以B正确。 ~ 选项B是正确的 ~ 应该选B ~ A错误，故选B。 ~ B选项正确 ~ 本题答案选 **B** ~ 答えはBです。
B => 정답은 B입니다. ~ الإجابة هي B. ~ الإجابة الصحيحة هي B ~ الجواب: B ~ الجواب الصحيح هو (B). ~ الخيار B
B => B هي الإجابة الصحيحة ~ الخيار B هو الصحيح ~ Ответ: B ~ La respuesta es B. ~ La réponse est B.
B => Die Antwort ist B.
B =/= 答案不是B。 ~ 不选B ~ 不应该选择B。 ~ B错误。 ~ B不正确。 ~ 选项B错误。 ~ 答案是A或B。 ~ A和B都正确 ~ A、B正确
B =/= 同时选择景点B的概率 ~ 点B ~ 维生素B ~ 答案是C。 ~ 答案是AB。 ~ 排除B ~ الإجابة ليست B. ~ ليست الإجابة B
B =/= الخيار B خاطئ ~ الإجابة هي A أو B ~ الإجابة غير B ~ La respuesta no es B. ~ 选择A和B
B => Answer: `B` ~ #### B ~ Answer: **B**, since C fails
B =/= Answer: `B` or `C` ~ Answer: "B" or "C" ~ Answer: `AB`
# around
3/4 => Result → 3/4 ~ it is -> 3/4 ~ “3/4” ~ 3/4 ✓ ~ 答案：3/4 ~ <think>1/2</think>3/4 ~ 3/4 (see above) ~ (So) 3/4
3/4 =/= > 3/4 ~ the answer > 3/4 ~ “1/4” and “3/4” ~ 3/4 (x+1) ~ 2(3/4 ~ 1/4，3/4 ~ <think>3/4</think>1/4 ~ x→3/4
x+1 => The answer is x+1 (for all x)
x+1 =/= 2(x+1) ~ (x+1)^2 (for all x)
5 => It is 5cm long. ~ \boxed{5cm} ~ 3cm + 2cm = 5cm
5 =/= 2 - 5cm ~ 3 cm, 5 cm ~ 5mgh ~ 5mm or 6mm
5cm => 5 ~ \boxed{5 cm} ~ 5cm.
18\text{ cm}^2 => 18\text{ cm}^2. ~ 18 cm^2 ~ 18 ft^{2}, as required ~ $18 \text{m}^2$
18\text{ cm}^2 =/= 18 \text{x}^2 ~ 18 x^2 ~ $18\pi$ cm^2 ~ 3 cm + 18 cm^2
# percent
0.25 => \boxed{25\%} ~ \boxed{25%} ~ 25% ~ $25\%$ ~ 25 percent ~ \boxed{0.25} ~ <answer>25%</answer>
0.25 =/= \boxed{2.5\%} ~ \boxed{25} ~ 2500% ~ 25 ~ 25 percent more is 30
25\% => \boxed{0.25} ~ \boxed{25} ~ 25% ~ \boxed{25\%} ~ 0.25
25\% =/= \boxed{2.5} ~ \boxed{0.25\%} ~ 2500 ~ \boxed{52\%}
25% => \boxed{0.25} ~ 1/4
25% =/= 4
25 => \boxed{25\%} ~ 25%
25 =/= \boxed{0.25} ~ 0.25 ~ 2500%
12.5 => 12.5%
12.5 =/= 125%
1/4 => \boxed{25\%} ~ 25%
1/4 =/= \boxed{4\%} ~ 4%
# answers that were refused
$18 \mathrm{~min}$ => \boxed{18} ~ 18 min ~ \boxed{18 \mathrm{~min}} ~ 18 minutes ~ $18$
$18 \mathrm{~min}$ =/= 81 ~ \boxed{1.8} ~ 20 - 18
$y=1-x+x^{2}$. => \boxed{y=1-x+x^2} ~ $y = x^2 - x + 1$
$y=1-x+x^{2}$. =/= \boxed{y=1+x+x^2} ~ \boxed{y=x^2}
$5.13 \mathrm{ft} / \mathrm{sec}$ => 5.13 ~ \boxed{5.13\text{ ft/sec}}
$5.13 \mathrm{ft} / \mathrm{sec}$ =/= 5.31
$\frac{9}{14}$. => 9/14
$\frac{9}{14}$. =/= 14/9
$2,365,200$ beats/lifetime => 2365200
$2,365,200$ beats/lifetime =/= 2,365,201
$45 \mathrm{mph}$ => 45 mph
$45 \mathrm{mph}$ =/= 54
- 7 => -7
- 7 =/= 7
**8** => 8
**8** =/= 9
$3630 \mathrm{ft}^{2}$ => 3630
$3630 \mathrm{ft}^{2}$ =/= 3600
$5 \frac{1}{4} \mathrm{~min}$ => \boxed{\frac{21}{4}} ~ $5.25$
$5 \frac{1}{4} \mathrm{~min}$ =/= \boxed{\frac{5}{4}}
<answer>6</answer> => 6
<answer>6</answer> =/= 5
$\left[\begin{array}{rr}1 & 2 \\ 3 & 4\end{array}\right]$ => \boxed{\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}}
$\left[\begin{array}{rr}1 & 2 \\ 3 & 4\end{array}\right]$ =/= \boxed{\begin{bmatrix}1 & 2 \\ 3 & 5\end{bmatrix}}
3\mathrm{i} =/= \boxed{3}
"""  # noqa: RUF001
KINDS = dict(zip(*[iter(re.split(r"\n# (.*)\n", PAIRS)[1:])] * 2, strict=True))


@parametrize("kind", KINDS)
def test_a_response_is_graded_as_people_grade_it(answers, kind):
    for line in KINDS[kind].strip().split("\n"):
        answer, sign, responses = re.split(" (=>|=/=) ", line.replace("⏎", "\n"))
        for response in responses.split(" ~ "):
            assert answers.reward(problem(answer), response) == (sign == "=>"), (answer, response)


READ = (
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} ~ 3 \\pm 2\\sqrt{2} ~ 3 \\times 10^{8} ~ 15\\mbox{ cm} ~ "
    "8x^2-3xy+y^2 ~ \\frac{ab}{3} ~ 2t ~ 4abc ~ 52_8 ~ 1\\,000 ~ (3,4] ~ \\log_2 5 ~ D"
)
NOT_READ = "12\u202f345 ~ 1_000 ~ 0x1F ~ ...42 ~ 1 1/2 ~ 5 gum ~ 1e999999 ~ diverges"


@parametrize("answer", READ.split(" ~ "))
def test_another_digit_or_letter_in_an_answer_that_is_read_is_another_answer(answers, answer):
    assert answers.reward(problem(answer), rf"\boxed{{{answer}}}") == 1
    for found in re.finditer(r"\\(?:begin|end|mbox)\{[^}]*\}|\\[a-z]+|[\da-zA-Z]", answer):
        if len(found[0]) == 1:
            other = answer[: found.start()] + "7" + answer[found.end() :]
            assert answers.reward(problem(answer), rf"\boxed{{{other}}}") == 0, other


def test_an_answer_that_would_be_read_in_part_is_unreadable_and_never_a_reward(answers):
    for answer in NOT_READ.split(" ~ "):
        with pytest.raises(Unreadable, match=r"no number and no letter .* --reward\), and .*math-verify does not read"):
            answers.reward(problem(answer), "42")
    with pytest.raises(Unreadable, match=r"its answer 'so #### \$10\u201320\$' is a range"):
        answers.reward(problem("so #### $10\u201320$"), "-10")


def test_answers_that_mean_the_same(answers):
    for one, other in (("1/2", r"\frac{1}{2}"), ("A", r"\text{(A)}"), ("so #### 40.0", "40")):
        assert answers.same(one, other)
        assert not answers.same(one, "41")


@parametrize("response", [
    "\\boxed{" + "{" * 50_000 + "}" * 50_001, "1" * 100_000 + "x", "1," * 50_000, "\\boxed{5" + " " * 100_000 + "x}",
    "answer is " * 10_000, "A)" * 50_000, "\\boxed{" + "x+" * 20_000 + "1}",
])  # fmt: skip
def test_a_long_response_is_wrong_within_seconds(answers, response):
    start = perf_counter()
    assert [answers.reward(problem(answer), response) for answer in ("42", "x^2", "B")] == [0, 0, 0]
    assert perf_counter() - start < 30


def test_without_math_verify_answers_are_numbers_and_letters(loaded, tmp_path, monkeypatch):
    (tmp_path / "absent.py").write_text("import no_such_module")
    monkeypatch.setattr("tasks.answers.MATH_ANSWERS", str(tmp_path / "absent.py"))
    rows = [{"question": f"{answer}?", "answer": answer} for answer in (1, "$1,200", "#### -7", "B", "1/2")]
    assert len(loaded(rows[:4]).train) == 3
    with value_error(r"'1/2' is no plain number.*pip install math-verify.*ModuleNotFoundError"):
        loaded(rows)
