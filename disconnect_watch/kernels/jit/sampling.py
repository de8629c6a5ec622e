"""Drawing a token a row with a random number that seed and position alone decide."""

import triton
import triton.language as tl

__all__ = ["sample", "uniform"]


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform(seed, position):
    """The number in [0, 1) of ``kernels.random.uniform``, float64; both arguments int64."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(seed.to(tl.uint64) + golden)
    mixed = _mix(mixed + (position.to(tl.uint64) + 1) * golden)
    return (mixed >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def sample(
    scores,
    temperatures,
    seeds,
    positions,
    output,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row: the maximum, then the mass, then where the random number falls.

    Sums are taken in float64: over a large vocabulary float32 loses the small probabilities.

    Args:
        scores: [num_rows, vocab_size], float32, divided by the temperature.
        output: [num_rows], int64; an index into the scores, -1 where they are not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * vocab_size
    column = tl.arange(0, BLOCK)

    best = -float("inf")
    likeliest = 0
    num_spoilt = 0
    for start in range(0, vocab_size, BLOCK):
        index = start + column
        score = tl.load(scores + index, mask=index < vocab_size, other=-float("inf"))
        is_number = score == score
        num_spoilt += tl.sum((~is_number).to(tl.int32), 0)
        score = tl.where(is_number, score, -float("inf"))
        tile_best = tl.max(score, 0)
        # The first of equals: a later tile must have more.
        likeliest = tl.where(tile_best > best, start + tl.argmax(score, 0), likeliest)
        best = tl.maximum(best, tile_best)

    is_finite = (num_spoilt == 0) & (tl.abs(best) < float("inf"))
    # Nothing to add up in scores that are no finite numbers.
    num_scores = tl.where(is_finite, vocab_size, 0)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, num_scores, BLOCK):
        index = start + column
        score = tl.load(scores + index, mask=index < vocab_size, other=-float("inf"))
        total += tl.sum(tl.exp(score - best).to(tl.float64), 0)

    target = uniform(tl.load(seeds + row), tl.load(positions + row)) * total
    before = tl.full((), 0.0, tl.float64)
    drawn = 0
    for start in range(0, num_scores, BLOCK):
        index = start + column
        score = tl.load(scores + index, mask=index < vocab_size, other=-float("inf"))
        mass = before + tl.cumsum(tl.exp(score - best).to(tl.float64), 0)
        drawn += tl.sum(((mass <= target) & (index < vocab_size)).to(tl.int32), 0)
        before = tl.max(mass, 0)
    # Rounding may put the product on the total.
    drawn = tl.minimum(drawn, vocab_size - 1)

    is_greedy = tl.load(temperatures + row) <= MIN_TEMPERATURE
    chosen = tl.where(is_greedy, likeliest, drawn)
    tl.store(output + row, tl.where(is_finite, chosen, -1).to(tl.int64))
