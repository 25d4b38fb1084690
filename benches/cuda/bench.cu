// The attention kernels of mlx/kernels on a CUDA GPU without MLX: first the vectors of examples/kernel_vectors.rs, then times.
//
// bench VECTORS [SDPA]: SDPA holds lines `batch tokens milliseconds` of fp16 scaled-dot-product attention, from sdpa.py.
// Prints a Markdown table. A wrong vector ends the program before anything is timed.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "../../mlx/kernels/prelude_cuda.h"
#include "../../mlx/kernels/common.h"
#include "../../mlx/kernels/rows.h"
#include "../../mlx/kernels/attend.h"

// Strides as MLX passes them.
struct Strides {
  long long at[5];
  __device__ long long operator[](int i) const { return at[i]; }
};

template <int KGRID, int KBITS, int VGRID, int VBITS, int DIM, int VDIM, int KBITS2, int DIM2, int VBITS2, int VDIM2, int GQA>
__global__ void attend(
    const float* queries, Strides queries_strides, const uint32_t* k_words, Strides k_words_strides, const __half* k_scales,
    Strides k_scales_strides, const float* k_levels, const uint32_t* v_words, Strides v_words_strides, const __half* v_scales,
    Strides v_scales_strides, const float* v_levels, const float* bias, Strides bias_strides, const float* mask,
    Strides mask_strides, const int* first, const int* tokens, const float* limits, const int* place, float* part_sums,
    float* part_state) {
#include "../../mlx/kernels/attend.inc"
}

template <int DIM, typename OUT>
__global__ void merge(
    const float* sums, const float* state, const float* sinks, const int* counts, OUT* all_sums, float* all_state) {
#include "../../mlx/kernels/merge.inc"
}

#define CHECK(call)                                                                          \
  do {                                                                                       \
    const cudaError_t status = (call);                                                       \
    if (status != cudaSuccess) {                                                             \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));                   \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (false)

static const int DIMS = 128;

// Device memory.
template <typename T>
struct Buffer {
  T* data = nullptr;
  size_t count;
  explicit Buffer(size_t count) : count(count) { CHECK(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(T) + 4)); }
  explicit Buffer(const std::vector<T>& from) : Buffer(from.size()) {
    CHECK(cudaMemcpy(data, from.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> to(count);
    CHECK(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
};

struct Case {
  int kind, bits, gqa, batch, heads, group, tokens, words, shares, stripes;
};

typedef void (*Kernel)(
    const float*, Strides, const uint32_t*, Strides, const __half*, Strides, const float*, const uint32_t*, Strides,
    const __half*, Strides, const float*, const float*, Strides, const float*, Strides, const int*, const int*, const float*,
    const int*, float*, float*);

template <int KIND, int BITS>
static Kernel of() {
  return &attend<KIND, BITS, KIND, BITS, DIMS, DIMS, BITS, 0, BITS, 0, 4>;
}

static Kernel find(int kind, int bits) {
  switch (10 * kind + bits) {
    case 12: return of<TM_UNIFORM, 2>();
    case 13: return of<TM_UNIFORM, 3>();
    case 14: return of<TM_UNIFORM, 4>();
    case 18: return of<TM_UNIFORM, 8>();
    case 22: return of<TM_MIRRORED, 2>();
    case 23: return of<TM_MIRRORED, 3>();
    case 24: return of<TM_MIRRORED, 4>();
    case 28: return of<TM_MIRRORED, 8>();
    case 41: return of<TM_TRELLIS8, 1>();
    case 42: return of<TM_TRELLIS8, 2>();
    case 43: return of<TM_TRELLIS8, 3>();
    case 44: return of<TM_TRELLIS8, 4>();
  }
  std::fprintf(stderr, "no kernel for kind %d of %d bits\n", kind, bits);
  std::exit(1);
}

// Everything of a call that lies on the device.
struct Call {
  Case c;
  std::vector<int> place_values;
  Buffer<float> queries, k_levels, v_levels, nothing, limits, part_sums, part_state, out, state;
  Buffer<uint32_t> k_words, v_words;
  Buffer<__half> k_scales, v_scales;
  Buffer<int> first, tokens, place, counts;

  Call(
      const Case& c, const std::vector<int>& place, const std::vector<float>& q, const std::vector<uint32_t>& kw,
      const std::vector<__half>& ks, const std::vector<uint32_t>& vw, const std::vector<__half>& vs,
      const std::vector<float>& levels)
      : c(c), place_values(place), queries(q), k_levels(levels), v_levels(levels), nothing(std::vector<float>(1, 0.0f)),
        limits(std::vector<float>(2, 0.0f)), part_sums(rows() * c.shares * DIMS), part_state(rows() * c.shares * 2),
        out(rows() * DIMS), state(rows() * 2), k_words(kw), v_words(vw), k_scales(ks), v_scales(vs),
        first(std::vector<int>(c.batch, 0)), tokens(std::vector<int>(1, c.tokens)), place(place),
        counts(std::vector<int>{c.shares, 1, c.heads * c.group, 0, 1}) {}

  size_t rows() const { return size_t(c.batch) * c.heads * c.group; }

  void run() {
    const Kernel kernel = find(c.kind, c.bits);
    const long long h = c.heads, t = c.tokens, w = c.words, hq = h * c.group;
    Strides qs = {{hq * DIMS, DIMS, DIMS, 1, 0}}, ws = {{h * t * w, t * w, w, 1, 0}}, ss = {{h * t, t, 1, 1, 0}}, zero = {{0, 0, 0, 0, 0}};
    const int units = c.group / c.gqa;
    const dim3 grid(c.shares, c.heads, c.batch), block(32, units * c.stripes, 1);
    void* arguments[] = {&queries.data, &qs, &k_words.data, &ws, &k_scales.data, &ss, &k_levels.data, &v_words.data, &ws,
                         &v_scales.data, &ss, &v_levels.data, &nothing.data, &zero, &nothing.data, &zero, &first.data,
                         &tokens.data, &limits.data, &place.data, &part_sums.data, &part_state.data};
    CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, 0, nullptr));
    void* second[] = {&part_sums.data, &part_state.data, &nothing.data, &counts.data, &out.data, &state.data};
    void (*join)(const float*, const float*, const float*, const int*, float*, float*) = &merge<DIMS, float>;
    CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(join), dim3(unsigned(rows())), dim3(128), second, 0, nullptr));
  }
};

template <typename T>
static std::vector<T> take(FILE* file, size_t count) {
  std::vector<T> out(count);
  if (count > 0 && std::fread(out.data(), sizeof(T), count, file) != count) {
    std::fprintf(stderr, "the vectors end early\n");
    std::exit(1);
  }
  return out;
}

// Returns how many vectors were right; a wrong one ends the program.
static int check(const char* path) {
  FILE* file = std::fopen(path, "rb");
  if (file == nullptr) {
    std::fprintf(stderr, "%s cannot be opened\n", path);
    std::exit(1);
  }
  const int cases = take<int>(file, 1)[0];
  for (int n = 0; n < cases; ++n) {
    const std::vector<int> values = take<int>(file, 11), place = take<int>(file, 10), sizes = take<int>(file, 5);
    const Case c = {values[0], values[1], values[10], 1, sizes[0], sizes[1], sizes[2], sizes[3], place[1], place[2]};
    const size_t rows = size_t(c.heads) * c.tokens;
    const auto q = take<float>(file, size_t(c.heads) * c.group * DIMS);
    const auto kw = take<uint32_t>(file, rows * c.words);
    const auto ks = take<__half>(file, rows);
    const auto vw = take<uint32_t>(file, rows * c.words);
    const auto vs = take<__half>(file, rows);
    const auto levels = take<float>(file, sizes[4]);
    const auto want = take<float>(file, q.size());
    Call call(c, place, q, kw, ks, vw, vs, levels);
    call.run();
    const auto got = call.out.host();
    float largest = 0.0f;
    for (float x : want) largest = std::fmax(largest, std::fabs(x));
    for (size_t i = 0; i < want.size(); ++i) {
      if (!(std::fabs(got[i] - want[i]) <= 1e-3f * largest)) {
        std::fprintf(stderr, "kind %d of %d bits: channel %zu is %g, wanted %g\n", c.kind, c.bits, i, got[i], want[i]);
        std::exit(1);
      }
    }
  }
  std::fclose(file);
  return cases;
}

// Milliseconds of the fastest of some runs.
template <typename F>
static float time(F run) {
  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  float best = 1e30f;
  for (int i = 0; i < 12; ++i) {
    CHECK(cudaEventRecord(start, nullptr));
    run();
    CHECK(cudaEventRecord(stop, nullptr));
    CHECK(cudaEventSynchronize(stop));
    float ms = 0.0f;
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2 && ms < best) best = ms;
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  return best;
}

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "bench VECTORS [SDPA]\n");
    return 2;
  }
  const int right = check(arguments[1]);
  std::map<std::pair<int, int>, double> sdpa;
  if (FILE* file = count > 2 ? std::fopen(arguments[2], "r") : nullptr) {
    int batch, tokens;
    double ms;
    while (std::fscanf(file, "%d %d %lf", &batch, &tokens, &ms) == 3) sdpa[{batch, tokens}] = ms;
    std::fclose(file);
  }
  const size_t large = size_t(1) << 30;
  Buffer<char> from(large), to(large);
  const float copy = time([&] { CHECK(cudaMemcpyAsync(to.data, from.data, large, cudaMemcpyDeviceToDevice, nullptr)); });
  const double bandwidth = 2.0 * double(large) / copy / 1e6;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s: %d vectors of the row form are right. A copy moves %.0f GB/s.\n\n", properties.name, right, bandwidth);
  std::printf("| batch | tokens | bits | ms | GB/s of packed bytes | of a copy | fp16 SDPA ms | x fp16 |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  uint32_t seed = 1;
  for (int batch : {1, 8}) {
    for (int tokens = 2048; tokens <= 262144; tokens *= 2) {
      for (int bits : {2, 3, 4, 8}) {
        // The rule of src/engine/mlx/kernels/plan.rs for one query token and four query heads a KV head: tiles of eight tokens, two a stripe.
        const int heads = 8, group = 4, words = DIMS * bits / 32, stripes = 8;
        const int fill = 1024 / (batch * heads), by_tokens = (tokens + 16 * stripes - 1) / (16 * stripes);
        const int shares = by_tokens < fill ? by_tokens : fill;
        const Case c = {TM_UNIFORM, bits, 4, batch, heads, group, tokens, words, shares < 1024 ? shares : 1024, stripes};
        const std::vector<int> place = {1, c.shares, stripes, 1, tokens - 1, 0, 1, 0, 1, 1};
        const size_t rows = size_t(batch) * heads * tokens;
        std::vector<uint32_t> packed(rows * words);
        for (uint32_t& word : packed) word = seed = seed * 1664525u + 1013904223u;
        const std::vector<__half> scales(rows, __half(1.0f));
        std::vector<float> q(size_t(batch) * heads * group * DIMS);
        for (float& x : q) x = float(seed = seed * 1664525u + 1013904223u) / 4294967296.0f - 0.5f;
        Call call(c, place, q, packed, scales, packed, scales, std::vector<float>(1, 0.3f));
        const float ms = time([&] { call.run(); });
        const double bytes = 2.0 * double(rows) * (4.0 * words + 2.0), speed = bytes / ms / 1e6;
        std::printf("| %d | %d | %d | %.3f | %.0f | %.0f %% |", batch, tokens, bits, ms, speed, 100.0 * speed / bandwidth);
        const auto other = sdpa.find({batch, tokens});
        if (other == sdpa.end()) {
          std::printf(" not run | |\n");
        } else {
          std::printf(" %.3f | %.2f |\n", other->second, other->second / ms);
        }
      }
    }
  }
  return 0;
}
