/* turbomoq: packed KV caches for engines in C and C++.
 *
 * Every call gives a status; tmq_last_error() has the words. Handles are freed once by their owner, not used after that, and used by
 * one thread at a time. A pointer is null or points to what the comment says.
 *
 * Structs begin with their own size, sizeof as the caller was compiled. Of a struct that the library fills, a caller with a shorter one
 * gets the fields that it knows, and one with a longer one zeros in the fields that the library does not know. A struct that the
 * library reads may be longer than the library's if what the library does not know is zero.
 *
 * A child of fork() may make calls too: it has threads of its own.
 * Made from mlx/capi/src by mlx/capi/header.py. */
#ifndef TURBOMOQ_H
#define TURBOMOQ_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the API: rises when something is added, and nothing is taken away. */
#define TMQ_VERSION 3

/* Elements are 32-bit floats. */
#define TMQ_F32 0

/* Elements are IEEE half floats. */
#define TMQ_F16 1

/* Elements are brain floats. */
#define TMQ_BF16 2

/* The keys of a recipe. */
#define TMQ_KEY 0

/* The values of a recipe. */
#define TMQ_VALUE 1

/* How a call ended. Numbers never change. */
typedef enum tmq_status {
  /* It is done. */
  TMQ_OK = 0,
  /* A pointer is null that must not be. */
  TMQ_NULL_POINTER = 1,
  /* A struct names a size that this library does not know. */
  TMQ_STRUCT_SIZE = 2,
  /* An array has a shape or length that does not fit. */
  TMQ_SHAPE = 3,
  /* An element type, codec or recipe that is not supported. */
  TMQ_UNSUPPORTED = 4,
  /* A text that cannot be read. */
  TMQ_PARSE = 5,
  /* An element is NaN or infinite. */
  TMQ_NON_FINITE = 6,
  /* A range of tokens outside what is stored, or across tokens that are encoded together. */
  TMQ_RANGE = 7,
  /* Any other error. */
  TMQ_FAILED = 8,
  /* A defect of this library; the handle should be freed. */
  TMQ_INTERNAL = 9,
} tmq_status;

/* Vectors of one layer: channel d of token t and head h is element t * token_stride + h * head_stride + d of data.
 * 
 * A row of all heads for each token, as llama.cpp keeps its keys, has head_stride = head_dim and
 * token_stride = heads * head_dim. */
typedef struct tmq_rows {
  /* sizeof(tmq_rows). */
  size_t struct_size;
  /* The first element. */
  const void *data;
  /* TMQ_F32, TMQ_F16 or TMQ_BF16. */
  uint32_t dtype;
  /* Heads. */
  size_t heads;
  /* Tokens. */
  size_t tokens;
  /* Channels. */
  size_t head_dim;
  /* Elements from a token to the next. */
  size_t token_stride;
  /* Elements from a head to the next. */
  size_t head_stride;
} tmq_rows;

/* Sizes of a codec. */
typedef struct tmq_codec_info {
  /* sizeof(tmq_codec_info), set by the caller. */
  size_t struct_size;
  /* Channels of a vector. */
  size_t head_dim;
  /* Bytes of a packed vector, scales included. */
  size_t row_bytes;
  /* Vectors that are encoded together: tokens come in multiples of it. */
  size_t tile;
  /* Bits of a code. */
  float bits;
} tmq_codec_info;

/* A codec with its tables. */
typedef struct tmq_codec tmq_codec;

/* Packed vectors of one layer and side, with their codec and tables. */
typedef struct tmq_codes tmq_codes;

/* What a cache holds. */
typedef struct tmq_cache_info {
  /* sizeof(tmq_cache_info), set by the caller. */
  size_t struct_size;
  /* Tokens held. */
  size_t tokens;
  /* Position of the next token. */
  size_t offset;
  /* Bytes of every buffer. */
  size_t bytes;
  /* Tokens of which the keys or the values are packed. */
  size_t packed;
} tmq_cache_info;

/* The cache of one layer. */
typedef struct tmq_cache tmq_cache;

/* Which tokens queries see, and how scores are formed. */
typedef struct tmq_rules {
  /* sizeof(tmq_rules). */
  size_t struct_size;
  /* Factor of the scores, usually 1 / sqrt(key_dim). */
  float scale;
  /* Not zero if a query sees nothing behind its own position. The last query stands at the last token. */
  int32_t causal;
  /* Newest tokens that a query sees, its own included; zero for all. */
  size_t sliding_window;
  /* Scores become soft_cap * tanh(score / soft_cap); zero for none. */
  float soft_cap;
  /* A logit for each query head that takes part in the softmax without a value, or null. */
  const float *sink_logits;
  /* Added to the scores by mask head, query token and position, new tokens included; minus infinity hides. Or null. */
  const float *mask;
  /* Heads of the mask: one, or all query heads. */
  size_t mask_heads;
} tmq_rules;

/* Bytes of a saved cache. */
typedef struct tmq_bytes tmq_bytes;

/* Version of the library's API, to be compared with TMQ_VERSION of the header. */
uint32_t tmq_version(void);

/* What went wrong in the last call of this thread that failed; the text is there until the next such call. */
const char *tmq_last_error(void);

/* A codec from its text, for example d128:b4:hadamard:beta; turbomoq recipes shows more of them. */
tmq_status tmq_codec_new(const char *spec, tmq_codec **out);

/* The codec of one side of a layer by a recipe, for example best@3. TMQ_UNSUPPORTED if the recipe keeps the side exact. */
tmq_status tmq_codec_of_recipe(const char *recipe, uint32_t side, size_t layer, size_t head_dim, tmq_codec **out);

/* Sizes of a codec; info->struct_size is set before. */
tmq_status tmq_codec_get_info(const tmq_codec *codec, tmq_codec_info *info);

/* Frees a codec; codes that it made stay good. Null is nothing to free. */
void tmq_codec_free(tmq_codec *codec);

/* Packs keys or values. With centred not zero their mean over the first 128 tokens is taken from them first, as recipes do with
 * keys; scores are then those of the centred keys plus that of the mean. */
tmq_status tmq_encode(const tmq_codec *codec, const tmq_rows *rows, int32_t centred, tmq_codes **out);

/* Bytes of all buffers of packed vectors. */
tmq_status tmq_codes_bytes(const tmq_codes *codes, size_t *out);

/* Frees packed vectors. Null is nothing to free. */
void tmq_codes_free(tmq_codes *codes);

/* Unpacks to floats by token, head and channel; len must be tokens * heads * head_dim. */
tmq_status tmq_decode(const tmq_codes *codes, float *out, size_t len);

/* Inner products of queries with packed keys, not scaled: floats by query head, query token and key token.
 * Query heads are a multiple of the key heads, which they share in groups. */
tmq_status tmq_scores(const tmq_codes *codes, const tmq_rows *queries, float *out, size_t len);

/* Sums of packed values with weights by query head, query token and value token: floats by query token, query head and channel.
 * Here weights holds query_heads * query_tokens * tokens floats. */
tmq_status tmq_weighted_sum(const tmq_codes *codes, const float *weights, size_t query_heads, size_t query_tokens, float *out, size_t len);

/* The rotation of a codec: a vector x becomes y with y_i = sum over j of out[i * head_dim + j] * x_j; len must be
 * head_dim * head_dim. A Hadamard rotation of a power of two has the signs that it begins with in its first row. */
tmq_status tmq_codec_rotation(const tmq_codec *codec, float *out, size_t len);

/* What the codes of a codec stand for, ascending, before the scale of a vector; len must be 2 to the power of its bits.
 * TMQ_UNSUPPORTED for a codec without such a table: trellis and affine codes, channels of two widths. */
tmq_status tmq_codec_levels(const tmq_codec *codec, float *out, size_t len);

/* The words of packed vectors by token and head, one bit stream a vector with the lowest bits first; len must be
 * tokens * heads * words of a vector. */
tmq_status tmq_codes_words(const tmq_codes *codes, uint32_t *out, size_t len);

/* The scales of packed vectors by token and head, as floats; len must be tokens * heads * scales of a vector. */
tmq_status tmq_codes_scales(const tmq_codes *codes, float *out, size_t len);

/* An empty cache for a layer by a recipe, for example best@3,sinks=4,window=128. Its plan may differ by layer and KV head. */
tmq_status tmq_cache_new(const char *recipe, size_t layer, size_t key_dim, size_t value_dim, tmq_cache **out);

/* Appends keys and values of the same tokens and heads. On an error the cache is as it was. */
tmq_status tmq_cache_append(tmq_cache *cache, const tmq_rows *keys, const tmq_rows *values);

/* Attends with queries of the newest tokens, each of which sees what is not after it: floats by query token, query head and channel
 * of the values. scale is usually 1 / sqrt(key_dim). */
tmq_status tmq_cache_attend(const tmq_cache *cache, const tmq_rows *queries, float scale, float *out, size_t len);

/* Drops the last tokens tokens, or all if there are fewer; dropped says how many and may be null. */
tmq_status tmq_cache_trim(tmq_cache *cache, size_t tokens, size_t *dropped);

/* What a cache holds; info->struct_size is set before. */
tmq_status tmq_cache_get_info(const tmq_cache *cache, tmq_cache_info *info);

/* Frees a cache. Null is nothing to free. */
void tmq_cache_free(tmq_cache *cache);

/* Appends keys and values to each of count caches, one a sequence, and attends with the queries of the same tokens. Every query sees
 * what it would have seen had the tokens come one by one. Pointer outs[i] gets lens[i] floats, by query token, query head and
 * channel of the values.
 * 
 * Rows that are not finite are not refused: they are then packed as NaN. If a sequence fails, it and those behind it are as they were. */
tmq_status tmq_caches_update_and_attend(tmq_cache **caches, size_t count, const tmq_rows *queries, const tmq_rows *keys, const tmq_rows *values, const tmq_rules *rules, float **outs, const size_t *lens);

/* Appends keys and values as tmq_cache_append, rows that are not finite too. */
tmq_status tmq_cache_extend(tmq_cache *cache, const tmq_rows *keys, const tmq_rows *values);

/* Attends as tmq_cache_attend, by rules. */
tmq_status tmq_cache_attend_by_rules(const tmq_cache *cache, const tmq_rows *queries, const tmq_rules *rules, float *out, size_t len);

/* Unpacks all keys and values that a cache holds to floats by head, token and channel. A side whose pointer is null is left out. */
tmq_status tmq_cache_fetch(const tmq_cache *cache, float *keys, size_t keys_len, float *values, size_t values_len);

/* A cache of its own with the same contents; what neither of them changes they share. */
tmq_status tmq_cache_copy(const tmq_cache *cache, tmq_cache **out);

/* A cache as bytes, for tmq_cache_load. */
tmq_status tmq_cache_save(const tmq_cache *cache, tmq_bytes **out);

/* Number of the bytes. */
tmq_status tmq_bytes_len(const tmq_bytes *bytes, size_t *out);

/* Copies the bytes; len must be their number. */
tmq_status tmq_bytes_copy(const tmq_bytes *bytes, uint8_t *out, size_t len);

/* Frees bytes. Null is nothing to free. */
void tmq_bytes_free(tmq_bytes *bytes);

/* A cache from the bytes that tmq_cache_save gave. TMQ_PARSE or TMQ_SHAPE if they are not. */
tmq_status tmq_cache_load(const uint8_t *data, size_t len, tmq_cache **out);

/* Importance of the KV heads of a model, 0 to 1, from sample keys of every layer, of equal heads and channels: doubles by layer and
 * head. sensitivity has a number for each of them (how much the output changes by noise on the head) or is null.
 * Here keys holds layers structs, sensitivity and out layers * heads doubles. */
tmq_status tmq_score_heads(const tmq_rows *keys, size_t layers, const double *sensitivity, double *out, size_t len);

/* Bits of every head, 1 to 8, for an average of average bits, from scores by layer and head: more for the important ones.
 * Here scores and out hold layers * heads numbers. */
tmq_status tmq_allocate_bits(const double *scores, size_t layers, size_t heads, size_t head_dim, double average, uint8_t *out, size_t len);

#ifdef __cplusplus
}
#endif

#endif
