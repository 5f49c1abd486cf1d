"""Small kernels that each show one thing to the compile check."""

from dsacp_npu.kernels._language import tl, triton


@triton.jit
def add_rows_kernel(x, y, out, num_tasks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out = x + y, a tile a task: nothing to find, until the tile is too large."""
    places = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        tile = task * ROWS * COLS + places
        tl.store(out + tile, tl.load(x + tile) + tl.load(y + tile))


@triton.jit
def attention_kernel(q, k, out, num_tasks, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """Softmax of q k^T times k, one tile of keys: cube and vector cores work on it together."""
    rows, keys, width = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        tile = (task * ROWS + rows)[:, None] * WIDTH + width[None, :]
        key = tl.load(k + (task * KEYS + keys)[:, None] * WIDTH + width[None, :])
        scores = tl.dot(tl.load(q + tile), tl.trans(key))
        weights = tl.exp(scores - tl.max(scores, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        tl.store(out + tile, tl.dot(weights.to(tl.bfloat16), key).to(tl.bfloat16))


@triton.jit
def similarity_kernel(q, k, out, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """exp(q k^T), a tile a program: rows that the two vector cores of a cube core share."""
    rows, keys, width = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    task = tl.program_id(0)
    query = tl.load(q + (task * ROWS + rows)[:, None] * WIDTH + width[None, :])
    key = tl.load(k + (task * KEYS + keys)[:, None] * WIDTH + width[None, :])
    scores = tl.exp(tl.dot(query, tl.trans(key)))
    tl.store(out + (task * ROWS + rows)[:, None] * KEYS + keys[None, :], scores)


@triton.jit
def column_sums_kernel(q, k, out, num_tasks, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over rows of relu(q k^T): a result that the two vector cores of a cube core do not share."""
    rows, keys, width = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        query = tl.load(q + (task * ROWS + rows)[:, None] * WIDTH + width[None, :])
        key = tl.load(k + (task * KEYS + keys)[:, None] * WIDTH + width[None, :])
        scores = tl.dot(query, tl.trans(key))
        tl.store(out + task * KEYS + keys, tl.sum(tl.where(scores > 0, scores, 0.0), 0))


@triton.jit
def divide_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x // y on a tile of int32."""
    places = tl.arange(0, BLOCK)
    mask = places < n
    left, right = tl.load(x + places, mask=mask, other=0), tl.load(y + places, mask=mask, other=1)
    tl.store(out + places, left // right, mask=mask)


@triton.jit
def average_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x / y in float32 of two integers: what a division of integers becomes, but meant."""
    places = tl.arange(0, BLOCK)
    mask = places < n
    total = tl.load(x + places, mask=mask, other=0).to(tl.float32)
    tl.store(out + places, total / tl.load(y + places, mask=mask, other=1).to(tl.float32), mask=mask)


@triton.jit
def remainder_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x % y on a tile of int32."""
    places = tl.arange(0, BLOCK)
    mask = places < n
    left, right = tl.load(x + places, mask=mask, other=0), tl.load(y + places, mask=mask, other=1)
    tl.store(out + places, left % right, mask=mask)


@triton.jit
def running_sum_kernel(x, out, n, BLOCK: tl.constexpr):
    """out = cumsum(x) of int32."""
    places = tl.arange(0, BLOCK)
    mask = places < n
    tl.store(out + places, tl.cumsum(tl.load(x + places, mask=mask, other=0), axis=0), mask=mask)


@triton.jit
def total_kernel(x, out, n, BLOCK: tl.constexpr):
    """out[0] = sum(x): one scalar is stored, which no loop repeats."""
    places = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + places, mask=places < n, other=0), axis=0))


@triton.jit
def pick_elements_kernel(x, index, out, BLOCK: tl.constexpr):
    """out = x[index], element by element."""
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(x + tl.load(index + places)))


@triton.jit
def pick_rows_kernel(x, index, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out = x[index], row by row."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    picked = tl.load(index + rows)
    tl.store(out + rows[:, None] * COLS + cols[None, :], tl.load(x + picked[:, None] * COLS + cols[None, :]))


@triton.jit
def swap_pairs_kernel(x, out, num_tasks, HEADS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """The pairs of the last elements of rows swapped, by loads with stride 2: the adapter does not take the tail."""
    heads, pairs = tl.arange(0, HEADS), tl.arange(0, TAIL // 2)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        places = (task * HEADS + heads[:, None]) * WIDTH + WIDTH - TAIL + 2 * pairs[None, :]
        even, odd = tl.load(x + places), tl.load(x + places + 1)
        tl.store(out + places, odd)
        tl.store(out + places + 1, even)


@triton.jit
def unequal_shapes_kernel(x, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Tiles of two sizes are added: no Triton."""
    tl.store(out + tl.arange(0, ROWS), tl.load(x + tl.arange(0, ROWS)) + tl.load(x + tl.arange(0, COLS)))


@triton.jit
def unmasked_tail_kernel(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x on the first n places, with a mask that is one too long."""
    places = tl.arange(0, BLOCK)
    tl.store(out + places, 2.0 * tl.load(x + places, mask=places < n, other=0.0), mask=places < n + 1)
