"""The one place that decides which implementation of an operation runs.

Order: the call's `backend=` argument, then `use_backend` / `set_backend`, then the environment variable
`KIMI_HF_BACKEND`, then automatic: by the tensor's device first, then by what is importable and can serve the call.
A backend that was asked for by name and cannot serve raises `BackendError` with its reason; the automatic choice skips
it. A name given for all operations at once ("*") raises only where it cannot run at all: operations that have no such
implementation, or calls that it declines, choose automatically. CPU tensors take the plain PyTorch path unless triton
was forced and runs in its interpreter.

Names are "reference" (the definition), "eager" (plain PyTorch), "triton" and "fla". Either one name for every
operation, or a mapping `{"kda": "triton", "*": "eager"}`; in the environment `kda=triton,*=eager`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from kimi_hf.errors import BackendError

NAMES = ("reference", "eager", "triton", "fla")
ENVIRONMENT = "KIMI_HF_BACKEND"
# Tried in turn when nothing was asked for. Reference is last: it is right everywhere and slow everywhere.
AUTOMATIC = {"cuda": ("triton", "fla", "eager", "reference")}
AUTOMATIC_ELSEWHERE = ("eager", "reference")
PLAIN = ("eager", "reference")
KNOWN_FLA = ("0.6.0",)  # versions of flash-linear-attention's kernels that our adapters were written against

# Process-wide on purpose: autograd threads that recompute a checkpointed forward must see the same choice.
_chosen: dict[str, str] = {}


def _serves_anything(**facts: object) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of one operation: where it lives and when it declines.

    `why_not` gets the facts the operation passes to `Operation.pick` (shapes, dtypes, options) as keywords and returns
    None, or the reason in words. Other modules than plain PyTorch ones are imported only when the backend is chosen.
    """

    name: str
    module: str
    function: str
    why_not: Callable[..., str | None] = _serves_anything

    def load(self) -> Callable:
        return getattr(importlib.import_module(self.module), self.function)


class Operation:
    """An operation's name and its table of backends; `pick` returns the implementation to call."""

    def __init__(self, name: str, *backends: Backend):
        self.name = name
        self.backends = {backend.name: backend for backend in backends}
        # Plain PyTorch is imported at once: a compiler that traces the first call could not follow an import.
        self._plain = {name: backend.load() for name, backend in self.backends.items() if name in PLAIN}
        self._loaded: dict[str, Callable] = {}

    def pick(self, tensor: Tensor, backend: str | None = None, **facts: object) -> Callable:
        """The implementation for a call whose first input is `tensor`.

        Raises: BackendError when the backend asked for by name cannot serve, with the reason.
        """
        name = backend or requested(self.name)
        if name is not None:
            reason = self.why_not(name, tensor, **facts)
            if reason is None:
                return self._load(name)
            if backend or not requested_for_all(self.name) or _machine_lacks(name, tensor.device.type):
                raise BackendError(f"{self.name}: backend {name!r} cannot serve this call: {reason}")
        for name in AUTOMATIC.get(tensor.device.type, AUTOMATIC_ELSEWHERE):
            if name in self.backends and self.why_not(name, tensor, **facts) is None:
                return self._load(name)
        raise BackendError(f"{self.name}: no backend serves tensors on {tensor.device}; known: {sorted(self.backends)}")

    def why_not(self, name: str, tensor: Tensor, **facts: object) -> str | None:
        """None when backend `name` can serve the call, else the reason."""
        if name not in NAMES:
            return f"no such backend; expected one of {', '.join(NAMES)}"
        if name not in self.backends:
            return f"{self.name} has no such implementation; it has {', '.join(self.backends)}"
        return _machine_lacks(name, tensor.device.type) or self.backends[name].why_not(tensor=tensor, **facts)

    def _load(self, name: str) -> Callable:
        if name in PLAIN:
            return self._plain[name]
        _ensure_loaded(self, name)
        return self._loaded[name]


def _ensure_loaded(operation: Operation, name: str) -> None:
    """Import a backend on its first use; a compiler that traces that use runs this instead of following the import."""
    if name not in operation._loaded:
        operation._loaded[name] = operation.backends[name].load()


_ensure_loaded._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result sets, importing the compiler


def requested(operation: str) -> str | None:
    """The backend that `use_backend`, `set_backend` or the environment asks for, None for automatic."""
    if _chosen:
        return _chosen.get(operation, _chosen.get("*"))
    return _from_environment(operation)


def requested_for_all(operation: str) -> bool:
    """Whether what `requested` returns was asked for all operations at once, not for this one."""
    if _chosen:
        return operation not in _chosen
    return operation not in _parsed(os.environ.get(ENVIRONMENT, "").strip())


def set_backend(backend: str | Mapping[str, str] | None) -> None:
    """Choose backends for the whole process: a name, a mapping by operation ("*" for the rest), or None for automatic.

    Raises: BackendError for an unknown name.
    """
    table = _checked(backend, "set_backend")
    _chosen.clear()
    _chosen.update(table)


@contextmanager
def use_backend(backend: str | Mapping[str, str] | None) -> Iterator[None]:
    """`set_backend` for the length of a `with` block."""
    before = dict(_chosen)
    set_backend(backend)
    try:
        yield
    finally:
        _chosen.clear()
        _chosen.update(before)


def triton_interprets() -> bool:
    """Whether triton kernels run in triton's CPU interpreter (TRITON_INTERPRET set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@cache
def importable(module: str) -> bool:
    """Whether `module` is installed, without importing it."""
    return importlib.util.find_spec(module) is not None


@cache
def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checked(backend: str | Mapping[str, str] | None, source: str) -> dict[str, str]:
    if backend is None:
        return {}
    table = {"*": backend} if isinstance(backend, str) else dict(backend)
    for operation, name in table.items():
        if name not in NAMES:
            raise BackendError(
                f"{source}: {name!r} (for {operation!r}) is no backend; expected one of {', '.join(NAMES)}"
            )
    return table


def _from_environment(operation: str) -> str | None:
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text or text == "auto":
        return None
    table = _parsed(text)
    return table.get(operation, table.get("*"))


@cache
def _parsed(text: str) -> dict[str, str]:
    if "=" not in text:
        return _checked(text, ENVIRONMENT)
    pairs = (part.partition("=") for part in text.split(",") if part.strip())
    return _checked({operation.strip(): name.strip() for operation, _, name in pairs}, ENVIRONMENT)


def _machine_lacks(name: str, device: str) -> str | None:
    """The reason a backend cannot run here at all, whatever the operation."""
    if name not in ("triton", "fla"):
        return None
    if not importable(name):
        package = {"triton": "triton", "fla": "flash-linear-attention"}[name]
        return f"the package is not installed; pip install {package}"
    if name == "fla" and (version := version_of("fla-core")) not in KNOWN_FLA:
        return f"fla-core {version} is not a version whose signatures are known ({', '.join(KNOWN_FLA)}); install one"
    if name == "triton" and device == "cpu" and triton_interprets():
        return None
    if device != "cuda":
        extra = " (or CPU tensors with TRITON_INTERPRET=1 set before triton is imported)" if name == "triton" else ""
        return f"the tensors are on {device}, it needs a GPU{extra}"
    return None
