"""Imports of the fork server for ranks on virtual GPUs: what Triton imports and reads before its first kernel.

Its key of cached kernels is a digest of its own files, which takes each process a third of a second.
"""

from contextlib import suppress

with suppress(Exception):  # without Triton, or with another version: ranks that need it say so
    import triton.compiler.code_generator  # noqa: F401
    from triton.runtime.cache import triton_key

    import ptdbench.kernels.softmax_triton  # noqa: F401

    triton_key()
