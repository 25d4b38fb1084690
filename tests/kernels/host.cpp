// Reads calls of kernels from the first file, runs them, and writes their outputs to the second. All numbers are little-endian.

struct Argument {
  uint32_t element = 0;
  std::vector<int64_t> strides;
  uint64_t count = 0;
  std::vector<char> bytes;
  std::vector<char> set;
};

struct Call {
  std::string key;
  host::Uint3 grid, group;
  std::vector<Argument> inputs, outputs;

  template <typename T>
  host::In<T> in(int i, const char* name) const {
    const Argument& a = inputs[i];
    if (a.bytes.size() != a.count * sizeof(T)) host::fail(std::string(name) + " has another element type");
    return {name, reinterpret_cast<const T*>(a.bytes.data()), tm_index(a.count), 0};
  }
  host::In<int64_t> strides(int i, const char* name) const {
    return {name, inputs[i].strides.data(), tm_index(inputs[i].strides.size()), 0};
  }
  template <typename T>
  host::Out<T> out(int i, const char* name) {
    Argument& a = outputs[i];
    a.bytes.assign(a.count * sizeof(T), 0);
    a.set.assign(a.count, 0);
    return {name, reinterpret_cast<T*>(a.bytes.data()), a.set.data(), tm_index(a.count)};
  }
};

typedef void (*Kernel)(Call&);
std::vector<std::pair<std::string, Kernel>> kernels();

void take(FILE* file, void* to, size_t bytes) {
  if (bytes > 0 && std::fread(to, bytes, 1, file) != 1) host::fail("the calls end early");
}

template <typename T>
T take(FILE* file) {
  T x;
  take(file, &x, sizeof x);
  return x;
}

int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "rb");
  FILE* results = std::fopen(arguments[2], "wb");
  if (file == nullptr || results == nullptr) host::fail("a file cannot be opened");
  const auto known = kernels();
  const uint32_t calls = take<uint32_t>(file);
  for (uint32_t n = 0; n < calls; ++n) {
    Call call;
    call.key.resize(take<uint32_t>(file));
    take(file, &call.key[0], call.key.size());
    for (host::Uint3* size : {&call.grid, &call.group}) {
      size->x = take<uint32_t>(file);
      size->y = take<uint32_t>(file);
      size->z = take<uint32_t>(file);
    }
    call.inputs.resize(take<uint32_t>(file));
    for (Argument& a : call.inputs) {
      a.strides.resize(take<uint32_t>(file));
      for (int64_t& s : a.strides) s = take<int64_t>(file);
      a.count = take<uint64_t>(file);
      a.bytes.resize(take<uint64_t>(file));
      take(file, a.bytes.data(), a.bytes.size());
    }
    call.outputs.resize(take<uint32_t>(file));
    for (Argument& a : call.outputs) a.count = take<uint64_t>(file);
    Kernel kernel = nullptr;
    for (const auto& k : known) {
      if (k.first == call.key) kernel = k.second;
    }
    if (kernel == nullptr) host::fail("no kernel " + call.key);
    kernel(call);
    for (const Argument& a : call.outputs) {
      for (size_t i = 0; i < a.set.size(); ++i) {
        if (a.set[i] == 0) host::fail(call.key + " leaves element " + std::to_string(i) + " of an output unwritten");
      }
      if (!a.bytes.empty() && std::fwrite(a.bytes.data(), a.bytes.size(), 1, results) != 1) host::fail("no room for results");
    }
  }
  return std::fclose(results) == 0 ? 0 : 4;
}
