// Attention of one simdgroup on tiles of tokens: 32 scores at a time, a lane each.
//
// HEADS query heads, padded to a power of two, share every unpacked row, so a tile has 32 / HEADS tokens. The lanes' parts of the 32
// dot products are summed by halving: in each of five steps a lane passes on the half of its sums that its neighbour keeps. Lane
// `token * HEADS + head` ends with one score and does its softmax alone; weights come back by shuffles, and sums are rescaled once a
// tile. Scales of keys and values are read by the lane that needs them, and loads of the next keys are under way meanwhile.

constexpr int TM_TOKENS = 8;

// How heads are padded, and how the tokens of a tile are done in blocks.
template <int GQA>
struct TmTile {
  enum {
    heads = GQA <= 1 ? 1 : GQA <= 2 ? 2 : GQA <= 4 ? 4 : 8,
    size = 32 / int(heads),
    block = int(size) < TM_TOKENS ? int(size) : TM_TOKENS,
    blocks = int(size) / int(block),
    // Steps of the halving that join heads, and after them tokens of a block.
    head_steps = GQA <= 1 ? 0 : GQA <= 2 ? 1 : GQA <= 4 ? 2 : 3,
    steps = int(head_steps) + (int(block) == 8 ? 3 : 2)
  };
};

// A step of the halving where lanes hold their sums in an order of their own: the first is the one that the lane keeps.
TM_INLINE float tm_pass(float kept, float passed, int bit) {
  return kept + tm_shuffle_xor(passed, bit);
}

// A step of the halving: the lane keeps the sum whose number has its bit, and adds what its neighbour has of it.
TM_INLINE float tm_halve(float even, float odd, int bit, int lane) {
  const bool upper = (lane & bit) != 0;
  return (upper ? odd : even) + tm_shuffle_xor(upper ? even : odd, bit);
}

// Rows may have two bands, a second one of DIM2 channels with bits and a scale of its own, or none for DIM2 = 0. Then the scales of
// keys are multiplied in before the sums over lanes, and values have a weight for each band.

// What a simdgroup carries from tile to tile. Slot `s` of `q` is the query of head s ^ (lane % heads), which is zero for heads that
// only fill up the power of two. `top` is the greatest score of the lane's head, `total` the weights of the lane's own
// tokens, `mass` the weights with the scales of their values, a band each.
template <int GQA, int PER, int VPER>
struct TmUnit {
  TmRow<PER> q[TmTile<GQA>::heads];
  TmRow<VPER> acc[GQA];
  float top, total, mass[2];
};

// One side of a segment as a lane reads it; offsets inside of a head fit 32 bits.
template <typename P, typename S, typename T, int N>
struct TmSide {
  TmPlace<P, N> place;
  S scales;
  T table;
  uint row, step, scale_row;
};

template <int GRID, int BITS, int DIM, typename P, typename S, typename T>
TM_INLINE TmSide<P, S, T, TmBand<GRID, BITS, DIM>::pointers> tm_side(P words, tm_index row, tm_index step, S scales, tm_index scale_row, T table, int lane) {
  TmSide<P, S, T, TmBand<GRID, BITS, DIM>::pointers> side;
  side.place = tm_place<GRID, BITS, DIM>(words, step, lane);
  side.scales = scales;
  side.table = table;
  side.row = uint(row);
  side.step = uint(step);
  side.scale_row = uint(scale_row);
  return side;
}

// What rules a unit: tokens of tiles that begin at `begin` and every `stride` after it, up to `end`, and what is done to a score.
struct TmRules {
  int begin, end, stride;
  float offset, rest[2], cap, light;
  bool masked;
  uint mask_step;
};

template <int KGRID, int KBITS, int KBITS2, int VGRID, int VBITS, int VBITS2, int DIM, int DIM2, int VDIM, int VDIM2, int GQA, int LIMIT, bool UNIT, int PER, int VPER, typename K, typename K2, typename V, typename V2, typename M>
TM_INLINE TmUnit<GQA, PER, VPER> tm_attend(TmUnit<GQA, PER, VPER> unit, K keys, K2 keys2, V values, V2 values2, TmRules rules, M mask, int lane) {
  // Coordinates of a lane in either band; types need a size even where there is no second one.
  constexpr int DIM_2 = DIM2 > 0 ? DIM2 : 32, VDIM_2 = VDIM2 > 0 ? VDIM2 : 32;
  constexpr int FIRST = TmBand<KGRID, KBITS, DIM>::per, SECOND = DIM2 > 0 ? PER - FIRST : 0;
  constexpr int VFIRST = TmBand<VGRID, VBITS, VDIM>::per, VSECOND = VDIM2 > 0 ? VPER - VFIRST : 0;
  constexpr int KLOADS = TmBand<KGRID, KBITS, DIM>::loads, KLOADS2 = TmBand<KGRID, KBITS2, DIM_2>::loads;
  constexpr int VLOADS = TmBand<VGRID, VBITS, VDIM>::loads, VLOADS2 = TmBand<VGRID, VBITS2, VDIM_2>::loads;
  constexpr int HEADS = TmTile<GQA>::heads, TILE = TmTile<GQA>::size, BLOCK = TmTile<GQA>::block, BLOCKS = TmTile<GQA>::blocks;
  constexpr int HEAD_STEPS = TmTile<GQA>::head_steps, STEPS = TmTile<GQA>::steps;
  // Whether registers hold the words of a block of keys ahead of their use.
  constexpr bool AHEAD = KGRID != TM_EXACT && BLOCK * (KLOADS + (DIM2 > 0 ? KLOADS2 : 0)) <= 16;
  if (rules.begin >= rules.end) return unit;
  const int last = rules.end - 1;
  // Rows behind the end are read as the last one.
  const uint k_last = uint(last) * keys.row, v_last = uint(last) * values.row;
  TmWords<KLOADS> next[BLOCK];
  TmWords<KLOADS2> next2[BLOCK];
  if (AHEAD) {
    uint at = uint(rules.begin) * keys.row;
    TM_UNROLL
    for (int j = 0; j < BLOCK; ++j) {
      next[j] = tm_fetch<KGRID, DIM, KLOADS, UNIT>(keys.place, at, keys.step, lane);
      if (DIM2 > 0) next2[j] = tm_fetch<KGRID, DIM_2, KLOADS2, UNIT>(keys2.place, at, keys2.step, lane);
      at = tm_least(at + keys.row, k_last);
    }
  }
  for (int tile = rules.begin; tile < rules.end; tile += rules.stride) {
    // The lane's own token, or the last one where the tile reaches behind the end.
    const int own = tile + lane / HEADS;
    const int token = own < last ? own : last;
    const float k_factor = tm_factor<KGRID>(keys.scales, uint(token) * keys.scale_row, keys.table);
    const float v_factor = tm_factor<VGRID>(values.scales, uint(token) * values.scale_row, values.table);
    const float k_factor2 = DIM2 > 0 ? tm_factor<KGRID>(keys2.scales, uint(token) * keys2.scale_row, keys2.table) : 0.0f;
    const float v_factor2 = VDIM2 > 0 ? tm_factor<VGRID>(values2.scales, uint(token) * values2.scale_row, values2.table) : 0.0f;
    float dot = 0.0f;
    TM_LOOP
    for (int block = 0; block < BLOCKS; ++block) {
      TmWords<KLOADS> words[BLOCK];
      TmWords<KLOADS2> words2[BLOCK];
      if (AHEAD) {
        TM_UNROLL
        for (int j = 0; j < BLOCK; ++j) {
          words[j] = next[j];
          if (DIM2 > 0) words2[j] = next2[j];
        }
      }
      uint at = tm_least(uint(AHEAD && block + 1 == BLOCKS ? tile + rules.stride : tile + (block + (AHEAD ? 1 : 0)) * BLOCK) * keys.row, k_last);
      TM_UNROLL
      for (int j = 0; j < BLOCK; ++j) {
        const TmWords<KLOADS> loaded = tm_fetch<KGRID, DIM, KLOADS, UNIT>(keys.place, at, keys.step, lane);
        if (AHEAD) {
          next[j] = loaded;
        } else {
          words[j] = loaded;
        }
        if (DIM2 > 0) {
          const TmWords<KLOADS2> loaded2 = tm_fetch<KGRID, DIM_2, KLOADS2, UNIT>(keys2.place, at, keys2.step, lane);
          if (AHEAD) {
            next2[j] = loaded2;
          } else {
            words2[j] = loaded2;
          }
        }
        at = tm_least(at + keys.row, k_last);
      }
      float open[6];
      TM_UNROLL
      for (int j = 0; j < BLOCK; ++j) {
        const TmRow<FIRST> k = tm_read<KGRID, KBITS, DIM, LIMIT>(words[j], keys.place.shift, keys.place.seam, keys.table, lane);
        float part[HEADS];
        TM_UNROLL
        for (int g = 0; g < HEADS; ++g) {
          part[g] = 0.0f;
          TM_UNROLL
          for (int i = 0; i < FIRST; ++i) part[g] += unit.q[g].at[i] * k.at[i];
        }
        if (DIM2 > 0) {
          const TmRow<TmBand<KGRID, KBITS2, DIM_2>::per> k2 = tm_read<KGRID, KBITS2, DIM_2, LIMIT>(words2[j], keys2.place.shift, keys2.place.seam, keys2.table, lane);
          const float scale = tm_shuffle(k_factor, (block * BLOCK + j) * HEADS), scale2 = tm_shuffle(k_factor2, (block * BLOCK + j) * HEADS);
          TM_UNROLL
          for (int g = 0; g < HEADS; ++g) {
            float other = 0.0f;
            TM_UNROLL
            for (int i = 0; i < SECOND; ++i) other += unit.q[g].at[FIRST + i] * k2.at[i];
            part[g] = part[g] * scale + other * scale2;
          }
        }
        TM_UNROLL
        for (int step = 0; step < HEAD_STEPS; ++step) {
          TM_UNROLL
          for (int g = 0; g < HEADS; g += 2 << step) part[g] = tm_pass(part[g], part[g + (1 << step) < HEADS ? g + (1 << step) : 0], 1 << step);
        }
        // As in a binary counter: a sum waits until its partner is there.
        float carry = part[0];
        bool more = true;
        TM_UNROLL
        for (int step = HEAD_STEPS; step < STEPS; ++step) {
          if (more) {
            if ((j >> (step - HEAD_STEPS) & 1) != 0) {
              carry = tm_halve(open[step], carry, 1 << step, lane);
            } else {
              open[step] = carry;
              more = false;
            }
          }
        }
        if (more) open[STEPS] = carry;
      }
      float sum = open[STEPS];
      TM_UNROLL
      for (int bit = 1 << STEPS; bit < 32; bit *= 2) sum += tm_shuffle_xor(sum, bit);
      dot = BLOCKS == 1 || lane / (HEADS * BLOCK) == block ? sum : dot;
    }

    float score = DIM2 > 0 ? dot + k_factor * rules.rest[0] + k_factor2 * rules.rest[1] : k_factor * (dot + rules.rest[0]);
    score += rules.offset;
    if (rules.cap > 0.0f) score = rules.cap * tm_tanh(score / rules.cap);
    if (rules.masked) {
      const float more = mask[uint(token) * rules.mask_step];
      // What is hidden stays hidden, even where its score is NaN.
      score = more == -TM_INF ? more : score + more;
    }
    score = own > last || lane % HEADS >= GQA ? -TM_INF : score;
    float top = score;
    TM_UNROLL
    for (int bit = HEADS; bit < 32; bit *= 2) top = tm_greater(top, tm_shuffle_xor(top, bit));
    top = tm_greater(unit.top, top);
    const float factor = top == -TM_INF ? 1.0f : tm_exp(unit.top - top);
    const float weight = score == -TM_INF ? 0.0f : tm_exp(score - top);
    unit.top = top;
    unit.total = unit.total * factor + weight;
    // Values of a token count where the weight of any head is above the bound.
    const uint heavy = tm_ballot(!(weight <= rules.light), lane);
    const bool seen = (heavy >> uint(lane & -HEADS) & ((1u << HEADS) - 1u)) != 0u && weight != 0.0f;
    const float w = seen ? weight * v_factor : 0.0f, w2 = VDIM2 > 0 && seen ? weight * v_factor2 : 0.0f;
    unit.mass[0] = unit.mass[0] * factor + w;
    unit.mass[1] = unit.mass[1] * factor + w2;
    if (tm_ballot(factor != 1.0f, lane) != 0u) {
      TM_UNROLL
      for (int g = 0; g < GQA; ++g) {
        const float f = tm_shuffle(factor, g);
        TM_UNROLL
        for (int i = 0; i < VPER; ++i) unit.acc[g].at[i] *= f;
      }
    }
    if (heavy == 0u) continue;
    // Exact rows that are hidden may hold anything, so they are not multiplied by zero.
    if (VGRID == TM_EXACT && tm_ballot(w == 0.0f && lane % HEADS < GQA, lane) != 0u) {
      TM_LOOP
      for (int j = 0; j < TILE && tile + j <= last; ++j) {
        const TmWords<VLOADS> words = tm_fetch<VGRID, VDIM, VLOADS, UNIT>(values.place, uint(tile + j) * values.row, values.step, lane);
        const TmRow<VFIRST> v = tm_read<VGRID, VBITS, VDIM, LIMIT>(words, 0u, 0u, values.table, lane);
        TM_UNROLL
        for (int g = 0; g < GQA; ++g) {
          const float part = tm_shuffle(w, j * HEADS + g);
          TM_UNROLL
          for (int i = 0; i < VFIRST; ++i) unit.acc[g].at[i] = part == 0.0f ? unit.acc[g].at[i] : unit.acc[g].at[i] + part * v.at[i];
        }
      }
      continue;
    }
    TM_LOOP
    for (int block = 0; block < BLOCKS; ++block) {
      TmWords<VLOADS> words[BLOCK];
      TmWords<VLOADS2> words2[BLOCK];
      uint at = tm_least(uint(tile + block * BLOCK) * values.row, v_last);
      TM_UNROLL
      for (int j = 0; j < BLOCK; ++j) {
        words[j] = tm_fetch<VGRID, VDIM, VLOADS, UNIT>(values.place, at, values.step, lane);
        if (VDIM2 > 0) words2[j] = tm_fetch<VGRID, VDIM_2, VLOADS2, UNIT>(values2.place, at, values2.step, lane);
        at = tm_least(at + values.row, v_last);
      }
      TM_UNROLL
      for (int j = 0; j < BLOCK; ++j) {
        const TmRow<VFIRST> v = tm_read<VGRID, VBITS, VDIM, LIMIT>(words[j], values.place.shift, values.place.seam, values.table, lane);
        TM_UNROLL
        for (int g = 0; g < GQA; ++g) {
          const float part = tm_shuffle(w, (block * BLOCK + j) * HEADS + g);
          TM_UNROLL
          for (int i = 0; i < VFIRST; ++i) unit.acc[g].at[i] += part * v.at[i];
        }
        if (VDIM2 > 0) {
          const TmRow<TmBand<VGRID, VBITS2, VDIM_2>::per> v2 = tm_read<VGRID, VBITS2, VDIM_2, LIMIT>(words2[j], values2.place.shift, values2.place.seam, values2.table, lane);
          TM_UNROLL
          for (int g = 0; g < GQA; ++g) {
            const float part = tm_shuffle(w2, (block * BLOCK + j) * HEADS + g);
            TM_UNROLL
            for (int i = 0; i < VSECOND; ++i) unit.acc[g].at[VFIRST + i] += part * v2.at[i];
          }
        }
      }
    }
  }
  return unit;
}
