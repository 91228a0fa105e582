r"""A normal form of answers in LaTeX, for the many ways to write one answer, such as `\dfrac12` and
`1/2`.

Source of the list of rules: ET-Agent (arXiv 2601.06860), evaluation.
"""

from __future__ import annotations

import re

_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:>]|\\ |\^\{?\\circ\}?|\\degree|\\?[$%]|°|~")
_UNITS = re.compile(r"\\(?:text|textbf|mbox|mathrm)\s*\{([^{}]*)\}(?:\^\{?[23]\}?)?$")
_MIXED = re.compile(r"(?<![\d.,])(\d+)\s+([1-9]\d*)/(\d+)(?![\d.,])")
_ASSIGNED = re.compile(r"^[A-Za-z]{1,2}=(?!=)")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_TOKEN = r"(\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[A-Za-z0-9])"
_FRACTION = re.compile(rf"\\frac{_TOKEN}{_TOKEN}")
_ROOT = re.compile(rf"\\sqrt{_TOKEN}")
_RATIO = re.compile(r"^(-?)(\d+)/(\d+)$")


def normal_form(answer: str) -> str:
    """Return an answer without spaces, bracket sizes, currency, per cent and degree signs, and
    without units at its end; with braced arguments, and plain ratios as fractions. An answer that
    is a text as a whole, such as `\\text{even}`, is its words.
    """
    text = _DROPPED.sub("", answer.strip().rstrip(".")).replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"\\[dt]frac", r"\\frac", text).strip()
    text = _UNITS.sub("", text) or _UNITS.sub(r"\1", text)
    text = re.sub(r"\s+", "", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = _ASSIGNED.sub("", text)
    if _GROUPED.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    text = _FRACTION.sub(lambda found: rf"\frac{_braced(found[1])}{_braced(found[2])}", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{_braced(found[1])}", text)
    text = _RATIO.sub(r"\1\\frac{\2}{\3}", text)
    return r"\frac{1}{2}" if text == "0.5" else text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"
