"""A Python function with a hand-written backward, opaque to compilers.

Run eagerly it is an autograd function. While a compiler traces, it is a registered operator: the graph holds one node
instead of a loop over tiles, and lengths may stay symbolic. The operator is not used eagerly, because its first call
would import the compiler.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def registered(
    name: str,
    *,
    schema: str,
    forward: Callable,
    fake: Callable,
    backward_schema: str,
    backward: Callable,
    backward_fake: Callable,
    remember: Callable,
    differentiate: Callable,
) -> Callable:
    """The function to call; positional arguments as in `schema`.

    Args:
        name: "kimi_hf::..."; the backward operator is registered under `name + "_backward"`.
        schema, backward_schema: torch's schema strings, without a name.
        forward, backward: the work. fake, backward_fake: tensors of the right shapes, nothing else.
        remember: (ctx, inputs, output), stores what the backward pass needs.
        differentiate: (ctx, backward, *output gradients) -> input gradients, calling the `backward` it is given.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            return forward(*arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            remember(ctx, inputs, output)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *grads):
            return differentiate(ctx, backward, *grads)

    operator = torch.library.custom_op(name, forward, mutates_args=(), schema=schema)
    backward_operator = torch.library.custom_op(f"{name}_backward", backward, mutates_args=(), schema=backward_schema)
    operator.register_fake(fake)
    backward_operator.register_fake(backward_fake)
    operator.register_autograd(
        lambda ctx, *grads: differentiate(ctx, backward_operator, *grads), setup_context=remember
    )

    def run(*arguments):
        if torch.compiler.is_compiling():
            return operator(*arguments)
        return Eager.apply(*arguments)

    return run
