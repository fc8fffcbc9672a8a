"""Where results are kept: one JSON file, complete after every point, so that a run can be stopped and taken up again."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from .experiment import Experiment, Point, Results


class Store:
    """`results.json` of a folder.

    Args:
        folder: created when absent.
        budget: "small" or "medium"; a folder holds one of them.
    Raises:
        ConfigError: the folder holds another budget's results, or a file that is not ours.
    """

    def __init__(self, folder: Path, budget: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.json"
        self.content: dict[str, Any] = {"budget": budget, "machine": machine(), "experiments": {}}
        if not self.path.exists():
            return
        try:
            self.content = json.loads(self.path.read_text(encoding="utf-8"))
            found = self.content["budget"]
            self.content["experiments"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.path} is no file of the lab ({error}); choose another --out") from error
        if found != budget:
            raise ConfigError(f"{self.path} holds results of budget {found!r}, not {budget!r}; choose another --out")

    def results(self, experiment: Experiment) -> Results:
        """The finished points that the experiment still asks for."""
        kept = self.content["experiments"].get(experiment.name, {})
        return {point.key: kept[point.key] for point in self.points(experiment) if self._is_done(experiment, point)}

    def missing(self, experiment: Experiment) -> list[Point]:
        return [point for point in self.points(experiment) if not self._is_done(experiment, point)]

    def points(self, experiment: Experiment) -> list[Point]:
        return experiment.points(self.content["budget"])

    def _is_done(self, experiment: Experiment, point: Point) -> bool:
        """Whether the point was measured with the arguments it has now."""
        kept = self.content["experiments"].get(experiment.name, {}).get(point.key)
        return isinstance(kept, dict) and kept.get("arguments") == json.loads(json.dumps(point.arguments))

    def keep(self, experiment: Experiment, point: Point, value: dict[str, Any]) -> None:
        """Enter a finished point and write the file."""
        entry = {**value, "arguments": point.arguments}
        self.content["experiments"].setdefault(experiment.name, {})[point.key] = entry
        self.write()

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
        os.replace(part, self.path)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    from .. import __version__

    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kimi_hf": __version__,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }
