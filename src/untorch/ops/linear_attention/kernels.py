"""A ragged causal convolution and the recurrent form of the gated delta rule, over a state pool.

    causal_conv1d_kernel       a program a sequence and BLOCK_C channels; tokens in tiles of BLOCK_T, so that each input
                               is read once from device memory and width - 1 times more from L1
    gated_delta_rule_kernel    a program a sequence, value head and BLOCK_V columns of the state, which stays in
                               registers [BLOCK_K, BLOCK_V] in float32; token by token

One sequence more than there are stands for the tokens behind the last one, whose outputs are zero. A slot out of range
is no error, unlike on the CPU: the sequence begins at zero, and nothing is written.

Roofline: both are memory-bound in decode, where a state is read and written once. A prompt's delta rule is bound by the
latency of one token after the other; sequences × heads × columns run side by side.
"""

import triton
import triton.language as tl

__all__ = ["causal_conv1d_kernel", "gated_delta_rule_kernel"]


@triton.jit
def causal_conv1d_kernel(
    x_ptr, weight_ptr, bias_ptr, states_ptr, slots_ptr, ends_ptr, lengths_ptr, offset_ptr, out_ptr,
    stride_xt, stride_states, tokens, sequences, slots,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid: [(sequences + 1) * blocks of channels]. The state is [WIDTH - 1, CHANNELS], the oldest input first."""
    tiles: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    tokens, sequences, slots = tl.cast(tokens, tl.int32), tl.cast(sequences, tl.int32), tl.cast(slots, tl.int32)
    sequence = tl.program_id(0) // tiles
    c = tl.program_id(0) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    # In both kernels, as PyTorch's analysis of what a kernel writes takes all that a function is given for written.
    is_real = sequence < sequences
    begin = tl.load(ends_ptr + sequence)
    end = tl.where(is_real, tl.load(ends_ptr + sequence + 1, is_real, other=0), tokens)
    slot = tl.load(slots_ptr + sequence, is_real, other=-1)
    keeps = (slot >= 0) & (slot < slots) & (end > begin)
    continues = keeps & (tl.load(lengths_ptr + sequence, is_real, other=0) > end - begin)
    slot = tl.cast(slot, tl.int64)
    # Programs without a state point to what is there, and load nothing.
    state = states_ptr + tl.where(keeps, slot, 0) * stride_states + tl.load(offset_ptr) // 16 * 16 + c
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + c, inside, other=0.0).to(tl.float32)
    for first in tl.range(begin, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32) + bias[None, :]
        for i in tl.static_range(WIDTH):
            source = t - (WIDTH - 1) + i
            own = (source >= begin) & (t < end) & is_real
            x = tl.load(
                x_ptr + tl.cast(source, tl.int64)[:, None] * stride_xt + c[None, :], own[:, None] & inside[None, :],
                other=0.0,
            )  # fmt: skip
            before = tl.load(
                state[None, :] + (source - begin + (WIDTH - 1))[:, None] * CHANNELS,
                ((source < begin) & (t < end) & continues)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            weight = tl.load(weight_ptr + c * WIDTH + i, inside, other=0.0).to(tl.float32)
            total += weight[None, :] * (x.to(tl.float32) + before)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        total = tl.where(is_real, total, 0.0)
        tl.store(
            out_ptr + tl.cast(t, tl.int64)[:, None] * CHANNELS + c[None, :], total.to(out_ptr.dtype.element_ty),
            (t < end)[:, None] & inside[None, :],
        )  # fmt: skip
    # Every warp has read the state; a row is read before one further ahead takes its place.
    for i in tl.static_range(WIDTH - 1):
        source = end - (WIDTH - 1) + i
        own = keeps & (source >= begin)
        x = tl.load(x_ptr + tl.cast(source, tl.int64) * stride_xt + c, own & inside, other=0.0).to(tl.float32)
        before = tl.load(
            state + (source - begin + (WIDTH - 1)) * CHANNELS, continues & (source < begin) & inside, other=0.0
        )  # fmt: skip
        tl.debug_barrier()
        tl.store(state + i * CHANNELS, x + before, keeps & inside)


@triton.jit
def gated_delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, states_ptr, slots_ptr, ends_ptr, lengths_ptr, offset_ptr, out_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_states, tokens, sequences, slots,
    SCALE: tl.constexpr, EPSILON: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr, CHANNEL_DECAY: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: [(sequences + 1) * HEADS * blocks of columns]. GROUP: value heads for each head of q and k."""
    tiles: tl.constexpr = (WIDTH_V + BLOCK_V - 1) // BLOCK_V
    tokens, sequences, slots = tl.cast(tokens, tl.int32), tl.cast(sequences, tl.int32), tl.cast(slots, tl.int32)
    sequence = tl.program_id(0) // (HEADS * tiles)
    head = tl.cast(tl.program_id(0) // tiles % HEADS, tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = i < WIDTH, j < WIDTH_V
    is_real = sequence < sequences
    begin = tl.load(ends_ptr + sequence)
    end = tl.where(is_real, tl.load(ends_ptr + sequence + 1, is_real, other=0), tokens)
    slot = tl.load(slots_ptr + sequence, is_real, other=-1)
    keeps = (slot >= 0) & (slot < slots) & (end > begin)
    continues = keeps & (tl.load(lengths_ptr + sequence, is_real, other=0) > end - begin)
    slot = tl.cast(slot, tl.int64)
    states_ptr += tl.where(keeps, slot, 0) * stride_states + tl.load(offset_ptr) // 16 * 16
    place = states_ptr + head * (WIDTH * WIDTH_V) + i[:, None] * WIDTH_V + j[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    state = tl.load(place, in_state & continues, other=0.0)
    q_ptr += head // GROUP * stride_qh + i
    k_ptr += head // GROUP * stride_kh + i
    v_ptr += head * stride_vh + j
    out_ptr += head * WIDTH_V + j
    for token in tl.range(begin, end):
        t = tl.cast(token, tl.int64)
        k = tl.load(k_ptr + t * stride_kt, in_k, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + t * stride_qt, in_k, other=0.0).to(tl.float32)
        change = tl.load(v_ptr + t * stride_vt, in_v, other=0.0).to(tl.float32)
        if L2NORM:
            k = k * tl.rsqrt(tl.sum(k * k, 0) + EPSILON)
            q = q * tl.rsqrt(tl.sum(q * q, 0) + EPSILON)
        row = t * HEADS + head
        if CHANNEL_DECAY:
            state = state * tl.exp(tl.load(g_ptr + row * WIDTH + i, in_k, other=0.0))[:, None]
        else:
            state = state * tl.exp(tl.load(g_ptr + row))
        if BETA:
            change = (change - tl.sum(k[:, None] * state, 0)) * tl.load(beta_ptr + row)
        state = state + k[:, None] * change[None, :]
        result = tl.where(is_real, tl.sum(q[:, None] * state, 0) * SCALE, 0.0)
        tl.store(out_ptr + t * (HEADS * WIDTH_V), result.to(out_ptr.dtype.element_ty), in_v)
    # Every warp has read its part of the state.
    tl.debug_barrier()
    tl.store(place, state, in_state & keeps)
