"""The report: one HTML file with every claim, how it was measured, its plot, and the verdict."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator
from pathlib import Path

from .experiment import FAILS, HOLDS, OPEN, Experiment, Verdict
from .experiments import EXPERIMENTS
from .plots import plt
from .store import Store

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
img { max-width: 100%; } table { border-collapse: collapse; } td, th { padding: .3rem .8rem; text-align: left;
vertical-align: top;
border-bottom: 1px solid #ddd; } .claim { font-weight: 600; } .word { padding: .1rem .5rem; border-radius: .3rem; color: #fff; }
.holds { background: #00694d; } .fails { background: #a34700; } .open { background: #555; } small { color: #555; }
"""
_CLASS = {HOLDS: "holds", FAILS: "fails", OPEN: "open"}


def write_report(store: Store, path: Path) -> Iterator[str]:
    """Write the report of what is complete, and its plots beside it; yields one line per experiment for the terminal."""
    rows, sections, seconds, figures = [], [], 0.0, path.parent / "figures"
    for experiment in EXPERIMENTS:
        results = store.results(experiment)
        wanted = len(store.points(experiment))
        if len(results) < wanted:
            if results:
                yield f"{experiment.name:<14} {len(results)} of {wanted} points; run again to complete it"
            continue
        verdict = experiment.judge(results)
        spent = sum(r["processor_seconds"] for r in results.values())
        seconds += spent
        rows.append(_row(experiment, verdict))
        picture = _image(experiment.draw(results))
        figures.mkdir(exist_ok=True)
        (figures / f"{experiment.name}.png").write_bytes(picture)
        sections.append(_section(experiment, verdict, picture, len(results), spent))
        yield f"{experiment.name:<14} {verdict.word}: {verdict.because}"
    about = ", ".join(f"{key} {html.escape(str(value))}" for key, value in store.content["machine"].items())
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>The ladder, measured</title><style>{_STYLE}</style>"
        f"<h1>The ladder, measured</h1><p>Budget <b>{store.content['budget']}</b>. Every verdict is computed from the numbers in "
        f"<code>results.json</code>; small models and short runs show mechanisms, not the quality of large ones.</p>"
        f"<table><tr><th>Experiment</th><th>Claim</th><th>Verdict</th></tr>{''.join(rows)}</table>{''.join(sections)}"
        f"<hr><small>{about}; {seconds:.0f} processor seconds of measuring in all</small></html>"
    )
    part = path.with_suffix(".part")
    part.write_text(page, encoding="utf-8")
    part.replace(path)
    yield f"{path}"


def _badge(verdict: Verdict) -> str:
    return f"<span class='word {_CLASS[verdict.word]}'>{verdict.word}</span>"


def _row(experiment: Experiment, verdict: Verdict) -> str:
    link = f"<a href='#{experiment.name}'>{html.escape(experiment.title)}</a>"
    return f"<tr><td>{link}</td><td>{html.escape(experiment.claim)}</td><td>{_badge(verdict)}</td></tr>"


def _section(experiment: Experiment, verdict: Verdict, picture: bytes, points: int, seconds: float) -> str:
    image = base64.b64encode(picture).decode()
    return (
        f"<h2 id='{experiment.name}'>{html.escape(experiment.title)}</h2><p class='claim'>{html.escape(experiment.claim)}</p>"
        f"<p>{html.escape(experiment.method)}</p><p>{_badge(verdict)} {html.escape(verdict.because)}.</p>"
        f"<img alt='{html.escape(experiment.title)}' src='data:image/png;base64,{image}'>"
        f"<p><small>{points} points, {seconds:.0f} processor seconds; <code>kimi-hf lab {experiment.name}</code></small></p>"
    )


def _image(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()
