/* Keys and values as llama.cpp keeps them, packed and attended to through the C API.
 *
 *   cargo build --release -p turbomoq-c
 *   cc -std=c11 -Wall -Wextra -Werror -I mlx/include examples/c/llama_kv.c target/release/libturbomoq_c.a -lm -lpthread -ldl
 *
 * A row holds one token: the channels of all KV heads, one head after another. Prints what attention gives, for the test to compare
 * with the Rust engine (tests/capi/calls.rs), and the bytes beside half precision. */
#include "turbomoq.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, QUERY_HEADS = 8, DIM = 64, TOKENS = 700, STEPS = 3 };

static void check(tmq_status status) {
  if (status != TMQ_OK) {
    fprintf(stderr, "turbomoq: %s\n", tmq_last_error());
    exit(1);
  }
}

/* Numbers from -1 to 1 that the test makes too. */
static uint32_t state = 1;
static float number(void) {
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static float *rows(size_t tokens, size_t heads) {
  float *data = malloc(tokens * heads * DIM * sizeof *data);
  if (data == NULL) exit(1);
  for (size_t i = 0; i < tokens * heads * DIM; i++) data[i] = number();
  return data;
}

static tmq_rows view(const float *data, size_t tokens, size_t heads) {
  return (tmq_rows){.struct_size = sizeof(tmq_rows),
                    .data = data,
                    .dtype = TMQ_F32,
                    .heads = heads,
                    .tokens = tokens,
                    .head_dim = DIM,
                    .token_stride = heads * DIM,
                    .head_stride = DIM};
}

/* A cache of one layer: a prompt at once, then token by token. */
static void attend(void) {
  tmq_cache *cache;
  check(tmq_cache_new("best@3,sinks=4,window=128", 0, DIM, DIM, &cache));
  float out[QUERY_HEADS * DIM];
  for (int step = 0; step < STEPS; step++) {
    size_t tokens = step == 0 ? TOKENS : 1;
    float *k = rows(tokens, HEADS), *v = rows(tokens, HEADS), *q = rows(1, QUERY_HEADS);
    tmq_rows keys = view(k, tokens, HEADS), values = view(v, tokens, HEADS), query = view(q, 1, QUERY_HEADS);
    check(tmq_cache_append(cache, &keys, &values));
    check(tmq_cache_attend(cache, &query, 0.125f, out, sizeof out / sizeof *out));
    for (size_t i = 0; i < sizeof out / sizeof *out; i++) printf("%a\n", (double)out[i]);
    free(k), free(v), free(q);
  }
  size_t dropped = 0;
  check(tmq_cache_trim(cache, 300, &dropped));
  tmq_cache_info info = {.struct_size = sizeof info};
  check(tmq_cache_get_info(cache, &info));
  fprintf(stderr, "cache: %zu tokens after %zu were dropped, %zu bytes, %zu in half precision\n", info.tokens, dropped, info.bytes,
          info.tokens * HEADS * DIM * 2 * 2);
  tmq_cache_free(cache);
}

/* The stages one by one, and what is refused. */
static void stages(void) {
  tmq_codec *codec, *none;
  check(tmq_codec_of_recipe("turboquant-mse@4", TMQ_KEY, 0, DIM, &codec));
  tmq_codec_info info = {.struct_size = sizeof info};
  check(tmq_codec_get_info(codec, &info));
  float *k = rows(32, HEADS), *q = rows(1, QUERY_HEADS), *back = rows(32, HEADS);
  tmq_rows keys = view(k, 32, HEADS), query = view(q, 1, QUERY_HEADS);
  tmq_codes *codes, *refused;
  check(tmq_encode(codec, &keys, 0, &codes));
  size_t bytes = 0;
  check(tmq_codes_bytes(codes, &bytes));
  if (bytes != 32 * HEADS * info.row_bytes) exit(2);
  check(tmq_decode(codes, back, 32 * HEADS * DIM));
  double error = 0, size = 0;
  for (size_t i = 0; i < 32 * HEADS * DIM; i++) {
    error += (k[i] - back[i]) * (k[i] - back[i]);
    size += k[i] * k[i];
  }
  if (error > 0.02 * size) exit(3);
  float scores[QUERY_HEADS * 32], sums[QUERY_HEADS * DIM];
  check(tmq_scores(codes, &query, scores, QUERY_HEADS * 32));
  check(tmq_weighted_sum(codes, scores, QUERY_HEADS, 1, sums, QUERY_HEADS * DIM));
  double heads[HEADS];
  uint8_t bits[HEADS];
  check(tmq_score_heads(&keys, 1, NULL, heads, HEADS));
  check(tmq_allocate_bits(heads, 1, HEADS, DIM, 3.0, bits, HEADS));
  fprintf(stderr, "codec: %g bits, %zu bytes a vector, relative error %.4f; bits of heads %d %d %d %d\n", (double)info.bits,
          info.row_bytes, error / size, bits[0], bits[1], bits[2], bits[3]);

  keys.struct_size -= 1;
  if (tmq_encode(codec, &keys, 0, &refused) != TMQ_STRUCT_SIZE || refused != NULL) exit(4);
  if (tmq_codec_new("nonsense", &none) != TMQ_PARSE || none != NULL) exit(5);
  if (tmq_codec_new(NULL, &none) != TMQ_NULL_POINTER) exit(6);
  if (tmq_version() != TMQ_VERSION) exit(7);
  free(k), free(q), free(back);
  tmq_codes_free(codes);
  tmq_codec_free(codec);
}

int main(void) {
  attend();
  stages();
  return 0;
}
