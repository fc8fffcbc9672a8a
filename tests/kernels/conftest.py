"""Kernel tests marked `interpreted` run in a child process, where triton's CPU interpreter is on.

The variable must be set before triton is imported and must not leak into other tests, so each test file gets one child
pytest for its marked tests; here every test then reports what happened to it there.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kimi_hf.ops.dispatch import importable, triton_interprets

REPORT = "KIMI_HF_KERNEL_TEST_REPORT"
_results: dict[Path, dict[str, tuple[str, str]]] = {}


def pytest_configure(config):
    config.addinivalue_line("markers", "interpreted: runs a Triton kernel on the CPU, in a child process")


def pytest_collection_modifyitems(items):
    if not importable("triton"):
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if triton_interprets() or pyfuncitem.get_closest_marker("interpreted") is None:
        return None
    if pyfuncitem.path not in _results:
        _results[pyfuncitem.path] = _run_child(pyfuncitem.session, pyfuncitem.path)
    outcome, text = _results[pyfuncitem.path].get(pyfuncitem.nodeid, ("failed", "the child process died before it"))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


def pytest_runtest_logreport(report):
    """In the child: append each test's outcome to the report file."""
    if REPORT not in os.environ or not triton_interprets():
        return
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ[REPORT], "a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, report.longreprtext[-4000:]]) + "\n")


def _run_child(session, path: Path) -> dict[str, tuple[str, str]]:
    names = [item.nodeid for item in session.items if item.path == path and item.get_closest_marker("interpreted")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.touch()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", REPORT: str(report)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *names]
        done = subprocess.run(command, env=environment, cwd=session.config.rootpath, capture_output=True, text=True)
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    if not lines:
        return {name: ("failed", f"the child process ran no test:\n{done.stdout}\n{done.stderr}") for name in names}
    return {name: (outcome, text) for name, outcome, text in lines}
