"""Elementwise work on a tile of scores, or of a bias, as one CUDA kernel, where plain PyTorch needs three to nine.

Kernels read scores in fp32, write half precision, and skip what a row does not see: nothing has to be masked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.engine import jiterated
from flash_attn_compat.engine.jiterated import Argument, Memory
from flash_attn_compat.engine.mask import Mask

# Further than any key is away, and small enough to be added to a place.
_OPEN = 2**30


class Sight(NamedTuple):
    """Which keys the rows of a tile (n, kv heads, rows, group, keys) see; keys are counted from the tile's first one.

    position: where the first row stands
    left, right: how many keys a row sees before and behind its position
    first_keys: (n,) int64, how many keys of padding precede each sequence, counted from key ``-start``; or None
    blank: the same of sequence 0, ``blank_step`` less for each next one
    """

    position: int
    left: int = _OPEN
    right: int = _OPEN
    first_keys: Tensor | None = None
    start: int = 0
    blank: int = 0
    blank_step: int = 0

    @classmethod
    def under(cls, mask: Mask, position: int) -> Sight:
        left, right = (_OPEN if bound is None else min(bound, _OPEN) for bound in mask)
        return cls(position, left, right)


# How the kernels find a tile's row and what it sees, and read eight scores of it.
_PLACE = """
  int r = (int)row, n = r / per_sequence, place = r / group % rows + position;
  int first = place - left, last = place + right, blanks = blank - n * blank_step;
  if (first_keys) blanks = (int)(((const long long*)first_keys)[n] - start);
  first = first < blanks ? blanks : first;
  last = last < columns ? last : columns - 1;
  auto is_seen = [&](int c) { return c >= first && c <= last; };
  auto load = [&](const float* from, int c, float* eight) {
    for (int j = 0; j < 8; j += 4) {
      if (columns % 4 == 0) {
        if (c + j < columns) {
          float4 four = *(const float4*)(from + c + j);
          eight[j] = four.x; eight[j + 1] = four.y; eight[j + 2] = four.z; eight[j + 3] = four.w;
        }
        continue;
      }
      for (int i = j; i < j + 4; ++i) eight[i] = c + i < columns ? from[c + i] : 0.f;
    }
  };"""
_PLACE_PARAMETERS = """int per_sequence, int group, int rows, int columns, int chunks, int position, int left,
  int right, long long first_keys, long long start, int blank, int blank_step"""
_PLACE_SCALARS = (
    "per_sequence", "group", "rows", "columns", "chunks", "position", "left", "right", "first_keys", "start", "blank",
    "blank_step",
)  # fmt: skip

# A score: softcap * tanh(product * factor), or product * factor without softcap. The tanh is right to 1e-7,
# and to 1e-5 of itself where it is small; the exponentials to 1e-5 where they count.
_SCORE_OF = """
  auto tanh_of = [&](T x) {
    T square = x * x;
    T small = x * (T(1) + square * (T(-0.33333333f) + square * T(0.13333333f)));
    T large = T(1) - __fdividef(T(2), __expf(T(2) * x) + T(1));
    return square < T(0.0025f) ? small : large;
  };
  auto score_of = [&](T product) { return softcap > 0 ? softcap * tanh_of(product * factor) : product * factor; };"""

# Neighbouring threads read neighbouring numbers: a thread's quadruples lie ``chunks`` of them apart. All are read
# before any is used, or a thread would wait for each.
_PEAKS = jiterated.Kernel(
    f"""
template <typename T> T peaks(T row, T chunk, long long products, {_PLACE_PARAMETERS}) {{{_PLACE}
  const float* from = (const float*)products + (long long)r * columns;
  T peak = -INFINITY;
  T all[8][4];
  for (int i = 0; i < 8; ++i) {{
    int c = 4 * ((int)chunk + i * chunks);
    for (int j = 0; j < 4; ++j) all[i][j] = -INFINITY;
    if (last < c || c + 3 < first) continue;
    if (columns % 4 == 0) {{
      float4 four = *(const float4*)(from + c);
      all[i][0] = four.x; all[i][1] = four.y; all[i][2] = four.z; all[i][3] = four.w;
    }} else {{
      for (int j = 0; j < 4; ++j) if (c + j < columns) all[i][j] = from[c + j];
    }}
  }}
  for (int i = 0; i < 8; ++i) {{
    int c = 4 * ((int)chunk + i * chunks);
    for (int j = 0; j < 4; ++j) if (is_seen(c + j)) peak = fmaxf(peak, all[i][j]);
  }}
  return peak;
}}""",
    "products",
    *_PLACE_SCALARS,
)

_WEIGHTS = jiterated.Kernel(
    f"""
template <typename T> T weights(T row, T chunk, T peak, T factor, T softcap, long long products, long long packed,
                                {_PLACE_PARAMETERS}) {{{_PLACE}{_SCORE_OF}HALVES
  const float* from = (const float*)products + (long long)r * columns;
  int width = (columns + 7) / 8 * 8;
  unsigned int* to = (unsigned int*)packed + (long long)r * (width / 2);
  T shift = peak == -INFINITY ? T(0) : score_of(peak), sum = 0;
  for (int c = 8 * (int)chunk; c < width; c += 8 * chunks) {{
    unsigned int bits[4] = {{0, 0, 0, 0}};
    if (c + 7 >= first && c <= last) {{
      T eight[8];
      load(from, c, eight);
      for (int j = 0; j < 8; ++j) eight[j] = __expf(score_of(eight[j]) - shift);
      if (c < first || c + 7 > last) for (int j = 0; j < 8; ++j) if (!is_seen(c + j)) eight[j] = 0;
      for (int j = 0; j < 8; ++j) sum += eight[j];
      for (int j = 0; j < 4; ++j) bits[j] = pack(eight[2 * j], eight[2 * j + 1]);
    }}
    *(uint4*)(to + c / 2) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
  }}
  return sum;
}}""",
    "factor",
    "softcap",
    "products",
    "packed",
    *_PLACE_SCALARS,
)

# Eight channels of a row of the output, and the row's LSE: what weights left undone.
_FINISH = jiterated.Kernel(
    f"""
template <typename T> T finish(T row, T unit, T peak, T total, T factor, T softcap, long long products, long long out,
                               long long lse, int channels, int heads, int rows, int group,
                               long long out_n, long long out_head, long long out_row, long long out_member,
                               long long lse_n, long long lse_head, long long lse_row, long long lse_member)
{{{_SCORE_OF}HALVES
  int r = (int)row, c = 8 * (int)unit, member = r % group, place = r / group % rows, head = r / group / rows % heads;
  int n = r / group / rows / heads;
  // Only rows that see no key have a sum of 0.
  if (c == 0 && lse) ((float*)lse)[n * lse_n + head * lse_head + place * lse_row + member * lse_member] =
      total == 0 ? INFINITY : __logf(total) + score_of(peak);
  T scale = total == 0 ? T(0) : T(1) / total;
  const float* from = (const float*)products + (long long)r * channels + c;
  unsigned short* to = (unsigned short*)out + n * out_n + head * out_head + place * out_row + member * out_member + c;
  if (channels % 8 == 0 && (long long)to % 16 == 0) {{
    float4 low = *(const float4*)from, high = *(const float4*)(from + 4);
    *(uint4*)to = make_uint4(pack(low.x * scale, low.y * scale), pack(low.z * scale, low.w * scale),
                             pack(high.x * scale, high.y * scale), pack(high.z * scale, high.w * scale));
  }} else {{
    for (int j = 0; j < 8; ++j) if (c + j < channels) to[j] = pack(from[j] * scale, 0) & 0xFFFF;
  }}
  return T(0);
}}""",
    "factor",
    "softcap",
    "products",
    "out",
    "lse",
    "channels",
    "heads",
    "rows",
    "group",
    "out_n",
    "out_head",
    "out_row",
    "out_member",
    "lse_n",
    "lse_head",
    "lse_row",
    "lse_member",
)
_GRADIENTS = jiterated.Kernel(
    f"""
template <typename T> T gradients(T row, T chunk, T lse, T delta, T factor, T softcap, long long products, long long dp,
                                  long long packed_p, long long packed_ds, {_PLACE_PARAMETERS}) {{
{_PLACE}{_SCORE_OF}HALVES
  const float* from = (const float*)products + (long long)r * columns;
  const float* from_dp = (const float*)dp + (long long)r * columns;
  int width = (columns + 7) / 8 * 8;
  unsigned int* to_p = (unsigned int*)packed_p + (long long)r * (width / 2);
  unsigned int* to_ds = (unsigned int*)packed_ds + (long long)r * (width / 2);
  T per_softcap = softcap > 0 ? __fdividef(T(1), softcap) : T(0);
  for (int i = 0; i < 2; ++i) {{
    int c = 8 * ((int)chunk + i * chunks);
    if (c >= width) break;
    unsigned int bits_p[4] = {{0, 0, 0, 0}}, bits_ds[4] = {{0, 0, 0, 0}};
    if (c + 7 >= first && c <= last) {{
      T p[8], ds[8];
      load(from, c, p);
      load(from_dp, c, ds);
      for (int j = 0; j < 8; ++j) {{
        T score = score_of(p[j]), tanh = score * per_softcap;
        p[j] = __expf(score - lse);
        ds[j] = p[j] == 0 ? T(0) : p[j] * (ds[j] - delta) * (T(1) - tanh * tanh);
      }}
      if (c < first || c + 7 > last) for (int j = 0; j < 8; ++j) if (!is_seen(c + j)) p[j] = ds[j] = 0;
      for (int j = 0; j < 4; ++j) {{
        bits_p[j] = pack(p[2 * j], p[2 * j + 1]);
        bits_ds[j] = pack(ds[2 * j], ds[2 * j + 1]);
      }}
    }}
    *(uint4*)(to_p + c / 2) = make_uint4(bits_p[0], bits_p[1], bits_p[2], bits_p[3]);
    *(uint4*)(to_ds + c / 2) = make_uint4(bits_ds[0], bits_ds[1], bits_ds[2], bits_ds[3]);
  }}
  return T(0);
}}""",
    "factor",
    "softcap",
    "products",
    "dp",
    "packed_p",
    "packed_ds",
    *_PLACE_SCALARS,
)

_BIAS = jiterated.Kernel(
    """
template <typename T> T bias(T row, T chunk, T slope, T shift, T position, T first_column, long long table,
                             int columns, int chunks) {HALVES
  unsigned int* to = (unsigned int*)table + (long long)row * (columns / 2);
  for (int i = 0; i < 4; ++i) {
    int c = 8 * ((int)chunk + i * chunks);
    if (c >= columns) break;
    unsigned int bits[4];
    for (int j = 0; j < 4; ++j) {
      T column = first_column + T(c + 2 * j);
      bits[j] = pack(shift - slope * fabsf(column - position), shift - slope * fabsf(column + T(1) - position));
    }
    *(uint4*)(to + c / 2) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
  }
  return T(0);
}""",
    "first_column",
    "table",
    "columns",
    "chunks",
)

# Whether a key counts, for eight keys of a row: 0 or ``hidden``, the bits of a number, in half precision.
_BAND = jiterated.Kernel(
    """
template <typename T> T band(T row, T chunk, long long marks, long long table, int hidden, int rows, int width,
                             int before, int left, int right, int chunks) {
  int r = (int)row, place = r % rows + before;
  const int* strip = (const int*)marks + (long long)(r / rows) * rows;
  unsigned int* to = (unsigned int*)table + (long long)r * (width / 2);
  int mine = strip[place], first = place - left, last = place + right;
  for (int i = 0; i < 2; ++i) {
    int c = 8 * ((int)chunk + i * chunks);
    if (c >= width) break;
    unsigned int bits[4] = {0, 0, 0, 0};
    for (int j = 0; j < 8; ++j) {
      bool counts = c + j >= first && c + j <= last && strip[c + j] == mine;
      if (!counts) bits[j / 2] |= (unsigned int)hidden << (j % 2 * 16);
    }
    *(uint4*)(to + c / 2) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
  }
  return T(0);
}""",
    "marks",
    "table",
    "hidden",
    "rows",
    "width",
    "before",
    "left",
    "right",
    "chunks",
)
# The lowest numbers' bits.
_LOWEST = {torch.float16: 0xFBFF, torch.bfloat16: 0xFF7F}


def peaks(products: Tensor, sight: Sight) -> Tensor:
    """The largest product that each row sees, (n, kv heads, rows, group, 1); -inf where it sees none.

    products: (n, kv heads, rows, group, keys), fp32, contiguous
    """
    place, scalars = _grid(products, sight, columns_per_thread=32)
    # Nothing here is in half precision; any of the two will do.
    return _PEAKS(torch.float16, *place, products=_tile(products, products.shape), **scalars).amax(-1, keepdim=True)


def weights(
    products: Tensor, peak: Tensor, factor: float, softcap: float, dtype: torch.dtype, sight: Sight
) -> tuple[Tensor, Tensor]:
    """exp(score - the peak's score) in ``dtype``, 0 where a key is not seen, and its fp32 sums (..., 1)."""
    place, scalars = _grid(products, sight, columns_per_thread=32)
    found = _padded(products, dtype)
    sums = _WEIGHTS(
        dtype, *place, peak, factor=factor, softcap=softcap, products=_tile(products, products.shape),
        packed=_words(found), **scalars,
    )  # fmt: skip
    return found[..., : products.shape[-1]], sums.sum(-1, keepdim=True)


def finish(
    products: Tensor, total: Tensor, peak: Tensor, factor: float, softcap: float, out: Tensor, lse: Tensor | None
) -> None:
    """Write ``products`` of weights and values over the weights' sums to ``out``, and the rows' LSE.

    products: (n, kv heads, rows, group, head_dim_v), fp32, contiguous; total, peak: (..., 1)
    out: like products in half precision, of any strides but the last; lse: (n, kv heads, rows, group), fp32
    """
    n, heads, rows, group, channels = products.shape
    device, lse_strides = products.device, (0, 0, 0, 0) if lse is None else lse.stride()
    lse_memory = None if lse is None else Memory(lse, torch.float32, (n, heads, rows, group), dense_axes=0)
    _FINISH(
        out.dtype,
        jiterated.places(n * heads * rows * group, device).view(n, heads, rows, group, 1),
        jiterated.places(-(-channels // 8), device), peak, total, factor=factor, softcap=softcap,
        products=_tile(products, products.shape), out=Memory(out, out.dtype, products.shape, dense_axes=1),
        lse=lse_memory,
        channels=channels, heads=heads, rows=rows, group=group, out_n=out.stride(0), out_head=out.stride(1),
        out_row=out.stride(2), out_member=out.stride(3), lse_n=lse_strides[0], lse_head=lse_strides[1],
        lse_row=lse_strides[2], lse_member=lse_strides[3],
    )  # fmt: skip


def gradients(
    products: Tensor,
    dp: Tensor,
    lse: Tensor,
    delta: Tensor,
    factor: float,
    softcap: float,
    dtype: torch.dtype,
    sight: Sight,
) -> tuple[Tensor, Tensor]:
    """Probabilities and the gradient of the products without ``factor * softcap``, both like products in ``dtype``.

    dp: like products; lse, delta: (n, kv heads, rows, group, 1), fp32
    """
    place, scalars = _grid(products, sight, columns_per_thread=16)
    p, ds = _padded(products, dtype), _padded(products, dtype)
    _GRADIENTS(
        dtype, *place, lse, delta, factor=factor, softcap=softcap, products=_tile(products, products.shape),
        dp=_tile(dp, products.shape), packed_p=_words(p), packed_ds=_words(ds), **scalars,
    )  # fmt: skip
    return p[..., : products.shape[-1]], ds[..., : products.shape[-1]]


def alibi_bias(
    slopes: Tensor, shift: Tensor, positions: Tensor, first_column: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """shift - slope * |column - position| in ``dtype``, (batch, nheads, rows, columns); tensors are fp32.

    slopes, shift: (batch, nheads, 1, 1) and (batch, nheads, rows, 1); positions: (rows,)
    columns: how many from ``first_column`` on, a multiple of 8
    """
    sizes, device = shift.shape[:3], shift.device
    table = torch.empty(*sizes, columns, dtype=dtype, device=device)
    chunks = -(-columns // 32)
    _BIAS(
        dtype, jiterated.places(sizes.numel(), device).view(*sizes, 1), jiterated.places(chunks, device), slopes, shift,
        positions.unsqueeze(1), first_column=first_column, table=_words(table), columns=columns, chunks=chunks,
    )  # fmt: skip
    return table


def band_bias(marks: Tensor, sizes: tuple[int, int, int], before: int, window: Mask, dtype: torch.dtype) -> Tensor:
    """(blocks, rows, width) in ``dtype``: 0 where a key has its row's mark and is in the window, else the lowest value.

    marks: int32, (at least (blocks - 1) * rows + width,); a block's keys begin at its number times ``rows``, and its
        rows are the keys from ``before`` on
    sizes: blocks, rows and width, a multiple of 8
    """
    blocks, rows, width = sizes
    table = torch.empty(sizes, dtype=dtype, device=marks.device)
    chunks, read = -(-width // 16), (blocks - 1) * rows + width
    _BAND(
        dtype, jiterated.places(blocks * rows, marks.device).unsqueeze(1), jiterated.places(chunks, marks.device),
        marks=Memory(marks[:read], torch.int32, (read,)), table=_words(table), hidden=_LOWEST[dtype],
        rows=rows, width=width, before=before,
        left=window.left, right=window.right, chunks=chunks,
    )  # fmt: skip
    return table


def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels serve tiles of ``dtype`` on this device."""
    return not why_not(device, dtype)


def bias_is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether alibi_bias and band_bias serve."""
    return not jiterated.why_not(device, dtype, _bias_is_right)


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Why plain operators serve tiles instead, or nothing."""
    return jiterated.why_not(device, dtype, _tiles_are_right)


def _grid(tile: Tensor, sight: Sight, columns_per_thread: int) -> tuple[tuple[Tensor, Tensor], dict[str, Argument]]:
    """Row and chunk of each thread, and the kernels' scalars: a tensor's address counts as one."""
    n, heads, rows, group, columns = tile.shape
    chunks = -(-columns // columns_per_thread)
    row_places = jiterated.places(n * heads * rows * group, tile.device).view(n, heads, rows, group, 1)
    first_keys = sight.first_keys
    scalars: dict[str, Argument] = {
        "per_sequence": heads * rows * group,
        "group": group,
        "rows": rows,
        "columns": columns,
        "chunks": chunks,
        "position": sight.position,
        "left": sight.left,
        "right": sight.right,
        "first_keys": None if first_keys is None else Memory(first_keys, torch.int64, (n,)),
        "start": sight.start,
        "blank": sight.blank,
        "blank_step": sight.blank_step,
    }
    return (row_places, jiterated.places(chunks, tile.device)), scalars


def _tile(tensor: Tensor, shape: tuple[int, ...]) -> Memory:
    """A tile that is read, four numbers at a time where its rows allow."""
    return Memory(tensor, torch.float32, shape, in_words=shape[-1] % 4 == 0)


def _words(tensor: Tensor) -> Memory:
    """A tensor of ours, to be written."""
    return Memory(tensor, tensor.dtype, tensor.shape, in_words=True)


def _padded(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a tile in ``dtype`` whose rows lie on 16 bytes."""
    columns = tile.shape[-1]
    return torch.empty(*tile.shape[:-1], columns + -columns % 8, dtype=dtype, device=tile.device)


def _tiles_are_right(device: torch.device, dtype: torch.dtype) -> bool:
    return all(_tile_is_right(device, dtype, columns) for columns in (11, 40))


def _tile_is_right(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """Two sequences of three rows and two heads, under a window and padding, against plain operators."""
    products = (
        torch.linspace(-3.0, 3.0, 12 * columns, dtype=torch.float32, device=device)
        .view(2, 1, 3, 2, columns)
        .contiguous()
    )
    dp = products.flip(-1).contiguous()
    sight = Sight(5, 4, 2, torch.tensor([3, 6], dtype=torch.int64, device=device), start=2)
    row, column = torch.arange(3, device=device).view(3, 1, 1), torch.arange(columns, device=device)
    hidden = (column < row + 1) | (column > row + 7)
    hidden = hidden | (column < torch.tensor([1, 4], dtype=torch.int64, device=device).view(2, 1, 1, 1, 1))
    scores = (2.0 * torch.tanh(products * 0.5)).masked_fill(hidden, -torch.inf)
    peak = products.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
    lse = scores.amax(-1, keepdim=True)
    delta = torch.linspace(-0.5, 0.5, 12, dtype=torch.float32, device=device).view(2, 1, 3, 2, 1)
    p = torch.exp(scores - lse)
    found_peak = peaks(products, sight)
    found, found_total = weights(products, peak, 0.5, 2.0, dtype, sight)
    out = torch.zeros(2, 3, 2, 8, dtype=dtype, device=device)
    found_lse = torch.zeros(2, 2, 3, dtype=torch.float32, device=device)
    values = products[..., :8].contiguous()
    finish(values, found_total, peak, 0.5, 2.0, out.unsqueeze(1), found_lse.transpose(1, 2).unsqueeze(1))
    found_p, found_ds = gradients(products, dp, lse, delta, 0.5, 2.0, dtype, sight)
    ds = (p * (dp - delta) * (1.0 - torch.tanh(products * 0.5).square())).masked_fill(hidden, 0.0)
    total = p.sum(-1, keepdim=True)
    pairs = (
        (found_peak, peak), (found, p), (found_total, total), (found_p, p), (found_ds, ds),
        (out.unsqueeze(1), values / total), (found_lse.transpose(1, 2)[:, None, :, :, None], lse + total.log()),
    )  # fmt: skip
    return all(torch.allclose(one.float(), other, rtol=1e-2, atol=1e-3) for one, other in pairs)


def _bias_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    fp32 = functools.partial(torch.tensor, dtype=torch.float32, device=device)
    slopes, shift = fp32([0.5, -2.0]).view(1, 2, 1, 1), fp32([0.0, 1.0, -3.0]).view(1, 1, 3, 1).expand(1, 2, 3, 1)
    positions, columns = fp32(range(3)), fp32(range(1, 49))
    expected = shift - slopes * (columns - positions.unsqueeze(1)).abs()
    is_right = torch.equal(alibi_bias(slopes, shift, positions, 1, 48, dtype), expected.to(dtype))
    # Two blocks of 8 rows, of 24 keys each.
    marks = torch.tensor([0] * 11 + [1] * 30, dtype=torch.int32, device=device)
    keys, ahead = (
        marks.unfold(0, 24, 8)[:2],
        torch.arange(-8, 16, device=device) - torch.arange(8, device=device)[:, None],
    )
    hidden = (ahead < -3) | (ahead > 5) | (keys[:, None] != keys[:, 8:16, None])
    counts = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
    return is_right and torch.equal(band_bias(marks, (2, 8, 24), 8, Mask(3, 5), dtype), counts)
