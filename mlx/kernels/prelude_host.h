// The words of the kernel texts in C++, and a machine that runs threadgroups as a GPU does: a test bench, not an engine.
//
// Every thread is a fibre. A simdgroup runs in lock step: an operation across lanes waits for all 32, and a barrier for the whole
// threadgroup; lanes that meet in different lines, or not at all, are an error. Buffers know their ends, arrays of the threadgroup
// know who wrote an entry and when: reading what no one wrote, or what another thread wrote or will write before the next barrier,
// is an error, so a missing barrier is found in any order of execution. What is wrong ends the process with a line on stderr.

#ifdef __APPLE__
#define _XOPEN_SOURCE 700
#define _DARWIN_C_SOURCE
#endif
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

typedef unsigned int uint;
typedef int64_t tm_index;

namespace host {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "kernel bench: %s\n", what.c_str());
  std::fflush(stderr);
  std::_Exit(3);
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// IEEE half and bfloat16 as stored bits, converted with ties to even.
struct Half {
  uint16_t bits;
  Half() = default;
  static Half of(uint16_t bits) {
    Half half;
    half.bits = bits;
    return half;
  }
  explicit Half(float x) {
    const uint32_t b = to_bits(x), sign = b >> 16 & 0x8000, rest = b & 0x7fffffff;
    if (rest > 0x7f800000) {
      bits = uint16_t(sign | 0x7e00);
    } else if (rest >= 0x477ff000) {
      bits = uint16_t(sign | 0x7c00);
    } else if (rest < 0x38800000) {
      bits = uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(from_bits(rest), 24))));
    } else {
      bits = uint16_t(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
    }
  }
  operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31  ? (fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity())
                       : exponent == 0 ? std::ldexp(float(fraction), -24)
                                       : std::ldexp(float(fraction + 1024), exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
  }
};

struct Bfloat {
  uint16_t bits;
  Bfloat() = default;
  explicit Bfloat(float x) {
    const uint32_t b = to_bits(x);
    bits = x != x ? 0x7fc0 : uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
  }
  operator float() const { return from_bits(uint32_t(bits) << 16); }
};

struct Uint3 {
  uint x, y, z;
};

enum class Wait { none, lanes, barrier, done };
enum class Op { sum, max, min, shuffle, shuffle_xor, ballot };

// One thread of the running threadgroup.
struct Fibre {
  ucontext_t start;
  jmp_buf here;
  bool started = false;
  Wait wait = Wait::none;
  int line = 0;
  Op op = Op::sum;
  uint32_t in = 0, out = 0;
  int argument = 0;
};

// An array of the threadgroup, with what is known of every entry since the last barrier.
struct Memory {
  std::vector<uint32_t> data;
  // -1: no one; -2: several.
  std::vector<int> writer, reader;
  std::vector<long> written, read;
};

struct Machine {
  static constexpr int width = 32;
  Uint3 group_size, group_at, groups;
  std::vector<Fibre> fibres;
  std::vector<std::vector<char>> stacks;
  std::vector<std::pair<const char*, Memory*>> shared;
  void (*body)(void*) = nullptr;
  void* context = nullptr;
  jmp_buf scheduler;
  int self = 0;
  // Counts barriers.
  long epoch = 0;

  static Machine& get() {
    static Machine machine;
    return machine;
  }

  static void enter() {
    Machine& m = get();
    m.body(m.context);
    m.fibres[m.self].wait = Wait::done;
    _longjmp(m.scheduler, 1);
  }

  // The array of this name, made by the first thread that asks.
  Memory* array(const char* name) {
    for (const auto& known : shared) {
      if (std::strcmp(known.first, name) == 0) return known.second;
    }
    shared.emplace_back(name, new Memory());
    return shared.back().second;
  }

  // Gives the turn to the scheduler until what the thread waits for has come.
  void pause(Wait wait, int line) {
    Fibre& f = fibres[self];
    f.wait = wait;
    f.line = line;
    if (_setjmp(f.here) == 0) _longjmp(scheduler, 1);
  }

  // macOS still has these three functions but calls them deprecated; there is no other portable way to give a fibre its stack.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  static void start_on(ucontext_t& start, std::vector<char>& stack) {
    getcontext(&start);
    start.uc_stack.ss_sp = stack.data();
    start.uc_stack.ss_size = stack.size();
    start.uc_link = nullptr;
    makecontext(&start, &Machine::enter, 0);
    setcontext(&start);
  }
#pragma GCC diagnostic pop

  void resume(int i) {
    self = i;
    if (_setjmp(scheduler) == 0) {
      Fibre& f = fibres[i];
      if (f.started) _longjmp(f.here, 1);
      f.started = true;
      start_on(f.start, stacks[i]);
    }
  }

  uint32_t across(Op op, uint32_t in, int argument, int line) {
    Fibre& f = fibres[self];
    f.op = op;
    f.in = in;
    f.argument = argument;
    pause(Wait::lanes, line);
    return fibres[self].out;
  }

  void combine(int first) {
    Fibre* lanes = &fibres[first];
    for (int i = 1; i < width; ++i) {
      if (lanes[i].op != lanes[0].op || lanes[i].argument != lanes[0].argument) fail("lanes meet in different operations in line " + std::to_string(lanes[0].line));
    }
    uint32_t all = 0;
    float tree[width];
    uint32_t least = 0xffffffffu;
    float most = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < width; ++i) {
      tree[i] = from_bits(lanes[i].in);
      most = tree[i] > most ? tree[i] : most;
      least = lanes[i].in < least ? lanes[i].in : least;
      if (lanes[i].op == Op::ballot) all |= lanes[i].in << i;
    }
    for (int half = width / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) tree[i] += tree[i + half];
    }
    for (int i = 0; i < width; ++i) {
      switch (lanes[i].op) {
        case Op::sum: lanes[i].out = to_bits(tree[0]); break;
        case Op::max: lanes[i].out = to_bits(most); break;
        case Op::min: lanes[i].out = least; break;
        case Op::shuffle: lanes[i].out = lanes[lanes[i].argument].in; break;
        case Op::shuffle_xor: lanes[i].out = lanes[i ^ lanes[i].argument].in; break;
        case Op::ballot: lanes[i].out = all; break;
      }
      lanes[i].wait = Wait::none;
    }
  }

  void run_group() {
    const int threads = int(group_size.x * group_size.y * group_size.z);
    if (threads % width != 0 || threads > 1024) fail("a threadgroup of " + std::to_string(threads) + " threads");
    while (int(stacks.size()) < threads) stacks.emplace_back(64 << 10);
    fibres.assign(threads, Fibre());
    for (const auto& array : shared) delete array.second;
    shared.clear();
    epoch = 0;
    for (;;) {
      int waiting = 0, done = 0;
      for (int first = 0; first < threads; first += width) {
        for (;;) {
          int asking = 0;
          for (int i = first; i < first + width; ++i) {
            if (fibres[i].wait == Wait::none) resume(i);
            asking += fibres[i].wait == Wait::lanes;
          }
          if (asking == 0) break;
          for (int i = first; i < first + width; ++i) {
            if (asking != width || fibres[i].line != fibres[first].line) fail("an operation across lanes that some lanes do not reach, line " + std::to_string(fibres[i].line));
          }
          combine(first);
        }
        for (int i = first; i < first + width; ++i) {
          waiting += fibres[i].wait == Wait::barrier;
          done += fibres[i].wait == Wait::done;
        }
      }
      if (done == threads) return;
      if (waiting != threads) fail("a barrier that some threads do not reach");
      for (Fibre& f : fibres) {
        if (f.line != fibres[0].line) fail("threads wait at different barriers, lines " + std::to_string(f.line) + " and " + std::to_string(fibres[0].line));
        f.wait = Wait::none;
      }
      ++epoch;
    }
  }

  // Runs `grid` threads in groups of `group`; as on the GPU the grid counts threads.
  template <typename F>
  void run(Uint3 grid, Uint3 group, F kernel) {
    body = [](void* f) { (*static_cast<F*>(f))(); };
    context = &kernel;
    group_size = group;
    if (grid.x % group.x != 0 || grid.y % group.y != 0 || grid.z % group.z != 0) fail("a grid that is no multiple of its threadgroup");
    groups = {grid.x / group.x, grid.y / group.y, grid.z / group.z};
    for (group_at.z = 0; group_at.z < groups.z; ++group_at.z) {
      for (group_at.y = 0; group_at.y < groups.y; ++group_at.y) {
        for (group_at.x = 0; group_at.x < groups.x; ++group_at.x) run_group();
      }
    }
  }
};

// An entry of an array of the threadgroup.
template <typename T>
struct Cell {
  Memory& memory;
  const char* name;
  tm_index i;

  [[noreturn]] void wrong(const char* what) const {
    fail(std::string(name) + "[" + std::to_string(i) + "] " + what);
  }
  operator T() const {
    const Machine& m = Machine::get();
    if (memory.writer[i] == -1) wrong("is read before it is written");
    if (memory.written[i] == m.epoch && memory.writer[i] != m.self) wrong("is read without a barrier after another thread's write");
    memory.reader[i] = memory.read[i] != m.epoch || memory.reader[i] == m.self ? m.self : -2;
    memory.read[i] = m.epoch;
    T x;
    std::memcpy(&x, &memory.data[i], 4);
    return x;
  }
  Cell& operator=(T x) {
    const Machine& m = Machine::get();
    if (memory.written[i] == m.epoch && memory.writer[i] != m.self) wrong("is written by two threads without a barrier");
    if (memory.read[i] == m.epoch && memory.reader[i] != m.self) wrong("is written without a barrier after another thread's read");
    memory.writer[i] = m.self;
    memory.written[i] = m.epoch;
    std::memcpy(&memory.data[i], &x, 4);
    return *this;
  }
  Cell& operator=(const Cell& other) { return *this = T(other); }
};

template <typename T>
struct Shared {
  static_assert(sizeof(T) == 4, "entries of four bytes");
  const char* name;
  Memory* memory;
  tm_index from;

  Shared operator+(tm_index n) const {
    Shared moved = *this;
    moved.from += n;
    return moved;
  }
  Shared() : name(nullptr), memory(nullptr), from(0) {}
  Shared(const char* name, size_t count) : name(name), memory(Machine::get().array(name)), from(0) {
    if (memory->data.empty()) {
      memory->data.assign(count, 0xffbadbad);
      memory->writer.assign(count, -1);
      memory->reader.assign(count, -1);
      memory->written.assign(count, -1);
      memory->read.assign(count, -1);
    }
  }
  Cell<T> operator[](tm_index at) const {
    const tm_index i = from + at;
    if (i < 0 || i >= tm_index(memory->data.size())) fail(std::string(name) + "[" + std::to_string(i) + "] of " + std::to_string(memory->data.size()));
    return Cell<T>{*memory, name, i};
  }
};

// An input.
template <typename T>
struct In {
  const char* name = nullptr;
  const T* data = nullptr;
  tm_index count = 0, from = 0;
  T operator[](tm_index i) const {
    if (from + i < 0 || from + i >= count) fail(std::string(name) + "[" + std::to_string(from + i) + "] of " + std::to_string(count));
    return data[from + i];
  }
  In operator+(tm_index n) const { return {name, data, count, from + n}; }
};

// An output; every element is written once.
template <typename T>
struct Out {
  const char* name;
  T* data;
  char* set;
  tm_index count;
  struct Slot {
    const Out& out;
    tm_index i;
    void operator=(T x) const {
      if (out.set[i] != 0) fail(std::string(out.name) + "[" + std::to_string(i) + "] is written twice");
      out.set[i] = 1;
      out.data[i] = x;
    }
  };
  Slot operator[](tm_index i) const {
    if (i < 0 || i >= count) fail(std::string(name) + "[" + std::to_string(i) + "] of " + std::to_string(count));
    return Slot{*this, i};
  }
};

inline uint32_t pack(float x) { return to_bits(x); }
inline uint32_t pack(uint x) { return x; }

}  // namespace host

typedef host::Half tm_half;

#define TM_INLINE inline
#define TM_UNROLL
#define TM_LOOP
#define TM_OUT(T) host::Out<T>
#define TM_SHARED(T, name, count) const host::Shared<T> name(#name, count)
#define TM_BARRIER() host::Machine::get().pause(host::Wait::barrier, __LINE__)
#define TM_SCALAR(name) (name[0])

#define TM_INF (std::numeric_limits<float>::infinity())
#define TM_NAN (std::numeric_limits<float>::quiet_NaN())

#define tm_exp(x) std::exp(x)
#define tm_exp2(x) std::exp2(x)
#define tm_log2(x) std::log2(x)
#define tm_sqrt(x) std::sqrt(x)
#define tm_tanh(x) std::tanh(x)
#define tm_rint(x) std::nearbyint(x)
#define tm_floor(x) std::floor(x)
#define tm_greater(a, b) std::fmax(a, b)
#define tm_least(a, b) std::min<uint>(a, b)
#define tm_funnel(low, high, shift) (((low) >> (shift)) | (((high) << 1) << (31u - (shift))))

#define tm_bits_of(x) host::to_bits(x)
#define tm_float_of(bits) host::from_bits(bits)
#define tm_half_bits(h) uint((h).bits)
#define tm_half_of(code) host::Half::of(uint16_t(code))

#define tm_sum(x) host::from_bits(host::Machine::get().across(host::Op::sum, host::pack(float(x)), 0, __LINE__))
#define tm_max(x) host::from_bits(host::Machine::get().across(host::Op::max, host::pack(float(x)), 0, __LINE__))
#define tm_min(x) host::Machine::get().across(host::Op::min, host::pack(uint(x)), 0, __LINE__)
#define tm_shuffle_xor(x, mask) host::from_bits(host::Machine::get().across(host::Op::shuffle_xor, host::pack(float(x)), mask, __LINE__))
#define tm_shuffle(x, from) host::from_bits(host::Machine::get().across(host::Op::shuffle, host::pack(float(x)), from, __LINE__))
#define tm_ballot(x, lane) host::Machine::get().across(host::Op::ballot, uint(bool(x)), 0, __LINE__)

#define thread_index_in_simdgroup uint(host::Machine::get().self % 32)
#define simdgroup_index_in_threadgroup uint(host::Machine::get().self / 32)
#define threadgroup_position_in_grid host::Machine::get().group_at
#define threadgroups_per_grid host::Machine::get().groups
