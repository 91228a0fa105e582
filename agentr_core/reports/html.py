"""Reports as HTML: one self-contained page that loads nothing, in light, dark and print."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentr_core.reports import comparison, document, iteration, plots, run_page, wording
from agentr_core.reports.document import IterationReport, reports_of_one_run


def render_html(report: IterationReport) -> str:
    """Return the page of an iteration. The same report gives the same page, byte for byte."""
    return _render("report.html.jinja", report=report, sections=iteration.sections(report))


def render_index(reports: Sequence[IterationReport]) -> str:
    """Return the page of a run, which links to `<report_name>.html` of each iteration beside it.

    Raises:
        ValueError: there is no report, or the reports are not all of one run.
    """
    page_sections = run_page.sections(reports)
    return _render("index.html.jinja", report=reports_of_one_run(reports)[-1], sections=page_sections)


def render_runs(report: run_page.RunsReport) -> str:
    """Return the page that shows runs side by side."""
    return _render("runs.html.jinja", report=report, sections=run_page.runs_sections(report))


def render_comparison(report: comparison.ComparisonReport) -> str:
    """Return the page of a comparison. The same report gives the same page, byte for byte."""
    return _render("comparison.html.jinja", report=report, sections=comparison.sections(report))


def jinja_environment(package: str) -> Environment:
    """Return a Jinja environment for the templates of a package, which escapes every text and
    writes out its invisible characters.
    """
    env = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Markup is a macro's output or a drawing; its texts have already passed through here.
        finalize=lambda v: v if isinstance(v, Markup) or not isinstance(v, str) else wording.escape_invisible(v),
    )
    env.globals.update(wording=wording)
    return env


def _render(template: str, **values: object) -> str:
    return _templates().get_template(template).render(**values)


# Compiling the templates takes longer than rendering a page, and an environment caches them.
@cache
def _templates() -> Environment:
    templates = jinja_environment("agentr_core.reports")
    templates.globals.update(page_path=document.page_path)
    templates.filters.update(
        # The only unescaped values of a page: markup made by `plots` from numbers.
        inline_svg=lambda figure: Markup(figure.svg),
        mark=lambda index: Markup(plots.line_mark(index)),
        kind=lambda block: type(block).__name__,
    )
    return templates
