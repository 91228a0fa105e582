"""One notation for the many in which answers of mathematics are written: LaTeX, Markdown, Unicode,
and what Python prints.
"""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    "\u2212\u2013\u2014\u2010\u2011": "-",
    "\u00d7\u22c5\u00b7\u2219\u2022": r"\times ",
    "\u00f7\u2215\u2044": "/",
    "\u221e": r"\infty ",
    "\u2264\u2a7d": r"\leq ",
    "\u2265\u2a7e": r"\geq ",
    "\u2260": r"\neq ",
    "\u2248": r"\approx ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u221b": r"\sqrt[3]",
    "\u00b0": r"^\circ ",
    "\u2032\u2019\u2018": "'",
    "\u230a": r"\lfloor ",
    "\u230b": r"\rfloor ",
    "\u2308": r"\lceil ",
    "\u2309": r"\rceil ",
    "\u27e8\u2329": r"\langle ",
    "\u27e9\u232a": r"\rangle ",
    "\u211d": r"\mathbb{R}",
    "\u20ac\u00a3\u00a5\uffe5\u201c\u201d": "",
}
GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau phi chi psi "
    "omega"
)
_UNICODE = {ord(sign): command for signs, command in _SYMBOLS.items() for sign in signs} | {
    ord(unicodedata.lookup(f"GREEK {case} LETTER {name.replace('lambda', 'lamda').upper()}")): rf"\{shown} "
    for name in GREEK.split()
    for case, shown in (("SMALL", name), ("CAPITAL", name.title()))
}
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
_LOWERED = re.compile("[\u2080-\u208e]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = re.compile(r"\u221a\s*(\d+(?:\.\d+)?|)")

_GAPS = (
    r"\\[,;:!> ]|\\(?:q?quad|enspace|thinspace|medspace|thickspace|hfill|displaystyle|textstyle|(?:no)?limits)"
    r"(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}|\\phantom\{[^{}]*\}|~"
)
_SIZES = r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\s*(?:\[[\d.\s]+[a-z]{2}\])?", r"\\cr "),
        (r"\\begin\{(?:cases|aligned|align\*?|gathered|split)\}(.*?)\\end\{\w+\*?\}", r"\1"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!|\\ )(?:\\!)?(?=\d{3}(?!\d))", ""),
        (r"\\?\$|\\[()\[\]]", " "),
        (_SIZES, ""),
        (_GAPS, " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d|\{\d+\})\s*(\d|\{\d+\})", r"\\frac{\1}{\2}"),
        (r"\{\{(\d+)\}\}", r"{\1}"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\mathbb\s*(?:R|\{\s*R\s*\})", r"(-\\infty,\\infty)"),
        (r"\\(?:text\w*|mbox|math(?:rm|bf|it|sf|cal)|operatorname\*?|boldsymbol|bm|emph)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:boxed|fbox|rm|bf|it|mathbf|mathrm)(?![A-Za-z])", " "),
        (r"\\p?mod\s*\{([^{}]*)\}|\\p?mod(?![A-Za-z])", r" mod \1"),
        (r"\\([%&#_])", r"\1"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:[lr]?vert|mid)(?![A-Za-z])", "|"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:leqslant|leqq|le)(?![A-Za-z])|<=", r"\\leq "),
        (r"\\(?:geqslant|geqq|ge)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\ne(?![A-Za-z])|!=", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"==", "="),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}|\bset\(\)", r"\\emptyset "),
        (r"\\var(epsilon|phi|theta|rho|sigma)(?![A-Za-z])", r"\\\1"),
        (r"\\(?:cdot|ast)(?![A-Za-z])", r"\\times "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\[lc]?dots[a-z]?(?![A-Za-z])", "..."),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|(?<=[\d)}])\s*\bdeg(?:ree)?s?\b", r"\\deg "),
        (r"(\\deg) *(C|F)(?:elsius|ahrenheit)\b", r"\1 \2"),
        (r"(?<=\d) ?[xX] ?(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"& ?(?==)", ""),
        (r"\\prime(?![A-Za-z])|\^\{?'\}?", "'"),
        (r"\bper\s?cent\b|\bpct\b", "%"),
        (r"(?<=\d)\s*[aA]\.?\s?[mM]\b\.?", " am"),
        (r"(?<=\d)\s*[pP]\.?\s?[mM]\b\.?", " pm"),
        (r"\*\s*I\b", "*i"),
        (r"\bI\s*\*", "i*"),
        (r"\\bar(?![A-Za-z])", r"\\overline"),
        (r"\\overrightarrow(?![A-Za-z])", r"\\vec"),
        (r"\b(?:Fraction|Rational)\(\s*(-?\d+)\s*,\s*(\d+)\s*\)", r"(\\frac{\1}{\2})"),
        (r"\b(?:np\.\w+|Decimal|mpf)\(\s*'?([^()']*)'?\s*\)", r"\1"),
        (r"\b(?:Matrix|(?:np\.)?array)\(\s*(\[\[[^()]*\]\])\s*\)", r"\1"),
        (r"(?<=\d)j\b", "i"),
        (r"\boo\b|\binf(?:inity)?\b", r"\\infty "),
        (r"(?<=\d)\s*(?:\^\s*\{?\s*)?(?:st|nd|rd|th)\b\s*\}?", ""),
        (r"\(\s*([0-9A-F]+)\s*\)_", r"\1_"),
        (r"\s*[,;]\s*\b(?:and|or)\b\s*|(?<=[^\\])\s+(?:and|or)\s+(?=\S)|\s*;\s*", ", "),
        (r"(?<![\d.,/^_{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,])", r"\1\\frac{\2}{\3}"),
        (r"(?<![\d.,])(\d{1,3}) (?=\d{3}(?: \d{3})*(?![\d.]))", r"\1"),
    )
)  # fmt: skip
_BOLD = re.compile(r"(?<![\w)*}])(\*{2,3}|__|`+)(?=\S)([^*`]+?)(?<=\S)\1(?!\w)")
_OPENING = re.compile(
    r"^(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|solution|result|option|choice)s?\b\s*(?:is|are|:|=)?\s*:?\s*(?=\S)",
    re.IGNORECASE,
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SYNONYMS = (
    (re.compile(r"(?:all|the)? ?real(?: number)?s?", re.IGNORECASE), r"(-\\infty,\\infty)"),
    (re.compile(r"no (?:real )?solutions?|(?:the )?empty set", re.IGNORECASE), r"\\emptyset"),
    (re.compile(r"\(?([A-J])\s?[).:]"), r"\1"),
)
_MOST_DIGITS = 60


def plain(answer: str) -> str:
    """Return an answer in one notation: with commands for signs, without sizes, gaps and marks of
    mathematics or bold type, with words as they are.
    """
    text = _without_box(" ".join(_ascii(answer).split()))
    text = _REPEATING.sub(_fraction, _BOLD.sub(r"\2", text))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _OPENING.sub("", " ".join(text.split()))
    text = re.sub(r"^(?:=|\\approx) ?|(?<!\.)\.$|[,:;]+$", "", text).strip()
    for pattern, replacement in _SYNONYMS:
        if pattern.fullmatch(text):
            return pattern.sub(replacement, text)
    return text


def bare(text: str) -> str:
    """Return a text of `plain` as it is compared with another, letter by letter: without spaces
    except between two numbers or words, without needless braces, and words in lower case.
    """
    text = re.sub(r"(?<!\\)\b(?:[A-Za-z]{3,}|N[oO])\b", lambda found: found[0].lower(), text)
    text = re.sub(r"(?<=\d)\s+(?=\d)|(?<=[A-Za-z]{2})\s+(?=[A-Za-z]{2})", "\0", text)
    text = re.sub(r"(\\[A-Za-z]+)\0", r"\1", "".join(text.split()))
    text = re.sub(r"([_^]|\\[A-Za-z]+)\{([A-Za-z0-9])\}", r"\1\2", text)
    return re.sub(r"_\{(\d+)\}", r"_\1", text).replace("\0", " ")


def _ascii(text: str) -> str:
    """Return a text with commands for the signs of Unicode, and without invisible ones."""
    text = _VULGAR.sub(_vulgar, text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1]}}}" if found[1] else r"\sqrt ", text)
    for run, sign in ((_RAISED, "^"), (_LOWERED, "_")):
        text = run.sub(lambda found, sign=sign: f"{sign}{{{unicodedata.normalize('NFKC', found[0])}}}", text)  # type: ignore[misc]
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
    return "".join(sign for sign in text if unicodedata.category(sign) != "Cf")


def _vulgar(found: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _fraction(found: re.Match[str]) -> str:
    """Return a number with repeating decimals as a fraction."""
    whole, once, again = found[1] or "0", found[2], found[3]
    if len(whole + once + again) > _MOST_DIGITS:
        return found[0]
    top = int(whole + once + again) - int(whole + once)
    return rf"(\frac{{{top}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}})"


def _without_box(text: str) -> str:
    """Return a text without a box around all of it, such as a gold answer may have."""
    text = text.strip()
    found = _BOX.match(text)
    if not found:
        return text
    depth = 0
    for place, sign in enumerate(text[found.end() - 1 :], start=found.end() - 1):
        depth += (sign == "{") - (sign == "}")
        if not depth:
            rest = text[place + 1 :].strip(" .$")
            return _without_box(text[found.end() : place]) if not rest else text
    return text
