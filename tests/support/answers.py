"""Answers that are the same (=) and answers that are not (~), a pair a line, by kind; the manual
has the first two of each.
"""

# Signs that look alike are what is tested.
# ruff: noqa: RUF001

from __future__ import annotations

MATHEMATICS: dict[str, str] = {
    "Marks around an answer": r"""
\boxed{204}  =  204
**73**  =  73
$\frac{1}{2}$  =  1/2
\(x=2\)  =  2
\[ \boxed{2} \]  =  2
$\boxed{204}$.  =  204
The answer is **42**.  =  42
**Answer:** 42  =  42
Final answer: \boxed{42}  =  42
Therefore, the answer is 7.  =  7
`7`  =  7
__5__  =  5
7 \quad  =  7
7\\  =  7
\displaystyle \frac{1}{2}  =  1/2
\text{5}  =  5
\mathbf{7}  =  7
{5}  =  5
((5))  =  5
\text{The answer is } 5  =  5
12  ~  13
$  ~  5
+  ~  -
""",
    "Fractions, mixed numbers": r"""
\dfrac12  =  0.5
3 1/2  =  \frac{7}{2}
\tfrac{1}{2}  =  \frac{1}{2}
-\frac{1}{2}  =  \frac{-1}{2}
\frac{1}{-2}  =  -0.5
\frac {1}{2}  =  \frac{1}{2}
\tfrac{22}7  =  22/7
1\frac{1}{2}  =  \frac{3}{2}
1 \frac12  =  1.5
-1\frac{3}{4}  =  -7/4
187.5  =  187\frac12
1 / 2  =  \frac{1}{2}
0.\overline{3}  =  \frac{1}{3}
0.1\overline{6}  =  1/6
0.\bar{3}  =  1/3
\frac{2}{3} = 0.\overline{6}  =  2/3
3 1/2  ~  31/2
\frac12  ~  \frac{1}{12}
3\frac{1}{2}  ~  \frac{3}{2}
1/3  ~  0.33
1/3  ~  0.3333333333
\frac{14}{3}  ~  4.6667
0.\overline{36}  ~  0.36
\frac{a}{b}  ~  \frac{b}{a}
3/4  ~  34
a/b/c  ~  a/(b/c)
1/0  ~  2/0
""",
    "Numbers as they are grouped and written": r"""
1{,}000  =  1,000
1.2 \times 10^{-3}  =  0.0012
1\,000  =  1000
10 000  =  10000
1,000,000  =  10^6
11{,}111{,}111{,}100  =  11111111100
6.02\times10^{23}  =  6.02e23
3.00 \times 10^8  =  300000000
3 x 10^8  =  3e8
033  =  33
42.0  =  42
5.  =  5
+5  =  5
-0  =  0
-50  =  - 50
17^{\text{th}}  =  17
3.5  ~  35
1 2  ~  12
1,000  ~  1
1,200  ~  1.2
1,234  ~  12,34
(1,234)  ~  1234
1.2.3  ~  123
1.2 \times 10^{-3}  ~  1.2 \times 10^{3}
12  ~  -12
-5  ~  5
0.999  ~  1
""",
    "What Python prints": r"""
0.30000000000000004  =  0.3
1e-05  =  0.00001
33.333333333333336  =  \frac{100}{3}
4.666666666666667  =  14/3
0.333333333333333  =  1/3
2.9999999999999996  =  3
0.9999999999999999  =  1
7.000000000000001  =  7
6.123233995736766e-17  =  0
3.141592653589793  =  \pi
sqrt(2)/2  =  0.7071067811865476
sqrt(2)/2  =  \frac{\sqrt{2}}{2}
x**2 + 2*x + 1  =  (x+1)^2
2*sqrt(3)  =  2\sqrt{3}
1/(2*pi)  =  \frac{1}{2\pi}
1e+20  =  10^{20}
(0.30000000000000004, 2.0)  =  (0.3,2)
(0.5+0.8660254037844386j)  =  \frac{1}{2}+\frac{\sqrt{3}}{2}i
3+4*I  =  3+4i
Fraction(1, 3)  =  \frac{1}{3}
Matrix([[1, 2], [3, 4]])  =  \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
[1, 2, 3]  =  1,2,3
{1, 2, 3}  =  \{3,2,1\}
True  =  \text{true}
1e3  ~  3e
0.30000000000000004  ~  0.31
1.41421356  ~  \sqrt{2}
33.333333333333336  ~  33.3
1.7320508075688772  ~  \sqrt{2}
1e-05  ~  1e-06
1.2e-3  ~  1.2e3
123456789012345  ~  123456789012346
3e2  ~  32
""",
    "Signs of Unicode": r"""
π/2  =  \frac{\pi}{2}
3×4  =  12
−5  =  -5
–5  =  -5
½  =  0.5
3½  =  7/2
2⅓  =  \frac{7}{3}
√(x+1)  =  \sqrt{x+1}
2√3  =  \sqrt{12}
∛8  =  2
x⁴ − 1  =  x^4-1
5 × 10⁻³  =  0.005
6÷2  =  3
x ≥ 3  =  x \geq 3
−3 ≤ x < 2  =  [-3,2)
{1,2} ∪ {3}  =  \{3\} \cup \{1,2\}
90°  =  90^\circ
ℝ  =  \mathbb{R}
2516₈  =  2516_8
１２  =  12
α+β  =  \beta+\alpha
x²  ~  x2
√2  ~  2
""",
    "Powers, roots, factorials": r"""
2^{100}  =  1267650600228229401496703205376
\sqrt{12}  =  2\sqrt3
2^{100}  =  4^{50}
2^{2019}  =  2\cdot 2^{2018}
\frac{2^{2018}+1}{3}  =  (2^{2018}+1)/3
1 + 10^{100}  =  10^{100}+1
\frac{1}{\sqrt2}  =  \frac{\sqrt 2}{2}
\frac{1}{1+\sqrt{2}}  =  \sqrt{2}-1
\sqrt{3+2\sqrt{2}}  =  1+\sqrt{2}
\sqrt[3]{-8}  =  -2
27^{1/3}  =  3
\sqrt{-4}  =  2\sqrt{-1}
100!  =  100 \cdot 99!
\frac{7!}{5!}  =  42
\binom{10}{3}  =  120
2^{100}  ~  2^{101}
2^{100}  ~  2^{100}+1
3^4  ~  34
\sqrt[3]{2}  ~  3\sqrt{2}
5!  ~  5
\binom{5}{2}  ~  \frac{5}{2}
\sqrt2  ~  1.414
""",
    "Formulas with letters": r"""
(x+1)(x-1)  =  x^2-1
\frac{\theta}{2}  =  \theta/2
\frac{n(n+1)}{2}  =  \frac{n^2+n}{2}
2^{n+1}-2  =  2(2^n-1)
x^{2n}  =  (x^2)^n
\left(\frac{1}{3}\right)^{n}  =  3^{-n}
\frac{n!}{(n-1)!}  =  n
\binom{n}{2}  =  \frac{n(n-1)}{2}
\frac{1}{3}\pi r^2 h  =  \frac{\pi r^2 h}{3}
\sqrt{x^2}  =  |x|
|x|  =  \left|x\right|
\lfloor n/2 \rfloor  =  \left\lfloor \frac{n}{2} \right\rfloor
a_1 + a_2  =  a_{2}+a_{1}
f(x) = x^2+1  =  1+x^2
\ln|x| + C  =  C+\ln |x|
\sum_{k=1}^n k  =  \sum_{k=1}^{n} k
2 n  =  2n
2 \cdot n  =  2n
\frac{\pi}{4} + \pi k  =  \frac{\pi}{4} + k\pi
2^{n} m  =  m \cdot 2^n
\frac{\sqrt{3}}{4} s^2  =  \frac{s^2\sqrt{3}}{4}
(n-1)2^{n+1}+2  =  (n-1)\cdot 2^{n+1}+2
n!2^n  =  2^n n!
{n \choose 2}  =  \frac{n(n-1)}{2}
\sqrt{x^2}  ~  x
\sqrt{n^2}  ~  n
|x-1|  ~  x-1
x^2y  ~  xy^2
a_1  ~  a_2
x_1  ~  x
a_{1}  ~  a_{11}
f'(x)  ~  f(x)
\overline{z}  ~  z
\theta  ~  \phi
ab  ~  a+b
x!  ~  x
2e  ~  2
2 n  ~  2
4 k  ~  4
2 m  ~  2 n
3 2^2  ~  12
\sum_{k=1}^n k  ~  \sum_{k=0}^n k
""",
    "Functions, angles, complex numbers": r"""
\sin^2 x + \cos^2 x  =  1
\log_2 8  =  3
\cos 2x  =  1-2\sin^2 x
\tan\frac{\pi}{4}  =  1
\arctan 2  =  \tan^{-1}(2)
\sin 30^\circ  =  \frac{1}{2}
2\cos 20^\circ  =  2 \cos(20^\circ)
\ln(2)  =  log(2)
\log 100  =  2
2\ln 3  =  \ln 9
\frac{1}{2}\ln 3  =  \ln \sqrt{3}
e^2  =  \exp(2)
e^{i\pi}  =  -1
(1+i)^2  =  2i
3i+4  =  4+3i
30^\circ  =  \frac{\pi}{6}
\sin x  ~  \cos x
\sin 2x  ~  2\sin x
\log_2 8  ~  \log_3 8
3+4i  ~  3-4i
i  ~  1
e^x  ~  e^{-x}
180^\circ  ~  \frac{\pi}{2}
e  ~  2.718
""",
    "Per cent, degrees, units, money": r"""
28 percent  =  28\%
7 \text{ cm}  =  7
50\%  =  0.5
33\frac{1}{3}\%  =  33.333333333333336\%
90^{\circ}  =  90 degrees
5\text{ cm}  =  5 \text{ centimeters}
12 square centimeters  =  12 \text{ cm}^2
144\pi\text{ square inches}  =  144\pi
30 mph  =  30 \text{ miles per hour}
10 \text{ m/s}  =  10 meters per second
9.8 m/s^2  =  9.8 \text{ m/s}^2
\$32,\!000  =  32000
18 dollars  =  \$18
€5  =  5
12 \text{ square units}  =  12
100^{\circ} \mathrm{F}  =  100
25 degrees Celsius  =  25^\circ C
4:30 \text{ p.m.}  =  4:30 PM
1.5 million  =  1{,}500{,}000
20 \text{ cups of feed}  =  20 cups
5 \text{ slices of pizza}  =  5
10 \mathrm{~N}  =  10 newtons
2 \pi \mathrm{~m}  =  2\pi
50\%  ~  5
5 \text{ cm}  ~  5 \text{ m}
5 cm  ~  5 cm^2
25 cents  ~  25 dollars
3 \text{ hours}  ~  3 \text{ minutes}
30^\circ  ~  30 \text{ radians}
120^\circ C  ~  120^\circ F
7 \text{ a.m.}  ~  7 \text{ p.m.}
3 \text{ million}  ~  3
0.5\%  ~  50
20 cups of feed  ~  20 pounds of feed
""",
    "Several values, sets": r"""
1 \text{ and } 2  =  2,1
x = \pm 2  =  \{-2, 2\}
1, 2, and 3  =  3,1,2
x = 1 \text{ or } x = 2  =  1,2
1 \pm \sqrt{2}  =  1+\sqrt2, 1-\sqrt2
\{1\pm\sqrt{5},-2\}  =  1\pm\sqrt{5}, -2
\{x+1,y\}  =  \{y,1+x\}
x_{1}=3, x_{2}=-5  =  3,-5
2 hours, 3 hours  =  3 h, 2 h
\begin{cases} x=1 \\ y=2 \end{cases}  =  y=2, x=1
\emptyset  =  \{\}
\text{no solution}  =  \varnothing
999,999  =  999999
5,000, 6,000  =  6000, 5000
1,2  ~  1,3
1 \text{ or } 2  ~  2
1,2,3  ~  1,2
\pm 2  ~  2
\{1,1,2\}  ~  \{1,2,2\}
\emptyset  ~  \{0\}
x=1, y=2  ~  x=2, y=1
1 2 3  ~  123
""",
    "Tuples": r"""
\left( 1,\! 2 \right)  =  (1,2)
(x,y) = (1,2)  =  x=1, y=2
(1/2, 3)  =  (0.5,3.0)
\left( 3, \frac{\pi}{2} \right)  =  (3, \pi/2)
(3,4) \text{ or } (4,3)  =  (4,3),(3,4)
\langle 1,2,3\rangle  =  (1,2,3)
\overrightarrow{AB} = (1,2)  =  (1,2)
(1,2)  ~  (2,1)
(1,2)  ~  \{1,2\}
(x,y)  ~  (y,x)
(3,4)  ~  34
""",
    "Intervals and inequalities": r"""
(-\infty,\tfrac12)  =  (-\infty,0.5)
x\geq 3  =  [3,\infty)
x\leqslant 4  =  x \le 4
-1 < x \le 2  =  (-1,2]
2 \ge x > -1  =  -1 < x \leq 2
0<x<1  =  1>x>0
x \in [0,1]  =  0 \le x \le 1
x<1 \text{ or } x>2  =  (2,\infty)\cup(-\infty,1)
\{x \mid x > 3\}  =  x>3
x \in \mathbb{R}  =  (-\infty, +\infty)
x \neq 1  =  (-\infty,1)\cup(1,\infty)
x - 3 > 0  =  x > 3
[0,1)  ~  [0,1]
x>3  ~  x\geq 3
x>3  ~  x<3
x<1  ~  1
(3,\infty)  ~  (-\infty,3)
x > 2 \text{ or } x < -2  ~  -2 < x < 2
\infty  ~  -\infty
""",
    "Equations and names of values": r"""
x=5  =  5
y=2x+1  =  2x-y+1=0
f(x) = x^2+1  =  x^2 + 1
\angle ABC = 30^\circ  =  30
P(A) = 0.25  =  \frac14
m+n = 7  =  7
\frac{dy}{dx} = 2x  =  2x
\begin{align*} x &= 5 \end{align*}  =  5
S = 1+2+3 = 6  =  6
x + 2y = 8  =  2x+4y=16
\frac{x^2}{4}+\frac{y^2}{9}=1  =  9x^2+4y^2=36
x \neq 2  =  x \ne 2
x \approx 3.14  =  3.14
x=5  ~  y=5
x^2 = 4  ~  x = 2
x\neq 2  ~  x=2
y=2x+1  ~  x=2y+1
x+y=1  ~  x+y=2
""",
    "Matrices": r"""
\begin{pmatrix}1\\2\end{pmatrix}  =  \begin{pmatrix} 1 \\ 2 \end{pmatrix}
[[1, 2], [3, 4]]  =  \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}  =  \begin{pmatrix} \frac{1}{2} \\[1ex] 3 \end{pmatrix}
\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)  =  \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
A = \begin{pmatrix} 1 \\ 2 \end{pmatrix}  =  \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  ~  \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  ~  \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  ~  \begin{vmatrix}1&2\\3&4\end{vmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  ~  12
""",
    "Ratios, times, dates, other bases": r"""
2516_{8}  =  2516_8
3 : 4  =  3:4
1 : \sqrt{2}  =  1:\sqrt 2
1011_2  =  1011_{2}
n \equiv 3 \pmod 7  =  n \equiv 3 \pmod{7}
2024-01-05  ~  2018
10:30  ~  1030
12:30  ~  12:45
3:4  ~  4:3
2024-11-15  ~  1998
1/2/2024  ~  1/4048
2516_8  ~  2516_7
n \equiv 3 \pmod 7  ~  n \equiv 4 \pmod 7
""",
    "Choices and words": r"""
\textbf{(A)}  =  A
\text{Yes}  =  yes
\textbf{(C)}\ 12  =  C
\textbf{(C)}\ 12  =  12
B)  =  B
\text{(A), (C)}  =  A, C
\text{even}  =  Even
\text{June 20}  =  June 20
\text{undefined}  =  undefined
(A)  ~  (B)
\text{even}  ~  \text{odd}
p \to q  ~  q \to p
p \setminus q  ~  q \setminus p
A  ~  a
BADC  ~  ABCD
cat  ~  act
AB  ~  BA
II  ~  I
1AB  ~  1BA
\text{even}  ~  \text{not even}
June 20  ~  June 2
6 remainder 2  ~  62
""",
}

WORDS: dict[str, str] = {
    "Articles, case, punctuation": """
The Red River!  =  red river
"Paris"  =  Paris.
**Paris**  =  Paris
Yahoo!  =  Yahoo
U.S.  =  US
J. R. R. Tolkien  =  J.R.R. Tolkien
JRR Tolkien  =  J.R.R. Tolkien
St. Louis  =  St Louis
O\u2019Brien  =  O'Brien
(A)  =  A
#1  =  1
hepatitis A  ~  hepatitis
""",
    "Accents and other forms of letters": """
Zoe  =  Zoë
Beyonce  =  Beyoncé
Lodz  =  Łódź
Malmo  =  Malmö
Strasse  =  Straße
Søren  =  Soren
caf\u0065\u0301  =  CAFÉ
ＡＢＣ  =  ABC
か  ~  が
""",
    "Hyphens and what else joins words": """
Jean Paul  =  Jean-Paul
Spiderman  =  Spider-Man
Spider Man  =  Spider\u2013Man
e-mail  =  email
AC/DC  =  ACDC
Simon & Garfunkel  =  Simon and Garfunkel
1939\u20131945  =  1939-1945
red river  ~  redriver
""",
    "Numbers": """
1,000  =  1000
5%  =  5 percent
$5 million  =  5 million dollars
+5  =  5
.5  =  0.5
3.5  ~  35
-5  ~  5
10:30  ~  1030
2\u20131  ~  21
2-1  ~  1-2
1/2  ~  12
1,2  ~  12
10²  ~  102
2024-01-05  ~  2024-05-01
1.5 million  ~  15 million
$5  ~  €5
""",
    "Signs that make another word": """
F♯  =  F#
C++  =  c++
F#  ~  F
C++  ~  C
C#  ~  C
A+  ~  A
A-  ~  A
AB-  ~  AB
A*  ~  A
O+  ~  O-
""",
    "Commands of LaTeX": r"""
30 \text{ years}  =  30 years
AT\&T  =  AT&T
C\#  =  C#
\text{CO}_2  =  CO2
21^{\text{st}} century  =  21st century
25^\circ\text{C}  =  25 degrees C
\textbf{Barack}~\text{Obama}  =  Barack Obama
\$5 \text{ million}  =  5 million dollars
3.5\,\mathrm{km}  =  3.5 km
\frac{1}{2} cup  =  1/2 cup
$\text{Paris}$  =  Paris
\text{Yes}.  =  yes
1{,}234  =  1,234
\text{C}  ~  \text{C}\#
\text{no}  ~  yes
""",
}


def pairs(block: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the pairs of a kind that are the same, and those that are not."""
    pairs_by_sign: dict[str, list[tuple[str, str]]] = {"  =  ": [], "  ~  ": []}
    for line in block.strip("\n").splitlines():
        sign = "  =  " if "  =  " in line else "  ~  "
        left, right = line.split(sign)
        pairs_by_sign[sign].append((left, right))
    return pairs_by_sign["  =  "], pairs_by_sign["  ~  "]


def table(kinds: dict[str, str]) -> str:
    """Return the rows of the manual's table: two pairs of each kind that are the same, and two
    that are not.
    """
    rows = ["| | the same | not the same |", "|---|---|---|"]
    for kind, block in kinds.items():
        same, different = (", ".join(f"`{left}` and `{right}`" for left, right in some[:2]) for some in pairs(block))
        rows.append(f"| {kind} | {same} | {different} |")
    return "\n".join(rows) + "\n"
