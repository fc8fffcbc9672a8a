"""Pure functions on tensors: no configs, no modules, no transformers.

One folder an operation; each exposes one public function that checks its inputs and picks an implementation through
`dispatch`. `reference.py` is the definition, `eager.py` plain PyTorch, `kernels.py` Triton. Layout everywhere
[B, T, H, K], recurrent states [N, H, K, V] in fp32, keys first.
"""

from kimi_hf.ops.dispatch import set_backend, use_backend

__all__ = ["set_backend", "use_backend"]
