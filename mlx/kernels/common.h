// What the kernels share: codes of a bit stream, levels of codes, scales, sums of a threadgroup, the Hadamard rotation.
//
// The formats are those of src/bits.rs, src/grid.rs, src/trellis.rs, src/scale.rs and src/rotation.rs. A lane owns `PER`
// neighbours of a row, so every bit offset but one shift is known to the compiler. Pointers are template parameters, because
// each address space of Metal is a type of its own.

// How a row is stored. Uniform levels are computed; a table whose levels mirror each other is kept as magnitudes.
enum { TM_EXACT, TM_UNIFORM, TM_MIRRORED, TM_TABLE, TM_TRELLIS8, TM_TRELLIS10 };

// The rules of a scale, by src/spec.rs.
enum { TM_PLAIN, TM_MATCHED, TM_UNBIASED, TM_LEAST_SQUARES };

template <int N>
struct TmRow {
  float at[N];
};

template <int N>
struct TmCodes {
  uint at[N];
};

// Entries of the table of a grid; a trellis is odd under complement, so half of its levels are enough.
template <int GRID, int BITS>
struct TmTable {
  enum {
    size = GRID == TM_MIRRORED    ? 1 << (BITS - 1)
           : GRID == TM_TABLE     ? 1 << BITS
           : GRID == TM_TRELLIS8  ? 128
           : GRID == TM_TRELLIS10 ? 512
                                  : 1
  };
};

template <typename P>
TM_INLINE uint tm_word(P words, tm_index base, tm_index step, int i, int count) {
  return i < count ? uint(words[base + i * step]) : 0u;
}

// The codes of a lane. Those past the row are whatever the bits say.
template <int BITS, int DIM, int PER, typename P>
TM_INLINE TmCodes<PER> tm_codes(P words, tm_index base, tm_index step, int lane) {
  constexpr int OWN = PER * BITS;
  constexpr int NEED = (OWN + 31) / 32;
  constexpr int COUNT = (DIM * BITS + 31) / 32;
  // Whether the bits of some lane begin inside a word and end in a word after those that it needs when they begin a word.
  constexpr bool CROSSES = OWN % 32 != 0 && 32 % OWN != 0;
  const int first = lane * OWN / 32;
  const uint shift = uint(lane * OWN) % 32u;
  uint run[NEED + 1];
  TM_UNROLL
  for (int i = 0; i < NEED; ++i) run[i] = tm_word(words, base, step, first + i, COUNT);
  run[NEED] = CROSSES ? tm_word(words, base, step, first + NEED, COUNT) : 0u;
  if (OWN % 32 != 0) {
    TM_UNROLL
    for (int i = 0; i < NEED; ++i) run[i] = (run[i] >> shift) | ((run[i + 1] << 1) << (31u - shift));
  }
  TmCodes<PER> codes;
  TM_UNROLL
  for (int i = 0; i < PER; ++i) {
    const int word = i * BITS / 32, off = i * BITS % 32;
    uint code = run[word] >> off;
    if (off + BITS > 32) code |= run[word + 1] << (32 - off);
    codes.at[i] = code & ((1u << BITS) - 1u);
  }
  return codes;
}

// The level of a code of a scalar grid; a uniform one in units of its step.
template <int GRID, int BITS, typename T>
TM_INLINE float tm_level(T table, uint code) {
  constexpr uint HALF = 1u << (BITS - 1);
  if (GRID == TM_UNIFORM) return float(code) - 0.5f * float((1u << BITS) - 1u);
  if (GRID == TM_TABLE) return table[code];
  const bool low = code < HALF;
  const float magnitude = table[low ? HALF - 1u - code : code - HALF];
  return low ? -magnitude : magnitude;
}

// Levels of the row that begins at `base`, without its scale.
template <int GRID, int BITS, int DIM, int PER>
struct TmLevels {
  template <typename P, typename T>
  static TM_INLINE TmRow<PER> read(P words, tm_index base, tm_index step, T table, int lane) {
    const TmCodes<PER> codes = tm_codes<BITS, DIM, PER>(words, base, step, lane);
    TmRow<PER> row;
    TM_UNROLL
    for (int i = 0; i < PER; ++i) row.at[i] = tm_level<GRID, BITS>(table, codes.at[i]);
    return row;
  }
};

// `count` <= 16 bits from bit `at` on.
template <int COUNT, typename P>
TM_INLINE uint tm_bits(P words, tm_index base, tm_index step, int at, int count) {
  const uint shift = uint(at) % 32u;
  const uint low = tm_word(words, base, step, at / 32, COUNT) >> shift;
  const uint high = (tm_word(words, base, step, at / 32 + 1, COUNT) << 1) << (31u - shift);
  return (low | high) & ((1u << uint(count)) - 1u);
}

// A window is the code of a coordinate above the LOG - BITS bits before it; the ring closes at DIM * BITS.
template <int LOG, int BITS, int DIM, int PER>
struct TmTrellis {
  template <typename P, typename T>
  static TM_INLINE TmRow<PER> read(P words, tm_index base, tm_index step, T table, int lane) {
    constexpr int BACK = LOG - BITS;
    constexpr int RING = DIM * BITS;
    constexpr int COUNT = (RING + 31) / 32;
    constexpr uint HALF = 1u << (LOG - 1);
    const TmCodes<PER> codes = tm_codes<BITS, DIM, PER>(words, base, step, lane);
    const int first = lane * PER * BITS;
    uint before = 0;
    if (first >= BACK && first < RING) {
      before = tm_bits<COUNT>(words, base, step, first - BACK, BACK);
    } else if (first < BACK) {
      const int wrapped = BACK - first;
      before = tm_bits<COUNT>(words, base, step, RING - wrapped, wrapped);
      if (first > 0) before |= tm_bits<COUNT>(words, base, step, 0, first) << wrapped;
    }
    TmRow<PER> row;
    TM_UNROLL
    for (int i = 0; i < PER; ++i) {
      const uint window = before | (codes.at[i] << BACK);
      before = window >> BITS;
      const float magnitude = table[window < HALF ? window : 2u * HALF - 1u - window];
      row.at[i] = window < HALF ? magnitude : -magnitude;
    }
    return row;
  }
};

template <int BITS, int DIM, int PER>
struct TmLevels<TM_TRELLIS8, BITS, DIM, PER> : TmTrellis<8, BITS, DIM, PER> {};

template <int BITS, int DIM, int PER>
struct TmLevels<TM_TRELLIS10, BITS, DIM, PER> : TmTrellis<10, BITS, DIM, PER> {};

// Rows that are not packed: the words are the channels.
template <int BITS, int DIM, int PER>
struct TmLevels<TM_EXACT, BITS, DIM, PER> {
  template <typename P, typename T>
  static TM_INLINE TmRow<PER> read(P words, tm_index base, tm_index step, T, int lane) {
    TmRow<PER> row;
    TM_UNROLL
    for (int i = 0; i < PER; ++i) {
      const int c = lane * PER + i;
      row.at[i] = c < DIM ? float(words[base + c * step]) : 0.0f;
    }
    return row;
  }
};

// An element of an output: finite values beyond a half type become its largest finite value.
template <typename T>
struct TmOut {
  static TM_INLINE T of(float x) { return T(x); }
};

template <>
struct TmOut<tm_half> {
  static TM_INLINE tm_half of(float x) {
    const bool infinite = x == TM_INF || x == -TM_INF;
    const float low = x < -65504.0f ? -65504.0f : x;
    return tm_half(infinite ? x : low > 65504.0f ? 65504.0f : low);
  }
};

// A scale from its stored form: a half float, or with the sign bit set the top of a float whose exponent is 64 higher.
TM_INLINE float tm_scale(tm_half stored) {
  const float value = float(stored);
  return value < 0.0f ? tm_float_of(((tm_half_bits(stored) & 0x7fffu) << 15) + 0x20000000u) : value;
}

// Eight bits: `wide8` of src/scale.rs, 13 steps an octave from 2^-6 to 2^5 and 3 outside.
TM_INLINE float tm_scale(uint8_t code) {
  const float at = float(code);
  const float log = at < 70.0f ? (at - 70.0f) / 3.0f - 6.0f : at > 213.0f ? (at - 213.0f) / 3.0f + 5.0f : (at - 70.0f) / 13.0f - 6.0f;
  return code == 0 ? 0.0f : code == 255 ? TM_NAN : tm_exp2(log);
}

// The factor of the levels of a row: its scale, in steps for a uniform grid.
template <int GRID, typename S, typename T>
TM_INLINE float tm_factor(S scales, tm_index at, T table) {
  if (GRID == TM_EXACT) return 1.0f;
  const float scale = tm_scale(scales[at]);
  return GRID == TM_UNIFORM ? scale * table[0] : scale;
}

TM_INLINE void tm_put_scale(TM_OUT(tm_half) to, tm_index at, float scale) {
  const uint bits = tm_bits_of(scale);
  const uint rounded = bits + 0x3fffu + (bits >> 15 & 1u);
  const uint top = rounded < 0x20000000u ? 0u : (rounded - 0x20000000u) >> 15;
  const uint wide = top == 0u ? 0u : 0x8000u | (top < 0x7bffu ? top : 0x7bffu);
  const bool beyond = scale < 1.0f / 16384.0f || scale > 65504.0f;
  to[at] = beyond ? tm_half_of(wide) : tm_half(scale);
}

TM_INLINE uint8_t tm_log_code(float scale) {
  const float log = tm_log2(scale > 0.0f ? scale : 0.0f);
  const float position = log < -6.0f ? 70.0f + (log + 6.0f) * 3.0f : log > 5.0f ? 213.0f + (log - 5.0f) * 3.0f : 70.0f + (log + 6.0f) * 13.0f;
  const float rounded = tm_floor(position + 0.5f);
  const float code = position < 0.5f ? 0.0f : rounded < 254.0f ? rounded : 254.0f;
  return scale != scale ? uint8_t(255) : uint8_t(code);
}

TM_INLINE void tm_put_scale(TM_OUT(uint8_t) to, tm_index at, float scale) { to[at] = tm_log_code(scale); }

// What coordinates are multiplied by so that the scale that is expected of them is one that a code stands for: on a trellis always,
// on a scalar grid where the steps are coarse.
TM_INLINE float tm_snap(TM_OUT(tm_half), float) { return 1.0f; }

TM_INLINE float tm_snap(TM_OUT(uint8_t), float expected) {
  const float snap = expected / tm_scale(tm_log_code(expected));
  return snap >= 0.89f && snap < 1.123f ? snap : 1.0f;
}

template <typename P>
TM_INLINE float tm_snap_coarse(P scales, float expected) {
  return expected >= 1.0f / 64.0f && expected <= 32.0f ? 1.0f : tm_snap(scales, expected);
}

// The scale of a row from |y|^2, <c, y> and |c|^2; the row is neither zero nor infinite.
TM_INLINE float tm_rule(int rule, float yy, float cy, float cc, int dim) {
  if (rule == TM_MATCHED && cc > 0.0f) return tm_sqrt(yy / cc);
  if (rule == TM_UNBIASED && cy > 0.0f) return yy / cy;
  if (rule == TM_LEAST_SQUARES && cy > 0.0f) return cy / cc;
  return tm_sqrt(yy / float(dim));
}

// The usual scale on a grid of this mean square error.
TM_INLINE float tm_expected(int rule, float yy, float mse, int dim) {
  const float plain = tm_sqrt(yy / float(dim));
  return rule == TM_MATCHED ? plain / tm_sqrt(1.0f - mse) : rule == TM_UNBIASED ? plain / (1.0f - mse) : plain;
}

// The sum over all threads of a threadgroup, in every thread. `scratch` has an entry a simdgroup.
template <typename P>
TM_INLINE float tm_group_sum(float x, P scratch, int lane, int simd, int simds) {
  const float sum = tm_sum(x);
  if (lane == 0) scratch[simd] = sum;
  TM_BARRIER();
  float total = 0.0f;
  for (int i = 0; i < simds; ++i) total += scratch[i];
  TM_BARRIER();
  return total;
}

// Coordinate `thread` of the Walsh-Hadamard transform of runs of DIM / ORDER, then of the factor of order ORDER. Steps inside a
// simdgroup are shuffles; `a` and `b` take turns for the rest.
template <int DIM, int ORDER, typename P, typename F>
TM_INLINE float tm_hadamard(float x, P a, P b, F factor, int tid) {
  constexpr int RUN = DIM / ORDER;
  TM_UNROLL
  for (int h = 1; h < 32 && h < RUN; h *= 2) {
    const float other = tm_shuffle_xor(x, h);
    x = (tid & h) != 0 ? other - x : x + other;
  }
  bool odd = false;
  for (int h = 32; h < RUN; h *= 2) {
    if (tid < DIM) {
      if (odd) b[tid] = x; else a[tid] = x;
    }
    TM_BARRIER();
    if (tid < DIM) {
      const float other = odd ? b[tid ^ h] : a[tid ^ h];
      x = (tid & h) != 0 ? other - x : x + other;
    }
    odd = !odd;
  }
  if (ORDER > 1) {
    if (tid < DIM) {
      if (odd) b[tid] = x; else a[tid] = x;
    }
    TM_BARRIER();
    if (tid < DIM) {
      float sum = 0.0f;
      for (int j = 0; j < ORDER; ++j) {
        const float entry = factor[tid / RUN * ORDER + j];
        sum += entry * (odd ? b[j * RUN + tid % RUN] : a[j * RUN + tid % RUN]);
      }
      x = sum;
    }
  }
  TM_BARRIER();
  return x;
}
