// How a lane reads its share of a packed row: which words it loads, and how their bits become levels.
//
// A lane owns PER neighbours of a band (of exact rows: every 32nd channel, so that loads lie side by side). Its bits begin at
// lane * PER * BITS, in a trellis BACK bits earlier, since a window is a code with the bits before it and windows follow each other
// in the stream. Which words hold them and by how much they are shifted depends on the lane alone and is found once for all rows.

// What is known of a band when a kernel is compiled.
template <int GRID, int BITS, int DIM>
struct TmBand {
  enum {
    per = (DIM + 31) / 32,
    trellis = GRID == TM_TRELLIS8 || GRID == TM_TRELLIS10 ? 1 : 0,
    log = GRID == TM_TRELLIS8 ? 8 : GRID == TM_TRELLIS10 ? 10 : BITS,
    back = int(log) - BITS,
    own = int(per) * BITS,
    run = int(own) + int(back),
    // Greatest power of two in `own`: shifts of lanes are multiples of it, less `back`.
    even = (int(own) & -int(own)) > 32 ? 32 : (int(own) & -int(own)),
    most = 31 - (31 + int(back)) % int(even),
    words = GRID == TM_EXACT ? int(per) : (int(most) + int(run) + 31) / 32,
    // Words of a row.
    count = (DIM * BITS + 31) / 32,
    // Bits of the last word where a ring ends inside it.
    seam = int(trellis) != 0 ? DIM * BITS % 32 : 0,
    loads = int(words) + (int(seam) != 0 ? 1 : 0),
    pointers = GRID == TM_EXACT ? 1 : int(loads),
    // Codes that fit the fraction of a float together.
    packed = 23 / BITS > 0 ? 23 / BITS : 1
  };
};

template <int N>
struct TmWords {
  uint at[N];
};

// Where a lane finds its words: a pointer for each, at row zero, and its shifts. Exact rows need one pointer, and channels `step` apart.
template <typename P, int N>
struct TmPlace {
  P at[N];
  uint shift, seam;
};

// Two words, least first, shifted right by less than 32 bits.
template <int SHIFT>
TM_INLINE uint tm_window(uint low, uint high) {
  return SHIFT == 0 ? low : tm_funnel(low, high, uint(SHIFT));
}

// The words of this lane in the row at `row`, whose words are `step` apart.
template <int GRID, int BITS, int DIM, typename P>
TM_INLINE TmPlace<P, TmBand<GRID, BITS, DIM>::pointers> tm_place(P row, tm_index step, int lane) {
  constexpr int POINTERS = TmBand<GRID, BITS, DIM>::pointers, WORDS = TmBand<GRID, BITS, DIM>::words;
  constexpr int OWN = TmBand<GRID, BITS, DIM>::own, BACK = TmBand<GRID, BITS, DIM>::back;
  constexpr int COUNT = TmBand<GRID, BITS, DIM>::count, SEAM = TmBand<GRID, BITS, DIM>::seam;
  TmPlace<P, POINTERS> place;
  place.shift = place.seam = 0u;
  if (GRID == TM_EXACT) {
    place.at[0] = row + tm_index(lane) * step;
    return place;
  }
  // A word more in front keeps the division from rounding towards zero.
  const int begin = lane * OWN - BACK + 32;
  const int first = begin / 32 - 1;
  place.shift = uint(begin) % 32u;
  if (SEAM != 0 && first < 0) place.seam = uint(SEAM);
  TM_UNROLL
  for (int i = 0; i < POINTERS; ++i) {
    // Before the first word of a ring lies its end, which an extra word completes. Words behind the row belong to lanes without channels.
    const int before = COUNT - 1 - (SEAM != 0 ? 1 : 0);
    const int at = i == WORDS || first + i >= COUNT ? COUNT - 1 : first + i < 0 ? before : first + i;
    place.at[i] = row + tm_index(at) * step;
  }
  return place;
}

// Loads the words of a row `offset` elements on; channels of exact rows are kept as the bits of a float.
template <int GRID, int DIM, int LOADS, bool UNIT, typename P, int N>
TM_INLINE TmWords<LOADS> tm_fetch(TmPlace<P, N> place, uint offset, uint step, int lane) {
  TmWords<LOADS> words;
  if (GRID != TM_EXACT) {
    TM_UNROLL
    for (int i = 0; i < LOADS; ++i) words.at[i] = uint(place.at[i < N ? i : 0][offset]);
    return words;
  }
  const P row = place.at[0] + tm_index(offset);
  TM_UNROLL
  for (int i = 0; i < LOADS; ++i) {
    const bool held = 32 * i + 32 <= DIM || lane + 32 * i < DIM;
    const float channel = held ? float(row[UNIT ? tm_index(32 * i) : tm_index(step) * (32 * i)]) : 0.0f;
    words.at[i] = tm_bits_of(channel);
  }
  return words;
}

// Entries of the table of a band in the memory of a threadgroup. Every entry is there so often that lanes which read different
// entries rarely meet in a bank: LIMIT entries in all, at most one for each lane.
template <int GRID, int BITS, int LIMIT>
struct TmLookup {
  enum {
    log = GRID == TM_TRELLIS8 ? 8 : GRID == TM_TRELLIS10 ? 10 : BITS,
    size = GRID == TM_EXACT || GRID == TM_UNIFORM ? 1 : 1 << int(log),
    fit = LIMIT / int(size),
    copies = int(size) == 1 ? 1 : int(fit) > 32 ? 32 : int(fit) > 0 ? int(fit) : 1,
    entries = int(size) * int(copies)
  };
};

// Fills it from what `kernels::table` gives: the step, magnitudes, all levels, or the first half of a trellis.
template <int GRID, int BITS, int LIMIT, typename T, typename L>
TM_INLINE void tm_fill(T table, L levels, int from, int threads) {
  constexpr int COPIES = TmLookup<GRID, BITS, LIMIT>::copies, SIZE = TmLookup<GRID, BITS, LIMIT>::size;
  constexpr int HALF = SIZE / 2;
  for (int i = from; i < TmLookup<GRID, BITS, LIMIT>::entries; i += threads) {
    const int entry = i / COPIES;
    if (SIZE == 1 || GRID == TM_TABLE) {
      table[i] = levels[entry];
    } else if (GRID == TM_MIRRORED) {
      table[i] = entry < HALF ? -levels[HALF - 1 - entry] : levels[entry - HALF];
    } else {
      table[i] = entry < HALF ? levels[entry] : -levels[SIZE - 1 - entry];
    }
  }
}

// Which power of two the level of coordinate `i` of a lane comes multiplied by: uniform codes are not shifted down.
template <int GRID, int BITS>
TM_INLINE int tm_power(int i) {
  return GRID == TM_UNIFORM ? i % TmBand<TM_UNIFORM, BITS, 32>::packed * BITS : 0;
}

template <int GRID, int BITS>
TM_INLINE float tm_unit(int i) {
  return tm_float_of(uint(127 - tm_power<GRID, BITS>(i)) << 23);
}

// What a uniform level is more than tm_read gives, in steps.
template <int GRID>
TM_INLINE float tm_rest() {
  return GRID == TM_UNIFORM ? 0.5f : 0.0f;
}

// The channel of coordinate `i` of a lane.
template <int GRID, int PER>
TM_INLINE int tm_channel(int lane, int i) {
  return GRID == TM_EXACT ? lane + 32 * i : lane * PER + i;
}

// The levels of a lane, each divided by its tm_unit and less tm_rest.
template <int GRID, int BITS, int DIM, int LIMIT, int LOADS, typename T>
TM_INLINE TmRow<TmBand<GRID, BITS, DIM>::per> tm_read(TmWords<LOADS> words, uint shift, uint seam, T table, int lane) {
  constexpr int PER = TmBand<GRID, BITS, DIM>::per, WORDS = TmBand<GRID, BITS, DIM>::words;
  constexpr int RUN = (TmBand<GRID, BITS, DIM>::run + 31) / 32;
  constexpr int COPIES = TmLookup<GRID, BITS, LIMIT>::copies, LOG = TmLookup<GRID, BITS, LIMIT>::log;
  constexpr int TOGETHER = TmBand<GRID, BITS, DIM>::packed;
  constexpr uint MASK = (1u << LOG) - 1u;
  TmRow<PER> row;
  if (GRID == TM_EXACT) {
    TM_UNROLL
    for (int i = 0; i < PER; ++i) row.at[i] = tm_float_of(words.at[i < LOADS ? i : 0]);
    return row;
  }
  if (TmBand<GRID, BITS, DIM>::seam != 0) words.at[0] = tm_funnel(words.at[0], words.at[LOADS - 1], seam);
  uint run[RUN + 1];
  TM_UNROLL
  for (int i = 0; i < RUN; ++i) {
    const uint low = words.at[i < WORDS ? i : WORDS - 1];
    run[i] = i + 1 < WORDS ? tm_funnel(low, words.at[i + 1 < WORDS ? i + 1 : 0], shift) : low >> shift;
  }
  run[RUN] = 0u;
  TM_UNROLL
  for (int i = 0; i < PER; ++i) {
    // Uniform codes are read several at a time.
    const int first = GRID == TM_UNIFORM ? i / TOGETHER * TOGETHER * BITS : i * BITS;
    const int ahead = GRID == TM_UNIFORM ? (i % TOGETHER + 1) * BITS : LOG;
    const int word = first / 32, off = first % 32;
    const uint bits = off == 0 ? run[word] : off + ahead > 32 ? tm_funnel(run[word], run[word + 1], uint(off)) : run[word] >> off;
    if (GRID == TM_UNIFORM) {
      // Codes lie in the fraction of a float of 2^23 or more, whose steps are one: no conversion, and no shift for each.
      const int power = tm_power<GRID, BITS>(i);
      const float above = tm_float_of((bits & (MASK << power)) | 0x4b000000u);
      row.at[i] = above - tm_float_of(0x4b000000u | (1u << (BITS - 1) << power));
    } else {
      row.at[i] = table[(bits & MASK) * uint(COPIES) + uint(lane % COPIES)];
    }
  }
  return row;
}
