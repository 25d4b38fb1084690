// Reads calls of kernels from the first file, runs them, and writes their outputs to the second. All numbers are little-endian.

#include <fstream>

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
    return {name, reinterpret_cast<const T*>(a.bytes.data()), tm_index(a.count)};
  }
  host::In<int64_t> strides(int i, const char* name) const {
    return {name, inputs[i].strides.data(), tm_index(inputs[i].strides.size())};
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
std::map<std::string, Kernel> kernels();

template <typename T>
T take(std::ifstream& file) {
  T x;
  file.read(reinterpret_cast<char*>(&x), sizeof x);
  if (!file) host::fail("the calls end early");
  return x;
}

int main(int, char** arguments) {
  std::ifstream file(arguments[1], std::ios::binary);
  std::ofstream results(arguments[2], std::ios::binary);
  const std::map<std::string, Kernel> known = kernels();
  const uint32_t calls = take<uint32_t>(file);
  for (uint32_t n = 0; n < calls; ++n) {
    Call call;
    call.key.resize(take<uint32_t>(file));
    file.read(&call.key[0], std::streamsize(call.key.size()));
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
      file.read(a.bytes.data(), std::streamsize(a.bytes.size()));
    }
    call.outputs.resize(take<uint32_t>(file));
    for (Argument& a : call.outputs) a.count = take<uint64_t>(file);
    const auto kernel = known.find(call.key);
    if (kernel == known.end()) host::fail("no kernel " + call.key);
    kernel->second(call);
    for (const Argument& a : call.outputs) {
      for (size_t i = 0; i < a.set.size(); ++i) {
        if (a.set[i] == 0) host::fail(call.key + " leaves element " + std::to_string(i) + " of an output unwritten");
      }
      results.write(a.bytes.data(), std::streamsize(a.bytes.size()));
    }
  }
  return results.flush() ? 0 : 4;
}
