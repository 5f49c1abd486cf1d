"""Benchmarks of the Triton kernels that only move and turn rows, on an NVIDIA GPU, against a plain copy.

A section of `bench --device cuda`. Bytes are those that must be read and written once.
"""

from __future__ import annotations

from collections.abc import Callable

from dsacp_npu import backend
from dsacp_npu._tensors import Float, torch
from dsacp_npu.commands.bench_cuda import HEAD_DIM, PAGE, generator, line, milliseconds, normal
from dsacp_npu.compressor import CompressorState, ProjectedRows
from dsacp_npu.rope import rope_frequencies

HEADS, INDEX_HEADS, INDEX_DIM, ROPE, RANKS = 64, 64, 128, 64, 8
EPS = 1e-6


def rows(tokens: int) -> None:
    """Every call's rate beside that of the copy, which comes first."""
    print(f"rows: GB/s of what must be read and written, {tokens} tokens, bfloat16 (pooling: float32)")
    whole = 0.0
    for name, moved, call in calls_of(tokens):
        times = milliseconds(call)
        rate = moved / times[0] / 1e6
        whole = whole or rate
        line(name, times, f"{rate:5.0f} GB/s, {100 * rate / whole:3.0f} % of the copy")


def calls_of(tokens: int) -> list[tuple[str, int, Callable[[], object]]]:
    """Name, bytes and call: a copy, then RoPE, norms, rotation, paged rows, exchange buffers and pooling."""
    x, index_q = normal(tokens, HEADS, HEAD_DIM, seed=1), normal(tokens, INDEX_HEADS, INDEX_DIM, seed=2)
    angles = torch.rand(tokens, ROPE // 2, device="cuda", generator=generator(3))
    cos, sin, ops = angles.cos(), angles.sin(), backend.get("triton")
    copy = torch.empty_like(x)
    cache = normal(32 * tokens // PAGE, PAGE, HEAD_DIM, seed=4)
    some = cache.flatten(0, 1).clone()
    slots = torch.randperm(len(some), device="cuda", generator=generator(5)).int()
    packed = ops.packed_heads(x, RANKS)
    return [
        ("copy by torch", 2 * size(x), lambda: copy.copy_(x)),
        (f"apply_rope, {HEADS} heads", 2 * size(x), lambda: ops.apply_rope(x, cos, sin)),
        (
            f"apply_rope_, {HEADS} heads, {ROPE} channels",
            2 * size(x) * ROPE // HEAD_DIM,
            lambda: ops.apply_rope_(copy, cos, sin),
        ),
        (f"rms_norm of {HEADS} heads", 2 * size(x), lambda: ops.rms_norm(x, None, EPS)),
        (f"hadamard of {INDEX_HEADS} heads of {INDEX_DIM}", 2 * size(index_q), lambda: ops.hadamard(index_q)),
        (f"scattered_rows_, {len(some)} rows", 2 * size(some), lambda: ops.scattered_rows_(cache, some, slots)),
        (f"gathered_rows, {len(some)} rows", 2 * size(some), lambda: ops.gathered_rows(cache, slots)),
        (f"packed_heads for {RANKS} ranks", 2 * size(x), lambda: ops.packed_heads(x, RANKS)),
        (f"unpacked_heads of {RANKS} ranks", 2 * size(x), lambda: ops.unpacked_heads(packed)),
        *(pooling(tokens, ratio) for ratio in (4, 128)),
    ]


def size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def pooling(tokens: int, ratio: int) -> tuple[str, int, Callable[[], object]]:
    """Name, bytes and call of a prompt's entries: four tokens for each query."""
    num_tokens, width = 4 * tokens, 2 * HEAD_DIM if ratio == 4 else HEAD_DIM

    def numbers(*shape: int, seed: int) -> Float:
        return torch.randn(shape, device="cuda", generator=generator(seed))

    projected = ProjectedRows(numbers(num_tokens, width, seed=6), numbers(num_tokens, width, seed=7))
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    ring = torch.zeros(1, 2 * ratio, width, device="cuda")
    state = CompressorState(ring, ring.clone(), zero, zero.clone())
    indices = torch.arange(num_tokens // ratio, dtype=torch.int32, device="cuda")
    loc = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    weight, frequencies = numbers(HEAD_DIM, seed=8), rope_frequencies(10000.0, ROPE)

    def call() -> object:
        return backend.get("triton").pooled_entries(
            projected,
            torch.zeros_like(indices),
            indices,
            loc,
            zero,
            state,
            weight,
            frequencies,
            compress_ratio=ratio,
            eps=EPS,
        )

    moved = 2 * size(projected.kv) + 4 * HEAD_DIM * len(indices)
    return f"pooled_entries, ratio {ratio}, {num_tokens} tokens", moved, call
