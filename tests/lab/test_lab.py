"""The lab: tasks follow their definitions, runs resume, and every experiment measures, judges and draws."""

import argparse
import json
import re
from dataclasses import replace

import pytest
import torch

from kimi_hf.errors import ConfigError
from kimi_hf.lab import command
from kimi_hf.lab.experiment import FAILS, HOLDS, OPEN, Experiment, Point, Verdict
from kimi_hf.lab.experiments import EXPERIMENTS
from kimi_hf.lab.experiments.numerics import _formula, chunk_cost, chunked_delta_rule
from kimi_hf.lab.experiments.text import DEPTH
from kimi_hf.lab.plots import panels
from kimi_hf.lab.store import Store
from kimi_hf.lab.tasks import IGNORED, Text, bound_recall, recall, switching
from kimi_hf.ops.delta_rule import delta_rule

SHORT = {
    "steps": 3, "batch": 2, "length": 24, "repeats": 1, "layers": 2, "context": 16, "times": 2, "counts": [2, 3], "queries": 3,
    "width": 32, "vocab": 24, "pairs": 2, "contexts": 2,
}  # fmt: skip


def test_recall_asks_for_what_it_told():
    ids, labels = recall(16, 40, 6, 32, torch.Generator().manual_seed(0))
    for row, answers in zip(ids.tolist(), labels.tolist(), strict=True):
        told = dict(zip(row[0:12:2], row[1:12:2], strict=True))
        asked = [(row[t], answers[t]) for t in range(40) if answers[t] != IGNORED]
        assert len(told) == 6 and len(asked) == 6
        assert dict(asked) == told and all(k < 16 <= v for k, v in told.items())
        assert all(t >= 12 and t % 2 == 0 for t in range(40) if answers[t] != IGNORED)


def test_bound_recall_asks_for_what_it_told():
    first, second, labels = bound_recall(4, 5, 7, 32, torch.Generator().manual_seed(0))
    for b in range(4):
        told = dict(zip(first[b, :5].tolist(), second[b, :5].tolist(), strict=True))
        assert [told[key] for key in first[b, 5:].tolist()] == labels[b, 5:].tolist()
        assert (second[b, 5:] == 0).all() and (labels[b, :5] == IGNORED).all()


def test_switching_asks_for_the_present_context():
    ids, labels = switching(4, 56, 4, 24, 4, torch.Generator().manual_seed(0))
    for row, answers in zip(ids.tolist(), labels.tolist(), strict=True):
        known = {}
        for context in range(4):
            part, start = row[context * 14 : (context + 1) * 14], context * 14
            known = dict(zip(part[1:9:2], part[2:9:2], strict=True))
            for t in range(9, 13):
                assert answers[start + t] == known[part[t]]


def test_text_is_the_same_for_everybody_and_splits():
    text = Text(20_000)
    assert len(text.train) == 18_000 and len(text.held_out) == 2_000
    batches = [text.batch(3, 10, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*batches) and text.test(4, 10).shape == (4, 10)


def test_counted_delta_rule_is_the_delta_rule():
    q, k, v = (torch.randn(2, 32, 8) for _ in range(3))
    beta, k = torch.rand(2, 32), torch.nn.functional.normalize(k, dim=-1)
    rows = [x.transpose(0, 1)[None] for x in (q, k, v, beta)]
    expected = delta_rule(*rows, backend="reference")[0][0].transpose(0, 1)
    for chunk in (1, 4, 16, 32):
        torch.testing.assert_close(chunked_delta_rule(q, k, v, beta, chunk), expected, rtol=1e-4, atol=1e-5)
    arguments = {"chunk": 16, "length": 64, "width": 8, "repeats": 1, "seed": 0}
    assert chunk_cost(**arguments)["products"] == _formula(arguments)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_every_experiment_measures_judges_and_draws(experiment, monkeypatch):
    """With everything cut short: the verdict may be anything, but must be one."""
    from matplotlib import pyplot

    from kimi_hf.lab.experiments import text

    monkeypatch.setattr(text, "_BYTES", 20_000)
    results = {}
    for point in experiment.points("small"):
        cut = point.arguments if experiment.name not in _CUT else _shortened(point.arguments)
        if experiment.name == "stability":
            cut = {**cut, "tokens": 2000}
        if experiment.name in _FROM_ONE and results:
            # Untrained points are alike; one measurement stands for all of a kind.
            same = [r for r in results.values() if _kind(r["arguments"]) == _kind(cut)]
            if same:
                results[point.key] = {**same[0], "arguments": {**cut, **_steered(point.arguments)}}
                continue
        results[point.key] = {**point.function(**cut), "arguments": {**cut, **_steered(point.arguments)}}
    json.dumps(results)
    verdict = experiment.judge(results)
    assert verdict.word in (HOLDS, FAILS, OPEN) and any(c.isdigit() for c in verdict.because)
    figure = experiment.draw(results)
    assert figure.axes and all(axis.get_title() or axis.get_ylabel() for axis in figure.axes if axis.axison)
    pyplot.close(figure)


_CUT = {
    "decoding",
    "chunk-size",
    "recall",
    "recall-mqar",
    "forgetting",
    "hybrid-ratio",
    "depth",
    "router-load",
    "language",
}
_FROM_ONE = {"decoding", "overwriting", "capacity", "equality", "chunk-size", "language"}


def _shortened(arguments):
    short = {name: SHORT.get(name, value) for name, value in arguments.items()}
    if "chunk" in arguments:
        short.update(length=arguments["chunk"] * 2, width=8)
    if arguments.get("layers") == 8:
        short["layers"] = 8  # the ratios need them
    return short


def _steered(arguments):
    """What the axes of plots are made of keeps its value."""
    return {
        name: value for name, value in arguments.items() if name in ("context", "times", "ratio", "width", "length")
    }


def _kind(arguments):
    return [arguments.get(name) for name in ("rung", "memory", "rule", "dtype", "chunk", "gate", "residual")]


def _double(x: int, seed: int) -> dict:
    _CALLS.append(x)
    return {"y": 2 * x}


_CALLS: list[int] = []
_TOY = Experiment(
    name="toy",
    title="Doubling",
    claim="Twice two is four.",
    method="By hand.",
    points=lambda budget: [Point(f"x {x}", _double, {"x": x, "seed": 0}) for x in range(3)],
    judge=lambda results: Verdict(HOLDS if results["x 2"]["y"] == 4 else FAILS, "2 gave 4"),
    draw=lambda results: panels(1)[0],
)


def test_a_run_is_taken_up_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "EXPERIMENTS", (_TOY,))
    monkeypatch.setattr("kimi_hf.lab.report.EXPERIMENTS", (_TOY,))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    _CALLS.clear()
    store = Store(tmp_path, "small")
    store.keep(_TOY, _TOY.points("small")[1], {"y": 2, "processor_seconds": 0.1})
    args = parser.parse_args(["--out", str(tmp_path), "--workers", "1"])
    assert command.run(args) == 0 and _CALLS == [0, 2]
    assert command.run(args) == 0 and _CALLS == [0, 2]
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["experiments"]["toy"]["x 2"]["y"] == 4
    assert content["experiments"]["toy"]["x 2"]["arguments"] == {"x": 2, "seed": 0}
    page = (tmp_path / "report.html").read_text()
    assert "Twice two is four." in page and "data:image/png;base64," in page and ">holds<" in page
    assert "http" not in page
    changed = replace(_TOY, points=lambda budget: [Point("x 2", _double, {"x": 2, "seed": 1})])
    assert [point.key for point in Store(tmp_path, "small").missing(changed)] == ["x 2"]
    content["experiments"]["toy"].update({"x 1": {}, "x 2": None})  # entries that say nothing are measured again
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert {"x 1", "x 2"} <= {point.key for point in Store(tmp_path, "small").missing(_TOY)}


def test_foreign_folders_and_unknown_names_are_told(tmp_path):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match="no experiment is called 'magic'; there are decoding"):
        command.run(parser.parse_args(["magic", "--out", str(tmp_path)]))
    Store(tmp_path, "small").write()
    with pytest.raises(ConfigError, match="holds results of budget 'small', not 'medium'"):
        Store(tmp_path, "medium")
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no file of the lab"):
        Store(tmp_path, "small")


def _depth_results(held_out, gradients=(4.0, 1.0)):
    states = {"sum": [1.0, 9.0], "block_attn_res": [1.0, 2.0], "full_attn_res": [1.0, 1.0]}
    return {
        residual: {
            "hidden_rms": states[residual],
            "gradient_norm": [4.0, 1.0] if residual == "sum" else list(gradients),
            "held_out": loss,
            "arguments": {"residual": residual, "seed": 0},
        }
        for residual, loss in zip(states, held_out, strict=True)
    }


@pytest.mark.parametrize(
    ("results", "word", "told"),
    [
        (
            _depth_results((2.46, 2.45, 2.44)),
            OPEN,
            "the spread of gradients and the loss .seeds differ by 0.05. do not",
        ),
        (_depth_results((2.46, 2.30, 2.30)), OPEN, "but the spread of gradients do"),
        (_depth_results((2.46, 2.30, 2.30), (2.0, 1.0)), HOLDS, "held-out loss 2.300"),
        (_depth_results((2.30, 2.46, 2.30), (2.0, 1.0)), FAILS, "held-out loss 2.460"),
    ],
)
def test_depth_holds_only_where_gradients_and_loss_separate(results, word, told):
    verdict = DEPTH.judge(results)
    assert verdict.word == word and re.search(told, verdict.because)
