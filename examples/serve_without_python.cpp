// A sparse layer computed in C++, without Python or torch: y = x W^T + bias.
//
//   g++ -std=c++17 -O2 -I csrc examples/serve_without_python.cpp -ldl -o serve
//   ./serve LIBRARY FILE LAYER < x.bin > y.bin
//
// LIBRARY is what `dynsparse.integrations.onnxruntime.library()` names, FILE one of
// `ds.save_safetensors` with float32 values, LAYER a name in it such as 0. x.bin holds float32
// samples of in_features each, y.bin gets those of out_features.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "api.h"

[[noreturn]] void fail(const std::string& message) {
  std::cerr << message << "\n";
  std::exit(1);
}

// The integers after `key`, which must be in `text`.
std::vector<int64_t> numbers_after(const std::string& text, const std::string& key, size_t count) {
  size_t at = text.find(key);
  if (at == std::string::npos) fail("the file has no " + key);
  std::vector<int64_t> numbers;
  for (const char* p = text.c_str() + at + key.size(); numbers.size() < count && *p;) {
    char* end = nullptr;
    const int64_t number = std::strtoll(p, &end, 10);
    if (end != p) numbers.push_back(number);
    p = end == p ? p + 1 : end;
  }
  if (numbers.size() < count) fail("the file ends after " + key);
  return numbers;
}

// A safetensors file: the length of the header, the header in JSON, the data of all tensors.
struct File {
  std::string header;
  std::vector<char> data;

  explicit File(const char* path) {
    std::ifstream file(path, std::ios::binary);
    uint64_t size = 0;
    if (!file.read(reinterpret_cast<char*>(&size), sizeof size) || size > (1 << 26))
      fail(std::string("cannot read ") + path);
    header.resize(size);
    file.read(header.data(), static_cast<std::streamsize>(size));
    data.assign(std::istreambuf_iterator<char>(file), {});
  }
  bool has(const std::string& name) const {
    return header.find("\"" + name + "\":") != std::string::npos;
  }
  template <class T>
  std::vector<T> tensor(const std::string& name) const {
    const size_t at = header.find("\"" + name + "\":");
    if (at == std::string::npos) fail("the file has no tensor " + name);
    const auto ends = numbers_after(header.substr(at), "\"data_offsets\":", 2);
    if (ends[0] < 0 || ends[1] < ends[0] || ends[1] > static_cast<int64_t>(data.size()))
      fail("the file is truncated");
    std::vector<T> values((ends[1] - ends[0]) / sizeof(T));
    std::memcpy(values.data(), data.data() + ends[0], values.size() * sizeof(T));
    return values;
  }
};

int main(int count, char** arguments) {
  if (count != 4) fail("usage: serve LIBRARY FILE LAYER < x.bin > y.bin");
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail(dlerror());
  const auto product = reinterpret_cast<decltype(&dynsparse_linear_forward)>(
      dlsym(library, "dynsparse_linear_forward"));
  if (!product) fail(dlerror());

  const File file(arguments[2]);
  const std::string name = arguments[3];
  const auto sizes = numbers_after(file.header, "\\\"" + name + "\\\": {\\\"shape\\\": ", 3);
  const int64_t out = sizes[0], in = sizes[1], block = sizes[2], width = in / block;
  const auto values = file.tensor<float>(name + ".values");
  const auto bias =
      file.has(name + ".bias") ? file.tensor<float>(name + ".bias") : std::vector<float>();

  // The pattern: row_ptr and cols of its blocks, in row-major order.
  std::vector<int32_t> row_ptr(out / block + 1), cols;
  const auto take = [&](int64_t position) {
    if (position >= out / block * width) fail("the pattern does not fit");
    row_ptr[position / width + 1]++;
    cols.push_back(static_cast<int32_t>(position % width));
  };
  if (file.has(name + ".gaps")) {
    int64_t position = 0;
    for (uint8_t gap : file.tensor<uint8_t>(name + ".gaps")) {
      position += gap;
      if (gap != 255) take(position++);
    }
  } else {
    const auto mask = file.tensor<uint8_t>(name + ".mask");
    for (size_t i = 0; i < 8 * mask.size(); i++)
      if (mask[i / 8] >> (i % 8) & 1) take(static_cast<int64_t>(i));
  }
  for (size_t row = 1; row < row_ptr.size(); row++) row_ptr[row] += row_ptr[row - 1];
  if (cols.size() * block * block != values.size()) fail("the pattern does not fit the values");

  const std::string bytes{std::istreambuf_iterator<char>(std::cin), {}};
  const int64_t batch = static_cast<int64_t>(bytes.size() / sizeof(float)) / in;
  std::vector<float> x(batch * in), y(batch * out);
  std::memcpy(x.data(), bytes.data(), x.size() * sizeof(float));
  if (product(x.data(), in, 1, values.data(), row_ptr.data(), cols.data(), nullptr, nullptr,
              bias.empty() ? nullptr : bias.data(), y.data(), batch, out, in, block, 1))
    fail("out of memory");
  std::fwrite(y.data(), sizeof(float), y.size(), stdout);
}
