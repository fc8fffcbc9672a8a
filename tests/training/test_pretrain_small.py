"""The pre-training recipe runs, compares like with like and writes what it promises."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_small.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("pretrain_small", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_small"] = module  # data classes look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pretrain_small"]


def test_it_writes_curves_table_and_plot(recipe, tmp_path, capsys):
    recipe.main(["--smoke", "--seed", "3", "--out", str(tmp_path)])
    table = (tmp_path / "pretrain_small.md").read_text()
    assert table.strip() in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "pretrain_small.jsonl").read_text().splitlines()]
    runs = {line["name"]: line for line in lines if "parameters" in line}
    assert list(runs) == [recipe.K3, recipe.SAME_BYTES, recipe.SAME_TIME]
    assert all(run["seed"] == 3 and run["held_out_loss"] < 6 for run in runs.values())
    k3, gpt2, longer = runs.values()
    assert k3["bytes"] == gpt2["bytes"] < longer["bytes"]
    assert 10e6 < k3["parameters"] < 12e6 and abs(k3["activated"] / gpt2["activated"] - 1) < 0.02
    logged = [line for line in lines if line["name"] == recipe.K3 and "loss" in line]
    assert all({"router/load_max_over_mean", "router/dead_experts"} <= set(line) for line in logged) and logged
    assert (tmp_path / "pretrain_small.png").stat().st_size > 10_000
